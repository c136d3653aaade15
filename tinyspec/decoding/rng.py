"""Random numbers: never from global state, always from a `RandomSource` that is handed in.

`Seeded` is for use. `Replay` feeds given uniforms, to compare two implementations draw by draw.
`Exhaustive` walks every outcome with its exact probability, which turns a test into a proof.
`split(role, round)` gives each role its own stream in each round: no two decisions share noise.
`draw_at(row, position)` gives each position of a text its own uniform, whatever the rounds are.
"""

import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinyspec.decoding import sampling
from tinyspec.decoding.exhaustive import Exhaustive, claim_stream
from tinyspec.errors import TinyspecError
from tinyspec.tree import Probs

__all__ = ["Exhaustive", "RandomSource", "Replay", "Seeded"]

Uniforms = NDArray[np.float64]


class RandomSource(Protocol):
    """A stream of decisions."""

    def split(self, role: str, round: int) -> "RandomSource":
        """Return an independent stream for a role in a round; TinyspecError if asked for twice."""

    def accept(self, ratio: Any) -> bool:
        """Return True with probability min(1, ratio)."""

    def draw(self, row: Probs) -> int:
        """Return a token sampled from the distribution."""

    def sample_without_replacement(self, row: Probs, k: int) -> list[int]:
        """Return k tokens in draw order, without replacement; fewer if the support is smaller."""

    def exponential_race(self, row: Probs, position: int) -> int:
        """Return a token sampled with exponential noise that depends on the position alone."""

    def draw_at(self, row: Probs, position: int) -> int:
        """Return a token sampled with the uniform of a position of the text.

        The uniform belongs to the source that this one was split from, so all rounds share it. A
        position is decided once in a text: no two decisions share noise.
        """

    def uniform_at(self, position: int) -> Any | None:
        """Return the uniform of a position, as `draw_at` uses it; None: decide by `draw_at`."""

    def uniforms(self, n: int) -> Uniforms | None:
        """Return the next n uniforms for a compiled kernel; None: decide by `accept` and `draw`."""

    def push_back(self, count: int) -> None:
        """Put back the last `count` uniforms, which the kernel did not need."""


class _Stream:
    """Decisions made from a stream of uniforms. Subclasses provide the uniforms."""

    def __init__(self) -> None:
        self._asked: set[tuple[str, int]] = set()

    def _next(self) -> Any:
        raise NotImplementedError

    def uniforms(self, n: int) -> Uniforms | None:
        raise NotImplementedError

    def push_back(self, count: int) -> None:
        raise NotImplementedError

    def uniform_at(self, position: int) -> Any:
        """Return the uniform of a position, for `draw_at`."""
        raise NotImplementedError

    def accept(self, ratio: Any) -> bool:
        return bool(self._next() < ratio)

    def draw(self, row: Probs) -> int:
        return sampling.sample_inverse_cdf(row, self._next())

    def draw_at(self, row: Probs, position: int) -> int:
        return sampling.sample_inverse_cdf(row, self.uniform_at(position))

    def sample_without_replacement(self, row: Probs, k: int) -> list[int]:
        block = self.uniforms(k)
        assert block is not None
        drawn = sampling.sample_without_replacement(row, block)
        self.push_back(len(block) - len(drawn))
        return drawn


