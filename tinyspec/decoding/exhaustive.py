"""Enumerate every outcome of a random function with its exact probability."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tinyspec._core import reference
from tinyspec.errors import TinyspecError
from tinyspec.tree import Probs

T = TypeVar("T")


def claim_stream(asked: set[tuple[str, int]], role: str, round: int) -> None:
    """Note that a stream was asked for. Raise TinyspecError if it was asked for before."""
    if (role, round) in asked:
        raise TinyspecError(
            f"the stream {role!r} of round {round} was asked for twice, and shared noise biases "
            "the output: give each use a role of its own"
        )
    asked.add((role, round))


class _Script:
    """One run of a function: follow `choices`, then take the first branch of each decision."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = choices
        self.taken: list[tuple[int, int]] = []  # (choice, number of branches) of each decision
        self.probability: Any = 1

    def branch(self, options: Sequence[tuple[T, Any]]) -> T:
        """Decide among (value, probability) pairs of positive probability."""
        index = len(self.taken)
        choice = self.choices[index] if index < len(self.choices) else 0
        if choice >= len(options):
            raise TinyspecError(
                "the function decides differently when run again: draw every random number from "
                "the given source"
            )
        self.taken.append((choice, len(options)))
        value, probability = options[choice]
        self.probability = self.probability * probability
        return value


class Exhaustive:
    """A `RandomSource` that enumerates every outcome of a function, with its exact probability.

    >>> from fractions import Fraction
    >>> half = Fraction(1, 2)
    >>> sorted(Exhaustive.walk(lambda rng: rng.accept(half) and rng.accept(half)))
    [(False, Fraction(1, 4)), (False, Fraction(1, 2)), (True, Fraction(1, 4))]
    """

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._asked: set[tuple[str, int]] = set()

    @staticmethod
    def walk(function: Callable[["Exhaustive"], T]) -> Iterator[tuple[T, Any]]:
        """Run the function once for each path through its decisions, depth first.

        Branches of probability zero are never taken. The probabilities add up to one.
        """
        choices: list[int] = []
        while True:
            script = _Script(choices)
            outcome = function(Exhaustive(script))
            yield outcome, script.probability
            trail = script.taken
            while trail and trail[-1][0] + 1 == trail[-1][1]:
                trail.pop()
            if not trail:
                return
            choices = [choice for choice, _ in trail[:-1]] + [trail[-1][0] + 1]

    @staticmethod
    def distribution(function: Callable[["Exhaustive"], T]) -> dict[T, Any]:
        """Return the probability of each outcome; outcomes must be hashable."""
        total: dict[T, Any] = {}
        for outcome, probability in Exhaustive.walk(function):
            total[outcome] = total.get(outcome, 0) + probability
        return total

    @property
    def probability(self) -> Any:
        """Return the probability of the path so far."""
        return self._script.probability

    def split(self, role: str, round: int) -> "Exhaustive":
        claim_stream(self._asked, role, round)
        return Exhaustive(self._script)

    def accept(self, ratio: Any) -> bool:
        if not ratio > 0:
            return False
        return True if ratio >= 1 else self._script.branch([(True, ratio), (False, 1 - ratio)])

    def draw(self, row: Probs) -> int:
        mass = reference.ordered_sum(list(row))
        if not mass > 0:
            raise TinyspecError("cannot draw from a row without mass")
        return self._script.branch(
            [(token, x if mass == 1 else x / mass) for token, x in enumerate(row) if x > 0]
        )

    def draw_at(self, row: Probs, position: int) -> int:
        return self.draw(row)

    def sample_without_replacement(self, row: Probs, k: int) -> list[int]:
        left, drawn = list(row), list[int]()
        while len(drawn) < k and any(x > 0 for x in left):
            drawn.append(self.draw(left))
            left[drawn[-1]] = 0 * left[drawn[-1]]
        return drawn

    def exponential_race(self, row: Probs, position: int) -> int:
        raise TinyspecError(
            "a race shares continuous noise between rows, so its outcomes cannot be enumerated"
        )

    def uniform_at(self, position: int) -> None:
        """Return None: decisions must be asked for one by one."""
        return None

    def uniforms(self, n: int) -> None:
        """Return None: decisions must be asked for one by one."""
        return None

    def push_back(self, count: int) -> None:
        raise TinyspecError("an exhaustive source gives no uniforms")
