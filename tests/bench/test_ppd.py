"""`tinyspec bench ppd`: ranks and counts that agree with the technique, and three files."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import tinyspec
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.bench.experiments import ppd
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart
from tinyspec.early_exit.ppd import expected_cost
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model

QUICK = ("--prompts", "2", "--tokens", "6", "--rounds", "2", "--quiet")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def deep(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six layers that disagree, on the zoo's tokenizer."""
    small = tinyspec.load(zoo.big)
    config = Config(vocab_size=small.config.vocab_size, d_model=32, n_layers=6, n_heads=2,
                    n_kv_heads=1, head_dim=16,
                    d_ff=48, max_positions=96)  # fmt: skip
    folder = tmp_path_factory.mktemp("deep") / "deep"
    Model(config, Model.random(config, scale=0.4).weights, small.tokenizer, "deep").save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def result(deep: str) -> dict[str, Any]:
    made = ppd.measure_ppd(ppd.PpdSettings(deep, (1, 5, 50), 4, 2, 8, 2), quiet=True)
    found: dict[str, Any] = json.loads(dump_json(made))
    return found


def test_the_counted_clock_is_the_theorems_from_the_ranks(result: dict[str, Any]) -> None:
    """Ranks come from one pass with exits, counts from real runs: they agree to the layer."""
    for k in (1, 5, 50):
        of = result["figures"]["counted"][str(k)]
        assert [of["clock"], of["work"]] == pytest.approx(of["theorem"], abs=1e-12)
        for ranks, (steps, work) in zip(result["ranks"], result["counted"][str(k)], strict=True):
            held = sum(rank < k for rank in ranks[4 - 1])
            assert (steps, work) == pytest.approx(expected_cost(6, 4, k, held / 7, 8))


def test_match_rates_grow_with_k_to_one_and_the_last_layer_always_knows(
    result: dict[str, Any],
) -> None:
    match = result["figures"]["match"]
    assert len(match) == 6 and all(
        list(row.values()) == sorted(row.values()) for row in match.values()
    )
    assert set(match["6"].values()) == {1.0}
    assert match["1"]["1"] < 1
    assert list(result["figures"]["clock"]) == [
        "3",
        "4",
        "5",
        "6",
    ]  # below half there is no pipeline
    assert set(result["figures"]["clock"]["6"].values()) == {1.0}


def test_figures_follow_from_what_was_measured_and_all_arms_write_the_same(
    result: dict[str, Any],
) -> None:
    assert json.loads(dump_json(ppd.summarize_ppd(result))) == result["figures"]
    assert len(result["samples"]) == len(ppd.ARMS) * 2 * 2 and result["identical"] is True
    assert result["figures"]["wall"][ppd.PLAIN]["median"] == 1


def test_a_row_tells_its_knobs(result: dict[str, Any]) -> None:
    ran = result["knobs"]
    assert ran[ppd.PLAIN] == ran[ppd.SHARED] == {}
    for arm, threads in ((ppd.SERIAL, False), (ppd.THREADS, True)):
        assert (ran[arm]["layer"], ran[arm]["k"], ran[arm]["threads"]) == (4, 1, threads)


def test_a_slow_down_is_printed_as_one(result: dict[str, Any]) -> None:
    samples = [
        [p, t, arm, 2.0 if arm == ppd.THREADS else 1.0] for p, t, arm, _ in result["samples"]
    ]
    slow = {**result, "samples": samples}
    slow["figures"] = ppd.summarize_ppd(slow)
    table = ppd.tabulate_ppd(slow)[1]
    assert (
        dict(table.rows)[ppd.THREADS].startswith("2.0x slower")
        and "all tokens alike" in table.title
    )
    assert "two threads 2.0x slower" in ppd.chart_ppd(slow).summary
    assert "TOKENS DIFFER" in ppd.tabulate_ppd({**slow, "identical": False})[1].title


def test_the_tables_have_a_row_a_layer_and_the_picture_both_panels(result: dict[str, Any]) -> None:
    first, _ = ppd.tabulate_ppd(result)
    assert len(first.rows) == 6 and all(len(row) == len(first.header) for row in first.rows)
    chart = ppd.chart_ppd(result)
    assert [len(panel.lines) for panel in chart.panels] == [3, 3]  # type: ignore[union-attr]
    ElementTree.fromstring(draw_chart(chart))


def test_the_command_writes_all_three(zoo: Zoo, tmp_path: Path) -> None:
    out, drawn, page = tmp_path / "r" / "p.json", tmp_path / "p.svg", tmp_path / "p.md"
    files = ("--out", str(out), "--svg", str(drawn), "--markdown", str(page))
    made = run("bench", "ppd", "--model", zoo.big, "--ks", "1,2", *QUICK, *files)
    assert made.exit_code == 0, made.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["command"].startswith("tinyspec ") and found["machine"] and found["layer"] == 1
    assert page.read_text(encoding="utf-8").startswith("`tinyspec ") and "<svg" in drawn.read_text(
        encoding="utf-8"
    )
    assert "times as fast" in made.stdout


def test_wrong_input_is_one_line(zoo: Zoo, deep: str) -> None:
    assert "below half of the 6 layers" in failed(
        run("bench", "ppd", "--model", deep, "--layer", "2", *QUICK)
    )
    assert "such as 1,2,4" in failed(run("bench", "ppd", "--model", zoo.big, "--ks", "1,x", *QUICK))
    assert "give 2 to" in failed(run("bench", "ppd", "--model", zoo.big, *QUICK, "--tokens", "96"))
