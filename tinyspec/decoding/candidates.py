"""What the target would say next, row by row: the k tokens it holds for likeliest, and what is kept
of them over requests.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from tinyspec.decoding.sampling import is_exact
from tinyspec.lm.host import to_numpy

T = TypeVar("T")

COLUMN = 32  # numbers of which the greatest is looked for first


def candidates(logits: Any, rows: Sequence[int], k: int) -> list[list[int]]:
    """The ids of the k highest logits of each of these rows, highest first, on the host:
    [len(rows)][min(k, V)].

    logits  [n, V]: a tensor, or rows of a table's weights
    rows    which of them; only what is asked for is looked at

    >>> candidates(torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]), [0, 1], 2)
    [[1, 2], [0, 1]]
    """
    if len(logits) and is_exact(logits[0]):
        return [
            sorted(range(len(logits[row])), key=lambda t: (-logits[row][t], t))[:k] for row in rows
        ]
    table = (
        logits
        if isinstance(logits, torch.Tensor)
        else torch.stack([torch.as_tensor(row) for row in logits])
    )
    if table.device.type == "cpu":
        return [top_k_ids(to_numpy(table[row]), k) for row in rows]
    if len(rows) < len(table):
        table = table[list(rows)]
    if k == 1:
        return [[token] for token in table.argmax(dim=-1).tolist()]
    best, ids = table.topk(min(k, table.shape[-1]), dim=-1)
    # equal logits: the lowest id first. `topk` promises no order among them.
    order = ids.argsort(dim=-1)
    ids, best = ids.gather(-1, order), best.gather(-1, order)
    found: list[list[int]] = ids.gather(
        -1, best.argsort(dim=-1, descending=True, stable=True)
    ).tolist()
    return found


def top_k_ids(row: NDArray[Any], k: int) -> list[int]:
    """The places of the k highest numbers of a row, the highest first, the lowest place of equals.

    No number below the k-th highest of some maxima can be one of them: what is left after that is
    sorted.

    >>> top_k_ids(np.array([0.2, 0.5, 0.1, 0.2]), 3)
    [1, 0, 3]
    """
    if k == 1:
        return [int(row.argmax())]
    width = len(row) // COLUMN
    if k <= width:
        maxima = row[: COLUMN * width].reshape(COLUMN, width).max(axis=0)
        first = np.flatnonzero(row >= np.partition(maxima, width - k)[width - k])
    else:
        first = np.arange(len(row))
    return [int(place) for place in first[np.argsort(-row[first], kind="stable")][:k]]


_kept: "WeakKeyDictionary[Any, dict[Hashable, Any]]" = WeakKeyDictionary()


def per_model_state(target: Any, key: Hashable, make: Callable[[], T]) -> T:
    """What a persistent technique learnt of this target's model, for as long as that lives; made
    when first asked for.
    """
    known = _kept.setdefault(target.model, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found
