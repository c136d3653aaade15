"""The lessons as notebooks, and the built book in a browser.

No code is cut, neither on a desktop's screen nor on a phone's.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from filelock import FileLock

from tinyspec.cli import lessons, main, notebooks
from tinyspec.cli.lessons import TUTORIALS
from tinyspec.errors import TinyspecError

ROOT = Path(__file__).parent.parent
NEEDED = ("sphinx", "myst_nb", "furo", "nbclient")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZES = {"desk": (1280, 900), "phone": (390, 844)}

# What is wider than the window, or hides a part of itself, though it does not scroll.
CUT = """() => {
    const cut = [];
    if (document.documentElement.scrollWidth > window.innerWidth)
        cut.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
    const blocks = "article pre, article .cell_output, article .cell_input";
    for (const box of document.querySelectorAll(blocks)) {
        const start = box.textContent.trim().slice(0, 60);
        if (box.scrollWidth > box.clientWidth + 1)
            cut.push(`${box.scrollWidth} > ${box.clientWidth}: ${start}`);
        if (box.getBoundingClientRect().right > window.innerWidth + 1)
            cut.push(`beyond the edge: ${start}`);
    }
    const kinds = ["auto", "scroll"];
    const scrolls = (box) => box &&
        (kinds.includes(getComputedStyle(box).overflowX) || scrolls(box.parentElement));
    const wide = "article table, article div.math, article img, article iframe";
    for (const box of document.querySelectorAll(wide))
        if (box.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(box))
            cut.push(`beyond the edge: ${box.outerHTML.slice(0, 60)}`);
    return cut;
}"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book: that in the folder TINYSPEC_BOOK, else built now."""
    if folder := os.environ.get("TINYSPEC_BOOK"):
        return Path(folder)
    for name in NEEDED:
        pytest.importorskip(name, reason="the book is built by sphinx: pip install -e '.[book]'")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # one book for all workers
    folder = shared / "book" / "html"
    with FileLock(shared / "book.lock"):
        if not (folder / "index.html").exists():
            command = [sys.executable, "-m", "tinyspec", "book", "--no-open", "--out", str(folder)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            assert "WARNING" not in done.stderr and "(1 of " in done.stderr, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    driver = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[look]'")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    with driver.sync_playwright() as started:
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.book
@pytest.mark.parametrize(
    "style",
    ["white-space: pre", "white-space: pre; overflow: hidden", "overflow: auto; white-space: pre"],
)
def test_cut_code_is_seen(browser: Any, style: str) -> None:
    """The test below finds what it looks for: code beyond the edge, hidden, or in a scroll box."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_content(f"<article><pre style='{style}'>{'x' * 88}</pre></article>")
    assert page.evaluate(CUT)
    page.set_content(f"<article><pre style='{style}'>{'x' * 30}</pre></article>")
    assert not page.evaluate(CUT)
    page.close()


@pytest.mark.slow
@pytest.mark.book
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_cut(built: Path, browser: Any, size: str) -> None:
    """Every page at 1280 and 390 pixels: no code, output, table, equation or figure ends beyond its
    box.
    """
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    found: dict[str, list[str]] = {}
    pages = [path for path in sorted(built.rglob("*.html")) if path.parent != built / "_static"]
    assert len(pages) > 15
    for path in pages:
        page.goto(path.as_uri())
        page.wait_for_timeout(200)
        page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
        if cut := page.evaluate(CUT):
            found[path.name] = cut
    page.close()
    assert not found, found


@pytest.mark.slow
@pytest.mark.book
def test_book_links_what_it_promises(built: Path) -> None:
    """The index has the race, a replay and a table; a lesson has its notebook, and its papers lead
    somewhere.
    """
    index = (built / "index.html").read_text(encoding="utf-8")
    assert "race.svg" in index and 'src="replay.html"' in index and (built / "replay.html").exists()
    lesson = (built / "02_the_acceptance_rule.html").read_text(encoding="utf-8")
    assert 'href="https://arxiv.org/abs/2211.17192"' in lesson
    assert 'href="notebooks/02_the_acceptance_rule.ipynb"' in lesson
    assert (built / "notebooks" / "02_the_acceptance_rule.ipynb").exists()
    assert "alt=\"The target's and the draft's probabilities" in lesson
    assert "pictures/02" not in lesson and lesson.count("target_instead_of_residual\nbroken") == 1


PAGE = """---
file_format: mystnb
kernelspec:
  name: python3
---

# A page

```{code-cell} python
:tags: [hide-input]
import os
print(os.getcwd())
```

See [another](01_why_five_cost_one.md) and [a file](../tinyspec/tree.py).

```{code-cell} python
x = 1
assert x == 2, "no"
```
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that start with this Python."""
    for name in ("myst_nb", "nbclient", "ipykernel"):
        pytest.importorskip(name, reason="notebooks are made by myst-nb: pip install -e '.[book]'")
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "")
    notebooks.prepare_kernel(tmp_path / "kernels")


@pytest.mark.book
@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
def test_notebook_holds_what_a_lesson_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tinyspec book --notebooks` on one lesson: no warning, one picture a plot, the
    counterexamples.
    """
    monkeypatch.setattr(lessons, "list_pages", lambda: [TUTORIALS / "02_the_acceptance_rule.md"])
    ran = CliRunner().invoke(main, ["book", "--notebooks", str(tmp_path / "out")])
    assert ran.exit_code == 0 and "executing 02_the_acceptance_rule (1 of 1)" in ran.stderr, (
        ran.output
    )
    notebook = json.loads(
        (tmp_path / "out" / "02_the_acceptance_rule.ipynb").read_text(encoding="utf-8")
    )
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 2
    printed = "".join(
        "".join(output["text"]) for output in outputs if output.get("name") == "stdout"
    )
    assert "target_instead_of_residual\nbroken: joint distribution" in printed
    assert not any(output.get("name") == "stderr" for output in outputs)
    told = "".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    assert "pictures/" not in told and "softmax_of_the_residual\nbroken" not in told


@pytest.mark.book
@pytest.mark.usefixtures("kernels")
def test_failing_notebook_names_the_lessons_line(tmp_path: Path) -> None:
    page = tmp_path / "00_wrong.md"
    page.write_text(PAGE, encoding="utf-8")
    with pytest.raises(TinyspecError, match=r"00_wrong\.md:19: AssertionError: no$"):
        notebooks.run_notebook(notebooks.make_notebook(page), page)


WARNS = PAGE.replace('assert x == 2, "no"', "import warnings\nwarnings.warn('old', FutureWarning)")


@pytest.mark.book
@pytest.mark.usefixtures("kernels")
def test_notebook_with_a_warning_names_its_cell(tmp_path: Path) -> None:
    page = tmp_path / "00_warns.md"
    page.write_text(WARNS, encoding="utf-8")
    with pytest.raises(
        TinyspecError, match=r"00_warns\.md:18: the cell shows a warning, Fut.*: old"
    ):
        notebooks.run_notebook(notebooks.make_notebook(page), page)


@pytest.mark.book
@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
def test_book_with_a_warning_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of one page whose second cell warns: sphinx names the page and the cell's line."""
    pytest.importorskip("sphinx", reason="the book is built by sphinx: pip install -e '.[book]'")
    (tmp_path / "index.md").write_text(WARNS, encoding="utf-8")
    settings = (TUTORIALS / "conf.py").read_text(encoding="utf-8")
    settings = settings.replace('    app.connect("builder-inited", write_replay)\n', "")
    (tmp_path / "conf.py").write_text(settings, encoding="utf-8")
    (tmp_path / "_static").mkdir()
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(r"index\.md:1\d: .*the cell shows a warning, Fut.*: old", done.stderr), done


@pytest.mark.book
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("repository", [None, "someone/tinyspec"])
def test_notebook_runs_where_it_lies_alone(
    repository: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the lessons nor tinyspec are at hand, the first cell fetches the repository, if
    it is known.
    """
    page, commands = tmp_path / "00_page.md", list[list[str]]()
    page.write_text(PAGE, encoding="utf-8")
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    if repository:
        monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    else:
        monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    first, _, told, *_ = [
        cell.source for cell in notebooks.make_notebook(page).cells if cell.source != "# A page"
    ]
    assert "](01_why_five_cost_one.ipynb)" in told

    def pretend(command: list[str], check: bool) -> None:
        commands.append(command)
        (tmp_path / "tinyspec" / "tutorials").mkdir(parents=True, exist_ok=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", pretend)
    if repository is None:
        with pytest.raises(SystemExit, match="in the folder tutorials/ of a clone"):
            exec(first, {})
        return
    exec(first, {})
    (clone, install) = commands
    assert "https://github.com/someone/tinyspec" in clone and "-e" in install
    assert Path.cwd() == tmp_path / "tinyspec" / "tutorials" == Path(sys.path[1])
    assert "](https://github.com/someone/tinyspec/blob/main/tinyspec/tree.py)" in told


@pytest.mark.book
@pytest.mark.usefixtures("kernels")
def test_notebook_beside_its_clone_needs_nothing(tmp_path: Path) -> None:
    """The first cell finds the lessons through tinyspec, wherever the notebook lies."""
    page = tmp_path / "00_page.md"
    page.write_text(PAGE, encoding="utf-8")
    first = notebooks.make_notebook(page).cells[0].source
    code = f"{first}\nimport lesson\nprint(os.getcwd())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(TUTORIALS), done.stderr
