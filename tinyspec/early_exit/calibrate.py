"""Learn then Test: choose the fastest setting whose risk is bounded, and mean it.

Angelopoulos et al. 2021, arXiv 2110.01052, as CALM uses it (Schuster et al. 2022, arXiv
2207.07061). The candidates stand in an order that was fixed before any data was seen, the safest
first. Each has a null hypothesis, "its risk, the expected loss, is above delta", and a p-value from
n independent examples with losses in [0, 1]. They are tested one after the other (fixed-sequence
testing): while a hypothesis is rejected at level epsilon, go on; at the first that is not, stop.
The last rejected candidate is chosen; if there is none, none is.

Then P(risk of the chosen one <= delta) >= 1 - epsilon: a wrong choice needs the *first* true null
in the order to be rejected, which happens with probability at most epsilon. That holds for any
order; a risk that grows along it makes the test powerful, and is no condition. It is false for
whoever goes on behind a failure, or takes what looked best on the examples.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError

PValue = Callable[[Any, int, Any], Any]
"""(sum of the losses, how many, delta) -> at most u with probability at most u, where the risk is
above delta.
"""


def hoeffding_p_value(total: Any, n: int, delta: Any) -> float:
    """exp(-2 n (delta - mean)^2) where the mean is below delta, else 1: for any losses in [0, 1].

    >>> round(hoeffding_p_value(0, 150, 0.1), 4), hoeffding_p_value(20, 150, 0.1)
    (0.0498, 1.0)
    """
    return math.exp(-2 * n * max(0.0, float(delta) - float(total) / n) ** 2)


def binomial_p_value(total: int, n: int, delta: Any) -> Any:
    """P(Bin(n, delta) <= total): exact where every loss is 0 or 1, so sharp enough to test the
    testing with.

    >>> binomial_p_value(0, 5, Fraction(1, 2))
    Fraction(1, 32)
    """
    if isinstance(delta, Fraction):
        return sum(
            (math.comb(n, k) * delta**k * (1 - delta) ** (n - k) for k in range(total + 1)),
            Fraction(0),
        )
    whole = math.lgamma(n + 1)
    return math.fsum(
        math.exp(
            whole
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(delta)
            + (n - k) * math.log1p(-delta)
        )
        for k in range(total + 1)
    )


class TestedThreshold(NamedTuple):
    """A candidate, its mean loss, the p-value of "its risk is above delta", and whether that was
    rejected.
    """

    candidate: Any
    loss: float
    p: Any
    rejected: bool


class Calibration(NamedTuple):
    """The last candidate that passed, None where not even the first did; and all that were
    tested.
    """

    choice: Any | None
    tested: tuple[TestedThreshold, ...]


def least_examples(delta: Any, epsilon: Any, p_value: PValue = hoeffding_p_value) -> int:
    """The fewest examples with which anything can be shown: without a single loss the p-value must
    reach epsilon.

    By Hoeffding that is ln(1 / epsilon) / (2 delta^2).

    >>> least_examples(0.1, 0.05), least_examples(0.05, 0.05), least_examples(0.1, 0.05, binomial_p_value)
    (150, 600, 29)
    """
    _check(delta, epsilon)
    high = 1
    while p_value(0, high, delta) > epsilon:
        high *= 2
    low = high // 2  # too few, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if p_value(0, middle, delta) <= epsilon else (middle, high)
    return high


def check_examples(n: int, delta: Any, epsilon: Any, p_value: PValue = hoeffding_p_value) -> None:
    """TinyspecError where nothing can be shown with n examples."""
    _check(delta, epsilon)
    if n < 1 or p_value(0, n, delta) > epsilon:
        raise TinyspecError(
            f"{n} calibration examples are too few for delta {delta} and epsilon {epsilon}: "
            f"at least {least_examples(delta, epsilon, p_value)} are needed"
        )


def calibrate(
    candidates: Iterable[Any],
    losses: Callable[[Any], Sequence[Any]],
    delta: Any,
    epsilon: Any,
    p_value: PValue = hoeffding_p_value,
) -> Calibration:
    """Fixed-sequence testing of the candidates, in their order. `losses` is asked for no more of
    them than are tested.

    Raises TinyspecError for delta or epsilon outside (0, 1), losses outside [0, 1], and too few
    examples.
    """
    _check(delta, epsilon)  # also where there is no candidate
    tested: list[TestedThreshold] = []
    choice = None
    for candidate in candidates:
        sample = losses(candidate)
        if not all(0 <= loss <= 1 for loss in sample):
            raise TinyspecError("a loss is outside 0 to 1: these p-values do not hold for it")
        check_examples(len(sample), delta, epsilon, p_value)
        total = sum(sample)
        p = p_value(total, len(sample), delta)
        tested.append(TestedThreshold(candidate, float(total) / len(sample), p, bool(p <= epsilon)))
        if not tested[-1].rejected:
            break
        choice = candidate
    return Calibration(choice, tuple(tested))


def _check(delta: Any, epsilon: Any) -> None:
    for name, value in (("delta", delta), ("epsilon", epsilon)):
        if not 0 < value < 1:
            raise TinyspecError(f"{name} is {value}: it must be above 0 and below 1")


# ---------------------------------------------------------------------- what a loss is


def rouge_l(one: Sequence[int], other: Sequence[int]) -> float:
    """F1 of the longest common subsequence: 1 for equal texts, two empty ones too.

    >>> rouge_l([1, 2, 3, 4], [2, 9, 4]), rouge_l([], [])
    (0.5714285714285714, 1.0)
    """
    if not (one and other):
        return float(not (one or other))
    row = [0] * (len(other) + 1)
    for x in one:
        before = 0  # the entry up and to the left
        for at, y in enumerate(other, 1):
            before, row[at] = row[at], before + 1 if x == y else max(row[at], row[at - 1])
    return 2 * row[-1] / (len(one) + len(other))


def textual_loss(early: Sequence[int], full: Sequence[int]) -> float:
    """Textual consistency: how far the text is from the full model's. Needs no reference."""
    return 1 - rouge_l(early, full)


def risk_loss(early: Sequence[int], full: Sequence[int], reference: Sequence[int]) -> float:
    """Risk consistency: how much further than the full model's text it is from the reference; 0
    where it is nearer.
    """
    return max(0.0, rouge_l(full, reference) - rouge_l(early, reference))
