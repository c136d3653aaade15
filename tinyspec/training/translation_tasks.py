"""Define how each translation model is trained: its batches, its loss, its validation.

The loss of a technique stands in the technique's own file. Here is what `train mt` needs around it.
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
from tinyspec.training.bitext import SentencePair, group_by_length, pad_sequences
from tinyspec.training.distilled import BeamSettings
from tinyspec.training.recipe import TranslationRecipe
from tinyspec.training.train import Batch

VALIDATION_KNOBS = {"iterations": 4, "lengths": 2}  # of Mask-Predict: few, to be quick


class TranslationTask(NamedTuple):
    """How one kind of translation model is trained.

    pairs      the pairs to train on; a method may leave out pairs that it cannot generate
    batch      returns the pairs with these numbers as tensors
    loss       of a batch, a scalar; its random numbers come from the generator
    translate  returns translations as ids, for the validation
    figures    returns further figures that a validation logs
    """

    pairs: Sequence[SentencePair]
    batch: Callable[[Sequence[int]], Batch]
    loss: Callable[[Seq2Seq, Batch, torch.Generator], Tensor]
    translate: Callable[[Seq2Seq, Sequence[Sequence[int]]], list[list[int]]]
    figures: Callable[[Seq2Seq], dict[str, float]] = lambda model: {}


def make_teacher_task(
    plan: TranslationRecipe,
    seen: Sequence[SentencePair],
    valid: Sequence[SentencePair],
    judge: Seq2Seq | None,
) -> TranslationTask:
    """Return the task of the autoregressive teacher, with smoothed labels."""

    def batch(numbers: Sequence[int]) -> Batch:
        return pad_pairs(seen, numbers)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        return teacher_forcing_loss(model, batch[0], batch[1], plan.dropout, plan.smoothing)

    def translate(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        return translate_in_batches(
            sources, lambda part: distilled.write_translations(model, part, BeamSettings(beam=1))
        )

    def figures(model: Seq2Seq) -> dict[str, float]:
        total = tokens = 0.0
        for group in group_by_length(valid, plan.tokens):
            source, target = (side.to(model.device) for side in pad_pairs(valid, group))
            count = float((target != model.config.pad).sum()) + len(group)
            total += float(teacher_forcing_loss(model, source, target)) * count
            tokens += count
        return {"valid_loss": total / tokens}

    return TranslationTask(seen, batch, loss, translate, figures)


def teacher_forcing_loss(
    model: Seq2Seq, source: Tensor, target: Tensor, dropout: float = 0.0, smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of the targets [B, T] and their ends, a scalar.

    Each token is predicted from the target tokens before it. No logits are computed at padding.
    Padding stands at the end, and the mask is causal, so no other position sees it.
    """
    c = model.config
    lengths = (target != c.pad).sum(dim=1, keepdim=True)
    length = target.shape[1] + 1
    inputs = F.pad(target, (1, 0), value=c.bos)  # [B, T + 1]
    labels = F.pad(target, (0, 1), value=c.pad).scatter(1, lengths, c.eos)
    causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
    states = model.decode(model.embed(inputs), model.encode(source, dropout), causal, dropout)
    is_token = labels != c.pad
    return F.cross_entropy(
        model.logits(states[is_token]).float(), labels[is_token], label_smoothing=smoothing
    )


def pad_pairs(pairs: Sequence[SentencePair], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the sources [B, S] and the targets [B, T] of the pairs with these numbers."""
    return pad_sequences([pairs[i].source for i in numbers]), pad_sequences(
        [pairs[i].target for i in numbers]
    )


def translate_in_batches(
    sources: Sequence[Sequence[int]],
    translate: Callable[[list[Sequence[int]]], list[list[int]]],
    batch: int = 128,
) -> list[list[int]]:
    """Return translations in the order of the sources, made in batches of similar lengths."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        found.update(zip(part, translate([sources[i] for i in part]), strict=True))
    return [found[i] for i in range(len(sources))]


def make_nat_task(
    plan: TranslationRecipe,
    seen: Sequence[SentencePair],
    valid: Sequence[SentencePair],
    judge: Seq2Seq | None,
) -> TranslationTask:
    """Return the task of NAT, whose fertilities come from the aligner.

    It is validated with one pass, from each word's most probable fertility.
    """
    most = int(plan.shape.get("fertilities", 0)) - 1
    if most < 1:
        raise TinyspecError(
            f"recipe {plan.name}: a NAT tells fertilities: [shape] fertilities is missing"
        )
    seen = [pair for pair in seen if len(pair.target) <= most * len(pair.source)]
    links = aligner.align_words(
        [pair.source for pair in seen], [pair.target for pair in seen]
    ).links
    counts = [
        aligner.count_fertilities(link, len(pair.source), most).tolist()
        for link, pair in zip(links, seen, strict=True)
    ]

    def batch(numbers: Sequence[int]) -> Batch:
        return *pad_pairs(seen, numbers), pad_sequences([counts[i] for i in numbers], 0)

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
        return translate_in_batches(
            sources,
            lambda part: fertile.translate_batch(model, pad_sequences(part).to(model.device)),
        )

    return TranslationTask(seen, batch, fine if plan.finetune else loss, translate)


def make_mask_predict_task(
    plan: TranslationRecipe,
    seen: Sequence[SentencePair],
    valid: Sequence[SentencePair],
    judge: Seq2Seq | None,
) -> TranslationTask:
    """Return the task of Mask-Predict. It is validated with VALIDATION_KNOBS."""

    def batch(numbers: Sequence[int]) -> Batch:
        return pad_pairs(seen, numbers)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        return masking.masked_lm_loss(
            model, masking.TranslationPairs(*batch), generator, plan.dropout, plan.smoothing
        )

    def translate(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        def ask(part: list[Sequence[int]]) -> list[list[int]]:
            refiner = masking.MaskPredictRefiner(model, **VALIDATION_KNOBS)
            return translate_sources(
                model, pad_sequences(part).to(model.device), refiner, [Seeded(0) for _ in part]
            )

        return translate_in_batches(sources, ask)

    return TranslationTask(seen, batch, loss, translate)


TASKS: dict[
    str,
    Callable[
        [TranslationRecipe, Sequence[SentencePair], Sequence[SentencePair], Seq2Seq | None],
        TranslationTask,
    ],
] = {
    "teacher": make_teacher_task,
    "nat": make_nat_task,
    "mask_predict": make_mask_predict_task,
}
