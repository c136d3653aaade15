"""Every mutant is killed by the verdict of the law meant for it; nothing right is accused; no law is idle."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tinyspec.laws import mutants
from tinyspec.laws.judges import judges
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.mutants.catalogue import CATALOGUE, WAITING
from tinyspec.laws.mutants.drafters import Chain
from tinyspec.laws.mutants.verifiers import judge
from tinyspec.laws.parts import PARTS

MUTANTS, EQUIVALENT = mutants.mutants(), mutants.equivalents()
seen: dict[Any, Any] = {}  # witness -> what it sees of the library


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_its_law_and_does_something(mutant: Mutant) -> None:
    line = mutants.judge(mutant)
    assert line["killed_by"] == mutant.law, line.get("survived")
    assert line["counterexample"]["expected"] != line["counterexample"]["got"]
    json.dumps(line, allow_nan=False)
    if mutant.witness not in seen:
        seen[mutant.witness] = mutant.witness(PARTS)
    assert mutant.witness(mutant.parts) != seen[mutant.witness]


@pytest.mark.parametrize("law", judges(), ids=str)
def test_a_law_accuses_nothing_right_and_kills_something(law: str) -> None:
    assert judges()[law](PARTS).cases > 0
    assert law in {mutant.law for mutant in MUTANTS}


@pytest.mark.parametrize("equivalent", EQUIVALENT, ids=lambda equivalent: equivalent.name)
def test_an_equivalent_change_is_not_accused_and_its_proof_is_given(equivalent: Equivalent) -> None:
    assert equivalent.laws and len(equivalent.proof) > 60
    equivalent.check()


@pytest.mark.parametrize("law", ["truthful drafter", "presence"])
def test_what_the_mutants_are_made_of_is_right(law: str) -> None:
    """The open walk and the open drafter, with nothing replaced."""
    assert judges()[law](replace(PARTS, walk=judge(), drafter=Chain)).cases > 0


def test_there_are_many_and_no_two_of_one_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 80


def test_every_known_mistake_has_a_mutant_or_waits_for_something() -> None:
    hosted = {bug for entry in (*MUTANTS, *EQUIVALENT) for bug in entry.bug.split(", ")}
    assert hosted <= CATALOGUE.keys()
    assert hosted.isdisjoint(WAITING)
    assert hosted | WAITING.keys() == CATALOGUE.keys()


def test_a_crash_is_no_verdict_and_survival_is_said() -> None:
    def crashes(tree: Any, p: Any, rng: Any) -> Any:
        raise ZeroDivisionError

    line = mutants.judge(Mutant("crashes", "slip", "joint law", replace(PARTS, walk=crashes), id))
    assert line["killed_by"] is None and "ZeroDivisionError" in line["survived"]
    line = mutants.judge(Mutant("none", "slip", "support", PARTS, id))
    assert line["killed_by"] is None and "found nothing" in line["survived"]


def test_a_counterexample_speaks_of_the_task() -> None:
    """The smallest pair of laws that shows it, the draft, the law that was due and the law that came."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "residual is p")
    found = mutants.judge(mutant)["counterexample"]
    assert found["case"] == {
        "p": ["1/2", "1/2"],
        "q": ["0", "1"],
        "draft": "chain of 1",
        "tokens": 1,
    }
    assert found["expected"] == {"(0,)": "1/2", "(1,)": "1/2"}
    assert found["got"] == {"(0,)": "1/4", "(1,)": "3/4"}
