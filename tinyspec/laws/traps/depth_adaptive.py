"""Depth-adaptive transformer (Elbayad et al. 2020): predictors that an oracle has taught."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from tinyspec.early_exit import depth_adaptive
from tinyspec.early_exit.depth_adaptive import (
    DepthAdaptiveSettings,
    MultinomialRule,
    SequenceRule,
    initialize_predictors,
)
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.exact.models import logits_of_states, small_network
from tinyspec.laws.exit_laws import (
    AS_PREDICTED,
    follows_the_predictors,
    mean_of_prompt,
    states_by_layer,
)
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap, card
from tinyspec.lm.heads import freeze_target
from tinyspec.technique import TrainingBatch, find_technique

BY_ORACLE = "predictors learn the exit that scores best, once each layer has its price"
MODEL_STAYS = "no weight of the model has a gradient of the predictors"

SETTINGS = [
    DepthAdaptiveSettings(oracle=oracle, penalty=penalty, width=width)
    for oracle, penalty, width in product(
        ("likelihood", "correctness"), (0.0, 0.1, 0.4), (0.0, 1.0, 9.0)
    )
]
TEXTS = ((1, 2, 0, 3, 1, 1, 2), (0, 3, 2, 2, 1, 0, 3), (2, 1, 0, 0, 1, 3, 2))
FIRST = (2, 4, 0)  # the prompts' last tokens


def training_case(seed: int) -> tuple[Any, dict[str, torch.Tensor], TrainingBatch]:
    """Return a small model, random predictors and a batch of three texts."""
    model = small_network(seed)
    generator = torch.Generator().manual_seed(seed)
    begun = initialize_predictors(freeze_target(model), DepthAdaptiveSettings(), 0)
    weights = {
        name: torch.randn(w.shape, generator=generator, dtype=torch.float64)
        for name, w in begun.items()
    }
    ids = torch.tensor(TEXTS)
    is_answer = torch.arange(ids.shape[1]) >= torch.tensor(FIRST)[:, None]
    return model, weights, TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)


def best_exit(worth: Any) -> int:
    """Return the lowest exit that no other exceeds, but for rounding."""
    return next(n for n, x in enumerate(worth) if all(x > other - 1e-5 for other in worth))


def log_softmax(x: Any) -> Any:
    """Return the logarithms of the softmax of the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def sum_losses_by_hand(model: Any, weights: Any, settings: DepthAdaptiveSettings) -> float:
    """Return the loss of all predictors, text by text and token by token."""
    w = {name: x.numpy() for name, x in weights.items()}
    losses: dict[str, list[float]] = {"sequence": [], "multinomial": [], "geometric": []}
    for text, first in zip(TEXTS, FIRST, strict=True):
        states = states_by_layer(model, text[:-1])
        rows = [log_softmax(logits_of_states(model, x)) for x in states]
        scores = np.array(
            [
                [
                    row[t, text[t + 1]]
                    if settings.oracle == "likelihood"
                    else float(row[t].argmax() == text[t + 1])
                    for row in rows
                ]
                for t in range(first, len(text) - 1)
            ]
        )
        price = settings.penalty * np.arange(1, len(states) + 1)
        q = log_softmax(
            w["sequence.weight"] @ mean_of_prompt(model, text[: first + 1]) + w["sequence.bias"]
        )
        losses["sequence"].append(-q[best_exit(scores.mean(axis=0) - price)])
        for t in range(len(scores)):
            near = [
                math.exp(-((t - other) ** 2) / settings.width) if settings.width else t == other
                for other in range(len(scores))
            ]
            best = best_exit(np.average(scores, axis=0, weights=near) - price)
            q = log_softmax(w["multinomial.weight"] @ states[0][first + t] + w["multinomial.bias"])
            losses["multinomial"].append(-q[best])
            chance = 1.0
            for x in states[:best]:
                chance /= 1 + math.exp(
                    float(w["geometric.weight"] @ x[first + t]) + float(w["geometric.bias"][0])
                )
            if best < len(states) - 1:
                stop = w["geometric.weight"] @ states[best][first + t] + w["geometric.bias"][0]
                chance /= 1 + math.exp(-float(stop))
            losses["geometric"].append(-math.log(chance))
    return float(sum(np.mean(found) for found in losses.values()))


