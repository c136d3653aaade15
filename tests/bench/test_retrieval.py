"""`tinyspec bench retrieval`: figures from samples, every index answers, a file is written."""

import json
from pathlib import Path

import pytest

from tests.zoo import run
from tinyspec.bench.experiments import retrieval
from tinyspec.bench.experiments.retrieval import ARMS, ASKED, make_zipf_text, summarize_lookups


def test_the_text_is_made_from_a_seed_and_repeats_itself() -> None:
    one = make_zipf_text(5000)
    assert (one == make_zipf_text(5000)).all() and (one[:1000] == make_zipf_text(1000)).all()
    assert one.min() >= 0 and one.max() < retrieval.VOCABULARY
    pairs = list(zip(one[:-1].tolist(), one[1:].tolist(), strict=True))
    assert len(set(pairs)) < 0.8 * len(pairs)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.slow
def test_every_arm_answers(arm: str) -> None:
    sample = retrieval.time_index(arm, 3000, 1)
    told = summarize_lookups(sample, 3000)
    assert (
        told["guesses_per_call"] == pytest.approx(sample["guesses"][0] / ASKED, abs=1e-3)
        and sample["guesses"][0] > 0
    )
    assert ("us_per_append" in told) == (arm != "rest")


@pytest.mark.slow
def test_the_command_writes_what_its_figures_are_computed_from(tmp_path: Path) -> None:
    out = tmp_path / "retrieval.json"
    result = run(
        "bench",
        "retrieval",
        "--size",
        "2000",
        "--size",
        "4000",
        "--rounds",
        "1",
        "--quiet",
        "--out",
        str(out),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {"command", "commit", "machine", "samples", "figures", "growth"} <= set(found)
    for arm, of in found["figures"].items():
        for size, told in of.items():
            assert told == summarize_lookups(found["samples"][arm][size], int(size))
    assert "us per call" in result.stdout
    assert run("bench", "retrieval", "--size", "10").exit_code == 2
