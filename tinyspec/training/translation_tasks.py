"""Define how each translation model is trained: its batches, its loss, its validation.

What a technique trains stands in its own file, and its card says it (`TrainedTranslator`). Here is
what `train mt` needs around it, and the autoregressive teacher.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import TranslatorTraining
from tinyspec.training import aligner, distilled
from tinyspec.training.bitext import SentencePair, group_by_length, pad_sequences
from tinyspec.training.distilled import BeamSettings
from tinyspec.training.recipe import TranslationRecipe
from tinyspec.training.train import Batch

Pairs = Sequence[SentencePair]
Ids = Sequence[int]


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
    """Return the task of the autoregressive teacher, with smoothed labels."""

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        source, target = batch
        return teacher_forcing_loss(model, source, target, plan.dropout, plan.smoothing)

    def translate(model: Seq2Seq, sources: Sequence[Ids]) -> list[list[int]]:
        return distilled.write_translations(model, sources, BeamSettings(beam=1))

    def figures(model: Seq2Seq) -> dict[str, float]:
        total = tokens = 0.0
        for group in group_by_length(valid, plan.tokens):
            source, target = (side.to(model.device) for side in pad_pairs(valid, group))
            count = float((target != model.config.pad).sum()) + len(group)
            total += float(teacher_forcing_loss(model, source, target)) * count
            tokens += count
        return {"valid_loss": total / tokens}

    return TranslationTask(pairs, partial(pad_pairs, pairs), loss, translate, figures)


def make_student_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of a technique's translation model, as its card says (`TrainedTranslator`).

    Further figures are means over the valid sentences that fit.
    """
    trained, settings, progress = plan.trained, plan.settings_of_translator(), 0.0
    assert trained is not None
    config = plan.config(plan.vocab_size if teacher is None else teacher.config.vocab_size)

    def fit(pair: SentencePair) -> bool:
        return trained.fits(config, settings, len(pair.source), len(pair.target))

    kept = [pair for pair in pairs if fit(pair)]
    fertilities = count_all_fertilities(kept, config.fertilities - 1) if trained.aligned else []
    written = list[SentencePair]()
    if trained.figures is not None:
        assert teacher is not None  # the recipe has asked for it
        sources = [pair.source for pair in valid]
        greedy = partial(distilled.write_translations, teacher, settings=BeamSettings(beam=1))
        texts = translate_in_batches(sources, greedy)
        judged = [SentencePair(*sides) for sides in zip(sources, texts, strict=True)]
        written = [pair for pair in judged if fit(pair)]

    def batch(numbers: Ids) -> Batch:
        parts = pad_pairs(kept, numbers)
        if trained.aligned:
            return *parts, pad_sequences([fertilities[i] for i in numbers], 0)
        return parts

    def before_step(step: int, done: float) -> None:
        nonlocal progress
        progress = done

    def loss(model: Seq2Seq, batch: Batch, generator: torch.Generator) -> Tensor:
        training = TranslatorTraining(
            model, teacher, settings, plan.dropout, plan.smoothing, progress
        )
        stage = trained.finetune if plan.finetune else trained.loss
        assert stage is not None
        return stage(training, batch, generator)

    def translate(model: Seq2Seq, sources: Sequence[Ids]) -> list[list[int]]:
        return trained.translate(model, settings, pad_sequences(sources).to(model.device))

    def figures(model: Seq2Seq) -> dict[str, float]:
        if trained.figures is None:
            return {}
        generator = torch.Generator(model.device).manual_seed(0)  # the same draws each time
        totals = Counter[str]()
        for group in group_by_length(written, plan.tokens):
            source, target = (side.to(model.device) for side in pad_pairs(written, group))
            found = trained.figures(model, settings, source, target, generator)
            totals.update({name: float(values.sum()) for name, values in found.items()})
        return {name: total / max(len(written), 1) for name, total in totals.items()}

    return TranslationTask(kept, batch, loss, translate, figures, before_step)


def count_all_fertilities(pairs: Pairs, most: int) -> list[list[int]]:
    """Return the fertilities of every pair's source, by the aligner, each at most `most`."""
    links = aligner.align_words([pair.source for pair in pairs], [pair.target for pair in pairs])
    return [
        aligner.count_fertilities(link, len(pair.source), most).tolist()
        for link, pair in zip(links.links, pairs, strict=True)
    ]


def make_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of a recipe."""
    make = make_teacher_task if plan.trained is None else make_student_task
    return make(plan, pairs, valid, teacher)


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
