"""tinyspec book: build the lessons into a book, and open it."""

import importlib.util
import re
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tinyspec.cli import base, lessons, notebooks
from tinyspec.cli.base import flag, option
from tinyspec.cli.lessons import TUTORIALS
from tinyspec.errors import TinyspecError

NEEDED = ("sphinx", "myst_nb", "furo", "sphinx-mathjax-offline", "matplotlib")
NEEDED_TO_RUN = ("myst_nb", "nbclient", "ipykernel", "matplotlib")
PAGES = re.compile(r"(\d+) added, (\d+) changed, (\d+) removed")
PAGE = re.compile(r"reading sources\.\.\. \[ *\d+%\] (\S+)")


@click.command("book")
@option("--out", "-o", type=base.OUTPUT_FOLDER, help="[default: tutorials/_build]")
@flag("--no-open", help="Build it, and open no browser.")
@flag("--fresh", help="Build every page again.")
@option(
    "--notebooks",
    "notebook_folder",
    type=click.Path(path_type=Path, file_okay=False),
    is_flag=False,
    flag_value=str(TUTORIALS / "_build" / "notebooks"),
    metavar="[DIR]",
    help="Write the lessons as executed Jupyter notebooks instead.  "
    "[default: tutorials/_build/notebooks]",
)
@flag("--refresh", help="Write into the lessons what their cells draw and print, instead.")
def book(
    out: Path | None, no_open: bool, fresh: bool, notebook_folder: Path | None, refresh: bool
) -> None:
    """Execute every lesson and bind them: a book of HTML pages that needs no network.

    A lesson whose cell fails stops the build, with its file and line; so does a warning.

    \b
    Examples:
      tinyspec book
      tinyspec book --out /tmp/book --no-open
      tinyspec book --notebooks notebooks
    """
    if not (TUTORIALS / "conf.py").exists():
        raise TinyspecError(
            "the lessons are not in the wheel: run this in a clone of the repository"
        )
    needed = NEEDED_TO_RUN if notebook_folder else ("matplotlib",) if refresh else NEEDED
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise TinyspecError(f"{', '.join(missing)} not installed: pip install -e '.[book]'")
    if refresh:
        return refresh_lessons()
    with tempfile.TemporaryDirectory() as kernels:
        notebooks.prepare_kernel(Path(kernels))
        if notebook_folder:
            return write_notebooks(notebook_folder)
        folder = TUTORIALS / "_build" if out is None else out
        build_html(folder, fresh)
    page = folder / "index.html"
    click.echo(page)
    if not no_open:
        webbrowser.open(page.resolve().as_uri())


@contextmanager
def show_pages() -> Iterator[Callable[[str, int], None]]:
    """Show which page of how many is executed: a bar on a terminal, else a line for each page.

    Yields what is called with the name of the page that is next, and how many there are.
    """
    count = 0
    with base.show_command_progress(quiet=False) as show:

        def advance(page: str, total: int) -> None:
            nonlocal count
            show(f"executing {page}", count, total)
            count += 1
            if not sys.stderr.isatty():
                click.echo(f"executing {page} ({count} of {total})", err=True)

        yield advance


def build_html(folder: Path, fresh: bool) -> None:
    """Let Sphinx build the book, and show its progress."""
    command = [sys.executable, *["-m", "sphinx", "--no-color", "-W", "-b", "html"]]
    command += ["-E", "-a"] if fresh else []
    command += [str(TUTORIALS), str(folder)]
    total = 0
    with (
        show_pages() as advance,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sphinx,
    ):
        assert sphinx.stdout is not None
        for line in sphinx.stdout:
            if found := PAGES.search(line):
                total = int(found[1]) + int(found[2])
            elif found := PAGE.search(line):
                advance(found[1], total)
    if sphinx.returncode:
        raise TinyspecError("the book was not built: the lines above name the page")


def write_notebooks(folder: Path) -> None:
    """Write each page that has code as an executed notebook."""
    import nbformat

    pages = lessons.list_pages()
    folder.mkdir(parents=True, exist_ok=True)
    with show_pages() as advance:
        for path in pages:
            advance(path.stem, len(pages))
            notebook = notebooks.make_notebook(path)
            notebooks.run_notebook(notebook, path)
            nbformat.write(notebook, folder / f"{path.stem}.ipynb")
    click.echo(folder)


def refresh_lessons() -> None:
    """Write what the pages show: pictures and texts below their cells, and the index's table."""
    pages = lessons.list_pages()
    with show_pages() as advance:
        for path in pages:
            advance(path.stem, len(pages))
            for changed in lessons.refresh_page(path):
                click.echo(changed)
    index = TUTORIALS / "index.md"
    text = index.read_text(encoding="utf-8")
    renewed = lessons.TABLE.sub(lambda _: lessons.make_table(), text)
    if renewed != text:
        index.write_text(renewed, encoding="utf-8")
        click.echo(index)
