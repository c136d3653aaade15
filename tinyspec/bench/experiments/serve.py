"""`tinyspec bench serve`: measure how policies serve many requests, in real time and by a clock.

Three kinds of traces, the same for all policies, which take turns:

    capacity  all requests at once under fcfs: the requests per second that the machine can serve
    load x    requests come at random, x times as many per second as the capacity (an open loop)
    P:D r     all requests at once, with prompts r times as long as the answers: SARATHI's table

The same traces run under a simulated clock, whose costs were fitted to a grid of passes (never to
a trace). The passes are timed between the runs, and a run is simulated at the pace that the machine
had before and after it. Simulated over real says how far the clock can be trusted: how many runs
are within 10 % is reported. The *passes* of a real run are judged too: what they cost by the clock,
over the seconds in which there was a request. Here an error does not change who waits for whom. One
policy runs each trace twice: how far two real runs are from each other says how near a clock can be
expected to be. Then the clock has the costs of a GPU, where it
shows a lower bound: what is best on a machine with few idle operations need not be best there.

    TTFT        time to first token: from the moment at which a request should arrive
    gap         time between two tokens of a request
    completion  from the same moment to the last token
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any, NamedTuple

import numpy as np
import torch

from tinyspec import models
from tinyspec.bench.arms import Clock, disable_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments import serve_runs as runs
from tinyspec.bench.experiments.serve_runs import FCFS, ServeRun, Visit
from tinyspec.bench.experiments.serve_tables import (
    FITTED,
    PERCENTILES,
    REAL,
    ROOFLINE,
    chart_serve,
    describe_validation,
    find_baseline,
    list_serve_notes,
    tabulate_serve,
)
from tinyspec.bench.harness import (
    name_dtype,
    read_unfinished,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.measure import order_of_turn
from tinyspec.bench.settings import ServeSettings
from tinyspec.decoding.costs import (
    FittedCosts,
    PassCosts,
    a100_costs,
    fit_costs,
    list_features,
    list_relative_errors,
)
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model

CAPACITY = "capacity"
COMPARED = ("busy", "seconds", "completion_p50", "gap_p99")
COLUMNS = ["trace", "round", "policy", "request", "arrival", "prompt", "new", "times"]
DRAWN = 8  # requests of the picture of passes


class Scenario(NamedTuple):
    """A kind of trace: its mean lengths, and the load; None: all requests at once."""

    label: str
    prompt: float
    new: float
    load: float | None


class PlannedRun(NamedTuple):
    """A run of a trace under a policy; repeated: the same once more."""

    scenario: Scenario
    round: int
    policy: str
    is_repeated: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        """Return the first columns of its samples."""
        return self.scenario.label, self.round, self.policy


def list_runs(given: ServeSettings) -> list[PlannedRun]:
    """Return all runs in their order: policies take turns, and the baseline runs once more."""
    policies, rounds = list(dict.fromkeys(given.policies)), range(given.rounds)
    planned = [PlannedRun(find_base(given), round, FCFS) for round in rounds]
    each = [(round, scenario) for round in rounds for scenario in list_scenarios(given)]
    for turn, (round, scenario) in enumerate(each):
        planned += [PlannedRun(scenario, round, one) for one in order_of_turn(policies, turn)]
        planned.append(PlannedRun(scenario, round, find_baseline(policies), is_repeated=True))
    return planned


def find_base(given: ServeSettings) -> Scenario:
    """Return the trace that tells the capacity."""
    return Scenario(CAPACITY, given.prompt_tokens, given.new_tokens, None)


def _name_run(label: str, round: int, policy: str, is_repeated: bool = False) -> str:
    return f"{policy}, {label}, round {round}{', once more' if is_repeated else ''}"


def list_scenarios(given: ServeSettings) -> list[Scenario]:
    """Return all kinds of traces but the capacity's."""
    total = given.prompt_tokens + given.new_tokens
    loads = [
        Scenario(f"load {load:g}", given.prompt_tokens, given.new_tokens, load)
        for load in given.loads
    ]
    ratios = [
        Scenario(f"P:D {ratio}", total * ratio / (1 + ratio), total / (1 + ratio), None)
        for ratio in given.ratios
    ]
    return loads + ratios