@collect_evidence(BY_ORACLE)
def predictors_learn_from_oracles(loss: Any) -> Iterator[int]:
    """Check the loss of a batch against its formula: both oracles, prices and widths."""
    for seed, settings in product(range(3), SETTINGS):
        model, weights, batch = training_case(seed)
        target = freeze_target(model)._replace(settings=settings)
        expected, got = (
            sum_losses_by_hand(model, weights, settings),
            float(loss(weights, target, batch)),
        )
        if not abs(expected - got) <= 1e-4 * expected:
            accuse(BY_ORACLE, expected, got, model=model.name, **vars(settings))
        yield 1


@collect_evidence(MODEL_STAYS)
def model_has_no_gradient(loss: Any) -> Iterator[int]:
    """Check that the loss has gradients of the predictors alone."""
    model, weights, batch = training_case(0)
    target = freeze_target(model)._replace(settings=DepthAdaptiveSettings())
    assert target.blocks is not None
    own = {name: w.requires_grad_() for name, w in target.blocks.weights.items()}
    trained = {name: w.requires_grad_() for name, w in weights.items()}
    loss(trained, target, batch).backward()
    for name, w in own.items():
        if w.grad is not None and w.grad.any():
            accuse(MODEL_STAYS, "no gradient", float(w.grad.abs().max()), weight=name)
        yield 1
    for name, w in trained.items():
        if w.grad is None or not w.grad.any():
            accuse(MODEL_STAYS, "a gradient", None, weight=name)
        yield 1


def trained_loss() -> Any:
    """Return the loss of the card."""
    trained = find_technique("depth_adaptive").trained
    assert trained is not None
    return trained.loss


TRAPS = [
    Trap(AS_PREDICTED, follows_the_predictors, card("depth_adaptive")),
    Trap(BY_ORACLE, predictors_learn_from_oracles, trained_loss),
    Trap(MODEL_STAYS, model_has_no_gradient, trained_loss),
]

_depth = partial(Toy, technique="depth_adaptive")

TOYS = [
    _depth(
        "the greatest probability under each predictor's name",
        'predictor == "confidence":',
        "True:",
        depth_adaptive.depth_adaptive,
        law=AS_PREDICTED,
    ),
    _depth(
        "skipped layers are run after all",
        '"copy"',
        '"recompute"',
        depth_adaptive.depth_adaptive,
        law=AS_PREDICTED,
    ),
    _depth(
        "one exit for the text, chosen at its first token",
        "if at.layer == 1:",
        "if at.layer == 1 and at.step == 0:",
        MultinomialRule.should_exit,
        law=AS_PREDICTED,
    ),
    _depth(
        "a text's exit that knows nothing of its source",
        "self.weight @ source",
        "self.weight @ (0 * source)",
        SequenceRule._choose_exit,
        law=AS_PREDICTED,
    ),
    _depth(
        "layers without a price",
        "scores - penalty * n",
        "scores",
        depth_adaptive.choose_best_exits,
        law=BY_ORACLE,
    ),
    _depth(
        "an oracle for each token alone",
        "if not width:",
        "if True:",
        depth_adaptive.smooth_scores,
        law=BY_ORACLE,
    ),
    _depth(
        "independent stops in place of a geometric chain",
        ".cumsum(-1)",
        "",
        depth_adaptive.geometric_log_probs,
        law=BY_ORACLE,
    ),
    _depth(
        "predictors that train the decoder",
        "torch.no_grad()",
        "torch.enable_grad()",
        depth_adaptive.read_batch,
        law=MODEL_STAYS,
    ),
]
