"""NAT (Gu et al. 2018): fertilities, not a length; a place sees the others and where they stand;
the teacher chooses.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, Refiner
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
from tinyspec.laws.traps import Toy, Trap
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive import nat
from tinyspec.nonautoregressive.nat import NatRefiner, copy_uniformly
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


# ------------------------------------------------------------------ toys


class EvenCopies(NatRefiner):
    """A length, and the source spread evenly over it."""

    def start(self, source: Any, memory: EncoderOutput, rng: Any) -> Canvas:
        canvas = super().start(source, memory, rng)
        lengths = canvas.mask.sum(dim=1)
        places, slots = copy_uniformly(torch.full_like(lengths, len(source)), lengths)
        return canvas._replace(tokens=torch.tensor(list(source))[places].masked_fill(~slots, 0))


def length_and_even_copies(request: RefineRequest, samples: int) -> Refiner:
    return EvenCopies(request.model, request.teacher, "argmax", samples, 1.0)


def without_positions(request: RefineRequest, samples: int) -> Refiner:
    """A decoder from the shelf: self-attention, cross-attention, nothing that looks at places."""
    model = request.model
    plain = Seq2Seq(replace(model.config, positional=False), model.weights)
    return NatRefiner(plain, None, "argmax", samples, 1.0)


class OwnPlace(NatRefiner):
    """Attention over all places, its own too."""

    def rewrite(self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: Any) -> Canvas:
        states = self.model.decode(self.model.embed(canvas.tokens), memory, None, slots=canvas.mask)
        scores, tokens = (
            nat.forbid_special_tokens(self.model, self.model.logits(states))
            .log_softmax(dim=-1)
            .max(dim=-1)
        )
        return canvas._replace(tokens=tokens, scores=scores)


def own_place_too(request: RefineRequest, samples: int) -> Refiner:
    return OwnPlace(request.model, None, "argmax", samples, 1.0)


class Immodest(NatRefiner):
    """The student keeps what it finds likeliest itself."""

    def choose(self, canvas: Canvas, source: Any, memory: EncoderOutput) -> int:
        return int(canvas.means().argmax())


def student_chooses(request: RefineRequest, samples: int) -> Refiner:
    return Immodest(request.model, request.teacher, "argmax", samples, 1.0)


def only_noise(request: RefineRequest, samples: int, fertility: str, temperature: float) -> Refiner:
    """Every sequence is sampled: the likeliest and the mean are not among them."""

    class Noise(NatRefiner):
        def propose_fertilities(self, logits: Tensor, rng: Any) -> Tensor:
            law = logits.softmax(dim=-1).tolist()
            streams = [rng.split("fertilities", number) for number in range(self.samples)]
            return torch.tensor([[stream.draw(row) for row in law] for stream in streams])

    return Noise(request.model, request.teacher, fertility, samples, temperature)


def fresh_noise(request: RefineRequest, samples: int) -> Refiner:
    """Samples depend on how many there are: a tenth translation costs the second."""

    class Fresh(NatRefiner):
        def propose_fertilities(self, logits: Tensor, rng: Any) -> Tensor:
            return super().propose_fertilities(logits, rng.split("samples", self.samples))

    return Fresh(request.model, request.teacher if samples > 1 else None, "argmax", samples, 1.0)


def tokens_alone(model: Seq2Seq, batch: Any) -> Tensor:
    """The fertilities are used, and never learnt."""
    source, target, fertilities = batch
    read, slots = nat.copy_source(source, fertilities)
    logits = model.logits(nat.decode_parallel(model, read, slots, model.encode(source))[slots])
    return F.cross_entropy(logits, target[slots])


def probability_times_cost(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    """A sampled sequence is made less likely by what it costs: it is counted twice, once by being
    sampled.
    """
    chosen = logits.softmax(dim=-1).gather(-1, sampled[..., None])[..., 0]
    return (cost * chosen.prod(dim=-1)).sum()


TRAPS = [
    Trap(FERTILITY_RULE, noisy_parallel, lambda: find_technique("nat").refiner),
    Trap(NESTED, samples_are_nested, lambda: find_technique("nat").refiner),
    Trap(FERTILE, words_stand_by_fertility, lambda: find_technique("nat").refiner),
    Trap(PASS, one_pass_as_published, lambda: find_technique("nat").refiner),
    Trap(TEACHER, the_teacher_chooses, lambda: find_technique("nat").refiner),
    Trap(SUPERVISED, fertilities_are_learnt, lambda: nat.nat_loss),
    Trap(EXPECTED_COST, gradient_of_the_expectation, lambda: nat.reinforce_surrogate),
]
TOYS = [
    Toy("samples without the likeliest", FERTILITY_RULE, only_noise),
    Toy("other samples where there are more", NESTED, fresh_noise),
    Toy("a length and even copies", FERTILE, length_and_even_copies),
    Toy("no positional attention", PASS, without_positions),
    Toy("a place sees its own copy", PASS, own_place_too),
    Toy("the student judges itself", TEACHER, student_chooses),
    Toy("fertilities without supervision", SUPERVISED, tokens_alone),
    Toy("the probability times the cost", EXPECTED_COST, probability_times_cost),
]
