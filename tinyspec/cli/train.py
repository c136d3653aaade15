"""tinyspec train: from a recipe to a checkpoint."""

from pathlib import Path

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError


@click.group("train", cls=base.Group)
def train() -> None:
    """Train models.

    \b
    Examples:
      tinyspec data fetch classics
      tinyspec train lm --recipe models/storyteller/recipe.toml --out models/mine
    """


@train.command("lm")
@click.option(
    "--recipe", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The recipe (TOML)."
)
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder of the checkpoint."
)
@click.option(
    "--data",
    "data_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the texts lie. [default: TINYSPEC_DATA, else the cache]",
)
@click.option("--minutes", type=float, help="Clock budget, instead of the recipe's.")
@click.option("--seed", type=int, help="Instead of the recipe's.")
@click.option("--device", help="cpu, cuda. [default: cuda where there is one]")
@click.option("--compile/--no-compile", "compiled", default=None, help="torch.compile. [default: on cuda]")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe: train.lr=2e-3."
)
@click.option("--restart", is_flag=True, help="Forget an interrupted training, or replace a finished model.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def lm(
    recipe: Path,
    out: Path,
    data_folder: Path | None,
    minutes: float | None,
    seed: int | None,
    device: str | None,
    compiled: bool | None,
    settings: tuple[str, ...],
    restart: bool,
    quiet: bool,
) -> None:
    """Train the language model of a recipe into a checkpoint folder, with its card.

    The state is saved every few minutes and on Ctrl-C; the same command goes on from there (exit code 130 says that it
    has not finished).

    \b
    Examples:
      tinyspec train lm --recipe models/storyteller/recipe.toml --out models/mine
      tinyspec train lm --recipe my.toml --out my-model --minutes 20 --set train.lr=2e-3
    """
    overrides = {} if seed is None else {"train.seed": str(seed)}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise TinyspecError(f"--set {setting}: write KEY=VALUE, such as train.lr=2e-3")
        overrides[key.strip()] = value.strip()

    from rich.console import Console

    from tinyspec.train_lm import train_lm

    ended = train_lm(
        recipe,
        out,
        data_folder=data_folder,
        device=device,
        minutes=minutes,
        compiled=compiled,
        restart=restart,
        overrides=overrides,
        console=None if quiet else Console(stderr=True),
    )
    if not ended.finished:
        raise click.exceptions.Exit(130)
    click.echo(str(out))
