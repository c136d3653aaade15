"""`tinyspec bench race`: plain decoding against a technique over committed prompts, greedy and
sampled.

The prompts are ten openings of paragraphs from the three valid books, which no model of the zoo was
trained on. For each, the two arms race `rounds` times; the ratio is that of their median seconds
per token, and the figure is the median over prompts. Text that loops is easy to guess: a repetition
penalty keeps greedy text from looping, for both arms alike, and the share of distinct 4-grams
stands beside every ratio.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from statistics import median
from typing import Any

from tinyspec import models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.settings import RaceSettings
from tinyspec.generation import start_generation
from tinyspec.show.race import race, warm_up


def read_race_prompts() -> list[dict[str, str]]:
    """The committed prompts: [{"book", "text"}]."""
    loaded: list[dict[str, str]] = json.loads(
        files("tinyspec.bench").joinpath("prompts.json").read_text("utf-8")
    )
    return loaded


def measure_race(
    given: RaceSettings, knobs: Mapping[str, Any] | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Return ratios by prompt and temperature, with tokens per forward pass, distinct 4-grams, and
    raw seconds per token.
    """
    name, method, tokens, rounds = given.model, given.method, given.tokens, given.rounds
    temperatures, repetition_penalty = given.temperatures, given.repetition_penalty
    knobs = dict(knobs or {})
    model = models.load(name)
    draft = models.load(model.config.extra["draft"]) if "draft" in model.config.extra else None
    texts = read_race_prompts()
    figures: dict[str, Any] = {
        "model": name,
        "method": method,
        "knobs": knobs,
        "tokens": tokens,
        "rounds": rounds,
    }
    figures["repetition_penalty"] = repetition_penalty
    with show_progress(f"{name}: {method}", len(temperatures) * len(texts) * rounds, quiet) as tick:
        for temperature in temperatures:
            rows: list[dict[str, Any]] = []
            for number, prompt in enumerate(texts):

                def arm(
                    which: str,
                    text: str = prompt["text"],
                    t: float = temperature,
                    seed: int = number,
                ) -> Any:
                    extra = knobs if which == method else {}
                    settings: dict[str, Any] = {
                        "max_new_tokens": tokens,
                        "temperature": t,
                        "repetition_penalty": repetition_penalty,
                    }
                    return lambda: start_generation(
                        model, text, method=which, draft=draft, seed=seed, **settings, **extra
                    )

                arms = [("autoregressive", arm("autoregressive")), (method, arm(method))]
                if number == 0:
                    warm_up([make for _, make in arms])
                samples: dict[str, list[float]] = {label: [] for label, _ in arms}
                for turn in range(rounds):
                    lanes = race(model, arms if turn % 2 == 0 else arms[::-1])
                    for lane in lanes:
                        samples[lane.method].append(lane.seconds_per_token)
                    tick()
                by = {lane.method: lane for lane in lanes}
                rows.append(
                    {
                        "prompt": number,
                        "samples": samples,
                        "ratio": median(samples["autoregressive"]) / median(samples[method]),
                        "tokens_per_call": by[method].stats.tokens_per_call,
                        "acceptance": by[method].stats.acceptance,
                        "distinct_4grams": {label: lane.distinct for label, lane in by.items()},
                        "identical": by[method].tokens == by["autoregressive"].tokens,
                    }
                )
            figures[f"temperature {temperature}"] = {
                "prompts": rows,
                "ratio": median(row["ratio"] for row in rows),
                "tokens_per_call": median(row["tokens_per_call"] for row in rows),
                "acceptance": median(row["acceptance"] for row in rows),
                "distinct_4grams": median(row["distinct_4grams"]["autoregressive"] for row in rows),
                "identical": sum(row["identical"] for row in rows),
            }
    return stamp_result(figures)


EXPERIMENT = Experiment(measure_race)
