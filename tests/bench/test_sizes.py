"""`tinyspec bench sizes`: figures that follow from the samples, a table, a chart, errors."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import tinyspec
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench.book import Sample
from tinyspec.bench.experiments import sizes
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart
from tinyspec.speculative.drafting.speculative_decoding import walltime_speedup

QUICK = ("--prompts", "2", "--tokens", "8", "--rounds", "2", "--dtype", "float32", "--quiet")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def result(zoo: Zoo) -> dict[str, Any]:
    made = sizes.measure_sizes(
        sizes.SizeSettings(zoo.big, (zoo.small, zoo.big), (1, 3), 2, 8, 2, 0.0, "float32"),
        quiet=True,
    )
    found: dict[str, Any] = json.loads(dump_json(made))
    return found


def test_alpha_is_that_of_paired_distributions_and_one_where_the_draft_is_the_target(
    result: dict[str, Any],
) -> None:
    drafts = result["drafts"]
    assert drafts["big"]["alpha"] == pytest.approx(1) and drafts["big"]["alpha_1"] == pytest.approx(
        1
    )
    assert 0 <= drafts["small"]["alpha"] <= 1 and 0 < drafts["small"]["alpha_1"] < 1
    assert drafts["small"]["layers"] == 1 and drafts["small"]["weights"] < drafts["big"]["weights"]
    assert all(row["c"] > 0 for row in drafts.values())


def test_figures_follow_from_samples_and_rows(result: dict[str, Any]) -> None:
    assert json.loads(dump_json(sizes.summarize_sizes(result))) == result["figures"]
    samples = [Sample(*row) for row in result["samples"]]
    assert len(samples) == (1 + 2 * 2) * 2 * 2 == len({sample.key for sample in samples})
    own = [s for s in samples if s.arm == "big:gamma=3"]
    of = result["figures"]["big"]["3"]
    assert (
        of["tau"] == sum(s.tokens for s in own) / sum(s.calls for s in own) == 4
    )  # 8 tokens in rounds of 3 + 1
    assert of["forecast"] == pytest.approx(walltime_speedup(1.0, 3, result["drafts"]["big"]["c"]))
    assert all(
        figures["identical"] == 4 for of in result["figures"].values() for figures in of.values()
    )


def test_a_row_tells_its_knobs(result: dict[str, Any]) -> None:
    assert result["knobs"]["big:gamma=3"] == {"gamma": 3, "lenience": 1.0}
    assert set(result["knobs"]) == {row[3] for row in result["samples"]}


def test_the_table_has_a_row_a_draft_and_the_picture_both_panels(result: dict[str, Any]) -> None:
    (grid,) = sizes.tabulate_sizes(result)
    assert [row[0] for row in grid.rows] == ["small", "big"]  # by size
    assert all(len(row) == len(grid.header) for row in grid.rows)
    chart = sizes.chart_sizes(result)
    assert [len(panel.lines) for panel in chart.panels] == [2, 2]  # type: ignore[union-attr]
    ElementTree.fromstring(draw_chart(chart))


def test_the_command_writes_all_three(zoo: Zoo, tmp_path: Path) -> None:
    out, drawn, page = tmp_path / "r" / "s.json", tmp_path / "s.svg", tmp_path / "s.md"
    call = ["bench", "sizes", "--model", zoo.big, "--drafts", zoo.small, "--gammas", "2", *QUICK]
    made = run(*call, "--out", str(out), "--svg", str(drawn), "--markdown", str(page), "-t", "0.7")
    assert made.exit_code == 0, made.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (
        found["command"].startswith("tinyspec ")
        and found["machine"]
        and found["figures"]["small"]["2"]["tau"] >= 1
    )
    assert page.read_text(encoding="utf-8").startswith("`tinyspec ") and "<svg" in drawn.read_text(
        encoding="utf-8"
    )
    assert "best gamma" in made.stdout


def test_wrong_input_is_one_line(zoo: Zoo, tmp_path: Path) -> None:
    call = ["bench", "sizes", "--model", zoo.big, *QUICK]
    assert "another vocabulary" in failed(run(*call, "--drafts", zoo.other))
    assert "--drafts A,B" in failed(run(*call, "--drafts", ","))
    assert "such as 1,2,4" in failed(run(*call, "--drafts", zoo.small, "--gammas", "1,x"))
    tinyspec.load(zoo.small).save(tmp_path / "small")
    assert "same name" in failed(run(*call, "--drafts", f"{zoo.small},{tmp_path / 'small'}"))
    assert "fewer --tokens" in failed(run(*call, "--drafts", zoo.small, "--tokens", "96"))
