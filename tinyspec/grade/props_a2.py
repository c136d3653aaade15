"""The model that a submission to A2 is given: one attention layer with a mask and positions.

It believes what it is given. A row attends to whatever its mask shows, at whatever positions are
given: a wrong mask or a wrong position is no error but a wrong row, as in a real model.

A child process loads this file: it imports the standard library and `child` alone.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import compress
from typing import Any

from tinyspec.grade.child import Prop, require_whole

MAX_CALLS = 100  # of one run: a function that needs more is not going to stop
MAX_POSITION = 10_000


class TreeSession(Prop):
    """A model that has read all of `text` but its newest token. What is scored is not kept.

    Tokens 0 to V - 1. A row attends to what it sees. A token t_j at position s_j, seen from token
    t_i at position s_i, weighs

        (1 + (2 t_i + 3 t_j + seed) mod 5) / (1 + |s_i - s_j|)

    and has the value 1 + ((v + 1) (t_j + 2) + 3 s_j + seed) mod 7 for the word v as the next one.
    The weighted sum of the values, divided by its total, is the row.

    The trace has an entry for every call: [tokens, positions].

    The newest token stands at position 2, and sees all of the text:

    >>> session = TreeSession(text=[2, 0, 1], seed=1)
    >>> row, = session.score([1], [2], [[1, 1, 1]])
    >>> print(*row)
    48/121 69/242 7/22
    >>> session.score([1], [2], [[1, 1]])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: row 0 of the mask has 2 entries: it needs 3, for 2 tokens that were read ...
    """

    _limit = MAX_CALLS
    _overrun = f"the model ran {MAX_CALLS} forward passes"

    def __init__(self, text: Sequence[int], vocabulary: int = 3, seed: int = 0):
        super().__init__(text=list(text), vocabulary=vocabulary, seed=seed)
        self.text, self.vocabulary, self.seed = list(text), vocabulary, seed

    def score(
        self, tokens: Sequence[int], positions: Sequence[int], mask: Sequence[Sequence[Any]]
    ) -> list[list[Fraction]]:
        """Run one forward pass: k tokens at k positions give k rows of V probabilities.

        mask   [k][c + k]: which of the c = len(text) - 1 tokens that were read, and of the k that
               are fed, each row sees

        Raises ValueError if the three do not fit together, a token is not in the vocabulary, or a
        row sees nothing.
        """
        read = len(self.text) - 1
        for name, given in (("tokens", tokens), ("positions", positions), ("the mask", mask)):
            if not isinstance(given, (list, tuple)):
                raise ValueError(f"{name} must be a list: got {given!r}")
        if not tokens or not len(tokens) == len(positions) == len(mask):
            raise ValueError(
                "a forward pass needs as many positions and rows of the mask as tokens, at least "
                f"one: got {len(tokens)} tokens, {len(positions)} positions and {len(mask)} rows "
                "of the mask"
            )
        for token in tokens:
            require_whole(token, "a token", 0, self.vocabulary - 1)
        for position in positions:
            require_whole(position, "a position", 0, MAX_POSITION)
        for place, row in enumerate(mask):
            _check_mask_row(place, row, read, len(tokens))
        self.note(list(tokens), list(positions))
        words = [*self.text[:read], *tokens]
        places = [*range(read), *positions]
        pairs = list(zip(words, places, strict=True))
        return [
            self._row(token, position, list(compress(pairs, row)))
            for token, position, row in zip(tokens, positions, mask, strict=True)
        ]

    def _row(self, token: int, position: int, seen: Sequence[tuple[int, int]]) -> list[Fraction]:
        """Return the row of a token at a position that sees these (token, position) pairs."""
        sums = [Fraction(0)] * self.vocabulary
        for other, place in seen:
            near = 1 + abs(position - place)
            weight = Fraction(1 + (2 * token + 3 * other + self.seed) % 5, near)
            for word in range(self.vocabulary):
                sums[word] += weight * (1 + ((word + 1) * (other + 2) + 3 * place + self.seed) % 7)
        return [x / sum(sums) for x in sums]


def _check_mask_row(place: int, row: Any, read: int, fed: int) -> None:
    """Raise ValueError unless this is a row of a mask over so many columns."""
    if not isinstance(row, (list, tuple)):
        raise ValueError(f"row {place} of the mask must be a list: got {row!r}")
    if len(row) != read + fed:
        were_read = f"{read} token{' that was' if read == 1 else 's that were'} read"
        raise ValueError(
            f"row {place} of the mask has {len(row)} entries: it needs {read + fed}, for "
            f"{were_read} and {fed} that {'is' if fed == 1 else 'are'} fed"
        )
    if any(type(seen) not in (bool, int) or seen not in (0, 1) for seen in row):
        raise ValueError(f"row {place} of the mask is {row!r}: its entries are True or False")
    if not any(row):
        raise ValueError(f"row {place} of the mask shows nothing: a row attends at least to itself")
