"""Define how each translation model is trained: its batches, its loss, its validation.

The loss of a technique stands in the technique's own file. Here is what `train mt` needs around it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import mask_predict, nat
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.speculative.drafting import specdec
from tinyspec.training import aligner, distilled
from tinyspec.training.bitext import SentencePair, group_by_length, pad_sequences
from tinyspec.training.distilled import BeamSettings
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule
from tinyspec.training.recipe import TranslationRecipe
from tinyspec.training.train import Batch

Pairs = Sequence[SentencePair]
Ids = Sequence[int]
VALIDATION_KNOBS = {"iterations": 4, "lengths": 2}  # of Mask-Predict: few, to be quick


class TranslationTask(NamedTuple):
    """How one kind of translation model is trained.

    pairs        the pairs to train on; a method may leave out pairs that it cannot generate
    batch        returns the pairs with these numbers as tensors
    loss         of a batch, a scalar; its random numbers come from the generator
    translate    translates a batch of sources for the validation
    figures      returns further figures that a validation logs
    before_step  is called before each step of the training, with its number and the progress
    """

    pairs: Pairs
    batch: Callable[[Ids], Batch]
    loss: Callable[[Seq2Seq, Batch, torch.Generator], Tensor]
    translate: Callable[[Seq2Seq, Sequence[Ids]], list[list[int]]]
    figures: Callable[[Seq2Seq], dict[str, float]] = lambda model: {}
    before_step: Callable[[int, float], None] | None = None


def make_teacher_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of the autoregressive teacher, with smoothed labels.

    With [exits] the losses of its decoder's layers are added up by their weights. A validation then
    logs the loss of each exit that the recipe reports.
    """
    exits = plan.exits or ExitLosses()
    depth = int(plan.shape.get("decoder_layers", 1))
    schedule = ExitLossSchedule(exits, depth, plan.settings.steps)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        source, target = batch
        losses = teacher_forcing_losses(
            model, source, target, plan.dropout, plan.smoothing, schedule.loss_weights
        )
        total = sum(
            weight * losses[at] for at, weight in enumerate(schedule.loss_weights) if weight
        )
        assert isinstance(total, Tensor)
        return total

    def translate(model: Seq2Seq, sources: Sequence[Ids]) -> list[list[int]]:
        return distilled.write_translations(model, sources, BeamSettings(beam=1))

    def figures(model: Seq2Seq) -> dict[str, float]:
        wanted = [*exits.report, depth]
        totals, tokens = dict.fromkeys(wanted, 0.0), 0.0
        chosen = [float(layer + 1 in wanted) for layer in range(depth)]
        for group in group_by_length(valid, plan.tokens):
            source, target = (side.to(model.device) for side in pad_pairs(valid, group))
            count = float((target != model.config.pad).sum()) + len(group)
            losses = teacher_forcing_losses(model, source, target, weights=chosen)
            for layers in totals:
                totals[layers] += float(losses[layers - 1]) * count
            tokens += count
        of_exits = {f"valid_loss_{n}": totals[n] / tokens for n in exits.report if n != depth}
        return {"valid_loss": totals[depth] / tokens, **of_exits}

    before_step = schedule.begin_step if plan.exits is not None else None
    return TranslationTask(pairs, partial(pad_pairs, pairs), loss, translate, figures, before_step)


def make_nat_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of NAT, whose fertilities come from the aligner.

    It is validated with one pass, from each word's most probable fertility.
    """
    most = int(plan.shape.get("fertilities", 0)) - 1
    if most < 1:
        raise TinyspecError(
            f"recipe {plan.name}: a NAT tells fertilities: [shape] fertilities is missing"
        )
    pairs = [pair for pair in pairs if len(pair.target) <= most * len(pair.source)]
    alignment = aligner.align_words(
        [pair.source for pair in pairs], [pair.target for pair in pairs]
    )
    fertilities = [
        aligner.count_fertilities(links, len(pair.source), most).tolist()
        for links, pair in zip(alignment.links, pairs, strict=True)
    ]

    def batch(numbers: Ids) -> Batch:
        return *pad_pairs(pairs, numbers), pad_sequences([fertilities[i] for i in numbers], 0)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        aligned, options = nat.AlignedPairs(*batch), (generator, plan.dropout, plan.smoothing)
        if not plan.finetune:
            return nat.nat_loss(model, aligned, *options)
        assert teacher is not None
        return nat.finetune_loss(model, teacher, aligned, *options)

    def translate(model: Seq2Seq, sources: Sequence[Ids]) -> list[list[int]]:
        return nat.translate_batch(model, pad_sequences(sources).to(model.device))

    return TranslationTask(pairs, batch, loss, translate)


def make_mask_predict_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of Mask-Predict. It is validated with VALIDATION_KNOBS."""

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        masked = mask_predict.TranslationPairs(*batch)
        return mask_predict.masked_lm_loss(model, masked, generator, plan.dropout, plan.smoothing)

    def translate(model: Seq2Seq, sources: Sequence[Ids]) -> list[list[int]]:
        refiner = mask_predict.MaskPredictRefiner(model, **VALIDATION_KNOBS)
        padded = pad_sequences(sources).to(model.device)
        return translate_sources(model, padded, refiner, [Seeded(0) for _ in sources])

    return TranslationTask(pairs, partial(pad_pairs, pairs), loss, translate)


