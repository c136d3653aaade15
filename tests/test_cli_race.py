"""Laws of `tinyspec race` and `tinyspec bench`: what they print, in a pipe and as JSON, and what they refuse."""

import json
from pathlib import Path

import pytest

from tests.zoo import Zoo, failed, run, tiny_zoo

STORYTELLER = Path(__file__).parent.parent / "models" / "storyteller" / "model.safetensors"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def test_race_reports_as_json(zoo: Zoo, tmp_path: Path) -> None:
    picture = tmp_path / "race.svg"
    result = run(
        "race", "--model", zoo.big, "-n", "24", "-p", "the cat", "--repeat", "2", "--json", "--svg", str(picture)
    )
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["identical"] is True
    assert said["ratio"] > 0
    assert said["tokens_per_call"] == said["lanes"][1]["tokens_per_call"] >= 1
    assert said["lanes"][0]["tokens_per_call"] == 1
    assert len(said["seconds"]) == 2
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_race_in_a_pipe_is_plain(zoo: Zoo) -> None:
    result = run(
        "race", "--model", zoo.big, "-n", "24", "-p", "the cat", "--method", "llma", "--method", "speculative_decoding"
    )
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "llma: identical: yes" in result.output
    assert "tokens per target call" in result.output
    assert "distinct 4-grams" in result.output


def test_a_sampled_race_expects_no_identity(zoo: Zoo) -> None:
    call = ["race", "--model", zoo.big, "-n", "16", "-p", "the cat", "--temperature", "0.8"]
    assert "not expected" in run(*call).output
    assert json.loads(run(*call, "--json").stdout)["identical"] is None


def test_race_needs_an_opponent(zoo: Zoo) -> None:
    assert "against itself" in failed(run("race", "--method", "autoregressive", "--model", zoo.big))
    assert "--gamma" in failed(run("race", "--gama", "3", "--model", zoo.big))
    assert "draft" in failed(run("race", "--model", zoo.small, "-p", "the cat"))


@pytest.mark.skipif(not STORYTELLER.exists(), reason="models/storyteller is not trained yet")
def test_the_bundled_race_is_lossless() -> None:
    said = json.loads(run("race", "--json", "-n", "32").stdout)
    assert said["identical"] is True
    assert said["tokens_per_call"] > 1


def test_bench_prints_figures_and_keeps_samples_for_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tinyspec.bench import core

    figures = {"ratio": 1.25, "samples": {"a": [1.0]}, "greedy": {"prompts": [{"x": 1}], "tokens_per_call": 2.5}}
    monkeypatch.setattr(core, "measure", lambda rounds, quiet: figures | {"rounds": rounds})
    out = tmp_path / "core.json"
    result = run("bench", "core", "--rounds", "3", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "ratio: 1.25" in result.stdout
    assert "  tokens per call: 2.5" in result.stdout
    assert "samples" not in result.stdout
    assert json.loads(out.read_text(encoding="utf-8")) == figures | {"rounds": 3}
    assert json.loads(run("bench", "core", "--json").stdout)["samples"] == {"a": [1.0]}
