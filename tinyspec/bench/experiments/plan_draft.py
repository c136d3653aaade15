"""`tinyspec bench plan-draft`: measure candidates, recommend a draft and a length, and hold the
forecast against decoding.

The planner is `tinyspec/speculative/drafting/planner.py`; here are models, prompts and tables. What
was measured stands in the result under "profile", and a file with it (written by --out, or by hand)
can be asked again without a model.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyspec import models
from tinyspec.bench.arms import without_eos
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.report import Grid, format_number, format_speedup
from tinyspec.bench.settings import PlanSettings
from tinyspec.bench.tasks import read_openings
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.generation import prompt_ids, stopping_criteria
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
    """Return the profile, the advice, and with `check` the measured throughput of every candidate
    beside its forecast.

    The forecast is made from one half of the openings of the valid books, and checked on the other
    half. With `numbers`, only the advice is made, from that file.
    """
    if given.numbers is not None:
        return advise_from_file(given.numbers)
    dtype, longest, prompts, tokens = given.dtype, given.longest, given.prompts, given.tokens
    temperature, check = given.temperature, given.check
    model = without_eos(models.load(given.model, dtype=dtype))
    named = list(dict.fromkeys(given.drafts)) or [
        model.config.extra[key] for key in ("draft",) if key in model.config.extra
    ]
    if not named:
        raise TinyspecError(
            f"the card of {model.name} names no draft: give candidates with --drafts A,B,..."
        )
    small = {draft: models.load(draft, dtype=dtype) for draft in named}
    for draft in small.values():
        check_pair(model, draft)
    room = min(m.config.max_positions for m in (model, *small.values())) - tokens
    if room < 1:
        raise TinyspecError(
            f"{tokens} new tokens do not fit into the context of {model.name}: fewer --tokens"
        )
    texts = [prompt_ids(model, text)[-room:] for text in read_openings()]
    halves = texts[::2][:prompts], texts[1::2][:prompts]
    asked = [
        {
            label: make_requests(model, draft, half, tokens, SamplingParams(temperature))
            for label, draft in small.items()
        }
        for half in halves
    ]
    with show_progress(f"{model.name}: {len(small)} candidates", 2 if check else 1, quiet) as tick:
        verify, profiles, advice = plan_drafts(asked[0], longest, clock)
        tick()
        checked = check_forecasts(advice, asked[1], clock) if check else {}
        tick()
    settings = {"prompts": prompts, "tokens": tokens, "temperature": temperature}
    return stamp_result(
        {
            "model": model.name,
            **settings,
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
    """Fresh requests for these prompts on the pair, each time it is called."""

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
    """Measured tokens a second and TAR of each candidate at its best length, and plain
    decoding's.
    """
    first = next(iter(asked.values()))
    found = {
        (a.draft or "plain"): measure_throughput(
            first if a.draft is None else asked[a.draft], a.n, clock
        )
        for a in advice
    }
    return {name: {"rate": rate, "tar": tar} for name, (rate, tar) in found.items()}


def advise_from_file(path: Path) -> dict[str, Any]:
    """The recommendation for measured numbers: a file of `plan_draft`, or what stands in it under
    "profile", by hand.
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
            '{"verify": [seconds of a call over 0, 1, ... drafted tokens], "drafts": [{"name", "step", "reach"}]}'
        ) from error
    for draft in profiles:
        fall = all(1 >= a >= b >= 0 for a, b in zip([1.0, *draft.reach], draft.reach, strict=False))
        if not (draft.step >= 0 and fall):
            raise TinyspecError(
                f"{path}: {draft.name}: step is seconds, and reach are shares that fall from at most 1"
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
    """The advice as a table, the fastest first."""
    checked, steps = result["checked"], {d["name"]: d["step"] for d in result["profile"]["drafts"]}
    rows = []
    for a in result["advice"]:
        name = a["draft"] or "plain"
        real = checked.get(name)
        plain = checked.get("plain")
        lacks = (
            "-"
            if a["draft"] is None
            else "no n helps"
            if a["missing"] is None
            else f"{a['missing']:.2f}"
        )
        rows.append(
            [
                name,
                str(a["n"]),
                "-" if a["draft"] is None else format_number(1e3 * steps[name]),
                format_number(a["tar"]),
                format_number(a["rate"], 1),
                format_speedup(a["gain"]),
                lacks,
                *(
                    [
                        format_number(real["tar"]),
                        format_number(real["rate"], 1),
                        format_speedup(real["rate"] / plain["rate"]),
                    ]
                    if real and plain
                    else []
                ),
            ]
        )
    head = ["", "n", "ms a step", "TAR", "tokens/s", "gain", "TAR to add"]
    return Grid("Drafts at their best length, forecast from their measured steps and reach",
                [*head, *(["measured TAR", "tokens/s", "gain"] if checked else [])], rows)  # fmt: skip


def recommend_command(result: Mapping[str, Any]) -> str:
    """What to do."""
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
