"""What the target would say next, row by row: the k tokens it holds for likeliest, and what is kept of them over requests."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from tinyspec.decoding.sampling import is_exact

T = TypeVar("T")


def candidates(logits: Any, rows: Sequence[int], k: int) -> list[list[int]]:
    """The ids of the k highest logits of each of these rows, highest first, on the host: [len(rows)][min(k, V)].

    logits  [n, V]: a tensor, or rows of a table's weights
    rows    which of them; only what is asked for is looked at

    >>> candidates(torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]), [0, 1], 2)
    [[1, 2], [0, 1]]
    """
    if len(logits) and is_exact(logits[0]):
        return [sorted(range(len(logits[row])), key=lambda t: (-logits[row][t], t))[:k] for row in rows]
    table = logits if isinstance(logits, torch.Tensor) else torch.stack([torch.as_tensor(row) for row in logits])
    if len(rows) < len(table):
        table = table[list(rows)]
    if k == 1:
        return [[token] for token in table.argmax(dim=-1).tolist()]
    best, ids = table.topk(min(k, table.shape[-1]), dim=-1)
    # equal logits: the lowest id first. `topk` promises no order among them.
    order = ids.argsort(dim=-1)
    ids, best = ids.gather(-1, order), best.gather(-1, order)
    found: list[list[int]] = ids.gather(-1, best.argsort(dim=-1, descending=True, stable=True)).tolist()
    return found


_kept: "WeakKeyDictionary[Any, dict[Hashable, Any]]" = WeakKeyDictionary()


def kept(target: Any, key: Hashable, make: Callable[[], T]) -> T:
    """What a persistent technique learnt of this target's model, for as long as that lives; made when first asked for."""
    known = _kept.setdefault(target.model, {})
    if key not in known:
        known[key] = make()
    found: T = known[key]
    return found
