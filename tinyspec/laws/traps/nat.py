"""NAT (Gu et al. 2018): fertilities, not a length; a place sees the others and where they stand;
the teacher chooses.
"""

from itertools import product

import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.nonautoregressive_laws import (
    EXPECTED_COST,
    FERTILITY_RULE,
    NESTED,
    SUPERVISED,
    Build,
    decode_once,
    fertilities_are_learnt,
    fertility_law,
    fixed_fertilities,
    gradient_of_the_expectation,
    noisy_parallel,
    random_student,
    random_teacher,
    samples_are_nested,
    teacher_score,
    translate_in_parallel,
    usable_fertilities,
)
from tinyspec.laws.traps import Trap
from tinyspec.nonautoregressive import nat
from tinyspec.technique import RefineRequest, find_technique

FERTILE = "a source word stands on the canvas as often as it is fertile"
PASS = "a place sees the other places' copies, and where they stand"
TEACHER = "the teacher chooses, not the student"

SOURCES = ((4, 5), (5, 7, 4), (6, 4, 7, 5))


def words_stand_by_fertility(build: Build) -> Evidence:
    """The first canvas, against copies made by hand."""
    seen = 0
    for seed, source in product(range(3), SOURCES):
        model = random_student(seed)
        law = fertility_law(model, source)
        fertilities = usable_fertilities(fixed_fertilities(law, "argmax"), law, 24)
        memory = model.encode(torch.tensor([list(source)]))
        canvas = build(RefineRequest(model), samples=1).start(source, memory, Seeded(0))
        want = [word for word, f in zip(source, fertilities, strict=True) for _ in range(f)]
        got, seen = canvas.text(0), seen + 1
        if got != want:
            accuse(FERTILE, want, got, source=source, fertilities=fertilities)
    return Evidence(FERTILE, seen)


def one_pass_as_published(build: Build) -> Evidence:
    """The translation of one fertility sequence, against the decoder with a mask and inputs written
    out.
    """
    seen = 0
    for seed, source in product(range(3), SOURCES):
        model = random_student(seed)
        law = fertility_law(model, source)
        fertilities = usable_fertilities(fixed_fertilities(law, "argmax"), law, 24)
        want = translate_in_parallel(model, source, fertilities)
        got, seen = (
            list(decode_once(build, RefineRequest(model), source, Seeded(0), samples=1)),
            seen + 1,
        )
        if got != want:
            accuse(PASS, want, got, source=source, fertilities=fertilities)
    return Evidence(PASS, seen)


def the_teacher_chooses(build: Build) -> Evidence:
    """Among eight candidates, on models whose own favourite is another one."""
    seen = 0
    for seed, source in product(range(4), SOURCES[1:]):
        model, judge = random_student(seed), random_teacher(seed)
        request = RefineRequest(model, judge)
        refiner = build(request, samples=8)
        memory = model.encode(torch.tensor([list(source)]))
        canvas = refiner.rewrite(refiner.start(source, memory, Seeded(seed)), memory, 0, Seeded(1))
        texts = [canvas.text(candidate) for candidate in range(len(canvas.tokens))]
        scores = [teacher_score(judge, source, text) for text in texts]
        want, own = texts[scores.index(max(scores))], texts[int(canvas.means().argmax())]
        got = texts[refiner.choose(canvas, source, memory)]
        seen += own != want
        if got != want:
            accuse(TEACHER, want, got, source=source, candidates=texts, scores=scores)
    return Evidence(TEACHER, seen)


TRAPS = [
    Trap(FERTILITY_RULE, noisy_parallel, lambda: find_technique("nat").refiner),
    Trap(NESTED, samples_are_nested, lambda: find_technique("nat").refiner),
    Trap(FERTILE, words_stand_by_fertility, lambda: find_technique("nat").refiner),
    Trap(PASS, one_pass_as_published, lambda: find_technique("nat").refiner),
    Trap(TEACHER, the_teacher_chooses, lambda: find_technique("nat").refiner),
    Trap(SUPERVISED, fertilities_are_learnt, lambda: nat.nat_loss),
    Trap(EXPECTED_COST, gradient_of_the_expectation, lambda: nat.reinforce_surrogate),
]
