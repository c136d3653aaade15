"""`tinyspec bench osd`: measure how the acceptance of a draft changes while it learns (osd).

Two arms answer the same prompts in the same order, with the same seeds: online speculative
decoding, whose draft takes a step after every few requests, and speculative decoding with the same
draft as it was. So the difference of the two is what the updates do. Counted are tested draft
tokens (accepted ones, and one rejected token a round at most) and target passes; the seconds of a
request and of what follows it, where an update may be, stand apart.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec import models
from tinyspec.bench.arms import disable_eos, list_draft_names
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.exit_arms import draw_passages, read_classics
from tinyspec.bench.harness import (
    identify_inputs,
    name_dtype,
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.plan import BenchSettings
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import Column, Grid, describe_provenance, make_grid
from tinyspec.bench.settings import OnlineSettings
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.technique import Clock, find_technique

ONLINE, FROZEN = "online", "frozen"
METHODS = {FROZEN: "speculative_decoding", ONLINE: "osd"}


class OnlineSample(NamedTuple):
    """One request of one arm.

    tested   draft tokens that the target judged: accepted ones and the first rejected one
    passes   of the target
    seconds  of the request; after: of what its end does, an update too
    """

    prompt: int
    arm: str
    tokens: int
    tested: int
    accepted: int
    passes: int
    seconds: float
    after: float

    @property
    def counts(self) -> tuple[int, ...]:
        """Return what does not depend on the machine's load."""
        return self[2:6]


