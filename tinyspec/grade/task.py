"""What an assignment is: tasks, their points, and the laws that judge them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError
from tinyspec.laws.accused import Evidence, show


class Cases(NamedTuple):
    """Which cases a law draws.

    seed   of the cases that are drawn
    times  how many times as many are drawn as in the public run
    """

    seed: int = 0
    times: int = 1


Law = Callable[[Callable[..., Any], Cases], Evidence]
"""Judges a function; raises `tinyspec.laws.accused.Accused` with the smallest counterexample in the words of the task."""


class Failed(TinyspecError):
    """The submitted function gave no result that could be judged. Laws let it pass.

    said   a sentence without its end: "residual raises ZeroDivisionError (submission.py, line 12)"
    case   what it was given, by the names of its arguments
    """

    def __init__(self, said: str, case: dict[str, Any] | None = None):
        self.said, self.case = said, case or {}
        shown = ", ".join(f"{name} = {brief(value)}" for name, value in self.case.items())
        super().__init__(f"{said}, given {shown}" if shown else said)


def brief(value: Any, most: int = 120) -> str:
    """A value on one line, its middle left out where it is long."""
    text = show(value)
    return text if len(text) <= most else f"{text[: most - 40]} ... {text[-35:]}"


class Task(NamedTuple):
    """One function to be written.

    name    of the function in submission.py
    title   as in the hand-out: "A1.3 The residual"
    points  given if every law holds, else none
    laws    judged in order, up to the first that is broken
    """

    name: str
    title: str
    points: int
    laws: tuple[Law, ...]


class Assignment(NamedTuple):
    """An assignment: its name ("A1"), its title and its tasks."""

    name: str
    title: str
    tasks: tuple[Task, ...]
