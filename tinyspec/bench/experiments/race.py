"""`tinyspec bench race`: compare plain decoding with a technique, greedy and sampled.

The prompts are ten openings of paragraphs from the three valid books, which no model of the zoo was
trained on. For each, the two arms race `rounds` times. The ratio is that of their median seconds
per token, and the figure is the median over prompts. Text that loops is easy to predict. So a
repetition penalty keeps greedy text from looping, for both arms alike, and the share of distinct
4-grams stands beside every ratio.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

from tinyspec import models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import (
    ratio_of_medians,
    record_knobs,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.plan import PLAIN
from tinyspec.bench.settings import RaceSettings
from tinyspec.bench.tasks import read_committed
from tinyspec.generation import start_generation
from tinyspec.show.race import race, warm_up


def measure_race(
    given: RaceSettings, knobs: Mapping[str, Any] | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Return figures by temperature and prompt, with the seconds per token that they come from."""
    method, knobs, texts = given.method, dict(knobs or {}), read_committed("prompts.json")
    ran: dict[str, Any] = {}
    model = models.load(given.model)
    draft = models.load(model.config.extra["draft"]) if "draft" in model.config.extra else None

    def race_on_prompt(number: int, temperature: float) -> dict[str, Any]:
        def make_start(which: str) -> Any:
            return lambda: start_generation(
                model,
                texts[number]["text"],
                method=which,
                draft=draft,
                seed=number,
                max_new_tokens=given.tokens,
                temperature=temperature,
                repetition_penalty=given.repetition_penalty,
                **(knobs if which == method else {}),
            )

        arms = [(which, make_start(which)) for which in (PLAIN, method)]
        if number == 0:
            warm_up([start for _, start in arms])
        samples: dict[str, list[float]] = {label: [] for label, _ in arms}
        for turn in range(given.rounds):
            lanes = race(model, arms if turn % 2 == 0 else arms[::-1])
            for lane in lanes:
                samples[lane.method].append(lane.seconds_per_token)
            tick()
        by = {lane.method: lane for lane in lanes}
        ran.update(record_knobs(by[method].knobs))
        return {
            "prompt": number,
            "samples": samples,
            "ratio": ratio_of_medians(samples, PLAIN, method),
            "tokens_per_call": by[method].stats.tokens_per_call,
            "acceptance": by[method].stats.acceptance,
            "distinct_4grams": {label: lane.distinct for label, lane in by.items()},
            "identical": by[method].tokens == by[PLAIN].tokens,
        }

    figures: dict[str, Any] = {
        "model": given.model,
        "method": method,
        "knobs": ran,
        "tokens": given.tokens,
        "rounds": given.rounds,
        "repetition_penalty": given.repetition_penalty,
    }
    steps = len(given.temperatures) * len(texts) * given.rounds
    with show_progress_bar(f"{given.model}: {method}", steps, quiet) as tick:
        for temperature in given.temperatures:
            rows = [race_on_prompt(number, temperature) for number in range(len(texts))]
            figures[f"temperature {temperature}"] = {
                "prompts": rows,
                **{
                    name: median(row[name] for row in rows)
                    for name in ("ratio", "tokens_per_call", "acceptance")
                },
                "distinct_4grams": median(row["distinct_4grams"][PLAIN] for row in rows),
                "identical": sum(row["identical"] for row in rows),
            }
    return stamp_result(figures)


EXPERIMENT = Experiment(measure_race)
