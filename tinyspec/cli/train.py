"""tinyspec train: models, drafts that are made for each other, and exit classifiers."""

import shutil
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import OUTPUT_FOLDER, POSITIVE, flag, option
from tinyspec.errors import TinyspecError

CHARACTERS = 30_000  # of each book, so that all authors have a say in an exit classifier


@click.group("train", cls=base.Group)
def train() -> None:
    """Train models.

    \b
    Examples:
      tinyspec data fetch classics
      tinyspec train lm --recipe models/storyteller/recipe.toml --out models/mine
      tinyspec train lm --distill smollm2 --draft-vocab 8192 --out models/smollm2-draft
      tinyspec train boost --draft apprentice,apprentice --out boosted
      tinyspec train ngrams --draft apprentice --tokens 200000
    """


def check_encoding(_context: Any, _option: Any, path: Path | None) -> Path | None:
    """Return the path; raise TinyspecError unless the file is UTF-8 text."""
    if path is not None:
        base.read_text(path)
    return path


out_option = option(
    "--out", required=True, type=OUTPUT_FOLDER, help="The folder of the checkpoint."
)
data_option = option(
    "--data",
    "data_folder",
    type=base.INPUT_FOLDER,
    help="Where the texts lie. [default: TINYSPEC_DATA, else the cache]",
)
training_options = base.options(
    data_option,
    option("--minutes", type=float, help="Minutes of the training, instead of the recipe's."),
    option("--seed", type=int, help="Instead of the recipe's."),
    option("--device", help="cpu, cuda. [default: cuda where there is one]"),
)
recipe_options = base.options(
    option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one value of the recipe: train.lr=2e-3.",
    ),
    flag("--restart", help="Forget an interrupted training, or replace a finished model."),
)

DRAFT_SETTINGS = {
    "layers": "shape.n_layers",
    "draft_vocab": "distill.draft_vocab",
    "texts": "distill.texts",
}
"""Where the recipe of a draft has what an option says."""


@train.command("lm")
@option("--recipe", type=base.INPUT_FILE, help="The recipe (TOML).")
@option(
    "--distill",
    metavar="TARGET",
    help="Make a draft of this model, from its own outputs; no recipe is needed.",
)
@out_option
@option(
    "--layers",
    type=POSITIVE,
    help="--distill: layers of the draft, the target's first. [default: 2]",
)
@option(
    "--draft-vocab",
    type=click.IntRange(0),
    help="--distill: words of the draft, the most frequent ones; embeddings stay the target's. "
    "[default: 0, all]",
)
@option(
    "--texts",
    type=click.IntRange(2),
    help="--distill: texts that the target writes. [default: 1500]",
)
@option(
    "--prompts",
    type=base.INPUT_FILE,
    callback=check_encoding,
    help="--distill: what the target is asked, in paragraphs. "
    "[default: from the data at hand, and itself]",
)
@training_options
@option(
    "--compile/--no-compile", "compiled", default=None, help="torch.compile. [default: on cuda]"
)
@recipe_options
@base.quiet_option
def lm(
    recipe: Path | None,
    distill: str | None,
    out: Path,
    prompts: Path | None,
    seed: int | None,
    compiled: bool | None,
    settings: tuple[str, ...],
    quiet: bool,
    **run: Any,
) -> None:
    """Train the language model of a recipe into a checkpoint folder, with its card; or, with
    --distill, a draft.

    The state is saved every few minutes and on Ctrl-C; the same command goes on from there (exit
    code 130 says that it has not finished). --distill writes the recipe that it follows into the
    folder too.

    \b
    Examples:
      tinyspec train lm --recipe models/storyteller/recipe.toml --out models/mine
      tinyspec train lm --recipe my.toml --out my-model --minutes 20 --set train.lr=2e-3
      tinyspec train lm --distill storyteller --layers 1 --minutes 5 --out drafts/one
      tinyspec train lm --distill smollm2 --draft-vocab 8192 --out models/smollm2-draft
    """
    if (recipe is None) == (distill is None):
        raise TinyspecError("give --recipe FILE, or --distill TARGET to make a draft of a model")
    overrides = read_overrides(seed, settings)
    draft = {name: run.pop(name) for name in DRAFT_SETTINGS}

    from tinyspec.training.driver import check_free
    from tinyspec.training.recipe import read_recipe
    from tinyspec.training.train_lm import train_lm

    run |= {"console": make_console(quiet)}
    if distill is not None:
        if not run["restart"]:
            check_free(out)
        recipe = write_recipe(distill, out, overrides, **draft)
    assert recipe is not None
    if distill is not None or read_recipe(recipe, overrides).distill:
        from tinyspec.training.distill import distill as train_draft

        if compiled is not None:
            raise TinyspecError("--compile is not for drafts: their training is never compiled")
        given = {DRAFT_SETTINGS[name]: str(x) for name, x in draft.items() if x is not None}
        ended, final = train_draft(recipe, out, prompts=prompts, overrides=given | overrides, **run)
        if ended.finished:
            click.echo("  ".join(f"{name} {value:.4f}" for name, value in final.items()))
    else:
        for name, value in (draft | {"prompts": prompts}).items():
            if value is not None:
                what = f"--{name.replace('_', '-')}"
                raise TinyspecError(f"{what} is for drafts: the recipe has no section [distill]")
        ended = train_lm(recipe, out, compiled=compiled, overrides=overrides, **run)
    finish(ended.finished, out)


