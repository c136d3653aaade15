"""Use distributions as vectors, which a verifier scales, subtracts and clips.

A vector here is a float64 ndarray, a tensor on its device, or an ndarray of Fractions. On all three
`+ - * /`, `.clip(min=0)` and `.sum()` mean the same. So a formula is written once, and the exact
laws prove the very lines that a model runs.
"""

from typing import Any

import numpy as np
import torch

from tinyspec._core.reference import acceptance_ratio
from tinyspec.decoding.sampling import EXACT, kernels_of
from tinyspec.tree import Probs

__all__ = ["acceptance_ratio", "as_probs", "as_vectors", "is_rational", "is_same_distribution"]


def as_vectors(row: Probs, q: Probs | None, token: int) -> tuple[Any, Any]:
    """Return the target's distribution and the one that `token` was drawn from, [V] each.

    A q of None is a point mass.

    >>> [v.tolist() for v in as_vectors([0.5, 0.5], None, 1)]
    [[0.5, 0.5], [0.0, 1]]
    """
    kernels = kernels_of(row)
    vector = kernels.as_vector(row)
    if q is not None:
        return vector, kernels.as_vector(q, vector)
    point_mass = vector * 0
    point_mass[token] = 1
    return vector, point_mass


def is_rational(vector: Any) -> bool:
    """Return whether a vector is made of Fractions."""
    return isinstance(vector, np.ndarray) and vector.dtype == object


def is_same_distribution(one: Probs | None, other: Probs | None) -> bool:
    """Return whether two declared distributions are the same.

    They are the same object, or have the same numbers in the same kind of vector.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if one is None or other is None:
        return False
    return kernels_of(one) is kernels_of(other) is EXACT and list(one) == list(other)


def as_probs(vector: Any) -> Probs:
    """Return a vector in the form that can be drawn from; it need not sum to 1."""
    return vector.tolist() if is_rational(vector) else vector
