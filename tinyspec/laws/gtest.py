"""The G-test of counts against a known law, and its power: what it would have found, had it been
there.

A fault is described by a share and a cell: in that share of the texts, this cell stands in place of
a draw.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tinyspec.laws.extra import import_extra

LEAST = 5.0
"""Texts that must be expected in a cell for chi-square to be a fair approximation; smaller cells
are put together.
"""


class GTest(NamedTuple):
    """2 sum O ln(O / E) over cells that are large enough, and its chi-square tail."""

    statistic: float
    freedom: int
    p: float


def pool_cells(law: Mapping[Any, float], texts: int) -> list[list[Any]]:
    """Groups of cells with at least `LEAST` expected texts each, the last perhaps but for that."""
    groups: list[list[Any]] = []
    for cell in sorted(law, key=lambda c: (law[c], c)):
        if groups and math.fsum(law[c] for c in groups[-1]) * texts < LEAST:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def g_test(counts: Mapping[Any, int], law: Mapping[Any, float]) -> GTest:
    """The likelihood-ratio test of counts against a law. Needs scipy."""
    texts = sum(counts.values())
    groups = pool_cells(law, texts)
    if any(cell not in law for cell, n in counts.items() if n):
        return GTest(math.inf, len(groups) - 1, 0.0)
    observed = np.array([sum(counts.get(c, 0) for c in group) for group in groups])
    expected = np.array([math.fsum(law[c] for c in group) for group in groups]) * texts
    statistic = float(_g_statistic(observed, expected))
    freedom = len(groups) - 1
    return GTest(
        statistic,
        freedom,
        float(import_extra("scipy.stats").chi2.sf(statistic, freedom)) if freedom else 1.0,
    )


def _g_statistic(observed: Any, expected: Any) -> Any:
    """[.., cells] -> [..]"""
    return 2 * np.where(
        observed > 0, observed * np.log(np.maximum(observed, 1) / expected), 0.0
    ).sum(axis=-1)


def g_test_power(
    law: Mapping[Any, float], share: float, to: Any, texts: int, alpha: float
) -> float:
    """The probability that the G-test finds, at level alpha, that in `share` of the texts the cell
    `to` stands in place of a draw: G is then noncentral chi-square, with 2 n KL(faulty, law) as its
    noncentrality."""
    stats = import_extra("scipy.stats")
    null, faulty = _faulty_law(law, share, to, texts)
    freedom = len(null) - 1
    if not freedom:
        return 0.0
    noncentrality = 2 * texts * float((faulty * np.log(faulty / null)).sum())
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, freedom), freedom, noncentrality))


def simulated_power(
    law: Mapping[Any, float],
    share: float,
    to: Any,
    texts: int,
    alpha: float,
    seed: int = 0,
    runs: int = 2000,
) -> float:
    """The same without the noncentral approximation: how often the test rejects simulated counts of
    the faulty law.
    """
    null, faulty = _faulty_law(law, share, to, texts)
    counts = np.random.default_rng(seed).multinomial(texts, faulty, size=runs)
    critical = import_extra("scipy.stats").chi2.isf(alpha, len(null) - 1)
    return float((_g_statistic(counts, null * texts) >= critical).mean())


def smallest_detectable_share(
    law: Mapping[Any, float], to: Any, texts: int, alpha: float, wanted: float = 0.9
) -> float | None:
    """The smallest share that is found with probability `wanted`; None where not even a fault in
    every text is.
    """
    low, high = 0.0, 1.0
    if g_test_power(law, high, to, texts, alpha) < wanted:
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if g_test_power(law, middle, to, texts, alpha) >= wanted
            else (middle, high)
        )
    return high


def moved_variation(law: Mapping[Any, float], share: float, to: Any) -> float:
    """The total variation between the faulty law and the law."""
    return share * (1 - law[to])


def _faulty_law(law: Mapping[Any, float], share: float, to: Any, texts: int) -> tuple[Any, Any]:
    groups = pool_cells(law, texts)
    null = np.array([math.fsum(law[c] for c in group) for group in groups])
    null /= null.sum()
    there = np.array([float(to in group) for group in groups])
    return null, np.maximum((1 - share) * null + share * there, 1e-300)
