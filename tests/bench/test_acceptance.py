"""`tinyspec bench acceptance` on tiny models: the vector of a pair, and the knob that takes it."""

import json
from pathlib import Path

import pytest

from tests.zoo import Zoo, failed, run, tiny_zoo

QUICK = ("--prompts", "2", "--tokens", "4", "--dtype", "float32", "--quiet")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_one_command_measures_what_the_knob_takes(
    zoo: Zoo, tmp_path: Path, temperature: str
) -> None:
    out = tmp_path / "accepts.json"
    call = ("bench", "acceptance", "--model", zoo.big, "--draft", zoo.small, "-t", temperature)
    result = run(*call, "--ranks", "3", *QUICK, "--out", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["accepts"]) == 3 and 0 < sum(found["accepts"]) <= 1
    assert found["prompts"] == 2 and found["positions"] > 8
    vector = ",".join(f"{share:g}" for share in found["accepts"])
    assert f"--method sequoia --accepts {vector}" in result.stdout
    write = ("generate", "--model", zoo.big, "the cat", "-n", "6")
    drafted = run(*write, "--method", "sequoia", "--draft", zoo.small, "--accepts", str(out))
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == run(*write).stdout


def test_a_model_that_is_its_own_draft_accepts_the_first_child(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "accepts.json"
    call = ("bench", "acceptance", "--model", zoo.big, "--draft", zoo.big, "-t", "1")
    assert run(*call, *QUICK, "--out", str(out)).exit_code == 0
    first, *others = json.loads(out.read_text(encoding="utf-8"))["accepts"]
    assert first == pytest.approx(1, abs=1e-3) and sum(others) <= 1e-3


def test_without_a_draft_model_the_error_says_what_to_do(zoo: Zoo) -> None:
    assert "--draft" in failed(run("bench", "acceptance", "--model", zoo.small, *QUICK))