class Seeded(_Stream):
    """Philox streams keyed by a hash of seed, roles and rounds: the same in any order of use.

    >>> a, b = Seeded(7), Seeded(7)
    >>> used_first = b.split("verify", 0).uniforms(3)
    >>> bool((a.split("draft", 0).uniforms(5) == b.split("draft", 0).uniforms(5)).all())
    True
    """

    CHUNK = 16  # uniforms made at a time, a multiple of Philox's four
    KEPT = 16  # positions whose race noise is remembered: draft and target race on the same ones
    POSITIONS = 64  # positions whose uniforms are made at a time

    def __init__(self, seed: int) -> None:
        self._noise: dict[int, Uniforms] = {}
        key = blake2b(f"tinyspec\0{int(seed)}".encode(), digest_size=16).digest()
        self._begin(key, self, self, _Philox())

    def _begin(self, key: bytes, root: "Seeded", above: "Seeded", philox: "_Philox") -> None:
        super().__init__()
        self._key, self._root, self._above, self._philox = key, root, above, philox
        self._positions: tuple[int, list[float]] = -1, []  # a block of positions, and its uniforms
        self._buffer: Uniforms = np.empty(0)
        self._made = self._at = 0  # uniforms made so far; index of the next one in the buffer

    def split(self, role: str, round: int) -> "Seeded":
        """Return the stream of this key. O(1): nothing is generated before it is asked for."""
        claim_stream(self._asked, role, round)
        child = Seeded.__new__(Seeded)
        child._begin(_derive(self._key, role, round), self._root, self, self._philox)
        return child

    def uniform_at(self, position: int) -> float:
        above = self._above
        block, index = divmod(position, self.POSITIONS)
        if above._positions[0] != block:
            stream = self._philox.at(_derive(above._key, "position", 0), block * self.POSITIONS)
            above._positions = block, stream.random(self.POSITIONS).tolist()
        return above._positions[1][index]

    def _next(self) -> float:
        if self._at == len(self._buffer):
            self._refill(1)
        self._at += 1
        return float(self._buffer[self._at - 1])

    def _refill(self, n: int) -> None:
        n += -n % self.CHUNK
        kept = self._buffer[max(0, self._at - self.CHUNK) :]  # what was read last stays
        self._at = min(self._at, self.CHUNK)
        self._buffer = np.concatenate([kept, self._philox.at(self._key, self._made).random(n)])
        self._made += n

    def uniforms(self, n: int) -> Uniforms:
        short = self._at + n - len(self._buffer)
        if short > 0:
            self._refill(short)
        self._at += n
        return self._buffer[self._at - n : self._at]

    def push_back(self, count: int) -> None:
        self._at -= count

    def exponential_race(self, row: Probs, position: int) -> int:
        root = self._root
        noise = root._noise.get(position)
        if noise is None or len(noise) < len(row):  # a longer row continues the same noise
            noise = self._philox.at(_derive(root._key, "race", position), 0).standard_exponential(
                len(row)
            )
            while len(root._noise) >= self.KEPT:
                root._noise.pop(next(iter(root._noise)))
            root._noise[position] = noise
        return sampling.exponential_race(row, noise[: len(row)])


def _derive(key: bytes, role: str, round: int) -> bytes:
    return blake2b(key + f"{role}\0{round}".encode(), digest_size=16).digest()


class _Philox(threading.local):
    """One generator per thread, moved to a key and an index, because making one is slow."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)

    def at(self, key: bytes, index: int) -> np.random.Generator:
        """Return the generator of stream `key` at number `index`, a multiple of four."""
        counter = np.array([index // 4, 0, 0, 0], np.uint64)
        self._bits.state = {
            "bit_generator": "Philox",
            "state": {"counter": counter, "key": np.frombuffer(key, "<u8").astype(np.uint64)},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


class Replay(_Stream):
    """Replay given uniforms in order; every split draws on the same list.

    >>> rng = Replay([0.2, 0.9])
    >>> rng.split("verify", 0).accept(0.5), rng.accept(0.5)
    (True, False)
    """

    def __init__(self, uniforms: Sequence[Any]) -> None:
        super().__init__()
        self._given = list(uniforms)
        self._shared: list[int] = [0]
        self._races: dict[int, list[float]] = {}
        self._at_positions: dict[int, Any] = {}

    @property
    def left(self) -> int:
        """Uniforms not consumed yet."""
        return len(self._given) - self._shared[0]

    def split(self, role: str, round: int) -> "Replay":
        claim_stream(self._asked, role, round)
        child = Replay(())
        child._given, child._shared, child._races = self._given, self._shared, self._races
        child._at_positions = self._at_positions
        return child

    def uniform_at(self, position: int) -> Any:
        """Return the next uniform, and the same again if the position is asked for again."""
        if position not in self._at_positions:
            self._at_positions[position] = self._next()
        return self._at_positions[position]

    def _next(self) -> Any:
        if not self.left:
            raise TinyspecError(f"the replay's {len(self._given)} uniforms are used up")
        self._shared[0] += 1
        return self._given[self._shared[0] - 1]

    def uniforms(self, n: int) -> Uniforms:
        start = self._shared[0]
        self._shared[0] += min(n, self.left)
        return np.array(self._given[start : self._shared[0]], np.float64)

    def push_back(self, count: int) -> None:
        self._shared[0] -= count

    def exponential_race(self, row: Probs, position: int) -> int:
        """Race with one uniform for each token; later races at the position share that noise."""
        if position not in self._races:
            self._races[position] = [
                -float(np.log1p(-float(self._next()))) for _ in range(len(row))
            ]
        return sampling.exponential_race(row, self._races[position])
