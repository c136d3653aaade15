"""Uniform random numbers known only as intervals; each comparison splits the interval in two.

Code that was written for a random generator compares its uniforms with numbers: `u < p / q`,
`cdf.searchsorted(u)`. Each such question has two answers, with probabilities that follow from the
interval in which u is known to lie. Walking both answers of every question walks every outcome of
the code, as it stands, with its exact probability.

`Exhaustive` branches on every decision as if each had noise of its own. That proves a technique
whose noise is fresh, but it cannot see noise that is used twice (Sequoia's code draws once for all
rounds). `Noise` can: its uniforms have names, and a second question to the same uniform is answered
from the interval that the first one left.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.errors import TinyspecError
from tinyspec.tree import Probs

TINY_SPLIT = 1e-12
"""Where floats split off a smaller part of an interval, they mean the same point."""


class NotEnumerable(TinyspecError):
    """The code asks for a random number itself, or for one whose outcomes cannot be listed."""


class UniformSpan:
    """The interval [low, high) that holds one uniform; a pinned one is exactly 0."""

    __slots__ = ("high", "low", "pinned", "rng")

    def __init__(self, rng: Exhaustive, pinned: bool = False) -> None:
        self.rng, self.pinned = rng, pinned
        self.low: Any = Fraction(0)
        self.high: Any = Fraction(0 if pinned else 1)

    def below(self, cut: Any) -> bool:
        """Return whether u < cut, both ways where both are possible.

        That u == cut has probability zero and is not walked.
        """
        if cut <= self.low or cut >= self.high:
            return bool(cut >= self.high)
        ratio = (cut - self.low) / (self.high - self.low)
        if isinstance(ratio, float) and not TINY_SPLIT < ratio < 1 - TINY_SPLIT:
            return ratio > 0.5
        answer = self.rng.accept(ratio)
        if answer:
            self.high = cut
        else:
            self.low = cut
        return answer


def _identity(x: Any) -> Any:
    return x


class LazyUniform:
    """A monotone function of a uniform that can be compared, scaled, shifted and its log taken.

    >>> half = Fraction(1, 2)
    >>> def twice(rng):
    ...     u = LazyUniform(UniformSpan(rng))
    ...     return u < half, 2 * u < half
    >>> for answers, probability in sorted(Exhaustive.distribution(twice).items()):
    ...     print(answers, probability)
    (False, False) 1/2
    (True, False) 1/4
    (True, True) 1/4
    """

    __slots__ = ("_forward", "_inverse", "_rising", "_span")

    def __init__(
        self,
        span: UniformSpan,
        forward: Callable[[Any], Any] = _identity,
        inverse: Callable[[Any], Any] = _identity,
        rising: bool = True,
    ) -> None:
        self._span, self._forward, self._inverse, self._rising = span, forward, inverse, rising

    # ------------------------------------------------------------------ questions

    def _less(self, other: Any, equal: bool) -> Any:
        """Return whether this is < other (<= with `equal`); NotImplemented for an array."""
        x = _as_number(other)
        if x is NotImplemented:
            return x
        if isinstance(x, LazyUniform):
            if x is self:
                return equal
            raise NotEnumerable(
                "two uniforms are compared with each other: "
                "only comparisons of a uniform with a number can be listed"
            )
        if self._span.pinned:
            value = self._forward(self._span.low)
            return bool(value <= x if equal else value < x)
        below = self._span.below(self._inverse(x))
        return below if self._rising else not below

    def _more(self, other: Any, equal: bool) -> Any:
        x = _as_number(other)
        if isinstance(x, float) and x != x:
            return False
        answer = self._less(x, not equal)
        return answer if answer is NotImplemented else not answer

    def __lt__(self, other: Any) -> Any:
        return False if _is_nan(other) else self._less(other, False)

    def __le__(self, other: Any) -> Any:
        return False if _is_nan(other) else self._less(other, True)

    def __gt__(self, other: Any) -> Any:
        return self._more(other, False)

    def __ge__(self, other: Any) -> Any:
        return self._more(other, True)

    def __eq__(self, other: object) -> bool:
        return self is other or (self._span.pinned and bool(self._forward(self._span.low) == other))

    __hash__ = object.__hash__

    def __floor__(self) -> int:
        """Return int(u * n): which of the unit intervals the uniform lies in."""
        ends = [self._forward(self._span.low), self._forward(self._span.high)]
        floor, top = math.floor(min(ends)), max(ends)
        assert isinstance(floor, int)
        while floor + 1 < top and self >= floor + 1:
            floor += 1
        return floor

    __int__ = __trunc__ = __floor__

    def __float__(self) -> Any:
        raise NotEnumerable(
            "the code asks for the value of a random number: compare it with a number (u < p / q), "
            "or draw with rng.choice(V, p=row)"
        )

    __index__ = __round__ = __bool__ = __float__

    def item(self) -> "LazyUniform":
        """Return the uniform itself, as numpy's scalars do."""
        return self

    # ------------------------------------------------------------------ functions of it

    def _affine(self, scale: Any, shift: Any) -> Any:
        if scale is NotImplemented or shift is NotImplemented:
            return NotImplemented
        if isinstance(scale, LazyUniform) or isinstance(shift, LazyUniform):
            raise NotEnumerable(
                "two uniforms are added or multiplied: their outcomes cannot be listed"
            )
        if scale == 0:
            return shift
        forward, inverse = self._forward, self._inverse
        return LazyUniform(
            self._span,
            lambda u: scale * forward(u) + shift,
            lambda x: inverse((x - shift) / scale),
            self._rising == (scale > 0),
        )

    def __add__(self, other: Any) -> Any:
        return self._affine(Fraction(1), _as_number(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        x = _as_number(other)
        return x if x is NotImplemented else self._affine(Fraction(1), -x)

    def __rsub__(self, other: Any) -> Any:
        return self._affine(Fraction(-1), _as_number(other))

    def __neg__(self) -> Any:
        return self._affine(Fraction(-1), Fraction(0))

    def __mul__(self, other: Any) -> Any:
        return self._affine(_as_number(other), Fraction(0))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        x = _as_number(other)
        return x if x is NotImplemented else self._affine(1 / x, Fraction(0))

    def log(self) -> "LazyUniform":
        """Take the logarithm, as numpy.log asks of an object."""
        forward, inverse = self._forward, self._inverse

        def logarithm(u: Any) -> float:
            x = forward(u)
            return math.log(x) if x > 0 else -math.inf

        return LazyUniform(self._span, logarithm, lambda x: inverse(_exp(x)), self._rising)


def _exp(x: Any) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _is_nan(x: Any) -> bool:
    return isinstance(x, float) and x != x


def _as_number(x: Any) -> Any:
    """Return a plain number: ints as Fractions, scalars as floats; NotImplemented for an array."""
    if isinstance(x, (float, Fraction, LazyUniform)) and not isinstance(x, np.generic):
        return x
    if isinstance(x, int):
        return Fraction(x)
    if isinstance(x, np.ndarray) and x.ndim:
        return NotImplemented
    if hasattr(x, "item"):  # scalars of numpy and torch
        return _as_number(x.item())
    return NotImplemented


Name = tuple[Any, ...]
"""Where a uniform stands: ((role, round), ..., index)."""


class Noise(Exhaustive):
    """Uniforms in [0, 1) as intervals, whose streams may be asked for twice so that laws see it.

    reads  the name of every uniform, in the order of use

    >>> def twice(noise): return noise.split("a", 0).accept(0.5), noise.split("a", 0).accept(0.5)
    >>> sorted(Exhaustive.distribution(lambda rng: twice(Noise(rng))))
    [(False, False), (True, True)]
    """

    def __init__(
        self,
        branches: Exhaustive,
        stream: Name = (),
        spans: dict[Name, UniformSpan] | None = None,
        reads: list[Name] | None = None,
    ) -> None:
        super().__init__(branches._script)
        self._branches, self._stream, self._index = branches, stream, 0
        self._spans: dict[Name, UniformSpan] = {} if spans is None else spans
        self.reads: list[Name] = [] if reads is None else reads

    def split(self, role: str, round: int) -> "Noise":
        return Noise(self._branches, (*self._stream, (role, round)), self._spans, self.reads)

    def _next(self) -> Name:
        name = (*self._stream, self._index)
        self._index += 1
        self.reads.append(name)
        return name

    def _below(self, name: Name, cut: Any) -> bool:
        """Return whether this uniform lies below the cut; narrows its interval."""
        return self._spans.setdefault(name, UniformSpan(self._branches)).below(cut)

    def accept(self, ratio: Any) -> bool:
        """Return whether u < ratio."""
        return self._below(self._next(), ratio)

    def draw(self, row: Probs) -> int:
        """Draw by inverse CDF: the token whose interval of the cumulative sum holds u."""
        return self._invert(row, self._next())

    def draw_at(self, row: Probs, position: int) -> int:
        """Draw by inverse CDF with the uniform of a position, which all rounds share."""
        name = (*self._stream[:-1], ("position", position), 0)
        self.reads.append(name)
        return self._invert(row, name)

    def _invert(self, row: Probs, name: Name) -> int:
        mass, reached = sum(row), 0
        support = [token for token, x in enumerate(row) if x > 0]
        if not mass > 0:
            raise TinyspecError("cannot draw from a row without mass")
        for token in support[:-1]:
            reached = reached + row[token]
            if self._below(name, reached / mass):
                return token
        return support[-1]
