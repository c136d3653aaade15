"""Copies on the host, by the thread that asks for them.

torch shares the copying of many numbers, such as a row of logits, among its threads, and these stay
awake for a while after it, on the very cores that the compiled kernels ask for next. Whatever
decoding does between two forward passes is therefore done by numpy, on one thread; what lives on a
device stays torch's.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stack(rows: Sequence[Tensor]) -> Tensor:
    """Rows [V], of one type each, as one tensor [n, V]."""
    if rows[0].device.type != "cpu" or rows[0].dtype == torch.bfloat16:  # which numpy does not know
        return torch.stack(list(rows))
    return torch.from_numpy(np.stack([row.numpy() for row in rows]))


def to_numpy(row: Tensor) -> NDArray[Any]:
    """A tensor as numpy has it, in memory; bfloat16, which numpy does not know, as float32
    (exact).
    """
    row = row.detach().cpu()
    return (row.float() if row.dtype == torch.bfloat16 else row).numpy()


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on the host its pages come from the system as zeros, and are not touched
    before they are written.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(tuple(shape), f"i{dtype.itemsize}")).view(dtype)


def copied(store: Tensor) -> Tensor:
    """A tensor of the same numbers in memory of its own."""
    held = view_as_ints(store)
    return store.clone() if held is None else torch.from_numpy(held.copy()).view(store.dtype)


def view_as_ints(store: Tensor) -> NDArray[Any] | None:
    """A tensor of whatever type as numpy sees its memory: whole numbers of the same width. None on
    a device.
    """
    return store.view(WORDS[store.dtype.itemsize]).numpy() if store.device.type == "cpu" else None


def trim_heap() -> None:
    """Let the system have what was freed. glibc keeps pieces of a few megabytes; elsewhere there is
    nothing to do.
    """
    if (
        sys.platform == "linux"
        and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None
    ):
        trim(0)
