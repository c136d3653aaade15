"""Laws as vectors: for verifiers that scale, subtract and clip whole rows, over floats, tensors and
Fractions alike.

A vector here is a float64 ndarray, a tensor on its device, or an ndarray of Fractions; `+ - * /`,
`.clip(min=0)` and `.sum()` mean the same on all three, so a formula is written once and the exact
laws walk the very lines that serve a model.
"""

from typing import Any

import numpy as np
import torch

from tinyspec._core.reference import ratio
from tinyspec.decoding.sampling import is_exact, on_device, on_host
from tinyspec.tree import Probs

__all__ = ["as_row", "exact", "ratio", "same", "vectors"]


def vectors(row: Probs, q: Probs | None, token: int) -> tuple[Any, Any]:
    """The target's row and the law that `token` was drawn from, [V] each; a law of None is a point
    mass.

    >>> [v.tolist() for v in vectors([0.5, 0.5], None, 1)]
    [[0.5, 0.5], [0, 1]]
    """
    if q is None:
        q = (
            [int(x == token) for x in range(len(row))]
            if is_exact(row)
            else np.eye(1, len(row), token)[0]
        )
    if is_exact(row) or is_exact(q):
        return np.array(list(row), dtype=object), np.array(list(q), dtype=object)
    if on_device(row):
        return row, torch.as_tensor(q).to(row)
    return on_host(row), on_host(q)


def exact(vector: Any) -> bool:
    """Whether a vector is made of Fractions."""
    return isinstance(vector, np.ndarray) and vector.dtype == object


def same(one: Probs | None, other: Probs | None) -> bool:
    """Whether two declared laws are one: the same object, or the same numbers in the same kind of
    row.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return is_exact(one) and is_exact(other) and list(one) == list(other)


def as_row(vector: Any) -> Probs:
    """Back to a row that can be drawn from; it need not sum to 1."""
    return vector.tolist() if exact(vector) else vector
