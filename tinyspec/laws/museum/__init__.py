"""The museum: the field's mistakes and look-alikes, each one change of the library, and the law
that catches it.

A row says which function, which text and what stands there instead. A mutant is killed if the law
meant for it accuses it: by its verdict, not by a crash, and not by another law. That also shows
that the change is no equivalent in disguise, for the same law accuses nothing in the library as it
is.

A toy is a look-alike of a technique, as a change of it; it must fall into a trap (laws/traps),
which the technique itself passes.

To add a mutant, write one row in the table of its kind. Its `bug` says where the mistake was met:
B1 to B47 and S1 to S12 are classes found in public implementations (`catalogue` has each source),
"slip" is a small slip that every verifier and loop should be tried with.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tinyspec.laws.evidence import Evidence, LawViolated, import_extra
from tinyspec.laws.museum import (
    drafting,
    loop,
    rewriting,
    scheduling,
    sessions,
    toys_drafting,
    toys_rewriting,
    toys_verification,
    verification,
)
from tinyspec.laws.museum.catalogue import CATALOGUE
from tinyspec.laws.museum.rows import Equivalent, Mutant, Toy
from tinyspec.laws.traps import trap_files

TABLES = (verification, drafting, loop, sessions, scheduling, rewriting)
TOY_TABLES = (toys_verification, toys_drafting, toys_rewriting)
R = TypeVar("R", Mutant, Toy)
Watch = Callable[[str, int, int], None]
"""Called before each row is judged: with its name, its number from 0 on, and how many there are."""


def mutants() -> list[Mutant]:
    """Return every mutant, in the order of the tables."""
    return [mutant for table in TABLES for mutant in table.MUTANTS]


def equivalents() -> list[Equivalent]:
    """Return the changes that change nothing a law could see."""
    return [change for table in TABLES for change in getattr(table, "EQUIVALENT", ())]


def toys() -> list[Toy]:
    """Return every look-alike: those of the tables, and those that a file of traps brings."""
    files = [*TOY_TABLES, *trap_files().values()]
    return [toy for file in files for toy in getattr(file, "TOYS", ())]


def find_toy(technique: str, name: str) -> Toy:
    """Return the look-alike of a technique that has this name."""
    return next(toy for toy in toys() if (toy.technique, toy.name) == (technique, name))


def judge_mutant(mutant: Mutant) -> dict[str, Any]:
    """Return one line of the matrix: mutant, bug, met (where), host, law, killed_by,
    counterexample.

    killed_by is the law whose verdict it was, or None; then `survived` says what happened.
    """
    return {
        "mutant": mutant.name,
        "bug": mutant.bug,
        "met": "; ".join(CATALOGUE[bug] for bug in mutant.bug.split(", ")),
        "host": mutant.host,
        "law": mutant.law,
        **ask_law(mutant.law, mutant.check),
    }


def judge_toy(toy: Toy) -> dict[str, Any]:
    """Return one line of the matrix: technique, toy, trap, host, killed_by, counterexample."""
    return {
        "technique": toy.technique,
        "toy": toy.name,
        "trap": toy.law,
        "host": toy.host,
        **ask_law(toy.law, toy.check),
    }


def ask_law(law: str, check: Callable[[], Evidence]) -> dict[str, Any]:
    """Return what a law said of something wrong: killed_by, counterexample, perhaps survived."""
    try:
        survived = f"{check().cases} cases found nothing"
    except LawViolated as accused:
        found = accused.counterexample
        if found.law == law:
            return {"killed_by": law, "counterexample": found.as_dict()}
        survived = f"accused by another law: {found.law}"
    except Exception as crash:  # a crash is not a verdict
        survived = f"{type(crash).__name__}: {crash}"
    return {"killed_by": None, "counterexample": None, "survived": survived}


def judge_mutants(watch: Watch | None = None) -> list[dict[str, Any]]:
    """Return a line for every mutant, judged by the law meant for it."""
    for library in ("hypothesis", "scipy"):  # missing, it would look like a crash of a mutant
        import_extra(library)
    return judge_rows(mutants(), judge_mutant, watch)


def judge_toys(watch: Watch | None = None) -> list[dict[str, Any]]:
    """Return a line for every toy, judged by its trap."""
    return judge_rows(toys(), judge_toy, watch)


def judge_rows(
    rows: Sequence[R], judge: Callable[[R], dict[str, Any]], watch: Watch | None
) -> list[dict[str, Any]]:
    """Return a line for every row, and tell `watch` how far it is."""
    lines = []
    for at, row in enumerate(rows):
        if watch is not None:
            watch(row.name, at, len(rows))
        lines.append(judge(row))
    return lines
