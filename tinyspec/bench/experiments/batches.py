"""`tinyspec bench batches`: measure drafts in batches of several sizes, beside plain decoding.

All requests of a batch begin at once and share forward passes under the `aligned` policy. The
techniques take turns on the same prompts. A batch is timed from the moment when the target has read
all prompts: a prompt takes as long with every technique.

A fixed draft length pays in a small batch and costs time in a large one. Techniques that know the
batch ought to be as fast as the better of drafting and plain decoding at every size; the table says
how near they come. Those that measure the models do so before anything is timed, and what was
measured is kept with the result. The heat map shows the best length by batch size, for several
acceptance rates, from these times.

    tau   tokens per round of a request
    rows  rows of a target pass, of all requests together
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from tinyspec.bench.arms import Clock, collect_garbage, disable_eos, load_arm_models
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.exit_arms import draw_passages, read_classics
from tinyspec.bench.harness import name_dtype, record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.measure import order_of_turn
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.plot import INK, Chart, Lines
from tinyspec.bench.report import (
    Column,
    Grid,
    count_things,
    describe_provenance,
    format_speedup,
    make_grid,
)
from tinyspec.bench.settings import BatchSettings
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.decoding.costs import MeasuredRounds
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.errors import TinyspecError
from tinyspec.generation import Generation, start_generation
from tinyspec.lm.model import Model
from tinyspec.lm.policies import AlignedPolicy, Pending
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.speculative.batched import BatchProfile, find_profile
from tinyspec.speculative.integrated.synergy import best_lengths

OPENING = 64  # tokens, at most, of a prompt that is the opening of a paragraph
RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # acceptance rates of the heat map


class BatchSample(NamedTuple):
    """A batch that was run.

    tokens  of all requests;  rounds: of all requests
    seconds after the prompts
    passes  of the target after the prompts;  rows: of these passes
    drafted, accepted  draft tokens that were verified
    same    requests whose text is plain decoding's
    """

    size: int
    round: int
    arm: str
    seconds: float
    tokens: int
    rounds: int
    passes: int
    rows: int
    drafted: int
    accepted: int
    same: int


def measure_batches_of_arms(
    given: BatchSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return all samples and what follows from them. Raises TinyspecError for wrong settings."""
    if not (given.methods and given.sizes):
        raise TinyspecError("there is nothing to measure: name --methods and --sizes")
    bench = BenchSettings(given.model, draft=given.draft, methods=(PLAIN, *given.methods))
    if given.dtype is not None:
        bench = replace(bench, dtype=given.dtype)
    loaded, drafts = load_arm_models(bench, any_method=True)
    if not drafts:
        raise TinyspecError(f"{loaded.name} names no draft model: give one with --draft NAME")
    model = disable_eos(loaded)
    prompts = list_batch_prompts(model, find_room(model, given.tokens, *drafts), given)
    asked = prompts[: max(given.sizes)]
    profile = find_profile(model, drafts[0], UNCHANGED, asked, given.longest)
    arms = [ArmSpec.parse(label) for label in dict.fromkeys((PLAIN, *given.methods))]
    samples, knobs = list[BatchSample](), dict[str, Any]()
    with show_progress_bar(
        f"{model.name}: {len(arms)} arms", given.rounds * len(given.sizes) * len(arms), quiet
    ) as tick:
        for round in range(given.rounds):
            for turn, size in enumerate(given.sizes):
                first = (round * max(given.sizes) + turn) % len(prompts)
                chosen = [prompts[(first + n) % len(prompts)] for n in range(size)]
                for arm in () if samples else arms:  # first calls fill caches, and may measure
                    run_batch(model, drafts, arm, chosen, given.tokens, clock)
                texts, turned = dict[str, list[list[int]]](), list[BatchSample]()
                for arm in order_of_turn(arms, round + turn):
                    sample, results = run_batch(model, drafts, arm, chosen, given.tokens, clock)
                    texts[arm.label] = [result.tokens for result in results]
                    turned.append(sample._replace(size=size, round=round))
                    knobs[arm.label] = record_knobs(dict(arm.knobs))
                    tick()
                samples += [
                    sample._replace(same=count_equal_texts(texts[sample.arm], texts[PLAIN]))
                    for sample in turned
                ]
    settings = {
        "model": model.name,
        "draft": drafts[0].name,
        "dtype": name_dtype(model.dtype),
        "sizes": list(given.sizes),
        "tokens": given.tokens,
        "rounds": given.rounds,
        "longest": given.longest,
        "prompt_tokens": given.prompt_tokens,
    }
    return stamp_result(
        {
            "settings": settings,
            "knobs": knobs,
            "profile": {
                "verify": {str(size): list(row) for size, row in profile.costs.verify.items()},
                "step": {str(size): seconds for size, seconds in profile.costs.step.items()},
                "reach": list(profile.reach),
            },
            "columns": list(BatchSample._fields),
            "samples": [list(sample) for sample in samples],
            "figures": summarize_batches(samples),
        }
    )


