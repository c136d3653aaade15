"""`tinyspec bench skip`: search the sublayers that a model's draft skips (Draft & Verify, 3.2).

The search is in `tinyspec/speculative/drafting/self_speculative.py`; here are the model, the
prompts and the clock. Each set is timed in turn with plain decoding, on the same prompts, and its
score is the ratio of the two. So a machine that becomes slower does not mislead the search. The
best of many noisy timings looks better than it is. So it is timed again in the end, on prompts that
the search has not seen, beside the default set.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tinyspec import models
from tinyspec.bench.arms import disable_eos
from tinyspec.bench.experiment import Experiment, Result
from tinyspec.bench.harness import (
    identify_inputs,
    name_dtype,
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.report import format_speedup
from tinyspec.bench.settings import SkipSettings
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.self_speculative import (
    SkipSet,
    SkipSetSearch,
    format_skip_set,
    parse_skip_set,
)
from tinyspec.technique import Clock, find_technique

METHOD = "self_speculative"
CHECKS = 3  # how often the best set is timed in the end


def initial_skip_sets(n_layers: int) -> list[SkipSet]:
    """Return the first sets: nothing skipped, the default, and every second or third sublayer."""
    layers = range(1, n_layers - 1)
    regular = [
        *({2 * layer for layer in layers[first::step]} for step in (2, 3) for first in (0, 1)),
        *({2 * layer + 1 for layer in layers[first::step]} for step in (2, 3) for first in (0, 1)),
        {sublayer for layer in layers[::2] for sublayer in (2 * layer, 2 * layer + 1)},
    ]
    default = parse_skip_set("default", n_layers)
    return list(dict.fromkeys([frozenset[int](), default, *map(frozenset, regular)]))


def search_skip_set(
    given: SkipSettings,
    out: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Search a skip set, then time it again. `out` is written after each evaluation."""
    SkipSetSearch(1)  # reports at once if the library is missing
    model = disable_eos(models.load(given.model, dtype=given.dtype))
    n_layers, tokens = model.config.n_layers, given.tokens
    texts = tokenize_openings(model, find_room(model, tokens))
    asked, fresh = texts[: given.prompts], texts[-given.prompts :]
    settings = {
        "model": model.name,
        "n_layers": n_layers,
        "dtype": name_dtype(model.dtype),
        "prompts": given.prompts,
        "tokens": tokens,
        "temperature": given.temperature,
        "seed": given.seed,
        "inputs": identify_inputs([model.weights], texts),
    }
    done: list[dict[str, Any]] = read_unfinished(
        out, resume, "skip", settings, _read_evaluations, []
    )
    search, first = SkipSetSearch(n_layers, given.seed), initial_skip_sets(n_layers)
    for entry in done:
        search.tell(parse_skip_set(entry["skip"], n_layers), entry["speed"], entry.get("point"))
    plain = {"method": "autoregressive", "temperature": given.temperature}
    title, steps = f"{model.name}: {2 * n_layers} sublayers", given.evaluations + CHECKS
    with show_progress_bar(title, steps, quiet) as tick:
        for number in range(given.evaluations):
            if number >= len(done):
                skip = first[number] if number < len(first) else search.suggest()
                entry = _time_turn(model, asked, tokens, plain, skip, number, clock)
                search.tell(skip, entry["speed"])
                best = max(entry["speed"], *(before["best"] for before in done[-1:]), 0.0)
                done.append({**entry, "best": best, "point": search.points[skip]})
                skip_text = format_skip_set(search.best)
                save_result(out, stamp_result({**settings, "skip": skip_text, "evaluations": done}))
            tick()
        checked = {}
        sets = {"checked": search.best, "default": parse_skip_set("default", n_layers)}
        for what, skip in sets.items():
            turns = []
            for number in range(CHECKS):
                turns.append(_time_turn(model, fresh, tokens, plain, skip, number, clock))
                if what == "checked":
                    tick()
            text = format_skip_set(skip)
            knobs = find_technique(METHOD).settings({"skip": text})
            checked[what] = {"skip": text, "knobs": record_knobs(knobs)} | {
                figure: median(turn[figure] for turn in turns)
                for figure in ("speed", "accepted", "seconds", "plain")
            }
    result = stamp_result(
        {
            **settings,
            "skip": format_skip_set(search.best),
            "sublayers_skipped": len(search.best),
            "evaluations": done,
            **checked,
        }
    )
    save_result(out, result)
    return result


def _time_turn(
    model: Model,
    prompts: Sequence[Any],
    tokens: int,
    plain: dict[str, Any],
    skip: SkipSet,
    number: int,
    clock: Clock,
) -> dict[str, Any]:
    """Time a set and plain decoding on the same prompts. Every turn reverses their order."""
    ours = {**plain, "method": METHOD, "skip": format_skip_set(skip)}
    arms = (ours, plain) if number % 2 else (plain, ours)
    timed = [_time_arm(model, prompts, tokens, arm, clock) for arm in arms]
    (seconds, accepted), (alone, _) = timed if number % 2 else timed[::-1]
    return {
        "skip": format_skip_set(skip),
        "seconds": seconds,
        "plain": alone,
        "speed": alone / seconds,
        "accepted": accepted,
    }


def _time_arm(
    model: Model, prompts: Sequence[Any], tokens: int, arm: dict[str, Any], clock: Clock
) -> tuple[float, float]:
    """Return the seconds per token after the prompt, and the share of draft tokens accepted."""
    seconds, made, drafted, accepted = 0.0, 0, 0, 0
    for prompt in prompts:
        running = start_generation(model, prompt, max_new_tokens=tokens, **arm)
        begun = clock()
        made += sum(len(round.tokens) for round in running)
        seconds += clock() - begun
        drafted, accepted = drafted + running.stats.drafted, accepted + running.stats.accepted
    return seconds / made, accepted / drafted if drafted else 0.0


def _read_evaluations(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations of an interrupted search, or of one that is to be longer."""
    return [
        {**entry, "speed": float(entry["speed"]), "best": float(entry["best"])}
        for entry in found["evaluations"]
    ]


def compare_with_default(result: Result) -> list[str]:
    """Return how fast the found set and the default are on prompts that the search never saw."""
    found, default = result["checked"]["speed"], result["default"]["speed"]
    verdict = "no faster than the default" if found <= default else "faster than the default"
    return [
        f"found after {len(result['evaluations'])} evaluations: {result['skip']}",
        f"on fresh prompts, against plain decoding: the found set {format_speedup(found, 'x')}, "
        f"the default set {format_speedup(default, 'x')}: the found set is {verdict}",
    ]


EXPERIMENT = Experiment(search_skip_set, closing=compare_with_default)
