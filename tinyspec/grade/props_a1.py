"""The model that a submission to A1 is given: a few words, and a session that keeps a cache.

The cache is the text that the model has read. Its rows depend on all of the text. So a token that
was rejected and still stands in the cache changes every row after it.

A child process loads this file: it imports the standard library and `child` alone.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Self

from tinyspec.grade.child import Prop

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

    def __init__(self, rows: Sequence[Sequence[Fraction]], by: str = "length"):
        super().__init__()
        self._rows = [list(row) for row in rows]
        self._by = by
        self._cache: list[int] = []

    def plain(self) -> Any:
        return {"rows": [list(row) for row in self._rows], "by": self._by}

    @classmethod
    def make(cls, plain: Any) -> Self:
        return cls(**plain)

    def __len__(self) -> int:
        return len(self._cache)

    def score(self, tokens: Sequence[int]) -> list[list[Fraction]]:
        """Run one forward pass: read tokens after the cache, where they stand from then on.

        Return a row [V] for each token: the weights of the token that follows it. Raises ValueError
        for no tokens, and for one that is not in the vocabulary.
        """
        if not isinstance(tokens, (list, tuple)) or not tokens:
            raise ValueError(
                f"score needs a list of at least one token: got {tokens!r}, and its cache is {self._cache}"
            )
        vocabulary = len(self._rows[0])
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(
                    f"score was given {token!r}: a token is a whole number from 0 to {vocabulary - 1}"
                )
        self._remember("score", list(tokens))
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
        if (
            isinstance(length, bool)
            or not isinstance(length, int)
            or not 0 <= length <= len(self._cache)
        ):
            tokens = f"{len(self._cache)} token{'' if len(self._cache) == 1 else 's'}"
            raise ValueError(
                f"rewind({length!r}): the cache holds {tokens}, and a rewind only takes tokens away"
            )
        self._remember("rewind", length)
        del self._cache[length:]

    def _remember(self, what: str, given: Any) -> None:
        if len(self.trace) >= MAX_CALLS:
            raise ValueError(
                f"the session was asked {MAX_CALLS} things: the function is not going to stop"
            )
        self.note(what, list(self._cache), given)
