"""Train early layers to predict tokens: exit losses with a curriculum, and layer dropout.

The section [exits] of a recipe. The hidden state after every layer goes through the model's one
final norm and one head. The cross-entropy of each exit has a weight in the loss. Nothing is added
to the model. Layers l and steps t of T are counted from 0, as in LayerSkip (Elhoushi et al.,
ACL 2024, arXiv 2404.16710, section 4.1).

    loss(t) = sum_l e(t, l) CE(head(norm(x_{l+1})), y)
    e(t, l) = C(t, l) e(l) / sum_k C(t, k) e(k)

    "linear"  e(l) = l + 1: CALM (Schuster et al., NeurIPS 2022, arXiv 2207.07061)
    "uniform" e(l) = 1: one of the weightings of Elbayad et al., ICLR 2020, arXiv 1910.10073
    "sum"     e(l) = e_scale (0 + 1 + ... + l) below the last layer, (L-1) + e_scale (0 + ... + L-2)
              at it: LayerSkip. The exit after the first layer has weight 0, as published.

The curriculum C(t, l) is 1 if the exit after layer l counts at step t, else 0. The last exit always
counts. "rotational": every R-th layer, and the next ones at the next step. "gradual": first the
last exit, then one more below it every T / (2 L) steps; all exits from step T / 2 on.

Layer dropout leaves out layer l for one sample with probability

    p(t, l) = S(t) D(l) p_max,    D(l) = 2^{l / (L-1)} - 1,    S(t) = 2^{t / (T-1)} - 1

with S(t) = 1 if a trained model is continued. For that sample the layer is the identity. The
remaining layers are not scaled up.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks

Weights = Literal["none", "linear", "sum", "uniform"]
Curriculum = Literal["none", "rotational", "gradual"]


@dataclass(frozen=True)
class ExitLosses:
    """The section [exits] of a recipe. With its defaults it only asks for figures of the exits.

    weights     losses of the early exits; none: only the last layer has a loss
    e_scale     weight of the early exits, relative to the last
    curriculum  which exits count at a step; none: all of them
    every       only exits after so many layers, twice as many, ... have a loss; with repeated
                layers, their number makes these the repetitions
    rotation    R of the rotational curriculum
    p_max       layer dropout of the last layer at the last step
    scratch     true: dropout rises during the training; false: a trained model is continued
    report      exits whose bits per byte are logged, each a number of layers
    """

    weights: Weights = "none"
    e_scale: float = 1.0
    curriculum: Curriculum = "none"
    every: int = 1
    rotation: int = 4
    p_max: float = 0.0
    scratch: bool = True
    report: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole = self.rotation >= 1 and self.every >= 1
        if not (0 <= self.p_max < 1 and self.e_scale >= 0 and whole):
            raise TinyspecError(
                "[exits] wants 0 <= p_max < 1, e_scale >= 0, rotation >= 1, every >= 1"
            )

    @property
    def changes_training(self) -> bool:
        """Return whether a training with this section differs from one without it."""
        return self.weights != "none" or self.p_max > 0

    def describe(self) -> str:
        """Return the section as a sentence for a model's card."""
        if not self.changes_training:
            return (
                "Only its last layer was trained to predict; "
                "models with trained exits are compared with it."
            )
        losses = "early exits were trained too, their losses weighted "
        kind = {
            "none": "",
            "linear": losses + "by depth",
            "uniform": losses + "alike",
            "sum": losses + f"as LayerSkip does (e_scale {self.e_scale})",
        }
        parts = [kind[self.weights]]
        if self.every > 1:
            parts.append(f"only exits after every {self.every} layers")
        if self.curriculum != "none":
            turn = f", R = {self.rotation}" if self.curriculum == "rotational" else ""
            parts.append(f"{self.curriculum} curriculum{turn}")
        if self.p_max:
            parts.append(
                f"layers dropped out, up to {self.p_max:g} at the top"
                + " and at the end" * self.scratch
            )
        sentence = "; ".join(part for part in parts if part)
        return sentence[0].upper() + sentence[1:] + "."

    def loss_weights(self, n_layers: int) -> list[float]:
        """Return e(l) of all layers, not yet normalized."""
        last = n_layers - 1
        if self.weights == "none":
            return [0.0] * last + [1.0]
        if self.weights == "linear":
            return [self.e_scale * (layer + 1) for layer in range(last)] + [float(n_layers)]
        if self.weights == "uniform":
            return [self.e_scale] * last + [1.0]
        return [self.e_scale * layer * (layer + 1) / 2 for layer in range(last)] + [
            last + self.e_scale * (last - 1) * last / 2
        ]

    def is_counted(self, layer: int, n_layers: int, step: int, done: float) -> bool:
        """Return C(t, l): whether a layer's exit counts at a step.

        `done` is the share of the training before the step.
        """
        if (layer + 1) % self.every and layer != n_layers - 1:
            return False
        if layer == n_layers - 1 or self.curriculum == "none":
            return True
        if self.curriculum == "rotational":
            return layer % self.rotation == step % self.rotation
        return done >= (n_layers - 1 - layer) / (2 * n_layers)

    def normalized_weights(self, n_layers: int, step: int, done: float) -> list[float]:
        """Return e(t, l) of all layers. They sum to 1."""
        counted = [
            e if self.is_counted(layer, n_layers, step, done) else 0.0
            for layer, e in enumerate(self.loss_weights(n_layers))
        ]
        return (
            [e / sum(counted) for e in counted] if sum(counted) else [0.0] * (n_layers - 1) + [1.0]
        )

    def dropout_rates(self, n_layers: int, done: float) -> list[float]:
        """Return p(t, l) of all layers. `done` is t / (T-1)."""
        rise = 2**done - 1 if self.scratch else 1.0
        return [
            rise * (2 ** (layer / max(n_layers - 1, 1)) - 1) * self.p_max
            for layer in range(n_layers)
        ]


class ExitLossSchedule:
    """The loss of a training with [exits]: its weights and dropout rates at the current step."""

    def __init__(self, exits: ExitLosses, n_layers: int, steps: int):
        self.exits, self.n_layers, self.steps = exits, n_layers, steps
        self.begin_step(0, 0.0)

    def begin_step(self, step: int, progress: float) -> None:
        """Set the weights and dropout rates of a step.

        `progress` is the share of the training before it: t / T, or more by the clock.
        """
        self.loss_weights = self.exits.normalized_weights(self.n_layers, step, progress)
        done = min(
            1.0, progress * self.steps / max(self.steps - 1, 1)
        )  # t / (T-1): the last step has 1
        self.dropout_rates = self.exits.dropout_rates(self.n_layers, done)

    def loss(self, blocks: Blocks, inputs: Tensor, targets: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the loss of a batch, inputs and targets [B, T].

        No logits are computed for an exit whose weight is 0.
        """
        total = torch.zeros((), device=inputs.device)
        states = blocks.layer_states(inputs, dropout, self.dropout_rates)
        for weight, x in zip(self.loss_weights, states, strict=True):
            if weight:
                loss = F.cross_entropy(blocks.compute_logits(x).flatten(0, 1), targets.flatten())
                total = total + weight * loss
        return total


def exit_logits(blocks: Blocks, ids: Tensor, layers: int) -> Tensor:
    """Return the logits [B, T, V] of the exit after so many layers, for ids [B, T].

    The layers above it are not run.
    """
    return blocks.compute_logits(next(itertools.islice(blocks.layer_states(ids), layers - 1, None)))
