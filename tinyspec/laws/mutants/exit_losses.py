"""Trainings of exits with one defect each: a weight, a curriculum or a dropout that is not the
published one.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.laws.exit_loss_laws import DROPOUT, HEAD, WEIGHTS, told
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.parts import PARTS
from tinyspec.lm.blocks import Blocks
from tinyspec.training.exit_losses import Course


class NotNormalised(Course):
    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        e, n = self.exits.e(self.n_layers), self.n_layers
        counted = [
            x if self.exits.counts(layer, n, step, progress) else 0.0 for layer, x in enumerate(e)
        ]
        self.shares = [x / sum(e) for x in counted]  # right: / sum(counted)


class LastRotatesToo(Course):
    """The last layer takes its turn in the rotation like the others."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        if (
            self.exits.curriculum == "rotational"
            and (self.n_layers - 1 - step) % self.exits.rotation
        ):
            self.shares[-1] = 0.0  # right: it always counts
            self.shares = [share / (sum(self.shares) or 1.0) for share in self.shares]


class NeverTurns(Course):
    """The rotation stands still: the same layers at each step."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        self.shares = self.exits.shares(self.n_layers, 0, progress)  # right: step


class FromTheBottom(Course):
    """The gradual curriculum begins with the first layer."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        if self.exits.curriculum == "gradual":
            n, e = self.n_layers, self.exits.e(self.n_layers)
            on = [
                layer == n - 1 or progress >= layer / (2 * n) for layer in range(n)
            ]  # right: (n - 1 - layer)
            counted = [x * count for x, count in zip(e, on, strict=True)]
            self.shares = [x / sum(counted) for x in counted]


class TwiceTheTime(Course):
    """The gradual curriculum, or the rise of the dropout, takes the whole training where half, or
    all, was meant.
    """

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress / 2)  # right: progress


class Uniform(Course):
    """Every layer is left out as often as any other."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        self.dropped = [
            sum(self.dropped) / self.n_layers
        ] * self.n_layers  # right: rising with depth


class AlmostAllOfIt(Course):
    """The last step stops one short: t / T for t / (T-1)."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        self.dropped = self.exits.dropped(self.n_layers, progress)


class WithoutTheNorm(Course):
    """Early states go to the head as they are."""

    def loss(self, blocks: Blocks, inputs: Tensor, targets: Tensor, dropout: float = 0.0) -> Tensor:
        total = torch.zeros(())
        for layer, (share, x) in enumerate(zip(self.shares, blocks.stream(inputs), strict=True)):
            logits = (
                blocks.head(x) if layer == self.n_layers - 1 else x @ blocks.vocabulary.T
            )  # right: blocks.head(x)
            total = total + share * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return total


class OneLayerLate(Course):
    """An exit is judged by what enters its layer."""

    def loss(self, blocks: Blocks, inputs: Tensor, targets: Tensor, dropout: float = 0.0) -> Tensor:
        states = [
            F.embedding(inputs, blocks.embed),
            *blocks.stream(inputs),
        ]  # right: without the embedding
        each = [F.cross_entropy(blocks.head(x).flatten(0, 1), targets.flatten()) for x in states]
        return torch.stack(
            [share * loss for share, loss in zip(self.shares, each, strict=False)]
        ).sum()


class AllExitsRead(Course):
    """Exits that do not count are computed, and counted with 0: slower, and the same."""

    def loss(self, blocks: Blocks, inputs: Tensor, targets: Tensor, dropout: float = 0.0) -> Tensor:
        states = blocks.stream(inputs, dropout, self.dropped)
        each = [F.cross_entropy(blocks.head(x).flatten(0, 1), targets.flatten()) for x in states]
        return torch.stack(
            [share * loss for share, loss in zip(self.shares, each, strict=True)]
        ).sum()


def _mutant(name: str, law: str, course: Any) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, course=course), told)


MUTANTS = [
    _mutant("normalised over exits that do not count", WEIGHTS, NotNormalised),
    _mutant("the last exit takes its turn", WEIGHTS, LastRotatesToo),
    _mutant("the rotation stands still", WEIGHTS, NeverTurns),
    _mutant("gradual from the bottom", WEIGHTS, FromTheBottom),
    _mutant("the curriculum takes twice the time", WEIGHTS, TwiceTheTime),
    _mutant("every layer dropped alike", DROPOUT, Uniform),
    _mutant("dropout stops one step short", DROPOUT, AlmostAllOfIt),
    _mutant("early exits without the norm", HEAD, WithoutTheNorm),
    _mutant("an exit reads what enters its layer", HEAD, OneLayerLate),
]
EQUIVALENT = [
    Equivalent(
        "exits that do not count are computed",
        "slip",
        "They are counted with weight 0, and 0 times a finite loss is 0; so are their gradients.",
        (WEIGHTS, DROPOUT, HEAD),
        replace(PARTS, course=AllExitsRead),
    ),
]
