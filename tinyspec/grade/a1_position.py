"""Laws of the functions of assignment A1 that look at one position: warp, acceptance, residual.

The expected values come from `laws.exact`, and never from the reference solution.
"""

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.grade.task import (
    Cases,
    Function,
    GradedLaw,
    Task,
    expect_close,
    graded_law,
    is_close,
    is_number,
    require_number,
)
from tinyspec.laws.evidence import accuse
from tinyspec.laws.exact.joint import apply_warpers
from tinyspec.laws.exact.rational import Exact, distribution_pairs, distributions, overlap_mass

Knobs = tuple[Fraction, int | None, Fraction | None]

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


def require_row(
    law: str, row: Any, size: int, case: dict[str, Any], must_sum_to_one: bool = True
) -> list[Any]:
    """Return the row if it is a list of `size` numbers, none below 0; accuse it otherwise.

    must_sum_to_one  False: the numbers may add up to anything above 0
    """
    if not isinstance(row, (list, tuple)) or len(row) != size or not all(map(is_number, row)):
        # A text in a list looks like a number when it is printed without its quotes.
        is_shown_quoted = isinstance(row, (list, tuple)) and any(isinstance(x, str) for x in row)
        got = repr(row) if is_shown_quoted else row
        accuse(law, f"a list of {size} numbers (no bool, no nan)", got, **case)
    if any(x < 0 for x in row):
        accuse(law, "no number below 0", list(row), **case)
    if not is_close(1, sum(row)) if must_sum_to_one else not sum(row) > 0:
        accuse(law, f"{size} numbers that add up to 1", {"row": list(row), "sum": sum(row)}, **case)
    return list(row)


# ---------------------------------------------------------------------- A1.1 the warper


def draw_weights(cases: Cases) -> Iterator[list[Fraction]]:
    """Yield rows of weights: whole ones of two and three tokens, some fractions, longer ones."""
    for size in (2, 3):
        for row in sorted(product(range(4), repeat=size), key=lambda row: (sum(row), row)):
            if any(row):
                yield [Fraction(x) for x in row]
    for parts in ((3, 2), (1, 2), (2, 3), (1, 1), (1, 3, 2)):
        yield [Fraction(x, 2) for x in parts]
    rng = random.Random(f"weights {cases.seed}")
    for _ in range(20 * cases.times):
        row = tuple(rng.randrange(7) for _ in range(rng.randint(3, 6)))
        denominator = rng.choice((1, 2, 3, 4))
        yield [Fraction(x, denominator) for x in (row if any(row) else (1, *row[1:]))]


def warper_law(points: int, sentence: str, *knobs: Knobs) -> GradedLaw:
    """Return the law that the warper gives the right rows under these settings."""

    @graded_law(points, sentence)
    def judge(warp: Function, cases: Cases) -> Iterator[bool]:
        for row in draw_weights(cases):
            for temperature, top_k, top_p in knobs:
                case = {"weights": row, "temperature": temperature, "top_k": top_k, "top_p": top_p}
                got = require_row(A_LAW, warp(list(row), temperature, top_k, top_p), len(row), case)
                if sentence is not A_LAW:
                    sampling = SamplingParams(float(temperature), top_k, top_p)
                    expect_close(sentence, apply_warpers(row, (), sampling), got, **case)
                yield True

    return judge


ONE, HALF, THIRD, ZERO = Fraction(1), Fraction(1, 2), Fraction(1, 3), Fraction(0)
warper_is_a_distribution = warper_law(3, A_LAW, (ONE, None, None), (HALF, 2, Fraction(9, 10)))
temperature_is_right = warper_law(
    4, TEMPERATURE, *((t, None, None) for t in (ONE, HALF, THIRD, ZERO))
)
top_k_is_right = warper_law(4, TOP_K, *((ONE, k, None) for k in (1, 2, 3, 7)))
top_p_is_right = warper_law(
    5, TOP_P, *((ONE, None, p) for p in (HALF, THIRD, Fraction(3, 4), Fraction(9, 10), ONE))
)
order_is_right = warper_law(
    4,
    ORDER,
    (HALF, 2, None),
    (HALF, None, Fraction(3, 4)),
    (ONE, 2, Fraction(3, 5)),
    (THIRD, 3, Fraction(4, 5)),
    (ZERO, 2, HALF),
)


# ---------------------------------------------------------------------- A1.2 and A1.3


def draw_pairs(cases: Cases) -> Iterator[tuple[Exact, Exact]]:
    """Yield pairs (p, q): all small ones, then drawn ones over three to five tokens."""
    yield from distribution_pairs(largest=5)
    rng = random.Random(f"two laws {cases.seed}")
    for _ in range(60 * cases.times):
        size = rng.randint(3, 5)
        yield draw_distribution(rng, size), draw_distribution(rng, size)


def draw_distribution(rng: random.Random, size: int) -> Exact:
    """Return a distribution of whole weights up to 4, many of them 0."""
    drawn = [max(0, rng.randrange(-2, 5)) for _ in range(size)]
    drawn[rng.randrange(size)] += 1
    return tuple(Fraction(x, sum(drawn)) for x in drawn)


