"""tinyspec replay: the page of a saved trace."""

from pathlib import Path

import click

from tinyspec.cli import base


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@base.options(
    click.option("--out", "-o", type=base.OutputPath(), help="[default: beside it, as .html]")
)
def replay(trace: Path, out: Path | None) -> None:
    """Make the page that plays back TRACE, which --replay FILE.json or the page itself has saved.

    \b
    Examples:
      tinyspec generate "Once upon a time" --method specinfer --replay story.html    at once
      tinyspec generate "Once upon a time" --method specinfer --replay story.json
      tinyspec replay story.json --out story.html
    """
    from tinyspec.show.replay import read, save

    page = trace.with_suffix(".html") if out is None else out
    save(read(trace), page)
    click.echo(f"{page}: open it in a browser")
