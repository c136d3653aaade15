"""`tinyspec train lm`: a recipe and the classics become a checkpoint with its card.

A recipe is a TOML file that stands beside the checkpoint it made. Without a teacher the loss is
cross-entropy on random crops of the training books. With one, the student is distilled from the
teacher's whole law on the same crops:

    loss = lambda KL(p || q) + (1 - lambda) TV(p, q),    lambda = exp(-3 alpha),    alpha = 1 - TV(p, q)

because the acceptance rate of speculative decoding *is* alpha = sum_x min(p(x), q(x)) (Leviathan et
al. 2023, theorem 3.5; DistillSpec, Zhou et al. 2024, arXiv 2310.08461, trains on it). The total
variation alone has almost no gradient while the two laws hardly overlap, so the divergence leads
first, and hands over as they approach.

With a section [own], part of it happens on texts of the teacher, and the laws are compared under a
repetition penalty (own.py). A section [exits] teaches the early layers too (exit_losses.py), and
logs what they are worth.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from tinyspec import data
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training import corpus
from tinyspec.training.card import write_card
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule, exit_logits
from tinyspec.training.own_texts import OwnTexts, apply_repetition_penalty, write_own_texts
from tinyspec.training.recipe import END_ID, read_recipe
from tinyspec.training.train import Batches, Loss, TrainingResult, train


def distillation_loss(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """The module's loss, from the teacher's and the student's logits [..., V]: a scalar."""
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
    device: str | None = None,
    minutes: float | None = None,
    compiled: bool | None = None,
    restart: bool = False,
    overrides: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> TrainingResult:
    """Train the model of a recipe into the folder `out`: checkpoint, log.jsonl, README.md,
    loss.svg, recipe.toml.

    data_folder  where the classics lie (default: `tinyspec.data.folder()`)
    device       default: cuda where there is one
    minutes      clock budget, instead of the recipe's
    compiled     torch.compile (default: on cuda)
    restart      forget an interrupted training, or replace a finished model

    An interrupted training leaves its state in out/.tinyspec and goes on when called again.
    Raises TinyspecError for missing data, an unusable recipe, and a folder that already holds the
    finished model.
    """
    path, out = Path(recipe), Path(out)
    overrides = dict(overrides or {})
    if minutes is not None:
        overrides["train.minutes"] = str(float(minutes))
    plan = read_recipe(path, overrides)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise TinyspecError(
            "device cuda: torch finds no CUDA device here; --device cpu trains on the processor"
        )
    state = out / ".tinyspec"
    if restart:
        shutil.rmtree(state, ignore_errors=True)
    elif (out / "model.safetensors").exists() and not (state / "state.pt").exists():
        raise TinyspecError(f"{out} already holds a trained model; --restart trains it again")
    say = (console or Console(quiet=True)).print

    texts = [corpus.clean_book(book.text) for book in data.read_books("train", data_folder)]
    held_out = [corpus.clean_book(book.text) for book in data.read_books("valid", data_folder)]
    teacher = parent = None
    if plan.start:
        parent = Model(*checkpoint.read(path.parent / plan.start)).to(dtype=torch.float32)
        tokenizer = parent.tokenizer
        plan = replace(plan, vocab_size=parent.config.vocab_size)
    elif plan.teacher:
        teacher = Model(*checkpoint.read(path.parent / plan.teacher)).to(where, torch.float32)
        tokenizer = teacher.tokenizer
        plan = replace(plan, vocab_size=teacher.config.vocab_size)
    elif plan.tokenizer:
        tokenizer = Tokenizer.from_folder(path.parent / plan.tokenizer)
        plan = replace(plan, vocab_size=tokenizer.vocab_size)
    elif (state / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_folder(state)
    else:
        tokenizer = corpus.train_tokenizer(texts, plan.vocab_size, state)
    config = plan.config()
    tokens = corpus.pack_texts(tokenizer, texts, END_ID).to(where)
    say(
        f"{len(texts)} books, {len(tokens):,} tokens; {plan.name}: {config.parameters():,} weights on {where}"
    )

    if parent is not None and parent.config.shapes() != config.shapes():
        raise TinyspecError(
            f"{path}: start goes on from {plan.start}, which has another [shape]: write the same here"
        )
    parent = teacher if plan.inherit else parent
    model = _fresh(config, plan.settings.seed, parent).to(where)
    exits = plan.exits or ExitLosses()
    course = (
        ExitLossSchedule(exits, config.n_layers, plan.settings.steps)
        if exits.changes_training
        else None
    )
    compiled = (where.type == "cuda" and course is None) if compiled is None else compiled
    loss = _make_loss(model, teacher, course, plan.dropout, where, compiled)
    written = None
    if plan.own is not None:
        writer = Model(*checkpoint.read(path.parent / plan.teacher)).to(where)
        written = OwnTexts(
            *write_own_texts(writer, tokens, plan.own, state / "own", console), plan.own
        )
    excerpt = [
        corpus.encode_document(tokenizer, text, END_ID, plan.valid_characters) for text in held_out
    ]
    whole = [corpus.encode_document(tokenizer, text, END_ID) for text in held_out]

    def figures(
        judged: Model, documents: list[corpus.Document], shown: Sequence[int]
    ) -> dict[str, float]:
        size = plan.context, plan.context // 2, where
        bits = corpus.bits_per_byte(judged.training_logits, documents, *size)
        if teacher is not None:
            alpha = corpus.measure_acceptance(
                teacher.training_logits, judged.training_logits, documents, *size
            )
            if written is None:
                return {"refused": 1 - alpha, "alpha": alpha, "valid_bits_per_byte": bits}
            own = written.measure_acceptance(teacher.training_logits, judged.training_logits)
            return {
                "refused": 1 - (alpha + own) / 2,
                "alpha": alpha,
                "alpha_own": own,
                "valid_bits_per_byte": bits,
            }
        early = {
            f"exit_{layers}": corpus.bits_per_byte(
                partial(exit_logits, judged.dense(), layers=layers), excerpt, *size
            )
            for layers in shown
        }
        return {"valid_bits_per_byte": bits, **early}

    def validate() -> dict[str, float]:
        with autocast(where):
            return figures(model, excerpt, exits.report)

    batches: Batches = corpus.make_crop_sampler(tokens, plan.batch, plan.context)
    if written is not None:
        batches = written.mix_batches(
            batches, max(plan.batch * plan.context // written.own.tokens, 1)
        )
    try:
        ended = train(
            model.weights,
            batches,
            loss,
            plan.settings,
            state,
            validate=validate,
            before_step=None if course is None else course.begin_step,
            console=console,
            title=plan.name,
        )
    except torch.OutOfMemoryError as error:
        raise TinyspecError(
            f"{where} is out of memory: --set train.pieces=2 computes each batch in two parts"
        ) from error
    if not ended.finished:
        say(f"stopped at step {ended.step:,}; the same command goes on from there")
        return ended
    stored = Model(config, model.to("cpu", torch.bfloat16).weights, tokenizer, plan.name)
    every = range(1, config.n_layers + 1) if plan.exits is not None else ()
    final = figures(
        stored.to(where, torch.float32), whole, every
    )  # the weights as they are stored, in float32
    say(
        "  ".join(f"{name} {value:.4f}" for name, value in final.items())
        + " over all valid books (exits: their beginnings)"
    )
    stored.save(out)
    shutil.copyfile(state / "log.jsonl", out / "log.jsonl")
    if path.resolve() != (out / "recipe.toml").resolve():
        shutil.copyfile(path, out / "recipe.toml")
    bytes_per_token = sum(len(text.encode()) for text in texts) / len(tokens)
    write_card(out, stored, plan, ended, final, bytes_per_token, where)
    shutil.rmtree(state)
    return ended


def _fresh(config: Config, seed: int, parent: Model | None) -> Model:
    """Random weights; those that a parent has in the same shape under the same name are its own."""
    model = Model.random(config, seed)
    inherited = {} if parent is None else parent.weights
    weights = {
        name: inherited[name].detach().cpu().clone()
        if name in inherited and inherited[name].shape == w.shape
        else w
        for name, w in model.weights.items()
    }
    return Model(config, weights)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 where the device multiplies it. A processor that emulates it takes ten times as long
    as in float32.
    """
    fast = device.type != "cpu"
    if not fast:
        able: dict[str, Any] = getattr(
            torch.cpu, "get_capabilities", dict
        )()  # absent before torch 2.12: then float32
        fast = any(able.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def _make_loss(
    model: Model,
    teacher: Model | None,
    course: ExitLossSchedule | None,
    dropout: float,
    device: torch.device,
    compiled: bool,
) -> Loss:
    """Cross-entropy, of exits too where there is a course, or distillation where there is a
    teacher.

    (inputs, targets), and the penalty of each row where laws are compared under one -> mean over
    the batch.
    """

    def language(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model.training_logits(inputs, dropout)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def distilled(inputs: Tensor, targets: Tensor, penalty: Tensor | None = None) -> Tensor:
        assert teacher is not None
        with torch.no_grad():
            law = teacher.training_logits(inputs)
        said = model.training_logits(inputs, dropout)
        if penalty is not None:
            law, said = (
                apply_repetition_penalty(law.float(), inputs, penalty),
                apply_repetition_penalty(said.float(), inputs, penalty),
            )
        return distillation_loss(law, said)

    def course_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        assert course is not None
        return course.loss(model.dense(), inputs, targets, dropout)

    loss: Loss = distilled if teacher is not None else language if course is None else course_loss
    if compiled:
        loss = torch.compile(loss)

    def mixed(*batch: Tensor) -> Tensor:
        with autocast(device):
            return loss(*batch)

    return mixed
