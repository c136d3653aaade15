"""Committed results have command, commit, machine, date and samples; figures follow from them."""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from tinyspec.bench import answers, curve, plot, report, summary, tally
from tinyspec.bench.book import Sample
from tinyspec.bench.experiments import parts
from tinyspec.bench.harness import (
    describe_machine,
    dump_json,
    find_quartiles,
    ratio_of_medians,
    read_unfinished,
    record_knobs,
    save_result,
    time_interleaved,
)
from tinyspec.bench.plan import BenchSettings
from tinyspec.errors import TinyspecError

ROOT = Path(__file__).parent.parent.parent
RESULTS = sorted((ROOT / "tutorials" / "results").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_result_has_command_date_machine_and_commit(path: Path) -> None:
    result = load(path)
    assert result["command"].startswith("tinyspec ")
    assert result["date"]
    assert result["machine"]["cpu"]
    assert result["commit"]


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith("race")], ids=lambda p: p.name
)
def test_a_race_result_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    for key, figures in result.items():
        if not key.startswith("temperature"):
            continue
        for row in figures["prompts"]:
            samples = row["samples"]
            assert row["ratio"] == pytest.approx(
                median(samples["autoregressive"]) / median(samples[result["method"]])
            )
            assert len(samples["autoregressive"]) == result["rounds"]
        assert figures["ratio"] == pytest.approx(median(row["ratio"] for row in figures["prompts"]))
        if key == "temperature 0.0":
            assert figures["identical"] == len(figures["prompts"])


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith("plain")], ids=lambda p: p.name
)
def test_a_plain_result_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    for dtype in ("float32", "bfloat16"):
        figures = result[dtype]
        samples = figures["samples"]
        assert figures["ratio"] == pytest.approx(
            median(samples["transformers"]) / median(samples["tinyspec"])
        )


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith("core")], ids=lambda p: p.name
)
def test_a_kernel_result_follows_from_its_samples(path: Path) -> None:
    result = load(path)
    samples = {name: median(taken) for name, taken in result["samples"].items()}
    assert result["verify_speedup"] == pytest.approx(
        samples["transformers_verify"] / samples["walk"]
    )
    assert result["warp_against_transformers"] == pytest.approx(
        samples["warp_draw"] / samples["transformers_processors"]
    )


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith("peer")], ids=lambda p: p.name
)
def test_a_peer_result_passes_by_its_own_rule(path: Path) -> None:
    result = load(path)
    wrong = [m for row in result["rows"] for m in row["mismatches"]]
    assert result["mismatches"] == len(wrong)
    assert result["passed"] == (
        all(m["gap"] < result["gap"] for m in wrong) and len(wrong) <= 0.01 * result["tokens"]
    )
    assert result["passed"]


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith("equality")], ids=lambda p: p.name
)
def test_an_equality_result_passes_by_its_rows(path: Path) -> None:
    result = load(path)
    lines = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    arms = [*result["methods"], "rehearsed"]
    assert (
        len({(line["question"], line["arm"]) for line in lines})
        == len(lines)
        == len(arms) * result["questions"]
    )
    assert all(line["calls"] + line["accepted"] >= result["tokens_each"] for line in lines)
    assert result["passed"] == all(line["same"] == result["tokens_each"] for line in lines)
    assert result["passed"]


@pytest.mark.parametrize(
    "path",
    [p for p in RESULTS if p.name.startswith(("bench", "speculative-"))],
    ids=lambda p: p.name,
)
def test_the_figures_of_a_run_follow_from_its_samples(path: Path) -> None:
    result = load(path)
    samples = [Sample(*row) for row in result["samples"]]
    assert len({sample.key for sample in samples}) == len(samples)
    labels = [arm.label for arm in BenchSettings.from_dict(result["settings"]).arms]
    assert json.loads(dump_json(tally.summarize_samples(samples, labels))) == result["figures"]
    for sample in samples:
        assert sample.tokens == result["prompts"][sample.job][2]
        if sample.accepted is not None:
            assert sample.tokens == sample.accepted + sample.calls - (sample.silent or 0)


@pytest.mark.parametrize(
    "path", [p for p in RESULTS if p.name.startswith("parts")], ids=lambda p: p.name
)
def test_the_parts_of_a_forward_pass_follow_from_their_samples(path: Path) -> None:
    result = load(path)
    for cached, of in result["figures"].items():
        found = parts.split_into_parts(result["samples"][cached])
        assert {
            k: {name: of["milliseconds"][k][name] for name in each} for k, each in found.items()
        } == found
        tops = curve.find_ceilings({**result["samples"][cached], "curves": {}}, median)["bandwidth"]
        assert of["reads"]["fastest"] >= max(tops.values())


