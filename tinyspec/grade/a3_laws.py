"""What A3 holds its functions of single numbers to: confidences, and the layer after which a token
leaves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, accuse

GAP = "the softmax response is the gap of the two likeliest words (CALM, arXiv 2207.07061, section 3.5)"
COSINE = "saturation is the cosine of two states that follow each other (CALM, arXiv 2207.07061, section 3.5)"
RANGE = "a confidence is a number from 0 to 1"
FIRST = "a token leaves after the first layer that is sure"
DECAY = "the threshold is 0.9 lambda + 0.1 exp(-tau t / N) (CALM, arXiv 2207.07061, section 3.4)"
CUT = "the threshold of a token is cut to 1, lambda itself is not; and inf means never"

WITHIN = 1e-9
Function = Callable[..., Any]


def number(law: str, got: Any, **case: Any) -> Any:
    """What came back, if it is a number."""
    if isinstance(got, bool) or not isinstance(got, (int, float, Fraction)):
        accuse(law, "a number", words(got), **case)
    return got


def words(got: Any) -> str:
    """What came back in place of what was asked for."""
    return "None: nothing was returned" if got is None else f"{got!r} ({type(got).__name__})"


def equal(expected: Any, got: Any) -> bool:
    """Exactly so between fractions, to nine digits where a float is among them. Not-a-number equals
    nothing.
    """
    if isinstance(expected, float) or isinstance(got, float):
        return bool(expected == got or abs(expected - got) <= WITHIN)
    return bool(expected == got)


# ---------------------------------------------------------------------- confidences


def rows(cases: Cases) -> Iterator[list[Fraction]]:
    """Laws over two to four words, the simplest first."""
    weights: list[tuple[int, ...]] = [
        (1, 1),
        (0, 1),
        (1, 3),
        (2, 1),
        (1, 1, 1),
        (0, 1, 0),
        (1, 4, 3),
        (2, 1, 2),
        (3, 1, 2),
    ]
    random = Random(cases.seed)
    for size in (2, 3, 4):
        for _ in range(40 * cases.times):
            weights.append(
                (*(random.randrange(7) for _ in range(size - 1)), random.randrange(1, 7))
            )
    for row in weights:
        yield [Fraction(weight, sum(row)) for weight in row]


def is_the_gap(function: Function, cases: Cases) -> Evidence:
    """Not the greatest alone, not the greatest two places, not the greatest less the least."""
    seen = 0
    for row in rows(cases):
        top = sorted(row)
        got, seen = number(GAP, function(list(row)), row=row), seen + 1
        if not equal(top[-1] - top[-2], got):
            accuse(GAP, top[-1] - top[-2], got, row=row)
    return Evidence(GAP, seen)


def vectors(cases: Cases) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of states in two to eight dimensions, the simplest first."""
    yield from (
        ([1, 0], [1, 0]),
        ([2, 0], [1, 0]),
        ([1, 0], [0, 1]),
        ([3, 4], [4, 3]),
        ([1, 0], [-1, 0]),
        ([0, 0], [1, 0]),
    )
    yield from (([1, 2], [0, 0]), ([0, 0], [0, 0]))
    random = Random(cases.seed)
    for size in (2, 3, 5, 8):
        for _ in range(40 * cases.times):
            one, other = ([random.randrange(-4, 5) for _ in range(size)] for _ in range(2))
            yield one, other


def cosine(state: Sequence[int], below: Sequence[int]) -> float | None:
    """None where a state is all zeros."""
    squares = math.fsum(x * x for x in state) * math.fsum(x * x for x in below)
    return (
        sum(x * y for x, y in zip(state, below, strict=True)) / math.sqrt(squares)
        if squares
        else None
    )


def is_the_cosine(function: Function, cases: Cases) -> Evidence:
    """Where the two states point to the same side."""
    seen = 0
    for state, below in vectors(cases):
        expected, case = cosine(state, below), {"state": state, "below": below}
        if expected is None or expected < 0:
            continue
        got, seen = number(COSINE, function(list(state), list(below)), **case), seen + 1
        if not equal(expected, got):
            accuse(COSINE, expected, got, **case)
    return Evidence(COSINE, seen)


def is_in_range(function: Function, cases: Cases) -> Evidence:
    """States that point to opposite sides, and the state that points nowhere."""
    seen = 0
    for state, below in vectors(cases):
        expected, case = cosine(state, below), {"state": state, "below": below}
        if expected is not None and expected >= 0:
            continue
        got, seen = number(RANGE, function(list(state), list(below)), **case), seen + 1
        if not equal(0.0, got):
            accuse(RANGE, 0.0, got, **case)
    return Evidence(RANGE, seen)


