"""NAT with one defect each: fertilities, copies, the pass, the choice, what it is trained by."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas, judge, refine
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.laws.fertility_laws import (
    EXPECTED,
    NESTED,
    RULE,
    SUPERVISED,
    builder,
    student,
    teacher,
)
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.nat import (
    NatRefiner,
    clip_fertilities,
    copy_source,
    decode_parallel,
    forbid_special_tokens,
    nat_loss,
    reinforce_surrogate,
    uniform,
)
from tinyspec.technique import RefineRequest

# ---------------------------------------------------------------------- proposals


class Floored(NatRefiner):
    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        made = super().propose_fertilities(logits, rng)
        mean = logits.softmax(dim=-1) @ torch.arange(logits.shape[-1], dtype=logits.dtype)
        at = int(self.first == "argmax")
        if at < len(made):
            made[at] = mean.long()  # right: to the nearest
        return made


class Lukewarm(NatRefiner):
    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        self.temperature = 1.0  # right: what was asked
        return super().propose_fertilities(logits, rng)


class OneDraw(NatRefiner):
    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        made = super().propose_fertilities(logits, rng)
        return torch.cat((made[:2], made[2:3].expand(len(made[2:]), -1)))  # right: each its own


class OneLaw(NatRefiner):
    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        made = super().propose_fertilities(
            logits[-1:].expand_as(logits), rng
        )  # right: each word its own law
        return torch.cat((super().propose_fertilities(logits, Seeded(0))[:2], made[2:]))


class NewestFirst(NatRefiner):
    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        return (
            super().propose_fertilities(logits, rng).flip(0)
        )  # right: the named ones first, so that more contain the fewer


class SharedStream(NatRefiner):
    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        made, count = super().propose_fertilities(logits, rng), self.samples - 2
        if count > 0:  # right: sample by sample
            stream, rows = rng.split("words first", 0), logits.softmax(dim=-1).tolist()
            made[2:] = torch.tensor([[stream.draw(row) for _ in range(count)] for row in rows]).T
        return made


# ---------------------------------------------------------------------- copies


def _standing(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> type[NatRefiner]:
    """The first canvas made otherwise from the source [C, S] and the fertilities that were settled
    [C, S].
    """

    class Wrong(NatRefiner):
        def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
            canvas = super().start(source, memory, rng)
            read, slots = change(torch.tensor([list(source)]).expand_as(canvas.extra), canvas.extra)
            return Canvas(read, slots, torch.zeros(read.shape, dtype=torch.float64), canvas.extra)

    return Wrong


def never_none(source: Tensor, fertilities: Tensor) -> tuple[Tensor, Tensor]:
    more = fertilities.clamp(min=1)  # right: a word without fertility vanishes
    return copy_source(source, torch.where(more.sum(dim=1, keepdim=True) > 4, fertilities, more))


def evenly(source: Tensor, fertilities: Tensor) -> tuple[Tensor, Tensor]:
    places, slots = uniform(
        torch.full_like(fertilities[:, 0], source.shape[1]), fertilities.sum(dim=1)
    )
    return source.gather(1, places), slots  # right: each word by its own fertility


def in_turn(source: Tensor, fertilities: Tensor) -> tuple[Tensor, Tensor]:
    texts = [
        [int(word) for n in range(int(f.max())) for word in x[f > n]]
        for x, f in zip(source, fertilities, strict=True)
    ]  # right: a word's copies stand together
    _, slots = copy_source(source, fertilities)
    return torch.tensor([text + [0] * (slots.shape[1] - len(text)) for text in texts]), slots


class Strict(NatRefiner):
    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        room = min(2 * len(source) + 4, self.model.config.max_positions - 1)
        logits, row = self.model.fertility_logits(memory)[0], torch.tensor([list(source)])
        proposed = self.propose_fertilities(logits, rng)
        proposed = proposed.masked_fill(
            proposed.cumsum(dim=1) >= room, 0
        )  # right: cut what is more than the room
        law = logits.softmax(dim=-1)[None].expand(len(proposed), -1, -1)
        kept = clip_fertilities(self.model, row.expand_as(proposed), proposed, law)
        read, slots = copy_source(row.expand_as(proposed), kept)
        return Canvas(read, slots, torch.zeros(read.shape, dtype=torch.float64), kept)


class FirstWord(NatRefiner):
    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        logits, row = self.model.fertility_logits(memory)[0], torch.tensor([list(source)])
        proposed = self.propose_fertilities(logits, rng)
        law = logits.softmax(dim=-1)[None].expand(len(proposed), -1, -1).clone()
        law[:, 1:, 0] = (
            1.0  # right: none at all becomes one token of the word that most probably gives one
        )
        law[:, 0, 0] = 0.0
        kept = clip_fertilities(self.model, row.expand_as(proposed), proposed, law)
        read, slots = copy_source(row.expand_as(proposed), kept)
        return Canvas(read, slots, torch.zeros(read.shape, dtype=torch.float64), kept)


# ---------------------------------------------------------------------- the pass and the choice


def _passing(
    change: Callable[[NatRefiner, Canvas, EncoderOutput], Tensor],
) -> type[NatRefiner]:
    """The pass with other logits."""

    class Wrong(NatRefiner):
        def rewrite(
            self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
        ) -> Canvas:
            scores, tokens = change(self, canvas, memory).log_softmax(dim=-1).max(dim=-1)
            return Canvas(tokens.masked_fill(~canvas.mask, 0), canvas.mask, scores, canvas.extra)

    return Wrong


def own_copy(self: NatRefiner, canvas: Canvas, memory: EncoderOutput) -> Tensor:
    states = self.model.decode(
        self.model.embed(canvas.tokens), memory, None, slots=canvas.mask
    )  # right: not the diagonal
    return forbid_special_tokens(self.model, self.model.logits(states))


def only_before(self: NatRefiner, canvas: Canvas, memory: EncoderOutput) -> Tensor:
    before = torch.ones(canvas.tokens.shape[1], canvas.tokens.shape[1], dtype=torch.bool).tril(
        -1
    )  # right: behind it too
    states = self.model.decode(self.model.embed(canvas.tokens), memory, before, slots=canvas.mask)
    return forbid_special_tokens(self.model, self.model.logits(states))


def padding_too(self: NatRefiner, canvas: Canvas, memory: EncoderOutput) -> Tensor:
    everywhere = torch.ones_like(canvas.mask)  # right: canvas.mask
    return forbid_special_tokens(
        self.model,
        self.model.logits(decode_parallel(self.model, canvas.tokens, everywhere, memory)),
    )


def special_too(self: NatRefiner, canvas: Canvas, memory: EncoderOutput) -> Tensor:
    return self.model.logits(
        decode_parallel(self.model, canvas.tokens, canvas.mask, memory)
    )  # right: words alone


def _choosing(choice: Callable[[Tensor, Canvas], Tensor]) -> type[NatRefiner]:
    """The candidate by other figures, from what the teacher says of each token and of the end [C, T
    + 1].
    """

    class Wrong(NatRefiner):
        def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
            if self.teacher is None:
                return 0
            return int(choice(judge(self.teacher, source, canvas), canvas).argmax())

    return Wrong


def without_end(told: Tensor, canvas: Canvas) -> Tensor:
    return told[:, :-1].masked_fill(~canvas.mask, 0).sum(dim=1)  # right: the end counts


def worst(told: Tensor, canvas: Canvas) -> Tensor:
    return -told.sum(dim=1)  # right: the likeliest


def by_itself(told: Tensor, canvas: Canvas) -> Tensor:
    return canvas.means()  # right: what the teacher says


# ---------------------------------------------------------------------- training


def unlearnt(model: Seq2Seq, batch: Any) -> Tensor:
    bias = model.weights["fertility.bias"]
    return nat_loss(model, batch) * 0 + bias.sum() * 0  # right: the fertilities are part of it


def padding_learnt(model: Seq2Seq, batch: Any) -> Tensor:
    source, _, counts = batch
    logits = model.fertility_logits(model.encode(source))[
        source == model.config.pad
    ]  # right: words alone
    extra: Tensor = logits.log_softmax(dim=-1)[:, 0].sum() / counts.sum()
    return nat_loss(model, batch) - extra


def per_sentence(model: Seq2Seq, batch: Any) -> Tensor:
    return nat_loss(model, batch) * (int(batch[2].sum()) / len(batch[0]))  # right: per target token


def uphill(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    return -reinforce_surrogate(logits, mask, sampled, cost)  # right: a cost falls


def padding_paid(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    return reinforce_surrogate(logits, torch.ones_like(mask), sampled, cost)  # right: words alone


def cost_learnt(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    return (
        reinforce_surrogate(logits, mask, sampled, cost) + cost.sum()
    )  # right: the cost is a constant


def first_word_paid(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    first = torch.arange(mask.shape[1]) == 0
    return reinforce_surrogate(logits, mask & first, sampled, cost)  # right: every word


# ---------------------------------------------------------------------- witnesses


def written(parts: Parts) -> Any:
    """Canvases and choices of a few requests."""
    made = []
    for seed, positions in ((1, 5), *((seed, 24) for seed in range(10))):
        for temperature in (0.5, 4.0):
            request = RefineRequest(student(seed, 4, positions), teacher(seed, positions))
            refiner = builder(parts)(request, samples=5, temperature=temperature)
            run = refine(request.model, (4, 7, 5), refiner, Seeded(seed), request.forward_log)
            made.append(
                (
                    [
                        (step.before.text(row), step.after.text(row))
                        for step in run
                        for row in range(5)
                    ],
                    run.chosen,
                )
            )
    return made


def learnt(parts: Parts) -> Any:
    """The loss of a batch."""
    source, target = torch.tensor([[4, 6, 5], [7, 5, 0]]), torch.tensor([[5, 5, 6], [4, 4, 0]])
    return float(
        parts.fertile_loss(student(0), (source, target, torch.tensor([[2, 0, 1], [0, 2, 0]])))
    )


def paid(parts: Parts) -> Any:
    """The surrogate's gradient for one sample."""
    logits = torch.arange(9.0).sin().reshape(1, 3, 3).requires_grad_()
    cost = logits.sum().reshape(1) + 2
    with torch.enable_grad():
        scalar = parts.reinforce(
            logits, torch.tensor([[True, True, False]]), torch.tensor([[2, 1, 1]]), cost
        )
        return torch.autograd.grad(scalar, logits)[0].tolist()


