"""Traps: what makes a technique that technique.

For most papers there is a simpler thing that looks the same in a demonstration: prompt lookup under
the name of LLMA, an acceptance test without the residual, a formula without the analysis. A *trap*
is a check that asks for what the look-alike lacks; the technique passes it. The look-alikes are the
*toys* of the museum: each must fall into a trap.

One file here for each technique, under its registry name, with the list TRAPS. A new file is found by
itself; it may bring a list TOYS of its own.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyspec.laws.evidence import Evidence
from tinyspec.technique import find_technique


@dataclass(frozen=True)
class Trap:
    """A check of a technique.

    law    the name it accuses under
    check  what is judged -> Evidence; raises LawViolated
    real   what the technique itself hands to it
    """

    law: str
    check: Callable[[Any], Evidence]
    real: Callable[[], Any]


def card(name: str) -> Callable[[], Any]:
    """Return a function that looks up the builder of a registered technique."""
    return lambda: find_technique(name).make


def trap_files() -> dict[str, Any]:
    """Return the module of every technique that has traps."""
    return {
        file.name: importlib.import_module(f"{__name__}.{file.name}")
        for file in pkgutil.iter_modules(__path__)
    }


def traps() -> list[tuple[str, Trap]]:
    """Return (technique, trap), by technique."""
    return [(name, trap) for name, file in trap_files().items() for trap in file.TRAPS]


def find_trap(technique: str, law: str) -> Trap:
    """Return the trap of a technique that accuses under this name."""
    of_technique: list[Trap] = importlib.import_module(f"{__name__}.{technique}").TRAPS
    return next(trap for trap in of_technique if trap.law == law)
