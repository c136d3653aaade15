"""Tables of a run with peers: who is how fast, what sums it up, what a forward pass costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyspec.bench.answers import (
    LOOKUP,
    describe_ceilings,
    describe_run_with_peers,
    list_ratios,
    list_unmeasured,
    mean_over_tasks,
    tabulate_copying_tasks,
    tabulate_pass_costs,
    tokens_per_pass,
)
from tinyspec.bench.book import Sample
from tinyspec.bench.tasks import COPYING, SPEC_BENCH

RESULTS = Path(__file__).parents[2] / "tutorials" / "results"
GROUPS = (*SPEC_BENCH, "edits")


def sample(task: str, prompt: str, round: int, tokens: int, calls: int) -> Sample:
    """A request of `auto`, of which only tokens and passes after the prompt are known."""
    return Sample(task, prompt, 0, "auto", round, 1.0, 1.0, tokens, tokens, calls, *[0] * 7)


def result(auto: float, plain: float = 4.0, over: float = 1.2) -> dict[str, Any]:
    """A run in which every group went alike, but for edits, which went twice as well."""
    speeds = {"autoregressive": 1.0, "auto": auto, "transformers": 1 / plain}
    each = {task: 1 + (task == "edits") for task in GROUPS}
    return {
        "settings": {"model": "m", "dtype": "bfloat16", "tokens": 8, "rounds": 1},
        "sittings": [{"command": "run"}, {"command": "go on"}],
        "samples": [list(sample(task, "0", 0, 30, 10)) for task in COPYING],
        "figures": {
            "tasks": {
                task: {arm: {"speedup": {"median": s * (each[task] if arm == "auto" else 1)}}
                       for arm, s in speeds.items()}
                for task in GROUPS
            },
            "overall": {
                arm: {"mean": s, "tokens_per_second": 10 * s, "jobs": 7,
                "identical": None if arm == "transformers" else 7}
                for arm, s in speeds.items()
            },
            "against": {
                "transformers": {"autoregressive": dict.fromkeys(GROUPS, plain),
                "auto": dict.fromkeys(GROUPS, plain * auto)},
                "llama.cpp": {"autoregressive": dict.fromkeys(GROUPS, 0.8),
                "auto": dict.fromkeys(GROUPS, 0.8 * auto)},
                LOOKUP: {"auto": {task: 3.5 - (task == "rag") for task in GROUPS}},
            },
        },
        "curve_figures": {
            "ceilings": {"bandwidth": {"us": 2e9, "them": 3e9}, "peak": {"us": 5e9}},
            "curves": {
                "tinyspec": {"rows": {
                    k: {"against_one": 1.1 if k == "8" else 1.0, "over": over,
                    "usually": over - 0.2, "milliseconds": 9.0}
                    for k in ("1", "8", "32")
                }}
            },
        },
    }  # fmt: skip


def test_the_mean_of_spec_bench_leaves_the_other_tasks_out() -> None:
    assert mean_over_tasks(dict.fromkeys(SPEC_BENCH, 1.0) | {"edits": 100.0}) == 1.0


def test_ratios_sum_up_a_run_over_plain_decoding_and_its_peers() -> None:
    found = dict(list_ratios(result(auto=1.4)))
    assert found == pytest.approx(
        {
            "plain decoding over transformers, smallest of the groups": 4.0,
            "plain decoding over llama.cpp, mean of the groups": 0.8,
            "`auto` over plain decoding, mean of Spec-Bench's six groups": 1.4,
            "`auto` over plain decoding, smallest of the groups": 1.4,
            "`auto` over plain decoding, mean of what copies (summaries, RAG, edits)": 5.6 / 3,
            (
                "`auto` over transformers' prompt lookup in its best setting, smallest of the "
                "groups"
            ): 2.5,
            "`auto` over llama.cpp, mean of Spec-Bench's six groups": 0.8 * 1.4,
        }
    )
    assert (
        "| plain decoding over llama.cpp, mean of the groups | 1.25x slower |"
        in describe_run_with_peers(result(1.4), "page.md")[-1]
    )


def test_a_ratio_that_was_not_measured_is_left_out() -> None:
    bare = result(2.0)
    bare["figures"]["against"] = {}
    assert [what for what, _ in list_ratios(bare) if "over plain decoding" not in what] == []
    del bare["figures"]["overall"]["auto"]
    assert list_ratios(bare) == [] and len(describe_run_with_peers(bare, "page.md")) == 2


def test_a_peer_that_is_slower_is_called_slower() -> None:
    table, prose, _ = describe_run_with_peers(result(2.0), "page.md")
    row = next(line for line in table.splitlines() if line.startswith("| transformers |"))
    assert "| 4.0x slower |" in row and row.endswith("| 2.5 | - |")
    assert "[page.md](page.md)" in prose


def test_tokens_per_pass_are_counted_after_the_pass_that_read_the_prompt() -> None:
    """The median over requests of the median over rounds; one without a pass says nothing."""
    rows = [sample("rag", "a", round, tokens, 10) for round, tokens in enumerate((20, 30, 30))]
    rows += [
        sample("rag", "b", 0, 10, 10),
        sample("rag", "c", 0, 90, 10),
        sample("rag", "d", 0, 0, 0),
    ]
    rows += [sample("qa", "a", 0, 50, 10), sample("rag", "a", 0, 50, 10)._replace(arm="other")]
    assert tokens_per_pass({"samples": [list(row) for row in rows]}, "auto", "rag") == 3.0


def test_plain_decoding_makes_one_token_a_pass_in_every_committed_result() -> None:
    """The committed run counts its passes as `tokens_per_pass` takes them."""
    result = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    assert {tokens_per_pass(result, "autoregressive", task) for task in COPYING} == {1.0}


def test_the_cost_of_a_pass_is_its_tokens_over_the_speed_up() -> None:
    """Three tokens per pass: 1.5 times as fast means passes of 2 plain steps; edits of 1."""
    table, prose = tabulate_copying_tasks(result(1.5))
    assert "| summ. | 3.00 | 2.00 | 1.50 |" in table and "| edits | 3.00 | 1.00 | 3.00 |" in table
    assert "would be 3.00 times as fast" in prose


def test_the_pass_furthest_over_its_floor_is_named() -> None:
    steep = result(2.0)
    rows = steep["curve_figures"]["curves"]["tinyspec"]["rows"]
    rows["32"] |= {"over": 1.1, "usually": 1.9, "milliseconds": 7.0}
    assert tabulate_pass_costs([steep]).splitlines()[2:] == [
        "| bfloat16 | 1.10 | 1.20 | 1.90 | 32 positions, 7.0 ms |"
    ]


def test_the_ceilings_tell_who_reads_how_fast() -> None:
    assert "us 2.0, them 3.0" in describe_ceilings(result(1.0)["curve_figures"])


def test_a_method_with_a_row_on_any_page_is_measured() -> None:
    """The labels of early exits and of translators begin with the method."""
    chapter = {"figures": {"overall": {"autoregressive": {"mean": 1}, "rest:price=0": {"mean": 2}}}}
    exits = {"figures": {"full": {}, "free 0.5": {}, "ee_llm:inference=pipeline 0.9": {}}}
    texts = {"figures": {"teacher, greedy": {}, "sat, K 4": {}, "enat": {}}}
    heads = {"arms": {"kangaroo": {}}}
    before = list_unmeasured([], [])
    now = list_unmeasured([chapter], [exits, texts, heads], ["bench", "osd"])
    found = {"rest", "free", "ee_llm", "sat", "enat", "osd", "kangaroo"}
    assert set(before) - set(now) == {f"`{name}`" for name in found}
    assert "`planner`" not in before and "`autoregressive`" not in before and "`calm`" not in before
