"""Every lesson runs as it stands: its cells in order, in one namespace.

A failure names the lesson's file and line.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.laws.refutations import PRINTED
from tests.test_exercises import solutions
from tinyspec.cli import lessons
from tinyspec.cli.lessons import (
    TUTORIALS,
    has_same_words,
    is_same_picture,
    list_lessons,
    list_pages,
    read_cells,
    run_page,
    strip_outputs,
)

LESSONS = list_lessons()
PAGES = [
    path for path in sorted(TUTORIALS.glob("*.md")) if path not in LESSONS
]  # of the book; some have cells too
ROOT = TUTORIALS.parent
LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *LESSONS, *PAGES]


RUN = list_pages()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a lesson finds: its folder on the path, and plots that need no screen."""
    plots = pytest.importorskip(
        "matplotlib", reason="the lessons draw with matplotlib: pip install -e .[book]"
    )
    plots.use("Agg")
    monkeypatch.syspath_prepend(str(TUTORIALS))
    monkeypatch.chdir(TUTORIALS)
    yield
    import matplotlib.pyplot as plt

    plt.close("all")
    sys.modules.pop("lesson", None)


@pytest.mark.slow
@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_lesson_runs(path: Path) -> None:
    """Its cells; what the page shows below them; and then the solutions of its exercises."""
    names: dict[str, Any] = {}
    done = [*run_page(path, names)]
    printed = "".join(f"{output.printed}\n" for _, output in done)
    assert printed.strip()
    at, printed = 0, re.sub(r"\d+\.\d s", "# s", printed)
    for told in PRINTED.get(path.stem, ()):  # in this order
        assert told in printed[at:]
        at = printed.index(told, at) + len(told)
    if "test_my_sampler" in names:  # the last cell of lesson 09 defines a test
        names["test_my_sampler"]()
    for cell, output in done:
        stale = (
            f"{path.name}:{cell.shown.start}: the cell does not show this any more: tinyspec "
            "book --refresh"
        )
        assert cell.printed in (None, output.printed), stale
        if cell.picture:
            is_same = has_same_words if "of-a-training" in cell.tags else is_same_picture
            shown = (TUTORIALS / cell.picture).read_text(encoding="utf-8")
            assert is_same(shown, output.picture), stale
    for solution in solutions(path.read_text(encoding="utf-8")):
        exec(compile("\n" * (solution.line - 1) + solution.code, str(path), "exec"), names)


