"""Turn logits into a distribution, and a distribution into a token.

`SamplingParams` holds the user's settings; draft and target use the same object. A distribution
(`Probs`) is a float64 ndarray on the CPU, a tensor on a device, or a list of Fractions in the exact
laws; every function here accepts all three. Ties go to the lowest id everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from tinyspec import _core
from tinyspec._core import reference
from tinyspec.decoding import device
from tinyspec.errors import TinyspecError
from tinyspec.tree import Probs

__all__ = ["SamplingParams", "exponential_race", "sample_inverse_cdf", "sample_without_replacement"]


def is_exact(row: Any) -> TypeGuard[list[Fraction]]:
    """Return whether these are Fractions in a list or tuple, as in the exact laws."""
    return isinstance(row, (list, tuple))


def on_device(row: Any) -> TypeGuard[torch.Tensor]:
    """Return whether this is a tensor that must not be copied to the host."""
    return isinstance(row, torch.Tensor) and row.device.type != "cpu"


def on_host(row: Any) -> NDArray[np.float64]:
    """Return a distribution of the CPU as the kernels read it: contiguous float64."""
    if isinstance(row, torch.Tensor):
        row = row.detach().to(torch.float64).numpy()
    return np.ascontiguousarray(row, np.float64)


def in_memory(logits: Any) -> Any:
    """Return logits [n, V] as an array if they are a CPU tensor: its rows are read 10x faster."""
    if (
        isinstance(logits, torch.Tensor)
        and logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.float64)
    ):
        return logits.detach().numpy()
    return logits


def as_fraction(knob: float | Fraction) -> Fraction:
    """Return a setting as the number that was written: 0.9 is 9/10, not the nearest double."""
    return knob if isinstance(knob, Fraction) else Fraction(str(knob))


@dataclass(frozen=True)
class SamplingParams:
    """The user's sampling settings, applied in Hugging Face's order.

    repetition_penalty  logits of tokens in the history: times it if negative, else divided by it
    temperature         0 is greedy: all mass on the highest logit
    top_k               keep exactly the k highest
    top_p               keep the smallest set of highest probabilities whose mass reaches top_p
    min_p               drop what is below min_p times the highest probability

    >>> SamplingParams(temperature=0.0).probs(np.array([1.0, 3.0, 3.0])).tolist()
    [0.0, 1.0, 0.0]
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | Fraction | None = None
    min_p: float | Fraction | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raise TinyspecError for settings without a meaning; `not` so that NaN is caught too."""
        if not 0 <= self.temperature < math.inf:
            raise TinyspecError(
                f"temperature must be finite and at least 0 (0 is greedy), got {self.temperature}"
            )
        if self.top_k is not None and not (self.top_k >= 1 and self.top_k == int(self.top_k)):
            raise TinyspecError(
                f"top_k must be a whole number of at least 1 (None keeps all), got {self.top_k}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise TinyspecError(
                f"top_p must be above 0 and at most 1 (None keeps all), got {self.top_p}"
            )
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise TinyspecError(f"min_p must be between 0 and 1 (None keeps all), got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise TinyspecError(
                f"repetition_penalty must be above 0 (1 is off), got {self.repetition_penalty}"
            )

    @property
    def greedy(self) -> bool:
        """Whether every distribution is a point mass."""
        return self.temperature == 0

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Probs:
        """Return the distribution under these settings.

        logits   [V]: CPU tensor or ndarray -> float64 ndarray; device tensor -> float64 tensor
                 there; Fractions are a table model's weights, temperature 1/n is the n-th power
        history  ids so far, prompt and the node's own path included: for the repetition penalty

        Raises TinyspecError for NaN, +inf, or nothing but -inf.
        """
        if is_exact(logits):
            return self._exact(logits)
        if on_device(logits):
            return device.warp(logits, history, *self._knobs())
        return _core.warp(_floats(logits), history, *self._knobs())

    def draw(self, logits: Any, history: Sequence[int], u: float) -> int:
        """Return `sample_inverse_cdf(self.probs(logits, history), u)` in one pass."""
        if is_exact(logits) or on_device(logits):
            return sample_inverse_cdf(self.probs(logits, history), u)
        return _core.draw(_floats(logits), history, *self._knobs(), u)

    def greedy_token(self, logits: Any, history: Sequence[int] = ()) -> int | None:
        """Return the token with all the mass if sampling is greedy on the CPU, else None."""
        if self.temperature != 0 or is_exact(logits) or on_device(logits):
            return None
        return self.draw(logits, history, 0.0)

    def block(
        self, logits: torch.Tensor, histories: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return distributions [n, V] of logits on a device, one history each; highest logits [n]."""
        return device.warp_rows(logits, histories, *self._knobs())

    def _knobs(self) -> tuple[float, int | None, float | None, float | None, float]:
        top_p = None if self.top_p is None else float(self.top_p)
        min_p = None if self.min_p is None else float(self.min_p)
        return float(self.temperature), self.top_k, top_p, min_p, float(self.repetition_penalty)

    def _exact(self, weights: Sequence[Fraction]) -> list[Fraction]:
        row = [x if type(x) is Fraction else Fraction(x) for x in weights]
        if self.repetition_penalty != 1:
            raise TinyspecError(
                "a repetition penalty acts on logits: rational weights have no exact one"
            )
        if not row or min(row) < 0 or max(row) == 0:
            raise TinyspecError(
                "rational weights must be non-negative and not all zero to define a law"
            )
        if self.temperature == 0:
            return list(reference.one_hot(row))
        power = round(1 / self.temperature)
        if not math.isclose(power * self.temperature, 1, rel_tol=1e-9):
            raise TinyspecError(
                f"rational weights are exact at temperature 0 and 1/n only, got {self.temperature}"
            )
        top_p = None if self.top_p is None else as_fraction(self.top_p)
        min_p = Fraction(0) if self.min_p is None else as_fraction(self.min_p)
        row = row if power == 1 else [x**power for x in row]
        law = reference.normalise(reference.truncate(row, self.top_k, top_p, min_p))
        assert law is not None
        return law


_READ = np.dtype(np.float32), np.dtype(np.float64)


def _floats(logits: Any) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return CPU logits as the kernels read them: narrower dtypes become float32, exactly."""
    if isinstance(logits, torch.Tensor):
        logits = logits.detach()
        logits = (
            logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
        ).numpy()
    row = np.ascontiguousarray(logits)
    return row if row.dtype in _READ else row.astype(np.float64)


def sample_inverse_cdf(row: Probs, u: float) -> int:
    """Return the token whose interval of the cumulative sum holds u * total, 0 <= u < 1."""
    if is_exact(row):
        return reference.pick(row, u)
    return device.pick(row, u) if on_device(row) else _core.pick(on_host(row), u)


def sample_without_replacement(row: Probs, uniforms: Any) -> list[int]:
    """Return one token for each uniform, without replacement (Plackett-Luce); fewer if none is left."""
    if is_exact(row):
        return reference.order(row, list(uniforms))
    if on_device(row):
        return device.order(row, [float(u) for u in uniforms])
    return _core.order(on_host(row), np.ascontiguousarray(uniforms, np.float64))


def exponential_race(row: Probs, noise: Any) -> int:
    """Return the token of least noise / probability (the Gumbel-max trick).

    With exponential noise it is a sample. Two distributions on the same noise tend to agree.
    """
    if is_exact(row):
        return reference.race(row, list(noise))
    if on_device(row):
        return device.race(row, noise)
    return _core.race(on_host(row), np.ascontiguousarray(noise, np.float64))
