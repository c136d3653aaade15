"""Judge a submission: each task law by law, in a child process of its own."""

import importlib.util
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyspec.grade.process import Helpers, Limits, load_submission
from tinyspec.grade.starter import extract_helpers, read_reference
from tinyspec.grade.task import Assignment, Cases, GradedLaw, NoResult, Task
from tinyspec.laws.evidence import Counterexample, Evidence, LawViolated

GIVES_A_RESULT = "it gives a result"  # the law that is broken if there is nothing to judge
PUBLIC = Cases()
FINAL_TIMES = 10  # times as many cases are drawn in the final run
N_SEEDS = 10**9  # a final run draws one of so many: nobody finds the cases by trying seeds


def draw_seed() -> int:
    """Return a seed for a final run that nobody can foresee."""
    return secrets.randbelow(N_SEEDS)


def choose_cases(final: bool, seed: int | None) -> Cases:
    """Return the cases of the public or the final run. A final run without a seed draws one."""
    if not final:
        return Cases(seed or 0)
    return Cases(draw_seed() if seed is None else seed, FINAL_TIMES)


@dataclass(frozen=True)
class LawVerdict:
    """How one law was judged.

    evidence        what the law looked at, if it holds
    counterexample  the smallest case in which it is broken. If it could not be judged: that of
                    the more basic law that is broken, or of GIVES_A_RESULT
    failed          why there was nothing to judge, if there was not
    """

    law: GradedLaw
    evidence: Evidence | None = None
    counterexample: Counterexample | None = None
    failed: NoResult | None = None

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

    @property
    def reason(self) -> str:
        """Return why the law does not hold in a few words: "raised ValueError at line 154"."""
        found = self.counterexample
        if self.failed is not None or found is None:
            return self.failed.summary if self.failed else ""
        if found.got is None or str(found.got).startswith("None:"):
            return "returned None"
        return f"broken: {found.law}"


@dataclass(frozen=True)
class TaskResult:
    """How a task was judged.

    verdicts  one for each law of the task, in order
    helpers   functions of the submission in whose place the reference's stood
    """

    task: Task
    verdicts: Sequence[LawVerdict]
    helpers: Sequence[str] = ()

    @property
    def score(self) -> int:
        return sum(verdict.score for verdict in self.verdicts)

    @property
    def first_broken(self) -> LawVerdict | None:
        """Return the first verdict on a law that does not hold."""
        return next((verdict for verdict in self.verdicts if verdict.evidence is None), None)

    @property
    def counterexample(self) -> Counterexample | None:
        """Return the first counterexample; None if every law holds."""
        return None if self.first_broken is None else self.first_broken.counterexample

    @property
    def sentence(self) -> str:
        """Return why the first law that does not hold had nothing to judge; "" if it had."""
        broken = self.first_broken
        return str(broken.failed) if broken and broken.failed else ""

    @property
    def summary(self) -> str:
        """Return the verdict on the task in a few words: "3 of 4 laws hold; returned None"."""
        found = [verdict.evidence for verdict in self.verdicts if verdict.evidence is not None]
        laws = f"{len(self.verdicts)} law{'s' * (len(self.verdicts) > 1)}"
        if self.first_broken is None:
            return f"{laws} held in {sum(evidence.cases for evidence in found)} cases"
        count = f"{len(found)} of {laws} hold; " if len(self.verdicts) > 1 else ""
        return count + self.first_broken.reason

    @property
    def is_unjudged(self) -> bool:
        """Return whether no law could be judged, all for one reason: a list would repeat it."""
        reasons = {str(verdict.failed) for verdict in self.verdicts if verdict.failed}
        return len(reasons) == 1 and all(verdict.failed for verdict in self.verdicts)


@dataclass(frozen=True)
class GradeReport:
    """How a submission was judged. `problem` says why none of it could be, or is empty."""

    assignment: Assignment
    results: Sequence[TaskResult]
    cases: Cases
    problem: str = ""

    @property
    def score(self) -> int:
        return sum(result.score for result in self.results)

    @property
    def max_score(self) -> int:
        return sum(result.task.points for result in self.results)


def judge_task(task: Task, function: Callable[..., Any], cases: Cases = PUBLIC) -> TaskResult:
    """Hold a function to every law of a task, wherever it runs.

    What the function or a law raises becomes a verdict. What the grader does not allow costs all
    points of the task, whichever law it was seen by.
    """
    verdicts: list[LawVerdict] = []
    for law in task.laws:
        verdicts.append(_judge_law(task, law, function, cases))
        failed = verdicts[-1].failed
        if failed is not None and failed.is_offence:
            return _fail_task(task, failed)
    holding = {verdict.law.sentence for verdict in verdicts if verdict.evidence is not None}
    for at, verdict in enumerate(verdicts):
        missing = next((need for need in verdict.law.needs if need not in holding), None)
        if verdict.evidence is not None and missing is not None:
            clause = f"earns no points for this law while another is broken: {missing}"
            failed = NoResult(f"{task.name} {clause}", summary=f"needs: {missing}")
            verdicts[at] = _fail_law(verdict.law, failed)
    return TaskResult(task, verdicts)


