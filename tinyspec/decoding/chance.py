"""Where randomness comes from: never from global state, always from a `Chance` that was handed in.

`Seeded` for use; `Replay` feeds given uniforms, to compare two implementations draw by draw; `Exhaustive` walks every outcome
with its exact probability, which turns a test into a proof. `split(role, round)` gives each role its own stream in each
round, so that no two decisions share noise and nothing depends on how much another role consumed.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinyspec._core import reference
from tinyspec.decoding import sampling
from tinyspec.errors import TinyspecError
from tinyspec.tree import Row

T = TypeVar("T")
Uniforms = NDArray[np.float64]


class Chance(Protocol):
    """A stream of decisions."""

    def split(self, role: str, round: int) -> "Chance":
        """An independent stream for a role in a round; asking for one key twice raises TinyspecError."""
        ...

    def accept(self, ratio: Any) -> bool:
        """True with probability min(1, ratio): u < ratio, so a ratio of 0 is never accepted."""
        ...

    def draw(self, row: Row) -> int:
        """A token from the law."""
        ...

    def order(self, row: Row, k: int) -> list[int]:
        """k tokens drawn without replacement, in draw order; fewer where the support is smaller (Plackett-Luce)."""
        ...

    def race(self, row: Row, position: int) -> int:
        """A token from the law by an exponential race whose noise is keyed by the position alone, whoever asks."""
        ...

    def uniforms(self, n: int) -> Uniforms | None:
        """The next n uniforms for a compiled kernel (a replay may have fewer left); None: decide by accept and draw."""
        ...

    def unread(self, count: int) -> None:
        """Put back the last `count` uniforms, which the kernel did not need."""
        ...


class _Stream:
    """What any stream of uniforms can decide. Subclasses provide `uniforms` and `unread`."""

    def __init__(self) -> None:
        self._asked: set[tuple[str, int]] = set()

    def _claim(self, role: str, round: int) -> None:
        if (role, round) in self._asked:
            raise TinyspecError(
                f"the stream {role!r} of round {round} was asked for twice: shared noise biases the law"
            )
        self._asked.add((role, round))

    def _next(self) -> Any:
        raise NotImplementedError

    def uniforms(self, n: int) -> Uniforms | None:
        raise NotImplementedError

    def unread(self, count: int) -> None:
        raise NotImplementedError

    def accept(self, ratio: Any) -> bool:
        return bool(self._next() < ratio)

    def draw(self, row: Row) -> int:
        return sampling.pick(row, self._next())

    def order(self, row: Row, k: int) -> list[int]:
        block = self.uniforms(k)
        assert block is not None
        drawn = sampling.order(row, block)
        self.unread(len(block) - len(drawn))
        return drawn


class Seeded(_Stream):
    """Philox streams keyed by a hash of (seed, path of roles and rounds): the same on every machine, in any order of use.

    >>> [Seeded(7).split("draft", 0).draw([0.5, 0.5]), Seeded(7).split("draft", 0).draw([0.5, 0.5])]
    [0, 0]
    """

    CHUNK = 16
    KEPT = 16  # positions whose race noise is remembered: draft and target race on the same ones

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._key = blake2b(f"tinyspec\0{int(seed)}".encode(), digest_size=16).digest()
        self._root = self
        self._noise: dict[int, Uniforms] = {}
        self._start()

    def _start(self) -> None:
        self._generator: np.random.Generator | None = None  # made when first used: most streams are asked for little
        self._buffer: Uniforms = np.empty(0)
        self._at = 0

    def split(self, role: str, round: int) -> "Seeded":
        """O(1), a hash; the generator behind it is made when it is first used."""
        self._claim(role, round)
        child = Seeded.__new__(Seeded)
        _Stream.__init__(child)
        child._key = blake2b(self._key + f"{role}\0{round}".encode(), digest_size=16).digest()
        child._root = self._root
        child._start()
        return child

    def _next(self) -> float:
        if self._at == len(self._buffer):
            self._refill(1)
        self._at += 1
        return float(self._buffer[self._at - 1])

    def _refill(self, n: int) -> None:
        if self._generator is None:
            self._generator = _philox(self._key)
        fresh = self._generator.random(max(n, self.CHUNK))
        kept = self._buffer[max(0, self._at - self.CHUNK) :]  # what was read lately stays, so that it can be put back
        self._at = min(self._at, self.CHUNK)
        self._buffer = np.concatenate([kept, fresh])

    def uniforms(self, n: int) -> Uniforms:
        short = self._at + n - len(self._buffer)
        if short > 0:
            self._refill(short)
        self._at += n
        return self._buffer[self._at - n : self._at]

    def unread(self, count: int) -> None:
        self._at -= count

    def race(self, row: Row, position: int) -> int:
        root = self._root
        noise = root._noise.get(position)
        if noise is None or len(noise) < len(row):  # a longer row continues the same noise
            key = blake2b(root._key + f"race\0{position}".encode(), digest_size=16).digest()
            noise = _philox(key).standard_exponential(len(row))
            while len(root._noise) >= self.KEPT:
                root._noise.pop(next(iter(root._noise)))
            root._noise[position] = noise
        return sampling.race(row, noise[: len(row)])


def _philox(key: bytes) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


class Replay(_Stream):
    """Given uniforms, in order; every split draws on the same list.

    >>> chance = Replay([0.2, 0.9])
    >>> chance.split("verify", 0).accept(0.5), chance.accept(0.5)
    (True, False)
    """

    def __init__(self, uniforms: Sequence[Any]) -> None:
        super().__init__()
        self._given = list(uniforms)
        self._shared: list[int] = [0]
        self._races: dict[int, list[float]] = {}

    @property
    def left(self) -> int:
        """Uniforms not consumed yet."""
        return len(self._given) - self._shared[0]

    def split(self, role: str, round: int) -> "Replay":
        self._claim(role, round)
        child = Replay(())
        child._given, child._shared, child._races = self._given, self._shared, self._races
        return child

    def _next(self) -> Any:
        if not self.left:
            raise TinyspecError(f"the replay's {len(self._given)} uniforms are used up")
        self._shared[0] += 1
        return self._given[self._shared[0] - 1]

    def uniforms(self, n: int) -> Uniforms:
        start = self._shared[0]
        self._shared[0] += min(n, self.left)
        return np.array(self._given[start : self._shared[0]], np.float64)

    def unread(self, count: int) -> None:
        self._shared[0] -= count

    def race(self, row: Row, position: int) -> int:
        """The first race at a position consumes one uniform a token; later ones share that noise."""
        if position not in self._races:
            self._races[position] = [-float(np.log1p(-float(self._next()))) for _ in range(len(row))]
        return sampling.race(row, self._races[position])


class _Script:
    """One run of a function: follow `choices`, then take first branches, and note how many there were."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = choices
        self.taken: list[tuple[int, int]] = []  # (choice, number of branches) of every decision so far
        self.probability: Any = 1

    def branch(self, options: Sequence[tuple[T, Any]]) -> T:
        """Decide among (value, probability) pairs of positive probability."""
        index = len(self.taken)
        choice = self.choices[index] if index < len(self.choices) else 0
        if choice >= len(options):
            raise TinyspecError("the function decides differently when run again: it has randomness of its own")
        self.taken.append((choice, len(options)))
        value, probability = options[choice]
        self.probability = self.probability * probability
        return value


