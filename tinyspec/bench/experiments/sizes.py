"""`tinyspec bench sizes`: measure acceptance and time by the size of the draft model.

It is the survey's first experiment. Of each draft model:

    weights  how many it reads for a token
    alpha    E sum min(p, q) over plain continuations of the openings of the valid books, at
             temperature 1 and as decoded
    c        the time of a draft step, in plain steps

For each draft and gamma: tau and time, in turns with plain decoding, beside what Leviathan et al.
forecast from alpha and c (theorem 3.8). Larger drafts are accepted more often and take longer.
Which is best depends on the machine; it may be none.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyspec import models
from tinyspec.bench import measure, tally
from tinyspec.bench.arms import Arm, Clock, TechniqueArm, ask_openings, disable_eos
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.curve import count_weight_bytes
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.plan_draft import make_requests
from tinyspec.bench.harness import record_knobs, show_progress_bar, stamp_result
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import Column, Grid, describe_provenance, format_quartiles, make_grid
from tinyspec.bench.settings import SizeSettings
from tinyspec.bench.tasks import Job, find_room
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.pairing import check_pair
from tinyspec.speculative.drafting.planner import profile_draft, profile_target
from tinyspec.speculative.drafting.speculative_decoding import acceptance_rate, walltime_speedup

PROFILED = 3  # openings on which the cost of a draft step is measured


def measure_sizes(
    given: SizeSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return all figures with their samples.

    Raises TinyspecError for no drafts, a wrong vocabulary, and two drafts of one name.
    """
    drafts, gammas = given.drafts, list(dict.fromkeys(given.gammas))
    if not drafts:
        raise TinyspecError(
            "name the drafts to compare: --drafts A,B,... (folders, or models by name)"
        )
    model = models.load(given.model, dtype=given.dtype)
    small = {Path(draft).name: models.load(draft, dtype=given.dtype) for draft in drafts}
    if len(small) < len(drafts):
        raise TinyspecError(
            "two drafts have the same name: put them into folders of different names"
        )
    for draft in small.values():
        check_pair(model, draft)
    settings = BenchSettings(
        given.model,
        ",".join(drafts),
        given.dtype,
        tasks=("books",),
        prompts=given.prompts,
        tokens=given.tokens,
        rounds=given.rounds,
        temperature=given.temperature,
    )
    book = SampleBook(settings)
    room = find_room(model, given.tokens, *small.values())
    jobs = [
        job._replace(ids=job.ids[-room:]) for job in ask_openings(model, settings, book.references)
    ]
    arms: list[Arm] = [TechniqueArm(ArmSpec(PLAIN), model, settings)]
    for label, draft in small.items():
        for gamma in gammas:
            spec, name = ArmSpec("speculative_decoding", (("gamma", gamma),)), f"gamma={gamma}"
            arms.append(TechniqueArm(spec, model, settings, draft, f"{label}:{name}"))
    steps = len(small) + measure.count_left(book, jobs, arms)
    with show_progress_bar(f"{model.name}: {len(small)} drafts", steps, quiet) as tick:
        rows = {
            label: _profile_draft(label, draft, model, jobs, book, max(gammas), clock)
            for label, draft in small.items()
        }
        measure.warm_up_arms(arms, jobs[0], clock)
        measure.run_turns(book, jobs, arms, clock, tick)
    made = {
        "model": model.name,
        "settings": settings.as_dict(),
        "gammas": gammas,
        "drafts": rows,
        "knobs": {arm.label: record_knobs(arm.knobs) for arm in arms},
        **book.list_samples(),
    }
    return stamp_result({**made, "figures": summarize_sizes(made)})


def _profile_draft(
    label: str,
    draft: Model,
    model: Model,
    jobs: Sequence[Job],
    book: SampleBook,
    longest: int,
    clock: Clock,
) -> dict[str, Any]:
    """Return what a draft is, how often it is accepted, and what a step of it costs."""
    config, sampling = draft.config, SamplingParams(book.settings.temperature)
    pairs, soft = list[tuple[Any, Any]](), list[tuple[Any, Any]]()
    for job in jobs:
        text = [*job.ids, *book.references[job.key]]
        p, q = (m.logits(text)[len(job.ids) - 1 : -1] for m in (model, draft))
        for at in range(len(p)):
            history = text[: len(job.ids) + at]
            pairs.append((sampling.probs(p[at], history), sampling.probs(q[at], history)))
            soft.append((UNCHANGED.probs(p[at], ()), UNCHANGED.probs(q[at], ())))
    asked = [job.ids for job in jobs[:PROFILED]]
    pace = make_requests(
        disable_eos(model), disable_eos(draft), asked, book.settings.tokens, sampling
    )
    plain = profile_target(pace, 1, clock)[0]
    return {
        "layers": config.n_layers,
        "width": config.d_model,
        "weights": count_weight_bytes(config, 1),
        "alpha": acceptance_rate(pairs),
        "alpha_1": acceptance_rate(soft),
        "c": profile_draft(label, pace, longest, clock).step / plain,
    }


