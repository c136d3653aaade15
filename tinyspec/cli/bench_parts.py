"""tinyspec bench parts: where the time of a call goes."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import numbers, results, rounds, write


@click.command("parts", cls=base.Command)
@base.options(
    click.option("--model", "-m", default="smollm2", show_default=True, help="Name or folder."),
    click.option("--dtype", default="bfloat16", show_default=True, help="float32 or bfloat16."),
    click.option(
        "--cached",
        default="256,768",
        show_default=True,
        metavar="LIST",
        help="Tokens behind the call.",
    ),
    rounds(15),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the table here."),
    results,
)
def parts(model: str, cached: str, markdown: Path | None, **options: Any) -> None:
    """A call over 1 to 32 new tokens, taken apart: matrices, head, attention, what lies between
    them, and Python around it.

    The floor beside it is that of `tinyspec bench`, in medians: weights at the greatest bandwidth
    or arithmetic at the peak.

    \b
    Examples:
      tinyspec bench parts
      tinyspec bench parts --dtype float32 --cached 64,1024
      tinyspec bench parts --model storyteller --cached 128 --out results/parts.json --markdown
      results/parts.md
    """
    from tinyspec.bench import parts as experiment
    from tinyspec.bench.book import dumps
    from tinyspec.bench.report import page

    out, as_json = options.pop("out"), options.pop("as_json")
    result = experiment.measure(model, cached=numbers("--cached", cached, "tokens"), **options)
    if as_json:
        click.echo(json.dumps(result))
    else:
        base.console().print(experiment.grid(result).rich(), highlight=False)
    write({out: dumps(result), markdown: page(result, [experiment.grid(result)])})
