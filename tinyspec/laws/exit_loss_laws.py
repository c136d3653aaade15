"""What a training of exits is held to, step by step: LayerSkip's and CALM's weights, LayerSkip's
dropout, one head for all.

The judge writes the papers' formulas down once more, in another form (sums are summed, curricula
are counted out), and for the loss asks each exit as a model of its own: the first layers, with the
final norm and the head of the whole.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.lm.config import Config
from tinyspec.lm.transformer import Model
from tinyspec.training.exit_losses import Course, Exits

EXIT_WEIGHTS = "what an exit's loss counts"
LAYER_DROPOUT = "how often a layer is left out"
ONE_HEAD = "all exits speak through one norm and one head"

MakeCourse = Callable[[Exits, int, int], Course]
COURSE_SHAPES = [(3, 12), (4, 40), (10, 60)]
"""Layers, steps."""
EXIT_SECTIONS = [
    Exits("linear"), Exits("sum", e_scale=0.25), Exits("sum", curriculum="rotational", rotation=3),
    Exits("linear", curriculum="gradual"), Exits("sum", curriculum="gradual", p_max=0.2),
    Exits("linear", curriculum="rotational", rotation=2, p_max=0.1), Exits("none", p_max=0.3, scratch=False),
]  # fmt: skip
EXIT_CONFIG = Config(
    vocab_size=7,
    d_model=8,
    n_layers=3,
    n_heads=2,
    n_kv_heads=1,
    head_dim=4,
    d_ff=12,
    max_positions=8,
)


def _counted_layers(exits: Exits, layers: int, step: int, steps: int) -> list[int]:
    """The layers whose exits count at a step."""
    if exits.curriculum == "rotational":
        return sorted({*range(step % exits.rotation, layers, exits.rotation), layers - 1})
    if exits.curriculum == "gradual":
        on = 1 + step * 2 * layers // steps  # the last, and one more each T / (2 L) steps
        return list(range(max(layers - on, 0), layers))
    return list(range(layers))


def published_weights(exits: Exits, layers: int, step: int, steps: int) -> list[float]:
    """The weight of every exit at a step, as published."""
    last = layers - 1
    if exits.weights == "linear":
        e = [exits.e_scale * (layer + 1) for layer in range(last)] + [float(layers)]
    elif exits.weights == "sum":
        e = [exits.e_scale * sum(range(layer + 1)) for layer in range(last)] + [
            last + exits.e_scale * sum(range(last))
        ]
    else:
        e = [0.0] * last + [1.0]
    counted = _counted_layers(exits, layers, step, steps)
    return [
        e[layer] / sum(e[k] for k in counted) if layer in counted else 0.0
        for layer in range(layers)
    ]


def published_dropout(exits: Exits, layers: int, step: int, steps: int) -> list[float]:
    """How likely each layer is left out for a sample at a step, as published."""
    rise = math.exp(step * math.log(2) / (steps - 1)) - 1 if exits.scratch else 1.0
    return [
        rise * (math.exp(layer * math.log(2) / (layers - 1)) - 1) * exits.p_max
        for layer in range(layers)
    ]


def _course_steps(
    make: MakeCourse,
) -> Iterator[tuple[dict[str, Any], Course, Exits, tuple[int, int, int]]]:
    for exits, (layers, steps) in product(EXIT_SECTIONS, COURSE_SHAPES):
        course = make(exits, layers, steps)
        for step in range(steps):
            course.begin(step, step / steps)
            yield (
                {"section": exits, "layers": layers, "step": step, "steps": steps},
                course,
                exits,
                (layers, step, steps),
            )


def exit_loss_weights(make: MakeCourse) -> Evidence:
    """e(t, l) at every step; they sum to 1."""
    seen = 0
    for case, course, exits, at in _course_steps(make):
        expected, seen = published_weights(exits, *at), seen + 1
        if any(abs(a - b) > 1e-9 for a, b in zip(expected, course.shares, strict=True)):
            accuse(EXIT_WEIGHTS, expected, course.shares, **case)
    return Evidence(EXIT_WEIGHTS, seen)


def layer_dropout(make: MakeCourse) -> Evidence:
    """p(t, l) at every step: 0 at the bottom, p_max at the top of the last step."""
    seen = 0
    for case, course, exits, at in _course_steps(make):
        expected, seen = published_dropout(exits, *at), seen + 1
        if any(abs(a - b) > 1e-9 for a, b in zip(expected, course.dropped, strict=True)):
            accuse(LAYER_DROPOUT, expected, course.dropped, **case)
    return Evidence(LAYER_DROPOUT, seen)


def loss_of(make: MakeCourse, exits: Exits, model: Model, step: int) -> float:
    """The loss of one batch at a step of ten."""
    ids = torch.randint(
        model.config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(step)
    )
    course = make(exits, model.config.n_layers, 10)
    course.begin(step, step / 10)
    return float(course.loss(model.dense(), ids[:, :-1], ids[:, 1:]))


def _cut_model(model: Model, layers: int) -> Model:
    """The model of the first layers, with the norm and the head of the whole."""
    above = tuple(f"{layer}." for layer in range(layers, model.config.n_layers))
    kept = {name: weight for name, weight in model.weights.items() if not name.startswith(above)}
    return Model(replace(model.config, n_layers=layers), kept)


def one_head(make: MakeCourse) -> Evidence:
    """The loss is the weighted sum of the cross-entropies of as many models, each cut off behind a
    layer.
    """
    model, seen = Model.random(EXIT_CONFIG, seed=1, dtype=torch.float64, scale=0.5), 0
    cut = [_cut_model(model, layers) for layers in range(1, 4)]
    for exits, step in product([exits for exits in EXIT_SECTIONS if not exits.p_max], range(4)):
        ids = torch.randint(
            EXIT_CONFIG.vocab_size, (2, 6), generator=torch.Generator().manual_seed(step)
        )
        each = [
            float(
                F.cross_entropy(m.training_logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            )
            for m in cut
        ]
        expected = sum(
            e * loss for e, loss in zip(published_weights(exits, 3, step, 10), each, strict=True)
        )
        got, seen = loss_of(make, exits, model, step), seen + 1
        if abs(got - expected) > 1e-6:
            accuse(ONE_HEAD, expected, got, section=exits, step=step, losses_of_the_exits=each)
    return Evidence(ONE_HEAD, seen)


def course_figures(parts: Parts) -> Any:
    """What can be seen without a law: weights, chances and losses."""
    model = Model.random(EXIT_CONFIG, seed=1, dtype=torch.float64, scale=0.5)
    figures = [
        (list(course.shares), list(course.dropped))
        for _, course, _, _ in _course_steps(parts.course)
    ]
    return figures, [
        loss_of(parts.course, exits, model, 1) for exits in EXIT_SECTIONS if not exits.p_max
    ]


EXIT_LOSS_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    EXIT_WEIGHTS: lambda parts: exit_loss_weights(parts.course),
    LAYER_DROPOUT: lambda parts: layer_dropout(parts.course),
    ONE_HEAD: lambda parts: one_head(parts.course),
}
