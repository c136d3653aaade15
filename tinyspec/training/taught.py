"""What a translation model is taught, method by method: its batches, its loss, and how it is asked
while it learns.

The loss of a technique stands in the technique's own file; here is what `train mt` needs around it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import mask_predict as masking
from tinyspec.nonautoregressive import nat as fertile
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.training import aligner, distilled
from tinyspec.training.bitext import Pair, buckets, padded
from tinyspec.training.distilled import Writing
from tinyspec.training.recipe_mt import TranslationRecipe
from tinyspec.training.train import Batch

ASKED = {"iterations": 4, "lengths": 2}  # of Mask-Predict, while it learns


class Taught(NamedTuple):
    """What a method is taught and asked.

    pairs      what it is taught from: a method may leave out pairs that it cannot say
    batch      the pairs of these numbers, as tensors on a device
    loss       of a batch, a scalar; what is drawn is drawn from the generator
    translate  ids of translations, as the model is judged while it learns
    figures    what else is logged at a validation
    """

    pairs: Sequence[Pair]
    batch: Callable[[Sequence[int]], Batch]
    loss: Callable[[Seq2Seq, Batch, torch.Generator], Tensor]
    translate: Callable[[Seq2Seq, Sequence[Sequence[int]]], list[list[int]]]
    figures: Callable[[Seq2Seq], dict[str, float]] = lambda model: {}


def teacher(
    plan: TranslationRecipe, seen: Sequence[Pair], valid: Sequence[Pair], judge: Seq2Seq | None
) -> Taught:
    """The autoregressive teacher: every token from those before it, with smoothed labels."""

    def batch(numbers: Sequence[int]) -> Batch:
        return both(seen, numbers)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        return forced(model, batch[0], batch[1], plan.dropout, plan.smoothing)

    def translate(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return together(sources, lambda part: distilled.write(model, part, Writing(beam=1)))

    def figures(model: Seq2Seq) -> dict[str, float]:
        total = tokens = 0.0
        for group in buckets(valid, plan.tokens):
            source, target = (side.to(model.device) for side in both(valid, group))
            said = float((target != model.config.pad).sum()) + len(group)
            total += float(forced(model, source, target)) * said
            tokens += said
        return {"valid_loss": total / tokens}

    return Taught(seen, batch, loss, translate, figures)


def forced(
    model: Seq2Seq, source: Tensor, target: Tensor, dropout: float = 0.0, smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of the targets [B, T] and their ends, each token given those before it: a
    scalar.

    No logits are computed at padding, which nobody sees: it stands at the end, and the mask is
    causal.
    """
    c = model.config
    lengths = (target != c.pad).sum(dim=1, keepdim=True)
    room = target.shape[1] + 1
    read = F.pad(target, (1, 0), value=c.bos)  # [B, T + 1]
    said = F.pad(target, (0, 1), value=c.pad).scatter(1, lengths, c.eos)
    causal = torch.ones(room, room, dtype=torch.bool, device=target.device).tril()
    states = model.decode(model.embed(read), model.encode(source, dropout), causal, dropout)
    there = said != c.pad
    return F.cross_entropy(
        model.logits(states[there]).float(), said[there], label_smoothing=smoothing
    )


def both(pairs: Sequence[Pair], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The sources [B, S] and the targets [B, T] of these pairs."""
    return padded([pairs[i].source for i in numbers]), padded([pairs[i].target for i in numbers])


def together(
    sources: Sequence[Sequence[int]],
    translate: Callable[[list[Sequence[int]]], list[list[int]]],
    batch: int = 128,
) -> list[list[int]]:
    """Translations in the order of the sources, which are asked for in batches of like lengths."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        found.update(zip(part, translate([sources[i] for i in part]), strict=True))
    return [found[i] for i in range(len(sources))]


def nat(
    plan: TranslationRecipe, seen: Sequence[Pair], valid: Sequence[Pair], judge: Seq2Seq | None
) -> Taught:
    """NAT: the fertilities are an aligner's; asked as it writes in one pass, from each word's
    likeliest fertility.
    """
    most = int(plan.shape.get("fertilities", 0)) - 1
    if most < 1:
        raise TinyspecError(
            f"recipe {plan.name}: a NAT tells fertilities: [shape] fertilities is missing"
        )
    seen = [pair for pair in seen if len(pair.target) <= most * len(pair.source)]
    links = aligner.align([pair.source for pair in seen], [pair.target for pair in seen]).links
    counts = [
        aligner.fertilities(link, len(pair.source), most).tolist()
        for link, pair in zip(links, seen, strict=True)
    ]

    def batch(numbers: Sequence[int]) -> Batch:
        return *both(seen, numbers), padded([counts[i] for i in numbers], 0)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        return fertile.nat_loss(
            model, fertile.AlignedPairs(*batch), generator, plan.dropout, plan.smoothing
        )

    def fine(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        assert judge is not None
        return fertile.finetune_loss(
            model, judge, fertile.AlignedPairs(*batch), generator, plan.dropout, plan.smoothing
        )

    def translate(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return together(
            sources, lambda part: fertile.translate_batch(model, padded(part).to(model.device))
        )

    return Taught(seen, batch, fine if plan.finetune else loss, translate)


def mask_predict(
    plan: TranslationRecipe, seen: Sequence[Pair], valid: Sequence[Pair], judge: Seq2Seq | None
) -> Taught:
    """Mask-Predict: asked with few iterations and lengths while it learns, to be quick."""

    def batch(numbers: Sequence[int]) -> Batch:
        return both(seen, numbers)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        return masking.masked_lm_loss(
            model, masking.TranslationPairs(*batch), generator, plan.dropout, plan.smoothing
        )

    def translate(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        def ask(part: list[Sequence[int]]) -> list[list[int]]:
            refiner = masking.MaskPredictRefiner(model, **ASKED)
            return translate_sources(
                model, padded(part).to(model.device), refiner, [Seeded(0) for _ in part]
            )

        return together(sources, ask)

    return Taught(seen, batch, loss, translate)


METHODS: dict[
    str, Callable[[TranslationRecipe, Sequence[Pair], Sequence[Pair], Seq2Seq | None], Taught]
] = {
    "teacher": teacher,
    "nat": nat,
    "mask_predict": mask_predict,
}
