"""tinyspec train mt: translation models."""

from pathlib import Path

import click

from tinyspec.cli import base


@click.command("mt", cls=base.Command)
@base.options(
    click.option(
        "--recipe", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The recipe (TOML)."
    ),
    click.option(
        "--out", required=True, type=base.OutputPath(folder=True), help="The folder of the checkpoint."
    ),
    click.option(
        "--data", "data_folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Where the texts lie. [default: TINYSPEC_DATA, else the cache]",
    ),
    click.option("--minutes", type=float, help="Clock budget of the training, instead of the recipe's."),
    click.option("--seed", type=int, help="Instead of the recipe's."),
    click.option("--device", help="cpu, cuda. [default: cuda where there is one]"),
    click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set one value of the recipe: train.lr=2e-3."
    ),
    click.option("--restart", is_flag=True, help="Forget an interrupted training, or replace a finished model."),
    click.option("--distill-only", is_flag=True, help="Have the teacher write the targets, and stop there."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)  # fmt: skip
def mt(
    recipe: Path, out: Path, seed: int | None, settings: tuple[str, ...], distill_only: bool, quiet: bool,
    data_folder: Path | None, minutes: float | None, device: str | None, restart: bool,
) -> None:  # fmt: skip
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
    overrides = base.overrides(seed, settings)

    from rich.console import Console

    from tinyspec.training import train_mt

    console = None if quiet else Console(stderr=True)
    if distill_only:
        click.echo(
            str(
                train_mt.distill_only(
                    recipe, out, data_folder=data_folder, overrides=overrides, console=console
                )
            )
        )
        return
    ended = train_mt.train_mt(
        recipe, out, data_folder=data_folder, device=device, minutes=minutes, restart=restart, overrides=overrides,
        console=console,
    )  # fmt: skip
    if not ended.finished:
        raise click.exceptions.Exit(130)
    click.echo(str(out))
