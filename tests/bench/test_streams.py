"""`tinyspec bench streams`: figures that follow from the samples, held-out questions, errors."""

import json
from pathlib import Path
from typing import Any

import pytest

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec.bench.experiments import streams
from tinyspec.bench.harness import dump_json
from tinyspec.bench.settings import StreamSettings
from tinyspec.nonautoregressive import apar

SMALL = StreamSettings(methods=("apar", "apar:streams=1"), questions=3, tokens=6, rounds=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The storyteller with APAR's two tokens, of which it knows nothing."""
    folder = tmp_path_factory.mktemp("grown") / "model"
    tinyspec.load("storyteller").with_tokens((apar.FORK, apar.CHILD)).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def result(model: str) -> dict[str, Any]:
    given = StreamSettings(**{**vars(SMALL), "model": model})
    found: dict[str, Any] = json.loads(dump_json(streams.measure_streams(given, quiet=True)))
    return found


def test_every_arm_answers_every_question_in_every_round(result: dict[str, Any]) -> None:
    rows = [tuple(row[:3]) for row in result["samples"]]
    assert len(rows) == len(set(rows)) == 3 * 2 * 3
    assert list(result["figures"]) == ["plain", "apar", "apar:streams=1"]
    assert result["knobs"]["plain"]["forks"] == 0 and result["knobs"]["apar"]["forks"] == 64
    assert json.loads(dump_json(streams.summarize_streams(result))) == result["figures"]


def test_an_untuned_model_forks_nothing_and_writes_plain_answers(result: dict[str, Any]) -> None:
    figures = result["figures"]
    for of in figures.values():
        assert of["shared"] == 0 and of["tau"] == 1
        assert of["tokens"] == figures["plain"]["tokens"]
    assert figures["plain"]["time"]["median"] == figures["plain"]["rate"]["median"] == 1


def test_time_and_rate_are_against_plain_decoding_of_the_same_question() -> None:
    """Twice the tokens in half the passes and the same time: as fast, and twice the rate."""
    samples = [
        [0, 0, "plain", 2.0, 10, 10, False],
        [0, 0, "apar", 2.0, 20, 5, True],
        [1, 0, "plain", 9.0, 10, 10, False],
        [1, 0, "apar", 3.0, 10, 10, False],
    ]
    knobs = {"plain": {}, "apar": {}}
    made = {"samples": samples, "columns": streams.COLUMNS, "knobs": knobs}
    of = streams.summarize_streams(made)["apar"]
    assert of["time"]["median"] == 2 and of["rate"]["median"] == 2.5
    assert (of["tokens"], of["passes"], of["tau"], of["shared"]) == (15, 7.5, 2, 0.5)


def test_a_model_tuned_for_apar_is_asked_for_lists_that_no_recipe_has(model: str) -> None:
    asked = streams.choose_questions(tinyspec.load(model), 20)
    trained = {question for question, _ in apar.make_texts(2000, 0)}
    assert len(set(asked)) == 20 and all(a.startswith("Describe these animals") for a in asked)
    assert sum(question in trained for question in asked) == 0


def test_the_command_writes_result_and_page(model: str, tmp_path: Path) -> None:
    out, page = tmp_path / "s.json", tmp_path / "s.md"
    call = ["bench", "streams", "--model", model, "--methods", "apar", "--questions", "1"]
    files = ["--out", str(out), "--markdown", str(page)]
    made = run(*call, "--tokens", "4", "--quiet", *files)
    assert made.exit_code == 0, made.output
    assert list(json.loads(out.read_text(encoding="utf-8"))["figures"]) == ["plain", "apar"]
    assert "tokens per pass" in page.read_text(encoding="utf-8")
    assert "quality of the answers is not measured" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("methods", ["llma", "sot,apar", ",", "mpee"])
def test_what_is_not_one_technique_of_streams_is_one_line(methods: str, tmp_path: Path) -> None:
    said = failed(run("bench", "streams", "--model", tiny_zoo(tmp_path).big, "--methods", methods))
    assert "such as sot,sot:router=prompt" in said
