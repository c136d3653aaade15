"""How early layers learn to speak: exit losses with a curriculum, and layer dropout. Section
[exits] of a recipe.

The state after every layer goes through the one final norm and the one head of the model, and each
exit's cross-entropy counts with a weight; nothing is added to the model. Layers l are counted from
0 here, as LayerSkip (Elhoushi et al., ACL 2024, arXiv 2404.16710, section 4.1) counts them; steps t
of T likewise.

    loss(t) = sum_l e(t, l) CE(head(norm(x_{l+1})), y),    e(t, l) = C(t, l) e(l) / sum_k C(t, k) e(k)

    "linear"  e(l) = l + 1: CALM (Schuster et al., NeurIPS 2022, arXiv 2207.07061)
    "sum"     e(l) = e_scale (0 + 1 + ... + l) below the last layer, (L-1) + e_scale (0 + ... + L-2)
              at it: LayerSkip. The exit after the first layer has weight 0, as published.

The curriculum C says which exits count at a step; the last always does. "rotational": every R-th
layer, moved on by one at each step. "gradual": the last, then one more below it each T / (2 L)
steps, all from T / 2 on.

Layer dropout leaves layer l out for a sample with the chance p(t, l) = S(t) D(l) p_max, where D(l)
= 2^{l / (L-1)} - 1 rises from 0 to 1 and S(t) = 2^{t / (T-1)} - 1 in a training from scratch, 1
where a trained model is continued. What is left out is the identity for that sample; the others are
not scaled up.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.blocks import Blocks

Weights = Literal["none", "linear", "sum"]
Curriculum = Literal["none", "rotational", "gradual"]


@dataclass(frozen=True)
class Exits:
    """Section [exits] of a recipe. Without any loss or dropout it only asks for figures of the
    exits.
    """

    weights: Weights = "none"  # none: the last layer alone is taught
    e_scale: float = 1.0  # what early exits count, against the last
    curriculum: Curriculum = "none"  # none: all exits count at each step
    rotation: int = 4  # R of the rotational curriculum
    p_max: float = 0.0  # layer dropout of the last layer at the end
    scratch: bool = (
        True  # dropout rises in the course of the training; false: a trained model is continued
    )
    report: tuple[int, ...] = ()  # exits whose bits per byte are logged: after so many layers

    def __post_init__(self) -> None:
        for value, kinds in (
            (self.weights, get_args(Weights)),
            (self.curriculum, get_args(Curriculum)),
        ):
            if value not in kinds:
                raise TinyspecError(
                    f"[exits] {value!r} is not known; {suggest_nearest(str(value), kinds)}"
                )
        if not (0 <= self.p_max < 1 and self.e_scale >= 0 and self.rotation >= 1):
            raise TinyspecError("[exits] wants 0 <= p_max < 1, e_scale >= 0, rotation >= 1")

    @property
    def taught(self) -> bool:
        """Whether the training differs from one without the section."""
        return self.weights != "none" or self.p_max > 0

    def said(self) -> str:
        """The section as a sentence of a card."""
        if not self.taught:
            return "Only its last layer was taught to speak; it is what the exits checkpoints are compared with."
        losses = "early exits were taught along, their losses weighted "
        kind = {
            "none": "",
            "linear": losses + "by depth",
            "sum": losses + f"as LayerSkip does (e_scale {self.e_scale})",
        }
        parts = [kind[self.weights]]
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

    def e(self, n_layers: int) -> list[float]:
        """The weights e(l) of all layers, not yet normalised."""
        last = n_layers - 1
        if self.weights == "none":
            return [0.0] * last + [1.0]
        if self.weights == "linear":
            return [self.e_scale * (layer + 1) for layer in range(last)] + [float(n_layers)]
        return [self.e_scale * layer * (layer + 1) / 2 for layer in range(last)] + [
            last + self.e_scale * (last - 1) * last / 2
        ]

    def counts(self, layer: int, n_layers: int, step: int, done: float) -> bool:
        """C(t, l): whether the exit of a layer counts at a step, `done` being the share of the
        training before it.
        """
        if layer == n_layers - 1 or self.curriculum == "none":
            return True
        if self.curriculum == "rotational":
            return layer % self.rotation == step % self.rotation
        return done >= (n_layers - 1 - layer) / (2 * n_layers)

    def shares(self, n_layers: int, step: int, done: float) -> list[float]:
        """e(t, l) of all layers: they sum to 1."""
        counted = [
            e if self.counts(layer, n_layers, step, done) else 0.0
            for layer, e in enumerate(self.e(n_layers))
        ]
        return (
            [e / sum(counted) for e in counted] if sum(counted) else [0.0] * (n_layers - 1) + [1.0]
        )

    def dropped(self, n_layers: int, done: float) -> list[float]:
        """p(t, l) of all layers, `done` being t / (T-1)."""
        rise = 2**done - 1 if self.scratch else 1.0
        return [
            rise * (2 ** (layer / max(n_layers - 1, 1)) - 1) * self.p_max
            for layer in range(n_layers)
        ]


class Course:
    """A training under [exits]: the weights and the chances of the step in hand, and its loss."""

    def __init__(self, exits: Exits, n_layers: int, steps: int):
        self.exits, self.n_layers, self.steps = exits, n_layers, steps
        self.begin(0, 0.0)

    def begin(self, step: int, progress: float) -> None:
        """Turn to a step, `progress` being the share of the training before it: t / T, or more by
        the clock.
        """
        self.shares = self.exits.shares(self.n_layers, step, progress)
        done = min(
            1.0, progress * self.steps / max(self.steps - 1, 1)
        )  # t / (T-1): the last step has 1
        self.dropped = self.exits.dropped(self.n_layers, done)

    def loss(self, blocks: Blocks, inputs: Tensor, targets: Tensor, dropout: float = 0.0) -> Tensor:
        """The loss of a batch, inputs and targets [B, T]. An exit that does not count costs
        nothing.
        """
        total = torch.zeros((), device=inputs.device)
        for share, x in zip(self.shares, blocks.stream(inputs, dropout, self.dropped), strict=True):
            if share:
                total = total + share * F.cross_entropy(
                    blocks.head(x).flatten(0, 1), targets.flatten()
                )
        return total


def exit_logits(blocks: Blocks, ids: Tensor, layers: int) -> Tensor:
    """What the exit after so many layers says, ids [B, T]: [B, T, V]. The layers above it are not
    run.
    """
    return blocks.head(next(itertools.islice(blocks.stream(ids), layers - 1, None)))
