"""`tinyspec train mt`: a recipe and Multi30k become a translation model with its card, English to
German.

The teacher is autoregressive and learns what people wrote; the others learn what their teacher says
(distilled.py), begin as far as their recipe says with its weights, and are trained by the loss that
stands in their technique's file. All are judged by BLEU on the valid sentences, by which the best
weights are chosen; the test sentences are for the benchmark.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from tinyspec import data, models
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training import bitext, distilled
from tinyspec.training.bitext import SentencePair
from tinyspec.training.bleu import corpus_bleu, load_bleu
from tinyspec.training.card_mt import write_card
from tinyspec.training.recipe_mt import TranslationRecipe, read_translation_recipe
from tinyspec.training.train import Batch, TrainingResult, train
from tinyspec.training.translation_tasks import TASKS


def train_mt(
    recipe: str | Path,
    out: str | Path,
    *,
    data_folder: str | Path | None = None,
    device: str | None = None,
    minutes: float | None = None,
    restart: bool = False,
    overrides: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> TrainingResult:
    """Train the model of a recipe into the folder `out`: checkpoint, log.jsonl, README.md,
    loss.svg, recipe.toml.

    data_folder  where Multi30k lies (default: `tinyspec.data.folder()`)
    device       default: cuda where there is one
    minutes      clock budget, instead of the recipe's
    restart      forget an interrupted training, or replace a finished model

    An interrupted training leaves its state in out/.tinyspec and goes on when called again.
    Raises TinyspecError for missing data, an unusable recipe, and a folder that already holds the
    finished model.
    """
    path, out = Path(recipe), Path(out)
    changed = {
        **(overrides or {}),
        **({} if minutes is None else {"train.minutes": str(float(minutes))}),
    }
    plan = read_translation_recipe(path, changed)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    state = out / ".tinyspec"
    if restart:
        shutil.rmtree(state, ignore_errors=True)
    elif (out / "model.safetensors").exists() and not (state / "state.pt").exists():
        raise TinyspecError(f"{out} already holds a trained model; --restart trains it again")
    load_bleu()  # says at once if sacrebleu is missing
    say = (console or Console(quiet=True)).print

    texts, held = (
        data.read_multi30k("train", data_folder),
        data.read_multi30k("valid", data_folder)[: plan.judged],
    )
    teacher = load_named_model(plan, plan.teacher, path.parent, out)
    if teacher is not None:
        tokenizer = teacher.tokenizer
    elif (state / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_folder(state)
    else:
        tokenizer = bitext.train_joint_tokenizer(
            (side for pair in texts for side in pair), plan.vocab_size, state
        )
    pairs, valid = bitext.encode_pairs(tokenizer, texts), bitext.encode_pairs(tokenizer, held)
    if teacher is not None and plan.distill is not None:
        written = distilled.distill_translations(
            teacher, [pair.source for pair in pairs], plan.distill, console=console
        )
        pairs = [
            SentencePair(pair.source, target) for pair, target in zip(pairs, written, strict=True)
        ]
    seen = bitext.filter_pairs(pairs, plan.longest)
    parent = load_named_model(plan, plan.finetune, path.parent, out)
    model = initial_model(plan, tokenizer, parent or teacher, where)
    taught = TASKS[plan.method](plan, seen, valid, teacher)
    say(
        f"{len(taught.pairs):,} pairs; {plan.name}: {model.config.parameters():,} weights on {where}"
    )

    def judged(one: Seq2Seq) -> float:
        made = taught.translate(one, [pair.source for pair in valid])
        return corpus_bleu(
            [tokenizer.decode(ids) for ids in made], [german for _, german in held]
        ).score

    def validate() -> dict[str, float]:
        with torch.no_grad():
            score = judged(model)
            return {"missed": 100 - score, "valid_bleu": score, **taught.figures(model)}

    def loss(*batch: Tensor) -> Tensor:
        seed = int(torch.randint(1 << 62, ()))  # the trainer has seeded torch for this step
        return taught.loss(model, batch, torch.Generator(where).manual_seed(seed))

    draw = bitext.make_batch_sampler(taught.pairs, plan.tokens)

    def batches(generator: torch.Generator) -> Batch:
        return tuple(part.to(where) for part in taught.batch(draw(generator)))

    ended = train(
        model.weights,
        batches,
        loss,
        plan.settings,
        state,
        validate=validate,
        console=console,
        title=plan.name,
    )
    if not ended.finished:
        say(f"stopped at step {ended.step:,}; the same command goes on from there")
        return ended
    model.save(out)
    stored = Seq2Seq.load(out)  # the weights as they are stored, in float32
    final = {"valid_bleu": judged(stored)}
    say(f"valid_bleu {final['valid_bleu']:.2f}")
    shutil.copyfile(state / "log.jsonl", out / "log.jsonl")
    if path.resolve() != (out / "recipe.toml").resolve():
        shutil.copyfile(path, out / "recipe.toml")
    write_card(out, stored, plan, ended, final, taught.translate, held, where)
    shutil.rmtree(state)
    return ended


def distill_only(
    recipe: str | Path,
    out: str | Path,
    *,
    data_folder: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> Path:
    """Have the teacher of a recipe write its students' targets into the cache; returns the folder
    they lie in.
    """
    plan = read_translation_recipe(recipe, overrides)
    teacher = load_named_model(plan, plan.teacher, Path(recipe).parent, Path(out))
    if teacher is None or plan.distill is None:
        raise TinyspecError(f"{recipe}: nothing is distilled: it has no section [distill]")
    pairs = bitext.encode_pairs(teacher.tokenizer, data.read_multi30k("train", data_folder))
    sources = [pair.source for pair in pairs]
    distilled.distill_translations(teacher, sources, plan.distill, console=console)
    return distilled.translations_folder(teacher, sources, plan.distill)


def load_named_model(plan: TranslationRecipe, name: str, *beside: Path) -> Seq2Seq | None:
    """A model that a recipe names, its teacher for one: a folder beside the recipe or the student,
    or a model by name.
    """
    if not name:
        return None
    known = models.find_model(name)
    here = [
        Path(os.path.normpath(at / name)) for at in beside
    ]  # the student's folder may not be there yet
    for folder in (*here, *([known] if known else [])):
        if (folder / "model.safetensors").is_file():
            return Seq2Seq.load(folder)
    raise TinyspecError(
        f"recipe {plan.name}: the model {name} is not there: train it first (train mt)"
    )


def initial_model(
    plan: TranslationRecipe, tokenizer: Tokenizer, parent: Seq2Seq | None, where: torch.device
) -> Seq2Seq:
    """Random weights, but for those that the recipe has a parent lend: same name, same shape.
    Fine-tuning begins with all.
    """
    config = plan.config(tokenizer.vocab_size)
    fresh = Seq2Seq.create(
        config, torch.Generator().manual_seed(plan.settings.seed), tokenizer=tokenizer
    )
    lent = {} if parent is None else parent.weights
    weights = {
        name: lent[name].float().clone()
        if (plan.finetune or name.startswith(plan.inherit))
        and name in lent
        and lent[name].shape == w.shape
        else w
        for name, w in fresh.weights.items()
    }
    return Seq2Seq(config, {name: w.to(where) for name, w in weights.items()}, tokenizer, plan.name)
