"""Lesson 09 and the page of mistakes: each sampler is refuted with the case that they show.

tests/test_tutorials.py runs their cells.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_tutorials import TUTORIALS, read_cells, stage  # noqa: F401 (a fixture)

LESSON, PAGE = TUTORIALS / "09_prove_your_own.md", TUTORIALS / "what_others_got_wrong.md"

SOFTMAX = """\
broken: joint distribution
  p = [[0, 1], [0, 1]]
  q = [[1, 0]]
  draft = [0]
  compared = the distribution of the first token
expected [0, 1]
got      [0.268941, 0.731059]
"""
MENDED = """\
joint distribution: kept in 690 cases, 4483 outcomes, # s (in floating point, to 4e-16; V 2-8, gamma 1-5)
"""
ONE_NUMBER = """\
broken: joint distribution
  p = [[1/2, 1/2], [1/2, 1/2], [0, 1]]
  q = [[0, 1], [0, 1]]
  draft = [1, 1]
  compared = the distribution of the first 2 tokens (a shorter round is continued by sampling from p)
expected {(0, 0): 1/4, (0, 1): 1/4, (1, 0): 1/4, (1, 1): 1/4}
got      {(0, 0): 1/4, (0, 1): 1/4, (1, 0): 0, (1, 1): 1/2}
"""
AT_MOST = """\
broken: impossible token
  p = [[0, 1], [0, 1]]
  q = [[1, 0]]
  draft = [0]
  uniforms = the first one drawn is exactly 0.0, which a generator may return
  hint = accept where u < p / q, not where u <= p / q; corners=False leaves this case out
expected no token 0: p forbids it
got      [0, 1]
"""
LIKELIEST = """\
broken: truthful drafter
  q = [[1/2, 1/2]]
  gamma = 1
  drafted before = []
  declared = [1/2, 1/2]
expected tokens drawn from the declared distribution
got      [1, 0]
"""
DOORS = (
    "joint distribution: kept in 690 cases, 4483 outcomes, # s (in floating point, to 4e-16; V 2-8, gamma 1-5)\n",
    "joint distribution: kept in 630 cases, 3552 outcomes, # s (a chain drawn from q, its distributions declared; exactly; "
    "V 2-4, gamma 1-5, 7 sampling settings)\n  the same on float64 rows: 638 cases\n",
    "joint distribution: kept in 171 cases, 2235 outcomes, # s (a chain without distributions: each token is judged as a point "
    "mass; exactly; V 2-4, gamma 1-4, 7 sampling settings)\n",
    "joint distribution: kept in 177 cases, 3589 outcomes, # s (siblings drawn from q, independently; exactly; "
    "V 2-4, gamma 1-4, 2-4 siblings, 7 sampling settings)\n",
    "joint distribution: kept in 177 cases, 1354 outcomes, # s (siblings drawn from q without replacement; exactly; "
    "V 2-4, gamma 1-4, 2-4 siblings, 7 sampling settings)\n",
    "joint distribution: kept in 219 cases, 2667 outcomes, # s (drawn siblings, point masses and probes side by side; exactly; "
    "V 2-4, gamma 1-4, 2-4 siblings, 7 sampling settings)\n",
    """\
rng.gumbel cannot be enumerated: draw with rng.random(), rng.uniform(), rng.choice(n, p=row), \
rng.integers() or rng.multinomial()
""",
)
COUNTED_EVERYWHERE = """\
broken: joint distribution
  p = [[0, 1], [0, 1], [0, 1]]
  q = [[1, 0], [1/2, 1/2]]
  draft = {(0, 0): 1/2, (0, 1): 1/2}
  output of each draft = {(0, 0): {(1,): 1}, (0, 1): {(0, 1): 1}}
  compared = the distribution of the first token
expected [0, 1]
got      [1/2, 1/2]
"""
ROW_BEHIND = """\
broken: joint distribution
  p = [[0, 1], [1, 0]]
  q = [[1/2, 1/2]]
  draft = {(0,): 1/2, (1,): 1/2}
  output of each draft = {(0,): {(0,): 1}, (1,): {(1, 0): 1}}
  compared = the distribution of the first token
expected [0, 1]
got      [1/2, 1/2]
"""
BONUS_OF_THE_DRAFT = """\
broken: joint distribution
  p = [[0, 1], [1, 0]]
  q = [[0, 1]]
  draft = [1]
  compared = the distribution of the first 2 tokens (a shorter round is continued by sampling from p)
expected {(1, 0): 1, (1, 1): 0}
got      {(1, 0): 0, (1, 1): 1}
"""
NOISE_KEPT = """\
broken: joint distribution
  p = {any context: [1/2, 1/2]}
  q = {any context: [0, 1]}
  gamma = 1
  n = 2
  compared = the distribution of the first 2 tokens (a shorter round is continued by sampling from p)
expected {(0, 0): 1/4, (0, 1): 1/4, (1, 0): 1/4, (1, 1): 1/4}
got      {(0, 0): 1/2, (0, 1): 0, (1, 0): 1/4, (1, 1): 1/4}
"""
ONLY_THE_SURE = """\
broken: presence
  q = [[1/3, 2/3]]
  gamma = 1
  drafted before = []
  declared = [1/3, 2/3]
expected tokens drawn from the declared distribution, kept whatever they are
got      [0, 1]
"""
TOLD = {
    LESSON: [SOFTMAX, MENDED, ONE_NUMBER, AT_MOST, LIKELIEST, *DOORS],
    PAGE: [COUNTED_EVERYWHERE, ROW_BEHIND, BONUS_OF_THE_DRAFT, NOISE_KEPT, ONLY_THE_SURE],
}


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.stem)
def test_a_refutation_is_printed_to_the_letter(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page; the lesson's last cell is a test that passes."""
    names: dict[str, Any] = {"__name__": path.stem}
    for cell in read_cells(path.read_text(encoding="utf-8")):
        if path == PAGE and "check" not in cell.code:
            continue  # mutants alone: tests/laws/test_museum.py
        exec(compile(cell.code, str(path), "exec"), names)
    printed, at = re.sub(r"\d+\.\d s", "# s", capsys.readouterr().out), 0
    for line in TOLD[path]:
        assert line in printed[at:]
        at = printed.index(line, at) + len(line)
    if path == LESSON:
        names["test_my_sampler"]()


def test_the_pages_have_the_mistakes_they_are_for() -> None:
    assert sum("broken:" in line for line in (*TOLD[LESSON], *TOLD[PAGE])) >= 9
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert len(re.findall(r'killed\(".*?", by=".*?"\)', text)) >= 35
    assert text.count("The property") >= 20
