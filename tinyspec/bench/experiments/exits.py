"""`tinyspec bench exits`: measure what early exits save and cost, the survey's second experiment.

Every technique of the chapter runs at several settings. They must beat one fixed exit for all
tokens, which runs too. There are two ways:

    forced  the text goes on as its author wrote it: how often is the exit's token the full model's,
            after the same text? what is the perplexity of the text?
    free    the model goes on by itself at temperature 0: how much of the text is the full model's?
            what probability does the full model give it? what is the BLEU of a translation?

In both ways, earlier tokens have left early, and their keys and values are what the technique makes
of them. A lossless technique writes the full model's text, so only its cost is counted.

Work is counted, not timed, and all of it: layers run, keys and values made for skipped layers, and
products with the vocabulary matrix, which the softmax measure needs at every layer where it may
exit. Layers per token alone make the work look smaller than it is. The unit is multiplications of
weights over the full model's; those of attention are left out. A technique may save no work, and
time nevertheless: it runs layers of several tokens side by side. That shows in the layers in a row.
FREE runs L_S layers for every token, and all L of them in its deep passes. So of L layers

    deep passes per token = (layers in a row - L_S) / (L - L_S)

A setting is good if, at equal work, it is above the fixed exits by more than noise: above the line
through them and the full model, in 39 of 40 resamples of the texts (`bootstrap.py`). Quality is
agreement on forced text, and BLEU of a translator. The best setting of a technique is chosen after
all of them were measured, on the same texts. So its lead is optimistic, which the table says.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tinyspec import data
from tinyspec.bench.bootstrap import Lead, draw_resamples, find_lead, score_resamples
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments.exit_arms import (
    COLUMNS,
    FIXED,
    FULL,
    ExitArm,
    ExitSample,
    ExitSubject,
    ExitText,
    FullModelOutput,
    TranslatorSubject,
    WeightCosts,
    describe_fit,
    list_exit_arms,
    list_families,
    list_fixed_arms,
    load_exit_subject,
    name_family,
    read_classics,
    run_both_ways,
    run_full_model,
)
from tinyspec.bench.harness import (
    identify_inputs,
    name_dtype,
    read_unfinished,
    record_knobs,
    save_result,
    show_progress_bar,
    stamp_result,
)
from tinyspec.bench.plan import ArmSpec
from tinyspec.bench.plot import Chart, Lines
from tinyspec.bench.report import (
    Column,
    Grid,
    describe_old_columns,
    describe_provenance,
    format_quartiles,
    make_grid,
)
from tinyspec.bench.settings import ExitSettings
from tinyspec.bench.tally import five_number_summary
from tinyspec.errors import TinyspecError
from tinyspec.technique import find_technique

WORST_PERPLEXITY = 4.0  # where the picture cuts perplexities off, over the full model's


def measure_exits(
    given: ExitSettings, out: Path | None = None, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Return all samples and what follows from them.

    With `out`, each setting is written when it is done; with `resume`, the run goes on there.
    """
    families = [list_exit_arms(spec, given.thresholds) for spec in list_families(given.methods)]
    subject = load_exit_subject(given.model, given.dtype)
    texts, what = _draw_texts(subject, given)
    fixed = list_fixed_arms(subject.depth)
    whole = [run_full_model(subject, text) for text in texts]
    asked, skipped = _select_families(subject, texts, whole, families, given)
    settings = {
        "model": subject.model.name,
        "n_layers": subject.depth,
        "dtype": name_dtype(subject.model.dtype),
        "prompts": len(texts),
        **what,
        "stages": given.stages,
        "inputs": identify_inputs(
            [subject.model.weights], [[*text.source, *text.prompt, *text.rest] for text in texts]
        ),
    }
    arms = [*fixed, *(arm for family in asked for arm in family)]
    done: dict[str, list[Any]] = read_unfinished(out, resume, "exits", settings, _read_samples, {})
    result: dict[str, Any] = {}
    with show_progress_bar(f"{subject.model.name}: exits", len(arms), quiet) as tick:
        for arm in arms:
            if arm.label not in done:
                samples = run_both_ways(subject, texts, whole, arm, given.stages)
                done[arm.label] = [sample.as_row() for sample in samples]
            result = stamp_result(
                {
                    "settings": settings,
                    "knobs": {
                        one.label: record_knobs(find_technique(one.method).settings(one.knobs))
                        for one in arms
                    },
                    "skipped": skipped,
                    "untuned": _list_untuned(subject, arms),
                    "costs": subject.costs._asdict(),
                    "columns": COLUMNS,
                    "samples": done,
                }
            )
            save_result(out, result)
            tick()
    result["figures"] = summarize_exits(result)
    save_result(out, result)
    return result


