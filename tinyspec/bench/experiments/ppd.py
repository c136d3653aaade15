"""`tinyspec bench ppd`: measure predictions of the next token in the middle of a model.

There are three kinds of figures:

    match rates  at every layer, how often the model's own greedy token is among the k most likely
                 there, position by position along one text
    clock        layer-steps on k + 1 processors, and layer evaluations, against plain decoding's:
                 by the theorem from the match rates, and counted from the forward log of real runs
                 at one layer
    wall time    of four arms: plain decoding; the pipeline in one thread, where its branches cost
                 extra; the pipeline in two threads, where they run beside the newest token; and
                 plain decoding that splits every product between two threads

All arms take turns on the same prompts, and their tokens are compared. A clock counts layers only.
Threads also pay for the head, for Python and for handing over. Where that is more than is saved,
the figure is a slow-down.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch

from tinyspec import models
from tinyspec.bench.arms import Clock, decode_to_length, disable_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import name_dtype, record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import (
    Column,
    Grid,
    describe_provenance,
    format_quartiles,
    make_grid,
)
from tinyspec.bench.settings import PpdSettings
from tinyspec.bench.tally import five_number_summary
from tinyspec.bench.tasks import tokenize_openings
from tinyspec.decoding.pipeline import NO_DRAFT
from tinyspec.early_exit.ppd import count_layer_steps, expected_cost, resolve_guess_layer
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model

PLAIN, SERIAL, THREADS, SHARED = (
    "plain",
    "ppd, one thread",
    "ppd, two threads",
    "plain, two threads",
)
ARMS: dict[str, tuple[int, dict[str, Any]]] = {
    PLAIN: (1, {"method": "autoregressive"}),
    SERIAL: (1, {"method": "ppd", "k": 1}),
    THREADS: (1, {"method": "ppd", "k": 1, "threads": True}),
    SHARED: (2, {"method": "autoregressive"}),
}
"""Threads that a product is shared out between, and the method."""


def measure_ppd(
    given: PpdSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return all figures with their samples, at temperature 0.

    Raises TinyspecError for a layer out of range, and for too many tokens.
    """
    ks, tokens, rounds = given.ks, given.tokens, given.rounds
    model = disable_eos(models.load(given.model, dtype=given.dtype))
    depth, room = model.config.n_layers, model.config.max_positions - tokens
    layer = resolve_guess_layer(given.layer, depth, model.name)
    if room < 1 or tokens < 2:
        raise TinyspecError(
            f"{tokens} new tokens: give 2 to {model.config.max_positions - 1}, to fit into "
            f"{model.name}"
        )
    texts = tokenize_openings(model, room)[: given.prompts]
    steps = len(texts) * (1 + rounds) + 1
    with show_progress_bar(f"{model.name}: {depth} layers", steps, quiet) as tick:
        ranks = []
        for text in texts:
            ranks.append(rank_by_layer(model, text, decode_to_length(model, text, tokens)[0]))
            tick()
        counted = {str(k): _count_layer_steps(model, texts, tokens, layer, k) for k in ks}
        tick()
        samples, same, knobs = _time_arms(model, texts, tokens, layer, rounds, clock, tick)
    made = {
        "model": model.name,
        "n_layers": depth,
        "dtype": name_dtype(model.dtype),
        "layer": layer,
        "ks": list(ks),
        "tokens": tokens,
        "rounds": rounds,
        "knobs": knobs,
        "ranks": ranks,
        "counted": counted,
        "columns": ["prompt", "round", "arm", "seconds"],
        "samples": samples,
        "identical": same,
    }
    return stamp_result({**made, "figures": summarize_ppd(made)})


# ---------------------------------------------------------------------- what is measured


