"""tinyspec bench ppd: the pipeline's match rates, its clock, and its threads."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import results, rounds, tokens, write


@click.command("ppd", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name or folder."),
    click.option(
        "--ks", default="1,3,5", show_default=True, metavar="LIST", help="Numbers of guesses."
    ),
    click.option(
        "--layer",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Of the timed runs; 0: two thirds.",
    ),
    click.option(
        "--prompts",
        type=click.IntRange(1, 60),
        default=6,
        show_default=True,
        help="Openings to measure on.",
    ),
    tokens(48),
    rounds(5),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
    click.option(
        "--svg", type=base.OutputPath(parents=True), help="Draw the picture into this file."
    ),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the tables here."),
    results,
)
def ppd(model: str, ks: str, svg: Path | None, markdown: Path | None, **options: Any) -> None:
    """Guesses in the middle of a model: how often they hold, what the clock of k + 1 processors
    says, what threads do.

    \b
    Examples:
      tinyspec bench ppd
      tinyspec bench ppd --model smollm2 --dtype bfloat16 --prompts 3 --tokens 32
      tinyspec bench ppd --layer 6 --out results/ppd.json --markdown results/ppd.md --svg
      results/ppd.svg
    """
    from tinyspec.bench import ppd as experiment
    from tinyspec.bench.book import dumps
    from tinyspec.bench.report import page
    from tinyspec.errors import TinyspecError

    out, as_json = options.pop("out"), options.pop("as_json")
    if not all(part.strip().isdecimal() and int(part) for part in ks.split(",")):
        raise TinyspecError(
            f"--ks {ks}: write numbers of guesses with commas between, such as 1,3,5"
        )
    result = experiment.run(model, tuple(dict.fromkeys(map(int, ks.split(",")))), **options)
    grids = experiment.grids(result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        for grid in grids:
            base.console().print(grid.rich(), highlight=False)
    write({out: dumps(result), svg: experiment.picture(result), markdown: page(result, grids)})
