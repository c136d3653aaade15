"""tinyspec models and tinyspec data: what is on this machine, and how to get more."""

import json

import click

from tinyspec.cli import base


@click.group("models", cls=base.Group)
def models() -> None:
    """Models: list them, fetch one, read its card.

    \b
    Examples:
      tinyspec models list
      tinyspec models fetch smollm2
      tinyspec models card storyteller
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list on standard output.")
def list_models(as_json: bool) -> None:
    """Every model known by name: bundled, fetched before, or to be fetched.

    A checkpoint folder in Hugging Face's format, a .gguf file and a hub id (org/name) serve as --model too.

    \b
    Examples:
      tinyspec models list
      tinyspec models list --json
    """
    from tinyspec.models import listing

    known = listing()
    if as_json:
        entries = [
            {"name": m.name, "state": m.state, "path": m.path and str(m.path), "summary": m.summary} for m in known
        ]
        click.echo(json.dumps(entries))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "state", "summary"):
        table.add_column(column, overflow="fold")
    for m in known:
        table.add_row(m.name, m.state, m.summary)
    base.console().print(table, highlight=False, markup=False)


@models.command("fetch")
@click.argument("name")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def fetch_model(name: str, quiet: bool) -> None:
    """Bring model NAME into the cache; prints the folder it is in.

    The download is verified, and an interrupted one leaves no half model. TINYSPEC_CACHE names another cache folder.

    \b
    Examples:
      tinyspec models fetch smollm2
    """
    from tinyspec.models import fetch

    click.echo(str(fetch(name, progress=not quiet)))


@models.command("card")
@click.argument("name")
def card_of_model(name: str) -> None:
    """What is known of model NAME: data, training, licence, samples.

    \b
    Examples:
      tinyspec models card storyteller
      tinyspec models card path/to/folder
    """
    from tinyspec.models import card

    text = card(name)
    out = base.console()
    if out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(text))
    else:
        click.echo(text.rstrip("\n"))


@click.group("data", cls=base.Group)
def data() -> None:
    """Texts for training and benchmarks.

    \b
    Examples:
      tinyspec data fetch
      TINYSPEC_DATA=my/folder tinyspec train lm --recipe recipe.toml --out model
    """


@data.command("fetch")
@click.argument("names", nargs=-1)
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def fetch_data(names: tuple[str, ...], quiet: bool) -> None:
    """Bring texts into the data folder: all of them, or those NAMED; prints where they are.

    Checksums are verified, what is there stays, and an interrupted fetch goes on. TINYSPEC_DATA names another folder.

    \b
    Examples:
      tinyspec data fetch
      tinyspec data fetch classics spec_bench
    """
    from rich.console import Console

    from tinyspec.sources import fetch

    for path in fetch(names, console=None if quiet else Console(stderr=True)):
        click.echo(str(path))