def rank_by_layer(model: Model, prompt: Sequence[int], text: Sequence[int]) -> list[list[int]]:
    """Return the rank that each layer gives to each token of the text: [layers][tokens - 1].

    Rank 0 is the layer's most likely token. Equal logits rank with the lowest id first, as in the
    pipeline. The last token has no rank: nothing is predicted after it.
    """
    session, depth = model.session(), model.config.n_layers
    session.extend(prompt)
    found: list[list[int]] = [[] for _ in range(depth)]
    for token in text[:-1]:
        for layer in range(1, depth + 1):  # each run goes on where the one before has stopped
            row = session.run_to_layer(NO_DRAFT, layer, head=True).logits[0]
            above = int((row > row[token]).sum()) + int((row[:token] == row[token]).sum())
            found[layer - 1].append(above)
        session.score(NO_DRAFT)
        session.commit((), token)
    return found


def _count_layer_steps(
    model: Model, texts: Sequence[Sequence[int]], tokens: int, layer: int, k: int
) -> list[list[float]]:
    """Return layer-steps and layer evaluations of a real run on each prompt, from its log."""
    found = []
    for text in texts:
        calls = [
            round.calls
            for round in start_generation(
                model, text, method="ppd", layer=layer, k=k, max_new_tokens=tokens
            )
        ]
        found.append(
            [
                sum(map(count_layer_steps, calls)),
                sum(call.row_layers for round in calls for call in round),
            ]
        )
    return found


def _time_arms(
    model: Model,
    texts: Sequence[Sequence[int]],
    tokens: int,
    layer: int,
    rounds: int,
    clock: Clock,
    tick: Any,
) -> tuple[list[list[Any]], bool, dict[str, dict[str, Any]]]:
    """Time every arm on every prompt in turns, and compare the texts.

    Returns the seconds after the prompt's own pass, whether all wrote the same, and the knobs that
    each arm ran with.
    """
    samples, written, threads = list[list[Any]](), dict[int, list[int]](), torch.get_num_threads()
    same, knobs = True, dict[str, dict[str, Any]]()
    try:
        for turn in range(-1, rounds):  # the first is to warm up
            for number, text in enumerate(texts):
                names = list(ARMS) if turn % 2 else list(reversed(ARMS))
                for name in names:
                    shared, arm = ARMS[name]
                    torch.set_num_threads(shared)
                    at = {"layer": layer} if arm["method"] == "ppd" else {}
                    running = start_generation(
                        model, text, **{**arm, **at, "max_new_tokens": tokens}
                    )
                    begun = clock()
                    for _ in running:
                        pass
                    seconds = clock() - begun
                    new, knobs[name] = running.result().tokens, record_knobs(running.knobs)
                    same = same and written.setdefault(number, new) == new
                    if turn >= 0:
                        samples.append([number, turn, name, seconds])
                if turn >= 0:
                    tick()
    finally:
        torch.set_num_threads(threads)
    return samples, same, knobs


# ---------------------------------------------------------------------- what follows from it


