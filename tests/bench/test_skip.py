"""`tinyspec bench skip` on a tiny model: the search, interrupted and resumed, and bad input."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments import skip
from tinyspec.speculative.drafting.self_speculative import parse_skip_set

QUICK = ("--prompts", "1", "--tokens", "4", "--quiet")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_search_writes_what_the_knob_takes(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "skip.json"
    result = run(
        "bench",
        "skip",
        "--model",
        zoo.big,
        "--evaluations",
        "3",
        *QUICK,
        "--out",
        str(out),
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = loaded(out)
    assert json.loads(result.stdout) == found
    assert {
        "command",
        "commit",
        "machine",
        "model",
        "seed",
        "skip",
        "evaluations",
        "checked",
        "default",
    } <= set(found)
    assert found["checked"]["knobs"]["skip"] == found["skip"]
    assert len(found["evaluations"]) == 3
    for before, entry in zip(
        [{"best": 0.0}, *found["evaluations"]], found["evaluations"], strict=False
    ):
        assert entry["speed"] == pytest.approx(entry["plain"] / entry["seconds"])
        assert entry["best"] == max(before["best"], entry["speed"])
    assert max(found["evaluations"], key=lambda entry: entry["speed"])["skip"] == found["skip"]
    written = run(
        "generate",
        "--model",
        zoo.big,
        "--method",
        "self_speculative",
        "--skip",
        str(out),
        "the cat",
        "-n",
        "4",
    )
    assert written.exit_code == 0, written.output
    assert written.stdout == run("generate", "--model", zoo.big, "the cat", "-n", "4").stdout

    grown = run(
        "bench",
        "skip",
        "--model",
        zoo.big,
        "--evaluations",
        "5",
        *QUICK,
        "--out",
        str(out),
        "--resume",
    )
    assert grown.exit_code == 0, grown.output
    again = loaded(out)
    assert again["evaluations"][:3] == found["evaluations"] and len(again["evaluations"]) == 5
    call = (
        "bench",
        "skip",
        "--model",
        zoo.big,
        "--evaluations",
        "5",
        "--resume",
        "--out",
        str(out),
    )
    assert "tokens 4, not 5" in failed(run(*call, "--prompts", "1", "--tokens", "5"))
    again["inputs"][0] = "of other weights"
    out.write_text(json.dumps(again))
    assert "made with inputs ['of other weights'" in failed(run(*call, *QUICK))


def test_an_interrupted_search_leaves_its_evaluations(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, turn, done = tmp_path / "skip.json", skip._time_turn, count()

    def interrupted(*args: Any) -> Any:
        if next(done) == 2:
            raise KeyboardInterrupt
        return turn(*args)

    monkeypatch.setattr(skip, "_time_turn", interrupted)
    result = run(
        "bench", "skip", "--model", zoo.big, "--evaluations", "4", *QUICK, "--out", str(out)
    )
    assert result.exit_code == 130
    assert len(loaded(out)["evaluations"]) == 2


def test_the_fastest_set_wins_and_not_the_one_that_passes_most(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time per token is what is minimised: nothing skipped passes whole, and is slow."""

    def turn(
        model: Any, prompts: Any, tokens: int, plain: Any, chosen: Any, number: int, clock: Any
    ) -> dict[str, Any]:
        speed = 1 + len(chosen) / 10
        return {
            "skip": skip.format_skip_set(chosen), "seconds": 1 / speed, "plain": 1.0,
            "speed": speed,
            "accepted": 1 - len(chosen) / 9,
        }  # fmt: skip

    monkeypatch.setattr(skip, "_time_turn", turn)
    result = skip.search_skip_set(
        skip.SkipSettings(zoo.big, evaluations=8, prompts=1, tokens=4), quiet=True
    )
    assert (
        len(parse_skip_set(result["skip"], 2)) == 3
    )  # of four sublayers; all four are never asked for
    assert result["evaluations"][0]["skip"] == "none"


def test_bad_input_is_one_line(zoo: Zoo, tmp_path: Path) -> None:
    assert "--out" in failed(run("bench", "skip", "--model", zoo.big, "--resume"))
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert "no result" in failed(
        run("bench", "skip", "--model", zoo.big, "--resume", "--out", str(other))
    )
    assert "do not fit" in failed(run("bench", "skip", "--model", zoo.big, "--tokens", "96"))


def test_the_first_sets_are_distinct_and_none_is_everything() -> None:
    for n_layers in (1, 2, 3, 12, 30):
        sets = skip.initial_skip_sets(n_layers)
        assert len(set(sets)) == len(sets) and sets[0] == frozenset()
        assert all(len(chosen) < 2 * n_layers for chosen in sets)
