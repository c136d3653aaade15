"""`tinyspec bench parts`: measure the parts of a forward pass, and the least that it could take.

The parts of a forward pass over k positions after a text run alone, on the same weights, inputs and
cache, in turn with the whole. Five are timed:

    whole       a session scores a chain of k - 1 draft tokens
    layers      all layers
    blind       all layers, but each position attends to itself only
    matrices    the matrices of the layers, one after another
    head        the product with the vocabulary matrix

The differences are parts too:

    attention   layers - blind: scores and values of the text before
    between     blind - matrices: norms, activation, synchronisation of threads
    around      whole - layers - head: Python, from tokens to logits

A sixth is timed that is no part: k draft tokens, each of which chooses the next, as a draft model
makes them.

Differences are of medians, so a small one may be below zero. A part that runs alone wakes the
threads and fills the caches for itself. The floor is the cost curve's, by the meters' medians
(`curve.summarize_curve`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from tinyspec import models
from tinyspec.bench import curve
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.report import Column, Grid, make_grid
from tinyspec.bench.settings import PartsSettings
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.engine import Engine
from tinyspec.lm.forward import SeenSlots
from tinyspec.lm.model import Model

KS = (1, 2, 4, 5, 8, 12, 16, 32)
WHOLE, LAYERS, BLIND, MATRICES, HEAD = (
    "tinyspec",
    "layers",
    "layers that see themselves",
    "matrices",
    "head",
)
GUESSED = "guesses, one by one"
PARTS = ("matrices", "head", "attention", "between", "around")
"""The parts of a forward pass; they add up to it."""


class PassPart:
    """A part of a forward pass that runs alone, on inputs that mean nothing."""

    weights: int | None = None

    def __init__(self, label: str, work: Callable[[int], object]):
        self.label, self.work = label, work

    def prepare(self, k: int) -> None:
        """Do nothing: the part overwrites only what is its own."""

    def run(self, k: int) -> None:
        self.work(k)


def make_timed_parts(model: Model, cached: int, most: int = max(KS)) -> list[curve.TimedForward]:
    """Return the whole pass, and the parts that can run alone.

    Raises TinyspecError if the layers are not compiled, or the text does not fit.
    """
    engine = model.engine
    if engine is None:
        raise TinyspecError(
            "bench parts takes the compiled layers apart: on a CPU, in float32 or bfloat16"
        )
    if cached < 1 or cached + most + 1 > model.config.max_positions:
        raise TinyspecError(
            f"{cached} cached tokens and {most} new ones do not fit the context of {model.name}"
        )
    layers = CompiledLayers(model, engine, cached, most)
    return [
        curve.OwnForward(model, cached),
        PassPart(LAYERS, lambda k: layers.run(k, [(cached + row + 1, ()) for row in range(k)])),
        PassPart(BLIND, lambda k: layers.run(k, [(0, (cached + row,)) for row in range(k)])),
        PassPart(MATRICES, layers.multiply_matrices),
        PassPart(HEAD, lambda k: engine.compute_logits(layers.rows[k])),
        DraftChain(model, cached),
    ]


class DraftChain(curve.OwnForward):
    """Our draft model: k greedy draft tokens, one after the other."""

    label = GUESSED

    def run(self, k: int) -> None:
        left = iter(range(k - 1, -1, -1))
        if not self.session.draft_chain(k, lambda row: int(row.argmax()) if next(left) else None):
            raise RuntimeError("this session does not let its draft tokens choose each other")


class CompiledLayers:
    """The compiled layers after a text of their own, and their matrices."""

    def __init__(self, model: Model, engine: Engine, cached: int, most: int):
        self.engine, self.cached, config = engine, cached, model.config
        self.session = model.session()
        self.session.extend(
            [7 * i % config.vocab_size for i in range(cached + most + 1)]
        )  # so that there are slots
        noise = torch.randn(most, config.d_model, generator=torch.Generator().manual_seed(0))
        self.rows = {k: noise[:k] for k in range(1, most + 1)}
        names = [
            f"{i}.{part}.weight"
            for i in range(config.n_layers)
            for part in ("qkv", "out", "up", "down")
        ]
        self.steps = [(engine.matrices[name], *config.shapes()[name]) for name in names]
        widest = max(max(out, inputs) for _, out, inputs in self.steps)
        self.given = np.ones((most, widest), np.float32)
        self.made = np.empty((most, widest), np.float32)

    def run(self, k: int, seen: list[SeenSlots]) -> Any:
        """Run all layers over k positions that see these slots. Returns their states [k, d]."""
        slots, x = list(range(self.cached, self.cached + k)), self.rows[k].numpy().copy()
        self.engine.run_layers(x, self.session.cache, slots, slots, (1, seen))
        return x

    def multiply_matrices(self, k: int) -> None:
        """Multiply all matrices of the layers with k rows."""
        threads = torch.get_num_threads()
        for matrix, out, inputs in self.steps:
            x = self.given.reshape(-1)[: k * inputs].reshape(k, inputs)
            matrix.product(x, self.made.reshape(-1)[: k * out].reshape(k, out), threads)


def split_into_parts(raw: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return, for each k, the milliseconds of the whole pass and of its parts.

    raw  the samples of `curve.measure_curve`

    >>> part = {WHOLE: [0.010], LAYERS: [0.008], BLIND: [0.006], MATRICES: [0.005],
    ...         HEAD: [0.001], GUESSED: [0.012]}
    >>> found = split_into_parts({"curves": {name: {"1": s} for name, s in part.items()}})
    >>> [(name, round(ms)) for name, ms in found["1"].items()]
    [('whole', 10), ('matrices', 5), ('head', 1), ('attention', 2), ('between', 1), ('around', 1),
    ('guesses', 12)]
    """
    found: dict[str, dict[str, float]] = {}
    for k in raw["curves"][WHOLE]:
        ms = {label: 1e3 * median(samples[k]) for label, samples in raw["curves"].items()}
        found[k] = {
            "whole": ms[WHOLE],
            "matrices": ms[MATRICES],
            "head": ms[HEAD],
            "attention": ms[LAYERS] - ms[BLIND],
            "between": ms[BLIND] - ms[MATRICES],
            "around": ms[WHOLE] - ms[LAYERS] - ms[HEAD],
            **({"guesses": ms[GUESSED]} if GUESSED in ms else {}),  # older results have none
        }
    return found


