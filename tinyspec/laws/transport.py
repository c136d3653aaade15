"""The most that any lossless verifier can accept of k drafts at one position: optimal transport
with membership cost.

SpecTr (Sun et al. 2023, arXiv 2310.15141): couple the draws X = (x_1..x_k) with y ~ p so that P(y
is among X) is greatest. Whatever a verifier does, the token it emits has the law p and an accepted
token is one of the drafts, so its acceptance is P(y among X) for *some* coupling, and never above
the best.

Two oracles that share nothing. `by_linear_program` solves the transport itself. `optimum` is its
dual in fractions: the transport is a flow from the set of drafted tokens S (capacity P(S)) to
tokens y in S (capacity p(y)), and by max-flow min-cut it is the least, over sets of tokens H, of
p(H) + P(S not inside H): cut the tokens of H behind, the sets that reach outside H in front. For k
i.i.d. drafts P(S inside H) is q(H)^k, hence the optimum 1 + min_H (p(H) - q(H)^k).
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import chain, combinations

from tinyspec.laws.extra import import_extra
from tinyspec.laws.small import without_token

Drafts = Mapping[frozenset[int], Fraction]
"""The law of the set of drafted tokens."""


def drafted_sets(q: Sequence[Fraction], k: int, replace: bool) -> dict[frozenset[int], Fraction]:
    """The law of the set that k draws from q make; without replacement they end where q is used up.

    >>> {tuple(s): str(mass) for s, mass in drafts((Fraction(1, 2), Fraction(1, 2)), 2, replace=True).items()}
    {(0,): '1/4', (0, 1): '1/2', (1,): '1/4'}
    """
    law: dict[frozenset[int], Fraction] = {}

    def grow(
        drawn: frozenset[int], row: Sequence[Fraction] | None, left: int, mass: Fraction
    ) -> None:
        if not left or row is None:
            law[drawn] = law.get(drawn, Fraction(0)) + mass
            return
        for token, x in enumerate(row):
            if x:
                grow(
                    drawn | {token},
                    row if replace else without_token(row, token),
                    left - 1,
                    mass * x,
                )

    grow(frozenset(), q, k, Fraction(1))
    return law


def optimal_transport(p: Sequence[Fraction], drawn: Drafts) -> Fraction:
    """The greatest acceptance, exactly: the least cut. O(2^V) sets of tokens.

    >>> p, q = (Fraction(1), Fraction(0)), (Fraction(1, 3), Fraction(2, 3))
    >>> [str(optimum(p, drafts(q, k, replace=True))) for k in (1, 2)]
    ['1/3', '5/9']
    """
    tokens = range(len(p))
    cuts = chain.from_iterable(combinations(tokens, n) for n in range(len(p) + 1))
    return min(sum((p[y] for y in cut), _reaching_outside(drawn, {*cut})) for cut in cuts)


def _reaching_outside(drawn: Drafts, cut: set[int]) -> Fraction:
    return sum((mass for s, mass in drawn.items() if not s <= cut), Fraction(0))


def by_linear_program(p: Sequence[Fraction], drawn: Drafts) -> float:
    """The same as a linear program (HiGHS): maximise the mass sent from drafted sets to tokens in
    them. Needs scipy.
    """
    optimise, numpy = import_extra("scipy.optimize"), import_extra("numpy")
    sets = list(drawn)
    routes = [(i, y) for i, s in enumerate(sets) for y in sorted(s)]
    limits = numpy.zeros((len(sets) + len(p), len(routes)))
    for column, (i, y) in enumerate(routes):
        limits[i, column] = limits[len(sets) + y, column] = (
            1  # what leaves a set, what arrives at a token
        )
    bounds = [float(drawn[s]) for s in sets] + [float(x) for x in p]
    found = optimise.linprog(
        -numpy.ones(len(routes)), A_ub=limits, b_ub=bounds, bounds=(0, None), method="highs"
    )
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return float(-found.fun)


def kseq_share(k: int) -> Fraction:
    """What K-SEQ reaches of the optimum at least, 1 - (1 - 1/k)^k, above 1 - 1/e (SpecTr's
    guarantee).

    Why: it accepts a = 1 - (1 - b)^k, b = sum_x min(q, p / rho), for the least valid rho; a falls
    in rho, and rho = k is valid, so take rho = k. There k b = sum min(k q, p) is at least the
    optimum, for that is at most sum_y min(p(y), 1 - (1 - q(y))^k). And b <= 1/k, so by concavity a
    >= k b (1 - (1 - 1/k)^k).

    >>> [str(kseq_share(k)) for k in (1, 2, 3)]
    ['1', '3/4', '19/27']
    """
    return 1 - (1 - Fraction(1, k)) ** k


def kseq_acceptance(p: Sequence[Fraction], q: Sequence[Fraction], k: int) -> float:
    """What K-SEQ accepts at its best: 1 - (1 - beta)^k, beta = sum_x min(q, p / rho), at the least
    lawful rho.

    That rho solves 1 - (1 - beta)^k = rho beta: below it the residual p - min(q, p / rho) (1 - (1 -
    beta)^k) / beta would be negative where p / rho <= q. Sixty halvings in floats.

    >>> round(kseq_acceptance((Fraction(1), Fraction(0)), (Fraction(1, 4), Fraction(3, 4)), 2), 9)
    0.4375
    """
    a, b = [float(x) for x in p], [float(x) for x in q]

    def passes(rho: float) -> float:
        beta = sum(min(y, x / rho) for x, y in zip(a, b, strict=True))
        return 1 - (1 - beta) ** k

    def spare(rho: float) -> float:
        return sum(min(rho * y, x) for x, y in zip(a, b, strict=True)) - passes(rho)

    low, high = 1.0, float(k)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spare(middle) >= 0 else (middle, high)
    return passes(high)


def matching_acceptance(p: Sequence[Fraction], q: Sequence[Fraction], k: int) -> Fraction:
    """What sampling and matching accepts: y ~ p, kept if it is among k i.i.d. drafts: sum_y p (1 -
    (1 - q)^k).
    """
    return sum((a * (1 - (1 - b) ** k) for a, b in zip(p, q, strict=True)), Fraction(0))