def make_console(quiet: bool) -> Any:
    """Return a console on standard error, which shows how far a training is; None for quiet."""
    from rich.console import Console

    return None if quiet else Console(stderr=True)


def read_overrides(seed: int | None, settings: tuple[str, ...]) -> dict[str, str]:
    """Return what --seed and --set KEY=VALUE change in a recipe."""
    changed = {} if seed is None else {"train.seed": str(seed)}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise TinyspecError(f"--set {setting}: write KEY=VALUE, such as train.lr=2e-3")
        changed[key.strip()] = value.strip()
    return changed


def finish(is_finished: bool, told: Any) -> None:
    """Print where the model is; exit code 130 says that the training has not finished."""
    if not is_finished:
        raise click.exceptions.Exit(130)
    click.echo(str(told))


def write_recipe(
    target: str,
    out: Path,
    overrides: dict[str, str],
    *,
    layers: int | None,
    draft_vocab: int | None,
    texts: int | None,
) -> Path:
    """Write the recipe of a draft where the training keeps its state, and return its file."""
    import os

    from tinyspec import models
    from tinyspec.lm import checkpoint
    from tinyspec.training.distill import draft_recipe
    from tinyspec.training.recipe import set_recipe_values

    path = models.find_model(target)
    if path is None and target in models.FETCHABLE:
        raise TinyspecError(
            f"{target} is not on this machine yet; run: tinyspec models fetch {target}"
        )
    if path is None or not path.is_dir():
        raise TinyspecError(
            f"--distill {target}: no such model as a folder on this machine "
            "(`tinyspec models list`)"
        )
    named = target if os.sep not in target else os.path.relpath(path, out)
    config = checkpoint.read_checkpoint_config(path)
    if layers is not None and layers > config.n_layers:
        raise TinyspecError(
            f"--layers {layers}: {target} has {config.n_layers} layers; a draft takes its first "
            "ones"
        )
    name = out.resolve().name
    text = draft_recipe(named, name, layers or 2, draft_vocab or 0, texts or 1500, config.d_model)
    text = set_recipe_values(text, overrides)
    file = out / ".tinyspec" / "recipe.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@train.command("head")
