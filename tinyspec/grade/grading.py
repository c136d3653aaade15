"""Judging a submission: each task law by law, in a child process of its own."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyspec.grade.process import Helpers, Limits, load_submission
from tinyspec.grade.starter import extract_helpers, read_reference
from tinyspec.grade.task import Assignment, Cases, Failed, GradedLaw, Task
from tinyspec.laws.evidence import Counterexample, Evidence, LawViolated

RUNS = "it gives a result"  # the law that is broken where there is nothing to judge
PUBLIC = Cases()
MORE = 10  # times as many cases are drawn in the final run
SEEDS = 10**9  # a final run draws one of so many: nobody finds the cases by trying seeds


def draw_seed() -> int:
    """Return a seed for a final run that nobody can foresee."""
    return secrets.randbelow(SEEDS)


def cases_of(final: bool, seed: int | None) -> Cases:
    """Return the cases of the public or the final run. A final run without a seed draws one."""
    return Cases(draw_seed() if seed is None else seed, MORE) if final else Cases(seed or 0)


@dataclass(frozen=True)
class Verdict:
    """How one law was judged.

    evidence        what the law looked at, where it holds
    counterexample  the smallest case in which it is broken; or the basic law that is, or RUNS,
                    where this one could not be judged
    failed          why there was nothing to judge, where there was not
    """

    law: GradedLaw
    evidence: Evidence | None = None
    counterexample: Counterexample | None = None
    failed: Failed | None = None

    @property
    def score(self) -> int:
        return 0 if self.evidence is None else self.law.points

    @property
    def status(self) -> str:
        """Return "holds", "broken" or "not judged"."""
        if self.evidence is not None:
            return "holds"
        found = self.counterexample
        return "broken" if found is not None and found.law == self.law.sentence else "not judged"


@dataclass(frozen=True)
class Result:
    """How a task was judged.

    verdicts  one for each law of the task, in order
    helpers   functions of the submission in whose place the reference's stood
    """

    task: Task
    verdicts: Sequence[Verdict]
    helpers: Sequence[str] = ()

    @property
    def score(self) -> int:
        return sum(verdict.score for verdict in self.verdicts)

    @property
    def first_broken(self) -> Verdict | None:
        """Return the first verdict on a law that does not hold."""
        return next((verdict for verdict in self.verdicts if verdict.evidence is None), None)

    @property
    def counterexample(self) -> Counterexample | None:
        """Return the first counterexample; None where every law holds."""
        return None if self.first_broken is None else self.first_broken.counterexample

    @property
    def sentence(self) -> str:
        """Return why there was nothing to judge by the first law that does not hold, where there
        was not.
        """
        return (
            str(self.first_broken.failed) if self.first_broken and self.first_broken.failed else ""
        )

    @property
    def kept(self) -> Sequence[Evidence]:
        """Return what the laws that hold looked at."""
        return [verdict.evidence for verdict in self.verdicts if verdict.evidence is not None]


@dataclass(frozen=True)
class Report:
    """What became of a submission. `problem` says why none of it could be judged, where that is
    so.
    """

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
    """Hold a function to every law of a task, wherever it runs. Never raises what the function or a
    law raises.

    What the grader does not allow costs all points of the task, whichever law it was seen by.
    """
    verdicts: list[Verdict] = []
    for law in task.laws:
        verdicts.append(_judge_law(task, law, function, cases))
        failed = verdicts[-1].failed
        if failed is not None and failed.is_offence:
            return _fail(task, failed)
    holding = {verdict.law.sentence for verdict in verdicts if verdict.evidence is not None}
    for at, verdict in enumerate(verdicts):
        missing = next((need for need in verdict.law.needs if need not in holding), None)
        if verdict.evidence is not None and missing is not None:
            said = f"{task.name} earns no points for this law while another is broken: {missing}"
            verdicts[at] = _fail_law(verdict.law, Failed(said, summary=f"needs: {missing}"))
    return Result(task, verdicts)


def _judge_law(task: Task, law: GradedLaw, function: Callable[..., Any], cases: Cases) -> Verdict:
    try:
        evidence = law(function, cases)
    except LawViolated as accused:
        return Verdict(law, counterexample=accused.counterexample)
    except Failed as failed:
        return _fail_law(law, failed)
    except Exception as error:  # whatever a law makes of data that nobody thought of
        said = f"gives what its laws cannot judge: {type(error).__name__}: {error}"
        return _fail_law(
            law, Failed(f"{task.name} {said[:500]}", summary="returned what cannot be judged")
        )
    gone = getattr(function, "gone", None)
    if gone or not evidence.cases:
        said = gone or "was judged in no case: it never does what this law is about"
        return _fail_law(
            law, Failed(f"{task.name} {said}", summary=gone or "never does what this law is about")
        )
    return Verdict(law, evidence)


def _fail_law(law: GradedLaw, failed: Failed) -> Verdict:
    return Verdict(
        law,
        counterexample=Counterexample(RUNS, failed.case, "a result", failed.said),
        failed=failed,
    )


def _fail(task: Task, failed: Failed) -> Result:
    return Result(task, [_fail_law(law, failed) for law in task.laws])


def grade(
    assignment: Assignment,
    folder: Path,
    cases: Cases = PUBLIC,
    limits: Limits | None = None,
    watch: Callable[[Task, int], None] = lambda task, done: None,
) -> Report:
    """Judge a folder with a submission.py; whatever is wrong with it is in the report.

    A task is judged with the reference's functions in the place of the submission's earlier ones
    that it uses. Laws that do not hold then are judged once more with the submission's own: who
    gave a helper another form, and calls it accordingly, loses nothing.

    limits  of the child processes; by default a task has more time where it has more cases
    watch   is told which task is next, and how many are done
    """
    tasks = assignment.tasks
    limits = limits or Limits(task=Limits().task * cases.times)
    reference = read_reference(assignment) if any(task.uses for task in tasks) else ""
    failed = _missing(folder)
    results: list[Result] = []
    hung = 0.0  # seconds

    def judge_in_child(task: Task, helpers: Helpers | None) -> Result:
        nonlocal hung
        loaded = load_submission(str(folder.resolve()), limits, helpers)
        with loaded.child:
            seconds = max(limits.least, min(limits.call, limits.hanging - hung))
            function = loaded.function(task.name, seconds)
            result = judge(task, function, cases)
            hung += seconds if function.is_hung else 0.0
        return replace(result, helpers=loaded.replaced)

    for task in [] if failed else tasks:
        watch(task, len(results))
        helpers = (
            Helpers(extract_helpers(reference, task.uses), task.uses, task.name)
            if task.uses
            else None
        )
        try:
            result = judge_in_child(task, helpers)
            broken = result.first_broken
            if result.helpers and broken and not (broken.failed and broken.failed.is_offence):
                result = _better(result, judge_in_child(task, None))
        except Failed as error:
            failed = Failed(f"submission.py {error.said}", summary=error.summary)
            break
        results.append(result)
    if failed:
        results = [_fail(task, failed) for task in tasks]
    return Report(assignment, results, cases, failed.said if failed else "")


def _better(result: Result, other: Result) -> Result:
    """Return a result with the verdicts of the other one where only that one holds."""
    pairs = zip(result.verdicts, other.verdicts, strict=True)
    return replace(result, verdicts=[b if b.score > a.score else a for a, b in pairs])


def _missing(folder: Path) -> Failed | None:
    """Return why there is nothing to judge, where there is nothing."""
    said = ""
    try:
        if not folder.exists():
            said = f"{folder} does not exist"
        elif not folder.is_dir():
            said = f"{folder} is no folder: give the folder that holds submission.py"
        elif not (folder / "submission.py").is_file():
            others = sorted(path.name for path in folder.glob("*.py") if path.is_file())
            which = others[0] if len(others) == 1 else "the one that holds your functions"
            hint = f", but {', '.join(others)}: rename {which} to submission.py" if others else ""
            said = f"{folder} holds no submission.py{hint}"
    except OSError as error:
        said = f"{folder} cannot be read: {error.strerror}"
    return Failed(said, summary="there is no submission.py") if said else None