class Exhaustive:
    """Every outcome of a function of chance, with its exact probability.

    >>> from fractions import Fraction
    >>> half = Fraction(1, 2)
    >>> sorted(Exhaustive.walk(lambda chance: chance.accept(half) and chance.accept(half)))
    [(False, Fraction(1, 4)), (False, Fraction(1, 2)), (True, Fraction(1, 4))]
    """

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._asked: set[tuple[str, int]] = set()

    @staticmethod
    def walk(function: Callable[["Exhaustive"], T]) -> Iterator[tuple[T, Any]]:
        """Run the function once for each path through its decisions, depth first; outcomes may repeat.

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
    def law(function: Callable[["Exhaustive"], T]) -> dict[T, Any]:
        """The outcomes (hashable) and their probabilities, equal outcomes added up."""
        law: dict[T, Any] = {}
        for outcome, probability in Exhaustive.walk(function):
            law[outcome] = law.get(outcome, 0) + probability
        return law

    @property
    def probability(self) -> Any:
        """The probability of the path so far."""
        return self._script.probability

    def split(self, role: str, round: int) -> "Exhaustive":
        if (role, round) in self._asked:
            raise TinyspecError(
                f"the stream {role!r} of round {round} was asked for twice: shared noise biases the law"
            )
        self._asked.add((role, round))
        return Exhaustive(self._script)

    def accept(self, ratio: Any) -> bool:
        if not ratio > 0:
            return False
        return True if ratio >= 1 else self._script.branch([(True, ratio), (False, 1 - ratio)])

    def draw(self, row: Row) -> int:
        mass = reference.total(list(row))
        if not mass > 0:
            raise TinyspecError("cannot draw from a row without mass")
        return self._script.branch([(token, x / mass) for token, x in enumerate(row) if x > 0])

    def order(self, row: Row, k: int) -> list[int]:
        left, drawn = list(row), list[int]()
        while len(drawn) < k and any(x > 0 for x in left):
            drawn.append(self.draw(left))
            left[drawn[-1]] = 0 * left[drawn[-1]]
        return drawn

    def race(self, row: Row, position: int) -> int:
        raise TinyspecError("a race shares continuous noise between rows, so its outcomes cannot be enumerated")

    def uniforms(self, n: int) -> None:
        """No uniforms: decisions must be asked for one by one."""
        return None

    def unread(self, count: int) -> None:
        raise TinyspecError("an exhaustive chance gives no uniforms")
