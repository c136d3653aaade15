"""`tinyspec bench heads`: count what each trained head of a model yields, depth by depth.

Every method continues the same openings of the valid books. Nothing is timed, so the machine may be
busy. Beside the heads stand lookup (`llma`), which is trained on nothing, and the draft model that
the target's card names. A head that is below them is not trained enough.

    tokens per pass  tau: tokens committed for each pass of the target that verifies
    depth d          of the rounds in which the draft went on below d - 1 accepted tokens, the share
                     in which one of the draft tokens at depth d was accepted
    minutes          of the training, as its log says
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
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
from tinyspec.decoding.decode import Round
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.technique import Guarantee, find_technique, load_techniques
from tinyspec.tree import ROOT

BESIDE = ("llma", "speculative_decoding")
DEPTHS = 5  # columns of the table


def list_arms_with_heads(model: Model) -> list[ArmSpec]:
    """Return the rows of all methods that have a head for this model here, and what they beat.

    Left out are methods that tune the model, and those that are lossy by default.
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
    drafted = "draft" in model.config.extra or bool(models.find_drafts_of(model.name))
    beside = BESIDE if drafted else BESIDE[:1]
    return [row for name in (*headed, *beside) for row in list_rows(name)]


def count_heads_of_model(given: HeadsSettings, quiet: bool = False) -> dict[str, Any]:
    """Return what each method yields, with the size and the training of its head."""
    model = models.load(given.model, dtype=given.dtype)
    specs = [*map(ArmSpec.parse, given.methods)] or list_arms_with_heads(model)
    openings = tokenize_openings(model, find_room(model, given.tokens))[: given.prompts]
    arms = dict[str, Any]()
    with show_progress_bar(f"heads of {model.name}", len(specs) * len(openings), quiet) as tick:
        for spec in specs:
            counts = Counter[Any]()
            for number, opening in enumerate(openings):
                running = start_generation(
                    model,
                    opening,
                    method=spec.name,
                    max_new_tokens=given.tokens,
                    temperature=given.temperature,
                    seed=given.seed + number,
                    **dict(spec.knobs),
                )
                count_depths(running, counts)
                tick()
            arms[spec.label] = summarize_counts(counts) | describe_training(model, spec.name)
    settings = vars(given) | {"methods": [*arms]}
    return stamp_result({"model": model.name, "settings": settings, "arms": arms})


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
    tested = [counts["tested", depth] for depth in range(1, DEPTHS + 1)]
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
        drafts = models.find_drafts_of(model.name)
        named = model.config.extra.get("draft") or next(iter(drafts), None)
    folder = None if named is None else models.find_model(named)
    if folder is None:
        return {"head": None, "megabytes": None, "minutes": None}
    size = (folder / "model.safetensors").stat().st_size
    return {"head": named, "megabytes": size / 1e6, "minutes": _read_minutes(folder)}


def _read_minutes(folder: Path) -> float | None:
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return float(json.loads(lines[-1])["seconds"]) / 60 if lines else None


def tabulate_heads(result: Mapping[str, Any]) -> list[Grid]:
    """Return the table: a line for each method, those with the most tokens per pass first."""
    arms = dict(sorted(result["arms"].items(), key=lambda arm: -arm[1]["tau"]))

    def show_depth(at: int) -> Column:
        return Column(f"depth {at + 1}", lambda arm: arm["depths"][at], ".0%")

    columns = [
        Column("tokens per pass", "tau", ".2f"),
        Column("draft tokens", "nodes", ".1f"),
        *map(show_depth, range(DEPTHS)),
        Column("MB", "megabytes", ".1f"),
        Column("minutes", "minutes", ".0f"),
    ]
    return [make_grid("", arms, columns)]


def chart_heads(result: Result) -> Chart:
    """Return the tokens per pass of each method, and the accepted share by depth."""
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
    return [
        f"{given['prompts']} openings of the valid books, {given['tokens']} tokens each, "
        f"temperature {given['temperature']:g}. Depth d: of the rounds whose draft went on below "
        "d - 1 accepted tokens, the share in which a draft token at depth d was accepted. MB and "
        "minutes: of the head, or of the draft model. Nothing is timed."
    ]


EXPERIMENT = Experiment(
    count_heads_of_model, tables=tabulate_heads, chart=chart_heads, notes=note_heads
)