def summarize_parts(
    raw: Mapping[str, Any], config: Config, itemsize: int, cached: int
) -> dict[str, Any]:
    """Return the figures of a forward pass, all in medians.

    milliseconds  of the parts, and the floor under the whole
    reads         bytes per second of the layers' matrices and of the head at one position, and of
                  the fastest meter
    """
    whole = {**raw, "curves": {WHOLE: raw["curves"][WHOLE]}}
    found = curve.summarize_curve(whole, config, itemsize, cached)
    rows, parts = found["curves"][WHOLE]["rows"], split_into_parts(raw)
    head = itemsize * config.vocab_size * config.d_model
    bytes_of = {"matrices": curve.count_weight_bytes(config, itemsize) - head, "head": head}
    reads = (
        {part: 1e3 * size / parts["1"][part] for part, size in bytes_of.items()}
        if "1" in parts
        else {}
    )
    return {
        "milliseconds": {
            k: {**of, "floor": of["whole"] / rows[k]["usually"]} for k, of in parts.items()
        },
        "reads": {
            **reads,
            "fastest": curve.find_highest_ceilings(curve.find_ceilings(whole, median))[0],
        },
    }


def measure_parts(
    given: PartsSettings,
    quiet: bool = False,
    ks: Sequence[int] = KS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return milliseconds of each part after texts of these lengths, with all samples."""
    name, dtype, cached, rounds = given.model, given.dtype, given.cached, given.rounds
    model = models.load(name, dtype=dtype)
    arms = {length: make_timed_parts(model, length, max(ks)) for length in cached}
    meters = curve.make_meters(model)
    samples, found = dict[str, Any](), dict[str, Any]()
    steps = (rounds + 1) * (
        sum(len(each) for each in arms.values()) * len(ks) + len(arms) * len(meters)
    )
    with show_progress_bar("calls, taken apart", steps, quiet) as tick:
        for length, each in arms.items():
            raw = curve.measure_curve(each, meters, rounds, clock, tick, ks)
            samples[str(length)], found[str(length)] = (
                raw,
                summarize_parts(raw, model.config, model.dtype.itemsize, length),
            )
    return stamp_result(
        {"model": name, "dtype": dtype, "rounds": rounds, "samples": samples, "figures": found}
    )


def tabulate_parts(result: Mapping[str, Any]) -> Grid:
    """Return the table of parts, a line for each length of text and each k."""
    rows = {
        f"{k} after {cached}": of
        for cached, each in result["figures"].items()
        for k, of in each["milliseconds"].items()
    }
    digits = 1 if min(of["whole"] for of in rows.values()) >= 3 else 2
    title = (
        "Milliseconds of a forward pass over k new tokens after a text, and of its parts: "
        f"{result['model']}, {result['dtype']}"
    )
    columns = [Column(part, part, f".{digits}f") for part in ("whole", "floor", *PARTS)]
    return make_grid(title, rows, columns)


def describe_parts(result: Mapping[str, Any]) -> list[str]:
    """Return the table, and how each part grows from 1 position to 8."""
    grid = tabulate_parts(result)
    blocks = [
        Grid("", grid.header, grid.rows).to_markdown(),
        f'Milliseconds, {result["model"]}, {result["dtype"]}: "8 after 256" is a forward pass over '
        "8 new tokens after a text of 256. Each part is run alone in the same rounds. *matrices*: "
        "of the layers; *attention*: over the text; *between*: norms, activation, synchronisation "
        "of threads; *around*: Python. The last three are differences of medians: where they are "
        "small they may be negative.",
    ]
    for cached, of in result["figures"].items():
        one, eight, reads = of["milliseconds"]["1"], of["milliseconds"]["8"], of["reads"]
        grown = ", ".join(f"{part} {eight[part] - one[part]:+.1f}" for part in PARTS)
        blocks.append(
            f"From 1 to 8 positions after {cached} tokens a forward pass grows from "
            f"{one['whole']:.1f} to {eight['whole']:.1f} ms: {grown}. A pass over 1 position reads "
            f"the matrices at {reads['matrices'] / 1e9:.0f} GB/s and the head at "
            f"{reads['head'] / 1e9:.0f}; the fastest meter in the same rounds reads "
            f"{reads['fastest'] / 1e9:.0f}."
        )
    return blocks


GAMMA = 4  # draft tokens in a round of the race, as the card of the draft advises


def tabulate_race_round(target: Mapping[str, Any], draft: Mapping[str, Any]) -> str:
    """Return what a round of the race costs in plain steps: a draft must bring more tokens."""
    ((cached, of),) = target["figures"].items()
    ((_, of_draft),) = draft["figures"].items()
    plain = of["milliseconds"]["1"]["whole"]
    verify = of["milliseconds"][str(1 + GAMMA)]["whole"]
    step = of_draft["milliseconds"][str(GAMMA)]["guesses"] / GAMMA
    rows = {
        "plain step of the target": plain,
        f"forward pass that verifies {GAMMA} draft tokens": verify,
        "one draft token": step,
        f"round of {GAMMA} draft tokens": verify + GAMMA * step,
    }
    columns = [
        Column("ms", lambda ms: ms, ".2f"),
        Column("in plain steps", lambda ms: ms / plain, ".2f"),
    ]
    return make_grid("", rows, columns, first=f"after {cached} tokens").to_markdown()


EXPERIMENT = Experiment(measure_parts, lambda result: [tabulate_parts(result)])
