"""Committed results carry command, commit, machine, date and raw samples, and say what their samples say."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tinyspec.bench import curve, parts, tally
from tinyspec.bench.book import Sample, dumps
from tinyspec.bench.harness import interleaved, ratio, save, spread
from tinyspec.bench.plan import Settings

RESULTS = sorted((Path(__file__).parent.parent.parent / "tutorials" / "results").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_result_says_where_it_came_from(path: Path) -> None:
    result = load(path)
    assert result["command"].startswith("tinyspec ")
    assert result["date"]
    assert result["machine"]["cpu"]
    assert result["commit"]


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name.startswith("race")], ids=lambda p: p.name)
def test_a_race_result_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    for key, figures in result.items():
        if not key.startswith("temperature"):
            continue
        for row in figures["prompts"]:
            samples = row["samples"]
            assert row["ratio"] == pytest.approx(median(samples["autoregressive"]) / median(samples[result["method"]]))
            assert len(samples["autoregressive"]) == result["rounds"]
        assert figures["ratio"] == pytest.approx(median(row["ratio"] for row in figures["prompts"]))
        if key == "temperature 0.0":
            assert figures["identical"] == len(figures["prompts"])


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name.startswith("plain")], ids=lambda p: p.name)
def test_a_plain_result_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    for dtype in ("float32", "bfloat16"):
        figures = result[dtype]
        samples = figures["samples"]
        assert figures["ratio"] == pytest.approx(median(samples["transformers"]) / median(samples["tinyspec"]))


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name.startswith("core")], ids=lambda p: p.name)
def test_a_kernel_result_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    samples = {name: median(taken) for name, taken in result["samples"].items()}
    assert result["verify_speedup"] == pytest.approx(samples["transformers_verify"] / samples["walk"])
    assert result["warp_against_transformers"] == pytest.approx(
        samples["warp_draw"] / samples["transformers_processors"]
    )


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name.startswith("peer")], ids=lambda p: p.name)
def test_a_peer_result_passes_by_its_own_rule(path: Path) -> None:
    result = load(path)
    wrong = [m for row in result["rows"] for m in row["mismatches"]]
    assert result["mismatches"] == len(wrong)
    assert result["passed"] == (all(m["gap"] < result["gap"] for m in wrong) and len(wrong) <= 0.01 * result["tokens"])
    assert result["passed"]


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name.startswith("equality")], ids=lambda p: p.name)
def test_an_equality_result_passes_by_its_rows(path: Path) -> None:
    result = load(path)
    lines = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    arms = [*result["methods"], "rehearsed"]
    assert len({(line["question"], line["arm"]) for line in lines}) == len(lines) == len(arms) * result["questions"]
    assert all(line["calls"] + line["accepted"] >= result["tokens_each"] for line in lines)
    assert result["passed"] == all(line["same"] == result["tokens_each"] for line in lines)
    assert result["passed"]


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith(("bench", "speculative-"))], ids=lambda p: p.name
)
def test_the_figures_of_a_run_follow_from_its_samples(path: Path) -> None:
    result = load(path)
    samples = [Sample(*row) for row in result["samples"]]
    assert len({sample.key for sample in samples}) == len(samples)
    labels = [arm.label for arm in Settings.from_dict(result["settings"]).arms]
    assert json.loads(dumps(tally.tally(samples, labels))) == result["figures"]
    for sample in samples:
        assert sample.tokens == result["prompts"][sample.job][2]
        if sample.accepted is not None:
            assert sample.tokens == sample.accepted + sample.calls - (sample.silent or 0)


@pytest.mark.parametrize("path", [p for p in RESULTS if p.name.startswith("parts")], ids=lambda p: p.name)
def test_a_call_taken_apart_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    for cached, of in result["figures"].items():
        found = parts.apart(result["samples"][cached])
        assert {k: {name: of["milliseconds"][k][name] for name in each} for k, each in found.items()} == found
        tops = curve.ceilings({**result["samples"][cached], "curves": {}}, median)["bandwidth"]
        assert of["reads"]["fastest"] >= max(tops.values())


def test_arms_are_interleaved_and_the_order_turns_round() -> None:
    seen: list[str] = []
    interleaved({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, warm=1)
    assert "".join(seen) == "ababba"


def test_warm_up_runs_are_not_counted() -> None:
    assert len(interleaved({"a": lambda: None}, rounds=3, warm=5)["a"]) == 3


def test_a_ratio_is_of_medians_and_a_slow_down_is_below_one() -> None:
    assert ratio({"slow": [1.0, 1.0, 99.0], "fast": [2.0, 2.0, 2.0]}, "slow", "fast") == 0.5
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 4.0)


def test_a_result_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "r.json", {"x": 1})
    assert load(tmp_path / "deep" / "r.json") == {"x": 1}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_the_page_of_results_equals_what_the_generator_writes() -> None:
    from tinyspec.bench import summary

    folder = RESULTS[0].parent
    assert (folder / "README.md").read_text(encoding="utf-8") == summary.text(folder)


def test_a_chapter_on_several_tasks_names_who_wins_on_one_of_them_and_counts_the_slow_downs() -> None:
    from tinyspec.bench import summary

    speeds = {"autoregressive": (1.0, 1.0), "even": (1.3, 0.9), "once": (1.1, 0.5), "never": (0.9, 0.8)}
    result: Any = {
        "settings": {"model": "m", "rounds": 2},
        "sittings": [{"command": "begin"}, {"command": "go on"}],
        "figures": {
            "tasks": {
                task: {arm: {"speedup": {"median": each[at]}} for arm, each in speeds.items()}
                for at, task in enumerate(("qa", "rag"))
            },
            "overall": {
                arm: {"mean": sum(each) / 2, "tau": each[0], "jobs": 4, "identical": 4 - (arm == "never")}
                for arm, each in speeds.items()
            },
        },
    }
    said = summary.chapter(result, "page.md")
    assert "(`begin`, then `go on`)" in said[0]
    assert "3 techniques on 4 requests (qa, rag), greedy, 2 round(s)" in said[0]
    assert "Faster than plain decoding in the mean of the groups: `even` 1.10x; the other 2 are slow-downs" in said[0]
    assert "on every request for 2 of 3" in said[0]
    assert [line.split(" | ")[0] for line in said if line.startswith("| ") and "QA" not in line] == ["| even", "| once"]
    assert "| once | 1.10 | 0.50 slower | 0.80 slower |" in said
    alone = {task: of for task, of in result["figures"]["tasks"].items() if task == "rag"}
    result["figures"]["tasks"] = alone
    assert len(summary.chapter(result, "page.md")) == 1
