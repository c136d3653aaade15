"""tinyspec book: build the lessons into a book, and open it."""

import importlib.util
import subprocess
import sys
import webbrowser
from pathlib import Path

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError

TUTORIALS = Path(__file__).parents[2] / "tutorials"
NEEDED = ("sphinx", "myst_nb", "furo", "sphinx-mathjax-offline", "matplotlib")


@click.command("book")
@base.options(
    click.option("--out", "-o", type=base.OutputPath(folder=True), help="[default: tutorials/_build]"),
    click.option("--no-open", is_flag=True, help="Build it, and open no browser."),
    click.option("--fresh", is_flag=True, help="Build every page again."),
)
def book(out: Path | None, no_open: bool, fresh: bool) -> None:
    """Execute every lesson and bind them: a book of HTML pages that needs no network.

    A lesson whose cell fails stops the build, with its file and line; so does a warning.

    \b
    Examples:
      tinyspec book
      tinyspec book --out /tmp/book --no-open
    """
    if not (TUTORIALS / "conf.py").exists():
        raise TinyspecError("the lessons are not in the wheel: run this in a clone of the repository")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise TinyspecError(f"{', '.join(missing)} not installed: pip install -e '.[book]'")
    folder = TUTORIALS / "_build" if out is None else out
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", *(["-E", "-a"] if fresh else [])]
    if subprocess.run([*command, str(TUTORIALS), str(folder)]).returncode:
        raise TinyspecError("the book was not built: the lines above name the page")
    page = folder / "index.html"
    click.echo(page)
    if not no_open:
        webbrowser.open(page.resolve().as_uri())
