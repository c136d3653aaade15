"""Laws of assignment A3 on single numbers: confidences, and the layer after which a token
leaves.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

from tinyspec.grade.task import (
    Cases,
    Function,
    GradedLaw,
    Task,
    describe_result,
    expect_close,
    graded_law,
    require_number,
)
from tinyspec.laws.evidence import accuse

CALM = "CALM, arXiv 2207.07061"
GAP = f"the softmax response is the gap of the two likeliest words ({CALM}, section 3.5)"
COSINE = f"saturation is the cosine of two states that follow each other ({CALM}, section 3.5)"
RANGE = "a confidence is a number from 0 to 1"
FIRST = "a token leaves after the first layer that is sure"
DECAY = f"the threshold is 0.9 lambda + 0.1 exp(-tau t / N) ({CALM}, section 3.4)"
CUT = "the threshold of a token is cut to 1, lambda itself is not; and inf means never"

TOO_NEAR = 1e-4  # a confidence so near to the threshold is left out: rounding must not decide


# ---------------------------------------------------------------------- confidences


def draw_rows(cases: Cases) -> Iterator[list[Fraction]]:
    """Yield distributions over two to four words, the simplest first."""
    weights: list[tuple[int, ...]] = [(1, 1), (0, 1), (1, 3), (2, 1), (1, 1, 1), (0, 1, 0)]
    weights += [(1, 4, 3), (2, 1, 2), (3, 1, 2)]
    random = Random(cases.seed)
    for size in (2, 3, 4):
        for _ in range(40 * cases.times):
            first = tuple(random.randrange(7) for _ in range(size - 1))
            weights.append((*first, random.randrange(1, 7)))
    for row in weights:
        yield [Fraction(weight, sum(row)) for weight in row]


@graded_law(4, GAP)
def softmax_response_is_the_gap(softmax_response: Function, cases: Cases) -> Iterator[bool]:
    """Check that it is neither the greatest alone, nor the first two entries, nor the range."""
    for row in draw_rows(cases):
        top = sorted(row)
        got = require_number(GAP, softmax_response(list(row)), row=row)
        expect_close(GAP, top[-1] - top[-2], got, row=row)
        yield True


def draw_states(cases: Cases) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of states in two to eight dimensions, the simplest first."""
    yield from (([1, 0], [1, 0]), ([2, 0], [1, 0]), ([1, 0], [0, 1]), ([3, 4], [4, 3]))
    yield from (([1, 0], [-1, 0]), ([0, 0], [1, 0]), ([1, 2], [0, 0]), ([0, 0], [0, 0]))
    random = Random(cases.seed)
    for size in (2, 3, 5, 8):
        for _ in range(40 * cases.times):
            one, other = ([random.randrange(-4, 5) for _ in range(size)] for _ in range(2))
            yield one, other


def state_cosine(state: Sequence[int], below: Sequence[int]) -> float:
    """Return the cosine of two states, and -1 if one of them is all zeros."""
    squares = math.fsum(x * x for x in state) * math.fsum(x * x for x in below)
    product = sum(x * y for x, y in zip(state, below, strict=True))
    return product / math.sqrt(squares) if squares else -1.0


def saturation_law(points: int, sentence: str, *needs: str) -> GradedLaw:
    """Return the law of the saturation: COSINE for states of one side, RANGE for all others."""

    @graded_law(points, sentence, *needs)
    def look(saturation: Function, cases: Cases) -> Iterator[bool]:
        for state, below in draw_states(cases):
            expected, case = state_cosine(state, below), {"state": state, "below": below}
            if (expected >= 0) == (sentence is COSINE):
                got = require_number(sentence, saturation(list(state), list(below)), **case)
                expect_close(sentence, max(expected, 0.0), got, **case)
                yield True

    return look


saturation_is_the_cosine = saturation_law(4, COSINE)
saturation_is_in_range = saturation_law(2, RANGE, COSINE)


# ---------------------------------------------------------------------- the exit layer


def check_exit(
    law: str, exit_layer: Function, confidences: Sequence[float], due: float, **given: Any
) -> None:
    """Accuse unless the token leaves after the first layer whose confidence reaches `due`."""
    sure = (layer for layer, confidence in enumerate(confidences, 1) if confidence >= due)
    expected = next(sure, len(confidences) + 1)
    got = exit_layer(list(confidences), **given)
    case = {"confidences": list(confidences), **given}
    if isinstance(got, bool) or not isinstance(got, int):
        accuse(law, f"a layer from 1 to {len(confidences) + 1}", describe_result(got), **case)
    expect_close(law, expected, got, **case, **{"threshold of this token": due})


