"""tinyspec train: from a recipe to a checkpoint."""

from pathlib import Path

import click

from tinyspec.cli import base
from tinyspec.cli.boost import boost
from tinyspec.cli.exits import train_exits
from tinyspec.cli.train_mt import mt
from tinyspec.errors import TinyspecError


@click.group("train", cls=base.Group)
def train() -> None:
    """Train models.

    \b
    Examples:
      tinyspec data fetch classics
      tinyspec train lm --recipe models/storyteller/recipe.toml --out models/mine
      tinyspec train lm --distill smollm2 --draft-vocab 8192 --out models/smollm2-draft
      tinyspec train boost --draft apprentice,apprentice --out boosted
    """


train.add_command(boost)
train.add_command(train_exits)
train.add_command(mt)


@train.command("lm")
@click.option(
    "--recipe",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The recipe (TOML).",
)
@click.option(
    "--distill",
    metavar="TARGET",
    help="Make a draft of this model, from its own outputs; no recipe is needed.",
)
@click.option(
    "--out", required=True, type=base.OutputPath(folder=True), help="The folder of the checkpoint."
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="--distill: layers of the draft, the target's first. [default: 2]",
)
@click.option(
    "--draft-vocab", type=click.IntRange(0),
    help="--distill: words of the draft, the most frequent ones; embeddings stay the target's. [default: 0, all]",
)  # fmt: skip
@click.option(
    "--texts",
    type=click.IntRange(2),
    help="--distill: texts that the target writes. [default: 1500]",
)
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="--distill: what the target is asked, in paragraphs. [default: from the data at hand, and itself]",
)  # fmt: skip
@click.option(
    "--data",
    "data_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the texts lie. [default: TINYSPEC_DATA, else the cache]",
)
@click.option(
    "--minutes", type=float, help="Clock budget of the training, instead of the recipe's."
)
@click.option("--seed", type=int, help="Instead of the recipe's.")
@click.option("--device", help="cpu, cuda. [default: cuda where there is one]")
@click.option(
    "--compile/--no-compile", "compiled", default=None, help="torch.compile. [default: on cuda]"
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one value of the recipe: train.lr=2e-3.",
)
@click.option(
    "--restart", is_flag=True, help="Forget an interrupted training, or replace a finished model."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def lm(
    recipe: Path | None,
    distill: str | None,
    out: Path,
    layers: int | None,
    draft_vocab: int | None,
    texts: int | None,
    prompts: Path | None,
    data_folder: Path | None,
    minutes: float | None,
    seed: int | None,
    device: str | None,
    compiled: bool | None,
    settings: tuple[str, ...],
    restart: bool,
    quiet: bool,
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
    overrides = base.overrides(seed, settings)

    from rich.console import Console

    from tinyspec.training.recipe import read_recipe
    from tinyspec.training.train_lm import train_lm

    console = None if quiet else Console(stderr=True)
    if distill is not None:
        if (out / "model.safetensors").exists() and not (
            (out / ".tinyspec" / "state.pt").exists() or restart
        ):
            raise TinyspecError(f"{out} already holds a trained model; --restart trains it again")
        recipe = _recipe(distill, out, overrides, layers, draft_vocab, texts)
    assert recipe is not None
    if distill is not None or read_recipe(recipe, overrides).distill:
        from tinyspec.training.distill import distill as make

        wanted = {
            "shape.n_layers": layers,
            "distill.draft_vocab": draft_vocab,
            "distill.texts": texts,
        }
        overrides = {
            **{key: str(value) for key, value in wanted.items() if value is not None},
            **overrides,
        }
        ended, final = make(
            recipe,
            out,
            prompts=prompts,
            data_folder=data_folder,
            device=device,
            minutes=minutes,
            restart=restart,
            overrides=overrides,
            console=console,
        )
        if ended.finished:
            click.echo("  ".join(f"{name} {value:.4f}" for name, value in final.items()))
    else:
        given = {
            "--layers": layers,
            "--draft-vocab": draft_vocab,
            "--texts": texts,
            "--prompts": prompts,
        }
        if stray := [name for name, value in given.items() if value is not None]:
            raise TinyspecError(f"{stray[0]} is for drafts: the recipe has no section [distill]")
        ended = train_lm(
            recipe,
            out,
            data_folder=data_folder,
            device=device,
            minutes=minutes,
            compiled=compiled,
            restart=restart,
            overrides=overrides,
            console=console,
        )
    if not ended.finished:
        raise click.exceptions.Exit(130)
    click.echo(str(out))


def _recipe(
    target: str,
    out: Path,
    overrides: dict[str, str],
    layers: int | None,
    draft_vocab: int | None,
    texts: int | None,
) -> Path:
    """The recipe of a draft, written where the training keeps its state."""
    import os

    from tinyspec import models
    from tinyspec.lm import checkpoint
    from tinyspec.training.distill import recipe_text, with_values

    path = models.find(target)
    if path is None and target in models.FETCHABLE:
        raise TinyspecError(
            f"{target} is not on this machine yet; run: tinyspec models fetch {target}"
        )
    if path is None or not path.is_dir():
        raise TinyspecError(
            f"--distill {target}: no such model as a folder on this machine (`tinyspec models list`)"
        )
    named = target if os.sep not in target else os.path.relpath(path, out)
    width = checkpoint.read_config(path).d_model
    text = recipe_text(
        named, out.resolve().name, layers or 2, draft_vocab or 0, texts or 1500, width
    )
    text = with_values(text, overrides)
    file = out / ".tinyspec" / "recipe.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