def summarize_sizes(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by draft and gamma, from the samples and the drafts' profiles alone."""
    samples = [Sample(*row) for row in result["samples"]]
    found: dict[str, Any] = {}
    for label, row in result["drafts"].items():
        found[label] = {}
        for gamma in result["gammas"]:
            arm = f"{label}:gamma={gamma}"
            own = [sample for sample in samples if sample.arm == arm]
            ratios = list(tally.paired_ratios(samples, PLAIN, arm).values())
            same = [s.same == s.tokens for s in own if s.same is not None]
            counts = tally.count_samples(own)
            found[label][str(gamma)] = {
                **{name: counts[name] for name in ("tau", "alpha", "draft_calls_per_token")},
                "speedup": tally.five_number_summary(ratios),
                "forecast": walltime_speedup(row["alpha"], gamma, row["c"]),
                "identical": sum(same) if same else None,
            }
    return found


def tabulate_sizes(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of drafts, the smallest first."""
    gammas = [str(gamma) for gamma in result["gammas"]]

    def describe_best(of: Mapping[str, Any]) -> str:
        best = max(gammas, key=lambda g: float(of[g]["speedup"]["median"]))
        return f"{best} ({of[best]['forecast']:.2f})"

    drafts = sorted(result["drafts"].items(), key=lambda pair: float(pair[1]["weights"]))
    rows = {label: {**draft, **result["figures"][label]} for label, draft in drafts}
    columns = [
        Column("weights per token", "weights", lambda n: f"{n / 1e6:.2f}M"),
        Column("layers", "layers"),
        Column("alpha", "alpha", ".3f"),
        Column("alpha, T=1", "alpha_1", ".3f"),
        Column("c", "c", ".2f"),
        *(
            Column(
                f"gamma {g}: tau, times as fast",
                g,
                lambda of: f"{of['tau']:.2f}, {format_quartiles(of['speedup'])}",
            )
            for g in gammas
        ),
        Column("best gamma (forecast)", describe_best),
    ]
    title = "Drafts by size: acceptance, the cost of a step, and what comes of it"
    return [make_grid(title, rows, columns)]


def chart_sizes(result: Mapping[str, Any]) -> Chart:
    """Draw alpha, and the speed-up at the best gamma, over the weights that a draft reads."""
    rows = sorted(result["drafts"].items(), key=lambda pair: pair[1]["weights"])
    best = {
        label: max(result["figures"][label].values(), key=lambda of: of["speedup"]["median"])
        for label, _ in rows
    }
    settings = result["settings"]
    across: dict[str, Any] = {
        "x_label": "millions of weights that the draft reads for a token",
        "x_log": True,
        "x_names": {row["weights"]: f"{row['weights'] / 1e6:.2g}" for _, row in rows},
    }
    alphas = {
        "alpha, as decoded": {row["weights"]: row["alpha"] for _, row in rows},
        "alpha at temperature 1": {row["weights"]: row["alpha_1"] for _, row in rows},
    }
    times = {
        "measured": {row["weights"]: best[label]["speedup"]["median"] for label, row in rows},
        "forecast from alpha and c": {
            row["weights"]: best[label]["forecast"] for label, row in rows
        },
    }
    return Chart(
        f"{result['model']}: acceptance and time against the draft's size",
        [
            Lines("acceptance rate", alphas, top=1.0, **across),
            Lines("times as fast as plain decoding, best gamma", times, reference=1, **across),
        ],
        [
            "Drafts from left to right: " + ", ".join(label for label, _ in rows) + ".",
            f"{settings['dtype']}, temperature {settings['temperature']:g}, "
            f"{settings['prompts']} prompts, {settings['tokens']} tokens, "
            f"{settings['rounds']} rounds; {describe_provenance(result)}",
        ],
        "; ".join(
            f"{label}: alpha {row['alpha']:.2f}, {best[label]['speedup']['median']:.2f} times"
            for label, row in rows
        ),
    )


EXPERIMENT = Experiment(measure_sizes, tabulate_sizes, chart_sizes)