def list_batch_prompts(model: Model, room: int, given: BatchSettings) -> list[list[int]]:
    """Return openings, or passages where prompts are longer than an opening is."""
    if given.prompt_tokens <= OPENING:
        return tokenize_openings(model, min(room, given.prompt_tokens))
    n = 2 * max(given.sizes)
    size = given.prompt_tokens, given.tokens
    return [one.prompt for one in draw_passages(model, read_classics(), n, *size, seed=0)]


class PromptsFirst(AlignedPolicy):
    """The policy of a batch, which notes when its prompts have been read.

    begun  when the first pass began for which no prompt of the target waited
    """

    def __init__(self, model: str, clock: Clock):
        super().__init__()
        self.model, self.clock, self.begun = model, clock, 0.0
        self.is_reading = True

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        reading = any(one.is_prefill for one in waiting if one.model == self.model)
        if self.is_reading and not reading:
            self.begun = self.clock()
        self.is_reading = reading
        return super().pick(waiting)


def run_batch(
    model: Model,
    drafts: list[Model],
    arm: ArmSpec,
    prompts: Sequence[list[int]],
    tokens: int,
    clock: Clock,
) -> tuple[BatchSample, list[Generation]]:
    """Run a batch of requests. Returns a sample, and the results."""

    def decode(prompt: list[int], scheduler: Scheduler) -> Generation:
        running = start_generation(
            model, prompt, method=arm.name, draft=drafts if arm.name != PLAIN else None,
            max_new_tokens=tokens, scheduler=scheduler, **dict(arm.knobs),
        )  # fmt: skip
        for _ in running:
            pass
        return running.result()

    policy = PromptsFirst(model.name, clock)
    scheduler = Scheduler(policy)
    collect_garbage()
    results = run_together([partial(decode, prompt) for prompt in prompts], scheduler)
    seconds = clock() - policy.begun
    passes = [e for e in scheduler.pass_log if e.model == model.name and not any(e.prefill)]
    sample = BatchSample(
        size=len(prompts),
        round=0,
        arm=arm.label,
        seconds=seconds,
        tokens=sum(len(one.tokens) for one in results),
        rounds=sum(one.stats.target_calls for one in results),
        passes=len(passes),
        rows=sum(sum(entry.rows) for entry in passes),
        drafted=sum(one.stats.drafted for one in results),
        accepted=sum(one.stats.accepted for one in results),
        same=0,
    )
    return sample, results


