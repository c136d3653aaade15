"""`tinyspec bench ppd`: how often a layer in the middle guesses the next token, what the pipeline's
clock makes of it, and what two threads do.

Three kinds of figures, which are not one. *Match rates*: at every layer, how often the model's own
greedy token is among the k likeliest there, position by position along one text. *The clock*:
layer-steps on k + 1 processors and layer evaluations, against plain decoding's, by the theorem from
the match rates, and counted from the forward log of real runs at one layer. *Wall time*: plain
decoding, the pipeline in one thread, where its branches come on top, and in two, where they run
beside the newest token; each thread computes alone, so the fourth arm is plain decoding that shares
out every product between two threads. All arms take turns on the same prompts, and their tokens are
compared. A clock counts layers; threads also pay for the head, for Python and for handing over:
where that is more than is saved, the figure is below 1 and says so.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch

from tinyspec import models
from tinyspec.bench.arms import Clock, without_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import Grid, describe_provenance, format_number, format_quartiles
from tinyspec.bench.settings import PpdSettings
from tinyspec.bench.tally import five_numbers
from tinyspec.bench.tasks import read_openings
from tinyspec.early_exit.ppd import NO_DRAFT, count_layer_steps, expected_cost, resolve_guess_layer
from tinyspec.errors import TinyspecError
from tinyspec.generation import prompt_ids, start_generation
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
    """Return all figures with their samples, at temperature 0. Raises TinyspecError for a layer out
    of range and too many tokens.
    """
    ks, prompts, tokens, rounds = given.ks, given.prompts, given.tokens, given.rounds
    model = without_eos(models.load(given.model, dtype=given.dtype))
    depth, room = model.config.n_layers, model.config.max_positions - tokens
    layer = resolve_guess_layer(given.layer, depth, model.name)
    if room < 1 or tokens < 2:
        raise TinyspecError(
            f"{tokens} new tokens: give 2 to {model.config.max_positions - 1}, to fit into {model.name}"
        )
    texts = [prompt_ids(model, text)[-room:] for text in read_openings()[:prompts]]
    with show_progress(f"{model.name}: {depth} layers", prompts * (1 + rounds) + 1, quiet) as tick:
        ranks = []
        for text in texts:
            ranks.append(
                rank_by_layer(model, text, _decode(model, text, tokens, method="autoregressive"))
            )
            tick()
        counted = {str(k): _count_layer_steps(model, texts, tokens, layer, k) for k in ks}
        tick()
        samples, same = _time_arms(model, texts, tokens, layer, rounds, clock, tick)
    made = {
        "model": model.name,
        "n_layers": depth,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layer": layer,
        "ks": list(ks),
        "tokens": tokens,
        "rounds": rounds,
        "ranks": ranks,
        "counted": counted,
        "columns": ["prompt", "round", "arm", "seconds"],
        "samples": samples,
        "identical": same,
    }
    return stamp_result({**made, "figures": summarize_ppd(made)})


# ---------------------------------------------------------------------- what is measured


def rank_by_layer(model: Model, prompt: Sequence[int], text: Sequence[int]) -> list[list[int]]:
    """For every layer, the rank that it gives to each token of the text but the last, behind which
    nothing is guessed.

    Returns [layers][tokens - 1]; 0: its likeliest. Equal logits rank as the guesses do, the lowest
    id first.
    """
    session, depth = model.session(), model.config.n_layers
    session.extend(prompt)
    found: list[list[int]] = [[] for _ in range(depth)]
    for token in text[:-1]:
        for layer in range(1, depth + 1):  # each run goes on where the one before has left the row
            row = session.advance(NO_DRAFT, layer, head=True).logits[0]
            above = int((row > row[token]).sum()) + int((row[:token] == row[token]).sum())
            found[layer - 1].append(above)
        session.score(NO_DRAFT)
        session.commit((), token)
    return found


def _decode(model: Model, prompt: Sequence[int], tokens: int, **arm: Any) -> list[int]:
    running = start_generation(model, prompt, max_new_tokens=tokens, **arm)
    for _ in running:
        pass
    return running.result().tokens


def _count_layer_steps(
    model: Model, texts: Sequence[Sequence[int]], tokens: int, layer: int, k: int
) -> list[list[float]]:
    """Layer-steps and layer evaluations of real runs, from their ledgers, a prompt each."""
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
) -> tuple[list[list[Any]], bool]:
    """Seconds of every arm on every prompt, without the prompt's own pass, in turns; and whether
    all wrote the same.
    """
    samples, said, threads = list[list[Any]](), dict[int, list[int]](), torch.get_num_threads()
    same = True
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
                    new = running.result().tokens
                    same = same and said.setdefault(number, new) == new
                    if turn >= 0:
                        samples.append([number, turn, name, seconds])
                if turn >= 0:
                    tick()
    finally:
        torch.set_num_threads(threads)
    return samples, same


# ---------------------------------------------------------------------- what follows from it


def summarize_ppd(result: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure from ranks, counts and samples alone.

    match        layer -> k -> share of tokens among the k likeliest
    clock, work  layer -> k -> plain decoding's layer-steps over the pipeline's; its evaluations
                 over plain decoding's
    counted      the same two from the forward log, at the layer that was run, with what the theorem
                 says there
    wall         arm -> plain decoding's seconds over its own, in the same round, as five numbers; >
                 1 is faster
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
        said = _forecast_gains(
            depth, result["layer"], int(k), match[str(result["layer"])][k], tokens
        )
        counted[k] = {"clock": plain / ran, "work": done / plain, "theorem": list(said)}
    seconds = {(prompt, turn, arm): value for prompt, turn, arm, value in result["samples"]}
    wall = {
        name: five_numbers(
            [seconds[p, t, PLAIN] / value for (p, t, arm), value in seconds.items() if arm == name]
        )
        for name in ARMS
    }
    beside = [
        seconds[p, t, SERIAL] / value for (p, t, arm), value in seconds.items() if arm == THREADS
    ]
    pace = median(value / tokens for (_, _, arm), value in seconds.items() if arm == PLAIN)
    return {
        "match": match, "clock": clock, "work": work, "counted": counted, "wall": wall,
        "two_threads_against_one": five_numbers(beside), "plain_milliseconds_a_token": 1000 * pace,
    }  # fmt: skip


def _forecast_gains(
    depth: int, layer: int, k: int, match: float, tokens: int
) -> tuple[float, float]:
    """(times as fast by the clock, times the work), against plain decoding. At the last layer
    nothing is begun.
    """
    ran, done = expected_cost(depth, layer, k, match, tokens)
    return depth * tokens / ran, done / (depth * tokens)


def tabulate_ppd(result: Mapping[str, Any]) -> list[Grid]:
    """Match rates and clock by layer, and the wall time of the arms."""
    of, ks = result["figures"], [str(k) for k in result["ks"]]
    rows = []
    for layer, match in of["match"].items():
        clock, work = of["clock"].get(layer), of["work"].get(layer)
        cells = [f"{clock[k]:.2f} for {work[k]:.2f}" if clock and work else "-" for k in ks]
        rows.append(
            [
                f"layer {layer} of {result['n_layers']}",
                *(format_number(match[k], 3) for k in ks),
                *cells,
            ]
        )
    head = ["", *(f"match, k={k}" for k in ks), *(f"clock for work, k={k}" for k in ks)]
    about = (
        f"{result['model']}: tokens predicted by an early layer, and their worth on k + 1 processors "
        "(times as fast, times the work)"
    )
    timed = [[name, format_quartiles(five)] for name, five in of["wall"].items()]
    forward_log = of["counted"].get("1")
    forecast = f"; the clock says {forward_log['clock']:.2f}" if forward_log else ""
    tokens = "all tokens alike" if result["identical"] else "TOKENS DIFFER"
    title = (
        f"Wall time at layer {result['layer']}, k=1: times as fast as plain decoding "
        f"({of['plain_milliseconds_a_token']:.2f} ms a token), {tokens}{forecast}"
    )
    timed.append(["ppd, two threads against one", format_quartiles(of["two_threads_against_one"])])
    return [Grid(about, head, rows), Grid(title, ["", "times as fast"], timed)]


def chart_ppd(result: Mapping[str, Any]) -> Chart:
    """Draw match rates and the clock over the layers; the notes tell what threads reach."""
    of, ks, wall = result["figures"], [str(k) for k in result["ks"]], result["figures"]["wall"]

    def over_layers(figure: str) -> dict[str, dict[float, float]]:
        return {f"k = {k}": {int(layer): row[k] for layer, row in of[figure].items()} for k in ks}

    measured = (
        f"Measured at layer {result['layer']}, k = 1, against plain decoding: one thread {format_quartiles(wall[SERIAL])}, "
        f"two threads {format_quartiles(wall[THREADS])}; plain decoding on two threads {format_quartiles(wall[SHARED])}."
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
            f"{result['dtype']}, greedy, {len(result['ranks'])} prompts, {result['tokens']} tokens, "
            f"{result['rounds']} rounds; {describe_provenance(result)}",
        ],
        measured,
    )


EXPERIMENT = Experiment(measure_ppd, tabulate_ppd, chart_ppd)
