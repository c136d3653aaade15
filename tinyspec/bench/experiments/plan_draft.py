"""`tinyspec bench plan-draft`: measure draft models, recommend one and a length, and check it.

The planner is `tinyspec/speculative/drafting/planner.py`; here are models, prompts and tables. What
was measured stands in the result under "profile". A file with it, written by --out or by hand,
gives the advice again without a model.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyspec import models
from tinyspec.bench.arms import disable_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.report import Column, Grid, format_speedup, make_grid
from tinyspec.bench.settings import PlanSettings
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.generation import stopping_criteria
from tinyspec.lm.model import Model
from tinyspec.pairing import check_pair
from tinyspec.speculative.drafting.planner import (
    DraftProfile,
    NewRequests,
    Recommendation,
    measure_throughput,
    plan_drafts,
    recommend_drafts,
)
from tinyspec.technique import Clock, Request


def plan_draft(
    given: PlanSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return the profile, the advice, and with `check` the measured throughput of each candidate.

    The forecast is made from one half of the openings of the valid books, and checked on the other
    half. With `numbers`, only the advice is made, from that file.
    """
    if given.numbers is not None:
        return advise_from_file(given.numbers)
    prompts, tokens, sampling = given.prompts, given.tokens, SamplingParams(given.temperature)
    model = disable_eos(models.load(given.model, dtype=given.dtype))
    named = list(dict.fromkeys(given.drafts))
    if not named and "draft" in model.config.extra:
        named = [model.config.extra["draft"]]
    if not named:
        raise TinyspecError(
            f"the card of {model.name} names no draft: give candidates with --drafts A,B,..."
        )
    small = {draft: models.load(draft, dtype=given.dtype) for draft in named}
    for draft in small.values():
        check_pair(model, draft)
    texts = tokenize_openings(model, find_room(model, tokens, *small.values()))
    first, second = (
        {
            label: make_requests(model, draft, half[:prompts], tokens, sampling)
            for label, draft in small.items()
        }
        for half in (texts[::2], texts[1::2])
    )
    title = f"{model.name}: {len(small)} candidates"
    with show_progress_bar(title, 2 if given.check else 1, quiet) as tick:
        verify, profiles, advice = plan_drafts(first, given.longest, clock)
        tick()
        checked = check_forecasts(advice, second, clock) if given.check else {}
        tick()
    return stamp_result(
        {
            "model": model.name,
            "prompts": prompts,
            "tokens": tokens,
            "temperature": given.temperature,
            **_as_result(verify, profiles, advice),
            "checked": checked,
        }
    )


def make_requests(
    model: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: SamplingParams,
) -> NewRequests:
    """Return a function that makes fresh requests for these prompts on the pair."""

    def make() -> Iterator[tuple[Request, Sequence[int]]]:
        for prompt in prompts:
            yield (
                Request(
                    model.session(),
                    [draft.session()],
                    sampling,
                    stopping_criteria(model, (), tokens),
                    positions=model.config.max_positions,
                    draft_max_lengths=[draft.config.max_positions],
                ),
                prompt,
            )

    return make


def check_forecasts(
    advice: Sequence[Recommendation], asked: Mapping[str, NewRequests], clock: Clock
) -> dict[str, Any]:
    """Measure tokens per second and TAR of plain decoding, and of each draft at its best length."""
    first = next(iter(asked.values()))
    found = {
        (a.draft or "plain"): measure_throughput(
            first if a.draft is None else asked[a.draft], a.n, clock
        )
        for a in advice
    }
    return {name: {"rate": rate, "tar": tar} for name, (rate, tar) in found.items()}


def advise_from_file(path: Path) -> dict[str, Any]:
    """Return the recommendation for measured numbers.

    path  a file of `plan_draft`, or what stands in it under "profile"
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers = found.get("profile", found)
        verify = [float(seconds) for seconds in numbers["verify"]]
        profiles = [
            DraftProfile(str(d["name"]), float(d["step"]), [float(x) for x in d["reach"]])
            for d in numbers["drafts"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TinyspecError(
            f"{path}: no measured numbers ({type(error).__name__}: {error}); expected "
            '{"verify": [seconds of a call over 0, 1, ... drafted tokens], '
            '"drafts": [{"name", "step", "reach"}]}'
        ) from error
    for draft in profiles:
        fall = all(1 >= a >= b >= 0 for a, b in zip([1.0, *draft.reach], draft.reach, strict=False))
        if not (draft.step >= 0 and fall):
            raise TinyspecError(
                f"{path}: {draft.name}: step is seconds, and reach are shares that fall from at "
                "most 1"
            )
    return {**_as_result(verify, profiles, recommend_drafts(verify, profiles)), "checked": {}}


def _as_result(
    verify: Sequence[float], profiles: Sequence[DraftProfile], advice: Sequence[Recommendation]
) -> dict[str, Any]:
    drafts = [{"name": p.name, "step": p.step, "reach": list(p.reach)} for p in profiles]
    return {
        "profile": {"verify": list(verify), "drafts": drafts},
        "advice": [a._asdict() for a in advice],
    }


def tabulate_advice(result: Mapping[str, Any]) -> Grid:
    """Return the advice as a table, the fastest first."""
    checked, steps = result["checked"], {d["name"]: d["step"] for d in result["profile"]["drafts"]}
    rows = {
        a["draft"] or "plain": {
            **a,
            "milliseconds": None if a["draft"] is None else 1e3 * steps[a["draft"]],
            "measured": checked.get(a["draft"] or "plain"),
        }
        for a in result["advice"]
    }

    def describe_missing(of: Mapping[str, Any]) -> str:
        if of["draft"] is None:
            return "-"
        return "no n helps" if of["missing"] is None else f"{of['missing']:.2f}"

    columns = [
        Column("n", "n"),
        Column("ms a step", "milliseconds", ".2f"),
        Column("TAR", "tar", ".2f"),
        Column("tokens/s", "rate", ".1f"),
        Column("gain", "gain", format_speedup),
        Column("TAR to add", describe_missing),
    ]
    if checked:
        plain = checked["plain"]["rate"]
        columns += [
            Column("measured TAR", ("measured", "tar"), ".2f"),
            Column("tokens/s", ("measured", "rate"), ".1f"),
            Column("gain", lambda of: of["measured"]["rate"] / plain, format_speedup),
        ]
    title = "Drafts at their best length, forecast from their measured steps and reach"
    return make_grid(title, rows, columns)


def recommend_command(result: Mapping[str, Any]) -> str:
    """Return the recommendation as a line."""
    best = result["advice"][0]
    if best["draft"] is None:
        return "recommended: plain decoding; no candidate pays at any length"
    return (
        f"recommended: --method speculative_decoding --draft {best['draft']} --gamma {best['n']}: "
        f"{best['gain']:.2f} times plain decoding by the forecast"
    )


EXPERIMENT = Experiment(
    plan_draft,
    lambda result: [tabulate_advice(result)],
    closing=lambda result: [recommend_command(result)],
)
