"""`tinyspec bench heads`: count what each trained head of a model yields, depth by depth.

Every method continues the same openings of the valid books. Nothing is timed, so the machine may be
busy. Beside the heads stand lookup (`llma`), which is trained on nothing, the draft model that the
target's card names, and the draft of `distillspec`, which is trained as long as a head. A head that
is below them is not trained enough. Models that the target became when it was tuned for a method
have rows too; they write texts of their own.

    tokens per pass  tau: tokens committed for each pass of the target that verifies
    depth d          of the rounds in which the draft went on below d - 1 accepted tokens, the share
                     in which one of the draft tokens at depth d was accepted
    minutes          of the training, as its log says

With --sizes every head drafts trees of these sizes. A committed cost curve of the same model then
predicts the time, where t(k) are the seconds of a pass over k tokens:

    seconds per token = t(1 + draft tokens) / tau
    times as fast     = t(1) / (seconds per token)

The head's own time is not in it. So the prediction is a bound: a size that does not pay here does
not pay at all.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from tinyspec import models
from tinyspec.bench.chapters import list_rows
from tinyspec.bench.experiment import Experiment, Result
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.plan import ArmSpec
from tinyspec.bench.plot import Bars, Chart, Lines
from tinyspec.bench.report import Column, Grid, make_grid
from tinyspec.bench.settings import HeadsSettings
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.decoding.costs import interpolate_seconds
from tinyspec.decoding.decode import Round
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.processes import run_pieces
from tinyspec.technique import Guarantee, find_technique, is_tuned_for, load_techniques
from tinyspec.tree import ROOT

BESIDE = ("llma", "speculative_decoding", "distillspec")
SHOWN_DEPTHS = 5  # columns of the table
SITTING = ("command", "commit", "date", "machine")  # what is said of each run with rows here
SMALL_TREE = 7  # nodes of what counts as a small tree in the note on sizes


def list_arms_with_heads(model: Model) -> list[ArmSpec]:
    """Return the rows of all methods that have a head for this model here, and what they beat.

    Left out are methods that are lossy by default.
    """
    headed = [
        card.name
        for card in load_techniques().values()
        if card.trained is not None
        and card.tuned is None
        and card.guarantee is not Guarantee.LOSSY
        and models.find_heads_of(model.name, card.head_method)
    ]
    if not headed:
        raise TinyspecError(
            f"no head of {model.name} is on this machine: train one "
            f"(tinyspec train head --for {model.name} --method medusa --out FOLDER)"
        )
    beside = [name for name in BESIDE if not find_technique(name).drafts or find_draft(model, name)]
    return [row for name in (*headed, *beside) for row in list_rows(name)]


def find_draft(model: Model, method: str) -> str | None:
    """Return the name of the draft model that a method takes if none is given; None: there is none.

    See `pairing.drafts_for`.
    """
    if find_technique(method).own_draft:
        return next(iter(models.find_drafts_of(model.name, method)), None)
    named: str | None = model.config.extra.get("draft")
    return named or next(iter(models.find_drafts_of(model.name)), None)


def count_heads_of_model(given: HeadsSettings, quiet: bool = False) -> dict[str, Any]:
    """Return what each method yields, with the size and the training of its head."""
    if given.curve is not None and not given.sizes:
        raise TinyspecError("--curve predicts the times of --sizes: name sizes, such as 1,3,5,7")
    model = models.load_once(given.model, dtype=given.dtype)
    specs = [*map(ArmSpec.parse, given.methods)] or list_arms_with_heads(model)
    if given.sizes:
        return count_tree_sizes(given, model, specs, quiet)
    tuned = find_tuned_models(model)
    specs += [] if given.methods else map(ArmSpec, tuned)
    for method in {spec.name for spec in specs} - {*tuned}:
        if find_technique(method).tuned is not None and not is_tuned_for(model, method):
            raise TinyspecError(
                f"{model.name} was not tuned for {method}: tinyspec train head --for {model.name} "
                f"--method {method} --out FOLDER"
            )
    arms = dict[str, Any]()
    with show_progress_bar(f"heads of {model.name}", len(specs) * given.prompts, quiet) as tick:
        for spec in specs:
            name = tuned.get(spec.name)
            figures = summarize_counts(count_method(given, name or given.model, spec, tick))
            trained = describe_folder(name) if name else describe_training(model, spec.name)
            arms[spec.label] = figures | trained
    if given.keep is None:
        return _stamp(given, model, arms)
    earlier, sittings = read_earlier_rows(given.keep, given)
    made = _stamp(given, model, {**earlier, **arms})
    own = {name: made[name] for name in SITTING}
    return {**made, "sittings": [*sittings, own]}


def read_earlier_rows(file: Path, given: HeadsSettings) -> tuple[dict[str, Any], list[Any]]:
    """Return the rows of a result, each with the date of its run, and the commands that made it.

    Raises TinyspecError if it was counted in another way.
    """
    earlier = json.loads(file.read_text(encoding="utf-8"))
    for name in ("model", "prompts", "tokens", "temperature", "seed", "dtype"):
        if (was := earlier.get("settings", {}).get(name)) != getattr(given, name):
            raise TinyspecError(
                f"{file}: its {name} is {was}, here it is {getattr(given, name)}: its rows "
                "cannot stand beside these, leave out --keep"
            )
    rows = {name: {"kept": earlier["date"], **arm} for name, arm in earlier["arms"].items()}
    return rows, earlier.get("sittings", [{name: earlier[name] for name in SITTING}])


def find_tuned_models(model: Model) -> dict[str, str]:
    """Return, by method, the model that this one became when it was tuned."""
    found = {
        card.name: models.find_tuned_of(model.name, card.name)
        for card in load_techniques().values()
        if card.tuned is not None and card.guarantee is not Guarantee.LOSSY
    }
    return {method: names[0] for method, names in found.items() if names}


def _stamp(given: HeadsSettings, model: Model, arms: Mapping[str, Any]) -> dict[str, Any]:
    curve = None if given.curve is None else given.curve.name
    settings = vars(given) | {"methods": [*arms], "curve": curve}
    for name in ("jobs", "ray", "keep"):  # no figure that is counted here depends on them
        del settings[name]
    return stamp_result({"model": model.name, "settings": settings, "arms": arms})


def count_method(
    given: HeadsSettings, model: str, spec: ArmSpec, tick: Callable[[], Any]
) -> "Counter[Any]":
    """Return the counts of a method over all openings.

    What a method learns from one text for the next stays in one process, and begins anew here.
    """
    counts, count = Counter[Any](), partial(count_openings, given, model, spec)
    numbers = range(min(given.prompts, len(find_openings(given, model))))
    in_a_row = find_technique(spec.name).persistent
    pieces = [[*numbers]] if in_a_row else [[number] for number in numbers]
    for found in run_pieces(count, pieces, given.jobs, given.ray):
        counts.update(found)
        for _ in range(len(numbers) // len(pieces)):
            tick()
    return counts


@lru_cache(maxsize=4)
def find_openings(given: HeadsSettings, model: str) -> list[list[int]]:
    """Return the openings of the valid books, as a model reads them."""
    loaded = models.load_once(model, dtype=given.dtype)
    return tokenize_openings(loaded, find_room(loaded, given.tokens))


def count_openings(
    given: HeadsSettings, model: str, spec: ArmSpec, numbers: Sequence[int]
) -> "Counter[Any]":
    """Return the counts of a method on these openings, one after the other."""
    counts = Counter[Any]()
    load = models.load if find_technique(spec.name).persistent else models.load_once
    loaded = load(model, dtype=given.dtype)
    for number in numbers:
        running = start_generation(
            loaded,
            find_openings(given, model)[number],
            method=spec.name,
            max_new_tokens=given.tokens,
            temperature=given.temperature,
            seed=given.seed + number,
            **dict(spec.knobs),
        )
        count_depths(running, counts)
    return counts


# ------------------------------------------------------------------ sizes of a tree


def set_tree_size(method: str, size: int) -> ArmSpec | None:
    """Return the arm of a method whose draft has so many tokens; None: it cannot have as many.

    >>> set_tree_size("medusa", 5).label, set_tree_size("blockwise", 3).label
    ('medusa:nodes=5', 'blockwise:k=4')
    >>> set_tree_size("llma", 5), set_tree_size("parallel_prompt", 1)
    (None, None)
    """
    card = find_technique(method)
    name, value = ("k", size + 1) if card.head_method == "blockwise" else ("nodes", size)
    knob = next((knob for knob in card.knobs if knob.name == name), None)
    if card.trained is None or knob is None:
        return None
    is_possible = (knob.low or 0) <= value <= (knob.high or math.inf)
    return ArmSpec(method, ((name, value),)) if is_possible else None


def count_tree_sizes(
    given: HeadsSettings, model: Model, specs: Sequence[ArmSpec], quiet: bool
) -> dict[str, Any]:
    """Return what each head yields with trees of each size, and the predicted times.

    The sizes of a head end where its draft grows no more. Raises TinyspecError for a result without
    a cost curve, and for one of another model.
    """
    pass_seconds = None if given.curve is None else read_curve(given.curve, model.name)
    sizes, arms = sorted(set(given.sizes)), dict[str, Any]()
    methods = [*dict.fromkeys(spec.name for spec in specs if set_tree_size(spec.name, sizes[-1]))]
    if not methods:
        raise TinyspecError("no method here has a tree of a size to choose, such as medusa")
    steps = len(methods) * len(sizes) * given.prompts
    with show_progress_bar(f"trees of {model.name}", steps, quiet) as tick:
        for method in methods:
            drafted = 0.0
            for size in sizes:
                spec = set_tree_size(method, size)
                if spec is None:
                    continue
                found = summarize_counts(count_method(given, given.model, spec, tick))
                if found["nodes"] <= drafted:
                    break
                drafted = found["nodes"]
                row = {"method": method, "size": size, **found}
                if pass_seconds is not None:
                    row |= predict_time(pass_seconds, found["tau"], drafted)
                arms[spec.label] = row
    return _stamp(given, model, arms)


def read_curve(path: Path, model: str) -> dict[int, float]:
    """Return the seconds of a pass by its number of tokens, from a result of `tinyspec bench`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        own, taken = result["settings"]["model"], result["curve"]["curves"]["tinyspec"]
        seconds = {int(k): median(samples) for k, samples in taken.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TinyspecError(
            f"{path}: no cost curve: name a result of `tinyspec bench --curve`"
        ) from error
    if Path(own).name != model:
        raise TinyspecError(f"{path}: the cost curve of {own}, not of {model}")
    if len(seconds) < 2 or 1 not in seconds:
        raise TinyspecError(f"{path}: its cost curve needs the size 1 and another one")
    return dict(sorted(seconds.items()))


def predict_time(seconds: Mapping[int, float], tau: float, nodes: float) -> dict[str, float]:
    """Return the predicted milliseconds per token, and how many times as fast as plain that is.

    >>> predict_time({1: 0.010, 4: 0.013}, tau=2.6, nodes=3)
    {'milliseconds': 5.0, 'speedup': 2.0}
    """
    per_token = interpolate_seconds(seconds, 1 + nodes) / tau
    found = {"milliseconds": 1000 * per_token, "speedup": seconds[1] / per_token}
    return {name: round(x, 6) for name, x in found.items()}


# ------------------------------------------------------------------ what is counted


def count_depths(rounds: Iterable[Round], counts: "Counter[Any]") -> None:
    """Add a text's rounds to the counts: passes, tokens, nodes, and each depth's outcomes."""
    for round in rounds:
        counts["passes"] += 1
        counts["tokens"] += len(round.tokens)
        parents = [
            up for up, probe in zip(round.tree.parents, round.tree.probe, strict=True) if not probe
        ]
        counts["nodes"] += len(parents)
        accepted = round.verdict.accepted
        for depth, tip in enumerate((ROOT, *accepted), 1):
            if tip in parents:  # the draft goes on below it
                counts["tested", depth] += 1
                counts["accepted", depth] += len(accepted) >= depth


def summarize_counts(counts: "Counter[Any]") -> dict[str, Any]:
    """Return tokens and nodes per pass, and the accepted share of each depth."""
    tested = [counts["tested", depth] for depth in range(1, SHOWN_DEPTHS + 1)]
    return {
        "tau": counts["tokens"] / counts["passes"],
        "nodes": counts["nodes"] / counts["passes"],
        "depths": [
            counts["accepted", depth] / n if n else None for depth, n in enumerate(tested, 1)
        ],
        "tested": tested,
    }


def describe_training(model: Model, method: str) -> dict[str, Any]:
    """Return name, size and training time of what a method has trained; None where it has not."""
    card, named = find_technique(method), None
    if card.trained is not None:
        named = next(iter(models.find_heads_of(model.name, card.head_method)), None)
    elif card.drafts:
        named = find_draft(model, method)
    return describe_folder(named)


def describe_folder(name: str | None) -> dict[str, Any]:
    """Return name, size and training time of a model or a head; None where there is none."""
    folder = None if name is None else models.find_model(name)
    if folder is None:
        return {"head": None, "megabytes": None, "minutes": None}
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {"head": name, "megabytes": size / 1e6, "minutes": _read_minutes(folder)}


def _read_minutes(folder: Path) -> float | None:
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return float(json.loads(lines[-1])["seconds"]) / 60 if lines else None


def tabulate_heads(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table: a line for each method, those with the most tokens per pass first.

    With sizes it has a line for each size, by method.
    """
    if result["settings"].get("sizes"):
        return tabulate_tree_sizes(result)
    arms = dict(sorted(result["arms"].items(), key=lambda arm: -arm[1]["tau"]))

    def show_depth(at: int) -> Column:
        return Column(f"depth {at + 1}", lambda arm: arm["depths"][at], ".0%")

    columns = [
        Column("tokens per pass", "tau", ".2f"),
        Column("draft tokens", "nodes", ".1f"),
        *map(show_depth, range(SHOWN_DEPTHS)),
        Column("MB", "megabytes", ".1f"),
        Column("minutes", "minutes", ".0f"),
    ]
    return [make_grid("", arms, columns)]


def tabulate_tree_sizes(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table of sizes: what a pass yields, and the predicted time."""
    columns = [
        Column("draft tokens", "nodes", ".1f"),
        Column("tokens per pass", "tau", ".2f"),
        Column("ms per token, predicted", lambda arm: arm.get("milliseconds"), ".2f"),
        Column("times as fast, predicted", lambda arm: arm.get("speedup"), ".2f"),
    ]
    return [make_grid("", result["arms"], columns)]


def chart_tree_sizes(result: Result) -> Chart:
    """Return tokens per pass and the predicted speed by the size of the tree."""
    shown = {"tau": "tokens per pass", "speedup": "times as fast as plain decoding, predicted"}
    panels: list[Lines | Bars] = []
    for figure, title in shown.items():
        lines = dict[str, dict[Any, float]]()
        for arm in result["arms"].values():
            if figure in arm:
                lines.setdefault(arm["method"], {})[arm["size"]] = arm[figure]
        if lines:
            panels.append(Lines(title, lines, "nodes of the tree", reference=1.0, x_log=True))
    summary = "; ".join(f"{name} {arm['tau']:.2f}" for name, arm in result["arms"].items())
    return Chart(f"Trees of the heads of {result['model']}", panels, note_heads(result), summary)


def count_paying_sizes(result: Mapping[str, Any]) -> str:
    """Return how many small and how many large trees are predicted to be faster than plain."""
    counts = list[str]()
    for is_small, what in ((True, f"at most {SMALL_TREE} nodes"), (False, "more")):
        arms = result["arms"].values()
        speeds = [arm["speedup"] for arm in arms if (arm["size"] <= SMALL_TREE) is is_small]
        counts.append(f"{sum(x > 1 for x in speeds)} of {len(speeds)} trees with {what}")
    best = dict[str, tuple[float, int]]()
    for arm in result["arms"].values():
        best[arm["method"]] = max(best.get(arm["method"], (0.0, 0)), (arm["speedup"], arm["size"]))
    sizes = ", ".join(f"{name} {size} ({speed:.2f})" for name, (speed, size) in best.items())
    return (
        f"Predicted to be faster than plain decoding: {counts[0]}, {counts[1]}. Best size of each "
        f"head (times as fast): {sizes}."
    )


def chart_heads(result: Result) -> Chart:
    """Return the tokens per pass of each method, and the accepted share by depth."""
    if result["settings"].get("sizes"):
        return chart_tree_sizes(result)
    arms = dict(sorted(result["arms"].items(), key=lambda arm: -arm[1]["tau"]))
    bars = Bars("tokens per pass", {name: arm["tau"] for name, arm in arms.items()}, digits=2)
    own = {name: arm for name, arm in arms.items() if not ArmSpec.parse(name).knobs}
    lines = {
        name: {at: share for at, share in enumerate(arm["depths"], 1) if share is not None}
        for name, arm in own.items()
    }
    panels: list[Lines | Bars] = [bars, Lines("accepted at a depth", lines, "depth")]
    summary = "; ".join(f"{name} {arm['tau']:.2f}" for name, arm in arms.items())
    return Chart(f"Heads of {result['model']}", panels, note_heads(result), summary)


def note_heads(result: Result) -> list[str]:
    """Return how the table was made."""
    given = result["settings"]
    if given.get("sizes"):
        how = (
            f"{given['prompts']} openings of the valid books, {given['tokens']} tokens each, "
            f"temperature {given['temperature']:g}. Tokens per pass are counted. Times are "
            "predicted from the cost curve of a pass, without the time of the head: a bound. "
            "Beyond the curve its last slope goes on."
        )
        return [how, *([count_paying_sizes(result)] if given["curve"] else [])]
    tuned = ", ".join(
        f"{name} ({arm['head']})"
        for name, arm in result["arms"].items()
        if find_technique(ArmSpec.parse(name).name).tuned is not None
    )
    kept = ", ".join(
        f"{name} ({arm['kept']})" for name, arm in result["arms"].items() if "kept" in arm
    )
    return [
        f"{given['prompts']} openings of the valid books, {given['tokens']} tokens each, "
        f"temperature {given['temperature']:g}. Depth d: of the rounds whose draft went on below "
        "d - 1 accepted tokens, the share in which a draft token at depth d was accepted. MB and "
        "minutes: of the head, or of the draft model. Nothing is timed.",
        *([f"In tuned models, whose texts are their own: {tuned}."] if tuned else []),
        *([f"From an earlier run: {kept}."] if kept else []),
    ]


EXPERIMENT = Experiment(
    count_heads_of_model, tables=tabulate_heads, chart=chart_heads, notes=note_heads
)
