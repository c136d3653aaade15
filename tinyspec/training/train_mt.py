"""Train a translation model: `tinyspec train mt` makes a checkpoint and its card from a recipe.

The models translate English to German and are trained on Multi30k. The teacher is autoregressive
and learns from people's translations. The other models learn from their teacher's (distilled.py).
Their recipes say which of its weights they begin with; their losses stand in their techniques'
files. BLEU on the valid sentences decides which weights are best, and for a block layer the loss on
them. The test sentences are left for the benchmark.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyspec import data, models
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training import bitext, distilled, ranks
from tinyspec.training.bitext import SentencePair
from tinyspec.training.bleu import corpus_bleu, load_bleu
from tinyspec.training.driver import RecipeRun, RunOptions, find_beside, inherit_weights
from tinyspec.training.recipe import TranslationRecipe, read_translation_recipe
from tinyspec.training.train import Batch, TrainingResult, autocast
from tinyspec.training.translation_tasks import (
    count_in_pairs,
    make_task,
    translate_in_batches,
)

SHOWN = 5  # examples on a card: the first valid sentences


def train_mt(
    recipe: str | Path,
    out: str | Path,
    *,
    data_folder: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> TrainingResult:
    """Train the model of a recipe into the folder `out`; see `RecipeRun`.

    data_folder  where Multi30k lies (default: `tinyspec.data.data_folder()`)
    """
    run = RecipeRun(read_translation_recipe, recipe, out, **options)
    load_bleu()  # fails before the training if sacrebleu is missing
    plan, folders = run.recipe, (run.path.parent, run.out)
    texts = data.read_multi30k("train", data_folder)
    held_out = data.read_multi30k("valid", data_folder)[: plan.judged]
    teacher = load_named_model(plan, plan.teacher, *folders)
    if teacher is not None:
        tokenizer = teacher.tokenizer
    else:
        with ranks.main_rank_first():
            if (run.state / "tokenizer.json").exists():
                tokenizer = Tokenizer.from_folder(run.state)
            else:
                sides = (side for pair in texts for side in pair)
                tokenizer = bitext.train_joint_tokenizer(sides, plan.vocab_size, run.state)
    pairs, valid = bitext.encode_pairs(tokenizer, texts), bitext.encode_pairs(tokenizer, held_out)
    if teacher is not None and plan.distill is not None:
        sources = [pair.source for pair in pairs]
        targets = distilled.distill_translations(
            teacher, sources, plan.distill, console=run.console
        )
        pairs = [SentencePair(*sides) for sides in zip(sources, targets, strict=True)]
    usable = bitext.filter_pairs(pairs, plan.longest)
    parent = load_named_model(plan, plan.finetune or plan.start, *folders)
    counted = count_in_pairs(plan, usable)
    model = initial_model(plan, tokenizer, parent or teacher, run.device, counted)
    task = make_task(plan, usable, valid, teacher and teacher.to(run.device))
    is_mixed = plan.trained is None or not plan.trained.float32
    run.print(
        f"{len(task.pairs):,} pairs; "
        f"{plan.name}: {model.config.parameters():,} weights on {run.device}"
    )

    def translate_texts(model: Seq2Seq, sources: Sequence[Sequence[int]]) -> list[str]:
        translations = translate_in_batches(sources, partial(task.translate, model))
        return [tokenizer.decode(ids) for ids in translations]

    def measure_bleu(model: Seq2Seq) -> float:
        found = translate_texts(model, [pair.source for pair in valid])
        return corpus_bleu(found, [german for _, german in held_out]).score

    def validate() -> dict[str, float]:
        with torch.no_grad():
            score = measure_bleu(model)
            figures = {"missed": 100 - score, "valid_bleu": score, **task.figures(model)}
            return {task.best: figures[task.best], **figures}

    def loss(*batch: Tensor) -> Tensor:
        seed = int(torch.randint(1 << 62, ()))  # the trainer has seeded torch for this step
        with _compute_fast(run.device) if is_mixed else nullcontext():
            return task.loss(model, batch, torch.Generator(run.device).manual_seed(seed))

    sample_numbers = bitext.make_batch_sampler(task.pairs, plan.tokens)

    def batches(generator: torch.Generator) -> Batch:
        return tuple(part.to(run.device) for part in task.batch(sample_numbers(generator)))

    trained = {name: w for name, w in model.weights.items() if name.startswith(task.trained)}

    def count_target_tokens(batch: Batch) -> int:
        ends = len(batch[1]) if plan.trained is None else 0  # which a teacher learns too
        return int((batch[1] != model.config.pad).sum()) + ends

    result = run.train(
        trained, batches, loss, validate, task.before_step, weigh=count_target_tokens
    )
    if not result.finished:
        return result
    model.save(run.out)
    stored = Seq2Seq.load(run.out)  # the weights as they are stored, in float32
    with torch.no_grad():
        figures = {"valid_bleu": measure_bleu(stored), **task.figures(stored)}
    run.print(f"valid_bleu {figures['valid_bleu']:.2f}")
    examples = translate_texts(stored, [pair.source for pair in valid[:SHOWN]])
    run.finish(
        "translator",
        result,
        {"training loss": result.curve("loss"), "valid loss": result.curve("valid_loss")},
        config=stored.config,
        figures=figures,
        judged=len(held_out),
        examples=list(zip(held_out, examples, strict=False)),
    )
    return result


@contextmanager
def _compute_fast(device: torch.device) -> Iterator[None]:
    """Compute in bfloat16 if the device multiplies it, and attention in separate steps.

    In bfloat16 the fused attention of a CPU is slow in the backward pass, for texts as short as
    sentences.
    """
    with autocast(device), sdpa_kernel(SDPBackend.MATH):
        yield


def distill_only(
    recipe: str | Path,
    out: str | Path,
    *,
    data_folder: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> Path:
    """Write the targets that a recipe's teacher makes for its students, and return their folder."""
    plan = read_translation_recipe(recipe, overrides)
    teacher = load_named_model(plan, plan.teacher, Path(recipe).parent, Path(out))
    if teacher is None or plan.distill is None:
        raise TinyspecError(f"{recipe}: nothing is distilled: it has no section [distill]")
    pairs = bitext.encode_pairs(teacher.tokenizer, data.read_multi30k("train", data_folder))
    sources = [pair.source for pair in pairs]
    distilled.distill_translations(teacher, sources, plan.distill, console=console)
    return distilled.translations_folder(teacher, sources, plan.distill)


