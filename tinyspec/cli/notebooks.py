"""Make Jupyter notebooks of the lessons, and run them.

A notebook is made of the same page that the book shows (myst-nb reads it). Its first cell, `ALONE`,
lets it run by itself: where neither the lessons' folder nor tinyspec is at hand, as on Colab, it
fetches the repository.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyspec.cli.lessons import TUTORIALS, read_cells, strip_outputs
from tinyspec.errors import TinyspecError

SECONDS = 300  # that one cell may take
IN_CELL = re.compile(r"Cell In\[\d+\], line (\d+)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
WARNING = re.compile(r"\b\w*Warning: .*")  # a Python warning, in what a cell writes to stderr
NEEDS_CLONE = (
    'raise SystemExit("open this notebook in the folder tutorials/ of a clone of tinyspec")'
)
ALONE = """\
# On Colab, or wherever this notebook does not lie in its clone: fetch what it needs.
import importlib.util, os, subprocess, sys
from pathlib import Path

if importlib.util.find_spec("lesson") is None:
    found = importlib.util.find_spec("tinyspec")
    clone = Path(found.origin).parents[1] if found and found.origin else Path("tinyspec")
    if not (clone / "tutorials" / "lesson.py").exists():
        clone = Path("tinyspec")
        {fetch}
    sys.path[:0] = [str(clone.resolve()), str((clone / "tutorials").resolve())]
    os.chdir(clone / "tutorials")"""
FETCH = """\
subprocess.run(["git", "clone", "--quiet", "--depth", "1", "{address}", "tinyspec"], check=True)
        needed = ["-e", "tinyspec", "matplotlib", "scipy"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *needed], check=True)"""


def find_address() -> str | None:
    """Return the repository's address, if the environment tells it.

    Continuous integration does.
    """
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    repository = os.environ.get("GITHUB_REPOSITORY")
    return f"{server}/{repository}" if repository else None


def make_standalone(notebook: Any) -> Any:
    """Return a notebook that runs anywhere, given one that runs in its clone.

    Its links are changed, and a first cell is added.
    """
    import nbformat

    address = find_address()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w+)\.md\)", r"](\1.ipynb)", cell.source)
            if address:
                page = rf"]({address}/blob/main/\1)"
                cell.source = re.sub(r"\]\(\.\./([^)]+)\)", page, cell.source)
    fetch = FETCH.format(address=address) if address else NEEDS_CLONE
    notebook.cells.insert(0, nbformat.v4.new_code_cell(ALONE.format(fetch=fetch)))
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


def make_notebook(path: Path) -> Any:
    """Return a page as a notebook that was not run yet."""
    from myst_nb.core.read import read_myst_markdown_notebook

    text = strip_outputs(path.read_text(encoding="utf-8"))
    return make_standalone(read_myst_markdown_notebook(text, path=str(path)))


def run_notebook(notebook: Any, path: Path, on_cell: Callable[[], None] = lambda: None) -> None:
    """Execute a notebook in the lessons' folder.

    A cell that fails, or that shows a Python warning, is named by the line of its page.
    """
    import nbclient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    failed: list[int] = []
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(TUTORIALS)}},
        on_cell_executed=lambda **_: on_cell(),
        on_cell_error=lambda cell_index, **_: failed.append(cell_index),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError) as error:
        place = f"{path}:{_find_line(notebook, path, failed, str(error))}"
        name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
        what = f"a cell took more than {SECONDS} s"
        if name:
            what = f"{name}: {COLOUR.sub('', value)}".strip().splitlines()[0]
        raise TinyspecError(f"{place}: {what}") from error
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and (found := WARNING.search(output["text"])):
                place = f"{path}:{_find_line(notebook, path, [index], '')}"
                raise TinyspecError(f"{place}: the cell shows a warning, {found[0]}")


def _find_line(notebook: Any, path: Path, failed: list[int], traceback: str) -> int:
    """Return the page's line at which a notebook failed.

    The notebook's first cell is not of the page.
    """
    if not failed:
        return 1
    before = [cell for cell in notebook.cells[1 : failed[0] + 1] if cell.cell_type == "code"]
    cells = [*read_cells(path.read_text(encoding="utf-8"))]
    inside = IN_CELL.findall(COLOUR.sub("", traceback))
    return cells[len(before) - 1].line + (int(inside[0]) - 1 if inside else 0) if before else 1


def prepare_kernel(folder: Path) -> None:
    """Let kernels start with this Python and without warnings that no reader can act on."""
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True, exist_ok=True)
    options = "-Xfrozen_modules=off -m ipykernel_launcher --log-level=ERROR -f {connection_file}"
    argv = [sys.executable, *options.split()]
    kernel = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
    others = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(folder), *([others] if others else [])])
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