def make_specdec_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of SpecDec's drafter: a block of masks behind a prefix, with glancing.

    It is validated alone, block after block. A further figure is how many tokens at the head of a
    block are those of the teacher's greedy translation.
    """
    if teacher is None:
        raise TinyspecError(
            f"recipe {plan.name}: specdec drafts for a teacher: teacher = FOLDER is missing"
        )
    room = plan.config(teacher.config.vocab_size).max_positions - plan.block - 1
    sources = [pair.source for pair in valid]
    greedy = partial(distilled.write_translations, teacher, settings=BeamSettings(beam=1))
    written = [
        SentencePair(source, target)
        for source, target in zip(sources, translate_in_batches(sources, greedy), strict=True)
        if len(target) <= room
    ]
    share = specdec.FIRST_GLANCE

    def before_step(step: int, progress: float) -> None:
        nonlocal share
        share = specdec.glancing_share(progress)

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        source, target = batch
        return specdec.block_filling_loss(
            model, (source, target), plan.block, share, generator, plan.dropout, plan.smoothing
        )

    def translate(model: Seq2Seq, sources: Sequence[Ids]) -> list[list[int]]:
        padded = pad_sequences(sources).to(model.device)
        return specdec.translate_by_blocks(model, padded, plan.block)

    def figures(model: Seq2Seq) -> dict[str, float]:
        generator = torch.Generator(model.device).manual_seed(0)  # the same places each time
        total = 0
        for group in group_by_length(written, plan.tokens):
            source, target = (side.to(model.device) for side in pad_pairs(written, group))
            right = specdec.count_right_tokens(model, (source, target), plan.block, generator)
            total += int(right.sum())
        return {"right_tokens": total / max(len(written), 1)}

    kept = [pair for pair in pairs if len(pair.target) <= room]
    batch = partial(pad_pairs, kept)
    return TranslationTask(kept, batch, loss, translate, figures, before_step)


TASKS = {
    "teacher": make_teacher_task,
    "nat": make_nat_task,
    "mask_predict": make_mask_predict_task,
    "specdec": make_specdec_task,
}


def teacher_forcing_loss(
    model: Seq2Seq, source: Tensor, target: Tensor, dropout: float = 0.0, smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy of the targets [B, T] and their ends, a scalar."""
    return teacher_forcing_losses(model, source, target, dropout, smoothing)[
        model.config.decoder_layers - 1
    ]


def teacher_forcing_losses(
    model: Seq2Seq,
    source: Tensor,
    target: Tensor,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    weights: Sequence[float] = (),
) -> dict[int, Tensor]:
    """Return the mean cross-entropy of the targets [B, T] and their ends at exits of the decoder.

    weights  one of each decoder layer: only those that are not 0 are read; empty: the last alone

    Each token is predicted from the target tokens before it. No logits are computed at padding.
    Padding stands at the end, and the mask is causal, so no other position sees it. The layers are
    counted from 0. All exits share the final norm and the head.
    """
    c = model.config
    lengths = (target != c.pad).sum(dim=1, keepdim=True)
    length = target.shape[1] + 1
    inputs = F.pad(target, (1, 0), value=c.bos)  # [B, T + 1]
    labels = F.pad(target, (0, 1), value=c.pad).scatter(1, lengths, c.eos)
    causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
    states = model.layer_states(model.embed(inputs), model.encode(source, dropout), causal, dropout)
    is_token = labels != c.pad
    weights = weights or [0.0] * (c.decoder_layers - 1) + [1.0]
    losses = dict[int, Tensor]()
    for layer, x in enumerate(states):
        if weights[layer]:
            rows = model.logits(model.decoder.apply_final_norm(x[is_token])).float()
            losses[layer] = F.cross_entropy(rows, labels[is_token], label_smoothing=smoothing)
    return losses


def pad_pairs(pairs: Pairs, numbers: Ids) -> tuple[Tensor, Tensor]:
    """Return the sources [B, S] and the targets [B, T] of the pairs with these numbers."""
    chosen = [pairs[i] for i in numbers]
    sources, targets = zip(*chosen, strict=True)
    return pad_sequences(sources), pad_sequences(targets)


def translate_in_batches(
    sources: Sequence[Ids], translate: Callable[[list[Ids]], list[list[int]]], batch: int = 128
) -> list[list[int]]:
    """Return translations in the order of the sources, made in batches of similar lengths."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        found.update(zip(part, translate([sources[i] for i in part]), strict=True))
    return [found[i] for i in range(len(sources))]
