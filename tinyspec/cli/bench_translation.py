"""tinyspec bench translation: quality and time of every way to translate."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import results, rounds, write
from tinyspec.errors import TinyspecError


@click.command("translation", cls=base.Command)
@base.options(
    click.option("--models", multiple=True, metavar="LIST", help="Names or folders. [default: those on this machine]"),
    click.option(
        "--experiment", type=click.Choice(["table", "iterations"]), default="table", show_default=True,
        help="All methods; or Mask-Predict with 1 to 10 iterations, the survey's third experiment.",
    ),
    click.option(
        "--sentences", type=click.IntRange(1), default=1000, show_default=True, help="Test sentences, the first ones."
    ),
    click.option("--samples", default="10", show_default=True, metavar="LIST", help="NAT's samples, for the teacher to judge."),
    click.option("--iterations", metavar="LIST", help="Of Mask-Predict. [default: 1,4,10; 1 to 10 for iterations]"),
    click.option("--lengths", metavar="LIST", help="Of Mask-Predict. [default: 3; 1,3,5 for iterations]"),
    click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="Sentences of a large batch."),
    rounds(3),
    click.option(
        "--data", "data_folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Where Multi30k lies. [default: TINYSPEC_DATA, else the cache]",
    ),
    click.option("--resume", is_flag=True, help="Go on with the file of --out."),
    click.option("--svg", type=base.OutputPath(parents=True), help="Draw the picture into this file."),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the table here."),
    results,
)  # fmt: skip
def translation(
    models: tuple[str, ...], experiment: str, samples: str, iterations: str | None, lengths: str | None,
    svg: Path | None, markdown: Path | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Every way to translate: BLEU, passes of decoder and encoder, time at batch 1 and in large
    batches, repeated tokens.

    All arms translate each sentence in turn. The file of --out is written after every twenty
    sentences; the same command with
    --resume goes on with it.

    \b
    Examples:
      tinyspec data fetch multi30k
      tinyspec bench translation --out results/translation.json --markdown results/translation.md
      tinyspec bench translation --experiment iterations --out results/iterations.json --svg
      results/iterations.svg
    """
    from tinyspec.bench import translation as experiments
    from tinyspec.bench.report import page
    from tinyspec.bench.translation_picture import picture

    named = [name.strip() for part in models for name in part.split(",") if name.strip()]
    result = experiments.run(
        named,
        experiment,
        samples=_numbers("--samples", samples, 2),
        iterations=_numbers("--iterations", iterations, 1),
        lengths=_numbers("--lengths", lengths, 1),
        **options,
    )
    grid = experiments.grid(result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        base.console().print(grid.rich(), highlight=False)
    if options["out"] is not None:
        click.echo(f"written: {options['out']}", err=True)
    write({svg: picture(result), markdown: page(result, [grid], experiments.notes(result))})


def _numbers(option: str, text: str | None, least: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise TinyspecError(
            f"{option} {text}: write whole numbers from {least} on with commas between, such as 2,10"
        )
    return tuple(dict.fromkeys(map(int, parts)))
