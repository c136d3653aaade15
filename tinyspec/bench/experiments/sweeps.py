"""`tinyspec bench sweeps`: measure Jacobi iteration by the size of its blocks.

For each size: tokens that a sweep fixes (tau), passes and positions per token, and time in turns
with plain decoding, on openings of the valid books. A pass over b positions is not free, and a
model that was trained left to right seldom predicts a right token after a wrong one. A slow-down
is printed as one. The file has all sweeps of one opening over the largest block, to be drawn.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tinyspec import models
from tinyspec.bench import measure, tally
from tinyspec.bench.arms import Arm, Clock, TechniqueArm, ask_openings, disable_eos
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import name_dtype, record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import Column, Grid, describe_provenance, format_quartiles, make_grid
from tinyspec.bench.settings import SweepSettings
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive.jacobi import trace_sweeps
from tinyspec.technique import find_technique

METHOD = "jacobi"
WHOLE = "all"  # PJ: all tokens that are wanted are one block


def make_block_arm(block: str, init: str) -> ArmSpec:
    """Return the arm of a block size, or of WHOLE."""
    form: tuple[str, Any] = ("form", "pj") if block == WHOLE else ("block", int(block))
    return ArmSpec(METHOD, (form, ("init", init)))


def measure_sweeps(
    given: SweepSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return all figures with their samples.

    Raises TinyspecError for no block, and for a wrong knob.
    """
    blocks, init, tokens = given.blocks, given.init, given.tokens
    labels = [*dict.fromkeys(map(str, sorted(blocks))), *([WHOLE] if given.whole else [])]
    if not labels:
        raise TinyspecError(
            "there is nothing to measure: name sizes of blocks, such as --blocks 1,2,4, or leave "
            "--whole"
        )
    specs = {label: make_block_arm(label, init) for label in labels}
    for spec in specs.values():
        find_technique(METHOD).settings(dict(spec.knobs))
    model = models.load(given.model, dtype=given.dtype)
    settings = BenchSettings(
        given.model,
        dtype=name_dtype(model.dtype),
        tasks=("books",),
        prompts=given.prompts,
        tokens=tokens,
        rounds=given.rounds,
    )
    book = SampleBook(settings)
    jobs = ask_openings(model, settings, book.references)
    arms: list[Arm] = [TechniqueArm(ArmSpec(PLAIN), model, settings)]
    arms += [TechniqueArm(spec, model, settings, label=label) for label, spec in specs.items()]
    title = f"{model.name}: {len(labels)} sizes of blocks"
    with show_progress_bar(title, measure.count_left(book, jobs, arms), quiet) as tick:
        measure.warm_up_arms(arms, jobs[0], clock)
        measure.run_turns(book, jobs, arms, clock, tick)
    made = {
        "model": model.name,
        "settings": settings.as_dict(),
        "init": init,
        "blocks": labels,
        "knobs": {arm.label: record_knobs(arm.knobs) for arm in arms},
        "sweeps": _trace_sweeps(model, jobs[0].ids, tokens, specs[labels[-1]]),
        **book.list_samples(),
    }
    return stamp_result({**made, "figures": summarize_sweeps(made)})


def _trace_sweeps(model: Model, prompt: Sequence[int], tokens: int, arm: ArmSpec) -> dict[str, Any]:
    """Return every sweep of one request: block, predictions, and how many of them are final."""
    running = start_generation(
        disable_eos(model), list(prompt), method=METHOD, max_new_tokens=tokens, **dict(arm.knobs)
    )
    trace = [  # the keys are those of committed results
        {"guess": sweep.block, "said": sweep.predicted, "fixed": sweep.n_final}
        for sweep in trace_sweeps(running.decoder, running.rng)
    ]
    return {"prompt": list(prompt), **dict(arm.knobs), "new": running.decoder.new, "trace": trace}


def summarize_sweeps(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by size, from the samples alone."""
    samples = [Sample(*row) for row in result["samples"]]
    found: dict[str, Any] = {}
    for label in result["blocks"]:
        own = [sample for sample in samples if sample.arm == label]
        counts, tokens = tally.count_samples(own), sum(sample.tokens for sample in own)
        same = [sample.same == sample.tokens for sample in own if sample.same is not None]
        found[label] = {
            "tau": counts["tau"],
            "passes_per_token": counts["calls_per_token"],
            "rows_per_token": sum(sample.calls + (sample.nodes or 0) for sample in own) / tokens,
            "guesses_kept": counts["acceptance"],
            "speedup": tally.five_number_summary(
                list(tally.paired_ratios(samples, PLAIN, label).values())
            ),
            "identical": sum(same),
            "of": len(same),
        }
    return found


COLUMNS = (
    Column("fixed per sweep", "tau", ".3f"),
    Column("passes per token", "passes_per_token", ".3f"),
    Column("positions per token", "rows_per_token", ".2f"),
    Column("draft tokens accepted", "guesses_kept", ".3f"),
    Column("times as fast", "speedup", format_quartiles),
    Column("same", lambda of: f"{of['identical']} of {of['of']}"),
)


def tabulate_sweeps(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of block sizes."""
    rows = {
        f"{label} (PJ)" if label == WHOLE else label: of for label, of in result["figures"].items()
    }
    title = f"Jacobi sweeps on {result['model']}, blocks begin as: {result['init']}"
    return [make_grid(title, rows, COLUMNS, first="tokens of a block")]


def chart_sweeps(result: Mapping[str, Any]) -> Chart:
    """Draw the tokens that a sweep fixes, and the speed-up, over the size of a block."""
    of, settings = result["figures"], result["settings"]
    across: dict[str, Any] = {
        "x_label": "tokens of a block",
        "x_names": dict(enumerate(of)),
        "reference": 1,
    }
    taus = dict(enumerate(f["tau"] for f in of.values()))
    times = dict(enumerate(f["speedup"]["median"] for f in of.values()))
    return Chart(
        f"{result['model']}: Jacobi sweeps by the size of a block",
        [
            Lines("tokens that a sweep fixes", {"tau": taus}, **across),
            Lines("times as fast as plain decoding", {"speed-up": times}, **across),
        ],
        [
            "In a block of 1 nothing is drafted; all: one block (PJ). The grey line is plain "
            "decoding.",
            f"{settings['dtype']}, greedy, blocks begin as {result['init']}, "
            f"{settings['prompts']} prompts, {settings['tokens']} tokens, "
            f"{settings['rounds']} rounds; {describe_provenance(result)}",
        ],
        "; ".join(
            f"block {b}: {f['tau']:.3f} a sweep, {f['speedup']['median']:.2f} times"
            for b, f in of.items()
        ),
    )


EXPERIMENT = Experiment(measure_sweeps, tabulate_sweeps, chart_sweeps)
