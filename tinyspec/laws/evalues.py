"""An e-value for "these texts have that law": evidence that stays valid however often one looks and
whenever one stops.

A gambler with wealth 1 bets on each text before it comes. The bet is a law: the frequencies so far,
shrunk towards the null p (a Dirichlet prior of some strength m), (n_x + m p(x)) / (n + m); the
wealth is multiplied by bet / p at what came. Under p a factor is 1 on average whatever came before,
so the wealth is a test martingale, and by Ville's inequality it ever reaches 1 / alpha with
probability at most alpha. If the law is another one, the frequencies learn it and the wealth grows
exponentially. Nobody knows the best m, so an equal share of the wealth is bet with each of several;
a mean of martingales is one. (Universal inference, Wasserman, Ramdas and Balakrishnan 2020, with a
predictable plug-in for the alternative; the multinomial mixture is in Lindon and Malek 2022.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from time import perf_counter
from typing import Any

from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.small import distributions

STRENGTHS = (10, 100, 1000, 10000)
MARTINGALE = "the wealth is a martingale under the null (Ville)"


def betting_wealth(
    outcomes: Sequence[Any], null: Mapping[Any, Any], strengths: Sequence[int] = STRENGTHS
) -> Any:
    """The e-value of outcomes in order, in the numbers of `null`: what the formulas say, for any
    number type.

    >>> half = Fraction(1, 2)
    >>> str(wealth(["a", "a"], {"a": half, "b": half}, strengths=[2]))
    '4/3'
    """
    total: Any = 0
    for m in strengths:
        product_of_factors: Any = 1
        counts = dict.fromkeys(null, 0)
        for n, x in enumerate(outcomes):
            product_of_factors *= (counts[x] + m * null[x]) / (n + m) / null[x]
            counts[x] += 1
        total += product_of_factors
    return total / len(strengths)


class EValue:
    """The running e-value. Under the null, P(highest ever >= 1 / alpha) <= alpha: look as often as
    you like.

    null  probability of each outcome, all positive; an outcome it does not know is impossible, and
          refutes it at once
    """

    def __init__(self, null: Mapping[Any, float], strengths: Sequence[int] = STRENGTHS):
        if not null or min(null.values()) <= 0 or abs(math.fsum(null.values()) - 1) > 1e-9:
            raise ValueError("the null is a law: positive probabilities that add up to one")
        self.null, self.strengths = dict(null), tuple(strengths)
        self.counts = dict.fromkeys(self.null, 0)
        self.seen = 0
        self._logs = [0.0] * len(self.strengths)
        self.log = 0.0  # of the e-value now
        self.highest = 0.0  # the highest it has ever been, as a logarithm

    def see(self, outcome: Any) -> None:
        """One more outcome."""
        if outcome not in self.null:
            self.log = self.highest = math.inf
            self._logs = [math.inf] * len(self._logs)
            self.counts[outcome] = 0
        else:
            share = self.counts[outcome] / self.null[outcome]
            for i, m in enumerate(self.strengths):
                self._logs[i] += math.log((share + m) / (self.seen + m))
            top = max(self._logs)
            spread = math.fsum(math.exp(log - top) for log in self._logs) if top < math.inf else 1.0
            self.log = top + math.log(spread / len(self._logs))
            self.highest = max(self.highest, self.log)
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        self.seen += 1

    @property
    def p(self) -> float:
        """A p-value that is valid at any time: 1 / the highest e-value so far."""
        return math.exp(-self.highest)

    def refuted(self, alpha: float) -> bool:
        """Whether the e-value has ever reached 1 / alpha."""
        return self.highest >= -math.log(alpha)


def wealth_is_martingale(
    bet: Callable[[Sequence[int], Mapping[int, Fraction]], Fraction], length: int = 4
) -> Evidence:
    """bet(outcomes, null) is the wealth after these outcomes: it starts at 1, is never negative,
    and under the null its mean after one more outcome is what it is. Every sequence of up to
    `length` outcomes, exactly: no simulation."""
    began, cases = perf_counter(), 0
    for n, whole, cells in product(range(length), range(2, 5), (2, 3)):
        for row in distributions(cells, whole):
            null = {x: mass for x, mass in enumerate(row) if mass}
            for past in product(null, repeat=n):
                now = bet(past, null) if past else Fraction(1)
                ahead = {x: bet((*past, x), null) for x in null}
                mean = sum((null[x] * ahead[x] for x in null), Fraction(0))
                cases += 1
                if mean != now or min(ahead.values()) < 0:
                    accuse(MARTINGALE, now, mean, null=row, outcomes=past, wealth_after=ahead)
    return Evidence(MARTINGALE, cases, 0, perf_counter() - began)