def count_equal_texts(texts: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    """Return how many texts are equal."""
    return sum(a == b for a, b in zip(texts, others, strict=True))


def summarize_batches(samples: Sequence[BatchSample]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures of each arm and batch size, from the samples alone."""
    plain = {(s.size, s.round): s.seconds for s in samples if s.arm == PLAIN}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for arm in dict.fromkeys(sample.arm for sample in samples):
        for size in dict.fromkeys(sample.size for sample in samples):
            own = [s for s in samples if (s.arm, s.size) == (arm, size)]
            tokens, passes = sum(s.tokens for s in own), sum(s.passes for s in own)
            drafted = sum(s.drafted for s in own)
            found.setdefault(arm, {})[str(size)] = {
                "speedup": median(plain[size, s.round] / s.seconds for s in own),
                "tokens_per_second": tokens / sum(s.seconds for s in own),
                "tau": tokens / sum(s.rounds for s in own),
                "rows": sum(s.rows for s in own) / passes if passes else None,
                "acceptance": sum(s.accepted for s in own) / drafted if drafted else None,
                "same": sum(s.same for s in own),
                "of": size * len(own),
            }
    return dict(sorted(found.items(), key=lambda item: item[0] != PLAIN))


# ---------------------------------------------------------------------- what is shown


def tabulate_batches(result: Mapping[str, Any]) -> list[Grid]:
    """Return a table of speed by batch size, one of counts, and the measured table of lengths."""
    sizes, figures = [str(n) for n in result["settings"]["sizes"]], result["figures"]
    drafting = {arm: of for arm, of in figures.items() if arm != PLAIN}
    pair = f"{result['settings']['model']} with {result['settings']['draft']}"
    speed = [Column(f"batch {n}", (n, "speedup"), format_speedup) for n in sizes]
    rate = [Column(f"batch {n}", (n, "tokens_per_second"), ".0f") for n in sizes]
    counts = [Column(f"batch {n}", _write_counts(n), lambda text: str(text)) for n in sizes]
    return [
        make_grid(f"{pair}: times as fast as plain decoding of the same batch", drafting, speed),
        make_grid("Tokens per second, of all requests", figures, rate),
        make_grid("Tau / rows of a target pass / acceptance", figures, counts),
        make_grid("Best draft length, from the measured times", _list_best(result), [
            Column(f"batch {size}", size, "d") for size in result["profile"]["verify"]
        ], first="acceptance rate"),
    ]  # fmt: skip


def _write_counts(size: str) -> Any:
    def write(row: Mapping[str, Any]) -> str:
        of = row[size]
        share = "-" if of["acceptance"] is None else f"{of['acceptance']:.0%}"
        rows = "-" if of["rows"] is None else f"{of['rows']:.1f}"
        return f"{of['tau']:.2f} / {rows} / {share}"

    return write


def read_profile(result: Mapping[str, Any]) -> BatchProfile:
    """Return the profile that was measured."""
    found = result["profile"]
    verify = {int(size): row for size, row in found["verify"].items()}
    step = {int(size): seconds for size, seconds in found["step"].items()}
    return BatchProfile(MeasuredRounds(verify, step), found["reach"])


def _list_best(result: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the best length by acceptance rate and batch size; last, for the measured rates."""
    costs, measured = read_profile(result)
    longest = len(measured)
    reaches = {f"{rate:g}": [rate**n for n in range(1, longest + 1)] for rate in RATES}
    reaches["as measured"] = list(measured)
    return {
        name: {str(b): n for b, n in best_lengths(costs, reach, costs.sizes).items()}
        for name, reach in reaches.items()
    }


@dataclass(frozen=True)
class HeatMap(Lines):
    """A panel of numbers in squares. `rows`: by the name of the row, then by that of the column."""

    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def draw_on(self, axes: Any) -> None:
        values = [list(row.values()) for row in self.rows.values()]
        most = max(map(max, values)) or 1
        axes.imshow(values, cmap="Blues", vmin=0, vmax=1.4 * most, aspect="auto")
        for at, row in enumerate(values):
            for column, value in enumerate(row):
                axes.text(column, at, value, ha="center", va="center", color=INK)
        columns = list(next(iter(self.rows.values())))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(values)), list(self.rows))
        axes.set_xlabel(self.x_label)


def chart_batches(result: Mapping[str, Any]) -> Chart:
    """Draw speed by batch size, and the best lengths."""
    sizes, figures = result["settings"]["sizes"], result["figures"]
    lines = {
        arm: {size: of[str(size)]["speedup"] for size in sizes}
        for arm, of in figures.items()
        if arm != PLAIN
    }
    names, best = {size: str(size) for size in sizes}, _list_best(result)
    panels = [
        Lines("times as fast as plain decoding", lines, "requests", reference=1.0,
              x_names=names, x_log=True),
        HeatMap("best draft length", {}, "requests; rows: acceptance rate", rows=best),
    ]  # fmt: skip
    summary = "; ".join(
        f"{arm}: " + ", ".join(f"{line[size]:.2f} at {size}" for size in sizes)
        for arm, line in lines.items()
    )
    title = f"{result['settings']['model']}: drafts in a batch"
    return Chart(title, panels, list_batch_notes(result), summary)


def list_batch_notes(result: Mapping[str, Any]) -> list[str]:
    """Return how the figures were measured, and where a method is slower than plain decoding."""
    of, figures = result["settings"], result["figures"]
    same = sum(one["same"] for arm in figures.values() for one in arm.values())
    every = sum(one["of"] for arm in figures.values() for one in arm.values())
    least = {arm: min(one["speedup"] for one in row.values()) for arm, row in figures.items()}
    slow = [f"{arm} {value:.2f}" for arm, value in least.items() if arm != PLAIN and value < 1]
    prompt = of.get("prompt_tokens", OPENING)  # what was measured before has no such setting
    return [
        f"{of['dtype']}, greedy, {of['tokens']} new tokens after {prompt} of the valid books, "
        f"{count_things(of['rounds'], 'round')} of other texts; medians of the rounds' ratios. "
        f"{same} of {every} texts are plain decoding's. "
        f"{describe_provenance(result)}.",
        "Slower than plain decoding at some batch size: " + (", ".join(slow) or "none") + ".",
    ]


EXPERIMENT = Experiment(
    measure_batches_of_arms, tabulate_batches, chart_batches, list_batch_notes, list_batch_notes
)