def test_arms_are_interleaved_and_the_order_turns_round() -> None:
    seen: list[str] = []
    time_interleaved(
        {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=2, warm=1
    )
    assert "".join(seen) == "ababba"


def test_warm_up_runs_are_not_counted() -> None:
    assert len(time_interleaved({"a": lambda: None}, rounds=3, warm=5)["a"]) == 3


def test_a_ratio_is_of_medians_and_a_slow_down_is_below_one() -> None:
    assert (
        ratio_of_medians({"slow": [1.0, 1.0, 99.0], "fast": [2.0, 2.0, 2.0]}, "slow", "fast") == 0.5
    )
    assert find_quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 4.0)


def test_a_result_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    save_result(tmp_path / "deep" / "r.json", {"x": 1})
    assert load(tmp_path / "deep" / "r.json") == {"x": 1}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_a_recorded_file_has_a_name_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / "texts.store").touch()
    given = {"datastore": str(tmp_path / "texts.store"), "matches": 4}
    assert record_knobs(given) == {"datastore": "texts.store", "matches": 4}


PAGES = sorted(p for p in RESULTS[0].parent.glob("*.md") if p.name not in summary.BY_HAND)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return summary.render_pages(RESULTS[0].parent)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_a_page_equals_what_its_result_writes(path: Path, pages: dict[str, str]) -> None:
    """`python -m tinyspec.bench.summary tutorials/results` writes them all."""
    assert path.read_text(encoding="utf-8") == pages[path.name]


WORDS = ("}title", "}desc", "}text")
CHARTS = summary.list_charts(RESULTS[0].parent)


@pytest.mark.parametrize("file", CHARTS)
@pytest.mark.slow
def test_a_committed_chart_shows_its_result(file: str) -> None:
    """All words and numbers; where exactly they stand may depend on the version of matplotlib."""
    words = [
        sorted(
            "".join(node.itertext())
            for node in ElementTree.fromstring(text).iter()
            if node.tag.endswith(WORDS)
        )
        for text in (
            (RESULTS[0].parent / file).read_text(encoding="utf-8"),
            plot.draw_chart(CHARTS[file]),
        )
    ]
    assert words[0] == words[1] and words[0]


def test_the_readme_shows_the_headline() -> None:
    """README.md has the lines of `summary.headline_table`, anywhere."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert summary.headline_table(RESULTS[0].parent) in readme


def test_every_section_answers_before_its_table_and_ends_in_commands(pages: dict[str, str]) -> None:
    _, *sections = pages["README.md"].split("\n## ")
    assert [section.split("\n")[0] for section in sections] == summary.list_headings()
    for section in sections:
        _, answer, *blocks = section.split("\n\n")
        assert answer.endswith(".") and "|" not in answer and "tinyspec bench" not in answer
        assert blocks[0].startswith(("|", "###"))
        assert blocks[-1].rstrip().endswith("```")


def test_links_of_the_page_lead_somewhere(pages: dict[str, str]) -> None:
    page = pages["README.md"]
    anchors = {
        summary.make_anchor(line.lstrip("# ")) for line in page.splitlines() if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", page):
        if target.startswith("#"):
            assert target[1:] in anchors
        else:
            assert (RESULTS[0].parent / target).exists(), target


def test_no_page_shows_a_ratio_below_one_as_a_speed_up(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        assert not re.findall(r"0\.\d+x|0\.\d+ slower|a slow-down\)", page), name


def test_no_page_judges_a_figure_against_a_target(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        assert not re.findall(r"\baim|\breached\b|\bmissed\b|\bgoal", page), name


def test_the_headline_counts_a_question_once_and_only_if_every_arm_wrote_it_whole() -> None:
    result = {"columns": ["question", "arm", "same"], "tokens_each": 8}
    rows = [[1, "a", 8], [1, "b", 8], [2, "a", 8], [2, "b", 7], [3, "a", 0], [3, "b", 7]]
    assert answers.count_identical({**result, "rows": rows}) == 1
    assert answers.count_identical({**result, "rows": rows}, "a") == 2


def chapter(**tasks: tuple[float, ...]) -> dict[str, Any]:
    """Return a chapter's result: speed-ups of three techniques; the last changes a text."""
    names = ("even", "once", "never")
    speeds = {
        "autoregressive": [1.0] * len(tasks),
        **{n: [of[i] for of in tasks.values()] for i, n in enumerate(names)},
    }
    return {
        "settings": {"model": "m", "rounds": 2},
        "sittings": [{"command": "begin"}, {"command": "go on"}],
        "figures": {
            "tasks": {
                task: {
                    arm: {"speedup": {"median": each[at], "min": each[at]}}
                    for arm, each in speeds.items()
                }
                for at, task in enumerate(tasks)
            },
            "overall": {
                arm: {
                    "mean": fmean(each),
                    "tau": each[0],
                    "jobs": 4,
                    "identical": 4 - (arm == "never"),
                }
                for arm, each in speeds.items()
            },
        },
    }


