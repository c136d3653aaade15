"""What an assignment is: tasks, the laws that judge them, and the points of each law."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError
from tinyspec.grade.child import NOT_ALLOWED
from tinyspec.laws.accused import Evidence, format_value


class Cases(NamedTuple):
    """Which cases a law draws.

    seed   of the cases that are drawn
    times  how many times as many are drawn as in the public run
    """

    seed: int = 0
    times: int = 1


Law = Callable[[Callable[..., Any], Cases], Evidence]
"""Judges a function; raises `tinyspec.laws.accused.LawViolated` with the smallest counterexample in
the words of the task.
"""


@dataclass(frozen=True)
class GradedLaw:
    """A law and the points that a function earns by keeping it.

    points    earned where the law holds, whatever becomes of the task's other laws
    sentence  what the law says
    judge     raises LawViolated where it is broken; returns Evidence of no cases where nothing came
              up
    needs     sentences of laws of the same task without which this one says nothing: a fast loop
              earns no points for speed while its text is wrong
    """

    points: int
    sentence: str
    judge: Law
    needs: tuple[str, ...] = ()

    def __call__(self, function: Callable[..., Any], cases: Cases) -> Evidence:
        """Hold a function to the law."""
        return self.judge(function, cases)


class Failed(TinyspecError):
    """The submitted function gave no result that could be judged. Laws let it pass.

    said     a sentence without its end: "residual raises ZeroDivisionError (submission.py, line
             12)"
    case     what it was given, by the names of its arguments
    summary  the same in a few words, for a table: "raised ZeroDivisionError at line 12"
    """

    def __init__(self, said: str, case: dict[str, Any] | None = None, summary: str = ""):
        self.said, self.case, self.summary = said, case or {}, summary or said
        shown = ", ".join(f"{name} = {brief(value)}" for name, value in self.case.items())
        super().__init__(f"{said}, given {shown}" if shown else said)

    @property
    def is_offence(self) -> bool:
        """Return whether the submission did what the grader does not allow."""
        return self.said.endswith(NOT_ALLOWED)


def brief(value: Any, most: int = 120) -> str:
    """A value on one line, its middle left out where it is long."""
    text = format_value(value)
    return text if len(text) <= most else f"{text[: most - 40]} ... {text[-35:]}"


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
    """An assignment, or some tasks of one: its name ("A1"), its title and its tasks."""

    name: str
    title: str
    tasks: tuple[Task, ...]

    @property
    def points(self) -> int:
        """Return the points of all its tasks."""
        return sum(task.points for task in self.tasks)

    def select(self, names: Iterable[str]) -> "Assignment":
        """Return the assignment with these tasks alone, in its own order; all of it for no names.

        A name is that of the function, or the number of the task: "residual", "A1.3" or "3".

        Raises TinyspecError where a name is no task of the assignment.
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
