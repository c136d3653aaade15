"""Read lessons as files: their cells, what stands below a cell, and the lines below the title.

What a page shows directly below a cell is what that cell draws or prints: an image from pictures/,
and a fence of the kind `text`. They are committed, so that a lesson reads on any page that renders
Markdown. `tinyspec book --refresh` writes them, and the tests compare them with what the cells do.
The book executes the cells, and leaves them out.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

TUTORIALS = Path(__file__).parents[2] / "tutorials"
OPEN = re.compile(r"^```\{code-cell\}")
PICTURE = re.compile(r"^!\[([^\]]*)\]\((pictures/[\w.-]+\.svg)\)$")
FRONT = re.compile(r"\*\*(You will|Needs|Time)\*\*\s+")
TABLE = re.compile(
    r"(?<=<!-- lessons: `tinyspec book --refresh` writes this table -->\n).*?(?=<!-- end -->)", re.S
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
TOLERANCE = 1.0  # points that a line may lie elsewhere: processors round sums differently


@dataclass(frozen=True)
class Cell:
    """A code cell of a page, and the committed output below it.

    line     number of the file's line that holds the first line of the code
    tags     its option lines
    picture  file below pictures/ that the page shows as what the cell draws
    alt      what the page says of that picture
    printed  text that the page shows as what the cell prints
    shown    numbers of the lines that hold this output, counted from 0
    """

    line: int
    code: str
    tags: str
    picture: str | None
    alt: str
    printed: str | None
    shown: range


def list_lessons() -> list[Path]:
    """Return the lessons in their order."""
    return sorted(TUTORIALS.glob("[0-9][0-9]_*.md"))


def list_pages() -> list[Path]:
    """Return all pages that have code: the lessons, and others."""
    lessons = list_lessons()
    others = [path for path in sorted(TUTORIALS.glob("*.md")) if path not in lessons]
    return lessons + [path for path in others if any(read_cells(path.read_text("utf-8")))]


def read_cells(text: str) -> Iterator[Cell]:
    """Read the code cells of a MyST page, without their options."""
    lines = text.splitlines()
    at = 0

    def skip_blank() -> str:
        """Go to the next line that is not blank, and return it; "" at the end of the page."""
        nonlocal at
        while at < len(lines) and not lines[at]:
            at += 1
        return lines[at] if at < len(lines) else ""

    while at < len(lines):
        if not OPEN.match(lines[at]):
            at += 1
            continue
        first = at + 1
        end = lines.index("```", first)
        tags = ""
        while first < end and lines[first].startswith(":"):
            tags, first = tags + lines[first], first + 1
        picture, alt, printed, at = None, "", None, end + 1
        after = at
        if found := PICTURE.match(skip_blank()):
            alt, picture, at = found[1], found[2], at + 1
            after = at
        if skip_blank() == "```text":
            close = lines.index("```", at)
            printed, at = "\n".join(lines[at + 1 : close]), close + 1
            after = at
        at = after
        code = "\n".join(lines[first:end])
        yield Cell(first + 1, code, tags, picture, alt, printed, range(end + 1, after))


def strip_outputs(text: str) -> str:
    """Return a page without its committed outputs.

    Blank lines stand in their place: line numbers stay right.
    """
    lines = text.splitlines()
    for cell in read_cells(text):
        lines[cell.shown.start : cell.shown.stop] = [""] * len(cell.shown)
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Output:
    """What a cell did: its printed text, and its newest figure where the page shows a picture."""

    printed: str
    picture: str


def run_page(path: Path, names: dict[str, Any] | None = None) -> Iterator[tuple[Cell, Output]]:
    """Execute a page's cells in one namespace; tracebacks name its own file and lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if str(TUTORIALS) not in sys.path:
        sys.path.insert(0, str(TUTORIALS))  # where lesson.py is
    names = {} if names is None else names
    names["__name__"] = path.stem
    with chdir(TUTORIALS):
        for cell in read_cells(path.read_text(encoding="utf-8")):
            code = compile("\n" * (cell.line - 1) + cell.code, str(path), "exec")
            with redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            lines = [line.rstrip() for line in printed.getvalue().splitlines()]
            yield cell, Output("\n".join(lines).rstrip(), draw_svg() if cell.picture else "")
            plt.close("all")


