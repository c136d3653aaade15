"""A tiny assignment, and submissions to it, for tests of the machinery; and the references."""

import importlib.util
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.grade.grading import GradeReport, grade_folder
from tinyspec.grade.process import Limits
from tinyspec.grade.task import Assignment, Cases, GradedLaw, Task
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.rational import distribution_pairs

ASSIGNMENTS_FOLDER = Path(__file__).parents[2] / "tutorials" / "assignments"
FAST = Limits(call=1.5, task=20.0, hanging=1.5, least=0.5, memory=400 << 20, output=1 << 18)

RATIO = "kept with probability min(1, p/q)"
REST = "the residual is max(0, p - q), normalised"


def judge_ratio(function: Any, cases: Cases) -> Evidence:
    """accept(p, q, token, chance) is True with probability min(1, p[token] / q[token])."""
    seen = 0
    for p, q in list(distribution_pairs((2,), 5))[: 20 * cases.times]:
        for token in range(2):
            if q[token]:
                law = Exhaustive.distribution(lambda chance: function(p, q, token, chance))  # noqa: B023
                expected, got = min(Fraction(1), p[token] / q[token]), law.get(True, Fraction(0))
                seen += 1
                if got != expected or set(law) - {True, False}:
                    accuse(RATIO, expected, got, p=p, q=q, token=token)
    return Evidence(RATIO, seen)


def judge_residual(function: Any, cases: Cases) -> Evidence:
    """residual(p, q) is [V]."""
    seen = 0
    for p, q in list(distribution_pairs((2,), 5))[: 20 * cases.times]:
        beyond = [max(Fraction(0), x - y) for x, y in zip(p, q, strict=True)]
        if sum(beyond):
            expected, got = [x / sum(beyond) for x in beyond], function(list(p), list(q))
            seen += 1
            if got != expected:
                accuse(REST, expected, got, p=list(p), q=list(q))
    return Evidence(REST, seen)


TINY = Assignment(
    "A0",
    "Tiny",
    (
        Task("accept", "A0.1 Accept", (GradedLaw(40, RATIO, judge_ratio),)),
        Task("residual", "A0.2 The residual", (GradedLaw(60, REST, judge_residual),)),
    ),
)

RIGHT = '''
def accept(p, q, token, chance):
    """Whether the token is kept."""
    return chance.accept(p[token] / q[token])


def residual(p, q):
    rest = [max(0, x - y) for x, y in zip(p, q)]
    return [x / sum(rest) for x in rest]
'''


def submit(folder: Path, source: str | bytes) -> Path:
    """Return a folder with this submission."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "submission.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    return folder


def grade_tiny(folder: Path, source: str | bytes, **named: Any) -> GradeReport:
    """Return the report on a submission to the tiny assignment, or to the tasks `only` of it."""
    assignment = TINY.select(named.pop("only", ()))
    return grade_folder(
        assignment, submit(folder, source), limits=named.pop("limits", FAST), **named
    )


def load_reference(name: str) -> Any:
    """Return the module of an assignment's reference solution."""
    path = ASSIGNMENTS_FOLDER / name / "reference.py"
    spec = importlib.util.spec_from_file_location(f"{name.lower()}_reference", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
