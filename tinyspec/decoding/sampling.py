"""Turn logits into a distribution, and a distribution into a token.

`SamplingParams` holds the user's settings; draft and target use the same object. A distribution
(`Probs`) is a float64 ndarray on the CPU, a tensor on a device, or a list of Fractions in the exact
laws; every function here accepts all three. Ties go to the lowest id everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.device import DeviceKernels
from tinyspec.decoding.kernels import HostKernels, Kernels
from tinyspec.errors import TinyspecError
from tinyspec.tree import Probs

EXACT, HOST, DEVICE = Kernels(), HostKernels(), DeviceKernels()


def is_on_device(row: torch.Tensor) -> bool:
    """Return whether a tensor must not be copied to the host."""
    return row.device.type != "cpu"


def kernels_of(row: Any) -> Kernels:
    """Return the kernels for a row or rows of this type. Nothing else decides this.

    >>> kernels_of([Fraction(1)]) is EXACT, kernels_of(np.ones(1)) is HOST
    (True, True)
    """
    if isinstance(row, np.ndarray):
        return HOST
    if isinstance(row, torch.Tensor):
        return DEVICE if is_on_device(row) else HOST
    if not isinstance(row, (list, tuple)):
        return HOST
    if row and isinstance(row[0], (list, tuple, np.ndarray, torch.Tensor)):
        return kernels_of(row[0])
    return EXACT


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
                f"top_k must be a whole number of at least 1 (leave it out: all), got {self.top_k}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise TinyspecError(
                f"top_p must be above 0 and at most 1 (leave it out: all), got {self.top_p}"
            )
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise TinyspecError(f"min_p must be from 0 to 1 (leave it out: all), got {self.min_p}")
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
        return kernels_of(logits).probs(logits, history, self)

    def draw(self, logits: Any, history: Sequence[int], u: float) -> int:
        """Return `sample_inverse_cdf(self.probs(logits, history), u)` in one pass."""
        return kernels_of(logits).sample(logits, history, self, u)

    def greedy_token(self, logits: Any, history: Sequence[int] = ()) -> int | None:
        """Return the greedy token at temperature 0; None above it, and of Fractions."""
        return kernels_of(logits).greedy_token(logits, history, self)

    def as_floats(self) -> tuple[float, int | None, float | None, float | None, float]:
        """Return temperature, top_k, top_p, min_p and penalty, as the kernels take them."""
        top_p = None if self.top_p is None else float(self.top_p)
        min_p = None if self.min_p is None else float(self.min_p)
        return float(self.temperature), self.top_k, top_p, min_p, float(self.repetition_penalty)


UNCHANGED = SamplingParams()
"""The settings that leave the model's own distribution as it is."""


def sample_inverse_cdf(row: Probs, u: float) -> int:
    """Return the token whose interval of the cumulative sum holds u * total, 0 <= u < 1."""
    return kernels_of(row).sample_inverse_cdf(row, u)


def sample_without_replacement(row: Probs, uniforms: Any) -> list[int]:
    """Return one token for each uniform, without replacement; fewer if none is left."""
    return kernels_of(row).sample_without_replacement(row, uniforms)


def exponential_race(row: Probs, noise: Any) -> int:
    """Return the token of least noise / probability (the Gumbel-max trick).

    With exponential noise it is a sample. Two distributions on the same noise tend to agree.
    """
    return kernels_of(row).exponential_race(row, noise)


def top_k_rows(logits: Any, rows: Sequence[int], k: int) -> list[list[int]]:
    """Return the ids of the k highest logits of some rows of [n, V], highest first, on the host.

    >>> top_k_rows(torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]), [0, 1], 2)
    [[1, 2], [0, 1]]
    """
    return kernels_of(logits).top_k_rows(logits, rows, k)


def top_k_tokens(row: Probs, k: int) -> list[int]:
    """Return the k tokens of highest probability or logit, highest first, lowest id of equals.

    >>> top_k_tokens([0.2, 0.5, 0.1, 0.2], 3)
    [1, 0, 3]
    """
    return kernels_of(row).top_k_rows([row], [0], k)[0]