def draw_svg() -> str:
    """Return the newest figure as SVG. The same figure gives the same bytes."""
    import matplotlib.pyplot as plt

    out = io.StringIO()
    metadata = {"Date": None, "Creator": None}
    plt.gcf().savefig(out, format="svg", bbox_inches="tight", metadata=metadata)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def is_same_picture(one: str, other: str) -> bool:
    """Return whether two SVGs show the same: equal words, and lines at most a point apart."""
    ours, theirs = (list(ElementTree.fromstring(text).iter()) for text in (one, other))
    return len(ours) == len(theirs) and all(map(_is_same_element, ours, theirs))


def has_same_words(one: str, other: str) -> bool:
    """Return whether two SVGs have equal words: all that is fixed where a cell trains a model.

    Sums of floating-point numbers are rounded differently on another kind of CPU, so the trained
    weights differ, and with them what is drawn.
    """
    ours, theirs = (list(ElementTree.fromstring(text).itertext()) for text in (one, other))
    return "".join(ours).split() == "".join(theirs).split()


def _is_same_element(a: ElementTree.Element, b: ElementTree.Element) -> bool:
    if a.tag != b.tag or (a.text or "").strip() != (b.text or "").strip() or a.keys() != b.keys():
        return False
    for name, value in a.items():
        other = b.get(name, "")
        if name in ("id", "clip-path") or name.endswith("href") or value == other:
            continue  # names are made of what they name
        if NUMBER.sub("", value) != NUMBER.sub("", other):
            return False
        pairs = zip(NUMBER.findall(value), NUMBER.findall(other), strict=True)
        if any(abs(float(x) - float(y)) > TOLERANCE for x, y in pairs):
            return False
    return True


def read_front(text: str) -> dict[str, str]:
    """Return what the block quote below a lesson's title says: "You will", "Needs" and "Time".

    >>> read_front("# A\\n\\n> **You will** prove it.  \\n> **Needs** lesson 01.\\n")
    {'You will': 'prove it.', 'Needs': 'lesson 01.'}
    """
    quote = re.search(r"^# .*\n\n((?:>.*\n)+)", text, re.M)
    words = re.sub(r"^> ?|\\$", "", quote[1], flags=re.M) if quote else ""
    cuts = [*FRONT.finditer(words)]
    ends = [*(cut.start() for cut in cuts), len(words)][1:]
    return {
        cut[1]: " ".join(words[cut.end() : end].split())
        for cut, end in zip(cuts, ends, strict=True)
    }


def make_table() -> str:
    """Return the index's table of lessons: title, what it needs, and its minutes."""
    rows = ["| lesson | needs | minutes |", "|---|---|---|"]
    for path in list_lessons():
        text = path.read_text(encoding="utf-8")
        title = re.findall(r"^# (.*)$", text, re.M)[0]
        front = read_front(text)
        minutes = "".join(re.findall(r"\d+", front.get("Time", ""))[:1])
        needs = front.get("Needs", "").rstrip(".")
        rows.append(f"| [{title}]({path.name}) | {needs} | {minutes} |")
    return "\n" + "\n".join(rows) + "\n\n"


def refresh_page(path: Path) -> list[Path]:
    """Write into a page what its cells draw and print, where it shows that.

    Return the files that changed.
    """
    text = path.read_text(encoding="utf-8")
    lines, changed = text.splitlines(), []
    for cell, output in reversed([*run_page(path)]):
        if cell.picture:
            file = TUTORIALS / cell.picture
            file.parent.mkdir(exist_ok=True)
            committed = file.read_text(encoding="utf-8") if file.exists() else "<svg/>"
            if not is_same_picture(committed, output.picture):
                file.write_text(output.picture, encoding="utf-8")
                changed.append(file)
        if cell.printed is not None and cell.printed != output.printed:
            start = lines.index("```text", cell.shown.start) + 1
            lines[start : cell.shown.stop - 1] = output.printed.splitlines()
    if lines != text.splitlines():
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        changed.append(path)
    return changed
