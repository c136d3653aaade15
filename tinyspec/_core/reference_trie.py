"""The twin of trie.pyx: an n-gram index over several growing texts, in dictionaries.

For every n-gram of up to max_n tokens the index has the places where it was continued, in the order
in which they were appended. A place is (text, position of the continuing token).
"""

from collections.abc import Iterable, Sequence
from operator import index

from tinyspec._core.limits import MAX_NGRAM, check_range, read_ids, read_int
from tinyspec.errors import TinyspecError

WHICH = ("first", "last", "frequent")


class NgramIndex:
    """Find where the last tokens occurred before, and what came next.

    >>> index = NgramIndex(max_n=3)
    >>> index.append(0, [1, 2, 3, 9, 1, 2, 4])
    >>> index.lookup([7, 1, 2], k=2, which="first"), index.lookup([7, 1, 2], k=2, which="last")
    ([3, 9], [4])
    """

    def __init__(self, max_n: int) -> None:
        if max_n < 1:
            raise TinyspecError(f"an n-gram index needs max_n >= 1, got {max_n}")
        check_range("max_n", max_n, 1, MAX_NGRAM)
        self.max_n = read_int(max_n)
        self._texts: dict[int, list[int]] = {}
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def length(self, text: int) -> int:
        """Return the number of tokens of a text; 0 for an unknown one."""
        return len(self._texts.get(text, ()))

    def append(self, text: int, tokens: Iterable[int]) -> None:
        """Append tokens to a text, all or none. O(max_n) for each."""
        tokens = read_ids(tokens)
        line = self._texts.setdefault(index(text), [])
        for token in tokens:
            end = len(line)
            for n in range(1, min(self.max_n, end) + 1):
                self._places.setdefault(tuple(line[end - n : end]), []).append((text, end))
            line.append(token)

    def rewind(self, text: int, length: int) -> None:
        """Forget a text after its first `length` tokens."""
        line = self._texts.get(text, [])
        if not 0 <= length <= len(line):
            raise TinyspecError(f"cannot rewind text {text} of {len(line)} tokens to {length}")
        while len(line) > length:
            end = len(line) - 1
            for n in range(1, min(self.max_n, end) + 1):
                self._places[tuple(line[end - n : end])].remove((text, end))
            line.pop()

    def lookup(
        self,
        suffix: Sequence[int],
        k: int,
        max_n: int | None = None,
        min_n: int = 1,
        which: str = "last",
    ) -> list[int]:
        """Return up to k tokens that followed the longest known n-gram at the end of `suffix`.

        n is from min_n to max_n; [] if no n-gram is known. Of its occurrences, `which` names the
        first or the last appended, or the last of those with the most frequent next token (of
        equals, the lowest id). A continuation never crosses the end of its text.
        """
        if which not in WHICH:
            raise TinyspecError(f"which is one of {', '.join(WHICH)}, got '{which}'")
        max_n = self.max_n if max_n is None else max_n
        if not 1 <= min_n <= max_n <= self.max_n:
            raise TinyspecError(
                f"an index of {self.max_n}-grams needs 1 <= min_n <= max_n, got {min_n} and {max_n}"
            )
        suffix, k = read_ids(suffix[-max_n:]), read_int(k)
        suffix = list(suffix)
        for n in range(min(max_n, len(suffix)), min_n - 1, -1):
            places = self._places.get(tuple(suffix[len(suffix) - n :]))
            if places:
                text, start = places[0] if which == "first" else places[-1]
                if which == "frequent":
                    following = [self._texts[t][i] for t, i in places]
                    best = max(set(following), key=lambda token: (following.count(token), -token))
                    text, start = places[
                        max(i for i, token in enumerate(following) if token == best)
                    ]
                return self._texts[text][start : start + max(k, 0)]
        return []
