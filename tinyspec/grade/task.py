"""Define what an assignment is made of, and the tools that its laws share.

An assignment has tasks, a task has laws, and each law has points of its own. A law is a function
that goes through its cases, the smallest first. It raises `tinyspec.laws.evidence.LawViolated` with
the first case that breaks it, in the words of the hand-out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError
from tinyspec.grade.child import NOT_ALLOWED
from tinyspec.laws.evidence import Evidence, accuse, format_value

ROUNDING = 1e-9  # by how much a result may be off if floats were calculated with

Function = Callable[..., Any]


class Cases(NamedTuple):
    """Which cases a law draws.

    seed   of the cases that are drawn
    times  how many times as many are drawn as in the public run
    """

    seed: int = 0
    times: int = 1


@dataclass(frozen=True)
class GradedLaw:
    """A law and the points that a function earns by keeping it.

    points    earned if the law holds, whatever becomes of the task's other laws
    sentence  what the law says
    judge     raises LawViolated if it is broken; returns Evidence of no cases if there was
              nothing to look at
    needs     sentences of laws of the same task without which this one says nothing: a fast loop
              earns no points for speed while its text is wrong
    """

    points: int
    sentence: str
    judge: Callable[[Function, Cases], Evidence]
    needs: tuple[str, ...] = ()

    def __call__(self, function: Function, cases: Cases) -> Evidence:
        """Hold a function to the law."""
        return self.judge(function, cases)


def graded_law(
    points: int, sentence: str, *needs: str
) -> Callable[[Callable[[Function, Cases], Iterable[bool]]], GradedLaw]:
    """Make a law of a generator over cases: it accuses, or yields whether the case counts."""

    def make(look: Callable[[Function, Cases], Iterable[bool]]) -> GradedLaw:
        def judge(function: Function, cases: Cases) -> Evidence:
            return Evidence(sentence, sum(look(function, cases)))

        return GradedLaw(points, sentence, judge, needs)

    return make


class NoResult(TinyspecError):
    """The submitted function gave no result that could be judged. Laws let it pass.

    clause   a sentence without its end: "residual raises ZeroDivisionError (submission.py, line
             12)"
    case     what it was given, by the names of its arguments
    summary  the same in a few words, for a table: "raised ZeroDivisionError at line 12"
    """

    def __init__(self, clause: str, case: dict[str, Any] | None = None, summary: str = ""):
        self.clause, self.case, self.summary = clause, case or {}, summary or clause
        shown = ", ".join(f"{name} = {shorten_value(value)}" for name, value in self.case.items())
        super().__init__(f"{clause}, given {shown}" if shown else clause)

    @property
    def is_offence(self) -> bool:
        """Return whether the submission did what the grader does not allow."""
        return self.clause.endswith(NOT_ALLOWED)


class Task(NamedTuple):
    """One function to be written.

    name   of the function in submission.py
    title  as in the hand-out: "A1.3 The residual"
    laws   judged one by one, and each earns its own points
    uses   functions of earlier tasks that this one builds on. The reference's stand in their place
           while it is judged, so that a mistake in them costs no points here
    """

    name: str
    title: str
    laws: tuple[GradedLaw, ...]
    uses: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """Return the number in the title: "A1.3"."""
        return self.title.split()[0]

    @property
    def points(self) -> int:
        """Return the points of all its laws."""
        return sum(law.points for law in self.laws)


class Assignment(NamedTuple):
    """An assignment, or some tasks of one: its name ("A1"), its title and its tasks.

    has_tensors  whether a submission has torch; else it has the standard library alone
    model        a bundled model that its laws load; "": none
    """

    name: str
    title: str
    tasks: tuple[Task, ...]
    has_tensors: bool = False
    model: str = ""

    @property
    def points(self) -> int:
        """Return the points of all its tasks."""
        return sum(task.points for task in self.tasks)

    @property
    def packages(self) -> str:
        """Return what a submission may import, in words."""
        more = self.has_tensors
        return "the standard library and torch are" if more else "the standard library is"

    def select(self, names: Iterable[str]) -> "Assignment":
        """Return the assignment with these tasks alone, in its own order; all of it for no names.

        A name is that of the function, or the number of the task: "residual", "A1.3" or "3".

        Raises TinyspecError if a name is no task of the assignment.
        """
        chosen = set[str]()
        for name in names:
            wanted = name.lower().removeprefix(f"{self.name.lower()}.")
            found = [t.name for t in self.tasks if wanted in (t.name, t.number.split(".")[1])]
            if not found:
                known = ", ".join(task.name for task in self.tasks)
                raise TinyspecError(f"{self.name} has no task {name!r}: {known}")
            chosen.update(found)
        tasks = tuple(task for task in self.tasks if task.name in chosen)
        return self._replace(tasks=tasks) if chosen else self


# ---------------------------------------------------------------------- tools of the laws


def expect_close(law: str, expected: Any, got: Any, **case: Any) -> None:
    """Accuse unless the two are equal, by `is_close`."""
    if not is_close(expected, got):
        accuse(law, expected, got, **case)


def is_close(expected: Any, got: Any) -> bool:
    """Return whether numbers, rows or distributions are equal.

    Exact numbers must be equal exactly. If a float is among them they may differ by `ROUNDING`,
    and not-a-number equals nothing. A distribution is a dictionary; what is not in it has
    probability 0.

    >>> is_close([Fraction(1, 2), 0], [0.5, 0.0]), is_close({"a": 1}, {"a": 1, "b": 0})
    (True, True)
    """
    if isinstance(expected, dict):
        return all(is_close(expected.get(k, 0), got.get(k, 0)) for k in {*expected, *got})
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(got) and all(map(is_close, expected, got))
    if expected == got:
        return True
    difference = expected - got
    return isinstance(difference, float) and abs(difference) <= ROUNDING


def is_token(value: Any, vocabulary: int) -> bool:
    """Return whether this is a whole number from 0 to vocabulary - 1, and no bool."""
    return type(value) is int and 0 <= value < vocabulary


def is_number(value: Any) -> bool:
    """Return whether one can calculate with this: no bool, no not-a-number, no infinity."""
    if isinstance(value, float):
        return abs(value) < float("inf")
    return isinstance(value, (int, Fraction)) and not isinstance(value, bool)


def require_number(law: str, got: Any, **case: Any) -> Any:
    """Return what came back if it is a number; accuse it otherwise."""
    if not is_number(got):
        accuse(law, "a number (no bool, no nan)", describe_result(got), **case)
    return got


def require_list(law: str, got: Any, count: int, what: str, **case: Any) -> Any:
    """Return what came back if it is a list of so many things; accuse it otherwise."""
    if not isinstance(got, (list, tuple)):
        accuse(law, f"{what}: a list of {count}", describe_result(got), **case)
    if len(got) != count:
        accuse(law, f"{what}: a list of {count}", f"a list of {len(got)}", **case)
    return got


def describe_result(got: Any) -> str:
    """Return what came back in place of what was asked for, with its type."""
    return "None: nothing was returned" if got is None else f"{got!r} ({type(got).__name__})"


def shorten_value(value: Any, most: int = 120) -> str:
    """Return a value on one line of at most so many letters, its middle left out."""
    text = format_value(value)
    return text if len(text) <= most else f"{text[: most - 40]} ... {text[-35:]}"
