"""`tinyspec bench serve`: schedules worked out by hand, a clock that agrees with itself, tables."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.bench.fakes import Hand
from tests.lm.small import LLAMA
from tests.zoo import failed, run, tiny_zoo
from tinyspec.bench.experiments import serve, serve_tables
from tinyspec.bench.experiments import serve_runs as runs
from tinyspec.bench.experiments.serve_runs import PassCell, ServeRun, SimulatedModel, Visit
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart
from tinyspec.bench.settings import ServeSettings
from tinyspec.decoding.costs import FittedCosts, PassCosts, fit_costs, list_relative_errors
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardBatch
from tinyspec.lm.model import Model

pytestmark = pytest.mark.slow  # it measures in real time

POLICIES = ("lockstep", "prefill-first", "fcfs:budget=16", "sarathi:budget=16")
COSTS = FittedCosts("m", "", 1, 4.0, 0.25, 0.001, 1.0, 0.125, (1, 8, 32), (0.0, 0.5, 0.75))


class RowCosts(PassCosts):
    """A second for each row."""

    def seconds_of(self, rows: Sequence[int], cached: Sequence[int], heads: Sequence[int]) -> float:
        return float(sum(rows))


def simulate(
    policy: str,
    trace: Sequence[Visit],
    costs: PassCosts | None = None,
    live: int = 8,
    change: float = 0.0,
) -> ServeRun:
    made = runs.make_policy(policy)
    return runs.Simulation(made, costs or RowCosts(), trace, live, change=change).run()


def busy_trace(seed: int = 3, n: int = 12) -> list[Visit]:
    """A trace with idle times: a request takes about 60 seconds, one comes every 50."""
    return runs.draw_trace(n, 1 / 50, 30, 6, 64, seed)


# ---------------------------------------------------------------------- the simulated clock

# A prompt of P tokens is a pass of P - 1 rows: its last token runs with the first new one.
THREE = [Visit(0.0, 5, 2), Visit(1.0, 3, 1), Visit(20.0, 1, 1)]


def test_one_request_reads_its_prompt_and_gets_a_token_a_pass() -> None:
    got = simulate("lockstep", [Visit(1.0, 3, 2)])
    assert got.spans == [(1.0, 3.0), (3.0, 4.0), (4.0, 5.0)]
    assert got.times == [[4.0, 5.0]]


def test_who_arrives_in_a_pass_takes_part_in_the_next_and_idle_time_is_skipped() -> None:
    got = simulate("lockstep", THREE)
    # 4 rows of a prompt; a token beside 2 rows of the other prompt; two tokens; nobody; a token
    assert got.spans == [(0.0, 4.0), (4.0, 7.0), (7.0, 9.0), (20.0, 21.0)]
    assert got.times == [[7.0, 9.0], [9.0], [21.0]]


def test_prefill_first_reads_the_second_prompt_before_anyone_decodes() -> None:
    assert simulate("prefill-first", THREE).times == [[8.0, 9.0], [8.0], [21.0]]


def test_sarathi_reads_the_second_prompt_in_chunks_beside_tokens() -> None:
    # 2 and 2 rows of the first prompt; twice a token beside 1 row of the second; its token
    assert simulate("sarathi:budget=2", THREE).times == [[6.0, 8.0], [9.0], [21.0]]


def test_who_finds_no_place_waits_for_one() -> None:
    assert simulate("lockstep", THREE, live=1).times == [[5.0, 6.0], [9.0], [21.0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_pass_log_adds_up_to_the_clock(policy: str) -> None:
    trace = busy_trace()
    got = simulate(policy, trace, COSTS)
    busy = [COSTS.seconds(entry) for entry in got.pass_log]
    assert busy == pytest.approx([end - begin for begin, end in got.spans])
    idle = [b[0] - a[1] for a, b in pairwise(got.spans)]
    assert min(idle) >= 0 and max(idle) > 0
    assert got.spans[0][0] + sum(busy) + sum(idle) == pytest.approx(max(map(max, got.times)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_token_comes_when_a_pass_of_its_request_ends(policy: str) -> None:
    trace = busy_trace()
    got = simulate(policy, trace, COSTS)
    for number, (visit, times) in enumerate(zip(trace, got.times, strict=True)):
        own = [
            end
            for entry, (_, end) in zip(got.pass_log, got.spans, strict=True)
            if number in entry.requests and not entry.prefill[entry.requests.index(number)]
        ]
        assert times == own and len(times) == visit.new and times[0] > visit.at


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_run(policy: str) -> None:
    assert simulate(policy, busy_trace(), COSTS) == simulate(policy, busy_trace(), COSTS)
    assert simulate(policy, busy_trace(), COSTS) != simulate(policy, busy_trace(4), COSTS)


# ---------------------------------------------------------------------- traces and policies


def test_a_trace_is_drawn_by_its_seed_and_fits_into_the_context() -> None:
    trace = runs.draw_trace(400, 2.0, 40, 20, 64, seed=1)
    assert trace == runs.draw_trace(400, 2.0, 40, 20, 64, seed=1)
    assert all(v.prompt >= 1 <= v.new and v.prompt + v.new <= 64 for v in trace)
    assert [v.at for v in trace] == sorted(v.at for v in trace)
    assert trace[-1].at == pytest.approx(400 / 2.0, rel=0.15)
    assert {v.at for v in runs.draw_trace(9, None, 40, 20, 64, seed=1)} == {0.0}


def test_prefill_first_never_decodes_beside_a_prompt() -> None:
    assert all(
        len(set(entry.prefill)) == 1 for entry in simulate("prefill-first", busy_trace()).pass_log
    )
    assert any(len(set(entry.prefill)) == 2 for entry in simulate("fcfs", busy_trace()).pass_log)


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("sarathy", "there is no policy 'sarathy': did you mean 'sarathi'"),
        ("fcfs:rows=3", "fcfs has no knob .rows."),
        ("fcfs:budget=many", "it must be a number"),
        ("sarathi:chunk=3", "chunk"),
    ],
)
def test_a_policy_that_does_not_exist_is_named(label: str, says: str) -> None:
    with pytest.raises(TinyspecError, match=says):
        runs.make_policy(label)


# ---------------------------------------------------------------------- real runs, on a hand clock


CHANGE = 2.5


def wound_model(hand: Hand, change: float = 0.0) -> Model:
    """A model whose forward passes wind a clock by COSTS: a machine without noise.

    change  seconds more where a pass decodes only and the last one did not, or the reverse
    """
    model, decoded = SimulatedModel(LLAMA, Model.random(LLAMA).weights), list[bool]()

    def wind(feeds: Sequence[ForwardBatch]) -> None:
        rows, heads = [len(feed.tokens) for feed in feeds], [len(feed.heads) for feed in feeds]
        hand.wind(COSTS.seconds_of(rows, [feed.n_slots for feed in feeds], heads))
        decoded.append(all(heads))
        if decoded[-2:] in ([True, False], [False, True]):
            hand.wind(change)

    model.on_pass = wind
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_real_time_is_the_simulated_time_where_passes_cost_what_the_model_says(policy: str) -> None:
    trace, hand = runs.draw_trace(9, None, 30, 6, 64, seed=2), Hand()
    real = runs.run_real(wound_model(hand, CHANGE), runs.make_policy(policy), trace, 4, hand)
    got = simulate(policy, trace, COSTS, live=4, change=CHANGE)
    assert [list(entry[2:]) for entry in real.pass_log] == [list(e[2:]) for e in got.pass_log]
    for ours, theirs in zip(got.times, real.times, strict=True):
        assert ours == pytest.approx(theirs)


def test_a_request_is_submitted_at_its_time_and_its_tokens_count_from_the_begin() -> None:
    hand, waits = Hand(), list[float]()
    hand.now = 100.0

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        hand.wind(seconds)

    model, policy = wound_model(hand), runs.make_policy("fcfs")
    got = runs.run_real(model, policy, [Visit(5.0, 1, 2)], 4, hand, sleep)
    assert waits == [5.0]
    assert got.times == [pytest.approx(simulate("fcfs", [Visit(5.0, 1, 2)], COSTS).times[0])]
    runs.run_real(model, policy, [Visit(5.0, 1, 2), Visit(50.0, 1, 1)], 4, hand, sleep)
    assert waits[1] == 5.0 and 0 < waits[2] <= 45.0  # the first one may run meanwhile


def test_passes_are_measured_as_they_run_and_a_fit_predicts_them() -> None:
    hand = Hand()
    cells = runs.list_cells(LLAMA.max_positions)
    grid = runs.PassGrid(wound_model(hand), hand)
    assert grid.cells == cells
    slices = [grid.measure_slice(number, 10) for number in range(-(-len(cells) // 10))]
    assert {int(row[0]) for one in slices for row in one} == set(range(len(cells)))
    found, paces = runs.summarize_slices(cells, slices)
    assert paces == [pytest.approx(1.0)] * len(slices)
    for cell, sample in zip(cells, found, strict=True):
        assert sample.rows == cell.rows
        assert sample.cached == tuple(cell.cached - 1 + n for n in cell.rows)
        assert sample.heads == (*(0,) * cell.prompts, *cell.rows[cell.prompts :])
        assert sample.seconds == pytest.approx(COSTS.seconds_of(*sample[:3]))
    assert max(map(abs, list_relative_errors(fit_costs(found), found))) < 0.02  # other knots


@pytest.mark.parametrize("change", [0.0, CHANGE])
def test_a_change_of_kind_is_timed_apart_from_the_passes(change: float) -> None:
    hand = Hand()
    cells = [PassCell((1,), 0, 8), PassCell((16,), 1, 8), PassCell((2, 2), 0, 8)]
    grid = runs.PassGrid(wound_model(hand, change), hand, cells)
    slices = [grid.measure_slice(number, 4) for number in range(3)]
    assert runs.find_change(cells, slices) == pytest.approx(change)
    for sample in runs.summarize_slices(cells, slices)[0]:
        assert sample.seconds == pytest.approx(COSTS.seconds_of(*sample[:3]))
    assert runs.find_change(cells[:1], [[[0, 3.0, 1.0, 1.0], [0, 3.0, 1.0, 1.0]]]) == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_passes_of_a_real_run_cost_the_seconds_in_which_there_was_a_request(
    policy: str,
) -> None:
    hand, made = Hand(), {"samples": list[Any](), "passes": list[Any]()}
    costs = {"costs": COSTS.to_json(), "change": CHANGE, "mean_spread": 1.25}
    paces = {"paces": {f"{policy}, t, round 0": 0.5, f"{policy}, t, round 1": 2.0}}
    for number in range(2):
        trace = runs.draw_trace(9, None, 30, 6, 64, seed=number)
        model = wound_model(hand, CHANGE)
        run = runs.run_real(model, runs.make_policy(policy), trace, 4, hand)
        serve._add_run(made, ("t", number, policy), trace, run, COSTS.knots)
    first, second = (
        serve.summarize_traces({**made, "samples": [r for r in made["samples"] if r[1] == n]})
        for n in (0, 1)
    )
    busy = [found["t"][policy]["busy"] for found in (first, second)]
    assert serve._cost_passes({**made, **costs, **paces}, "t", policy) == pytest.approx(
        1.25 * (0.5 * busy[0] + 2.0 * busy[1]), rel=1e-4
    )


def test_the_grid_has_sessions_rows_chunks_and_mixtures_at_two_lengths() -> None:
    cells = runs.list_cells(8192)
    assert {cell.cached for cell in cells} == {64, 512}
    assert PassCell((9,) * 16, 0, 512) in cells and PassCell((512,), 1, 64) in cells
    assert PassCell((32, 1, 1, 1, 1), 1, 64) in cells
    assert PassCell((448,), 1, 64) in runs.list_cells(512)  # the longest chunk that fits
    small = runs.list_cells(96)
    assert all(cell.cached + max(cell.rows) <= 96 for cell in small) and len(small) > 50


def test_each_simulated_pass_draws_a_factor_of_its_costs() -> None:
    def spans(seed: int) -> list[float]:
        policy = runs.make_policy("lockstep")
        run = runs.Simulation(policy, RowCosts(), [Visit(0.0, 1, 40)], 1, (1.0, 3.0), seed).run()
        return [end - begin for begin, end in run.spans]

    drawn = spans(0)
    assert set(drawn) == {1.0, 3.0} and len(drawn) == 40
    assert drawn == spans(0) != spans(1)


def test_the_spread_of_a_cell_is_that_of_its_times_around_their_median() -> None:
    class SlowingHand(Hand):
        def __call__(self) -> float:
            self.now *= 1.01
            return super().__call__()

    cells = [PassCell((1,), 0, 8)]
    grid = runs.PassGrid(wound_model(hand := SlowingHand()), hand, cells)
    slices = [grid.measure_slice(number, 1) for number in range(3)]
    (found,), _ = runs.summarize_slices(cells, slices)
    assert len(found.spread) == 3 * (runs.PASSES - 2)
    assert median(found.spread) == pytest.approx(1.0, abs=0.01) and len(set(found.spread)) > 1


def test_a_slice_in_which_every_pass_was_slow_tells_the_pace_and_widens_no_spread() -> None:
    cells = [PassCell((1,), 0, 8), PassCell((2,), 0, 8)]
    usual = [[0, 9.0, 1.0, 1.0], [1, 9.0, 3.0, 3.0]]  # the first time is of a change
    slow = [[0, 9.0, 1.5, 1.5], [1, 9.0, 4.5, 4.5]]
    found, paces = runs.summarize_slices(cells, [usual, slow, usual])
    assert [one.seconds for one in found] == [1.0, 3.0] and paces == [1.0, 1.5, 1.0]
    assert {factor for one in found for factor in one.spread} == {1.0}


class BrokenPolicy(runs.PrefillFirstPolicy):
    def pick(self, waiting: Any) -> Any:
        raise RuntimeError("broken policy")


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="broken policy"):
        runs.Simulation(BrokenPolicy(), COSTS, THREE, 4).run()


# ---------------------------------------------------------------------- the experiment

QUICK = ("--requests", "3", "--prompt-tokens", "40", "--new-tokens", "4", "--grid-rounds", "1",
         "--policies", "prefill-first,sarathi:budget=16", "--loads", "0.9", "--ratios", "4",
         "--quiet")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_zoo(tmp_path_factory.mktemp("zoo")).big


def tiny(model: str, **more: Any) -> ServeSettings:
    chosen = {"policies": ("prefill-first", "sarathi:budget=16"), "loads": (0.5, 0.9),
              "ratios": (4,), "requests": 3, "prompt_tokens": 40, "new_tokens": 4, "rounds": 2,
              "grid_rounds": 1}  # fmt: skip
    return ServeSettings(model, **{**chosen, **more})


@pytest.fixture(scope="module")
def result(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out") / "serve.json"
    serve.measure_serve(tiny(model), quiet=True, out=out)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_figures_follow_from_the_samples(result: dict[str, Any]) -> None:
    assert json.loads(dump_json(serve.summarize_serve(result))) == result["figures"]
    labels = ["capacity", "load 0.5", "load 0.9", "P:D 4"]
    assert list(result["figures"]["real"]) == labels
    for source in ("fitted", "roofline"):
        assert list(result["simulated"][source]) == labels
    assert len(result["samples"]) == 3 * 2 * (1 + 3 * 2)  # requests, rounds; capacity, 3 traces
    assert len(result["repeated"]["samples"]) == 3 * 2 * 3
    assert len(result["slices"]) == len(result["paces"]) + 1 == 2 * (1 + 3 * 3) + 1
    for row in result["samples"]:
        arrival, _, new, *times = row[4:]
        assert len(times) == new and [arrival, *times] == sorted([arrival, *times])


def test_all_policies_get_the_same_trace_and_each_round_another(result: dict[str, Any]) -> None:
    def trace(round: int, policy: str) -> list[Any]:
        return [row[3:7] for row in result["samples"] if row[:3] == ["load 0.9", round, policy]]

    assert trace(0, "prefill-first") == trace(0, "sarathi:budget=16") != trace(1, "prefill-first")


def test_requests_come_at_the_load_times_the_capacity(model: str, result: dict[str, Any]) -> None:
    own = [row for row in result["samples"] if row[0] == "capacity"]
    seconds = sum(max(row[-1] for row in own if row[1] == round) for round in (0, 1)) / 1000
    scenario = serve.Scenario("load 0.9", 40, 4, 0.9)
    drawn = serve.draw_scenario(tiny(model), scenario, len(own) / seconds, 96, 1)
    rows = [row for row in result["samples"] if row[:3] == ["load 0.9", 1, "prefill-first"]]
    assert [row[4] for row in rows] == pytest.approx([1000 * one.at for one in drawn], abs=0.001)
    faster = serve.draw_scenario(tiny(model), scenario, 2 * len(own) / seconds, 96, 1)
    assert [one.at for one in faster] == pytest.approx([one.at / 2 for one in drawn])


def test_a_simulation_has_as_many_tokens_as_the_real_run(result: dict[str, Any]) -> None:
    for label, policies in result["figures"]["real"].items():
        for policy, of in policies.items():
            simulated = result["simulated"]["fitted"][label][policy]
            assert of["n_gaps"] == simulated["n_gaps"] > 0
            if label == "P:D 4":  # all at once: who shares a pass does not depend on time
                assert of["passes"] == simulated["passes"]


def test_a_finished_run_is_not_repeated(model: str, result: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    last = result["passes"][-1][:3]
    cut = {**result, **{
        name: [row for row in result[name] if row[:3] != last] for name in ("samples", "passes")
    }}  # fmt: skip
    out.write_text(dump_json(cut), encoding="utf-8")
    again = serve.measure_serve(tiny(model), quiet=True, out=out, resume=True)
    assert again["samples"][: len(cut["samples"])] == cut["samples"]
    assert [row[:3] for row in again["passes"]] == [row[:3] for row in result["passes"]]
    assert again["slices"] == result["slices"] and again["repeated"] == result["repeated"]
    older = {**result, "passes": [row[:5] for row in result["passes"]]}
    out.write_text(dump_json(older), encoding="utf-8")
    with pytest.raises(TinyspecError, match="is no result of `tinyspec bench serve`"):
        serve.measure_serve(tiny(model), quiet=True, out=out, resume=True)
    out.write_text(dump_json(result), encoding="utf-8")
    with pytest.raises(TinyspecError, match="was made with requests 3, not 4"):
        serve.measure_serve(tiny(model, requests=4), quiet=True, out=out, resume=True)


# ---------------------------------------------------------------------- tables


def sample_rows(policy: str, *times: Sequence[float]) -> list[list[Any]]:
    return [["t", 0, policy, n, 10.0 * n, 5, len(own), *own] for n, own in enumerate(times, 1)]


def test_the_figures_of_a_policy_by_hand() -> None:
    rows = sample_rows("p", [20.0, 30.0, 50.0], [40.0, 110.0])
    of = serve.summarize_policy(rows, [["t", 0, "p", 4, 14]])
    assert of["seconds"] == 0.1 and of["tokens_per_second"] == 50  # from 10 to 110
    assert of["ttft_p50"] == 15  # 20 - 10, and 40 - 20
    assert of["gap_p50"] == 20 and of["gap_max"] == 70  # 10, 20, 70
    assert of["completion_p50"] == 65  # 50 - 10, and 110 - 20
    assert of["passes"] == 4 and of["rows_per_pass"] == 3.5


def test_answers_of_one_token_have_no_gaps() -> None:
    of = serve.summarize_policy(sample_rows("p", [20.0], [40.0]), [["t", 0, "p", 2, 9]])
    assert of["gap_p99"] is None and of["n_gaps"] == 0 and of["ttft_p99"] == pytest.approx(19.9)


def with_slow_sarathi(result: dict[str, Any]) -> dict[str, Any]:
    """The result with half the throughput for sarathi, and with figures that are all the clock's
    but one.
    """
    slow = json.loads(json.dumps(result))
    for label, policies in slow["figures"]["real"].items():
        for policy, of in policies.items():
            of["tokens_per_second"] = 50 if policy.startswith("sarathi") else 100
            slow["figures"]["ratios"][label][policy] = {
                "busy": 1.02, "seconds": 1.05, "completion_p50": 1.0, "gap_p99": 0.95,
            }  # fmt: skip
    slow["figures"]["ratios"]["load 0.9"]["prefill-first"]["gap_p99"] = 0.5
    found: dict[str, Any] = slow
    return found


def test_a_slow_down_is_printed_as_one(result: dict[str, Any]) -> None:
    grids = serve_tables.tabulate_serve(with_slow_sarathi(result))
    assert [row[:3] for row in grids[0].rows] == [
        ["prefill-first", "100", "1.00"],
        ["sarathi:budget=16", "50", "2.0x slower"],
    ]
    assert grids[2].rows[1][1] == "2.0x slower"  # the table of P:D
    assert "roofline, not a measurement" in grids[3].title
    assert len(grids) == 5
    for grid in grids:
        assert all(len(row) == len(grid.header) for row in grid.rows)


def test_a_miss_of_the_simulated_clock_is_called_one(result: dict[str, Any]) -> None:
    slow = with_slow_sarathi(result)
    slow["figures"]["repeated"]["load 0.5"]["prefill-first"]["seconds"] = 2.0
    loads, at_once, again, again_at_once, fit = serve_tables.describe_validation(slow)
    assert "arrivals: passes within 10% in 4 of 4 runs, median 1.02, worst 1.02" in loads
    assert "; whole time within 10% in 4 of 4 runs, median 1.05, worst" in loads
    assert (
        "p99 gap within 10% in 3 of 4 runs, median 0.95, worst 0.50 (prefill-first, load 0.9)."
        in (loads)
    )
    assert "(capacity and P:D): passes within 10% in 3 of 3 runs" in at_once
    assert "; whole time within 10% in 3 of 3 runs, median" in at_once
    assert "p99 gap within 10% in 3 of 3 runs, median 0.95, worst 0.95" in at_once
    assert "median completion within 10% in 3 of 3 runs" in at_once
    assert "again under prefill-first" in again and "worst 2.00 (prefill-first, load 0.5)" in again
    assert "again under prefill-first" in again_at_once and "of 1 runs" in again_at_once
    assert "kinds of passes: off by" in fit


def test_a_result_without_loads_has_no_sentence_about_them(result: dict[str, Any]) -> None:
    cut = with_slow_sarathi(result)
    cut["settings"]["loads"] = []
    for label in ("load 0.5", "load 0.9"):
        del cut["figures"]["ratios"][label], cut["figures"]["repeated"][label]
    at_once, again, _ = serve_tables.describe_validation(cut)
    assert "all requests at once" in at_once and "all requests at once" in again


def test_the_best_policy_of_each_machine_is_named(result: dict[str, Any]) -> None:
    """At P:D 4 prefill-first has 100 tokens/s here, sarathi 50. The clock and the GPU vary."""
    slow = with_slow_sarathi(result)
    fitted, gpu = (slow["simulated"][name]["P:D 4"] for name in ("fitted", "roofline"))
    for of, fast in ((fitted, 90), (gpu, 110)):
        of["prefill-first"]["tokens_per_second"] = 100
        of["sarathi:budget=16"]["tokens_per_second"] = fast
    assert serve_tables.describe_best_policies(slow) == (
        "The policy with the most tokens/s is another one on the GPU: at P:D 4 here prefill-first "
        "(simulated: prefill-first), there sarathi:budget=16."
    )
    assert serve_tables.describe_best_policies(slow) in serve_tables.list_serve_notes(slow)
    gpu["prefill-first"]["tokens_per_second"] = 120
    assert serve_tables.describe_best_policies(slow) == (
        "The policy with the most tokens/s is the same here and on the GPU: P:D 4."
    )
    slow["settings"]["ratios"] = []
    assert serve_tables.describe_best_policies(slow) == ""
    assert "" not in serve_tables.list_serve_notes(slow)


def test_the_picture_has_passes_and_gaps(result: dict[str, Any]) -> None:
    chart = serve_tables.chart_serve(result)
    first, second, real, gpu = chart.panels
    assert "prefill-first" in first.title and "sarathi" in second.title
    assert len(real.lines) == len(gpu.lines) == 2  # type: ignore[union-attr]
    for spans in result["drawn"].values():
        assert {span[0] for span in spans} == {0, 1, 2}
        assert {span[3] for span in spans} == {True, False}
    ElementTree.fromstring(draw_chart(chart))


def test_the_command_writes_all_three(model: str, tmp_path: Path) -> None:
    out, drawn, page = tmp_path / "r" / "s.json", tmp_path / "s.svg", tmp_path / "s.md"
    files = ("--out", str(out), "--svg", str(drawn), "--markdown", str(page))
    made = run("bench", "serve", "--model", model, *QUICK, *files)
    assert made.exit_code == 0, made.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["command"].startswith("tinyspec ") and found["machine"]
    assert "Simulated against real" in page.read_text(encoding="utf-8")
    assert "<svg" in drawn.read_text(encoding="utf-8")
    assert "TTFT p50 / p99" in made.stdout and "Simulated against real" in made.stdout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--policies", "sarathy"), "there is no policy 'sarathy'"),
        (("--policies", ","), "there is nothing to measure"),
        (("--loads", "0"), "--loads 0: a load is a share of the capacity"),
        (("--loads", "much"), "write numbers with commas between"),
        (("--prompt-tokens", "93"), "do not fit into the context"),
        (("--ratios", "44"), "give smaller ratios"),
        (("--resume",), "name it"),
    ],
)
def test_wrong_input_is_one_line(model: str, more: tuple[str, ...], says: str) -> None:
    assert says in failed(run("bench", "serve", "--model", model, *QUICK, *more))
