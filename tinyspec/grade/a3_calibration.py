"""What A3 holds Learn then Test to: p-values by exact sums, and the order of tests over every
outcome of small calibrations.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

from tinyspec.grade.a3_laws import Function, number, words
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, LawViolated, accuse
from tinyspec.laws.calibration_laws import (
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


def is_valid(function: Function, cases: Cases) -> Evidence:
    """By the exact distribution of the losses: a p-value below u must not come oftener than u where
    the risk is too great.
    """

    is_useful = False

    def checked(losses: int, n: int, delta: Fraction) -> Any:
        nonlocal is_useful
        got = number(SUPER, function(losses, n, delta), losses=losses, n=n, delta=delta)
        is_useful = is_useful or got < 1
        return got

    try:
        evidence = is_a_p_value(checked)
        return evidence if is_useful else Evidence(SUPER)  # 1 is always valid, and says nothing
    except LawViolated as accused:
        found = accused.counterexample
        case = found.case
        if "risk" in case:
            n, delta, risk = case["examples"], case["delta"], case["risk"]
            yours = {k: checked(k, n, delta) for k in range(n + 1)}
            often = {
                u: sum(binomial_probability(k, n, risk) for k, p in yours.items() if p <= u)
                for u in yours.values()
            }
            u, mass = max(often.items(), key=lambda found: found[1] - found[0])
            happens = f"where the risk is {risk}, a p-value of {u} or less comes with probability "
            yours_is = {
                "n": n,
                "delta": delta,
                "true risk": risk,
                "your p-values, by losses": yours,
            }
            accuse(SUPER, f"{happens}{u} at most", f"{happens}{float(mass):.4f}", **yours_is)
        raise


def is_the_tail(function: Function, cases: Cases) -> Evidence:
    """A p-value that is valid, but greater than it need be, lets fewer tokens leave."""
    random = Random(cases.seed)
    drawn = [(n, Fraction(1, d)) for n, d in ((1, 2), (2, 2), (2, 3), (5, 2))]
    for _ in range(12 * cases.times):
        n, below = random.randrange(1, 13), random.randrange(2, 11)
        drawn.append((n, Fraction(random.randrange(1, below), below)))
    seen = 0
    for n, delta in drawn:
        for losses in range(n + 1):
            case = {"losses": losses, "n": n, "delta": delta}
            got, seen = number(TAIL, function(losses, n, delta), **case), seen + 1
            if isinstance(got, float):
                accuse(
                    TAIL,
                    f"{binomial_tail(losses, n, delta)}, a Fraction",
                    f"{got!r}, a float: it is rounded",
                    **case,
                )
            if got != binomial_tail(losses, n, delta):
                accuse(TAIL, binomial_tail(losses, n, delta), got, **case)
    return Evidence(TAIL, seen)


def ladder(count: int) -> list[float]:
    """Thresholds from the safest to the boldest."""
    return [round(1 - at / 10, 1) for at in range(1, count + 1)]


def chosen(
    law: str, function: Function, p_values: Sequence[Fraction], epsilon: Fraction
) -> int | None:
    """The number of the threshold that is chosen, None for inf."""
    thresholds = ladder(len(p_values))
    got = function(thresholds, list(p_values), epsilon)
    if isinstance(got, bool) or got not in (*thresholds, math.inf):
        accuse(
            law,
            "one of the thresholds, or inf",
            words(got),
            thresholds=thresholds,
            p_values=p_values,
            epsilon=epsilon,
        )
    return None if got == math.inf else thresholds.index(got)


def in_order(p_values: Sequence[Fraction], epsilon: Fraction) -> int | None:
    """The number of the last threshold in front of the first that is not rejected, None where that
    is the first.
    """
    front = next((at for at, p in enumerate(p_values) if p > epsilon), len(p_values))
    return front - 1 if front else None


def controls_its_risk(function: Function, cases: Cases) -> Evidence:
    """The probability of a wrong choice, summed over every outcome of a small calibration: no
    simulation.
    """
    wrong: list[tuple[tuple[Fraction, ...], int]] = []

    def procedure(
        numbers: range, losses: Any, delta: Fraction, epsilon: Fraction, p_value: Any
    ) -> Any:
        p_values = tuple(p_value(sum(losses(at)), EXAMPLES, delta) for at in numbers)
        choice = chosen(CALIBRATED, function, p_values, epsilon)
        if choice is not None and risks[choice] > delta and choice != in_order(p_values, epsilon):
            wrong.append((p_values, choice))
        return SimpleNamespace(choice=choice)

    walked = 0
    for name, risks in CURVES.items():
        wrong.clear()
        mass, outcomes = violation_probability(procedure, risks)
        walked += outcomes
        if mass > EPSILON:
            p_values, choice = min(wrong, key=lambda found: sorted(found[0], reverse=True))
            thresholds, due = ladder(len(risks)), in_order(p_values, EPSILON)
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
            said = "a threshold whose risk is above delta is chosen with probability "
            accuse(
                CALIBRATED, f"{said}{float(EPSILON)} at most", f"{said}{float(mass):.4f}", **case
            )
    sure = chosen(
        CALIBRATED, function, (Fraction(0),) * 3, EPSILON
    )  # whoever never chooses one is safe, and useless
    return Evidence(CALIBRATED, 0 if sure is None else len(CURVES), walked)


def accepts_what_passed(function: Function, cases: Cases) -> Evidence:
    """Whoever accepts nothing is safe, and useless; p = epsilon is a rejection too."""
    random, seen = Random(cases.seed), 0
    drawn = list[tuple[Fraction, tuple[Fraction, ...]]]()
    for epsilon in (EPSILON, Fraction(1, 100), Fraction(1, 10), Fraction(1, 4)):
        small, great = (epsilon / 5, epsilon), (epsilon * 51 / 50, Fraction(1, 2))
        drawn += [
            (epsilon, ps) for size in (1, 2, 3) for ps in product((*small, *great), repeat=size)
        ]
        for _ in range(15 * cases.times):
            drawn.append((epsilon, tuple(random.choice((*small * 3, *great)) for _ in range(6))))
    for epsilon, p_values in drawn:
        expected, thresholds = in_order(p_values, epsilon), ladder(len(p_values))
        got, seen = chosen(SEQUENCE, function, p_values, epsilon), seen + 1
        if got != expected:
            shown = [math.inf if at is None else thresholds[at] for at in (expected, got)]
            accuse(SEQUENCE, *shown, thresholds=thresholds, p_values=p_values, epsilon=epsilon)
    return Evidence(SEQUENCE, seen)
