"""`tinyspec bench equality`: what it compares, how it goes on, and that it sees a difference."""

import json
from pathlib import Path

import pytest

from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments import equality
from tinyspec.bench.settings import EqualitySettings
from tinyspec.data import Question
from tinyspec.decoding.trace import Statistics

BANK = [
    Question(i, "qa", (f"Why is the sky {colour}?",))
    for i, colour in enumerate(("blue", "grey", "red"))
]
CALL = ("bench", "equality", "--tokens", "20", "--quiet")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(autouse=True)
def bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyspec.data.read_spec_bench", lambda: BANK)


def test_long_blocks_and_short_ones_leave_every_token_as_it_is(zoo: Zoo, tmp_path: Path) -> None:
    result = run(*CALL, "--model", zoo.big, "--out", str(tmp_path / "e.json"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["passed"] and found["mismatches"] == 0
    assert found["tokens"] == 20 * 3 * 2
    assert found["tokens_per_call"]["rehearsed"] > 1.5


def test_a_row_tells_its_knobs(zoo: Zoo) -> None:
    found = equality.measure_equality(EqualitySettings(zoo.big, tokens=8), quiet=True)
    assert set(found["knobs"]) == {row[4] for row in found["rows"]}
    assert found["knobs"]["rehearsed"]["price"] == 0


def test_a_token_that_differs_is_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = equality.decode_to_length

    def other(*args, **kwargs):  # type: ignore[no-untyped-def]
        ids, counted = plain(*args, **kwargs)
        return (ids if args[3] == "autoregressive" else [*ids[:-1], ids[-1] ^ 1]), counted

    monkeypatch.setattr(equality, "decode_to_length", other)
    result = equality.measure_equality(EqualitySettings(zoo.big, tokens=8), quiet=True)
    assert not result["passed"]
    assert result["mismatches"] == 6
    assert {line[5] for line in result["rows"]} == {7}


def test_an_interrupted_run_goes_on_where_it_was(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain, asked = tmp_path / "e.json", equality.decode_to_length, list[str]()

    def counted(*args, **kwargs) -> tuple[list[int], Statistics]:  # type: ignore[no-untyped-def]
        asked.append(args[3])
        if len(asked) == 6:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(equality, "decode_to_length", counted)
    with pytest.raises(KeyboardInterrupt):
        equality.measure_equality(EqualitySettings(zoo.big, tokens=8), out, quiet=True)
    assert json.loads(out.read_text())["questions"] == 1
    result = equality.measure_equality(
        EqualitySettings(zoo.big, tokens=8), out, resume=True, quiet=True
    )
    assert result["questions"] == 3 and len(asked) == 6 + 2 * 3
    assert "was made with tokens_each 8, not 20" in failed(
        run(*CALL, "--model", zoo.big, "--out", str(out), "--resume")
    )


def test_a_method_that_cannot_be_compared_is_an_error(zoo: Zoo, tmp_path: Path) -> None:
    assert "draft model" in failed(
        run(*CALL, "--model", zoo.big, "--method", "speculative_decoding")
    )
    (tmp_path / "x.json").write_text("{}")
    said = failed(run(*CALL, "--model", zoo.big, "--out", str(tmp_path / "x.json"), "--resume"))
    assert "no result of `tinyspec bench equality`" in said


@pytest.mark.slow
def test_two_processes_find_what_one_finds(zoo: Zoo, tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="several processes need joblib: pip install -e .[test]")
    one, two = (
        equality.measure_equality(
            EqualitySettings(zoo.big, tokens=8, jobs=jobs), tmp_path / f"{jobs}.json", quiet=True
        )
        for jobs in (1, 2)
    )
    assert one["rows"] == two["rows"] and len(one["rows"]) == 6
    kept = ("--method", "suffix_decoding", "--jobs", "2")
    assert "leave out --jobs" in failed(run(*CALL, "--model", zoo.big, *kept))
    settings = ("--questions", "1", "--ray")
    assert "give --jobs N" in failed(run(*CALL, "--model", zoo.big, *settings))
