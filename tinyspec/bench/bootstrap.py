"""Compare two arms by the paired bootstrap: draw the same units again for both, many times.

Paper: Koehn, EMNLP 2004 (W04-3250).

A unit is a passage or a block of sentences. Every score here is a function of sums over units, so a
resample is a matrix product: how often each unit was drawn, times the units' sums. Both arms get
the same draws. What makes a unit easy or hard for both then cancels in their difference.

    interval = [the 2.5 % quantile, the 97.5 % quantile] of the difference over all resamples

An arm is above another if this interval lies above zero: if it leads in 39 of 40 resamples. Koehn
asks for 19 of 20, on one side.

Pitfall: the interval is that of one comparison, planned beforehand. The setting that looks best of
many, on these same units, is partly lucky, and its interval lies too high. Whoever prints such a
verdict says so (`experiments/exits.py`).
Tests: tests/bench/test_bootstrap.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec.training.bleu import ORDER, BleuCounts, score_counts

RESAMPLES = 1000
LEVEL = 0.95  # of the interval

Sums = NDArray[np.float64]


class Lead(NamedTuple):
    """By how much one arm is above another: on all units, and the interval of the resamples."""

    lead: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return whether the difference is more than noise.

        >>> Lead(0.5, 0.1, 0.9).verdict, Lead(0.5, -0.1, 1.1).verdict
        ('above', 'no difference')
        """
        if self.low > 0:
            return "above"
        return "below" if self.high < 0 else "no difference"


def draw_resamples(units: int, seed: int = 0) -> Sums:
    """Return how often each unit is drawn: all of them once, then RESAMPLES times at random.

    The same number of units gives the same draws, so two arms on the same units are paired.

    >>> draw_resamples(3).shape, draw_resamples(3).sum(axis=1).tolist() == [3.0] * 1001
    ((1001, 3), True)
    """
    drawn = np.random.default_rng(seed).multinomial(units, [1 / units] * units, size=RESAMPLES)
    return np.concatenate((np.ones((1, units)), drawn))


def find_lead(mine: Sequence[float] | Sums, others: Sequence[float] | Sums) -> Lead:
    """Return the lead of scores over others: of all units first, then of each resample.

    >>> find_lead([2.0, 1.0, 1.5, 3.0], [1.0] * 4)[0]
    1.0
    """
    leads = np.asarray(mine, dtype=float) - np.asarray(others, dtype=float)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(leads[1:], (tail, 1 - tail))
    return Lead(float(leads[0]), float(low), float(high))


def score_resamples(units: Any) -> list[float]:
    """Return the BLEU of all units and of each resample.

    units  [n, 2 * ORDER + 1] the counts of each: matches, totals, words of the references
    """
    counts = draw_resamples(len(units)) @ np.asarray(units, dtype=float)
    return score_counts(
        BleuCounts(tuple(map(int, row[:ORDER])), tuple(map(int, row[ORDER:-1])), int(row[-1]))
        for row in counts.round()
    )


def compare_bleu(mine: Any, others: Any) -> Lead:
    """Return the lead of one arm over another in BLEU, from the counts of the same units."""
    return find_lead(score_resamples(mine), score_resamples(others))