def summarize_ppd(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return every figure, from ranks, counts and samples alone.

    match        layer -> k -> share of tokens among the k likeliest
    clock, work  layer -> k -> plain decoding's layer-steps over the pipeline's; its evaluations
                 over plain decoding's
    counted      the same two from the forward log, at the layer that was run, beside the theorem's
    wall         arm -> plain decoding's seconds over its own in the same round, as five numbers;
                 above 1 is faster
    """
    depth, tokens = result["n_layers"], result["tokens"]
    match: dict[str, dict[str, float]] = {}
    clock: dict[str, dict[str, float]] = {}
    work: dict[str, dict[str, float]] = {}
    for layer in range(1, depth + 1):
        ranks = [rank for prompt in result["ranks"] for rank in prompt[layer - 1]]
        match[str(layer)] = {str(k): mean(rank < k for rank in ranks) for k in result["ks"]}
        if 2 * layer >= depth:
            costs = {
                k: _forecast_gains(depth, layer, int(k), p, tokens)
                for k, p in match[str(layer)].items()
            }
            clock[str(layer)], work[str(layer)] = (
                {k: cost[i] for k, cost in costs.items()} for i in (0, 1)
            )
    counted = {}
    for k, runs in result["counted"].items():
        plain = depth * tokens * len(runs)
        ran, done = (sum(run[i] for run in runs) for i in (0, 1))
        forecast = _forecast_gains(
            depth, result["layer"], int(k), match[str(result["layer"])][k], tokens
        )
        counted[k] = {"clock": plain / ran, "work": done / plain, "theorem": list(forecast)}
    seconds = {(prompt, turn, arm): value for prompt, turn, arm, value in result["samples"]}
    wall = {
        name: five_number_summary(
            [seconds[p, t, PLAIN] / value for (p, t, arm), value in seconds.items() if arm == name]
        )
        for name in ARMS
    }
    beside = [
        seconds[p, t, SERIAL] / value for (p, t, arm), value in seconds.items() if arm == THREADS
    ]
    pace = median(value / tokens for (_, _, arm), value in seconds.items() if arm == PLAIN)
    return {
        "match": match,
        "clock": clock,
        "work": work,
        "counted": counted,
        "wall": wall,
        "two_threads_against_one": five_number_summary(beside),
        "plain_milliseconds_a_token": 1000 * pace,
    }


def _forecast_gains(
    depth: int, layer: int, k: int, match: float, tokens: int
) -> tuple[float, float]:
    """Return (times as fast by the clock, times the work), against plain decoding."""
    ran, done = expected_cost(depth, layer, k, match, tokens)
    return depth * tokens / ran, done / (depth * tokens)


def tabulate_ppd(result: Mapping[str, Any]) -> list[Grid]:
    """Return the tables of match rates and clock by layer, and of the arms' wall time."""
    of, ks = result["figures"], [str(k) for k in result["ks"]]
    rows = {
        f"layer {layer} of {result['n_layers']}": {
            "match": match,
            "gains": {
                k: f"{of['clock'][layer][k]:.2f} for {of['work'][layer][k]:.2f}"
                if layer in of["clock"]
                else "-"
                for k in ks
            },
        }
        for layer, match in of["match"].items()
    }
    columns = [
        *(Column(f"match, k={k}", ("match", k), ".3f") for k in ks),
        *(Column(f"clock for work, k={k}", ("gains", k)) for k in ks),
    ]
    about = (
        f"{result['model']}: tokens predicted by an early layer, and their worth on k + 1 "
        "processors (times as fast, times the work)"
    )
    forward_log = of["counted"].get("1")
    forecast = f"; the clock says {forward_log['clock']:.2f}" if forward_log else ""
    tokens = "all tokens alike" if result["identical"] else "TOKENS DIFFER"
    title = (
        f"Wall time at layer {result['layer']}, k=1: times as fast as plain decoding "
        f"({of['plain_milliseconds_a_token']:.2f} ms a token), {tokens}{forecast}"
    )
    timed = {**of["wall"], "ppd, two threads against one": of["two_threads_against_one"]}
    times = Column("times as fast", lambda five: five, format_quartiles)
    return [make_grid(about, rows, columns), make_grid(title, timed, [times])]


def chart_ppd(result: Mapping[str, Any]) -> Chart:
    """Draw match rates and the clock over the layers. The notes say what threads reach."""
    of, ks, wall = result["figures"], [str(k) for k in result["ks"]], result["figures"]["wall"]

    def over_layers(figure: str) -> dict[str, dict[float, float]]:
        return {f"k = {k}": {int(layer): row[k] for layer, row in of[figure].items()} for k in ks}

    serial, threads, shared = (format_quartiles(wall[arm]) for arm in (SERIAL, THREADS, SHARED))
    measured = (
        f"Measured at layer {result['layer']}, k = 1, against plain decoding: one thread {serial}, "
        f"two threads {threads}; plain decoding on two threads {shared}."
    )
    return Chart(
        f"{result['model']}: the next token, predicted by an early layer",
        [
            Lines("share of predictions that hold", over_layers("match"), "layer"),
            Lines(
                "times as fast by the clock, k + 1 processors",
                over_layers("clock"),
                "layer",
                reference=1,
            ),
        ],
        [
            measured,
            f"{result['dtype']}, greedy, {len(result['ranks'])} prompts, {result['tokens']} "
            f"tokens, {result['rounds']} rounds; {describe_provenance(result)}",
        ],
        measured,
    )


EXPERIMENT = Experiment(measure_ppd, tabulate_ppd, chart_ppd)
