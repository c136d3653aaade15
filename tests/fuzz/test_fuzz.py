"""Damaged inputs of every class are accepted or an error of one line.

This is a fixed share of `make fuzz`.
"""

from pathlib import Path
from random import Random

import pytest

from tests.fuzz import workers
from tests.fuzz.inputs import CLASSES, World, build_world, open_world
from tests.fuzz.workers import Outcome, describe_outcomes, try_inputs

EACH = 20  # inputs of each class
SEED = 1


@pytest.mark.slow
def test_no_input_of_a_fixed_share_breaks_it() -> None:
    inputs = [(kind, SEED + i) for i in range(EACH) for kind in CLASSES]
    outcomes = list(try_inputs(inputs))
    assert sorted((done.kind, done.seed) for done in outcomes) == sorted(inputs)
    broken = [done for done in outcomes if done.end not in ("refused", "accepted")]
    assert not broken, (
        f"{broken[0].end}: {broken[0].kind}, seed {broken[0].seed}\n{broken[0].detail}"
    )
    for kind in CLASSES:  # inputs that are all alike would find nothing
        assert sum(done.kind == kind and done.end == "refused" for done in outcomes) >= 3, kind
    assert sum(done.end == "accepted" for done in outcomes) >= EACH


def test_the_seed_of_an_input_draws_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_world(tmp_path)
    world: World = open_world(tmp_path)
    for kind, draw in CLASSES.items():
        if kind not in ("arguments in Python", "knobs of techniques"):  # which show addresses
            one, again, other = (draw(world, Random(f"{kind} {seed}"))[0] for seed in (3, 3, 4))
            assert one == again != other


BAD = {
    "hang": "hang",  # it sleeps
    "signal": "signal",  # it accesses memory that is not its own
    "division by zero": "traceback",
    "exit": "traceback",  # it ends the process with code 3
    "memory": "traceback",  # it asks for a terabyte
}


@pytest.mark.slow  # five processes are started anew
def test_what_breaks_is_counted_and_the_next_input_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "DEADLINE", 3.0)
    last = next(iter(CLASSES))
    outcomes = [*try_inputs([*((f"selftest: {name}", 0) for name in BAD), (last, 1)])]
    ends = {done.kind.removeprefix("selftest: "): done.end for done in outcomes}
    assert ends.pop(last) in ("refused", "accepted")
    assert ends == BAD


def test_the_table_counts_each_end() -> None:
    ends = ("refused", "refused", "accepted", "traceback", "hang", "signal")
    table = describe_outcomes([Outcome("x", i, end) for i, end in enumerate(ends)]).splitlines()
    assert [line.split() for line in table[1:]] == [
        ["x", "6", "2", "1", "1", "1", "1"],
        ["all", "6", "2", "1", "1", "1", "1"],
    ]