def _judge_law(
    task: Task, law: GradedLaw, function: Callable[..., Any], cases: Cases
) -> LawVerdict:
    try:
        evidence = law(function, cases)
    except LawViolated as accused:
        return LawVerdict(law, counterexample=accused.counterexample)
    except NoResult as no_result:
        return _fail_law(law, no_result)
    except Exception as error:  # whatever a law makes of data that nobody thought of
        clause = f"gives what its laws cannot judge: {type(error).__name__}: {error}"[:500]
        failed = NoResult(f"{task.name} {clause}", summary="returned what cannot be judged")
        return _fail_law(law, failed)
    gone = getattr(function, "gone", None)
    if gone or not evidence.cases:
        clause = gone or "was judged in no case: it never does what this law is about"
        summary = gone or "never does what this law is about"
        return _fail_law(law, NoResult(f"{task.name} {clause}", summary=summary))
    return LawVerdict(law, evidence)


def _fail_law(law: GradedLaw, failed: NoResult) -> LawVerdict:
    found = Counterexample(GIVES_A_RESULT, failed.case, "a result", failed.clause)
    return LawVerdict(law, counterexample=found, failed=failed)


def _fail_task(task: Task, failed: NoResult) -> TaskResult:
    return TaskResult(task, [_fail_law(law, failed) for law in task.laws])


def grade_folder(
    assignment: Assignment,
    folder: Path,
    cases: Cases = PUBLIC,
    limits: Limits | None = None,
    watch: Callable[[Task, int], None] = lambda task, done: None,
) -> GradeReport:
    """Judge a folder with a submission.py; whatever is wrong with it is in the report.

    A task is judged with the reference's functions in the place of the submission's earlier ones
    that it uses. Laws that do not hold then are judged once more with the submission's own: who
    gave a helper another form, and calls it accordingly, loses nothing.

    limits  of the child processes; by default a task has more time if it has more cases
    watch   is told which task is next, and how many are done
    """
    tasks = assignment.tasks
    limits = limits or Limits(task=Limits().task * cases.times)
    reference = read_reference(assignment) if any(task.uses for task in tasks) else ""
    missing = explain_missing_submission(folder)
    failed = NoResult(missing, summary="there is no submission.py") if missing else None
    results: list[TaskResult] = []
    hung = 0.0  # seconds

    def judge_in_child(task: Task, helpers: Helpers | None) -> TaskResult:
        nonlocal hung
        packages = find_packages() if assignment.has_tensors else ""
        loaded = load_submission(str(folder.resolve()), limits, helpers, packages)
        with loaded.child:
            seconds = max(limits.least, min(limits.call, limits.hanging - hung))
            function = loaded.function(task.name, seconds)
            result = judge_task(task, function, cases)
            hung += seconds if function.is_hung else 0.0
        return replace(result, helpers=loaded.replaced)

    for task in [] if failed else tasks:
        watch(task, len(results))
        source = extract_helpers(reference, task.uses)
        helpers = Helpers(source, task.uses, task.name) if task.uses else None
        try:
            result = judge_in_child(task, helpers)
            broken = result.first_broken
            if result.helpers and broken and not (broken.failed and broken.failed.is_offence):
                result = _keep_better(result, judge_in_child(task, None))
        except NoResult as error:
            failed = NoResult(f"submission.py {error.clause}", summary=error.summary)
            break
        results.append(result)
    if failed:
        results = [_fail_task(task, failed) for task in tasks]
    return GradeReport(assignment, results, cases, failed.clause if failed else "")


def find_packages() -> str:
    """Return the folder that torch is installed in."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None  # the package needs it
    return str(Path(spec.origin).parents[1])


def _keep_better(result: TaskResult, other: TaskResult) -> TaskResult:
    """Return a result with the other's verdicts on the laws that hold only there."""
    pairs = zip(result.verdicts, other.verdicts, strict=True)
    return replace(result, verdicts=[b if b.score > a.score else a for a, b in pairs])


def explain_missing_submission(folder: Path, hint: str = "") -> str:
    """Return why there is nothing to judge; "" if there is a submission.

    hint  ends the sentence if nothing in the folder looks like one
    """
    why = ""
    try:
        if not folder.exists():
            why = f"{folder} does not exist"
        elif not folder.is_dir():
            why = f"{folder} is no folder: give the folder that holds submission.py"
        elif not (folder / "submission.py").is_file():
            others = sorted(path.name for path in folder.glob("*.py") if path.is_file())
            which = others[0] if len(others) == 1 else "the one that holds your functions"
            if others:
                more = f" and {len(others) - 3} more" if len(others) > 3 else ""
                hint = f", but {', '.join(others[:3])}{more}: rename {which} to submission.py"
            inside = sorted(path.parent.name for path in folder.glob("*/submission.py"))
            if inside and not others:
                hint = f", but {', '.join(inside[:3])} in it do: grade one of these at a time"
            why = f"{folder} holds no submission.py{hint}"
    except OSError as error:
        why = f"{folder} cannot be read: {error.strerror}"
    return why
