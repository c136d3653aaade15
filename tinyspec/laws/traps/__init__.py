"""Traps and toys: what makes a technique that technique, and the look-alike that lacks it.

For most papers there is a simpler thing that looks the same in a demonstration: prompt lookup under
the name of LLMA, an acceptance test without the residual, a formula without the analysis. A *trap*
is a check that asks for what the look-alike lacks; the technique passes it. A *toy* is the
look-alike in at most twenty lines; it must fall into its trap.

One file here a technique, under its registry name, with the lists TRAPS and TOYS; a new file is
found by itself.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyspec.laws.evidence import Evidence, LawViolated
from tinyspec.technique import find_technique


@dataclass(frozen=True)
class Trap:
    """A check of a technique.

    law    the name it accuses under
    check  what is judged -> Evidence; raises LawViolated
    real   what the technique itself hands to it; a toy hands in something like it
    """

    law: str
    check: Callable[[Any], Evidence]
    real: Callable[[], Any]


@dataclass(frozen=True)
class Toy:
    """A look-alike.

    name   what it does instead
    law    the trap it falls into
    build  what stands in the technique's place: a builder (request, **knobs) -> Decoder, or a
           function of its analysis
    """

    name: str
    law: str
    build: Any


def card(name: str) -> Callable[[], Any]:
    """The builder of a registered technique, looked up when it is needed."""
    return lambda: find_technique(name).make


def _files() -> dict[str, Any]:
    return {
        file.name: importlib.import_module(f"{__name__}.{file.name}")
        for file in pkgutil.iter_modules(__path__)
    }


def traps() -> list[tuple[str, Trap]]:
    """(technique, trap), by technique."""
    return [(name, trap) for name, file in _files().items() for trap in file.TRAPS]


def toys() -> list[tuple[str, Toy]]:
    """(technique, toy), by technique."""
    return [(name, toy) for name, file in _files().items() for toy in file.TOYS]


def judge(technique: str, toy: Toy) -> dict[str, Any]:
    """One line of the matrix: killed_by is the trap whose verdict it was, or None (then `survived`
    says what happened).
    """
    line: dict[str, Any] = {"technique": technique, "toy": toy.name, "trap": toy.law}
    trap = next(trap for name, trap in traps() if (name, trap.law) == (technique, toy.law))
    try:
        evidence = trap.check(toy.build)
    except LawViolated as accused:
        found = accused.counterexample
        if found.law == toy.law:
            return {**line, "killed_by": found.law, "counterexample": found.as_dict()}
        return {
            **line,
            "killed_by": None,
            "counterexample": None,
            "survived": f"accused by another law: {found.law}",
        }
    except Exception as crash:  # a crash is not a verdict
        return {
            **line,
            "killed_by": None,
            "counterexample": None,
            "survived": f"{type(crash).__name__}: {crash}",
        }
    return {
        **line,
        "killed_by": None,
        "counterexample": None,
        "survived": f"{evidence.cases} cases found nothing",
    }


def matrix(watch: Callable[[str, int, int], None] | None = None) -> list[dict[str, Any]]:
    """Judge every toy by its trap: technique, toy, trap, killed_by, counterexample.

    watch  called before each with its name, its number from 0 on, and how many there are
    """
    lines, all_toys = [], toys()
    for at, (technique, toy) in enumerate(all_toys):
        if watch is not None:
            watch(toy.name, at, len(all_toys))
        lines.append(judge(technique, toy))
    return lines
