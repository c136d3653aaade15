"""The header of every lesson, and a hint and a solution for each of its exercises.

Solutions are run by test_tutorials.py, each after the cells of its lesson.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TUTORIALS = Path(__file__).parent.parent / "tutorials"
LESSONS = sorted(TUTORIALS.glob("[0-9][0-9]_*.md"))
lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
FOLDED = re.compile(
    r"^<details><summary>(Hint|Solution)</summary>\n\n(.+?)\n\n</details>$", re.S | re.M
)
HEADER = re.compile(
    (
        r"^# .+\n\n> \*\*You will\*\* .+(\n> .+)*\.\n>\n> \*\*Needs\*\* .+\.\n>\n> "
        r"\*\*Time\*\* (\d+) minutes\.\n$"
    ),
    re.M,
)


class Solution(NamedTuple):
    """The code of a folded solution, and the line of the file at which it begins."""

    line: int
    code: str


def solutions(text: str) -> Iterator[Solution]:
    """Yield the code of all solutions of a lesson, in order."""
    for folded in FOLDED.finditer(text):
        if folded[1] == "Solution":
            for block in re.finditer(r"^```python\n(.+?)\n```$", folded[2], re.S | re.M):
                yield Solution(text.count("\n", 0, folded.start(2) + block.start(1)) + 1, block[1])


def exercises(path: Path) -> list[str]:
    """Return the text of each exercise; they are numbered from 1."""
    _, _, section = path.read_text(encoding="utf-8").partition("\n## Exercises\n")
    _, *parts = re.split(r"^\*\*(\d)\. ", section, flags=re.M)
    assert parts[::2] == [str(n) for n in range(1, len(parts) // 2 + 1)]
    return parts[1::2]


@lessons
def test_a_lesson_begins_with_what_it_gives_and_takes(path: Path) -> None:
    """The index of the book reads these three lines."""
    header = HEADER.search(path.read_text(encoding="utf-8"))
    assert header and 20 <= int(header[2]) <= 120


@lessons
def test_every_exercise_has_a_hint_and_a_solution(path: Path) -> None:
    found = exercises(path)
    assert len(found) >= 4
    for number, exercise in enumerate(found, 1):
        assert [folded[1] for folded in FOLDED.finditer(exercise)] == ["Hint", "Solution"], (
            f"exercise {number}"
        )
        assert exercise.count("<details") == 2, f"exercise {number}"
        assert FOLDED.sub("", exercise).strip().startswith(exercise.partition("**")[0]), (
            f"exercise {number}"
        )


@lessons
def test_every_solution_is_code_that_ends_in_an_assert(path: Path) -> None:
    found = list(solutions(path.read_text(encoding="utf-8")))
    assert len(found) == len(exercises(path))
    for solution in found:
        last = ast.parse(solution.code).body[-1]
        assert any(isinstance(node, ast.Assert) for node in ast.walk(last)), f"line {solution.line}"
        widest = max(map(len, solution.code.splitlines()))
        assert widest <= 88, f"line {solution.line}: {widest} columns are cut in the book"


@lessons
def test_exercises_link_to_the_files_concerned(path: Path) -> None:
    """Files and not folders: the book cannot show a folder."""
    links = re.findall(
        r"\]\((\.\./[^)#]+)", path.read_text(encoding="utf-8").partition("\n## Exercises\n")[2]
    )
    assert links
    for link in links:
        assert (TUTORIALS / link).is_file(), link


@lessons
def test_at_least_one_exercise_breaks_something(path: Path) -> None:
    """The book teaches a habit: to see which law catches a mistake."""
    assert re.search(r"\bbreak it\b", "".join(exercises(path)), re.I)
