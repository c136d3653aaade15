"""NAT (Gu et al. 2018): fertilities decide the canvas, not a length.

A position sees the others and their places, and the teacher chooses the translation.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.nonautoregressive_laws import (
    EXPECTED_COST,
    FERTILITY_RULE,
    NESTED,
    SUPERVISED,
    Build,
    fertilities_are_learnt,
    fertility_probs,
    fixed_fertilities,
    gradient_of_the_expectation,
    noisy_parallel,
    random_student,
    random_teacher,
    run_refinement,
    samples_are_nested,
    teacher_score,
    translate_in_parallel,
    usable_fertilities,
)
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.nonautoregressive import nat
from tinyspec.technique import RefineRequest

FERTILE = "a source word stands on the canvas as often as it is fertile"
PASS = "a place sees the other places' copies, and where they stand"
TEACHER = "the teacher chooses, not the student"

SOURCES = ((4, 5), (5, 7, 4), (6, 4, 7, 5))


def _fertility_cases() -> Iterator[tuple[Any, tuple[int, ...], list[int]]]:
    """Yield models, sources and the likeliest fertilities of their words."""
    for seed, source in product(range(3), SOURCES):
        model = random_student(seed)
        probs = fertility_probs(model, source)
        yield model, source, usable_fertilities(fixed_fertilities(probs, "argmax"), probs, 24)


@collect_evidence(FERTILE)
def words_stand_by_fertility(build: Build) -> Iterator[int]:
    """Check the first canvas against copies made by hand."""
    for model, source, fertilities in _fertility_cases():
        memory = model.encode(torch.tensor([list(source)]))
        canvas = build(RefineRequest(model), samples=1).start(source, memory, Seeded(0))
        copies = [word for word, f in zip(source, fertilities, strict=True) for _ in range(f)]
        expect_equal(FERTILE, copies, canvas.text(0), source=source, fertilities=fertilities)
        yield 0


@collect_evidence(PASS)
def one_pass_as_published(build: Build) -> Iterator[int]:
    """Check the translation of one fertility sequence.

    It is compared with the decoder on a mask and inputs that are written out.
    """
    for model, source, fertilities in _fertility_cases():
        expected = translate_in_parallel(model, source, fertilities)
        run = run_refinement(build, RefineRequest(model), source, samples=1)
        expect_equal(PASS, expected, run.tokens, source=source, fertilities=fertilities)
        yield 0


@collect_evidence(TEACHER)
def the_teacher_chooses(build: Build) -> Iterator[int]:
    """Check the choice among eight candidates, where the model's own favourite is another one."""
    for seed, source in product(range(4), SOURCES[1:]):
        model, judge = random_student(seed), random_teacher(seed)
        request = RefineRequest(model, judge)
        refiner = build(request, samples=8)
        memory = model.encode(torch.tensor([list(source)]))
        canvas = refiner.rewrite(refiner.start(source, memory, Seeded(seed)), memory, 0, Seeded(1))
        texts = [canvas.text(candidate) for candidate in range(len(canvas.tokens))]
        scores = [teacher_score(judge, source, text) for text in texts]
        best, favourite = texts[scores.index(max(scores))], texts[int(canvas.means().argmax())]
        got = texts[refiner.choose(canvas, source, memory)]
        expect_equal(TEACHER, best, got, source=source, candidates=texts, scores=scores)
        if favourite != best:
            yield 0


TRAPS = [
    Trap(FERTILITY_RULE, noisy_parallel, refine_card("nat")),
    Trap(NESTED, samples_are_nested, refine_card("nat")),
    Trap(FERTILE, words_stand_by_fertility, refine_card("nat")),
    Trap(PASS, one_pass_as_published, refine_card("nat")),
    Trap(TEACHER, the_teacher_chooses, refine_card("nat")),
    Trap(SUPERVISED, fertilities_are_learnt, lambda: nat.nat_loss),
    Trap(EXPECTED_COST, gradient_of_the_expectation, lambda: nat.reinforce_surrogate),
]