@option("--recipe", type=base.INPUT_FILE, help="The recipe (TOML).")
@option(
    "--for",
    "target",
    metavar="MODEL",
    help="Train a head of this model, or tune it; needs no recipe.",
)
@option("--method", help="--for: the method that the head or the tuned model is for.")
@out_option
@option(
    "--prompts",
    type=base.INPUT_FILE,
    callback=check_encoding,
    help="What the target is asked, in paragraphs. [default: from the data at hand, and itself]",
)
@training_options
@recipe_options
@base.quiet_option
def head(
    recipe: Path | None,
    target: str | None,
    method: str | None,
    out: Path,
    prompts: Path | None,
    seed: int | None,
    settings: tuple[str, ...],
    quiet: bool,
    **run: Any,
) -> None:
    """Train a head, as Medusa's, for a model that is not changed; or tune the model, as for SPACE.

    The method decides which. What comes out is a head, for --head FOLDER, or a model, for --model
    FOLDER. The page in the folder tells how a tuned model differs from the one that it was.

    The model writes texts, which lie in the cache; so do its states on them, which a head is
    trained on. The state of the training is saved every few minutes and on Ctrl-C; the same command
    goes on from there (exit code 130 says that it has not finished). --for writes the recipe that
    it follows into the folder too.

    \b
    Examples:
      tinyspec train head --for storyteller --method medusa --minutes 5 --out my-head
      tinyspec train head --recipe models/storyteller-medusa/recipe.toml --out my-head
      tinyspec generate --method medusa --head my-head "Once upon a time"
      tinyspec train head --for storyteller --method space --minutes 20 --out my-model
      tinyspec generate --model my-model --method space "Once upon a time"
    """
    if (recipe is None) == (target is None):
        raise TinyspecError("give --recipe FILE, or --for MODEL --method METHOD")
    if (target is None) == bool(method):
        raise TinyspecError("--for MODEL and --method METHOD go together; a recipe names both")
    overrides = read_overrides(seed, settings)

    from tinyspec.training.heads import train_head
    from tinyspec.training.recipe import read_head_recipe
    from tinyspec.training.tuned import train_tuned

    if target is not None and method:
        recipe = write_head_recipe(target, method, out, overrides, bool(run["restart"]))
    assert recipe is not None
    more: dict[str, Any] = {"overrides": overrides, "console": make_console(quiet)}
    is_tuned = read_head_recipe(recipe, overrides).card.tuned is not None
    train_it = train_tuned if is_tuned else train_head
    ended, final = train_it(recipe, out, prompts=prompts, **run, **more)
    if ended.finished:
        click.echo("  ".join(f"{name} {value:.4f}" for name, value in final.items()))
    finish(ended.finished, out)


def write_head_recipe(
    target: str, method: str, out: Path, overrides: dict[str, str], restart: bool
) -> Path:
    """Write the recipe of a head where the training keeps its state, and return its file."""
    import os
    import shutil

    from tinyspec import models
    from tinyspec.technique import find_technique
    from tinyspec.training.driver import check_free
    from tinyspec.training.heads import head_recipe
    from tinyspec.training.recipe import read_head_recipe, set_recipe_values

    is_tuned = find_technique(method).tuned is not None
    file, is_new = out / ".tinyspec" / "recipe.toml", not out.exists()
    if not restart:
        check_free(out)
    path = models.find_model(target)
    if path is None or not (path / "config.json").is_file():
        models.load(target)  # what is no model is told before anything is written
    is_name = path is None or os.sep not in target
    named = target if is_name or path is None else os.path.relpath(path, out)
    minutes = 20 if is_tuned else 10
    text = head_recipe(named, method, out.resolve().name, minutes, is_tuned)
    text = set_recipe_values(text, overrides)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_bytes() if file.exists() else None
    file.write_text(text, encoding="utf-8")
    try:
        read_head_recipe(file)
    except TinyspecError:  # nothing is lost: a begun training keeps its state and its recipe
        if before is not None:
            file.write_bytes(before)
        else:
            file.unlink()
        if is_new:
            shutil.rmtree(out)
        raise
    return file


@train.command("mt")
@option("--recipe", required=True, type=base.INPUT_FILE, help="The recipe (TOML).")
@out_option
@training_options
@recipe_options
@flag("--distill-only", help="Have the teacher write the targets, and stop there.")
@base.quiet_option
def mt(
    recipe: Path,
    out: Path,
    seed: int | None,
    settings: tuple[str, ...],
    distill_only: bool,
    quiet: bool,
    **run: Any,
) -> None:
    """Train the translation model of a recipe, English to German on Multi30k: first the teacher,
    then what learns from it.

    The state is saved every few minutes and on Ctrl-C; the same command goes on from there (exit
    code 130 says that it has not finished). What the teacher writes for a student lies in the
    cache.

    \b
    Examples:
      tinyspec data fetch multi30k
      tinyspec train mt --recipe models/multi30k-teacher/recipe.toml --out models/my-teacher
      tinyspec train mt --recipe models/multi30k-nat/recipe.toml --out models/my-nat --minutes 30
    """
    overrides = read_overrides(seed, settings)

    from tinyspec.training import train_mt

    more: dict[str, Any] = {"overrides": overrides, "console": make_console(quiet)}
    if distill_only:
        folder = run["data_folder"]
        click.echo(str(train_mt.distill_only(recipe, out, data_folder=folder, **more)))
    else:
        finish(train_mt.train_mt(recipe, out, **run, **more).finished, out)


