"""The model that a submission to A1 is given: a few words, and a session that keeps a cache.

The cache is the text that the model has read. Its rows depend on all of the text. So a token that
was rejected and still stands in the cache changes every row after it.

A child process loads this file: it imports the standard library and `child` alone.
"""

from collections.abc import Sequence
from fractions import Fraction

from tinyspec.grade.child import Prop, require_whole

MAX_CALLS = 100  # of one run: a function that needs more is not going to stop
MAX_TOKENS = 50  # in a cache, for the same reason


def find_row(
    rows: Sequence[Sequence[Fraction]], by: str, text: Sequence[int]
) -> Sequence[Fraction]:
    """Return the row that follows a text, which is not empty; `by` as for a Session."""
    if by == "length":
        return rows[min(len(text), len(rows)) - 1]
    if by == "last":
        return rows[text[-1]]
    number = 0
    for token in text:
        number = number * len(rows[0]) + token + 1
    return rows[number % len(rows)]


class Session(Prop):
    """A model and its cache, which is empty at first; `len(session)` is its number of tokens.

    rows   the model's rows, [V] weights each (Fractions from 0 on, not all 0, which need not add up
           to one)
    by     which row follows a text:
           "length"  that of its length: rows[len(text) - 1], the last one after longer texts
           "last"    that of its last token: rows[text[-1]]
           "text"    every text has its own, as long as there are enough of them: with n = 0, then n
                     = V n + token + 1 for each token of the text, rows[n % len(rows)]

    The trace has an entry for every call: ("score", cache before, tokens) or ("rewind", cache
    before, length).

    >>> model = Session([[Fraction(1), Fraction(3)], [Fraction(2), Fraction(2)]])
    >>> [[str(x) for x in row] for row in model.score([0, 1])], len(model)
    ([['1', '3'], ['2', '2']], 2)
    >>> model.rewind(1)
    >>> len(model)
    1
    >>> model.rewind(5)
    Traceback (most recent call last):
    ValueError: rewind(5): the cache holds 1 token, and a rewind only takes tokens away
    """

    _limit = MAX_CALLS
    _overrun = f"the session was asked {MAX_CALLS} things"

    def __init__(self, rows: Sequence[Sequence[Fraction]], by: str = "length"):
        super().__init__(rows=[list(row) for row in rows], by=by)
        self._rows, self._by = self.made_of["rows"], by
        self._cache: list[int] = []

    def __len__(self) -> int:
        return len(self._cache)

    def score(self, tokens: Sequence[int]) -> list[list[Fraction]]:
        """Run one forward pass: read tokens after the cache, where they stand from then on.

        Return a row [V] for each token: the weights of the token that follows it. Raises ValueError
        for no tokens, and for one that is not in the vocabulary.
        """
        if not isinstance(tokens, (list, tuple)) or not tokens:
            given = f"got {tokens!r}, and its cache is {self._cache}"
            raise ValueError(f"score needs a list of at least one token: {given}")
        for token in tokens:
            require_whole(token, "a token", 0, len(self._rows[0]) - 1)
        self.note("score", list(self._cache), list(tokens))
        if len(self._cache) + len(tokens) > MAX_TOKENS:
            raise ValueError(
                f"the cache has room for {MAX_TOKENS} tokens: the function is not going to stop"
            )
        rows = []
        for token in tokens:
            self._cache.append(token)
            rows.append(list(find_row(self._rows, self._by, self._cache)))
        return rows

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the cache and forget the others.

        Raises ValueError if there are fewer.
        """
        count = len(self._cache)
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= count:
            tokens = f"{count} token{'' if count == 1 else 's'}"
            raise ValueError(
                f"rewind({length!r}): the cache holds {tokens}, and a rewind only takes tokens away"
            )
        self.note("rewind", list(self._cache), length)
        del self._cache[length:]
