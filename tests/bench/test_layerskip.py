"""Exits as drafts: figures that follow from the ledger, a table a model, one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import failed, run, tiny_zoo
from tinyspec.bench.experiments import layerskip
from tinyspec.bench.harness import dump_json
from tinyspec.bench.settings import LayerSkipSettings

QUICK = ("--prompts", "2", "--tokens", "8", "--quiet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_zoo(tmp_path_factory.mktemp("zoo")).big


@pytest.fixture(scope="module")
def result(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        dump_json(
            layerskip.measure_layerskip(
                LayerSkipSettings((model,), (1, 2), gamma=3, prompts=3, tokens=9), quiet=True
            )
        )
    )
    return found


def test_the_last_exit_is_the_model_and_costs_what_plain_decoding_costs(
    model: str, result: dict[str, Any]
) -> None:
    of = result["models"][model]
    assert of["n_layers"] == 2
    last = of["exits"]["2"]
    assert last["agreement"] == last["kept"] == 1 and last["overlap"] == pytest.approx(1)
    assert (
        last["layers_per_token"] == 2 and last["tokens_per_round"] == 3
    )  # 9 tokens in rounds of 4, 4 and 1
    assert last["bound"] == pytest.approx(1)


def test_an_early_exit_is_less_sure_and_its_layers_add_up(
    model: str, result: dict[str, Any]
) -> None:
    early = result["models"][model]["exits"]["1"]
    assert 0 <= early["kept"] < 1 and 0 < early["overlap"] < 1 and 0 <= early["agreement"] < 1
    assert early["layers_per_token"] > 2, "what is rejected was run"
    assert early["bound"] == pytest.approx(2 / early["in_a_row_per_token"])


def test_a_row_tells_its_knobs(model: str, result: dict[str, Any]) -> None:
    for exit, of in result["models"][model]["exits"].items():
        assert (of["knobs"]["exit"], of["knobs"]["gamma"]) == (int(exit), 3)


def test_the_same_figures_come_again(model: str, result: dict[str, Any]) -> None:
    again = layerskip.measure_layerskip(
        LayerSkipSettings((model,), (1, 2), gamma=3, prompts=3, tokens=9), quiet=True
    )
    assert again["models"] == result["models"], "nothing is timed"


def test_the_overlap_predicts_the_share_of_draft_tokens_accepted(model: str) -> None:
    made = layerskip.measure_layerskip(
        LayerSkipSettings((model,), (1,), gamma=1, temperature=1.0, prompts=20, tokens=40),
        quiet=True,
    )
    early = made["models"][model]["exits"]["1"]
    assert early["kept"] == pytest.approx(early["overlap"], abs=0.15)


def test_the_command_writes_its_result_and_a_table_a_model(model: str, tmp_path: Path) -> None:
    out, page = tmp_path / "r" / "l.json", tmp_path / "l.md"
    call = ["bench", "layerskip", "--models", f"{model},{model}", "--exits", "1-2", *QUICK]
    made = run(*call, "--out", str(out), "--markdown", str(page))
    assert made.exit_code == 0, made.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found["models"][model]["exits"]) == ["1", "2"] and found["machine"]
    assert (
        "agreement" in page.read_text(encoding="utf-8") and "draft tokens accepted" in made.stdout
    )


def test_wrong_input_is_one_line(model: str) -> None:
    call = ["bench", "layerskip", "--models", model, *QUICK]
    assert "write numbers of layers" in failed(run(*call, "--exits", "2-x"))
    assert "nothing to measure" in failed(run(*call, "--exits", ","))
    assert "exit 3 is out of range" in failed(run(*call, "--exits", "3"))
    assert "fewer --tokens" in failed(run(*call, "--exits", "1", "--tokens", "96"))