@train.command("boost")
@option("--model", "-m", default="storyteller", help="The target: name or folder.")
@base.draft_option
@option("--out", required=True, type=OUTPUT_FOLDER, help="A folder for the drafts.")
@data_option
@option("--prompts", type=POSITIVE, default=2000, help="Passages of the books.")
@option("--prompt-tokens", type=POSITIVE, default=32, help="Tokens of a passage.")
@option("--tokens", type=POSITIVE, default=4, help="Tokens of the target's answer.")
@option("--steps", type=POSITIVE, default=300, help="Training steps of each draft.")
@option("--lr", type=float, default=3e-4, help="Learning rate.")
@option("--seed", type=int, default=0, help="Same seed, same drafts.")
@option("--device", default="cpu", help="cpu, cuda, or cuda:0.")
def boost(
    model: str,
    draft: list[str],
    out: Path,
    data_folder: Path | None,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
    steps: int,
    lr: float,
    seed: int,
    device: str,
) -> None:
    """Tune several draft models so that together they say what the target says (SpecInfer's
    collective boost-tuning).

    The target continues passages of the training books greedily; each draft is tuned on those that
    no draft before it continues alike. A draft that is named twice becomes two. An interrupted
    training goes on from where it was.

    \b
    Examples:
      tinyspec train boost --draft apprentice,apprentice --out boosted
      tinyspec generate --method specinfer --draft boosted/1,boosted/2 "Once upon a time"
    """
    import torch

    from tinyspec import data
    from tinyspec.pairing import check_pair
    from tinyspec.training import corpus
    from tinyspec.training.schedule import TrainSettings
    from tinyspec.training.technique_parts import boost_drafts

    target, small = base.load_all(model, draft, ["specinfer"], device, "float32")
    if small is None:
        raise TinyspecError(f"the card of {target.name} names no draft: give --draft NAME,NAME")
    for one in small:
        check_pair(target, one)
    texts = [corpus.clean_book(book.text) for book in data.read_books("train", data_folder)]
    draw = corpus.make_crop_sampler(
        corpus.pack_texts(target.tokenizer, texts, corpus.END_ID), prompts, prompt_tokens
    )
    passages, _ = draw(torch.Generator().manual_seed(seed))
    settings = TrainSettings(steps=steps, lr=lr, warmup=min(20, steps), weight_decay=0.0, seed=seed)
    found = boost_drafts(target, small, passages, settings, out / ".tinyspec", tokens)
    for number, (tuned, own, together) in enumerate(zip(*found, strict=True), start=1):
        tuned.to("cpu", torch.bfloat16).save(out / str(number))
        passages_alike = f"on {own:.1%} of the passages, together {together:.1%}"
        click.echo(f"{out / str(number)}  says what {target.name} says {passages_alike}")
    shutil.rmtree(out / ".tinyspec")  # done: the next call begins anew


