"""tinyspec bench sweeps: Jacobi iteration by the size of its blocks."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import numbers, results, rounds, tokens, write


@click.command("sweeps", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="storyteller", show_default=True, help="Name or folder."),
    click.option("--blocks", default="1-16", show_default=True, metavar="LIST", help="Tokens of a block: 1,2,4 or 1-16."),
    click.option("--whole/--no-whole", default=True, help="All tokens as one block, too. [default: on]"),
    click.option(
        "--init", type=click.Choice(["pad", "random", "prompt", "last"]), default="pad", show_default=True,
        help="First guess of a block.",
    ),
    click.option("--prompts", type=click.IntRange(1, 60), default=10, show_default=True, help="Openings to measure on."),
    tokens(64),
    rounds(3),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
    click.option("--svg", type=base.OutputPath(parents=True), help="Draw the picture into this file."),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the table here."),
    results,
)  # fmt: skip
def sweeps(
    model: str, blocks: str, svg: Path | None, markdown: Path | None, **options: Any
) -> None:
    """How many tokens a Jacobi sweep fixes, and what that is worth, by the size of a block: in
    turns with plain decoding.

    \b
    Examples:
      tinyspec bench sweeps
      tinyspec bench sweeps --model smollm2 --dtype bfloat16 --blocks 1,4,16 --no-whole --prompts 3
      tinyspec bench sweeps --init prompt --out results/sweeps.json --markdown results/sweeps.md
      --svg results/sweeps.svg
    """
    from tinyspec.bench import sweeps as experiment
    from tinyspec.bench.book import dumps
    from tinyspec.bench.report import page

    out, as_json = options.pop("out"), options.pop("as_json")
    result = experiment.run(model, numbers("--blocks", blocks, "tokens"), **options)
    if as_json:
        click.echo(json.dumps(result))
    else:
        base.console().print(experiment.grid(result).rich(), highlight=False)
    write(
        {
            out: dumps(result),
            svg: experiment.picture(result),
            markdown: page(result, [experiment.grid(result)]),
        }
    )
