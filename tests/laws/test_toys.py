"""Every technique passes its traps, and for each trap there is a toy that falls into it."""

import json

import pytest

from tinyspec.laws import museum
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap, traps
from tinyspec.speculative.integrated.llma import LlmaDrafter
from tinyspec.technique import load_techniques

TOYS, TRAPS = museum.toys(), traps()


@pytest.mark.parametrize(
    ("technique", "trap"), TRAPS, ids=[f"{name}: {x.law}" for name, x in TRAPS]
)
def test_a_technique_passes_its_traps(technique: str, trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0
    assert (technique, trap.law) in {(toy.technique, toy.law) for toy in TOYS}


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: f"{toy.technique}: {toy.name}")
def test_a_toy_is_short_and_falls_into_its_trap(toy: Toy) -> None:
    line = museum.judge_toy(toy)
    assert line["killed_by"] == toy.law, line.get("survived")
    assert line["counterexample"]["expected"] != line["counterexample"]["got"]
    json.dumps(line)
    assert sum(len(patch.new.splitlines()) for patch in toy.patches) <= 18


def test_every_technique_has_a_toy() -> None:
    assert {toy.technique for toy in TOYS} == load_techniques().keys()
    names = [(toy.technique, toy.name) for toy in TOYS]
    assert len(set(names)) == len(names) >= 142


def test_a_crash_is_no_verdict() -> None:
    first = "suffix = context[-self.longest :]"
    law = next(trap.law for name, trap in TRAPS if name == "llma")
    crash = Toy("x", first, f"1 / 0\n{first}", LlmaDrafter.propose, technique="llma", law=law)
    assert "ZeroDivisionError" in museum.judge_toy(crash)["survived"]
    same = Toy("x", first, f"{first} ", LlmaDrafter.propose, technique="llma", law=law)
    assert "found nothing" in museum.judge_toy(same)["survived"]


def test_a_toy_falls_into_its_own_trap() -> None:
    """Another law of the technique is no verdict either."""
    toy = museum.find_toy("spectr", "no factor")
    assert museum.ask_law(JOINT, toy.check)["killed_by"] is None
