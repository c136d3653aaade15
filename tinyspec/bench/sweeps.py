"""`tinyspec bench sweeps`: what Jacobi iteration makes of a model, by the size of its blocks.

For each size: tokens that a sweep fixes (tau), passes and rows a token, and time in turns with
plain decoding, on openings of the valid books. A pass over b rows is not free, and a model that was
trained left to right seldom guesses behind a wrong token: a slow-down is printed as one. The file
keeps one opening's sweeps over the largest block, whole, for whoever draws them.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tinyspec import models
from tinyspec.bench import figures, measure, tally, tasks
from tinyspec.bench.arms import Arm, Clock, Own, endless, reference
from tinyspec.bench.book import Book, Sample
from tinyspec.bench.harness import progress, report
from tinyspec.bench.plan import PLAIN, ArmSpec, Settings
from tinyspec.bench.report import Grid, number, speed
from tinyspec.errors import TinyspecError
from tinyspec.generation import start
from tinyspec.lm.transformer import Model
from tinyspec.nonautoregressive.jacobi import trace_sweeps
from tinyspec.technique import find_technique

METHOD, WHOLE = "jacobi", "all"  # PJ: all tokens that are wanted are one block


def spec(block: str, init: str) -> ArmSpec:
    """The arm of a block size, or of WHOLE."""
    form: tuple[str, Any] = ("form", "pj") if block == WHOLE else ("block", int(block))
    return ArmSpec(METHOD, (form, ("init", init)))


def run(
    name: str,
    blocks: Sequence[int] = tuple(range(1, 17)),
    whole: bool = True,
    init: str = "pad",
    prompts: int = 10,
    tokens: int = 64,
    rounds: int = 3,
    dtype: str | None = None,
    quiet: bool = False,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """All figures with their samples. TinyspecError for no block, and a knob that is wrong."""
    labels = [*dict.fromkeys(map(str, sorted(blocks))), *([WHOLE] if whole else [])]
    if not labels:
        raise TinyspecError(
            "there is nothing to measure: name sizes of blocks, such as --blocks 1,2,4, or leave --whole"
        )
    for label in labels:
        find_technique(METHOD).settings(dict(spec(label, init).knobs))
    model = models.load(name, dtype=dtype)
    kind = str(model.dtype).removeprefix("torch.")
    settings = Settings(
        name, dtype=kind, tasks=("books",), prompts=prompts, tokens=tokens, rounds=rounds
    )
    book = Book(settings)
    answer = reference(model, book.references, book.references.__setitem__)
    jobs = tasks.jobs(model, tasks.asked(settings.tasks, prompts), tokens, answer)
    for job in jobs:
        answer(job)
    arms: list[Arm] = [Own(ArmSpec(PLAIN), model, settings)]
    for label in labels:
        arms.append(Own(spec(label, init), model, settings))
        arms[-1].label = label  # type: ignore[misc]
    with progress(
        f"{model.name}: {len(labels)} sizes of blocks", measure.left(book, jobs, arms), quiet
    ) as tick:
        measure.warm_up(arms, jobs[0], clock)
        measure.run(book, jobs, arms, clock, tick)
    made = {
        "model": model.name,
        "settings": settings.as_dict(),
        "init": init,
        "blocks": labels,
        "sweeps": _traced(model, jobs[0].ids, tokens, spec(labels[-1], init)),
        "columns": list(Sample._fields),
        "samples": [list(sample) for sample in book.samples],
    }
    return report({**made, "figures": told(made)})


def _traced(model: Model, prompt: Sequence[int], tokens: int, arm: ArmSpec) -> dict[str, Any]:
    """Every sweep of one request: what stood in the block, what was said in its place, how much of
    that is final.
    """
    running = start(
        endless(model), list(prompt), method=METHOD, max_new_tokens=tokens, **dict(arm.knobs)
    )
    told = [  # the keys are those of committed results
        {"guess": sweep.block, "said": sweep.predicted, "fixed": sweep.n_final}
        for sweep in trace_sweeps(running.decoder, running.rng)
    ]
    return {"prompt": list(prompt), **dict(arm.knobs), "new": running.decoder.new, "trace": told}


def told(result: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by size, from the samples alone."""
    samples = [Sample(*row) for row in result["samples"]]
    found: dict[str, Any] = {}
    for label in result["blocks"]:
        own = [sample for sample in samples if sample.arm == label]
        counts, tokens = tally.counts(own), sum(sample.tokens for sample in own)
        same = [sample.same == sample.tokens for sample in own if sample.same is not None]
        found[label] = {
            "tau": counts["tau"],
            "passes_per_token": counts["calls_per_token"],
            "rows_per_token": sum(sample.calls + (sample.nodes or 0) for sample in own) / tokens,
            "guesses_kept": counts["acceptance"],
            "speedup": tally.five(list(tally.paired(samples, PLAIN, label).values())),
            "identical": sum(same),
            "of": len(same),
        }
    return found


