"""Run `tinyspec bench`: ask the prompts, time the arms, and measure what else belongs to a run.

1. Plain greedy decoding answers every prompt once. Texts are compared with its answers, and the
   second turn of a conversation contains them.
2. Every arm warms up.
3. The cost curve and the machine's bandwidth and peak are measured in common rounds.
4. The turns are timed.
5. The peak memory of each arm is measured in a process of its own.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinyspec.bench import arms as own
from tinyspec.bench import chapters, curve, measure, memory, peers, tally, tasks
from tinyspec.bench.arms import Arm, Clock
from tinyspec.bench.book import SampleBook
from tinyspec.bench.harness import record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.plan import ArmSpec, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model

CURVE_ROUNDS = 7


def open_book(
    settings: BenchSettings, out: Path | None = None, resume: Path | None = None, **given: Any
) -> SampleBook:
    """Return a new book, or that of the file to resume, to which `given` may only add samples."""
    if resume is None:
        return SampleBook(settings, out, _stamp_sitting(settings))
    if out is not None and out != resume:
        raise TinyspecError("--resume writes to the file that it resumes: leave --out away")
    book = SampleBook.open(resume, _stamp_sitting)
    book.settings = book.settings.enlarge(given)
    return book


def _stamp_sitting(settings: BenchSettings) -> dict[str, Any]:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return stamp_result({})


def run_bench(
    book: SampleBook,
    *,
    chapter: str | None = None,
    curves: bool = True,
    memories: bool = True,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Do what the book does not have yet, and return all of it. Each part is saved when done."""
    if chapter is not None:
        chapters.list_decoders(chapter)  # a wrong name is told first
    model, draft = own.load_arm_models(book.settings, any_method=chapter is not None)
    if chapter is not None and not book.settings.tasks:
        book.settings = replace(book.settings, tasks=chapters.default_tasks(model))
    contestants = list[Arm]()
    if chapter is None:  # a chapter's methods are not known yet
        contestants = own.make_technique_arms(book.settings, model, draft)  # a wrong arm is told
        book.save()  # so that --resume finds the file, however early this run ends
    jobs = make_jobs(book, model, quiet)
    if chapter is not None and not book.samples:
        book.settings, book.skipped, built = chapters.select_techniques(
            chapter, book.settings, model, draft, max(jobs, key=lambda job: len(job.ids))
        )
        book.rest |= {"chapter": chapter, "built": built}
    contestants = contestants or own.make_technique_arms(book.settings, model, draft)
    room = max(curve.CACHED + max(curve.KS), *(len(job.ids) + job.tokens for job in jobs)) + 1
    contestants += peers.make_peer_arms(
        [spec for spec in book.settings.arms if spec.is_peer], book.settings, model, room
    )
    try:
        measure.warm_up_arms(contestants, jobs[0], clock)
        book.note_knobs({arm.label: record_knobs(arm.knobs) for arm in contestants})
        if curves and "curve" not in book.rest:
            book.rest["curve"] = measure_costs(model, contestants, clock, quiet)
            book.save()
        still = measure.count_left(book, jobs, contestants)
        with show_progress_bar(
            f"{model.name}: {len(contestants)} arms, {len(jobs)} prompts", still, quiet
        ) as tick:
            measure.run_turns(book, jobs, contestants, clock, tick)
    finally:
        for arm in contestants:
            arm.close()
    if memories:
        measure_peaks(
            book,
            [spec for spec in book.settings.arms if spec.label not in book.rest.get("memory", {})],
            model,
            jobs,
            quiet,
        )
    book.rest |= add_figures(book, model)
    book.save()
    return book.as_dict()


def make_jobs(book: SampleBook, model: Model, quiet: bool) -> list[Job]:
    """Return the jobs. Plain greedy decoding's answer to each is put into the book."""
    settings = book.settings
    found = tasks.choose_items(settings.tasks, settings.prompts)
    answer = own.make_plain_decoder(model, book.references)
    with show_progress_bar("plain greedy decoding answers", len(found), quiet) as tick:
        jobs = list[Job]()
        for item in found:
            fresh = tasks.list_jobs(model, [item], settings.tokens, answer, settings.until_eos)
            if settings.temperature == 0:
                for job in fresh:
                    answer(job)
            jobs += fresh
            tick()
    if not jobs:
        raise TinyspecError("nothing is asked: name at least one task with --tasks")
    book.check_prompts(jobs)
    return jobs


def measure_costs(model: Model, arms: Sequence[Arm], clock: Clock, quiet: bool) -> dict[str, Any]:
    """Return the seconds of the forward passes, ours and every peer's, and of all meters."""
    cached = min(curve.CACHED, model.config.max_positions - max(curve.KS) - 1)
    if cached < 1:
        raise TinyspecError(
            f"the context of {model.name} is too short for a cost curve: pass --no-curve"
        )
    forwards: dict[str, curve.TimedForward] = {}
    for arm in arms:
        make: Callable[[int], curve.TimedForward] | None = getattr(arm, "forwards", None)
        if make is not None:  # a peer's
            made = make(cached)
            forwards.setdefault(made.label, made)
    every = [curve.OwnForward(model, cached), *forwards.values()]
    meters = curve.make_meters(
        model, *((256, 1024) if model.device.type == "cpu" else (2048, 8192))
    )
    steps = (CURVE_ROUNDS + 1) * (len(every) * len(curve.KS) + len(meters))
    with show_progress_bar("cost curve and ceilings", steps, quiet) as tick:
        raw = curve.measure_curve(every, meters, CURVE_ROUNDS, clock, tick)
    return {"cached": cached, **raw}


def measure_peaks(
    book: SampleBook, specs: Sequence[ArmSpec], model: Model, jobs: Sequence[Job], quiet: bool
) -> None:
    """Measure the peak memory of each arm doing the first job.

    Where that fails, a warning says so and the table shows "-". --resume tries again.
    """
    failures = list[str]()
    with show_progress_bar("peak memory, a process each", len(specs), quiet) as tick:
        for spec in specs:
            try:
                found = memory.measure_arm_memory(spec, book.settings, model, jobs[0])
                book.rest.setdefault("memory", {})[spec.label] = found
            except (TinyspecError, OSError) as error:
                failures.append(str(error))
            book.save()
            tick()
    for failure in failures:
        print(f"warning: {failure}", file=sys.stderr)


def add_figures(book: SampleBook, model: Model) -> Mapping[str, Any]:
    """Return the figures that follow from the book."""
    labels = [spec.label for spec in book.settings.arms]
    made: dict[str, Any] = {"figures": tally.summarize_samples(book.samples, labels)}
    if book.settings.temperature == 0:
        made["texts"] = tally.describe_texts(book.references, model.config.eos)
    if "curve" in book.rest:
        raw = book.rest["curve"]
        made["curve_figures"] = curve.summarize_curve(
            raw, model.config, model.dtype.itemsize, raw["cached"]
        )
    return made
