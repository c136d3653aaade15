"""Learn then Test: choose the fastest threshold whose risk is bounded with high probability.

Paper: Angelopoulos et al. 2021, arXiv 2110.01052, as CALM uses it (Schuster et al. 2022, arXiv
2207.07061).

The candidates stand in an order that is fixed before any data is seen, the safest first. Each has a
null hypothesis, "its risk, the expected loss, is above delta", and a p-value from n independent
examples with losses in [0, 1]. They are tested one after the other (fixed-sequence testing), until
the first hypothesis that is not rejected at level epsilon. The last candidate before it is chosen,
or none.

    P(risk of the chosen candidate <= delta) >= 1 - epsilon

A wrong choice needs the *first* true null hypothesis in the order to be rejected, which happens
with probability at most epsilon. That holds for any order; a risk that grows along it only makes
the test powerful. It does not hold if testing goes on after a failure, or if the candidate is
chosen that looked best on the examples.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError

PValue = Callable[[Any, int, Any], Any]
"""(sum of the losses, number of losses, delta) -> a p-value of "the risk is above delta"."""


def hoeffding_p_value(total: Any, n: int, delta: Any) -> float:
    """Return exp(-2 n max(0, delta - mean)^2), a p-value for any losses in [0, 1].

    >>> round(hoeffding_p_value(0, 150, 0.1), 4), hoeffding_p_value(20, 150, 0.1)
    (0.0498, 1.0)
    """
    return math.exp(-2 * n * max(0.0, float(delta) - float(total) / n) ** 2)


def binomial_p_value(total: int, n: int, delta: Any) -> Any:
    """Return P(Bin(n, delta) <= total), which is exact if every loss is 0 or 1.

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
    """A candidate, its mean loss, its p-value, and whether its null hypothesis was rejected."""

    candidate: Any
    loss: float
    p: Any
    rejected: bool


class Calibration(NamedTuple):
    """The last candidate that passed, or None, and all that were tested."""

    choice: Any | None
    tested: tuple[TestedThreshold, ...]


def least_examples(delta: Any, epsilon: Any, p_value: PValue = hoeffding_p_value) -> int:
    """Return the fewest examples with which a candidate can pass: those whose losses are all 0.

    With `hoeffding_p_value` that is ln(1 / epsilon) / (2 delta^2), rounded up.

    >>> least_examples(0.1, 0.05), least_examples(0.05, 0.05)
    (150, 600)
    >>> least_examples(0.1, 0.05, binomial_p_value)
    29
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
    """Raise TinyspecError if no candidate can pass with n examples."""
    _check(delta, epsilon)
    if n < 1 or p_value(0, n, delta) > epsilon:
        raise TinyspecError(
            f"{n} calibration examples are too few for delta {delta} and epsilon {epsilon}: at "
            f"least {least_examples(delta, epsilon, p_value)} are needed"
        )


def calibrate(
    candidates: Iterable[Any],
    losses: Callable[[Any], Sequence[Any]],
    delta: Any,
    epsilon: Any,
    p_value: PValue = hoeffding_p_value,
) -> Calibration:
    """Test the candidates in their order, and return the last that passed.

    candidates  the safest first
    losses      candidate -> its losses on the examples; asked only for candidates that are tested

    Raises TinyspecError for delta or epsilon outside (0, 1), losses outside [0, 1], and too few
    examples.
    """
    _check(delta, epsilon)  # also where there is no candidate
    tested: list[TestedThreshold] = []
    choice = None
    for candidate in candidates:
        sample = losses(candidate)
        if not all(0 <= loss <= 1 for loss in sample):
            raise TinyspecError("a loss is outside 0 to 1: scale all losses to 0 to 1")
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


# ------------------------------ what a loss is


def rouge_l(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the F1 score of the longest common subsequence; 1 for two empty texts.

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
    """Return 1 - ROUGE-L against the full model's text (textual consistency).

    It needs no reference.
    """
    return 1 - rouge_l(early, full)


def risk_loss(early: Sequence[int], full: Sequence[int], reference: Sequence[int]) -> float:
    """Return by how much ROUGE-L against the reference falls, at least 0 (risk consistency)."""
    return max(0.0, rouge_l(full, reference) - rouge_l(early, reference))
