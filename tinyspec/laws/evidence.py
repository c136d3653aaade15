"""Say what a law found: evidence where it holds, else the smallest counterexample.

A counterexample names nothing of the library's insides: it shows the case in the words of the task.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, ParamSpec

import tinyspec
from tinyspec.errors import TinyspecError

P = ParamSpec("P")


@dataclass(frozen=True)
class Counterexample:
    """The smallest case found: the input, the expected and the actual result.

    law       name of the law that was broken
    case      what went in, in order: p, q, draft, warp, uniforms, ...
    expected  what the law demands
    got       what the implementation did
    """

    law: str
    case: dict[str, Any]
    expected: Any
    got: Any

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; numbers that JSON cannot express (Fractions) become text."""
        return {
            "law": self.law,
            "case": {name: _as_plain_data(value) for name, value in self.case.items()},
            "expected": _as_plain_data(self.expected),
            "got": _as_plain_data(self.got),
        }

    def __str__(self) -> str:
        shown = [f"  {name} = {format_value(value)}" for name, value in self.case.items()]
        return "\n".join(
            [
                f"broken: {self.law}",
                *shown,
                f"expected {format_value(self.expected)}",
                f"got      {format_value(self.got)}",
            ]
        )


class LawViolated(AssertionError):
    """A law found a counterexample."""

    def __init__(self, counterexample: Counterexample):
        super().__init__(str(counterexample))
        self.counterexample = counterexample


@dataclass
class Evidence:
    """What a law looked at when it found nothing wrong. Adds up.

    notes      how it looked, in one line;  coverage  what else it covered and what not, in lines
    is_proved  whether it looked at all of its fixed cases: time may have run out
    """

    law: str
    cases: int = 0
    branches: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    coverage: list[str] = field(default_factory=list)
    is_proved: bool = True

    def __str__(self) -> str:
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        counts = f"{self.cases} cases, {self.branches} outcomes, {self.seconds:.1f} s"
        verdict = "kept in" if self.is_proved else "not proved, time ran out; nothing wrong in"
        return "\n  ".join([f"{self.law}: {verdict} {counts}{notes}", *self.coverage])

    def __add__(self, other: "Evidence") -> "Evidence":
        return Evidence(
            self.law,
            self.cases + other.cases,
            self.branches + other.branches,
            self.seconds + other.seconds,
            [*self.notes, *other.notes],
            [*self.coverage, *other.coverage],
            self.is_proved and other.is_proved,
        )


@dataclass(frozen=True)
class CheckResult:
    """The result of `check`: true if every law was looked at to its end, and none was broken.

    evidence        what was looked at and kept, one entry a law
    counterexample  the smallest case that broke a law, or None
    """

    evidence: tuple[Evidence, ...]
    counterexample: Counterexample | None = None

    def __bool__(self) -> bool:
        return self.counterexample is None and all(found.is_proved for found in self.evidence)

    def __str__(self) -> str:
        lines = [str(found) for found in self.evidence]
        return "\n".join(
            lines if self.counterexample is None else [*lines, str(self.counterexample)]
        )

    def __repr__(self) -> str:
        laws = [
            f"{'kept' if found.is_proved else 'not proved'}: {found.law}" for found in self.evidence
        ]
        laws += [] if self.counterexample is None else [f"broken: {self.counterexample.law}"]
        return f"<CheckResult {', '.join(laws)}>"

    def _ipython_display_(self) -> None:
        """Show nothing: `check` has printed it."""


def accuse(law: str, expected: Any, got: Any, **case: Any) -> None:
    """Raise LawViolated for this case."""
    raise LawViolated(Counterexample(law, case, expected, got))


def expect_equal(law: str, expected: Any, got: Any, **case: Any) -> None:
    """Raise LawViolated for this case unless the law got what it expected."""
    if got != expected:
        accuse(law, expected, got, **case)


def collect_evidence(law: str) -> Callable[[Callable[P, Iterator[int]]], Callable[P, Evidence]]:
    """Return a decorator that makes a law of a function that checks one case after another.

    The function yields once for each case that holds: how many outcomes it walked there, or 0. It
    raises LawViolated at the first case that does not hold.

    >>> @collect_evidence("squares are not negative")
    ... def check_squares(numbers):
    ...     for x in numbers:
    ...         expect_equal("squares are not negative", True, x * x >= 0, x=x)
    ...         yield 0
    >>> check_squares(range(3)).cases
    3
    """

    def decorate(check: Callable[P, Iterator[int]]) -> Callable[P, Evidence]:
        @wraps(check)
        def judge(*args: P.args, **kwargs: P.kwargs) -> Evidence:
            began = perf_counter()
            outcomes = list(check(*args, **kwargs))
            return Evidence(law, len(outcomes), sum(outcomes), perf_counter() - began)

        return judge

    return decorate


def format_value(value: Any) -> str:
    """Return a value as a reader would write it: 1/3 for a fraction, six digits for a float.

    >>> from fractions import Fraction
    >>> format_value({(0, 1): Fraction(1, 3), (1,): 0.25})
    '{(0, 1): 1/3, (1,): 0.25}'
    """
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, tuple):
        return "(" + ", ".join(map(format_value, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if hasattr(value, "tolist"):
        return format_value(value.tolist())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _as_plain_data(value: Any) -> Any:
    if isinstance(value, dict):
        return {format_value(k): _as_plain_data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain_data(v) for v in value]
    if hasattr(value, "tolist"):
        return _as_plain_data(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def import_extra(module: str) -> Any:
    """Import a module of the test extra, or raise TinyspecError that says how to install it.

    >>> import_extra("no_such_library.part")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tinyspec.errors.TinyspecError: this law needs no_such_library: pip install ...
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise TinyspecError(f"this law needs {package}: {install_command()}") from None


def install_command() -> str:
    """Return the command that installs the test extra: another one in a clone than elsewhere."""
    in_clone = (Path(tinyspec.__file__).parents[1] / "pyproject.toml").is_file()
    return 'pip install -e ".[test]"' if in_clone else 'pip install "tinyspec[test]"'
