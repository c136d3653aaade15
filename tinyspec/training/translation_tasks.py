"""Define how each translation model is trained: its batches, its loss, its validation.

What a technique trains stands in its own file, and its card says it (`TrainedTranslator`). Here is
what `train mt` needs around it, and the autoregressive teacher.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq, add_ends
from tinyspec.technique import TranslatorTraining
from tinyspec.training import aligner, distilled
from tinyspec.training.bitext import SentencePair, group_by_length, pad_sequences
from tinyspec.training.distilled import BeamSettings
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule
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
    best         the figure of a validation whose least value decides which weights are best;
                 missed: 100 - BLEU
    trained      prefix of the names of the weights that are trained; empty: all of them
    """

    pairs: Pairs
    batch: Callable[[Ids], Batch]
    loss: Callable[[Seq2Seq, Batch, torch.Generator], Tensor]
    translate: Callable[[Seq2Seq, Sequence[Ids]], list[list[int]]]
    figures: Callable[[Seq2Seq], dict[str, float]] = lambda model: {}
    before_step: Callable[[int, float], None] | None = None
    best: str = "missed"
    trained: str = ""


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
        for source, target in group_pairs(valid, plan.tokens, model.device):
            count = float((target != model.config.pad).sum()) + len(source)
            losses = teacher_forcing_losses(model, source, target, weights=chosen)
            for layers in totals:
                totals[layers] += float(losses[layers - 1]) * count
            tokens += count
        of_exits = {f"valid_loss_{n}": totals[n] / tokens for n in exits.report if n != depth}
        return {"valid_loss": totals[depth] / tokens, **of_exits}

    before_step = schedule.begin_step if plan.exits is not None else None
    return TranslationTask(pairs, partial(pad_pairs, pairs), loss, translate, figures, before_step)


def make_student_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of a technique's translation model, as its card says (`TrainedTranslator`).

    Further figures are means over the valid sentences that fit.
    """
    trained, settings, progress = plan.trained, plan.settings_of_translator(), 0.0
    assert trained is not None
    config = plan.config(plan.vocab_size if teacher is None else teacher.config.vocab_size)
    if trained.extends:
        assert teacher is not None  # the recipe has asked for it
        if replace(trained.equip(teacher.config, settings), extra={}) != replace(config, extra={}):
            raise TinyspecError(
                f"recipe {plan.name}: [shape] is not that of {teacher.name}, whose weights it "
                "begins with"
            )

    def fit(pair: SentencePair) -> bool:
        return trained.fits(config, settings, len(pair.source), len(pair.target))

    kept = [pair for pair in pairs if fit(pair)]
    if not kept:
        raise TinyspecError(f"recipe {plan.name}: no pair fits the model: enlarge its [shape]")
    fertilities = count_all_fertilities(kept, config.fertilities - 1) if trained.aligned else []
    written = list[SentencePair]()
    if trained.figures is not None:
        assert teacher is not None  # the recipe has asked for it
        written = [pair for pair in write_greedily(teacher, valid) if fit(pair)]

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
        if trained.translate is None:
            return distilled.write_translations(model, sources, BeamSettings(beam=1))
        return trained.translate(model, settings, pad_sequences(sources).to(model.device))

    def figures(model: Seq2Seq) -> dict[str, float]:
        generator = torch.Generator(model.device).manual_seed(0)  # the same draws each time
        totals, divisors = Counter[str](), Counter[str]()
        if trained.figures is not None:
            for source, target in group_pairs(written, plan.tokens, model.device):
                found = trained.figures(model, settings, source, target, generator)
                totals.update({name: float(values.sum()) for name, values in found.items()})
                divisors.update(dict.fromkeys(found, len(source)))
        if trained.own_text is not None:
            own = write_greedily(model, valid)
            for source, target in group_pairs(own, plan.tokens, model.device):
                found = trained.own_text(model, settings, source, target)
                totals.update({name: float(counts.sum()) for name, (counts, _) in found.items()})
                divisors.update({name: int(by.sum()) for name, (_, by) in found.items()})
        return {name: total / divisors[name] for name, total in totals.items()}

    best, names = trained.best or "missed", trained.updates(settings)
    return TranslationTask(kept, batch, loss, translate, figures, before_step, best, names)


def group_pairs(pairs: Pairs, tokens: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all pairs in batches of similar lengths, as `pad_pairs` does."""
    for group in group_by_length(pairs, tokens):
        source, target = pad_pairs(pairs, group)
        yield source.to(device), target.to(device)


def write_greedily(model: Seq2Seq, pairs: Pairs) -> list[SentencePair]:
    """Return the sources of the pairs with the model's own translations, from left to right."""
    sources = [pair.source for pair in pairs]
    greedy = partial(distilled.write_translations, model, settings=BeamSettings(beam=1))
    texts = translate_in_batches(sources, greedy)
    return [SentencePair(*sides) for sides in zip(sources, texts, strict=True)]


def count_all_fertilities(pairs: Pairs, most: int) -> list[list[int]]:
    """Return the fertilities of every pair's source, by the aligner, each at most `most`."""
    links = aligner.align_words([pair.source for pair in pairs], [pair.target for pair in pairs])
    return [
        aligner.count_fertilities(link, len(pair.source), most).tolist()
        for link, pair in zip(links.links, pairs, strict=True)
    ]


def count_in_pairs(plan: TranslationRecipe, pairs: Pairs) -> dict[str, Any]:
    """Return what the method of a recipe counts in its training pairs, for config.json."""

    def align(sources: Sequence[Ids], targets: Sequence[Ids]) -> list[list[int]]:
        return [link.tolist() for link in aligner.align_words(sources, targets).links]

    if plan.trained is None:
        return {}
    return plan.trained.counts(plan.settings_of_translator(), pairs, align)


def make_task(
    plan: TranslationRecipe, pairs: Pairs, valid: Pairs, teacher: Seq2Seq | None
) -> TranslationTask:
    """Return the task of a recipe."""
    make = make_teacher_task if plan.trained is None else make_student_task
    return make(plan, pairs, valid, teacher)


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
    The layers are counted from 0. All exits share the final norm and the head.
    """
    c = model.config
    labels = add_ends(c, target)
    states = model.layer_states(*model.causal_inputs(source, target, dropout), dropout)
    is_token = labels != c.pad
    weights = weights or [0.0] * (c.decoder_layers - 1) + [1.0]
    losses = dict[int, Tensor]()
    for layer, x in enumerate(states):
        if weights[layer]:
            rows = model.logits(model.decoder.apply_final_norm(x[is_token]))
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
