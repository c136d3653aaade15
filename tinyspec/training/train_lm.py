"""Train a language model: `tinyspec train lm` makes a checkpoint and its card from a recipe.

Without a teacher the loss is cross-entropy on random crops of the training books. With a teacher
the student is distilled from the teacher's whole distributions on the same crops:

    loss = lambda KL(p || q) + (1 - lambda) TV(p, q)
    lambda = exp(-3 alpha),    alpha = 1 - TV(p, q) = sum_x min(p(x), q(x))

alpha is the acceptance rate of speculative decoding (Leviathan et al. 2023, theorem 3.5;
DistillSpec, Zhou et al. 2024, arXiv 2310.08461, trains on it). The total variation alone has almost
no gradient while the two distributions hardly overlap. So the divergence dominates first, and the
total variation dominates as they overlap more.

With a section [own], a part of the steps uses texts of the teacher, and the distributions are
compared under a repetition penalty (own_texts.py). A section [exits] trains the early layers too,
and logs their figures (exit_losses.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec import data
from tinyspec.errors import TinyspecError
from tinyspec.lm.checkpoint import read_checkpoint
from tinyspec.lm.model import Model
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training import corpus, ranks
from tinyspec.training.card import sample_continuation
from tinyspec.training.corpus import END_ID
from tinyspec.training.driver import RecipeRun, RunOptions, inherit_weights
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule, exit_logits
from tinyspec.training.own_texts import OwnTexts, apply_repetition_penalty, write_own_texts
from tinyspec.training.recipe import Recipe, read_recipe
from tinyspec.training.train import Batches, Loss, TrainingResult, autocast


def distillation_loss(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return the module's loss of the teacher's and the student's logits [..., V], a scalar."""
    p_log, q_log = p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1)
    p, q = p_log.exp(), q_log.exp()
    divergence = (p * (p_log - q_log)).sum(-1).mean()
    distance = 0.5 * (p - q).abs().sum(-1).mean()
    lead = torch.exp(-3 * (1 - distance.detach()))
    return lead * divergence + (1 - lead) * distance