def load_named_model(plan: TranslationRecipe, name: str, *folders: Path) -> Seq2Seq | None:
    """Load a model that a recipe names: a folder beside one of `folders`, or a known model."""
    if not name:
        return None
    folder = find_beside(name, *folders) or models.find_model(name)
    if folder is None or not (folder / "model.safetensors").is_file():
        raise TinyspecError(
            f"recipe {plan.name}: the model {name} is not there: train it first (train mt)"
        )
    return Seq2Seq.load(folder)


def initial_model(
    plan: TranslationRecipe,
    tokenizer: Tokenizer,
    parent: Seq2Seq | None,
    device: torch.device,
    counted: Mapping[str, Any] | None = None,
) -> Seq2Seq:
    """Return a model with random weights, or the parent's where name and shape are equal.

    `plan.inherit` has the prefixes of these names, and those of the parent's if they are others.
    Fine-tuning begins with all of them, and so does a recipe that names a start, or a method that
    adds weights to its teacher.

    counted  what the method has counted in the training pairs
    """
    config = plan.config(tokenizer.vocab_size)
    config = replace(config, extra={**config.extra, **(counted or {})})
    generator = torch.Generator().manual_seed(plan.settings.seed)
    weights = dict(Seq2Seq.create(config, generator, tokenizer=tokenizer).weights)
    if plan.trained is not None:
        plan.trained.initialize(weights)
    if parent is not None:
        named = plan.inherit
        prefixes = named if isinstance(named, Mapping) else {name: name for name in named}
        extends = plan.trained is not None and plan.trained.extends
        if plan.finetune or plan.start or extends:
            prefixes = {"": ""}
        lent = {
            own + name.removeprefix(theirs): weight
            for own, theirs in prefixes.items()
            for name, weight in parent.weights.items()
            if name.startswith(theirs)
        }
        inherit_weights(weights, lent, lent)
    return Seq2Seq(
        config, {name: w.to(device) for name, w in weights.items()}, tokenizer, plan.name
    )
