"""A chance that enumerates the noise itself, so that noise which is used twice shows in the law.

`Exhaustive` branches on every decision as if each had noise of its own. That proves a technique
whose noise is fresh, and it is blind to the mistake of Sequoia's code (one draw of noise for all
rounds) or of one uniform for all positions. Here a uniform has a name, its stream and its place in
it; a question narrows the interval it lies in, with the exact probability of either answer, and a
second question to the same uniform is answered from that interval.
"""

from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.errors import TinyspecError
from tinyspec.laws.uniform import UniformSpan
from tinyspec.tree import Probs

Name = tuple[Any, ...]
"""Where a uniform stands: ((role, round), ..., index)."""


class Noise:
    """Uniforms in [0, 1) as intervals. Unlike other chances it lets one stream be asked for twice:
    laws shall see it.

    reads  the name of every uniform, in the order of use

    >>> def twice(noise): return noise.split("a", 0).accept(0.5), noise.split("a", 0).accept(0.5)
    >>> sorted(Exhaustive.law(lambda chance: twice(Noise(chance))))
    [(False, False), (True, True)]
    """

    def __init__(self, branches: Exhaustive) -> None:
        self._begin(branches, (), {}, [])

    def _begin(
        self, branches: Exhaustive, stream: Name, spans: dict[Name, UniformSpan], reads: list[Name]
    ) -> None:
        self._branches, self._stream, self._spans, self.reads = branches, stream, spans, reads
        self._index = 0

    def split(self, role: str, round: int) -> "Noise":
        child = Noise.__new__(Noise)
        child._begin(self._branches, (*self._stream, (role, round)), self._spans, self.reads)
        return child

    def _next(self) -> Name:
        name = (*self._stream, self._index)
        self._index += 1
        self.reads.append(name)
        return name

    def _below(self, name: Name, cut: Any) -> bool:
        """Whether this uniform lies below the cut. Narrows its interval."""
        return self._spans.setdefault(name, UniformSpan(self._branches)).below(cut)

    def accept(self, ratio: Any) -> bool:
        """u < ratio."""
        return self._below(self._next(), ratio)

    def draw(self, row: Probs) -> int:
        """Inverse CDF: the token whose interval of the cumulative sum holds u."""
        name, mass, reached = self._next(), sum(row), 0
        support = [token for token, x in enumerate(row) if x > 0]
        if not mass > 0:
            raise TinyspecError("cannot draw from a row without mass")
        for token in support[:-1]:
            reached = reached + row[token]
            if self._below(name, reached / mass):
                return token
        return support[-1]

    def sample_without_replacement(self, row: Probs, k: int) -> list[int]:
        """Without replacement, one uniform a token."""
        left, drawn = list(row), list[int]()
        while len(drawn) < k and any(x > 0 for x in left):
            drawn.append(self.draw(left))
            left[drawn[-1]] = 0 * left[drawn[-1]]
        return drawn

    def exponential_race(self, row: Probs, position: int) -> int:
        raise TinyspecError(
            "a race shares continuous noise between rows, so its outcomes cannot be enumerated"
        )

    def uniforms(self, n: int) -> None:
        """None: decisions must be asked for one by one."""
        return None

    def push_back(self, count: int) -> None:
        raise TinyspecError("an enumerated chance gives no uniforms")