# ---------------------------------------------------------------------- the exit layer


def leaves(
    law: str, function: Function, confidences: Sequence[float], due: float, **case: Any
) -> None:
    """Accuse unless the token leaves after the first layer whose confidence reaches what is due."""
    first = next(
        (at for at, confidence in enumerate(confidences, 1) if confidence >= due),
        len(confidences) + 1,
    )
    got = function(list(confidences), **case)
    case = {"confidences": list(confidences), **case}
    if isinstance(got, bool) or not isinstance(got, int):
        accuse(law, f"a layer from 1 to {len(confidences) + 1}", words(got), **case)
    if got != first:
        accuse(law, first, got, **case, **{"threshold of this token": due})


def leaves_at_the_first(function: Function, cases: Cases) -> Evidence:
    """At the first token the threshold 1 is 1, whatever the form of the decay."""
    seen = 0
    for size in (1, 2, 3):
        for confidences in product((1.0, 0.5, 0.0), repeat=size):
            leaves(FIRST, function, confidences, 1.0, threshold=1.0, step=0, limit=4, tau=4.0)
            seen += 1
    return Evidence(FIRST, seen)


def threshold_decays(function: Function, cases: Cases) -> Evidence:
    """At the places of a text, with confidences a little above and below what is due."""
    random, seen = Random(cases.seed), 0
    settings = [
        (0.5, 0, 10, 4.0),
        (0.5, 5, 10, 4.0),
        (0.5, 10, 10, 4.0),
        (0.8, 3, 4, 0.0),
        (0.25, 1, 4, 2.0),
    ]
    for _ in range(200 * cases.times):
        limit = random.randrange(1, 20)
        settings.append(
            (
                random.randrange(9) / 8,
                random.randrange(limit + 1),
                limit,
                random.choice((0.0, 0.5, 1.0, 4.0, 8.0)),
            )
        )
    for at, (threshold, step, limit, tau) in enumerate(settings):
        due = 0.9 * threshold + 0.1 * math.exp(-tau * step / limit)
        near = [
            round(due + random.choice((-0.2, -0.02, -0.01, 0.01, 0.02)), 3)
            for _ in range(1 + min(at // 5, 3))
        ]
        near = [min(max(x, 0.0), 1.0) for x in near]
        if any(abs(x - due) < 1e-4 for x in near):
            continue  # a rounding error must not decide
        leaves(DECAY, function, near, due, threshold=threshold, step=step, limit=limit, tau=tau)
        seen += 1
    return Evidence(DECAY, seen)


def threshold_is_cut(function: Function, cases: Cases) -> Evidence:
    """Above 1 it is 1, which a sure token reaches; only inf is never reached.

    lambda = 1.25, tau = 8, t = 2 of 4: 1.125 + 0.1 e^-4 is cut to 1, and 0.95 stays; were lambda
    cut, 0.9 + 0.1 e^-4 = 0.9018 would let it leave. lambda = 1.05, tau = 4, t = 4 of 4: 0.945 + 0.1
    e^-4 = 0.9468 is not cut, and 0.95 leaves.
    """
    random, seen = Random(cases.seed), 0
    settings = [(threshold, step, 4.0) for threshold in (math.inf, 1.25, 3.0) for step in (0, 2)]
    settings += [(1.25, 2, 8.0), (1.05, 4, 4.0), (1.05, 2, 4.0)]
    for _ in range(20 * cases.times):
        settings.append(
            (random.randrange(101, 130) / 100, random.randrange(5), random.choice((1.0, 4.0, 8.0)))
        )
    for threshold, step, tau in settings:
        asked = 0.9 * threshold + 0.1 * math.exp(-tau * step / 4)
        due = math.inf if threshold == math.inf else min(asked, 1.0)
        for size in (1, 2):
            for confidences in product((0.9, 0.95, 1.0), repeat=size):
                if any(abs(asked - x) < 1e-4 for x in confidences):
                    continue  # a rounding error must not decide
                leaves(
                    CUT,
                    function,
                    confidences,
                    due,
                    threshold=threshold,
                    step=step,
                    limit=4,
                    tau=tau,
                )
                seen += 1
    return Evidence(CUT, seen)