def _draw_texts(subject: Any, given: ExitSettings) -> tuple[list[ExitText], dict[str, Any]]:
    """Return the texts, and the settings that they follow from."""
    if isinstance(subject, TranslatorSubject):
        pairs = data.read_multi30k("test", given.data_folder)
        return subject.draw_texts(pairs, given.prompts), {"texts": "test_2016_flickr"}
    books = given.texts or read_classics()
    sizes = {"prompt_tokens": given.prompt_tokens, "tokens": given.tokens, "seed": given.seed}
    drawn = subject.draw_texts(books, given.prompts, given.prompt_tokens, given.tokens, given.seed)
    return drawn, sizes


def _select_families(
    subject: ExitSubject,
    texts: Sequence[ExitText],
    whole: Sequence[FullModelOutput],
    families: Sequence[list[ExitArm]],
    given: ExitSettings,
) -> tuple[list[list[ExitArm]], dict[str, str]]:
    """Return the families that run on this model, and why the others do not.

    Each is tried on the first text. If a user asked for one that does not run, that is an error.
    """
    asked, skipped = list[list[ExitArm]](), dict[str, str]()
    for family in families:
        try:
            for _ in run_both_ways(subject, texts[:1], whole[:1], family[0], given.stages):
                pass
        except TinyspecError as error:
            if given.methods:
                raise
            skipped[name_family(family[0].label)] = str(error)
            continue
        asked.append(family)
    return asked, skipped


def _list_untuned(subject: ExitSubject, arms: Sequence[ExitArm]) -> list[str]:
    methods = dict.fromkeys(arm.method for arm in arms)
    return [note for method in methods if (note := describe_fit(subject, method))]


