"""Learn then Test, exactly: every outcome of a small calibration with its probability, no
simulation.

A procedure is a function like `early_exit.calibrate.calibrate`. The candidates have known risks and
losses of 0 and 1, drawn independently, so the number of losses of each is binomial: the probability
that the chosen risk is above delta is a finite sum of products of binomial weights.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from math import comb
from time import perf_counter
from typing import Any

from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts

CALIBRATED = (
    "calibrated risk <= delta with probability 1 - epsilon (Learn then Test, arXiv 2110.01052)"
)
SEQUENCE = "the candidates in front of the first that fails are accepted (fixed-sequence testing)"
SUPER = "where the risk is delta or more, a p-value is at most u with probability at most u (arXiv 2110.01052)"

HALF_RISK, JUST_ABOVE, EPSILON = Fraction(1, 2), Fraction(51, 100), Fraction(1, 20)
SAFE = Fraction(1, 10)
EXAMPLES = 5  # the fewest with which five tosses show anything: 2^-5 < 1/20
CURVES = {
    "a plateau just above delta": (SAFE, *[JUST_ABOVE] * 3),
    "not monotone": (JUST_ABOVE, SAFE, JUST_ABOVE, JUST_ABOVE),
    "above from the start": (JUST_ABOVE,) * 3,
    "a last step that fails surely": (SAFE, SAFE, Fraction(1)),
}


@cache
def binomial_probability(losses: int, n: int, risk: Fraction) -> Fraction:
    """P(Bin(n, risk) = losses)."""
    return comb(n, losses) * risk**losses * (1 - risk) ** (n - losses)


@cache
def binomial_tail(losses: int, n: int, delta: Fraction) -> Fraction:
    """P(Bin(n, delta) <= losses): the sharpest p-value of losses 0 and 1."""
    return sum((binomial_probability(k, n, delta) for k in range(losses + 1)), Fraction(0))


def chosen_candidate(
    procedure: Callable[..., Any], counts: Sequence[int], n: int, delta: Fraction, p_value: Any
) -> Any:
    """Which candidate, by number, a procedure chooses where they had so many losses."""
    found = procedure(
        range(len(counts)),
        lambda at: [1] * counts[at] + [0] * (n - counts[at]),
        delta,
        EPSILON,
        p_value,
    )
    return found.choice


def violation_probability(
    procedure: Callable[..., Any], risks: Sequence[Fraction], p_value: Any = binomial_tail
) -> tuple[Fraction, int]:
    """The probability that the risk of the chosen candidate is above delta; how many outcomes were
    walked.
    """
    mass, walked = Fraction(0), 0
    for counts in product(range(EXAMPLES + 1), repeat=len(risks)):
        at, walked = chosen_candidate(procedure, counts, EXAMPLES, HALF_RISK, p_value), walked + 1
        if at is not None and risks[at] > HALF_RISK:
            probability = Fraction(1)
            for count, risk in zip(counts, risks, strict=True):
                probability *= binomial_probability(count, EXAMPLES, risk)
            mass += probability
    return mass, walked


def controls_its_risk(procedure: Callable[..., Any]) -> Evidence:
    """On every curve, the probability of a wrong choice is at most epsilon."""
    began, branches = perf_counter(), 0
    for name, risks in CURVES.items():
        mass, walked = violation_probability(procedure, risks)
        branches += walked
        if mass > EPSILON:
            case = {
                "risks": risks,
                "delta": HALF_RISK,
                "epsilon": EPSILON,
                "examples": EXAMPLES,
                "curve": name,
            }
            accuse(
                CALIBRATED,
                f"a wrong choice with at most {EPSILON}",
                f"with {float(mass):.4f}",
                **case,
            )
    return Evidence(CALIBRATED, len(CURVES), branches, perf_counter() - began)


def accepts_what_passed(procedure: Callable[..., Any]) -> Evidence:
    """Whoever never accepts anything is safe, and useless: all in front of the first failure
    counts.
    """
    began, seen = perf_counter(), 0
    for counts in product((0, 1, 3), repeat=4):
        passed = [binomial_tail(count, EXAMPLES, HALF_RISK) <= EPSILON for count in counts]
        front = passed.index(False) if False in passed else len(passed)
        expected = front - 1 if front else None
        got, seen = (
            chosen_candidate(procedure, counts, EXAMPLES, HALF_RISK, binomial_tail),
            seen + 1,
        )
        if got != expected:
            accuse(
                SEQUENCE,
                expected,
                got,
                losses=counts,
                examples=EXAMPLES,
                delta=HALF_RISK,
                epsilon=EPSILON,
            )
    return Evidence(SEQUENCE, seen, 0, perf_counter() - began)


def is_a_p_value(p_value: Callable[..., Any]) -> Evidence:
    """By the exact distribution of the number of losses, at delta and above it."""
    began, seen = perf_counter(), 0
    for n, delta in product((1, 2, 5, 12), (Fraction(1, 10), Fraction(1, 3), HALF_RISK)):
        for risk in (delta, (1 + delta) / 2, Fraction(1)):
            values = [
                (p_value(k, n, delta), binomial_probability(k, n, risk)) for k in range(n + 1)
            ]
            for u, _ in values:
                mass, seen = sum((w for p, w in values if p <= u), Fraction(0)), seen + 1
                if mass > u and float(mass) > float(u) + 1e-12:
                    accuse(
                        SUPER,
                        f"at most {float(u):.4f}",
                        float(mass),
                        examples=n,
                        delta=delta,
                        risk=risk,
                    )
    return Evidence(SUPER, seen, 0, perf_counter() - began)


CALIBRATION_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    CALIBRATED: lambda parts: controls_its_risk(parts.calibrate),
    SEQUENCE: lambda parts: accepts_what_passed(parts.calibrate),
    SUPER: lambda parts: is_a_p_value(parts.p_value),
}
