"""What the functions of assignment A1 that look at one place are held to: warp, acceptance,
residual.

Each law searches its cases smallest first and raises LawViolated with the first that breaks it, in
the words of the hand-out. The expected values come from `laws.exact` and `laws.small`, and never
from the reference solution.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.exact import apply_warpers
from tinyspec.laws.small import Exact, distribution_pairs, distributions, overlap_mass

Function = Callable[..., Any]
Knobs = tuple[Fraction, int | None, Fraction | None]

ROUNDING = 1e-9  # what a function that calculates in floats may be off

A_LAW = "warp returns a distribution: V numbers from 0 on that add up to one"
TEMPERATURE = "temperature: weights to the power 1/T, at 0 the first of the greatest"
TOP_K = "top-k: exactly the k greatest weights, ties to the lower token"
TOP_P = "top-p: the smallest set of most probable tokens that reaches top_p"
ORDER = "the order: temperature, then top-k, then top-p of what top-k left"
PROBABILITY = "the acceptance is a probability, from 0 to 1"
OVER = "a token that the draft proposes too often (q > p) is accepted with probability p/q"
UNDER = (
    "a token that the draft proposes no more often than the target does (q <= p) is always accepted"
)
REST = "the residual is a distribution: V numbers from 0 on that add up to one"
BEYOND = "the residual gives nothing to a token that the draft proposes often enough (p <= q)"
WHOLE = "accepted and recovered together are the target: min(p, q) + (1 - alpha) residual = p"
EQUAL = "p = q: nothing is left, and the residual is p"


def close(expected: Any, got: Any) -> bool:
    """Equal; up to rounding where floats were calculated with."""
    if isinstance(got, float) or isinstance(expected, float):
        return bool(abs(expected - got) <= ROUNDING)
    return bool(expected == got)


def is_number(value: Any) -> bool:
    """Whether this is a number that one can calculate with: no bool, no NaN, no infinity."""
    if isinstance(value, float):
        return abs(value) < float("inf")
    return isinstance(value, (int, Fraction)) and not isinstance(value, bool)


def held_row(row: Any, size: int, law: str, case: dict[str, Any], scaled: bool = True) -> list[Any]:
    """Return the row if it is a list of `size` numbers, none below 0, that add up to one; accuse it
    otherwise.

    scaled  False: the numbers may add up to anything above 0
    """
    if not isinstance(row, (list, tuple)) or len(row) != size or not all(map(is_number, row)):
        accuse(
            law,
            f"a list of {size} numbers (no bool, no nan)",
            repr(row) if contains_text(row) else row,
            **case,
        )
    if any(x < 0 for x in row):
        accuse(law, "no number below 0", list(row), **case)
    if not close(1, sum(row)) if scaled else not sum(row) > 0:
        accuse(law, f"{size} numbers that add up to 1", {"row": list(row), "sum": sum(row)}, **case)
    return list(row)


def contains_text(row: Any) -> bool:
    """Whether this is a list with a text in it, which looks like a number when it is printed."""
    return isinstance(row, (list, tuple)) and any(isinstance(x, str) for x in row)


def same_row(expected: Sequence[Any], row: Sequence[Any]) -> bool:
    """Whether two rows are equal, number by number."""
    return all(close(a, b) for a, b in zip(expected, row, strict=True))


# ------------------------------------------------------------------ A1.1 the warper


def weights(cases: Cases, drawn: int) -> Iterator[list[Fraction]]:
    """Rows of whole weights for two and three tokens first, a few that are not whole, then longer
    ones that are drawn.
    """
    for size in (2, 3):
        for row in sorted(product(range(4), repeat=size), key=lambda row: (sum(row), row)):
            if any(row):
                yield [Fraction(x) for x in row]
    for parts in ((3, 2), (1, 2), (2, 3), (1, 1), (1, 3, 2)):
        yield [Fraction(x, 2) for x in parts]
    rng = random.Random(f"weights {cases.seed}")
    for _ in range(drawn * cases.times):
        row = tuple(rng.randrange(7) for _ in range(rng.randint(3, 6)))
        below = rng.choice((1, 2, 3, 4))
        yield [Fraction(x, below) for x in (row if any(row) else (1, *row[1:]))]


def of_warp(law: str, knobs: Sequence[Knobs]) -> Callable[[Function, Cases], Evidence]:
    """The law of the rows that come out under these knobs."""

    def judge(warp: Function, cases: Cases) -> Evidence:
        evidence = Evidence(law)
        for row in weights(cases, 20):
            for temperature, top_k, top_p in knobs:
                case = {"weights": row, "temperature": temperature, "top_k": top_k, "top_p": top_p}
                got = held_row(warp(list(row), temperature, top_k, top_p), len(row), A_LAW, case)
                expected = apply_warpers(row, (), SamplingParams(float(temperature), top_k, top_p))
                if law is not A_LAW and not same_row(expected, got):
                    accuse(law, expected, got, **case)
                evidence.cases += 1
        return evidence

    judge.__name__, judge.__doc__ = law, law
    return judge


ONE, HALF, THIRD, ZERO = Fraction(1), Fraction(1, 2), Fraction(1, 3), Fraction(0)
a_law = of_warp(A_LAW, [(ONE, None, None), (HALF, 2, Fraction(9, 10))])
temperature = of_warp(
    TEMPERATURE, [(ONE, None, None), (HALF, None, None), (THIRD, None, None), (ZERO, None, None)]
)
top_k = of_warp(TOP_K, [(ONE, 1, None), (ONE, 2, None), (ONE, 3, None), (ONE, 7, None)])
top_p = of_warp(
    TOP_P, [(ONE, None, x) for x in (HALF, THIRD, Fraction(3, 4), Fraction(9, 10), ONE)]
)
order = of_warp(
    ORDER,
    [
        (HALF, 2, None),
        (HALF, None, Fraction(3, 4)),
        (ONE, 2, Fraction(3, 5)),
        (THIRD, 3, Fraction(4, 5)),
        (ZERO, 2, HALF),
    ],
)


# ------------------------------------------------------------------ A1.2 and A1.3 two laws


def two_laws(cases: Cases, drawn: int = 60) -> Iterator[tuple[Exact, Exact]]:
    """Pairs (p, q): all small ones, then drawn ones over three to five tokens."""
    yield from distribution_pairs(largest=5)
    rng = random.Random(f"two laws {cases.seed}")
    for _ in range(drawn * cases.times):
        size = rng.randint(3, 5)
        yield one_law(rng, size), one_law(rng, size)


def one_law(rng: random.Random, size: int) -> Exact:
    """A law of whole weights up to 4, many of them 0."""
    drawn = [max(0, rng.randrange(-2, 5)) for _ in range(size)]
    drawn[rng.randrange(size)] += 1
    return tuple(Fraction(x, sum(drawn)) for x in drawn)


def acceptances(
    acceptance: Function, cases: Cases, law: str
) -> Iterator[tuple[dict[str, Any], Fraction, Any]]:
    """(the case, min(p, q) of its token, the acceptance), checked to be numbers."""
    for p, q in two_laws(cases):
        for token in range(len(p)):
            if q[token] > 0:
                case = {"p (target row)": list(p), "q (draft row)": list(q), "draft token": token}
                got = acceptance(list(p), list(q), token)
                if not is_number(got):
                    accuse(law, "a number (no bool, no nan)", got, **case)
                yield case, min(p[token], q[token]), got


def probability(acceptance: Function, cases: Cases) -> Evidence:
    """The acceptance is a number from 0 to 1."""
    evidence = Evidence(PROBABILITY)
    for case, _, got in acceptances(acceptance, cases, PROBABILITY):
        evidence.cases += 1
        if not 0 <= got <= 1:
            accuse(PROBABILITY, "a number from 0 to 1", got, **case)
    return evidence


def over(acceptance: Function, cases: Cases) -> Evidence:
    """Where q(x) > p(x), q(x) a(x) = p(x)."""
    return ratio(OVER, acceptance, cases)


def under(acceptance: Function, cases: Cases) -> Evidence:
    """Where q(x) <= p(x), a(x) = 1."""
    return ratio(UNDER, acceptance, cases)


def ratio(law: str, acceptance: Function, cases: Cases) -> Evidence:
    """Compare the acceptance with min(p, q) / q, on the side that the law speaks of."""
    evidence = Evidence(law)
    for case, mass, got in acceptances(acceptance, cases, law):
        drafted = case["q (draft row)"][case["draft token"]]
        if (mass < drafted) == (law is OVER):
            evidence.cases += 1
            if not close(mass / drafted, got):
                accuse(law, mass / drafted, got, **case)
    return evidence


def residuals(
    residual: Function, cases: Cases, law: str, scaled: bool = True
) -> Iterator[tuple[dict[str, Any], Exact, Exact, list[Any]]]:
    """Yield (the case, p, q, the residual) for distributions that differ; `scaled` as for
    `held_row`.
    """
    for p, q in two_laws(cases):
        if p != q:
            case = {"p (target row)": list(p), "q (draft row)": list(q)}
            yield case, p, q, held_row(residual(list(p), list(q)), len(p), law, case, scaled)


def rest(residual: Function, cases: Cases) -> Evidence:
    """What is left is a law."""
    return Evidence(REST, sum(1 for _ in residuals(residual, cases, REST)))


def beyond(residual: Function, cases: Cases) -> Evidence:
    """Nothing is recovered that the draft says at least as often as the target."""
    evidence = Evidence(BEYOND)
    for case, p, q, got in residuals(residual, cases, REST, scaled=False):
        evidence.cases += 1
        for token, (a, b) in enumerate(zip(p, q, strict=True)):
            if a <= b and not close(0, got[token]):
                accuse(BEYOND, f"0 at token {token}, where p is {a} and q is {b}", got, **case)
    return evidence


def whole(residual: Function, cases: Cases) -> Evidence:
    """min(p, q) + (1 - alpha) r = p."""
    evidence = Evidence(WHOLE)
    for case, p, q, got in residuals(residual, cases, REST):
        evidence.cases += 1
        refused = 1 - overlap_mass(p, q)
        said = [min(a, b) + refused * x for a, b, x in zip(p, q, got, strict=True)]
        if not same_row(p, said):
            accuse(WHOLE, list(p), said, **case, residual=got, alpha=1 - refused)
    return evidence


def equal(residual: Function, cases: Cases) -> Evidence:
    """Where the laws are equal, p comes back and nothing is divided by 0."""
    evidence = Evidence(EQUAL)
    rng = random.Random(f"equal {cases.seed}")
    small = [row for size in (2, 3) for below in range(1, 4) for row in distributions(size, below)]
    for p in (*small, *(one_law(rng, rng.randint(3, 5)) for _ in range(20 * cases.times))):
        case = {"p (target row)": list(p), "q (draft row)": list(p)}
        got = held_row(residual(list(p), list(p)), len(p), EQUAL, case)
        evidence.cases += 1
        if not same_row(p, got):
            accuse(EQUAL, list(p), got, **case)
    return evidence