def measure_online(
    given: OnlineSettings,
    out: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Return all figures with their samples. `out` is written after each prompt."""
    shared = {"gamma": given.gamma}
    own = {**shared, "interval": given.interval, "lr": given.lr, "loss": given.loss}
    knobs = {
        arm: find_technique(METHODS[arm]).settings(own if arm == ONLINE else shared)
        for arm in METHODS
    }
    target = models.load(given.model, dtype=given.dtype)
    names = list_draft_names(BenchSettings(given.model, draft=given.draft), target)
    if not names:
        raise TinyspecError(f"the card of {target.name} names no draft: name one with --draft")
    draft = models.load(names[0], dtype=given.dtype)
    texts = given.texts or read_classics()
    asked = draw_passages(
        target, texts, given.prompts, given.prompt_tokens, given.tokens, given.seed
    )
    settings = {
        "model": target.name,
        "draft": draft.name,
        "dtype": name_dtype(target.dtype),
        "prompts": given.prompts,
        "chunk": given.chunk,
        "tokens": given.tokens,
        "prompt_tokens": given.prompt_tokens,
        "temperature": given.temperature,
        "seed": given.seed,
        "knobs": {arm: record_knobs(of) for arm, of in knobs.items()},
        "inputs": identify_inputs([target.weights, draft.weights], [one.prompt for one in asked]),
    }
    samples: list[OnlineSample] = read_unfinished(out, resume, "osd", settings, _read_samples, [])
    model, done = disable_eos(target), len(samples) // len(METHODS)

    def make_result() -> dict[str, Any]:
        made = {
            "settings": settings,
            "columns": OnlineSample._fields,
            "samples": [list(sample) for sample in samples],
        }
        return stamp_result({**made, "figures": summarize_online(made)})

    title = f"{target.name} and {draft.name}: {given.prompts} prompts"
    with show_progress_bar(title, given.prompts, quiet) as tick:
        for number, passage in enumerate(asked if done < len(asked) else []):
            for arm in METHODS if number >= done else [ONLINE]:
                sample = _answer(model, draft, number, arm, passage.prompt, given, knobs, clock)
                if number >= done:
                    samples.append(sample)
                elif sample.counts != samples[len(METHODS) * number + 1].counts:
                    raise TinyspecError(
                        f"prompt {number} of {out} has other counts when it is answered again, so "
                        "the draft has not learned the same: leave --resume"
                    )
            if number >= done:
                save_result(out, make_result())
            tick()
    result = make_result()
    save_result(out, result)
    return result


def _answer(
    model: Model,
    draft: Model,
    number: int,
    arm: str,
    prompt: Sequence[int],
    given: OnlineSettings,
    knobs: Mapping[str, Mapping[str, Any]],
    clock: Clock,
) -> OnlineSample:
    """Answer a prompt by an arm."""
    running = start_generation(
        model,
        list(prompt),
        method=METHODS[arm],
        draft=draft,
        max_new_tokens=given.tokens,
        temperature=given.temperature,
        seed=given.seed + number,
        **knobs[arm],
    )
    decoder, tested, accepted, passes = running.decoder, 0, 0, 0
    begun = clock()
    for round in decoder.run(running.rng):
        passes += 1
        accepted += len(round.verdict.accepted)
        was_rejected = bool(round.verdict.rejected) and round.verdict.next is not None
        tested += len(round.verdict.accepted) + was_rejected
    ended, tokens = clock(), len(decoder.new)
    running.close()
    return OnlineSample(
        number, arm, tokens, tested, accepted, passes, ended - begun, clock() - ended
    )


def _read_samples(found: dict[str, Any]) -> list[OnlineSample]:
    """Return the samples of an interrupted run: those of whole prompts."""
    read = [OnlineSample._make(row) for row in found["samples"]]
    expected = [(number, arm) for number in range(len(read) // len(METHODS)) for arm in METHODS]
    if [(sample.prompt, sample.arm) for sample in read] != expected:
        raise ValueError
    return read


def summarize_online(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by chunk of prompts, and over all of them, from the samples alone."""
    samples = [OnlineSample._make(row) for row in result["samples"]]
    chunk, figures = result["settings"]["chunk"], dict[str, Any]()
    whole = max((sample.prompt for sample in samples), default=-1) + 1
    spans = [(first, min(first + chunk, whole)) for first in range(0, whole, chunk)]
    for first, last in [*spans, (0, whole)][: len(spans) + (len(spans) > 1)]:
        row = dict[str, Any]()
        for arm in METHODS:
            own = [s for s in samples if s.arm == arm and first <= s.prompt < last]
            tested = sum(s.tested for s in own)
            row[arm] = {
                "alpha": sum(s.accepted for s in own) / tested if tested else None,
                "tau": sum(s.tokens for s in own) / max(sum(s.passes for s in own), 1),
                "seconds": sum(s.seconds for s in own),
                "after": sum(s.after for s in own),
            }
        figures[f"{first + 1} to {last}"] = row
    return figures


COLUMNS = [
    Column("accepted, frozen", (FROZEN, "alpha"), ".3f"),
    Column("accepted, online", (ONLINE, "alpha"), ".3f"),
    Column("tokens a pass, frozen", (FROZEN, "tau"), ".3f"),
    Column("tokens a pass, online", (ONLINE, "tau"), ".3f"),
    Column("s, frozen", (FROZEN, "seconds"), ".2f"),
    Column("s, online", (ONLINE, "seconds"), ".2f"),
    Column("s of updates", (ONLINE, "after"), ".2f"),
]


def tabulate_online(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of chunks."""
    settings = result["settings"]
    knobs = settings["knobs"][ONLINE]
    title = (
        f"{settings['draft']} drafts for {settings['model']}, gamma {knobs['gamma']}; an update "
        f"after every {knobs['interval']} requests, {knobs['loss']}, learning rate {knobs['lr']:g}"
    )
    return [make_grid(title, result["figures"], COLUMNS, first="prompts")]


def chart_online(result: Mapping[str, Any]) -> Chart:
    """Draw the acceptance and the tokens of a pass over the prompts."""
    rows = list(result["figures"].items())
    rows = rows[:-1] if len(rows) > 1 else rows  # the last one is of all prompts
    shown = {"alpha": "accepted of tested draft tokens", "tau": "tokens of a target pass"}
    names = {i: name for i, (name, _) in enumerate(rows)}
    panels = [
        Lines(
            title,
            {
                arm: {i: row[arm][key] or 0.0 for i, (_, row) in enumerate(rows)}
                for arm in (ONLINE, FROZEN)
            },
            "prompts",
            x_names=names,
        )
        for key, title in shown.items()
    ]
    summary = "; ".join(
        f"prompts {name}: {row[ONLINE]['tau']:.3f} tokens a pass, {row[FROZEN]['tau']:.3f} frozen"
        for name, row in rows
    )
    return Chart("A draft that learns between requests", panels, describe_online(result), summary)


def describe_online(result: Mapping[str, Any]) -> list[str]:
    """Return what stands below the table."""
    s = result["settings"]
    return [
        "Accepted: share of the draft tokens that the target judged. Frozen: the same draft "
        "without updates.",
        f"{s['prompts']} passages of {s['prompt_tokens']} tokens, {s['tokens']} new ones each, "
        f"temperature {s['temperature']:g}, {s['dtype']}, {describe_provenance(result)}.",
    ]


EXPERIMENT = Experiment(measure_online, tabulate_online, chart_online, describe_online)
