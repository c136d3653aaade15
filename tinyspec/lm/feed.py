"""What goes into `Model.forward`, what comes out, and the forward log entry it leaves.

A feed is the rows that one session wants run in one pass. Feeds are ragged: each has its own number
of rows and its own cache, and rows may enter at different sublayers (those that were run part of
the way before).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinyspec.lm.cache import Cache
from tinyspec.lm.ops import stacked
from tinyspec.lm.plan import Heads, Plan

Seen = tuple[int, tuple[int, ...]]
"""Slots a row sees: 0..prefix-1, where slot == position, and then others, in the order of their
positions.
"""


class Scores(NamedTuple):
    """What a target says of a tree of n nodes: entry 0 is the root (the newest committed token),
    entry i + 1 node i.

    logits [n + 1, V]          float32 (float64 for a float64 model)
    hidden [k, n + 1, d]       the states of the k layers asked for
    layers [n + 1]             how many layers each row ran
    """

    logits: Tensor
    hidden: Tensor
    layers: Sequence[int]


class ForwardRecord(NamedTuple):
    """One entry of the forward log, from which every cost figure, counter and simulated clock
    comes.

    row_layers counts (row, layer) evaluations, a skipped sublayer being half a layer less;
    head_rows are products with the vocabulary matrix; fills are (row, layer) keys and values
    written without running the layer.
    """

    model: str
    rows: int
    row_layers: float
    head_rows: int
    fills: int = 0
    prefill: bool = False


@dataclass
class ForwardBatch:
    """The rows of one session for one pass.

    tokens, positions, slots  [n]
    starts    [n] sublayer each row enters at (0: from its embedding)
    stop      sublayer where all rows stop
    seen      [n] what each row sees, itself included, in the order of its path: slots 0..prefix-1,
              then these
    entering  [m, d] states of the rows with starts > 0, in order; also of probe rows with an
              embedding of their own
    given     [n] whether a row takes its state from `entering`
    heads     rows whose logits are wanted
    hidden_layers  layers whose output is wanted (0: embeddings; n_layers: after the final norm, as
                   the head reads it)
    snapshot  sublayers whose input is kept (to continue from there, under this plan or another)
    probes    bool [n]: rows that also see `prefix`
    prefix    K and V [L, KV, P, hd] that only probes see
    copying   fill keys and values from `entering` without running the layers
    """

    cache: Cache
    plan: Plan
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]
    stop: int
    high: int
    seen: list[Seen]
    entering: Tensor | None = None
    given: list[bool] | None = None
    heads: list[int] = field(default_factory=list)
    hidden_layers: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()
    probes: Tensor | None = None
    prefix: tuple[Tensor, Tensor] | None = None
    copying: bool = False
    prefill: bool = False
    forward_log: list[ForwardRecord] | None = None
    kept: dict[int, Tensor] = field(
        default_factory=dict
    )  # written by forward: sublayer -> states [n, d]
    _lists: dict[Heads, list[list[Seen]]] = field(default_factory=dict)
    _stacked: Tensor | None = None

    def is_full_pass(self, n_layers: int) -> bool:
        """Whether all rows go from their embeddings through every layer, each seeing its path: the
        usual pass.
        """
        end = 2 * n_layers
        if (
            self.stop != end
            or self.plan.skip
            or self.plan.visible is not None
            or self.given is not None
            or self.copying
        ):
            return False
        return (
            self.prefix is None and not any(self.starts) and all(at == end for at in self.snapshot)
        )

    def sublayer_boundaries(self) -> set[int]:
        """The sublayers where the rows that are computed may change, or a state is wanted."""
        turns = {self.stop, *self.starts, *self.plan.skip, *(s + 1 for s in self.plan.skip)}
        return turns.union(
            self.snapshot,
            (2 * tap for tap in self.hidden_layers),
            range(self.stop) if self.copying else (),
        )

    def active_rows(self, sublayer: int) -> Sequence[int]:
        """The rows that are computed in this sublayer."""
        if sublayer >= self.stop or sublayer in self.plan.skip or (self.copying and sublayer % 2):
            return ()
        if sublayer >= max(self.starts):
            return range(len(self.starts))
        return [row for row, start in enumerate(self.starts) if start <= sublayer]

    def slot_mapping(self, rows: Sequence[int]) -> slice | Tensor:
        """The slots of these rows, to index the cache with; neighbours are a slice, which is
        cheaper.
        """
        slots = self.slots if len(rows) == len(self.slots) else [self.slots[row] for row in rows]
        first, n = slots[0], len(slots)
        if n == 1 or slots == list(range(first, first + n)):
            return slice(first, first + n)
        return torch.tensor(slots, device=self.cache.store.device)

    def cached_attention_mask(self, layer: int, rows: Sequence[int], groups: int) -> Tensor | None:
        """The mask `ops.attend` takes for these rows in this layer; where no layer differs it is
        made once.
        """
        if (
            self.plan.visible is not None
            or self.prefix is not None
            or len(rows) != len(self.tokens)
        ):
            return self.attention_mask(layer, rows)
        if self._stacked is None and (mask := self.attention_mask(layer, rows)) is not None:
            self._stacked = stacked(mask, groups, self.cache.store.dtype)
        return self._stacked

    def visible_slots(self, layer: int, rows: Sequence[int]) -> tuple[int, list[Seen]]:
        """What these rows see in this layer, in the order of their paths: (1, one entry a row), or
        (KV, one a row and head).
        """
        visible = self.plan.visible
        heads = visible.layers[layer] if visible else None
        if visible is None or heads is None:
            return 1, self.seen if len(rows) == len(self.seen) else [self.seen[row] for row in rows]
        if heads not in self._lists:
            self._lists[heads] = [
                [_visible(seen, slot, chosen, visible.since) for chosen in heads]
                for seen, slot in zip(self.seen, self.slots, strict=True)
            ]
        return len(heads), [entry for row in rows for entry in self._lists[heads][row]]

    def attention_mask(self, layer: int, rows: Sequence[int]) -> Tensor | None:
        """`paths` as a mask: bool [n, P + high], [KV, n, P + high] by head, or None where all rows
        see slots 0..high-1.
        """
        heads, entries = self.visible_slots(layer, rows)
        lead = 0 if self.prefix is None or self.probes is None else self.prefix[0].shape[2]
        if heads == 1 and not lead and all(seen == (self.high, ()) for seen in entries):
            return None
        mask = np.zeros((len(rows), heads, lead + self.high), dtype=bool)
        for row, (prefix, extra) in zip(mask.reshape(-1, lead + self.high), entries, strict=True):
            row[lead : lead + prefix] = True
            row[[lead + slot for slot in extra]] = True
        if lead and self.probes is not None:
            mask[:, :, :lead] = self.probes[list(rows)].cpu().numpy()[:, None, None]
        wanted = mask[:, 0] if heads == 1 else mask.swapaxes(0, 1)
        return torch.from_numpy(np.ascontiguousarray(wanted)).to(self.cache.store.device)


def _visible(seen: Seen, slot: int, chosen: frozenset[int] | None, since: int) -> Seen:
    """What a visible set leaves of what a row sees. A row always sees itself. Committed tokens
    stand where slot == position.
    """
    if chosen is None:
        return seen
    prefix, extra = seen
    recent = range(min(max(since, 0), prefix), prefix)
    old = [position for position in sorted(chosen) if position < recent.start]
    guesses = [s for at, s in enumerate(extra, prefix) if at >= since or at in chosen or s == slot]
    own = [slot] if slot < prefix and slot not in recent and slot not in chosen else []
    return 0, (*old, *own, *recent, *guesses)