def grid(result: Mapping[str, Any]) -> Grid:
    """A row a block size."""
    rows = []
    for label, of in result["figures"].items():
        rows.append([
            f"{label} (PJ)" if label == WHOLE else label, number(of["tau"], 3), number(of["passes_per_token"], 3),
            number(of["rows_per_token"]), number(of["guesses_kept"], 3), speed(of["speedup"]),
            f"{of['identical']} of {of['of']}",
        ])  # fmt: skip
    head = [
        "tokens of a block",
        "fixed per sweep",
        "passes per token",
        "positions per token",
        "draft tokens accepted",
        "times as fast",
        "same",
    ]
    return Grid(
        f"Jacobi sweeps on {result['model']}, blocks begin as: {result['init']}", head, rows
    )


# ---------------------------------------------------------------------- the picture


def picture(result: Mapping[str, Any]) -> str:
    """Two panels over the size of a block: tokens that a sweep fixes, and how many times as fast as
    plain decoding.
    """
    of, y = result["figures"], 70.0
    wide = (figures.WIDTH - 2 * figures.MARGIN - 120) / 2
    taus, times = [f["tau"] for f in of.values()], [f["speedup"]["median"] for f in of.values()]
    body = [
        figures._text(
            figures.MARGIN, 32, f"{result['model']}: Jacobi sweeps by the size of a block", "title"
        )
    ]
    body += _panel("tokens that a sweep fixes", taus, list(of), figures.MARGIN + 36, y, wide)
    body += _panel(
        "times as fast as plain decoding", times, list(of), figures.MARGIN + 110 + wide, y, wide
    )
    end, settings, machine = y + 310, result["settings"], result["machine"]
    for line in (
        "Across: tokens of a block; in a block of 1 nothing is guessed; all: one block (PJ). "
        "The grey line is plain decoding.",
        f"{settings['dtype']}, greedy, first guess {result['init']}, {settings['prompts']} prompts, "
        f"{settings['tokens']} tokens, {settings['rounds']} rounds; {machine['cores']} cores of {machine['cpu']}; "
        f"{result['date']}, commit {result['commit']}",
    ):
        body.append(figures._text(figures.MARGIN, end, line, "quiet"))
        end += 18
    said = "; ".join(
        f"block {b}: {t:.3f} a sweep, {s:.2f} times"
        for b, t, s in zip(of, taus, times, strict=True)
    )
    return figures._svg(body, end, "Jacobi sweeps by the size of a block", said)


def _panel(
    title: str, values: Sequence[float], labels: Sequence[str], x: float, y: float, wide: float
) -> list[str]:
    """One line from 0 on, a place a label."""
    high, top = 250.0, max(1.2, *values) * 1.1
    spots = [
        (x + (i + 0.5) * wide / len(values), y + high * (1 - v / top)) for i, v in enumerate(values)
    ]
    drawn = [figures._text(x - 30, y - 12, title, "head")]
    for i in range(6):
        at = y + high * (1 - i / 5)
        drawn.append(f'<path class="line" d="M{x:.1f} {at:.1f}h{wide:.1f}"/>')
        drawn.append(figures._text(x - 6, at + 4, f"{top * i / 5:.2f}", "end quiet"))
    drawn.append(f'<path class="one" d="M{x:.1f} {y + high * (1 - 1 / top):.1f}h{wide:.1f}"/>')
    drawn += [
        figures._text(at, y + high + 18, name, "mid quiet")
        for (at, _), name in zip(spots, labels, strict=True)
    ]
    drawn.append(f'<path class="curve s0" d="M{" L".join(f"{a:.1f} {b:.1f}" for a, b in spots)}"/>')
    return drawn + [
        f'<circle class="s0" cx="{a:.1f}" cy="{b:.1f}" r="3" fill="none" stroke-width="2"/>'
        for a, b in spots
    ]
