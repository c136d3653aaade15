"""Every technique passes its traps, and for each trap there is a toy that falls into it."""

import ast
import inspect
import json
import textwrap
from typing import Any

import pytest

from tinyspec.laws import traps as toys
from tinyspec.laws.traps import Toy, Trap
from tinyspec.technique import load_techniques

TOYS, TRAPS = toys.toys(), toys.traps()


def names(entries: list[tuple[str, Any]]) -> list[str]:
    return [f"{technique}: {getattr(entry, 'name', entry.law)}" for technique, entry in entries]


@pytest.mark.parametrize(("technique", "trap"), TRAPS, ids=names(TRAPS))
def test_a_technique_passes_its_traps_and_a_toy_falls_into_each(technique: str, trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0
    assert (technique, trap.law) in {(name, toy.law) for name, toy in TOYS}


@pytest.mark.parametrize(("technique", "toy"), TOYS, ids=names(TOYS))
def test_a_toy_is_short_and_falls_into_its_trap(technique: str, toy: Toy) -> None:
    line = toys.judge(technique, toy)
    assert line["killed_by"] == toy.law, line.get("survived")
    assert line["counterexample"]["expected"] != line["counterexample"]["got"]
    json.dumps(line)
    code = ast.parse(textwrap.dedent(inspect.getsource(toy.build)))
    assert len(ast.unparse(code).splitlines()) <= 18  # however it is wrapped


def test_every_technique_has_a_toy() -> None:
    assert {technique for technique, _ in TOYS} == load_techniques().keys()


def test_a_crash_is_no_verdict() -> None:
    def crashes(request: Any, **knobs: Any) -> Any:
        raise ZeroDivisionError

    technique, trap = next((name, trap) for name, trap in TRAPS if name == "llma")
    assert (
        "ZeroDivisionError" in toys.judge(technique, Toy("crashes", trap.law, crashes))["survived"]
    )
    assert "found nothing" in toys.judge(technique, Toy("none", trap.law, trap.real()))["survived"]
