"""Laws of assignment A3 on Learn then Test: p-values, and the order of tests.

Both are held to exact sums over every outcome of small calibrations (`laws.calibration_laws`).
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

from tinyspec.grade.task import (
    Cases,
    Function,
    Task,
    describe_result,
    expect_close,
    graded_law,
    require_number,
)
from tinyspec.laws.evidence import LawViolated, accuse
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    CURVES,
    EPSILON,
    EXAMPLES,
    HALF_RISK,
    SEQUENCE,
    SUPER,
    binomial_probability,
    binomial_tail,
    is_a_p_value,
    violation_probability,
)

TAIL = "the p-value of k losses is P(Bin(n, delta) <= k), exactly"


@graded_law(2, SUPER)
def p_value_is_valid(p_value: Function, cases: Cases) -> Iterator[bool]:
    """Check by the exact distribution of the losses that small p-values do not come too often.

    A p-value of at most u may come with probability u at most where the risk is too great.
    """
    is_useful = False

    def call(losses: int, n: int, delta: Fraction) -> Any:
        nonlocal is_useful
        got = p_value(losses, n, delta)
        got = require_number(SUPER, got, losses=losses, n=n, delta=delta)
        is_useful = is_useful or got < 1
        return got

    try:
        evidence = is_a_p_value(call)
    except LawViolated as accused:
        case = accused.counterexample.case
        if "risk" not in case:
            raise
        n, delta, risk = case["examples"], case["delta"], case["risk"]
        yours = {k: call(k, n, delta) for k in range(n + 1)}
        masses = {
            u: sum(binomial_probability(k, n, risk) for k, p in yours.items() if p <= u)
            for u in yours.values()
        }
        u, mass = max(masses.items(), key=lambda found: found[1] - found[0])
        what = f"where the risk is {risk}, a p-value of {u} or less comes with probability "
        shown = {"n": n, "delta": delta, "true risk": risk, "your p-values, by losses": yours}
        accuse(SUPER, f"{what}{u} at most", f"{what}{float(mass):.4f}", **shown)
    # A p-value of 1 is always valid, and says nothing.
    yield from [is_useful] * evidence.cases


@graded_law(4, TAIL)
def p_value_is_the_tail(p_value: Function, cases: Cases) -> Iterator[bool]:
    """Check the value: one that is valid, but greater than it need be, lets fewer tokens leave."""
    random = Random(cases.seed)
    settings = [(n, Fraction(1, d)) for n, d in ((1, 2), (2, 2), (2, 3), (5, 2))]
    for _ in range(12 * cases.times):
        n, denominator = random.randrange(1, 13), random.randrange(2, 11)
        settings.append((n, Fraction(random.randrange(1, denominator), denominator)))
    for n, delta in settings:
        for losses in range(n + 1):
            case = {"losses": losses, "n": n, "delta": delta}
            got = require_number(TAIL, p_value(losses, n, delta), **case)
            expected = binomial_tail(losses, n, delta)
            if isinstance(got, float):
                accuse(TAIL, f"{expected}, a Fraction", f"{got!r}, a float: it is rounded", **case)
            expect_close(TAIL, expected, got, **case)
            yield True


def make_thresholds(count: int) -> list[float]:
    """Return thresholds from the safest to the boldest."""
    return [round(1 - at / 10, 1) for at in range(1, count + 1)]


def find_choice(
    law: str, calibrate: Function, p_values: Sequence[Fraction], epsilon: Fraction
) -> int | None:
    """Return the number of the threshold that a function chooses, None for inf."""
    thresholds = make_thresholds(len(p_values))
    got = calibrate(thresholds, list(p_values), epsilon)
    if isinstance(got, bool) or got not in (*thresholds, math.inf):
        case = {"thresholds": thresholds, "p_values": p_values, "epsilon": epsilon}
        accuse(law, "one of the thresholds, or inf", describe_result(got), **case)
    return None if got == math.inf else thresholds.index(got)


def choose_in_order(p_values: Sequence[Fraction], epsilon: Fraction) -> int | None:
    """Return the number of the last threshold before the first that is not rejected, or None."""
    front = next((at for at, p in enumerate(p_values) if p > epsilon), len(p_values))
    return front - 1 if front else None


@graded_law(4, CALIBRATED)
def calibration_controls_its_risk(calibrate: Function, cases: Cases) -> Iterator[bool]:
    """Check the probability of a wrong choice, summed over every outcome of a small calibration."""
    for name, risks in CURVES.items():
        wrong: list[tuple[tuple[Fraction, ...], int]] = []

        def choose(
            numbers: range,
            losses: Any,
            delta: Fraction,
            epsilon: Fraction,
            p_value: Any,
            risks: Sequence[Fraction] = risks,
            wrong: list[tuple[tuple[Fraction, ...], int]] = wrong,
        ) -> Any:
            p_values = tuple(p_value(sum(losses(at)), EXAMPLES, delta) for at in numbers)
            choice = find_choice(CALIBRATED, calibrate, p_values, epsilon)
            is_in_order = choice == choose_in_order(p_values, epsilon)
            if choice is not None and risks[choice] > delta and not is_in_order:
                wrong.append((p_values, choice))
            return SimpleNamespace(choice=choice)

        mass, _ = violation_probability(choose, risks)
        if mass > EPSILON:
            p_values, choice = min(wrong, key=lambda found: sorted(found[0], reverse=True))
            thresholds, due = make_thresholds(len(risks)), choose_in_order(p_values, EPSILON)
            case = {
                "thresholds": thresholds,
                "their true risks": risks,
                "which are": name,
                "delta": HALF_RISK,
                "epsilon": EPSILON,
                "prompts": EXAMPLES,
                "p-values, for example": p_values,
                "you choose": thresholds[choice],
                "testing in order chooses": math.inf if due is None else thresholds[due],
            }
            what = "a threshold whose risk is above delta is chosen with probability "
            got = f"{what}{float(mass):.4f}"
            accuse(CALIBRATED, f"{what}{float(EPSILON)} at most", got, **case)
    # A function that never chooses a threshold is safe, and useless.
    sure = find_choice(CALIBRATED, calibrate, (Fraction(0),) * 3, EPSILON)
    yield from [sure is not None] * len(CURVES)


@graded_law(5, SEQUENCE)
def calibration_accepts_what_passed(calibrate: Function, cases: Cases) -> Iterator[bool]:
    """Check that thresholds are accepted at all, and that p = epsilon is a rejection too."""
    random = Random(cases.seed)
    drawn = list[tuple[Fraction, tuple[Fraction, ...]]]()
    for epsilon in (EPSILON, Fraction(1, 100), Fraction(1, 10), Fraction(1, 4)):
        small, great = (epsilon / 5, epsilon), (epsilon * 51 / 50, Fraction(1, 2))
        for size in (1, 2, 3):
            drawn += [(epsilon, ps) for ps in product((*small, *great), repeat=size)]
        for _ in range(15 * cases.times):
            drawn.append((epsilon, tuple(random.choice((*small * 3, *great)) for _ in range(6))))
    for epsilon, p_values in drawn:
        thresholds = make_thresholds(len(p_values))
        numbers = (
            choose_in_order(p_values, epsilon),
            find_choice(SEQUENCE, calibrate, p_values, epsilon),
        )
        expected, got = (math.inf if at is None else thresholds[at] for at in numbers)
        case = {"thresholds": thresholds, "p_values": p_values, "epsilon": epsilon}
        expect_close(SEQUENCE, expected, got, **case)
        yield True


P_VALUE_TASK = Task("p_value", "A3.6 A p-value", (p_value_is_valid, p_value_is_the_tail))
CALIBRATE_TASK = Task(
    "calibrate",
    "A3.7 Learn then Test",
    (calibration_controls_its_risk, calibration_accepts_what_passed),
)