def _read_samples(found: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that an interrupted run has finished."""
    return {
        str(label): [ExitSample.from_row(row).as_row() for row in rows]
        for label, rows in found["samples"].items()
    }


# ---------------------------------------------------------------------- what follows from it


def summarize_exits(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by setting and way, from the samples alone.

    front  whether no cheaper setting is as good
    lead   over the fixed exits at equal work, with its interval; None: the setting is one of them
    """
    costs = WeightCosts(**result["costs"])
    by_label = {
        label: {
            way: [one for one in map(ExitSample.from_row, rows) if one.way == way]
            for way in ("forced", "free")
        }
        for label, rows in result["samples"].items()
    }
    found: dict[str, Any] = {
        label: {way: _average_samples(samples, costs) for way, samples in ways.items()}
        for label, ways in by_label.items()
    }
    chosen = "free" if _has_references(by_label) else "forced"
    curves = {label: _resample_curve(ways[chosen], costs) for label, ways in by_label.items()}
    rivals = [label for label in curves if label == FULL or name_family(label) == FIXED]
    for label, one in found.items():
        work, quality = curves[label]
        better = [of for of in curves.values() if of[0][0] <= work[0]]
        one["front"] = all(other[1][0] <= quality[0] for other in better)
        one["lead"] = None
        if label not in rivals:
            fixed = _interpolate_fixed([curves[rival] for rival in rivals], work)
            one["lead"] = list(find_lead(quality, fixed))
    return found


def _has_references(by_label: Mapping[str, Mapping[str, Sequence[ExitSample]]]) -> bool:
    return any(sample.counts for ways in by_label.values() for sample in ways["free"])


Curve = tuple[Any, Any]
"""Work and quality of a setting: on all texts, then on each resample, [1 + RESAMPLES] each."""


def _resample_curve(samples: Sequence[ExitSample], costs: WeightCosts) -> Curve:
    drawn = draw_resamples(len(samples))
    sums = drawn @ np.array(
        [[one.tokens, one.right, one.layers, one.fills, one.heads] for one in samples], dtype=float
    )
    tokens, right, *parts = sums.T
    work: Any = costs.relative_work(*parts)  # of arrays
    if samples[0].counts:
        return work / tokens, np.array(score_resamples([one.counts for one in samples]))
    return work / tokens, right / tokens


def _interpolate_fixed(fixed: Sequence[Curve], work: Any) -> Any:
    """Return the quality that fixed exits have at this work, in each resample.

    Between two of them, tokens may be shared out. No rival is below a cheaper one.
    """
    found = np.empty(len(work))
    for at in range(len(work)):
        points = sorted((float(of[0][at]), float(of[1][at])) for of in fixed)
        heights = np.maximum.accumulate([quality for _, quality in points])
        found[at] = np.interp(work[at], [spent for spent, _ in points], heights)
    return found


def _average_samples(samples: Sequence[ExitSample], costs: WeightCosts) -> dict[str, Any]:
    n = sum(one.tokens for one in samples)
    longest = sum(one.tokens if one.longest is None else one.longest for one in samples)
    layers, fills, heads = (
        sum(getattr(one, name) for one in samples) / n for name in ("layers", "fills", "heads")
    )
    pairs = [(one.plain, one.seconds) for one in samples]
    ratios = [plain / seconds for plain, seconds in pairs if plain and seconds]
    counts = [one.counts for one in samples]
    return {
        "layers": layers,
        "fills": fills,
        "heads": heads,
        "work": costs.relative_work(layers, fills, heads),
        "agreement": sum(one.right for one in samples) / longest,
        "perplexity": 2 ** (sum(one.bits for one in samples) / n),
        "in_a_row": _mean_of([one.in_a_row for one in samples], n),
        "clock": _mean_of([one.clock for one in samples], n),
        "milliseconds": 1000 * median(one.seconds / one.tokens for one in samples if one.seconds)
        if ratios
        else None,
        "speedup": five_number_summary(ratios) if ratios else None,
        "bleu": round(score_resamples(counts)[0], 4) if all(counts) else None,
    }


def _mean_of(values: Sequence[float | None], tokens: int) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / tokens if len(known) == len(values) else None


# ---------------------------------------------------------------------- what is shown


def write_exit_lead(lead: Sequence[float] | None, scale: float) -> str:
    """Return a lead over fixed exits with its interval, in points.

    >>> write_exit_lead([0.021, 0.004, 0.04], 100), write_exit_lead(None, 100)
    ('+2.1 (+0.4 to +4.0)', '-')
    """
    if lead is None:
        return "-"
    middle, low, high = (scale * value for value in lead)
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


def _is_translation(result: Mapping[str, Any]) -> bool:
    return result["figures"][FULL]["free"].get("bleu") is not None


def list_exit_columns(result: Mapping[str, Any]) -> list[Column]:
    """Return the columns of the table of settings."""
    translates = _is_translation(result)
    scale = 1 if translates else 100
    points = "BLEU" if translates else "points"
    bleu = [Column("BLEU", ("free", "bleu"), ".2f")] if translates else []
    return [
        Column("layers per token", ("forced", "layers"), ".2f"),
        Column("K/V fills", ("forced", "fills"), ".2f"),
        Column("head products", ("forced", "heads"), ".2f"),
        Column("layers in a row", ("forced", "in_a_row"), ".2f"),
        Column("work", ("forced", "work"), ".2f"),
        Column("agreement", ("forced", "agreement"), ".1%"),
        Column("perplexity", ("forced", "perplexity"), ".2f"),
        Column("free: work", ("free", "work"), ".2f"),
        Column("same text", ("free", "agreement"), ".1%"),
        *bleu,
        Column("perplexity, full model's", ("free", "perplexity"), ".2f"),
        Column(f"above fixed exits, {points}", "lead", lambda lead: write_exit_lead(lead, scale)),
        Column("on more processors", ("free", "clock"), ".2f"),
        Column("ms per token", ("free", "milliseconds"), ".2f"),
        Column("times as fast", ("free", "speedup"), format_quartiles),
    ]


def choose_best_rows(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for each family, the setting whose lead over the fixed exits is surest.

    That is the one whose interval begins highest. It is chosen on the texts that judge it, so its
    lead is optimistic.
    """
    found: dict[str, tuple[str, Any]] = {}
    for label, of in result["figures"].items():
        if of["lead"] is None:
            continue
        family = name_family(label)
        if family not in found or of["lead"][1] > found[family][1]["lead"][1]:
            found[family] = label, of
    return dict(found.values())


def merge_equal_rows(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a table. Settings of a family that run alike have one row together.

    >>> same = {way: {"work": 0.5, "speedup": None} for way in ("forced", "free")}
    >>> list(merge_equal_rows({"calm 0.1": same, "calm 0.2": same, "free 0.2": same}))
    ['calm 0.1 to 0.2', 'free 0.2']
    """
    found: list[tuple[str, str, Any]] = []  # the first label, the last, and the figures
    for label, of in figures.items():
        if found and name_family(label) == name_family(found[-1][0]):
            first, _, before = found[-1]
            if _leave_out_times(of) == _leave_out_times(before):
                found[-1] = first, label, before
                continue
        found.append((label, label, of))
    return {
        first if first == last else f"{first} to {last.rpartition(' ')[2]}": of
        for first, last, of in found
    }


def _leave_out_times(of: Mapping[str, Any]) -> list[dict[str, Any]]:
    timed = ("milliseconds", "speedup")
    return [
        {name: value for name, value in of[way].items() if name not in timed}
        for way in ("forced", "free")
    ]


def tabulate_exits(result: Mapping[str, Any]) -> list[Grid]:
    """Return the verdict on each technique, and the table of settings."""
    rows = {
        label + (" *" if of["front"] else ""): of
        for label, of in merge_equal_rows(result["figures"]).items()
    }
    model = result["settings"]["model"]
    title = (
        f"Early exits of {model}: work over the full model's; * nothing is cheaper and agrees more"
    )
    translates = _is_translation(result)
    way, scale = ("free", 1) if translates else ("forced", 100)
    quality = (
        Column("BLEU", ("free", "bleu"), ".2f")
        if translates
        else Column("agreement", ("forced", "agreement"), ".1%")
    )
    verdict = make_grid(
        f"Each technique of {model} at its best setting, against fixed exits at equal work",
        choose_best_rows(result),
        [
            Column("work", (way, "work"), ".2f"),
            quality,
            Column("above fixed exits", "lead", lambda lead: write_exit_lead(lead, scale)),
            Column("verdict", "lead", lambda lead: Lead(*lead).verdict),
        ],
    )
    return [*([verdict] if verdict.rows else []), make_grid(title, rows, list_exit_columns(result))]


def note_exits(result: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the tables must know."""
    stages = result["settings"].get("stages")
    lines = [
        "Work: layers, fills and head products together. Above fixed exits: at equal work, with "
        "the 95 % interval of the paired bootstrap over texts. Layers in a row: those of a pass "
        "count once, however many positions it has. Times as fast: than plain decoding of the "
        "same text, right before or after; one text at a time.",
        "The best setting of a technique was chosen after all of them were measured, on the same "
        "texts. Its lead is therefore optimistic, the more so the more settings there are. To "
        "confirm it, measure that setting alone on other texts.",
        *describe_old_columns(result, COLUMNS),
        f"{describe_provenance(result)}.",
    ]
    if any(of["free"].get("clock") for of in result["figures"].values()):
        lines.append(
            "On more processors: layer-steps of a token by a simulated clock, "
            f"{stages} stages of a pipeline (ee_llm), one processor for each guess and one more "
            "(ppd)."
        )
    lines += [f"{note}." for note in result.get("untuned", ())]
    lines += [f"No row of {name}: {reason}" for name, reason in result.get("skipped", {}).items()]
    return lines


def chart_exits(result: Mapping[str, Any]) -> Chart:
    """Draw quality and perplexity over the work, and quality over the layers in a row.

    Each technique has a line through its settings that none of its own beats; the fixed exits have
    one too.
    """
    of, settings = result["figures"], result["settings"]
    translates = _is_translation(result)
    way, figure = ("free", "bleu") if translates else ("forced", "agreement")
    full = of[FULL]["forced"]["perplexity"]
    points = dict[str, list[tuple[float, float, float, float | None]]]()
    for label, row in of.items():
        if label != FULL:
            name = ArmSpec.parse(name_family(label)).name
            name = "one exit for all tokens" if name == FIXED else name
            perplexity = min(row["forced"]["perplexity"] / full, WORST_PERPLEXITY)
            points.setdefault(name, []).append(
                (row[way]["work"], row[way][figure], perplexity, row[way]["in_a_row"])
            )
    fronts = {name: find_front([(x, y) for x, y, *_ in own]) for name, own in points.items()}
    worse = {name: find_front([(x, -y) for x, _, y, _ in own]) for name, own in points.items()}
    in_a_row = {
        name: find_front([(x, y) for _, y, _, x in own if x is not None])
        for name, own in points.items()
    }
    across: dict[str, Any] = {"x_label": "work of a token, over the full model's", "vertical": 1}
    what = "BLEU" if translates else "agreement with the full model"
    top = None if translates else 1.0
    panels = [
        Lines(what, fronts, top=top, **across),
        Lines(
            f"perplexity over the full model's, to {WORST_PERPLEXITY:g}",
            {name: {x: -y for x, y in line.items()} for name, line in worse.items()},
            top=WORST_PERPLEXITY,
            **across,
        ),
    ]
    if all(in_a_row.values()):
        label = "layers of a token in a row"
        panels.append(Lines(what, in_a_row, x_label=label, vertical=settings["n_layers"], top=top))
    texts = f"{settings['prompts']} sentences"
    if not translates:
        texts = f"{settings['prompts']} passages of {settings['tokens']} tokens"
    return Chart(
        f"{settings['model']}: what early exits save, and what they cost",
        panels,
        [
            "Work: layers, fills and head products of a token, all together; the upright line is "
            "the full model. A line joins the settings of a technique that none of its own beats.",
            f"{texts}; {settings['dtype']}; {describe_provenance(result)}",
        ],
        "; ".join(
            f"{name}: {what} {max(line.values()):.2f} at best" for name, line in fronts.items()
        ),
    )


def find_front(points: Sequence[tuple[float, float]]) -> dict[float, float]:
    """Return the points above every cheaper one, from the cheapest up.

    >>> find_front([(2.0, 0.5), (1.0, 0.6), (3.0, 0.9)])
    {1.0: 0.6, 3.0: 0.9}
    """
    found = dict[float, float]()
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or y > max(found.values()):
            found[x] = y
    return found


EXPERIMENT = Experiment(measure_exits, tabulate_exits, chart_exits, note_exits, note_exits)