def train_lm(
    recipe: str | Path,
    out: str | Path,
    *,
    data_folder: str | Path | None = None,
    compiled: bool | None = None,
    **options: Unpack[RunOptions],
) -> TrainingResult:
    """Train the model of a recipe into the folder `out`; see `RecipeRun`.

    data_folder  where the classics lie (default: `tinyspec.data.data_folder()`)
    compiled     torch.compile (default: on cuda)
    """
    run = RecipeRun(read_recipe, recipe, out, **options)
    where = run.device
    texts = [corpus.clean_book(book.text) for book in data.read_books("train", data_folder)]
    held_out = [corpus.clean_book(book.text) for book in data.read_books("valid", data_folder)]
    plan, tokenizer, teacher, parent = _load_models(run, texts)
    config = plan.config()
    tokens = corpus.pack_texts(tokenizer, texts, END_ID).to(where)
    run.print(
        f"{len(texts)} books, {len(tokens):,} tokens; "
        f"{plan.name}: {config.parameters():,} weights on {where}"
    )
    if parent is not None and parent.config.shapes() != config.shapes():
        raise TinyspecError(
            f"{run.path}: start goes on from {plan.start}, which has another [shape]: "
            "write the same here"
        )
    begin = teacher if plan.inherit else parent
    weights = dict(Model.random(config, plan.settings.seed).weights)
    if begin is not None:
        inherit_weights(weights, begin.weights, begin.weights)
    model = Model(config, weights).to(where)
    exits = plan.exits or ExitLosses()
    schedule = None
    if exits.changes_training:
        schedule = ExitLossSchedule(exits, config.n_layers, plan.settings.steps)
    compiled = (where.type == "cuda" and schedule is None) if compiled is None else compiled
    loss = _make_loss(model, teacher, schedule, plan.dropout, where, compiled)
    batches: Batches = corpus.make_crop_sampler(tokens, plan.batch, plan.context)
    own_texts = None
    if plan.own is not None:
        writer = Model(*read_checkpoint(run.path.parent / plan.teacher)).to(where)
        folder = run.state / "own"
        written = write_own_texts(writer, tokens, plan.own, folder, run.console)
        own_texts = OwnTexts(*written, plan.own)
        rows = max(plan.batch * plan.context // plan.own.tokens, 1)
        batches = own_texts.mix_batches(batches, rows)

    def measure(
        student: Model, documents: list[corpus.Document], layers: Sequence[int]
    ) -> dict[str, float]:
        """Return figures of the student; the first is the one that decides."""
        size = plan.context, plan.context // 2, where
        bits = corpus.bits_per_byte(student.training_logits, documents, *size)
        if teacher is not None:
            p, q = teacher.training_logits, student.training_logits
            alpha = corpus.measure_acceptance(p, q, documents, *size)
            alphas = {"alpha": alpha}
            if own_texts is not None:
                alphas["alpha_own"] = own_texts.measure_acceptance(p, q)
            mean = sum(alphas.values()) / len(alphas)
            return {"refused": 1 - mean, **alphas, "valid_bits_per_byte": bits}
        early = {
            f"exit_{n}": corpus.bits_per_byte(
                partial(exit_logits, student.torch_blocks(), layers=n), excerpt, *size
            )
            for n in layers
        }
        return {"valid_bits_per_byte": bits, **early}

    excerpt = [
        corpus.encode_document(tokenizer, text, END_ID, plan.valid_characters) for text in held_out
    ]

    def validate() -> dict[str, float]:
        with autocast(where):
            return measure(model, excerpt, exits.report)

    result = run.train(
        model.weights, batches, loss, validate, schedule.begin_step if schedule else None
    )
    if not result.finished:
        return result
    stored = Model(config, model.to("cpu", torch.bfloat16).weights, tokenizer, plan.name)
    # The figures of the card belong to the weights as they are stored, computed in float32.
    whole = [corpus.encode_document(tokenizer, text, END_ID) for text in held_out]
    layers = range(1, config.n_layers + 1) if plan.exits is not None else ()
    figures = measure(stored.to(where, torch.float32), whole, layers)
    run.print(
        "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        + " over all valid books (exits: their beginnings)"
    )
    stored.save(run.out)
    bytes_per_token = sum(len(text.encode()) for text in texts) / len(tokens)
    if teacher is not None:
        curves = {"training loss": result.curve("loss"), "alpha, valid": result.curve("alpha")}
    else:
        scale = 1 / (math.log(2) * bytes_per_token)  # from nats per token to bits per byte
        label = "training, all exits" if schedule else "training, bits/byte"
        curves = {
            label: [(x, loss * scale) for x, loss in result.curve("loss")],
            "valid, bits/byte": result.curve("valid_bits_per_byte"),
        }
    samples = [
        f"**{prompt}**" + sample_continuation(stored, prompt, seed)
        for seed, prompt in enumerate(plan.prompts)
    ]
    run.finish(
        "language_model",
        result,
        curves,
        config=config,
        figures=figures,
        bytes_per_token=bytes_per_token,
        exits=layers,
        samples=samples,
    )
    return result


def _load_models(
    run: RecipeRun[Recipe], texts: Sequence[str]
) -> tuple[Recipe, Tokenizer, Model | None, Model | None]:
    """Return the recipe with its tokenizer's size, the tokenizer, the teacher and the parent."""
    plan, beside = run.recipe, run.path.parent
    teacher = parent = None
    if plan.start:
        parent = Model(*read_checkpoint(beside / plan.start)).to(dtype=torch.float32)
        tokenizer, size = parent.tokenizer, parent.config.vocab_size
    elif plan.teacher:
        teacher = Model(*read_checkpoint(beside / plan.teacher)).to(run.device, torch.float32)
        tokenizer, size = teacher.tokenizer, teacher.config.vocab_size
    elif plan.tokenizer:
        tokenizer = Tokenizer.from_folder(beside / plan.tokenizer)
        size = tokenizer.vocab_size
    else:
        size = plan.vocab_size
        with ranks.main_rank_first():
            if (run.state / "tokenizer.json").exists():
                tokenizer = Tokenizer.from_folder(run.state)
            else:
                tokenizer = corpus.train_tokenizer(texts, size, run.state)
    return replace(plan, vocab_size=size), tokenizer, teacher, parent


def _make_loss(
    model: Model,
    teacher: Model | None,
    schedule: ExitLossSchedule | None,
    dropout: float,
    device: torch.device,
    compiled: bool,
) -> Loss:
    """Return the loss of a batch (inputs, targets), a scalar.

    With a teacher it is the distillation loss; a batch may then have the penalty of each row, too.
    With a schedule it is the loss of the exits, else cross-entropy.
    """

    def cross_entropy(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model.training_logits(inputs, dropout)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def distill(inputs: Tensor, targets: Tensor, penalty: Tensor | None = None) -> Tensor:
        assert teacher is not None
        with torch.no_grad():
            p_logits = teacher.training_logits(inputs)
        q_logits = model.training_logits(inputs, dropout)
        if penalty is not None:
            p_logits = apply_repetition_penalty(p_logits.float(), inputs, penalty)
            q_logits = apply_repetition_penalty(q_logits.float(), inputs, penalty)
        return distillation_loss(p_logits, q_logits)

    def exit_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        assert schedule is not None
        return schedule.loss(model.torch_blocks(), inputs, targets, dropout)

    loss: Loss = cross_entropy
    if teacher is not None:
        loss = distill
    elif schedule is not None:
        loss = exit_loss
    if compiled:
        loss = torch.compile(loss)

    def mixed_precision_loss(*batch: Tensor) -> Tensor:
        with autocast(device):
            return loss(*batch)

    return mixed_precision_loss
