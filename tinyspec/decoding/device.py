"""The kernels of _core as torch ops, for rows that live on a device: nothing vocabulary-sized is copied to the host.

They decide as the kernels do, unless a uniform or a knob lies within V * eps of a boundary: a device sums in its own
order. Everything is computed in float64, whatever the dtype of the logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError


def warp(
    logits: Tensor,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> Tensor:
    """Logits [V] to a law, float64 [V], as reference.warp."""
    scores = logits.detach().to(torch.float64, copy=True)
    if penalty != 1.0:
        ids = [token for token in set(history) if 0 <= token < len(scores)]
        index = torch.tensor(ids, dtype=torch.long, device=scores.device)
        seen = scores[index]
        scores[index] = torch.where(seen < 0, seen * penalty, seen / penalty)
    top = float(scores.max()) if len(scores) else float("-inf")  # max propagates NaN: one number to the host
    if top != top:
        raise TinyspecError("the logits contain NaN: check the weights, or compute in a wider dtype")
    if abs(top) == float("inf"):
        what = "contain +inf" if top > 0 else "are all -inf: no token is allowed"
        raise TinyspecError(f"the logits {what}, so they define no law")
    if temperature == 0:
        row = torch.zeros_like(scores)
        row[(scores == top).int().argmax()] = (
            1.0  # of equal values torch's argmax may take any: the first 1 here is ours
        )
        return row
    row = ((scores - top) / temperature).exp()
    if (top_k is not None and top_k < len(row)) or (top_p is not None and top_p < 1):
        ordered, ids_by_weight = row.sort(descending=True, stable=True)  # stable: ties by lowest id
        if top_k is not None:
            ordered[top_k:] = 0
        if top_p is not None and top_p < 1:
            mass = ordered.cumsum(0)
            ordered[(mass - ordered) >= top_p * mass[-1]] = 0
        row = torch.zeros_like(row).scatter_(0, ids_by_weight, ordered)
    if min_p is not None and min_p > 0:
        row = torch.where(row >= min_p, row, 0.0)
    return row / row.sum()


def first_true(mask: Tensor) -> Tensor:
    """Index of the first True (0 where there is none)."""
    at = torch.arange(len(mask), device=mask.device)
    return torch.where(mask, at, len(mask)).min()


def pick(row: Tensor, u: float) -> int:
    """Inverse CDF, as reference.pick."""
    row = row.to(torch.float64)
    mass = row.cumsum(0)
    positive = row > 0
    last = torch.where(positive, torch.arange(len(row), device=row.device), -1).max()
    token = int(torch.minimum(first_true(positive & (mass > u * mass[-1])), last))
    if token < 0 or not bool(mass[-1].isfinite()):
        raise TinyspecError("cannot draw from a row without finite mass")
    return token


def order(row: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draws without replacement, as reference.order."""
    left, drawn = row.to(torch.float64, copy=True), list[int]()
    for u in uniforms:
        if not bool((left > 0).any()):
            break
        drawn.append(pick(left, u))
        left[drawn[-1]] = 0
    return drawn


def race(row: Tensor, noise: Any) -> int:
    """The exponential race, as reference.race."""
    time = torch.as_tensor(noise, dtype=torch.float64).to(row.device) / row.to(torch.float64)
    positive = row > 0
    if not bool(positive.any()):
        raise TinyspecError("cannot race a row without mass")
    time = torch.where(positive, time, float("inf"))
    return int(first_true(positive & (time == time.min())))


def residual(row: Tensor, q: Tensor) -> Tensor:
    """normalise(max(0, row - q)), or the row where nothing is left."""
    if len(row) != len(q):
        raise TinyspecError(f"the draft's law has {len(q)} tokens, the target's {len(row)}: pad it with zeros")
    left = (row - q.to(row)).clamp(min=0)
    mass = left.sum()
    return torch.where(mass > 0, left / mass, row)


def without(row: Tensor, token: int) -> Tensor:
    """The row given that it is not `token`, or the row where nothing is left."""
    left = row.clone()
    left[token] = 0
    mass = left.sum()
    return torch.where(mass > 0, left / mass, row)
