"""tinyspec bench dialects: writing all words at once, where a source has several right
translations.
"""

import json
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.measuring import results, write


@click.command("dialects", cls=base.Command)
@base.options(
    click.option("--kinds", default="lex,ord,fert", show_default=True, metavar="LIST", help="lex, ord, fert, or lex+ord."),
    click.option("--modes", type=click.IntRange(1), default=4, show_default=True, help="Right translations of a source."),
    click.option("--words", type=click.IntRange(1), default=10, show_default=True, help="Words of the source language."),
    click.option("--shortest", type=click.IntRange(1), default=5, show_default=True, help="Words of a source, at least."),
    click.option("--longest", type=click.IntRange(1), default=7, show_default=True, help="Words of a source, at most."),
    click.option("--pairs", type=click.IntRange(1), default=12_000, show_default=True, help="Training pairs."),
    click.option("--tests", type=click.IntRange(1), default=500, show_default=True, help="Sources that are held out."),
    click.option("--width", type=click.IntRange(4), default=96, show_default=True, help="Of the layers; divided by 4."),
    click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Of the encoder and the decoder."),
    click.option("--steps", type=click.IntRange(1), default=1500, show_default=True, help="Of each training."),
    click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="Pairs of a step."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the pairs and the weights."),
    click.option("--passes", default="1,2,4,10", show_default=True, metavar="LIST", help="Of Mask-Predict."),
    click.option("--lengths", default="1,3", show_default=True, metavar="LIST", help="Mask-Predict's length beams."),
    click.option("--resume", is_flag=True, help="Go on with the file of --out, and with its trainings."),
    click.option("--svg", type=base.OutputPath(parents=True), help="Draw the picture into this file."),
    click.option("--markdown", type=base.OutputPath(parents=True), help="Write the tables here."),
    results,
)  # fmt: skip
def dialects(
    kinds: str,
    passes: str,
    lengths: str,
    resume: bool,
    svg: Path | None,
    markdown: Path | None,
    **options: Any,
) -> None:
    """What writing all words at once costs where a source has several right translations, and what
    mends it.

    Trains four small models for each kind of dialects: one that reads what it wrote, one that
    writes in a single pass, the same on the first one's translations, and Mask-Predict. Some ten
    minutes of a core; Ctrl-C stops, and --resume goes on.

    \b
    Examples:
      tinyspec bench dialects --kinds lex --words 8 --shortest 4 --longest 6 --steps 400
      tinyspec bench dialects --out results/dialects.json --markdown results/dialects.md --svg
      results/dialects.svg
    """
    from tinyspec.bench import dialects as experiment
    from tinyspec.bench.dialects_report import grids, picture
    from tinyspec.bench.report import page

    out, as_json, quiet = options.pop("out"), options.pop("as_json"), options.pop("quiet")
    named = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    result = experiment.run(
        named,
        experiment.Setup(**options),
        _numbers("passes", passes),
        _numbers("lengths", lengths),
        resume,
        out,
        quiet,
    )
    tables = grids(result)
    if as_json:
        click.echo(json.dumps(result))
    else:
        for table in tables:
            base.console().print(table.rich(), highlight=False)
    write({svg: picture(result), markdown: page(result, tables)})
    if out is not None:
        click.echo(f"written: {out}", err=True)


def _numbers(option: str, text: str) -> list[int]:
    """1,2,4"""
    from tinyspec.errors import TinyspecError

    found = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in found):
        raise TinyspecError(
            f"--{option} {text}: write numbers from 1 on with commas between, such as 1,2,4"
        )
    return list(dict.fromkeys(map(int, found)))
