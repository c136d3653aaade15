"""The knobs of a training, and the learning rate they give at every moment of it."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """The knobs of a training: section [train] of a recipe."""

    steps: int
    lr: float = 1e-3
    optimizer: Literal["adamw", "muon"] = (
        "adamw"  # muon: for the matrices inside, AdamW for the rest
    )
    warmup: int = 100  # steps
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay: float = 0.2  # wsd: the last share of the training, in which the rate falls
    floor: float = 0.05  # the last learning rate, as a share of lr
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0  # 0: none; else the share of the old average kept at each step
    pieces: int = 1  # compute a batch in so many pieces, to save memory
    seed: int = 0
    minutes: float | None = None  # clock budget of the whole training, interruptions not counted
    log_every: int = 50  # steps
    valid_every: int = 500  # steps
    save_minutes: float = 5.0


def rate(settings: Settings, step: int, elapsed: float = 0.0) -> float:
    """Learning rate of a step (counted from 0) after `elapsed` seconds.

    >>> s = Settings(steps=10, lr=1.0, warmup=2, floor=0.0)
    >>> [round(rate(s, i), 2) for i in (0, 1, 6, 10)]
    [0.5, 0.98, 0.35, 0.0]
    """
    done = progress(settings, step, elapsed)
    if settings.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = min(1.0, (1 - done) / settings.decay)
    warm = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
    return settings.lr * warm * (settings.floor + (1 - settings.floor) * shape)


def progress(settings: Settings, step: int, elapsed: float) -> float:
    """How much of the training is over, 0 to 1: by steps, or by the clock if that is further."""
    clock = elapsed / (60 * settings.minutes) if settings.minutes else 0.0
    return min(1.0, max(step / settings.steps, clock))
