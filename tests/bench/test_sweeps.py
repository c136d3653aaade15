"""`tinyspec bench sweeps`: figures that follow from the samples, a table, a chart, errors."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import failed, run, tiny_zoo
from tinyspec.bench.book import Sample
from tinyspec.bench.experiments import sweeps
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart

QUICK = ("--prompts", "2", "--tokens", "8", "--rounds", "1", "--quiet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_zoo(tmp_path_factory.mktemp("zoo")).big


@pytest.fixture(scope="module")
def result(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        dump_json(
            sweeps.measure_sweeps(
                sweeps.SweepSettings(model, (4, 1), prompts=2, tokens=8, rounds=2), quiet=True
            )
        )
    )
    return found


def test_figures_follow_from_the_samples(result: dict[str, Any]) -> None:
    assert json.loads(dump_json(sweeps.summarize_sweeps(result))) == result["figures"]
    samples = [Sample(*row) for row in result["samples"]]
    assert len(samples) == 4 * 2 * 2 == len({sample.key for sample in samples})
    of = result["figures"]
    assert list(of) == ["1", "4", "all"]
    assert of["1"]["tau"] == of["1"]["rows_per_token"] == 1  # a block of one is plain decoding
    for figures in of.values():
        assert figures["identical"] == figures["of"] == 4
        assert (
            figures["tau"] * figures["passes_per_token"] == pytest.approx(1) and figures["tau"] >= 1
        )
    assert (
        1 < of["4"]["rows_per_token"] <= of["all"]["rows_per_token"] <= 4.5
    )  # 8 + 7 + ... + 1 rows for 8 tokens


def test_a_row_tells_its_knobs(result: dict[str, Any]) -> None:
    ran = result["knobs"]
    assert list(ran) == [sweeps.PLAIN, "1", "4", "all"]
    assert (ran["4"]["block"], ran["4"]["init"], ran["all"]["form"]) == (4, "pad", "pj")


def test_the_sweeps_of_the_file_give_the_text(result: dict[str, Any]) -> None:
    traced = result["sweeps"]
    assert traced["form"] == "pj" and len(traced["trace"][0]["said"]) == 8
    assert [x for sweep in traced["trace"] for x in sweep["said"][: sweep["fixed"]]] == traced[
        "new"
    ]


def test_the_table_has_a_row_a_size_and_the_picture_both_panels(result: dict[str, Any]) -> None:
    (grid,) = sweeps.tabulate_sweeps(result)
    assert [row[0] for row in grid.rows] == ["1", "4", "all (PJ)"]
    assert all(len(row) == len(grid.header) for row in grid.rows)
    chart = sweeps.chart_sweeps(result)
    assert [len(panel.lines) for panel in chart.panels] == [1, 1]  # type: ignore[union-attr]
    ElementTree.fromstring(draw_chart(chart))


def test_the_command_writes_all_three(model: str, tmp_path: Path) -> None:
    out, drawn, page = tmp_path / "r" / "s.json", tmp_path / "s.svg", tmp_path / "s.md"
    call = [
        "bench",
        "sweeps",
        "--model",
        model,
        "--blocks",
        "2-3",
        "--no-whole",
        "--init",
        "prompt",
        *QUICK,
    ]
    made = run(*call, "--out", str(out), "--svg", str(drawn), "--markdown", str(page))
    assert made.exit_code == 0, made.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (
        found["command"].startswith("tinyspec ")
        and found["machine"]
        and list(found["figures"]) == ["2", "3"]
    )
    assert page.read_text(encoding="utf-8").startswith("`tinyspec ") and "<svg" in drawn.read_text(
        encoding="utf-8"
    )
    assert "fixed per sweep" in made.stdout


def test_wrong_input_is_one_line(model: str) -> None:
    call = ["bench", "sweeps", "--model", model, *QUICK]
    for wrong in ("1,x", "0", "4-2", "-"):
        assert "such as 1,2,4" in failed(run(*call, "--blocks", wrong))
    assert "nothing to measure" in failed(run(*call, "--blocks", ",", "--no-whole"))
    assert "fewer --tokens" in failed(run(*call, "--blocks", "2", "--tokens", "96"))
