"""Every lesson runs as it stands: its cells in order, in one namespace; a failure names the lesson's file and line."""

import ast
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.test_exercises import solutions

TUTORIALS = Path(__file__).parent.parent / "tutorials"
LESSONS = sorted(TUTORIALS.glob("[0-9][0-9]_*.md"))
OPEN = re.compile(r"^```\{code-cell\}")
SECONDS = 20  # of processor time: a lesson that takes longer is not a lesson
PAGES = [path for path in sorted(TUTORIALS.glob("*.md")) if path not in LESSONS]  # of the book; some have cells too
ROOT = TUTORIALS.parent
LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *LESSONS, *PAGES]


class Cell(NamedTuple):
    """A code cell, and the line of the file at which its first line stands."""

    line: int
    code: str
    tags: str


def cells(text: str) -> Iterator[Cell]:
    """The code cells of a MyST page, without their options."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if OPEN.match(lines[at]):
            first = at + 1
            end = next(i for i in range(first, len(lines)) if lines[i] == "```")
            tags = ""
            while first < end and lines[first].startswith(":"):
                tags, first = tags + lines[first], first + 1
            yield Cell(first + 1, "\n".join(lines[first:end]), tags)
            at = end
        at += 1


RUN = [*LESSONS, *(path for path in PAGES if any(cells(path.read_text(encoding="utf-8"))))]


def run(path: Path) -> dict[str, Any]:
    """Execute a lesson; tracebacks name its own file and lines."""
    names: dict[str, Any] = {"__name__": path.stem}
    for cell in cells(path.read_text(encoding="utf-8")):
        code = compile("\n" * (cell.line - 1) + cell.code, str(path), "exec")
        exec(code, names)
    return names


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a lesson finds: its folder on the path, and plots that need no screen."""
    plots = pytest.importorskip("matplotlib", reason="the lessons draw with matplotlib: pip install -e .[book]")
    plots.use("Agg")
    monkeypatch.syspath_prepend(str(TUTORIALS))
    monkeypatch.chdir(TUTORIALS)
    yield
    import matplotlib.pyplot as plt

    plt.close("all")
    sys.modules.pop("lesson", None)


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_lesson_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells, in time; and after them the solutions of its exercises, in the same namespace."""
    began = time.process_time()
    names = run(path)
    assert time.process_time() - began < SECONDS
    assert capsys.readouterr().out
    for solution in solutions(path.read_text(encoding="utf-8")):
        exec(compile("\n" * (solution.line - 1) + solution.code, str(path), "exec"), names)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_a_lesson(path: Path) -> None:
    """At most 400 lines up to the exercises; a plot, claims that end in `assert`, code shown from its file, exercises."""
    text = path.read_text(encoding="utf-8")
    code = [ast.parse(cell.code) for cell in cells(text)]
    nodes = [node for tree in code for node in ast.walk(tree)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert len(text.partition("## Exercises")[0].splitlines()) <= 400
    assert any(isinstance(node, ast.Assert) for node in nodes)
    assert {"show", "axes"} <= called
    assert "## Exercises" in text


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_cell_fits_the_page(path: Path) -> None:
    """A line of code has at most 88 columns: it is not cut in the book."""
    for cell in cells(path.read_text(encoding="utf-8")):
        for number, line in enumerate(cell.code.splitlines(), cell.line):
            assert len(line) <= 88, f"{path.name}:{number}: {len(line)} columns"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_what_a_lesson_shows_is_seen(path: Path) -> None:
    """A notebook displays the last expression of a cell, and no other."""
    for cell in cells(path.read_text(encoding="utf-8")):
        for statement in ast.parse(cell.code).body[:-1]:
            assert not ast.unparse(statement).startswith("show("), f"line {cell.line}: show stands in mid-cell"


def test_every_lesson_is_in_the_book() -> None:
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    assert [path.stem for path in LESSONS] == re.findall(r"^(\d\d_\w+)$", index, re.M)
    listed = set(re.findall(r"^(\w+)$", index, re.M))
    assert {path.stem for path in PAGES} - {"index"} <= listed


@pytest.mark.parametrize("path", [path for path in LINKING if path.exists()], ids=lambda path: path.stem)
def test_a_link_leads_somewhere(path: Path) -> None:
    """Links inside the repository; what lies elsewhere is not asked for."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_a_failing_cell_names_the_lessons_file_and_line(tmp_path: Path) -> None:
    page = tmp_path / "00_wrong.md"
    page.write_text("# Wrong\n\n```{code-cell} python\n:tags: [hide-input]\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(page)
    last = caught.traceback[-1]
    assert Path(str(last.path)) == page and last.lineno + 1 == 6


def test_the_book_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tinyspec.cli import book, main

    monkeypatch.setattr(book, "NEEDED", ("no_such_module",))
    said = CliRunner().invoke(main, ["book", "--no-open"])
    assert said.exit_code == 2 and "pip install -e '.[book]'" in said.output
    monkeypatch.setattr(book, "TUTORIALS", tmp_path)
    assert "in a clone of the repository" in CliRunner().invoke(main, ["book"]).output