def test_the_pages_have_the_mistakes_they_are_for() -> None:
    assert sum("broken:" in told for own in PRINTED.values() for told in own) >= 9
    page = (TUTORIALS / "what_others_got_wrong.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    assert len(re.findall(r'killed\(".*?", by=".*?"\)', text)) >= 35
    assert text.count("The property") >= 20


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_a_lesson(path: Path) -> None:
    """At most 400 lines up to the exercises; a plot, claims that end in `assert`, code shown from
    its file, exercises.
    """
    text = path.read_text(encoding="utf-8")
    code = [ast.parse(cell.code) for cell in read_cells(text)]
    nodes = [node for tree in code for node in ast.walk(tree)]
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert len(text.partition("## Exercises")[0].splitlines()) <= 400
    assert any(isinstance(node, ast.Assert) for node in nodes)
    assert {"show", "axes"} <= called
    assert "## Exercises" in text


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_cell_fits_the_page(path: Path) -> None:
    """A line of code has at most 88 columns: it is not cut in the book."""
    for cell in read_cells(path.read_text(encoding="utf-8")):
        for number, line in enumerate(cell.code.splitlines(), cell.line):
            assert len(line) <= 88, f"{path.name}:{number}: {len(line)} columns"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_what_a_lesson_shows_is_seen(path: Path) -> None:
    """A notebook displays the last expression of a cell, and no other."""
    for cell in read_cells(path.read_text(encoding="utf-8")):
        for statement in ast.parse(cell.code).body[:-1]:
            assert not ast.unparse(statement).startswith("show("), (
                f"line {cell.line}: show stands in mid-cell"
            )


def test_every_lesson_is_in_the_book() -> None:
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    assert [path.stem for path in LESSONS] == re.findall(r"^(\d\d_\w+)$", index, re.M)
    listed = set(re.findall(r"^(\w+)$", index, re.M))
    assert {path.stem for path in PAGES} - {"index"} <= listed


@pytest.mark.parametrize(
    "path", [path for path in LINKING if path.exists()], ids=lambda path: path.stem
)
def test_a_link_leads_somewhere(path: Path) -> None:
    """Links inside the repository; what lies elsewhere is not asked for."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("path", LESSONS + PAGES, ids=lambda path: path.stem)
def test_the_book_has_every_page_that_a_lesson_links_to(path: Path) -> None:
    """Sphinx leaves out the folder of the results: its pages are named there, not linked to."""
    assert not re.findall(r"\]\((results/[^)]*\.md)", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_shows_its_key_picture(path: Path) -> None:
    """One picture below the cell that draws it, with words for who cannot see it; at most one text
    below a cell.
    """
    text = path.read_text(encoding="utf-8")
    cells = [*read_cells(text)]
    pictures = [cell.picture for cell in cells if cell.picture]
    assert len(pictures) == 1 and pictures[0].startswith(f"pictures/{path.stem[:2]}_")
    assert len(re.findall(r"^!\[.{60,}\]\(", text, re.M)) == 1
    assert sum(cell.printed is not None for cell in cells) <= 1
    drawing = next(cell for cell in cells if cell.picture)
    assert "hide-input" in drawing.tags or "axes(" in drawing.code


def test_every_picture_is_shown() -> None:
    shown = {
        cell.picture for path in LESSONS for cell in read_cells(path.read_text(encoding="utf-8"))
    }
    assert {f"pictures/{path.name}" for path in (TUTORIALS / "pictures").iterdir()} == shown - {
        None
    }


def test_index_tells_minutes_and_needs() -> None:
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    assert lessons.TABLE.search(index)[0] == lessons.make_table(), "stale: tinyspec book --refresh"
    assert len(re.findall(r"^\| \[\d\d .*\| \d+ \|$", lessons.make_table(), re.M)) == len(LESSONS)


PAGE = """# A page

```{code-cell} python
:tags: [hide-input]
x = 1
```

![A picture of nothing](pictures/00_none.svg)

```text
1
```

Prose.

```text
not an output
```
"""


def test_outputs_stand_directly_below_their_cell() -> None:
    (cell,) = read_cells(PAGE)
    assert (cell.line, cell.picture, cell.printed) == (5, "pictures/00_none.svg", "1")
    bare = strip_outputs(PAGE)
    assert "pictures" not in bare and "not an output" in bare
    assert bare.splitlines().index("Prose.") == PAGE.splitlines().index(
        "Prose."
    )  # error messages name the right line


def test_refresh_writes_what_a_cell_prints(tmp_path: Path) -> None:
    page = tmp_path / "00_page.md"
    page.write_text(
        "# A\n\n```{code-cell} python\nprint(6 * 7)\n```\n\n```text\n41\n```\n\nEnd.\n",
        encoding="utf-8",
    )
    assert lessons.refresh_page(page) == [page]
    assert "```text\n42\n```\n\nEnd." in page.read_text(encoding="utf-8")
    assert lessons.refresh_page(page) == []


@pytest.mark.usefixtures("stage")
def test_pictures_are_the_same_bytes_each_time() -> None:
    import matplotlib.pyplot as plt
    from lesson import axes

    def draw(height: float) -> str:
        axes().bar(["a", "b"], [1, height], hatch="//")
        try:
            return lessons.draw_svg()
        finally:
            plt.close("all")

    first = draw(2)
    assert draw(2) == first and "<dc:date>" not in first
    assert not is_same_picture(first, draw(3)) and is_same_picture(first, first)
    assert has_same_words(first, draw(2.001)) and not has_same_words(first, draw(3000))


def test_a_failing_cell_names_the_lessons_file_and_line(tmp_path: Path) -> None:
    page = tmp_path / "00_wrong.md"
    page.write_text(
        "# Wrong\n\n```{code-cell} python\n:tags: [hide-input]\nx = 1\nassert x == 2\n```\n"
    )
    with pytest.raises(AssertionError) as caught:
        [*run_page(page)]
    last = caught.traceback[-1]
    assert Path(str(last.path)) == page and last.lineno + 1 == 6


def test_the_book_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from tinyspec.cli import book, main

    monkeypatch.setattr(book, "NEEDED", ("no_such_module",))
    result = CliRunner().invoke(main, ["book", "--no-open"])
    assert result.exit_code == 2 and "pip install -e '.[book]'" in result.output
    monkeypatch.setattr(book, "TUTORIALS", tmp_path)
    assert "in a clone of the repository" in CliRunner().invoke(main, ["book"]).output
