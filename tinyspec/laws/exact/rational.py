"""Small rational distributions, the smallest first.

Laws try them in this order, so the first counterexample that a law meets is also the smallest.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd
from typing import TypeAlias

Exact: TypeAlias = tuple[Fraction, ...]
"""A distribution over V tokens, [V], in fractions that add up to one."""


def distributions(vocabulary: int, whole: int) -> Iterator[Exact]:
    """Yield every distribution over `vocabulary` tokens whose least common denominator is `whole`.

    >>> [[str(x) for x in row] for row in distributions(2, 3)]
    [['1/3', '2/3'], ['2/3', '1/3']]
    """
    for weights in _whole_weights(vocabulary, whole):
        if gcd(*weights) == 1:
            yield tuple(Fraction(x, whole) for x in weights)


def _whole_weights(vocabulary: int, whole: int) -> Iterator[tuple[int, ...]]:
    if vocabulary == 1:
        yield (whole,)
        return
    for first in range(whole + 1):
        for rest in _whole_weights(vocabulary - 1, whole - first):
            yield (first, *rest)


def distribution_pairs(
    vocabularies: Sequence[int] = (2, 3), largest: int = 6
) -> Iterator[tuple[Exact, Exact]]:
    """Yield every pair (p, q) whose denominators add up to at most `largest`.

    Few tokens come first, then small denominators.
    """
    for vocabulary in vocabularies:
        for whole in range(2, largest + 1):
            for of_p in range(1, whole):
                for p in distributions(vocabulary, of_p):
                    for q in distributions(vocabulary, whole - of_p):
                        yield p, q


def overlap_mass(p: Sequence[Fraction], q: Sequence[Fraction]) -> Fraction:
    """Return sum_x min(p, q) = 1 - TV(p, q), the greatest probability that two draws agree."""
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), Fraction(0))


def positive_part(p: Sequence[Fraction], q: Sequence[Fraction]) -> Exact | None:
    """Return max(0, p - q), normalised; None where p == q and nothing is left."""
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    mass = sum(left, Fraction(0))
    return tuple(x / mass for x in left) if mass else None


def without_token(q: Sequence[Fraction], token: int) -> Exact | None:
    """Return q given that the draw is not `token`; None where q can give nothing else."""
    mass = 1 - q[token]
    return tuple(Fraction(0) if i == token else x / mass for i, x in enumerate(q)) if mass else None
