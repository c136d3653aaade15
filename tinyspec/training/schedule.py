"""Describe a training: its settings, and the learning rate of each step."""

import math
from dataclasses import dataclass
from typing import Literal

from tinyspec.errors import TinyspecError


@dataclass(frozen=True)
class TrainSettings:
    """The section [train] of a recipe.

    optimizer     muon: Muon for the matrices inside the network, AdamW for the rest
    warmup        steps in which the learning rate rises
    decay         wsd: share of the training, at its end, in which lr falls
    floor         the last learning rate, as a share of lr
    ema           share of the old average that is kept at each step; 0: no average
    clip          longest gradient, as a norm; a longer one is made so long
    pieces        computes a batch in so many pieces, to save memory. Each counts by its tokens. So
                  a loss that is a mean over them is the whole batch's
    minutes       budget of the whole training, without interruptions; on a CPU the minutes that its
                  main thread runs, so other work on the machine makes it longer and not worse
    log_every     steps between two lines of the log; valid_every: between two validations
    save_minutes  minutes between two saved states
    """

    steps: int
    lr: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    warmup: int = 100
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay: float = 0.2
    floor: float = 0.05
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0
    pieces: int = 1
    seed: int = 0
    minutes: float | None = None
    log_every: int = 50
    valid_every: int = 500
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        """Raise TinyspecError for a number that is out of its range."""
        for name, low in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise TinyspecError(f"[train] {name} is {value}: it must be at least {low}")
        for name in ("clip", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise TinyspecError(f"[train] {name} is {value}: it must be above 0")
        for name in ("decay", "floor", "ema"):
            if not 0 <= getattr(self, name) <= 1:
                raise TinyspecError(
                    f"[train] {name} is {getattr(self, name)}: it must be from 0 to 1"
                )
        if not abs(self.seed) < MOST_SEEDS:
            raise TinyspecError(f"[train] seed is {self.seed}: it must be below {MOST_SEEDS}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise TinyspecError(f"[train] betas are {self.betas}: give two from 0 to below 1")


LEAST = dict.fromkeys(("steps", "pieces", "log_every", "valid_every"), 1)
LEAST |= dict.fromkeys(("warmup", "lr"), 0)
"""The least value of a setting."""
MOST_SEEDS = 1 << 40  # a step's seed is made of the seed and the step, and must fit into 64 bits


def learning_rate(settings: TrainSettings, step: int, elapsed: float = 0.0) -> float:
    """Return the learning rate of a step (counted from 0) after `elapsed` seconds.

    >>> s = TrainSettings(steps=10, lr=1.0, warmup=2, floor=0.0)
    >>> [round(learning_rate(s, i), 2) for i in (0, 1, 6, 10)]
    [0.5, 0.98, 0.35, 0.0]
    """
    done = training_progress(settings, step, elapsed)
    if settings.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = min(1.0, (1 - done) / settings.decay) if settings.decay else 1.0
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    return settings.lr * warm * (settings.floor + (1 - settings.floor) * shape)


def training_progress(settings: TrainSettings, step: int, elapsed: float) -> float:
    """Return how much of the training is over, 0 to 1: by steps, or by the clock if it is more."""
    clock = elapsed / (60 * settings.minutes) if settings.minutes else 0.0
    return min(1.0, max(step / settings.steps, clock))