@graded_law(3, FIRST)
def leaves_at_the_first(exit_layer: Function, cases: Cases) -> Iterator[bool]:
    """Check the first token: there the threshold 1 is 1, whatever the form of the decay."""
    for size in (1, 2, 3):
        for confidences in product((1.0, 0.5, 0.0), repeat=size):
            check_exit(FIRST, exit_layer, confidences, 1.0, threshold=1.0, step=0, limit=4, tau=4.0)
            yield True


def decayed_threshold(threshold: float, step: int, limit: int, tau: float) -> float:
    """Return the threshold of a token before it is cut."""
    return 0.9 * threshold + 0.1 * math.exp(-tau * step / limit)


@graded_law(5, DECAY)
def threshold_decays(exit_layer: Function, cases: Cases) -> Iterator[bool]:
    """Check positions of a text with confidences a little above and below the threshold."""
    random = Random(cases.seed)
    settings = [(0.5, 0, 10, 4.0), (0.5, 5, 10, 4.0), (0.5, 10, 10, 4.0)]
    settings += [(0.8, 3, 4, 0.0), (0.25, 1, 4, 2.0)]
    for _ in range(200 * cases.times):
        limit = random.randrange(1, 20)
        threshold, step = random.randrange(9) / 8, random.randrange(limit + 1)
        settings.append((threshold, step, limit, random.choice((0.0, 0.5, 1.0, 4.0, 8.0))))
    for number, (threshold, step, limit, tau) in enumerate(settings):
        due = decayed_threshold(threshold, step, limit, tau)
        offsets = (-0.2, -0.02, -0.01, 0.01, 0.02)
        count = 1 + min(number // 5, 3)
        near = [round(due + random.choice(offsets), 3) for _ in range(count)]
        near = [min(max(x, 0.0), 1.0) for x in near]
        if all(abs(x - due) >= TOO_NEAR for x in near):
            given = {"threshold": threshold, "step": step, "limit": limit, "tau": tau}
            check_exit(DECAY, exit_layer, near, due, **given)
            yield True


@graded_law(3, CUT)
def threshold_is_cut(exit_layer: Function, cases: Cases) -> Iterator[bool]:
    """Check that a threshold above 1 is 1, which a sure token reaches; only inf is never reached.

    lambda = 1.25, tau = 8, t = 2 of 4: 1.125 + 0.1 e^-4 is cut to 1, and 0.95 stays; were lambda
    cut, 0.9 + 0.1 e^-4 = 0.9018 would let it leave. lambda = 1.05, tau = 4, t = 4 of 4: 0.945 + 0.1
    e^-4 = 0.9468 is not cut, and 0.95 leaves.
    """
    random = Random(cases.seed)
    settings = [(threshold, step, 4.0) for threshold in (math.inf, 1.25, 3.0) for step in (0, 2)]
    settings += [(1.25, 2, 8.0), (1.05, 4, 4.0), (1.05, 2, 4.0)]
    for _ in range(20 * cases.times):
        threshold, step = random.randrange(101, 130) / 100, random.randrange(5)
        settings.append((threshold, step, random.choice((1.0, 4.0, 8.0))))
    for threshold, step, tau in settings:
        uncut = decayed_threshold(threshold, step, 4, tau)
        due = math.inf if threshold == math.inf else min(uncut, 1.0)
        given = {"threshold": threshold, "step": step, "limit": 4, "tau": tau}
        for size in (1, 2):
            for confidences in product((0.9, 0.95, 1.0), repeat=size):
                if all(abs(uncut - x) >= TOO_NEAR for x in confidences):
                    check_exit(CUT, exit_layer, confidences, due, **given)
                    yield True


SOFTMAX_RESPONSE_TASK = Task(
    "softmax_response", "A3.1 Confidence: the softmax response", (softmax_response_is_the_gap,)
)
SATURATION_TASK = Task(
    "saturation", "A3.2 Confidence: saturation", (saturation_is_the_cosine, saturation_is_in_range)
)
EXIT_LAYER_TASK = Task(
    "exit_layer", "A3.3 The exit layer", (leaves_at_the_first, threshold_decays, threshold_is_cut)
)
