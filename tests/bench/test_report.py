"""Tables and pictures show the figures, and a slow-down is called a slow-down (B43)."""

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench.fakes import Hand, arms, jobs, settings
from tests.bench.test_curve import measured
from tests.lm.small import LLAMA
from tinyspec.bench import curve, harness, measure, plot, report, tally
from tinyspec.bench.book import SampleBook
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plan import PLAIN
from tinyspec.technique import load_techniques

LABELS = [PLAIN, "llma", "transformers"]
STAMP = {
    "command": "tinyspec bench --methods llma",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {
        "cpu": "a <CPU> & more",
        "cores": 2,
        "threads": 2,
        "units": ["avx2"],
        "torch": "2.11",
    },
}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    hand = Hand()
    book = SampleBook(replace(settings(), tokens=8), None, STAMP)
    book.check_prompts(jobs())
    book.references = {
        job.key: [1] * job.tokens for job in jobs()
    }  # text that loops, and not what the arms write
    measure.run_turns(book, jobs(), arms(hand), hand)
    book.skipped = ["medusa: needs heads"]
    book.rest = {
        "figures": tally.summarize_samples(book.samples, LABELS),
        "texts": tally.describe_texts(book.references, ()),
        "curve_figures": curve.summarize_curve(measured(), LLAMA, 4, 5),
        "memory": {"llma": {"peak": 3 * 2**20, "device": 0}},
    }
    made: dict[str, Any] = json.loads(dump_json(book.as_dict()))
    return made


def test_a_commit_is_never_that_of_a_project_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where tinyspec is installed below somebody's repository."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    installed, own = tmp_path / "harness.py", tmp_path / "own.py"
    for file in (installed, own):
        file.write_text("")
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    for call in (("add", "own.py"), (*me, "commit", "--quiet", "-m", "theirs")):
        subprocess.run(["git", *call], cwd=tmp_path, check=True)
    monkeypatch.setattr(harness, "__file__", str(own))
    assert harness.find_commit() is not None
    monkeypatch.setattr(harness, "__file__", str(installed))
    assert harness.find_commit() is None


def test_every_arm_and_task_stands_in_the_tables(result: dict[str, Any]) -> None:
    grids = list(report.list_tables(result))
    assert [row[0] for row in grids[0].rows] == LABELS
    assert grids[0].header == ["", "QA", "edits", "mean", "least"]
    for grid in grids:
        assert all(len(row) == len(grid.header) for row in grid.rows)
    assert any("Times as fast as transformers" in grid.title for grid in grids)


def test_a_slow_down_is_printed_as_one(result: dict[str, Any]) -> None:
    first = next(report.list_tables(result))
    for arm, row in zip(LABELS, first.rows, strict=True):
        for task, cell in zip(("qa", "edits"), row[1:3], strict=True):
            five = result["figures"]["tasks"][task][arm]["speedup"]
            assert ("slower" in cell) == (round(five["median"], 2) < 1)
            assert cell.startswith(report.format_speedup(five["median"]))
    assert "slower" in first.rows[1][1]


def test_a_ratio_is_at_least_one_or_a_slow_down() -> None:
    for hundredths in range(1, 300):
        text = report.format_speedup(hundredths / 100)
        times = float(text.removesuffix("x slower"))
        assert times >= 1 if hundredths >= 100 else times > 1
        assert times == pytest.approx(
            max(hundredths, 1e4 / hundredths if hundredths < 100 else 0) / 100, rel=0.05
        )
        assert text.endswith("x slower") == (hundredths < 100)


@pytest.mark.parametrize("middle", [0.5, 0.95, 1.0, 1.3])
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.5), (0.4, 1.5), (1.3, 1.5)])
def test_a_ratio_and_its_quartiles_have_one_scale(low: float, middle: float, high: float) -> None:
    text = report.format_quartiles({"q1": low, "median": middle, "q3": high})
    assert text.count("slower") == (middle < 1)
    first, second = map(float, re.findall(r"[\d.]+", text.partition("(")[2]))
    ends = (low, high) if middle >= 1 else (1 / high, 1 / low)
    assert (first, second) == pytest.approx(ends, rel=0.05)