def measure_serve(
    given: ServeSettings,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    out: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Return all figures with the samples of the real runs. Each run is saved when it is done.

    Raises TinyspecError for settings that nothing can be measured with.
    """
    for label in given.policies:
        runs.make_policy(label)
    model = disable_eos(models.load(given.model, dtype=given.dtype))
    check_traffic(given, model)
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(given).items()}
    kept: dict[str, Any] = read_unfinished(out, resume, "serve", settings, _read_kept, {})
    made: dict[str, Any] = stamp_result(
        {
            "model": model.name,
            "dtype": name_dtype(model.dtype),
            "settings": settings,
            "slices": [],
            "columns": COLUMNS,
            "samples": [],
            "passes": [],
            "repeated": {"samples": [], "passes": []},
            **kept,
        }
    )
    _run_traces(given, model, made, quiet, clock, sleep, out)
    cells = runs.list_cells(model.config.max_positions)
    grid, paces = runs.summarize_slices(cells, made["slices"])
    costs = fit_costs(grid, model.name, name_dtype(model.dtype), torch.get_num_threads())
    around = map(mean, pairwise(paces))  # of each run, the slices before and after it
    names = [_name_run(*one.key, one.is_repeated) for one in list_runs(given)]
    made["paces"] = dict(zip(names, around, strict=True))
    made["costs"] = costs.to_json()
    made["cost_errors"] = list_relative_errors(costs, grid)
    spread = [factor for sample in grid for factor in sample.spread]
    made["mean_spread"], made["change"] = fmean(spread), runs.find_change(cells, made["slices"])
    made["simulated"] = {
        FITTED: simulate_traces(
            given, model, costs, find_capacity(made), quiet, spread, made["paces"], made["change"]
        ),
        ROOFLINE: simulate_traces(given, model, a100_costs(), None, quiet),
    }
    made["drawn"] = simulate_drawn_passes(given, model, costs, find_capacity(made))
    made["figures"] = summarize_serve(made)
    save_result(out, made)
    return made


def _read_kept(found: dict[str, Any]) -> dict[str, Any]:
    if any(len(row) < 6 for row in found["passes"]):
        raise ValueError("a run of an older version, without the sums of its passes")
    return {name: found[name] for name in ("slices", "samples", "passes", "repeated")}


def check_traffic(given: ServeSettings, model: Model) -> None:
    """Raise TinyspecError if nothing can be measured with these settings."""
    if not given.policies or not given.loads:
        raise TinyspecError(
            "there is nothing to measure: name --policies such as fcfs,sarathi:budget=64, and "
            "--loads such as 0.6"
        )
    if min(given.loads) <= 0:
        raise TinyspecError(
            f"--loads {min(given.loads):g}: a load is a share of the capacity, above 0, such as 0.6"
        )
    total, room = given.prompt_tokens + given.new_tokens, model.config.max_positions
    if total > room:
        raise TinyspecError(
            f"{given.prompt_tokens} tokens of a prompt and {given.new_tokens} new ones do not fit "
            f"into the context of {model.name} ({room}): fewer --prompt-tokens or --new-tokens"
        )
    if max(given.ratios, default=0) >= total:
        raise TinyspecError(
            f"--ratios {max(given.ratios)}: of {total} tokens in all, less than one is new; "
            "give smaller ratios"
        )


# ---------------------------------------------------------------------- runs


def draw_scenario(
    given: ServeSettings, scenario: Scenario, rate: float | None, room: int, round: int
) -> list[Visit]:
    """Return the trace of a round, the same for every policy.

    rate  requests per second of the capacity; only scenarios with a load need it
    """
    arrivals = None if scenario.load is None or rate is None else scenario.load * rate
    seed = make_seed(given.seed, round, scenario.label)
    return runs.draw_trace(given.requests, arrivals, scenario.prompt, scenario.new, room, seed)


def make_seed(seed: int, round: int, label: str) -> int:
    """Return a seed of its own for each round and scenario.

    >>> make_seed(0, 1, "load 0.6") == make_seed(0, 1, "load 0.6") != make_seed(0, 2, "load 0.6")
    True
    """
    return int.from_bytes(f"{seed} {round} {label}".encode(), "big")


def _run_traces(
    given: ServeSettings,
    model: Model,
    made: dict[str, Any],
    quiet: bool,
    clock: Clock,
    sleep: Callable[[float], None],
    out: Path | None,
) -> None:
    """Run what `made` does not have yet, and add it there. Passes are timed between the runs."""
    room, todo = model.config.max_positions, list_runs(given)
    grid, title = runs.PassGrid(model, clock), f"{model.name}: {len(given.policies)} policies"
    size = -(-given.grid_rounds * len(grid.cells) // (len(todo) + 1))  # of a slice, rounded up
    with show_progress_bar(title, len(todo), quiet) as tick:
        if not made["passes"]:  # the first run of a process is slow
            trace = draw_scenario(given, find_base(given), None, room, -1)[:4]
            runs.run_real(model, runs.make_policy(FCFS), trace, given.max_live, clock, sleep)
        for number, one in enumerate(todo):
            rows = made["repeated"] if one.is_repeated else made
            if one.key not in {tuple(row[:3]) for row in rows["passes"]}:
                if len(made["slices"]) == number:
                    made["slices"].append(grid.measure_slice(number, size))
                rate = None if one.scenario.load is None else find_capacity(made)
                trace = draw_scenario(given, one.scenario, rate, room, one.round)
                policy = runs.make_policy(one.policy)
                run = runs.run_real(model, policy, trace, given.max_live, clock, sleep)
                _add_run(rows, one.key, trace, run, grid.knots)
                save_result(out, made)
            tick()
        if len(made["slices"]) == len(todo):
            made["slices"].append(grid.measure_slice(len(todo), size))


def _add_run(
    made: Mapping[str, Any],
    key: tuple[str, int, str],
    trace: Sequence[Visit],
    run: ServeRun,
    knots: Sequence[int] = (),
) -> None:
    """Add the samples of a run: a row for each request, in milliseconds, and its passes.

    With knots, what its passes cost by the fit follows from their row: the number of changes, and
    the sums of `list_features`.
    """
    for number, (visit, times) in enumerate(zip(trace, run.times, strict=True)):
        arrival, *tokens = (round(1000 * at, 3) for at in (visit.at, *times))
        made["samples"].append([*key, number, arrival, visit.prompt, visit.new, *tokens])
    rows = sum(sum(entry.rows) for entry in run.pass_log)
    log, sums = run.pass_log, list[float]()
    if knots:
        features = (list_features(one.rows, one.cached, one.heads, knots) for one in log)
        sums = [runs.count_changes(log), *map(sum, zip(*features, strict=True))]
    made["passes"].append([*key, len(log), rows, *sums])


def find_capacity(made: Mapping[str, Any]) -> float:
    """Return the requests per second of the runs in which all requests came at once."""
    own = [row for row in made["samples"] if row[0] == CAPACITY]
    ends = {round: max(row[-1] for row in own if row[1] == round) for round in {r[1] for r in own}}
    return float(1000 * len(own) / sum(ends.values()))


def simulate_traces(
    given: ServeSettings,
    model: Model,
    costs: PassCosts,
    rate: float | None,
    quiet: bool,
    spread: Sequence[float] = (1.0,),
    paces: Mapping[str, float] | None = None,
    change: float = 0.0,
) -> dict[str, Any]:
    """Return the figures of all traces under a simulated clock, by trace and policy.

    rate    requests per second of the capacity; None: as the clock has it
    spread  factors of the costs, of which each pass draws one
    paces   of each run, a factor of all its costs
    change  seconds: see `serve_runs.find_change`
    """
    room, rows = model.config.max_positions, dict[str, list[Any]](samples=[], passes=[])
    todo = [one for one in list_runs(given) if not one.is_repeated]
    with show_progress_bar(f"simulated: {costs.model}", len(todo), quiet) as tick:
        for one in todo:
            if one.scenario.load is not None and rate is None:
                rate = find_capacity(rows)
            trace = draw_scenario(given, one.scenario, rate, room, one.round)
            pace = paces[_name_run(*one.key)] if paces else 1.0
            factors, seed = [pace * factor for factor in spread], given.seed + one.round
            policy = runs.make_policy(one.policy)
            run = runs.Simulation(policy, costs, trace, given.max_live, factors, seed, change).run()
            _add_run(rows, one.key, trace, run)
            tick()
    return summarize_traces(rows)


def simulate_drawn_passes(
    given: ServeSettings, model: Model, costs: PassCosts, rate: float
) -> dict[str, list[list[Any]]]:
    """Return the simulated passes of a few requests under two policies, for a picture.

    A row is [request, begin, end, is_prefill], in milliseconds.
    """
    loaded = [scenario for scenario in list_scenarios(given) if scenario.load is not None]
    whole = draw_scenario(given, loaded[-1], rate, model.config.max_positions, 0)
    trace = [visit._replace(at=visit.at - whole[0].at) for visit in whole[:DRAWN]]
    found = dict[str, list[list[Any]]]()
    for policy in choose_pair(given.policies):
        run = runs.Simulation(runs.make_policy(policy), costs, trace, given.max_live).run()
        found[policy] = [
            [request, round(1000 * begin, 3), round(1000 * end, 3), is_prefill]
            for entry, (begin, end) in zip(run.pass_log, run.spans, strict=True)
            for request, is_prefill in zip(entry.requests, entry.prefill, strict=True)
        ]
    return found


def choose_pair(policies: Sequence[str]) -> list[str]:
    """Return two policies to draw side by side: prefill-first and sarathi, where they are.

    >>> choose_pair(["fcfs", "prefill-first", "sarathi:budget=32", "sarathi:budget=64"])
    ['prefill-first', 'sarathi:budget=64']
    """
    wanted = ("sarathi:budget=64", *(p for p in policies if p.startswith("sarathi")), policies[-1])
    other = next(policy for policy in wanted if policy in policies)
    return list(dict.fromkeys([find_baseline(policies), other]))


# ---------------------------------------------------------------------- what follows from it


def summarize_serve(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return every figure of the real runs, and how far the simulated ones are from them.

    real      trace -> policy -> figures
    ratios    trace -> policy -> simulated over real: of each figure in `COMPARED`; busy: what the
              passes of the real run cost by the clock, over the seconds in which they ran
    repeated  trace -> policy -> the second real run over the first
    """
    real = summarize_traces(made)
    ratios = _compare_runs(made["simulated"][FITTED], real)
    for label, policies in ratios.items():
        for policy, of in policies.items():
            of["busy"] = _cost_passes(made, label, policy) / real[label][policy]["busy"]
    repeated = _compare_runs(summarize_traces(made["repeated"]), real)
    capacity = find_capacity(made)
    return {REAL: real, "ratios": ratios, "repeated": repeated, "capacity": capacity}


def _cost_passes(made: Mapping[str, Any], label: str, policy: str) -> float:
    """Return what the passes of the real runs of a trace under a policy cost by the fit."""
    costs, seconds = FittedCosts.from_json(made["costs"]), 0.0
    for trace, round, under, _, _, changes, *features in made["passes"]:
        if (trace, under) == (label, policy):
            factor = made["mean_spread"] * made["paces"][_name_run(trace, round, under)]
            seconds += factor * (costs.seconds_of_sums(features) + made["change"] * changes)
    return seconds


def _compare_runs(
    found: Mapping[str, Mapping[str, Any]], real: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return trace -> policy -> the figures in `COMPARED`, over those of the real runs."""
    return {
        label: {
            policy: {name: _divide(of[name], real[label][policy][name]) for name in COMPARED}
            for policy, of in policies.items()
        }
        for label, policies in found.items()
    }


def _divide(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def summarize_traces(made: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of all runs, by trace and policy; rounds are put together."""
    found = dict[str, dict[str, dict[str, Any]]]()
    for label, policy in dict.fromkeys((row[0], row[2]) for row in made["samples"]):
        samples = [row for row in made["samples"] if (row[0], row[2]) == (label, policy)]
        passes = [row for row in made["passes"] if (row[0], row[2]) == (label, policy)]
        found.setdefault(label, {})[policy] = summarize_policy(samples, passes)
    return found


def summarize_policy(samples: Sequence[Sequence[Any]], passes: Sequence[Any]) -> dict[str, Any]:
    """Return the figures of a policy on a trace. Times are milliseconds but for `seconds`.

    seconds        from the first arrival to the last token
    busy           of these seconds, those in which there was a request
    tokens_per_second, ttft_p50, ttft_p99, gap_p50, gap_p99, gap_max, completion_p50
    gaps           percentile -> gap, for the picture; n_gaps: how many there were
    passes, rows_per_pass
    """
    at, times = 4, 7  # columns: the arrival, and the first of the tokens
    first, gaps = [row[times] - row[at] for row in samples], list[float]()
    for row in samples:
        gaps += [b - a for a, b in pairwise(row[times:])]
    seconds = busy = 0.0
    for n in {row[1] for row in samples}:
        own = [row for row in samples if row[1] == n]
        seconds += (max(row[-1] for row in own) - min(row[at] for row in own)) / 1000
        busy += sum_spans([(row[at], row[-1]) for row in own]) / 1000
    curve = find_percentiles(gaps, PERCENTILES)
    n_passes, n_rows = (sum(row[i] for row in passes) for i in (3, 4))
    ttft = find_percentiles(first, (50, 99))
    return {
        "seconds": seconds,
        "busy": busy,
        "tokens_per_second": sum(len(row) - times for row in samples) / seconds,
        "ttft_p50": ttft["50"],
        "ttft_p99": ttft["99"],
        "gap_p50": curve["50"],
        "gap_p99": curve["99"],
        "gap_max": curve["100"],
        "completion_p50": median(row[-1] - row[at] for row in samples),
        "gaps": curve,
        "n_gaps": len(gaps),
        "passes": n_passes,
        "rows_per_pass": n_rows / n_passes,
    }


def sum_spans(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what spans of time cover together.

    >>> sum_spans([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    covered, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return covered


def find_percentiles(
    values: Sequence[float], percentiles: Iterable[float]
) -> dict[str, float | None]:
    """Return percentiles by their names; None if there are no values.

    >>> find_percentiles([1.0, 2.0, 3.0], (50, 99.9))
    {'50': 2.0, '99.9': 2.998}
    """
    return {
        f"{q:g}": round(float(np.percentile(values, q)), 6) if values else None for q in percentiles
    }


EXPERIMENT = Experiment(
    measure_serve, tabulate_serve, chart_serve, list_serve_notes, describe_validation
)
