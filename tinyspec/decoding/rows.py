"""Laws as vectors: for verifiers that scale, subtract and clip whole rows, over floats, tensors and Fractions alike.

A vector here is a float64 ndarray, a tensor on its device, or an ndarray of Fractions; `+ - * /`, `.clip(min=0)` and `.sum()`
mean the same on all three, so a formula is written once and the exact laws walk the very lines that serve a model.
"""

from typing import Any

import numpy as np
import torch

from tinyspec._core.reference import ratio
from tinyspec.decoding.sampling import is_exact, on_device, on_host
from tinyspec.tree import Row

__all__ = ["as_row", "ratio", "vectors"]


def vectors(row: Row, q: Row | None, token: int) -> tuple[Any, Any]:
    """The target's row and the law that `token` was drawn from, [V] each; a law of None is a point mass.

    >>> [v.tolist() for v in vectors([0.5, 0.5], None, 1)]
    [[0.5, 0.5], [0, 1]]
    """
    if q is None:
        q = [int(x == token) for x in range(len(row))] if is_exact(row) else np.eye(1, len(row), token)[0]
    if is_exact(row) or is_exact(q):
        return np.array(list(row), dtype=object), np.array(list(q), dtype=object)
    if on_device(row):
        return row, torch.as_tensor(q).to(row)
    return on_host(row), on_host(q)


def as_row(vector: Any) -> Row:
    """Back to a row that can be drawn from; it need not sum to 1."""
    return vector.tolist() if isinstance(vector, np.ndarray) and vector.dtype == object else vector
