"""`tinyspec bench distillspec`: train a draft for each pair of the grid, and compare them.

The paper compares who writes the texts with how the distance of draft and target is measured, and
finds no pair that is best everywhere. Here every draft begins with the same weights, has the same
budget and the same held-out texts of the target. Two figures over whole distributions are compared:

    alpha      mean of sum min(p, q) at temperature 1: the acceptance rate
    agreement  share of positions where both have the same most probable token
    steps      of the training, as many as the budget allowed
"""

import json
from pathlib import Path
from typing import Any

from tinyspec import models
from tinyspec.bench.experiment import Experiment, Result
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.report import Column, Grid, make_grid
from tinyspec.bench.settings import DistillSpecSettings
from tinyspec.errors import TinyspecError
from tinyspec.training.distill import distill, draft_recipe
from tinyspec.training.outputs import DistillSettings
from tinyspec.training.recipe import set_recipe_values

FIGURES = "figures.json"  # beside a draft, so that it is measured once


def compare_divergences(given: DistillSpecSettings, quiet: bool = False) -> dict[str, Any]:
    """Return the figures of a draft for each source and divergence.

    Raises TinyspecError for a source or a divergence that is not known, before anything is trained.
    """
    target = models.load(given.model)
    cells = [(source, loss) for source in given.sources for loss in given.losses]
    for source, loss in cells:
        DistillSettings(source=source, loss=loss)  # says what is not known
    width, share = target.config.d_model, target.config.max_positions // 4
    text = draft_recipe(given.model, "draft", given.layers, 0, given.texts, width)
    figures = dict[str, dict[str, dict[str, float]]]()
    with show_progress_bar(f"drafts of {target.name}", len(cells), quiet) as tick:
        for source, loss in cells:
            out = Path(given.drafts) / f"{source}-{loss}"
            values = {
                "name": json.dumps(out.name),
                "extra": '{draft_for = "distillspec"}',
                "distill.tokens": str(min(share, 128)),
                "distill.prompt": str(min(share, 96)),
                "distill.question": str(min(share, 40)),
                "distill.source": json.dumps(source),
                "distill.loss": json.dumps(loss),
                "train.seed": str(given.seed),
                "train.steps": str(given.steps),
                "train.minutes": str(given.minutes),
            }
            figures.setdefault(source, {})[loss] = _train_draft(
                out, set_recipe_values(text, values)
            )
            tick()
    return stamp_result({"model": target.name, "settings": vars(given), "figures": figures})


def _train_draft(out: Path, recipe: str) -> dict[str, float]:
    """Return the figures of a draft; train it first unless it is there.

    Raises TinyspecError if the draft that is there was trained by another recipe.
    """
    known, file = out / FIGURES, out.with_suffix(".toml")
    if file.exists() and file.read_text(encoding="utf-8") != recipe:
        raise TinyspecError(
            f"{file} is of other settings: name another folder with --drafts, or delete this one"
        )
    if not known.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(recipe, encoding="utf-8")
        finished = (out / "model.safetensors").exists() and not (out / ".tinyspec").exists()
        result, figures = distill(file, out, restart=finished)
        if not result.finished:
            raise KeyboardInterrupt
        known.write_text(json.dumps({**figures, "steps": result.step}), encoding="utf-8")
    measured: dict[str, float] = json.loads(known.read_text(encoding="utf-8"))
    return measured


def tabulate_grid(result: Result) -> list[Grid]:
    """Return a table of alpha and one of agreement: a line for each source."""
    losses = result["settings"]["losses"]
    return [
        make_grid(
            title,
            result["figures"],
            [Column(loss, (loss, figure), spec) for loss in losses],
            "texts by",
        )
        for figure, title, spec in (
            ("alpha", "Acceptance rate", ".3f"),
            ("agreement", "Same first token", ".3f"),
            ("steps", "Steps of training", "d"),
        )
    ]


def name_best(result: Result) -> list[str]:
    """Return which pair has the highest acceptance rate."""
    pairs = {
        (source, loss): cell["alpha"]
        for source, row in result["figures"].items()
        for loss, cell in row.items()
    }
    source, loss = max(pairs, key=lambda pair: pairs[pair])
    least = min(pairs.values())
    return [
        f"highest acceptance rate: {pairs[source, loss]:.3f} with texts by {source} and {loss}; "
        f"lowest {least:.3f}"
    ]


EXPERIMENT = Experiment(
    compare_divergences, tables=tabulate_grid, notes=name_best, closing=name_best
)
