"""Write the page of a trained checkpoint: README.md and loss.svg.

A page follows from the recipe, the log and the final figures alone. Its text stands in cards/.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch

from tinyspec.lm.model import Model
from tinyspec.training.recipe import HeadRecipe, Recipe, TranslationRecipe
from tinyspec.training.train import TrainingResult

PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "cards"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write_card(
    out: Path,
    page: str,
    recipe: Recipe | TranslationRecipe | HeadRecipe,
    result: TrainingResult,
    device: torch.device,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    **values: Any,
) -> None:
    """Write README.md and loss.svg into `out`.

    page    name of the template: language_model, draft, head or translator
    curves  lines of the chart by label: (tokens seen, figure); empty ones are left out
    values  what else the template shows
    """
    lines = {label: points for label, points in curves.items() if points}
    svg = draw_curves(lines, "tokens seen", f"training of {recipe.name}")
    (out / "loss.svg").write_text(svg, encoding="utf-8")
    text = PAGES.get_template(f"{page}.md.jinja").render(
        recipe=recipe,
        result=result,
        teacher=Path(recipe.teacher).name,
        minutes=f"{result.seconds / 60:.1f}",
        device=describe_device(device),
        **values,
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def describe_device(device: torch.device) -> str:
    """Return the name of the machine that trained the model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def sample_continuation(
    model: Model, prompt: str, seed: int, temperature: float = 0.8, tokens: int = 120
) -> str:
    """Sample a continuation of `prompt` without a cache; it stops at an end of text."""
    generator = torch.Generator().manual_seed(seed)
    ids = start = model.tokenizer.encode(prompt)
    for _ in range(tokens):
        logits = model.logits(ids[-model.config.max_positions :])[-1]
        probs = (logits / temperature).softmax(-1)
        token = int(torch.multinomial(probs, 1, generator=generator))
        if token in model.config.eos:
            break
        ids = [*ids, token]
    return model.tokenizer.decode(ids[len(start) :])


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], x_label: str, title: str
) -> str:
    """Return an SVG line chart.

    >>> draw_curves({"loss": [(0, 2.0), (10, 1.0)]}, "step", "a curve").count("<polyline")
    1
    """
    width, height = 640, 300
    left, right, top, bottom = 56, width - 16, 34, height - 44  # edges of the plot
    points = [point for curve in curves.values() for point in curve]
    x_high = max(x for x, _ in points) or 1
    # The first losses are those of a uniform distribution. The axis ends where most points lie.
    ys = sorted(y for _, y in points)
    low, high = ys[0], ys[math.ceil(0.98 * len(ys)) - 1]
    pad = 0.06 * (high - low) or 0.1
    low, high = low - pad, high + pad

    def place_x(x: float) -> str:
        return f"{left + x / x_high * (right - left):.1f}"

    def place_y(y: float) -> str:
        return f"{top + (high - min(max(y, low), high)) / (high - low) * (bottom - top):.1f}"

    ticks = [
        {
            "x": place_x(x_high * i / 4),
            "y": place_y(low + (high - low) * i / 4),
            "x_label": _format_count(x_high * i / 4),
            "y_label": f"{low + (high - low) * i / 4:.2f}",
        }
        for i in range(5)
    ]
    lines = {
        label: " ".join(f"{place_x(x)},{place_y(y)}" for x, y in curve)
        for label, curve in curves.items()
    }
    edges = {"width": width, "height": height, "left": left, "right": right, "bottom": bottom}
    return PAGES.get_template("loss.svg.jinja").render(
        title=title, x_label=x_label, ticks=ticks, curves=lines, **edges
    )


def _format_count(number: float) -> str:
    """Return a number in short form.

    >>> _format_count(1234567), _format_count(40e6), _format_count(950)
    ('1.2M', '40M', '950')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return f"{number:.0f}"
