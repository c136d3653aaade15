"""Judging a submission: each task by its laws, in a child process of its own, up to the first law that is broken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError
from tinyspec.grade.process import Limits
from tinyspec.grade.remote import Function, load
from tinyspec.grade.task import Assignment, Cases, Failed, Task
from tinyspec.laws.accused import Accused, Counterexample, Evidence

RUNS = "it gives a result"  # the law that is broken where there is nothing to judge
PUBLIC = Cases()
FINAL = 90_001  # the seed of the final run where none is given
MORE = 10  # times as many cases are drawn in the final run


def cases_of(final: bool, seed: int | None) -> Cases:
    """The cases of the public or of the final run, with a seed of one's own or theirs."""
    return Cases(FINAL if seed is None else seed, MORE) if final else Cases(seed or 0)


@dataclass(frozen=True)
class Result:
    """How a task was judged.

    counterexample  of the law that is broken, or None: then the task has its points
    sentence        why there was nothing to judge, where there was not
    kept            what was looked at by the laws that hold
    """

    task: Task
    counterexample: Counterexample | None = None
    sentence: str = ""
    kept: Sequence[Evidence] = field(default_factory=tuple)

    @property
    def score(self) -> int:
        return self.task.points if self.counterexample is None else 0


@dataclass(frozen=True)
class Report:
    """What became of a submission. `problem` says why none of it could be judged, where that is so."""

    assignment: Assignment
    results: Sequence[Result]
    cases: Cases
    problem: str = ""

    @property
    def score(self) -> int:
        return sum(result.score for result in self.results)

    @property
    def max_score(self) -> int:
        return sum(result.task.points for result in self.results)


def judge(task: Task, function: Callable[..., Any], cases: Cases = PUBLIC) -> Result:
    """Hold a function to a task's laws, wherever it runs. Never raises what the function or a law raises."""
    kept: list[Evidence] = []
    for law in task.laws:
        try:
            evidence = law(function, cases)
        except Accused as accused:
            return Result(task, accused.counterexample, kept=kept)
        except Failed as failed:
            return _failed(task, failed, kept)
        except Exception as error:  # whatever a law makes of data that nobody thought of
            said = f"gives what its laws cannot judge: {type(error).__name__}: {error}"
            return _failed(task, Failed(f"{task.name} {said[:500]}"), kept)
        gone = getattr(function, "gone", None)
        if gone or not evidence.cases:
            return _failed(task, Failed(f"{task.name} {gone or 'was judged in no case'}"), kept)
        kept.append(evidence)
    return Result(task, kept=kept)


def _failed(task: Task, failed: Failed, kept: Sequence[Evidence] = ()) -> Result:
    return Result(task, Counterexample(RUNS, failed.case, "a result", failed.said), str(failed), kept)


def grade(
    assignment: Assignment,
    folder: Path,
    cases: Cases = PUBLIC,
    limits: Limits | None = None,
    only: str | None = None,
    watch: Callable[[Task, int], None] = lambda task, done: None,
) -> Report:
    """Judge a folder with a submission.py; whatever is wrong with it is in the report.

    limits  of the child processes; by default a task has more time where it has more cases
    only    the name of the one task to judge
    watch   is told which task is next, and how many are done

    Raises TinyspecError where `only` is no task of the assignment.
    """
    tasks = [task for task in assignment.tasks if only in (None, task.name)]
    if not tasks:
        raise TinyspecError(f"{assignment.name} has no task {only!r}: {', '.join(t.name for t in assignment.tasks)}")
    limits = limits or Limits(task=Limits().task * cases.times)
    problem = _missing(folder)
    results: list[Result] = []
    hung = 0.0
    for task in [] if problem else tasks:
        watch(task, len(results))
        try:
            child, functions = load(str(folder.resolve()), limits)
        except TinyspecError as error:
            problem = f"submission.py {error}"
            break
        with child:
            seconds = max(limits.least, min(limits.call, limits.hanging - hung))
            function = Function(child, task.name, functions.get(task.name, []), seconds)
            results.append(judge(task, function, cases))
            hung += seconds if function.hung else 0.0
    if problem:
        results = [_failed(task, Failed(problem)) for task in tasks]
    return Report(assignment, results, cases, problem)


def _missing(folder: Path) -> str:
    """Why there is nothing to judge, or nothing."""
    try:
        if not folder.exists():
            return f"{folder} does not exist"
        if not folder.is_dir():
            return f"{folder} is no folder: give the folder that holds submission.py"
        if not (folder / "submission.py").is_file():
            return f"{folder} holds no submission.py"
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    return ""
