"""tinyspec bench layerskip: exits as drafts, model by model."""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import numbers, results, tokens, write


@click.command("layerskip", cls=base.Command)
@base.options(
    click.option(
        "--models", default="exits-plain,exits-loss,exits-layerskip", show_default=True, metavar="LIST",
        help="Names or folders.",
    ),
    click.option("--exits", default="2-8", show_default=True, metavar="LIST", help="Layers that draft: 2,3 or 2-8."),
    click.option("--gamma", type=click.IntRange(1), default=4, show_default=True, help="Tokens drafted in a round."),
    click.option("--temperature", "-t", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--prompts", type=click.IntRange(1, 60), default=10, show_default=True, help="Openings to measure on."),
    tokens(64),
    click.option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]"),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the tables here."),
    results,
)  # fmt: skip
def layerskip(models: str, exits: str, markdown: Path | None, **options: Any) -> None:
    """What the exits of a model are worth as drafts, and what LayerSkip makes of them: counted, no
    clock is read.

    \b
    Examples:
      tinyspec bench layerskip
      tinyspec bench layerskip --models storyteller --exits 3,6,9 --gamma 6
      tinyspec bench layerskip --temperature 1 --out results/layerskip.json --markdown
      results/layerskip.md
    """
    from tinyspec.bench import layerskip as experiment
    from tinyspec.bench.book import dumps
    from tinyspec.bench.report import page

    out, as_json = options.pop("out"), options.pop("as_json")
    names = [name.strip() for name in models.split(",") if name.strip()]
    result = experiment.run(names, numbers("--exits", exits, "layers"), **options)
    grids = experiment.grids(result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        for grid in grids:
            base.console().print(grid.rich(), highlight=False)
    write({out: dumps(result), markdown: page(result, grids)})