def test_a_chapter_shows_who_wins_on_some_task_and_counts_the_slow_downs() -> None:
    table, prose, commands = answers.describe_chapter(
        chapter(qa=(1.3, 1.1, 0.9), rag=(0.9, 0.5, 0.8)), "page.md"
    )
    assert table.splitlines()[0] == "|  | QA | RAG | mean | tokens per forward pass |"
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| even", "| once"]
    assert "| once | 1.10 | 2.0x slower | 1.25x slower | 1.10 |" in table
    assert "3 techniques on 4 requests (qa, rag), greedy, 2 rounds" in prose
    assert "1 are faster in the mean of the groups, the other 2 are slow-downs" in prose
    assert "on every request for 2 of 3" in prose
    assert commands.splitlines()[3:5] == ["begin", "go on"]
    both = chapter(qa=(1.3, 1.1, 0.9))
    for rows in (both["figures"]["overall"], both["figures"]["tasks"]["qa"]):
        rows["once:price=0.25"] = rows.pop("never")
    assert "2 techniques in 3 rows on 4 requests" in answers.describe_chapter(both, "page.md")[1]


def test_a_page_names_the_rows_with_an_addition_of_ours() -> None:
    """A result that records its knobs is believed; an older one had every addition on."""
    labels = ["auto", "rest", "rest:price=0.25"]
    recorded = {"knobs": {"rest": {"price": 0.0}, "rest:price=0.25": {"price": 0.25}}}
    (new,) = report.describe_additions(recorded, labels)
    (old,) = report.describe_additions({}, labels)
    assert "`rest:price=0.25` (price 0.25)" in new and "`rest` (" not in new and "auto" not in new
    assert "`rest` (price 0.25)" in old and "The paper's rule is price 0." in old
    assert report.describe_additions({}, ["auto", "rest:price=0"]) == []


def test_a_chapter_names_the_knobs_that_have_no_default_value() -> None:
    result = {**chapter(qa=(1.3, 1.1, 0.9)), "knobs": {"spectr": {"gamma": 4}}}
    _, prose, _ = answers.describe_chapter(result, "page.md")
    assert "for 2 of 3. Knobs that differ from the card's default: spectr gamma=4. All of" in prose


def test_a_chapter_on_one_task_has_no_mean() -> None:
    table = answers.describe_chapter(chapter(rag=(0.9, 1.5, 0.8)), "page.md")[0]
    assert table.splitlines()[0] == "|  | RAG | tokens per forward pass |"


def test_a_pipe_is_written_in_place_and_a_link_stays(tmp_path: Path) -> None:
    """Moved onto /dev/null, a new file would take the place of the device."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name, target in (("to pipe", "pipe"), ("to file", "file")):
        (tmp_path / name).symlink_to(target)
        save_result(tmp_path / name, {"a": 1})
        assert (tmp_path / name).is_symlink()
    assert json.loads(os.read(reader, 999)) == load(tmp_path / "file") == {"a": 1}
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "file",
        "pipe",
        "to file",
        "to pipe",
    ]


def test_a_timed_result_goes_on_only_on_its_machine(tmp_path: Path) -> None:
    out, there = tmp_path / "r.json", {**describe_machine(), "threads": 77}

    def resume(is_timed: bool = True) -> list[int]:
        return read_unfinished(out, True, "x", {}, lambda of: of["rows"], [], is_timed)

    save_result(out, {"machine": describe_machine(), "settings": {}, "rows": [1]})
    assert resume() == [1]
    save_result(out, {"machine": there, "settings": {}, "rows": [1]})
    with pytest.raises(TinyspecError, match=r"another machine \(threads 77, now \d+\): name"):
        resume()
    assert resume(is_timed=False) == [1]
