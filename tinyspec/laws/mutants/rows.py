"""Warpers, residuals and draws with one defect each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinyspec import _core
from tinyspec.decoding import sampling
from tinyspec.decoding.rng import Replay
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import pathwise
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS, Parts


def _scaled(row: Any) -> Any:
    mass = sum(row)
    return (
        np.array([x / mass for x in row])
        if isinstance(row, np.ndarray)
        else [x / mass for x in row]
    )


class ColdIsOff(SamplingParams):
    """Temperature 0 turns the temperature off."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        return SamplingParams(self.temperature or 1.0, self.top_k, self.top_p, self.min_p).probs(
            logits, history
        )  # right: one-hot


class ColdDivides(SamplingParams):
    """Logits are divided by a temperature of 0."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        if self.temperature or isinstance(logits, list):
            return super().probs(logits, history)
        with np.errstate(all="ignore"):
            weights = np.exp((logits - max(logits)) / 0.0)  # right: one-hot at the highest
            return weights / weights.sum()


class TiesStay(SamplingParams):
    """Top-k keeps all that is as heavy as the k-th."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        row = SamplingParams(self.temperature, None, self.top_p, self.min_p).probs(logits, history)
        if self.top_k is None:
            return row
        kth = sorted(row, reverse=True)[: self.top_k][-1]
        kept = [x if x >= kth else 0 * x for x in row]  # right: k of them, ties by lowest id
        return _scaled(np.array(kept) if isinstance(row, np.ndarray) else kept)


class NucleusWithoutCrossing(SamplingParams):
    """Top-p drops the token that crosses p."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        row = super().probs(logits, history)
        if self.top_p is None:
            return row
        best = sorted((x for x in range(len(row)) if row[x] > 0), key=lambda x: (-row[x], x))
        if len(best) == 1:
            return row
        kept = [
            0 * x if token == best[-1] else x for token, x in enumerate(row)
        ]  # right: the crossing token stays
        return _scaled(np.array(kept) if isinstance(row, np.ndarray) else kept)


class NucleusFirst(SamplingParams):
    """Top-p before top-k: the nucleus of the whole row, not of what top-k left."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        if self.top_k is None or self.top_p is None:
            return super().probs(logits, history)
        row = SamplingParams(self.temperature, None, self.top_p).probs(logits, history)
        best = sorted(range(len(row)), key=lambda x: (-row[x], x))[: self.top_k]
        kept = [x if token in best else 0 * x for token, x in enumerate(row)]
        return _scaled(np.array(kept) if isinstance(row, np.ndarray) else kept)


class NotANumberPasses(SamplingParams):
    """NaN counts as the lowest logit."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        if isinstance(logits, np.ndarray):
            logits = np.nan_to_num(
                logits, nan=-np.inf, posinf=np.inf, neginf=-np.inf
            )  # right: an error
        return super().probs(logits, history)


class PenaltyPerOccurrence(SamplingParams):
    """A token that stands twice in the text is punished twice."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        if self.repetition_penalty == 1 or len(history) < 2:
            return super().probs(logits, history)
        scores = np.array(logits, np.float64)
        for token in history:  # right: for token in set(history)
            scores[token] *= (
                self.repetition_penalty if scores[token] < 0 else 1 / self.repetition_penalty
            )
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p).probs(scores)


def divides_by_nothing(p: Any, q: Any) -> Any:
    left = np.maximum(p - q, 0)
    with np.errstate(all="ignore"):
        return left / left.sum()  # right: p, where nothing is left


def epsilon_in_the_sum(p: Any, q: Any) -> Any:
    left = np.maximum(p - q, 0)
    return left / (left.sum() + 1e-6) if left.any() else p  # right: left.sum()


class Inclusive(Replay):
    def accept(self, ratio: Any) -> bool:
        return bool(self._next() <= ratio)  # right: u < ratio


class LeftEdge(Replay):
    def draw(self, row: Any) -> int:
        return int(
            np.searchsorted(np.cumsum(np.array(row, np.float64)), self._next())
        )  # right: side="right"


class UniformRace(Replay):
    def exponential_race(self, row: Any, position: int) -> int:
        noise = [self._next() for _ in row]  # right: -log(1 - u), which is exponential
        return sampling.exponential_race(row, noise)


def single_precision(row: Any, q: Any) -> Any:
    """The residual in float32: what is left of two near laws is mostly rounding."""
    return _core.residual(row.astype(np.float32).astype(np.float64), q)  # right: row


def running_sum(row: Any, u: float) -> int:
    """Inverse CDF by one running sum and a search."""
    sums = np.cumsum(row)
    if not 0 < sums[-1] < np.inf:
        return int(_core.pick(row, u))
    return int(
        np.searchsorted(sums, u * sums[-1], side="right")
    )  # right: not beyond the last token


def fastest(row: Any, noise: Any) -> int:
    with np.errstate(all="ignore"):
        return int(np.argmax(row / noise))  # right: only among tokens with row > 0


def _warp(name: str, bug: str, sampling: Any) -> Mutant:
    return Mutant(name, bug, "warp is its definition", replace(PARTS, sampling=sampling), see.rows)


def _other(name: str, bug: str, law: str, parts: Parts) -> Mutant:
    return Mutant(name, bug, law, parts, see.rows)


def _kernel(name: str, bug: str, which: str, kernel: Any) -> Mutant:
    return Mutant(
        name, bug, "twin", replace(PARTS, kernels={**PARTS.kernels, which: kernel}), see.kernels
    )


MUTANTS = [
    _warp("temperature 0 is no temperature", "B13", ColdIsOff),
    _warp("divided by temperature 0", "B13", ColdDivides),
    _warp("top-k keeps ties", "B39", TiesStay),
    _warp("top-p without the crossing token", "slip", NucleusWithoutCrossing),
    _warp("top-p before top-k", "slip", NucleusFirst),
    _warp("NaN passes", "B10", NotANumberPasses),
    _warp("penalty once an occurrence", "slip", PenaltyPerOccurrence),
    _other(
        "residual divides by nothing",
        "B9, S7",
        "residual is a law",
        replace(PARTS, residual=divides_by_nothing),
    ),
    _other(
        "epsilon in the residual's sum",
        "S10",
        "residual is a law",
        replace(PARTS, residual=epsilon_in_the_sum),
    ),
    _other("u <= ratio", "B12", "support", replace(PARTS, replay=Inclusive)),
    _other("draw at the left edge", "B12", "support", replace(PARTS, replay=LeftEdge)),
    _other("race on uniform noise", "slip", pathwise.RACE, replace(PARTS, replay=UniformRace)),
    _kernel("residual in float32", "B5", "residual", single_precision),
    _kernel("draw by a running sum", "B12", "pick", running_sum),
    _other("race divides by zero noise", "B11", "support", replace(PARTS, race=fastest)),
]
