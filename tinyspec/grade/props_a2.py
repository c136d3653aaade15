"""The model that a submission to A2 is given: one attention layer with a mask and positions.

It believes what it is given. A row attends to whatever its mask shows, at whatever positions are
given: a wrong mask or a wrong position is no error but a wrong row, as in a real model.

A child process loads this file: it imports the standard library and `child` alone.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Self

from tinyspec.grade.child import Prop

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

    >>> session = TreeSession(text=[2, 0, 1], seed=1)
    >>> row, = session.score([1], [2], [[1, 1, 1]])  # the newest token, which stands at position 2, sees all of the text
    >>> print(*row)
    48/121 69/242 7/22
    >>> session.score([1], [2], [[1, 1]])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: row 0 of the mask has 2 entries: it needs 3, for 2 tokens that were read ...
    """

    def __init__(self, text: Sequence[int], vocabulary: int = 3, seed: int = 0):
        self.text, self.vocabulary, self.seed = list(text), vocabulary, seed
        self.trace: list[Any] = []

    def plain(self) -> Any:
        return {"text": list(self.text), "vocabulary": self.vocabulary, "seed": self.seed}

    @classmethod
    def make(cls, plain: Any) -> Self:
        return cls(**plain)

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
        if len(self.trace) >= MAX_CALLS:
            raise ValueError(
                f"the model ran {MAX_CALLS} forward passes: the function is not going to stop"
            )
        for name, given in (("tokens", tokens), ("positions", positions), ("the mask", mask)):
            if not isinstance(given, (list, tuple)):
                raise ValueError(f"{name} must be a list: got {given!r}")
        if not tokens or not len(tokens) == len(positions) == len(mask):
            sizes = (
                f"{len(tokens)} tokens, {len(positions)} positions and {len(mask)} rows of the mask"
            )
            raise ValueError(
                f"a forward pass needs as many positions and rows of the mask as tokens, at least one: got {sizes}"
            )
        for token in tokens:
            _check_whole(token, "a token", self.vocabulary - 1)
        for position in positions:
            _check_whole(position, "a position", MAX_POSITION)
        for place, row in enumerate(mask):
            _check_mask_row(place, row, read, len(tokens))
        self.trace.append([list(tokens), list(positions)])
        words = [*self.text[:read], *tokens]
        places = [*range(read), *positions]
        return [
            self._row(
                tokens[i],
                positions[i],
                [(words[j], places[j]) for j, seen in enumerate(mask[i]) if seen],
            )
            for i in range(len(tokens))
        ]

    def _row(self, token: int, position: int, seen: Sequence[tuple[int, int]]) -> list[Fraction]:
        """Return the row of a token at a position that sees these (token, position) pairs."""
        sums = [Fraction(0)] * self.vocabulary
        for other, place in seen:
            weight = Fraction(
                1 + (2 * token + 3 * other + self.seed) % 5, 1 + abs(position - place)
            )
            for word in range(self.vocabulary):
                sums[word] += weight * (1 + ((word + 1) * (other + 2) + 3 * place + self.seed) % 7)
        return [x / sum(sums) for x in sums]


def _check_mask_row(place: int, row: Any, read: int, fed: int) -> None:
    """Raise ValueError unless this is a row of a mask over so many columns."""
    if not isinstance(row, (list, tuple)):
        raise ValueError(f"row {place} of the mask must be a list: got {row!r}")
    if len(row) != read + fed:
        raise ValueError(
            f"row {place} of the mask has {len(row)} entries: it needs {read + fed}, for {read} "
            f"token{'' if read == 1 else 's'} that {'was' if read == 1 else 'were'} read and {fed} that "
            f"{'is' if fed == 1 else 'are'} fed"
        )
    if any(type(seen) not in (bool, int) or seen not in (0, 1) for seen in row):
        raise ValueError(f"row {place} of the mask is {row!r}: its entries are True or False")
    if not any(row):
        raise ValueError(f"row {place} of the mask shows nothing: a row attends at least to itself")


def _check_whole(value: Any, what: str, high: int) -> None:
    """Raise ValueError unless the value is a whole number from 0 to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        raise ValueError(f"{what} is {value!r}: it must be a whole number from 0 to {high}")
