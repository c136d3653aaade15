"""`tinyspec bench parts`: where the time of a call goes, and how far each part is from what the
machine allows.

A call over k rows behind a text is taken apart by running its parts alone, on the same weights,
rows and cache, in turn with the whole of it. Five are timed: the whole (a session scores a chain of
k - 1 guesses); its layers; its layers where each row sees nothing but itself; the layers' matrices
alone, one after another; the head. What lies between two of them is a part too:

    attention   layers, less layers that see themselves alone: scores and values of the text behind
    between     layers that see themselves alone, less their matrices: norms, activation, meetings
                of threads
    around      the whole, less layers and head: Python, from tokens to logits

A sixth is no part of it: k guesses of which each chooses the next, as a draft model makes them.
What is left over is Python.

Each difference is one of medians, so a small one may come out below zero; and whatever is run alone
wakes the threads and fills the caches for itself. The floor is the cost curve's, by the meters'
medians (`curve.summarize_curve`).
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
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.report import Grid
from tinyspec.bench.settings import PartsSettings
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.engine import Engine
from tinyspec.lm.forward import Seen
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
"""What a call is made of; they add up to it."""


class PassPart:
    """A part of a call by itself. It computes what the call would, of rows that mean nothing."""

    weights: int | None = None

    def __init__(self, label: str, work: Callable[[int], object]):
        self.label, self.work = label, work

    def prepare(self, k: int) -> None:
        """Nothing: what it overwrites is its own."""

    def run(self, k: int) -> None:
        self.work(k)


def make_timed_parts(model: Model, cached: int, most: int = max(KS)) -> list[curve.TimedForward]:
    """The whole call, and the parts that can be run by themselves. Raises TinyspecError where they
    were not compiled.
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
        PassPart(MATRICES, layers.matrices),
        PassPart(HEAD, lambda k: engine.head(layers.rows[k])),
        DraftChain(model, cached),
    ]


class DraftChain(curve.OwnForward):
    """Ours as a draft model: k guesses one after the other, each the best one behind the last."""

    label = GUESSED

    def run(self, k: int) -> None:
        left = iter(range(k - 1, -1, -1))
        if not self.session.draft_chain(k, lambda row: int(row.argmax()) if next(left) else None):
            raise RuntimeError("this session does not let its guesses choose each other")


class CompiledLayers:
    """The compiled layers behind a text of their own, and the matrices that they are made of."""

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

    def run(self, k: int, seen: list[Seen]) -> Any:
        """All layers over k rows, each of which sees these slots: their states [k, d]."""
        slots, x = list(range(self.cached, self.cached + k)), self.rows[k].numpy().copy()
        self.engine.layers(x, self.session.cache, slots, slots, (1, seen))
        return x

    def matrices(self, k: int) -> None:
        """All matrices of the layers, times k rows."""
        threads = torch.get_num_threads()
        for matrix, out, inputs in self.steps:
            x = self.given.reshape(-1)[: k * inputs].reshape(k, inputs)
            matrix.product(x, self.made.reshape(-1)[: k * out].reshape(k, out), threads)


