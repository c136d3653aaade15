"""Arms without a model, and a clock that they wind: a run of the harness without wall time."""

import zlib
from collections.abc import Callable
from typing import Any

from tinyspec.bench.arms import ArmOutput, Clock
from tinyspec.bench.plan import PLAIN, BenchSettings
from tinyspec.bench.tasks import Job


class Hand:
    """A clock that shows what it was wound to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wind(self, seconds: float) -> None:
        self.now += seconds


class Fake:
    """Take `cost(job, seed)` seconds a token and one to read; write 0, 1, ..., two a pass."""

    def __init__(self, label: str, hand: Hand, cost: Callable[[Job, int], float]):
        self.label, self.hand, self.cost = label, hand, cost
        self.knobs: dict[str, Any] = {}
        self.runs: list[tuple[str, int]] = []
        self.stops_at: int | None = (
            None  # the run (counted from 0) in which somebody presses Ctrl-C
        )

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        if self.stops_at == len(self.runs):
            self.stops_at = None
            raise KeyboardInterrupt
        self.runs.append((job.key, seed))
        begun = clock()
        self.hand.wind(1.0)
        read = clock()
        self.hand.wind(job.tokens * self.cost(job, seed))
        calls = -(-job.tokens // 2)
        accepted = job.tokens - calls
        return ArmOutput(
            read - begun,
            clock() - read,
            tuple(range(job.tokens)),
            calls,
            0,
            3 * calls,
            accepted,
            0,
            0,
            6.0 * calls,
        )

    def close(self) -> None:
        return None


def jobs(n: int = 3, tokens: int = 8) -> list[Job]:
    """n jobs, of two tasks in turn."""
    return [Job(("qa", "edits")[i % 2], str(i), 0, (1, 2, i), tokens) for i in range(n)]


def noisy(label: str, base: float) -> Callable[[Job, int], float]:
    """A cost that depends on who, what and when, and on nothing else."""
    return lambda job, seed: (
        base * (1 + zlib.crc32(f"{label} {job.key} {seed}".encode()) % 1000 / 1000)
    )


def arms(hand: Hand, labels: tuple[str, ...] = (PLAIN, "llma", "transformers")) -> list[Fake]:
    return [Fake(label, hand, noisy(label, 0.1 * (i + 1))) for i, label in enumerate(labels)]


def settings(rounds: int = 2) -> BenchSettings:
    return BenchSettings(
        methods=("llma",), peers=("transformers",), tasks=("qa", "edits"), rounds=rounds
    )
