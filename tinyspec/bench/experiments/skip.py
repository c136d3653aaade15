"""`tinyspec bench skip`: which sublayers a model's draft leaves out, found by measuring (Draft &
Verify, section 3.2).

The search is in `tinyspec/speculative/drafting/self_speculative.py`; here are the model, the
prompts and the clock. Each set is timed in turn with plain decoding, on the same prompts, and
counts by the ratio of the two, so that a machine that becomes slower meanwhile misleads nobody. The
best of many noisy timings flatters itself: in the end it is timed again, on prompts that the search
has not seen, beside the default set.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tinyspec import models
from tinyspec.bench.arms import without_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import read_unfinished, save_result, show_progress, stamp_result
from tinyspec.bench.settings import SkipSettings
from tinyspec.bench.tasks import read_openings
from tinyspec.errors import TinyspecError
from tinyspec.generation import prompt_ids, start_generation
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.self_speculative import (
    SkipSet,
    SkipSetSearch,
    format_skip_set,
    parse_skip_set,
)
from tinyspec.technique import Clock

METHOD = "self_speculative"
CHECKS = 3  # how often the best set is timed in the end


def initial_skip_sets(n_layers: int) -> list[SkipSet]:
    """What the search is shown first: nothing skipped, the default, and thin, regular sets of
    either kind.
    """
    layers = range(1, n_layers - 1)
    regular = [
        *({2 * layer for layer in layers[first::step]} for step in (2, 3) for first in (0, 1)),
        *({2 * layer + 1 for layer in layers[first::step]} for step in (2, 3) for first in (0, 1)),
        {sublayer for layer in layers[::2] for sublayer in (2 * layer, 2 * layer + 1)},
    ]
    return list(
        dict.fromkeys(
            [frozenset[int](), parse_skip_set("default", n_layers), *map(frozenset, regular)]
        )
    )


def search_skip_set(
    given: SkipSettings,
    out: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Search, then time the best set again. With `out`, every evaluation is written as it comes;
    with `resume`, the file is gone on with.
    """
    evaluations, prompts, tokens = given.evaluations, given.prompts, given.tokens
    temperature, seed = given.temperature, given.seed
    SkipSetSearch(1)  # says at once if the library is missing
    model = without_eos(models.load(given.model, dtype=given.dtype))
    n_layers, room = model.config.n_layers, model.config.max_positions - tokens
    if room < 1:
        raise TinyspecError(
            f"{tokens} new tokens do not fit into the context of {model.name}: fewer --tokens"
        )
    texts = [prompt_ids(model, text)[-room:] for text in read_openings()]
    asked, fresh = texts[:prompts], texts[-prompts:]
    settings = {
        "model": model.name, "n_layers": n_layers, "dtype": str(model.dtype).removeprefix("torch."), "prompts": prompts,
        "tokens": tokens, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    done: list[dict[str, Any]] = []
    if resume:
        done = read_unfinished(out, "skip", settings, _read_evaluations) or []
    search, first = SkipSetSearch(n_layers, seed), initial_skip_sets(n_layers)
    for entry in done:
        search.tell(parse_skip_set(entry["skip"], n_layers), entry["speed"])
    plain = {"method": "autoregressive", "temperature": temperature}
    result: dict[str, Any] = {}
    with show_progress(
        f"{model.name}: {2 * n_layers} sublayers", evaluations + CHECKS, quiet
    ) as tick:
        for number in range(evaluations):
            if number >= len(done):
                skip = first[number] if number < len(first) else search.suggest()
                entry = _time_turn(model, asked, tokens, plain, skip, number, clock)
                search.tell(skip, entry["speed"])
                best = max(entry["speed"], *(before["best"] for before in done[-1:]), 0.0)
                done.append({**entry, "best": best})
                result = {**settings, "skip": format_skip_set(search.best), "evaluations": done}
                if out is not None:
                    save_result(out, stamp_result(result))
            tick()
        skip = search.best
        result = {
            **settings,
            "skip": format_skip_set(skip),
            "sublayers_skipped": len(skip),
            "evaluations": done,
        }
        for what, chosen in (("checked", skip), ("default", parse_skip_set("default", n_layers))):
            turns = []
            for turn in range(CHECKS):
                turns.append(_time_turn(model, fresh, tokens, plain, chosen, turn, clock))
                if what == "checked":
                    tick()
            result[what] = {
                "skip": format_skip_set(chosen),
                **{
                    figure: median(turn[figure] for turn in turns)
                    for figure in ("speed", "accepted", "seconds", "plain")
                },
            }
    result = stamp_result(result)
    if out is not None:
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
    """A set and plain decoding on the same prompts, one after the other, in turns: seconds a token,
    and their ratio.
    """
    ours = {**plain, "method": METHOD, "skip": format_skip_set(skip)}
    timed = [
        _time_arm(model, prompts, tokens, arm, clock)
        for arm in ((ours, plain) if number % 2 else (plain, ours))
    ]
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
    """Seconds a token, without the prompt's; the share of drafted tokens that was accepted."""
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


EXPERIMENT = Experiment(search_skip_set)