def test_the_terminal_and_the_page_say_the_same(result: dict[str, Any]) -> None:
    out = Console(width=240, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    out.print(report.render_result(result))
    text, page = out.export_text(), report.write_markdown(result)
    assert page.startswith("`tinyspec bench --methods llma`")
    for grid in report.list_tables(result):
        for row in grid.rows:
            assert "| " + " | ".join(row) + " |" in page
            assert all(cell in text for cell in row)
    for line in report.list_notes(result):
        assert line in page
        assert line in text


def test_notes_tell_what_was_left_out_loops_and_mixed_commits(result: dict[str, Any]) -> None:
    notes = "\n".join(report.list_notes(result))
    assert "left out: medusa: needs heads" in notes
    assert "it loops" in notes
    mixed = {**result, "sittings": [{**STAMP, "commit": "abc"}, {**STAMP, "commit": "def"}]}
    assert any("several commits: abc, def" in note for note in report.list_notes(mixed))


def test_a_page_begins_with_every_command_that_took_samples(result: dict[str, Any]) -> None:
    later = {**STAMP, "command": "tinyspec bench --resume bench.json"}
    page = report.write_markdown({**result, "sittings": [STAMP, later, later]})
    assert page.startswith(f"`{STAMP['command']}`\n\n`{later['command']}`\n\n**")


def test_knobs_that_differ_from_the_cards_defaults_are_printed_once(
    result: dict[str, Any],
) -> None:
    ran = {
        PLAIN: {},
        "speculative_decoding": {"gamma": 5, "lenience": 1.0},
        "spectr:gamma=2": {"gamma": 2, "paths": 7},
        "llma:k=4": load_techniques()["llma"].settings({"k": 4}),
        "transformers:lookup=3": {"lookup": 3, "ngram": 2},
    }
    notes = report.list_notes({**result, "knobs": ran})
    told = (
        "knobs that differ from the card's default: "
        "speculative_decoding gamma=5; spectr:gamma=2 paths=7"
    )
    assert [note for note in notes if note.startswith("knobs")] == [told]
    assert told in report.write_markdown({**result, "knobs": ran})


def test_a_result_without_a_record_of_its_knobs_says_nothing_of_them(
    result: dict[str, Any],
) -> None:
    assert "knobs" not in result
    assert "knobs" not in report.write_markdown(result)


def test_charts_are_whole_svgs_that_say_what_they_show(result: dict[str, Any]) -> None:
    charts = report.make_charts(result)
    assert list(charts) == ["speedups", "curve"]
    for chart in charts.values():
        text = plot.draw_chart(chart)
        assert text == plot.draw_chart(chart), "the same chart, the same bytes"
        root = ElementTree.fromstring(text)
        assert root.find("{http://www.w3.org/2000/svg}title").text == chart.title  # type: ignore[union-attr]
        assert root.find("{http://www.w3.org/2000/svg}desc").text == chart.summary  # type: ignore[union-attr]
        assert "prefers-color-scheme:dark" in text
        assert not any(word in text for word in ("<script", "NaN", "<metadata"))


def test_a_chart_shows_medians_and_colours_slow_downs_and_peers(result: dict[str, Any]) -> None:
    chart = report.make_charts(result)["speedups"]
    panel = next(panel for panel in chart.panels if panel.title == "qa")
    assert isinstance(panel, plot.Bars)
    median = result["figures"]["tasks"]["qa"]["llma"]["speedup"]["median"]
    assert panel.bars["llma"] == median
    assert f">{median:.2f}</text>" in plot.draw_chart(chart)
    assert {plot.SLOWER, plot.PEER} <= {*panel.colours.values()} | {
        colour
        for other in chart.panels
        for colour in other.colours.values()  # type: ignore[union-attr]
    }


def test_a_run_without_a_curve_has_no_chart_of_one(result: dict[str, Any]) -> None:
    bare = {name: value for name, value in result.items() if name != "curve_figures"}
    assert list(report.make_charts(bare)) == ["speedups"]
    assert len(list(report.list_tables(bare))) == len(list(report.list_tables(result))) - 1