def _rule(name: str, kind: type[NatRefiner], law: str = RULE) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, fertile=kind), written)


def _loss(name: str, function: Callable[..., Tensor]) -> Mutant:
    return Mutant(name, "slip", SUPERVISED, replace(PARTS, fertile_loss=function), learnt)


def _gradient(name: str, function: Callable[..., Tensor]) -> Mutant:
    return Mutant(name, "slip", EXPECTED, replace(PARTS, reinforce=function), paid)


MUTANTS = [
    _rule("the mean of a fertility is cut off", Floored),
    _rule("fertilities sampled at temperature 1, whatever was asked", Lukewarm),
    _rule("all samples of fertilities are one draw", OneDraw),
    _rule("every word's fertility from the last word's law", OneLaw),
    _rule("the named fertilities come last", NewestFirst, NESTED),
    _rule("samples drawn word by word, not one after the other", SharedStream, NESTED),
    _rule("a word without fertility is copied once", _standing(never_none)),
    _rule("a length, and copies spread evenly", _standing(evenly)),
    _rule("a word's copies stand apart", _standing(in_turn)),
    _rule("fertilities that just fit are cut", Strict),
    _rule("an empty translation gets the first word", FirstWord),
    _rule("a place sees its own copy", _passing(own_copy)),
    _rule("a place sees only what is before it", _passing(only_before)),
    _rule("a place sees padding", _passing(padding_too)),
    _rule("special tokens are written", _passing(special_too)),
    _rule("the teacher is not asked about the end", _choosing(without_end)),
    _rule("the teacher's last choice is kept", _choosing(worst)),
    _rule("the student's own favourite is kept", _choosing(by_itself)),
    _loss("fertilities are not learnt", unlearnt),
    _loss("fertilities of padding are learnt", padding_learnt),
    _loss("fertilities learnt per sentence", per_sentence),
    _gradient("fertilities follow the cost uphill", uphill),
    _gradient("fertilities of padding are paid for", padding_paid),
    _gradient("the cost is learnt from too", cost_learnt),
    _gradient("only the first word's fertility is paid for", first_word_paid),
]