@train.command("ngrams")
@option("--draft", default="apprentice", help="The draft model: name or folder; not changed.")
@option("--tokens", type=POSITIVE, default=200_000, help="At least so many, in whole batches.")
@option("--device", default="cpu", help="cpu, cuda, or cuda:0.")
@base.quiet_option
def train_ngrams(draft: str, tokens: int, device: str, quiet: bool) -> None:
    """Let a draft model sample text of its own, for n-grams that are counted in it.

    The text lies in the cache, under the draft's name and a hash of its weights. An interrupted run
    goes on from where it was; so does one with more --tokens. `staged` and `cascade` count as many
    tokens of it as --sample says.

    \b
    Examples:
      tinyspec train ngrams --draft apprentice --tokens 200000
      tinyspec generate --method staged --sample 200000 "Once upon a time"
    """
    from tinyspec import models
    from tinyspec.speculative import ngram
    from tinyspec.training.text_cache import cache_batches

    model = models.load(draft, device=device)
    folder, size = ngram.own_texts_folder(model), ngram.batch_tokens(model)
    batches = cache_batches(
        folder,
        range(-(-tokens // size)),
        1,
        lambda number, _: ngram.sample_batch(model, number, size),
        name_file=ngram.name_batch,
        title=f"batches of {size} tokens of {model.name}",
        console=make_console(quiet),
    )
    click.echo(f"{folder}: {sum(len(text) - 1 for batch in batches for text in batch)} tokens")


@train.command("exits")
@option("--model", "-m", default="storyteller", help="Name or folder; it is not changed.")
@option(
    "--out",
    type=OUTPUT_FOLDER,
    help="A folder for a copy with the classifier. [default: into the model's own folder]",
)
@option(
    "--texts",
    "files",
    multiple=True,
    type=base.INPUT_FILE,
    help="Plain text to take passages from; may be repeated. [default: the classics]",
)
@option("--steps", type=POSITIVE, default=200, help="Steps of the training.")
@option("--batch", type=POSITIVE, default=4, help="Passages a step.")
@option("--context", type=click.IntRange(2), default=64, help="Tokens of a passage.")
@option("--lr", type=click.FloatRange(0, min_open=True), default=0.01, help="Learning rate.")
@option("--seed", type=int, default=0, help="Of the passages.")
@base.quiet_option
def train_exits(
    model: str,
    out: Path | None,
    files: tuple[Path, ...],
    steps: int,
    batch: int,
    context: int,
    lr: float,
    seed: int,
    quiet: bool,
) -> None:
    """Train CALM's exit classifier: one vector that says whether a layer's word is the top layer's.
    The model is frozen.

    An interrupted training goes on with the same command.

    \b
    Examples:
      tinyspec train exits --model storyteller --out models/mine
      tinyspec generate --model models/mine --method calm --measure classifier "Once upon a time"
    """
    import shutil

    from tinyspec import data, models
    from tinyspec.lm import checkpoint
    from tinyspec.training import corpus
    from tinyspec.training.schedule import TrainSettings
    from tinyspec.training.technique_parts import train_exit_classifier

    loaded = models.load(model)
    found = models.find_model(model)
    folder = out or (found if found is not None and found.is_dir() else None)
    if folder is None:
        raise TinyspecError(
            f"{model} is no folder that a classifier could stand in: name one with --out"
        )
    if loaded.config.n_layers < 2:
        raise TinyspecError(f"{loaded.name} has one layer: there is nowhere to exit")
    if context > (longest := loaded.config.max_positions):
        raise TinyspecError(f"--context {context}: {loaded.name} has a context of {longest} tokens")
    is_own = out is None or (found is not None and out.resolve() == found.resolve())
    if not is_own and (folder / "config.json").exists():
        raise TinyspecError(
            f"{out} already holds a model: name a new folder, or give --model {out}"
        )
    texts = [base.read_text(file) for file in files]
    texts = texts or [corpus.clean_book(book.text) for book in data.read_books("train")]
    end = loaded.config.eos[0] if loaded.config.eos else 0
    ids = corpus.pack_texts(loaded.tokenizer, [text[:CHARACTERS] for text in texts], end)
    if len(ids) <= context + 1:
        raise TinyspecError(
            f"the texts have {len(ids)} tokens, a passage {context}: give more, "
            "or a smaller --context"
        )
    more: dict[str, Any] = {
        "warmup": min(20, steps),
        "log_every": 20,
        "valid_every": max(20, steps // 10),
    }
    settings = TrainSettings(steps, lr=lr, weight_decay=0.0, seed=seed, **more)
    state = folder / ".tinyspec" / "exits"
    ended, extras = train_exit_classifier(
        loaded,
        corpus.make_crop_sampler(ids, batch, context),
        settings,
        state,
        console=make_console(quiet),
    )
    if ended.finished:
        if not (folder / "config.json").exists():
            loaded.save(folder)
        checkpoint.write_extras(folder, extras)
        shutil.rmtree(state)
        if not any(state.parent.iterdir()):
            state.parent.rmdir()
    best = f"{ended.best:.4f} (ln 2 = 0.6931 knows nothing)"
    finish(ended.finished, f"{folder}  held-out loss {best}")