def split_into_parts(raw: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """For each k the milliseconds of the whole and of its parts, from the samples of
    `curve.measure_curve`.

    >>> part = {"tinyspec": [0.010], "layers": [0.008], "layers that see themselves": [0.006], "matrices": [0.005],
    ...         "head": [0.001], "guesses, one by one": [0.012]}
    >>> [(name, round(ms)) for name, ms in split_into_parts({"curves": {n: {"1": s} for n, s in part.items()}})["1"].items()]
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
    """milliseconds: the parts, and the floor under the whole. reads: bytes a second of the layers'
    matrices and of the head where one row goes through them, and of the fastest meter; all in
    medians."""
    whole = {**raw, "curves": {WHOLE: raw["curves"][WHOLE]}}
    found = curve.summarize_curve(whole, config, itemsize, cached)
    rows, parts = found["curves"][WHOLE]["rows"], split_into_parts(raw)
    head = itemsize * config.vocab_size * config.d_model
    bytes_of = {"matrices": curve.weight_bytes(config, itemsize) - head, "head": head}
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
    with show_progress("calls, taken apart", steps, quiet) as tick:
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
    """A row for each length of text and k."""
    least = min(
        of["whole"] for each in result["figures"].values() for of in each["milliseconds"].values()
    )
    digits = 1 if least >= 3 else 2
    rows = [
        [f"{k} after {cached}", *(f"{of[part]:.{digits}f}" for part in ("whole", "floor", *PARTS))]
        for cached, each in result["figures"].items()
        for k, of in each["milliseconds"].items()
    ]
    title = (
        "Milliseconds of a forward pass over k new tokens after a text, and of its parts: "
        f"{result['model']}, "
        f"{result['dtype']}"
    )
    return Grid(title, ["", "whole", "floor", *PARTS], rows)


def describe_parts(result: Mapping[str, Any]) -> list[str]:
    """Return what the page of results says of it: the table, and how each part grows from 1
    position to 8.
    """
    blocks = [
        tabulate_parts(result).table(),
        f'Milliseconds, {result["model"]}, {result["dtype"]}: "8 after 256" is a forward pass over 8 new tokens after a '
        "text of 256. Each part is run alone in the same rounds. *matrices*: of the layers; "
        "*attention*: over the text; "
        "*between*: norms, activation, synchronisation of threads; *around*: Python. The last "
        "three are differences of "
        "medians: where they are small they may be negative.",
    ]
    for cached, of in result["figures"].items():
        one, eight, reads = of["milliseconds"]["1"], of["milliseconds"]["8"], of["reads"]
        grown = ", ".join(f"{part} {eight[part] - one[part]:+.1f}" for part in PARTS)
        blocks.append(
            f"From 1 to 8 positions after {cached} tokens a forward pass grows from "
            f"{one['whole']:.1f} to "
            f"{eight['whole']:.1f} ms: {grown}. A pass over 1 position reads the matrices at "
            f"{reads['matrices'] / 1e9:.0f} GB/s and the head at {reads['head'] / 1e9:.0f}; the "
            "fastest meter in the same "
            f"rounds reads {reads['fastest'] / 1e9:.0f}."
        )
    return blocks


GUESSES = 4  # of speculative decoding in a round of the race, as the card of the draft advises


def describe_race_round(target: Mapping[str, Any], draft: Mapping[str, Any]) -> list[str]:
    """Return what a round of the race costs in plain steps of the target: a draft must bring more
    tokens than that.
    """
    (cached,), (behind,) = target["figures"], draft["figures"]
    calls, steps = (
        target["figures"][cached]["milliseconds"],
        draft["figures"][behind]["milliseconds"],
    )
    plain, judged = calls["1"]["whole"], calls[str(1 + GUESSES)]["whole"]
    step = steps[str(GUESSES)]["guesses"] / GUESSES
    rows = [
        ["plain step of the target", f"{plain:.2f}", "1.00"],
        [
            f"forward pass that verifies {GUESSES} draft tokens",
            f"{judged:.2f}",
            f"{judged / plain:.2f}",
        ],
        ["one draft token", f"{step:.2f}", f"{step / plain:.2f}"],
        [
            f"round of {GUESSES} draft tokens",
            f"{judged + GUESSES * step:.2f}",
            f"{(judged + GUESSES * step) / plain:.2f}",
        ],
    ]
    return [
        Grid("", [f"after {cached} tokens", "ms", "in plain steps"], rows).table(),
        "A round must bring more tokens than the plain steps it costs. All parts: "
        "[parts-storyteller.md](parts-storyteller.md), [parts-apprentice.md](parts-apprentice.md).",
    ]


EXPERIMENT = Experiment(measure_parts, lambda result: [tabulate_parts(result)])
