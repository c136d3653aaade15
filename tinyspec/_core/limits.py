"""What the kernels and their twins take: ids of 32 bits, and sizes that fit into memory.

The limits are far above every use. They keep what one call allocates below a gigabyte.
"""

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyspec.errors import TinyspecError

MAX_TREE_NODES = 16_384  # nodes of a tree whose mask is made: n * n bytes
MAX_DRAFT_NODES = 65_536  # nodes of a draft of a forest: 304 bytes each
MAX_MATCHES = 1_048_576  # places that one retrieval reads: up to 496 bytes each
MAX_DEPTH = 1_024  # tokens of a window that a forest counts: 4 bytes each for every text
MAX_NGRAM = 256  # tokens of an n-gram: 8 bytes each for every token of a text


def read_ids(values: Iterable[int]) -> "array[int]":
    """Return ids as int32. All are read first, so what the iterable does meets no half-done work.

    Raises TypeError for what is no whole number, OverflowError for what needs more than 32 bits.

    >>> read_ids([5, -1]).tolist()
    [5, -1]
    """
    plain = type(values) is list or type(values) is tuple
    return array("i", values if plain else (value for value in values))  # no length is believed


def read_int(value: int) -> int:
    """Return a whole number that fits into 32 bits; errors as `read_ids`."""
    return read_ids((value,))[0]


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise TinyspecError unless low <= value <= high."""
    if not low <= value <= high:
        raise TinyspecError(f"{name} must be from {low} to {high}, got {value}")


def read_text(values: Any) -> NDArray[np.int32]:
    """Return a text as contiguous int32 [n]; errors as `read_ids`, ValueError if it is no row."""
    text = np.asarray(values)
    if text.ndim != 1:
        raise ValueError(f"a text is one row of ids, got an array of {text.ndim} dimensions")
    if text.dtype == np.int32:
        return np.ascontiguousarray(text)
    if len(text) and text.dtype.kind not in "iu":
        raise TypeError(f"a text is a row of whole numbers, got {text.dtype}")
    if len(text) and not -(2**31) <= text.min() <= text.max() < 2**31:
        raise OverflowError("an id of the text needs more than 32 bits")
    return text.astype(np.int32)