def pair_case(p: Sequence[Any], q: Sequence[Any]) -> dict[str, Any]:
    """Return a case of two distributions in the words of the hand-out."""
    return {"p (target row)": list(p), "q (draft row)": list(q)}


def each_acceptance(
    acceptance: Function, cases: Cases, law: str
) -> Iterator[tuple[dict[str, Any], Fraction, Any]]:
    """Yield the case, min(p, q) / q of its token, and the acceptance that came back, a number."""
    for p, q in draw_pairs(cases):
        for token in range(len(p)):
            if q[token] > 0:
                case = {**pair_case(p, q), "draft token": token}
                got = require_number(law, acceptance(list(p), list(q), token), **case)
                yield case, min(p[token], q[token]) / q[token], got


@graded_law(2, PROBABILITY)
def acceptance_is_a_probability(acceptance: Function, cases: Cases) -> Iterator[bool]:
    """Check that the acceptance is a number from 0 to 1."""
    for case, _, got in each_acceptance(acceptance, cases, PROBABILITY):
        if not 0 <= got <= 1:
            accuse(PROBABILITY, "a number from 0 to 1", got, **case)
        yield True


def acceptance_law(points: int, sentence: str, *needs: str) -> GradedLaw:
    """Return the law of the acceptance where q(x) > p(x) for OVER, where q(x) <= p(x) for UNDER."""

    @graded_law(points, sentence, *needs)
    def judge(acceptance: Function, cases: Cases) -> Iterator[bool]:
        for case, expected, got in each_acceptance(acceptance, cases, sentence):
            if (expected < 1) == (sentence is OVER):
                expect_close(sentence, expected, got, **case)
                yield True

    return judge


acceptance_is_p_over_q = acceptance_law(5, OVER)
acceptance_is_one = acceptance_law(3, UNDER, OVER)


def each_residual(
    residual: Function, cases: Cases, must_sum_to_one: bool = True
) -> Iterator[tuple[dict[str, Any], Exact, Exact, list[Any]]]:
    """Yield the case, p, q and the residual for all pairs of distributions that differ."""
    for p, q in draw_pairs(cases):
        if p != q:
            got = residual(list(p), list(q))
            case = pair_case(p, q)
            yield case, p, q, require_row(REST, got, len(p), case, must_sum_to_one)


@graded_law(2, REST)
def residual_is_a_distribution(residual: Function, cases: Cases) -> Iterator[bool]:
    """Check that the residual is a distribution."""
    for _ in each_residual(residual, cases):
        yield True


@graded_law(5, BEYOND)
def residual_is_beyond_the_draft(residual: Function, cases: Cases) -> Iterator[bool]:
    """Check that no token is recovered that the draft proposes as often as the target, or more."""
    for case, p, q, got in each_residual(residual, cases, must_sum_to_one=False):
        for token, (a, b) in enumerate(zip(p, q, strict=True)):
            if a <= b and not is_close(0, got[token]):
                accuse(BEYOND, f"0 at token {token}, where p is {a} and q is {b}", got, **case)
        yield True


@graded_law(6, WHOLE, REST)
def residual_completes_the_target(residual: Function, cases: Cases) -> Iterator[bool]:
    """Check that min(p, q) + (1 - alpha) r = p."""
    for case, p, q, got in each_residual(residual, cases):
        alpha = overlap_mass(p, q)
        sums = [min(a, b) + (1 - alpha) * x for a, b, x in zip(p, q, got, strict=True)]
        expect_close(WHOLE, list(p), sums, **case, residual=got, alpha=alpha)
        yield True


@graded_law(2, EQUAL)
def residual_of_equals_is_the_target(residual: Function, cases: Cases) -> Iterator[bool]:
    """Check that p comes back where p = q, and that nothing is divided by 0."""
    rng = random.Random(f"equal {cases.seed}")
    small = [row for size in (2, 3) for below in range(1, 4) for row in distributions(size, below)]
    drawn = (draw_distribution(rng, rng.randint(3, 5)) for _ in range(20 * cases.times))
    for p in (*small, *drawn):
        case = pair_case(p, p)
        got = require_row(EQUAL, residual(list(p), list(p)), len(p), case)
        expect_close(EQUAL, list(p), got, **case)
        yield True


WARP_TASK = Task(
    "warp",
    "A1.1 The warper",
    (
        warper_is_a_distribution,
        temperature_is_right,
        top_k_is_right,
        top_p_is_right,
        order_is_right,
    ),
)
ACCEPTANCE_TASK = Task(
    "acceptance",
    "A1.2 The acceptance",
    (acceptance_is_a_probability, acceptance_is_p_over_q, acceptance_is_one),
)
RESIDUAL_TASK = Task(
    "residual",
    "A1.3 The residual",
    (
        residual_is_a_distribution,
        residual_is_beyond_the_draft,
        residual_completes_the_target,
        residual_of_equals_is_the_target,
    ),
)
