"""Copy tensors on the host with numpy, on the thread that asks.

torch divides the copying of many numbers, such as a row of logits, among its threads. They stay
awake for a while, on the cores that the compiled kernels need next. So between two forward passes
numpy does what decoding needs on the host. What lies on a device stays with torch, and so does
attention in the layers of a head, on one thread (`one_torch_thread`).
"""

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

M_ARENA_MAX = -8  # of glibc's mallopt: how many heaps there may be
INT_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute on the thread that asks until the block ends, and leave the others asleep.

    Attention of a few rows divides its heads among all threads, however small they are.
    """
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return rows [V] of one type as one tensor [n, V]."""
    if rows[0].device.type != "cpu" or rows[0].dtype == torch.bfloat16:  # which numpy does not know
        return torch.stack(list(rows))
    return torch.from_numpy(np.stack([row.numpy() for row in rows]))


def to_numpy(row: Tensor) -> NDArray[Any]:
    """Return a tensor as an array on the host; bfloat16, which numpy lacks, becomes float32."""
    row = row.detach().cpu()
    return (row.float() if row.dtype == torch.bfloat16 else row).numpy()


def make_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros.

    On the host the system gives pages of zeros, which are not touched before they are written.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(tuple(shape), f"i{dtype.itemsize}")).view(dtype)


def copy_tensor(store: Tensor) -> Tensor:
    """Return a copy of a tensor in memory of its own."""
    held = view_as_ints(store)
    return store.clone() if held is None else torch.from_numpy(held.copy()).view(store.dtype)


def view_as_ints(store: Tensor) -> NDArray[Any] | None:
    """Return the memory of a tensor as an array of integers of the same width; None on a device."""
    return (
        store.view(INT_TYPES[store.dtype.itemsize]).numpy() if store.device.type == "cpu" else None
    )


def find_free_memory() -> int | None:
    """Return the bytes of memory that a program can still use. None: the system does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except (OSError, ValueError):
        return None
    return None if found is None else int(found[1]) * 1024


def share_one_heap() -> None:
    """Let all threads that start from now on take memory from one heap.

    glibc gives threads heaps of their own, and each keeps what is freed in it. A server has a
    thread for each request, so its memory grew with every size of cache that was ever asked for.
    """
    if sys.platform == "linux":
        limit = getattr(ctypes.CDLL(None), "mallopt", None)
        if limit is not None:
            limit(M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps pieces of a few megabytes otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
