"""The field's real mistakes, one small defect each next to what is right, and the law that kills
each.

A mutant is the library's `Parts` with one part replaced. It is killed if the law meant for it
accuses it: by its verdict, not by a crash, and not by another law. `matrix()` runs them all. To add
one, write the wrong part in the file of its kind and add one entry to that file's list.

`bug` says where the mistake comes from: B1 to B45 and S1 to S12 are classes found in public
implementations (each with its thread in the notes of that part of the catalogue that names it),
"slip" is the catalogue of small slips every verifier and loop should be tried with.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyspec.laws.accused import LawViolated
from tinyspec.laws.extra import extra
from tinyspec.laws.judges import Law, judges
from tinyspec.laws.mutants.catalogue import CATALOGUE
from tinyspec.laws.parts import PARTS, Parts

KINDS = (
    "verifiers",
    "walks",
    "drafters",
    "counting",
    "loop",
    "rows",
    "reports",
    "caches",
    "joint",
    "rollback",
    "retrieval",
    "verification",
    "trees",
    "nested",
    "masking",
    "translation",
    "fertility",
    "alignment",
    "sweeps",
    "pipelines",
    "exits",
    "exit_losses",
)
"""The files of mutants here: each has MUTANTS and may have EQUIVALENT."""


@dataclass(frozen=True)
class Mutant:
    """One defect.

    name     what is wrong, in a few words
    bug      its entries in the catalogue, where it was met
    law      the name of the law meant for it
    parts    the library's parts with the defect
    witness  something that can be seen of parts, and that the defect changes: it is no equivalent
             in disguise
    """

    name: str
    bug: str
    law: str
    parts: Parts
    witness: Callable[[Parts], Any]

    @property
    def host(self) -> str:
        """The part that is replaced."""
        fields = PARTS.__dataclass_fields__
        return ", ".join(
            name for name in fields if getattr(self.parts, name) is not getattr(PARTS, name)
        )


@dataclass(frozen=True)
class Equivalent:
    """A change that no law may accuse, with the proof why. `laws` are those that look at it, by
    name or made for it.
    """

    name: str
    bug: str
    proof: str
    laws: tuple[str | Law, ...]
    parts: Parts

    def check(self) -> None:
        """Raises LawViolated if a law sees it after all."""
        for law in self.laws:
            (judges()[law] if isinstance(law, str) else law)(self.parts)


def _all(what: str) -> list[Any]:
    modules = [importlib.import_module(f"{__name__}.{kind}") for kind in KINDS]
    return [entry for module in modules for entry in getattr(module, what, [])]


def mutants() -> list[Mutant]:
    """Every mutant, in the order of the files."""
    return _all("MUTANTS")


def equivalents() -> list[Equivalent]:
    """The changes that change nothing a law could see."""
    return _all("EQUIVALENT")


def judge(mutant: Mutant) -> dict[str, Any]:
    """One line of the matrix: killed_by is the law whose verdict it was, or None (then `survived`
    says what happened).
    """
    met = "; ".join(CATALOGUE[bug] for bug in mutant.bug.split(", "))
    line: dict[str, Any] = {
        "mutant": mutant.name,
        "bug": mutant.bug,
        "met": met,
        "host": mutant.host,
        "law": mutant.law,
    }
    try:
        evidence = judges()[mutant.law](mutant.parts)
    except LawViolated as accused:
        found = accused.counterexample
        if found.law == mutant.law:
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
    """Judge every mutant by the law meant for it: mutant, bug, met (where), host, law, killed_by,
    counterexample.

    watch  called before each with its name, its number from 0 on, and how many there are
    """
    for library in (
        "hypothesis",
        "scipy",
    ):  # said once here: to a mutant it would look like a crash
        extra(library)
    lines, all_mutants = [], mutants()
    for at, mutant in enumerate(all_mutants):
        if watch is not None:
            watch(mutant.name, at, len(all_mutants))
        lines.append(judge(mutant))
    return lines
