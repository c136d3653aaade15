"""What goes into `Model.forward`, what comes out, and the ledger entry it leaves.

A feed is the rows that one session wants run in one pass. Feeds are ragged: each has its own number of rows and its own
cache, and rows may enter at different sublayers (those that were run part of the way before).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.lm.cache import Cache
from tinyspec.lm.ops import stacked
from tinyspec.lm.plan import Heads, Plan


class Scores(NamedTuple):
    """What a target says of a tree of n nodes: entry 0 is the root (the newest committed token), entry i + 1 node i.

    logits [n + 1, V]          float32 (float64 for a float64 model)
    hidden [taps, n + 1, d]    the states asked for
    layers [n + 1]             how many layers each row ran
    """

    logits: Tensor
    hidden: Tensor
    layers: Sequence[int]


class Call(NamedTuple):
    """One entry of the ledger, from which every cost figure, counter and simulated clock comes.

    row_layers counts (row, layer) evaluations, a skipped sublayer being half a layer less; head_rows are products with
    the vocabulary matrix; fills are (row, layer) keys and values written without running the layer.
    """

    model: str
    rows: int
    row_layers: float
    head_rows: int
    fills: int = 0
    prefill: bool = False


@dataclass
class Feed:
    """The rows of one session for one pass.

    tokens, positions, slots  [n]
    starts    [n] sublayer each row enters at (0: from its embedding)
    stop      sublayer where all rows stop
    mask      bool [n, high], or None where each row sees slots 0..high-1
    columns   [high] position of the token in each slot; only needed where the plan restricts what is visible
    entering  [m, d] states of the rows with starts > 0, in order; also of probe rows with an embedding of their own
    given     [n] whether a row takes its state from `entering`
    heads     rows whose logits are wanted
    taps      layers whose output is wanted (0: embeddings; n_layers: after the final norm, as the head reads it)
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
    mask: Tensor | None = None
    columns: Tensor | None = None
    entering: Tensor | None = None
    given: list[bool] | None = None
    heads: list[int] = field(default_factory=list)
    taps: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()
    probes: Tensor | None = None
    prefix: tuple[Tensor, Tensor] | None = None
    copying: bool = False
    prefill: bool = False
    ledger: list[Call] | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)  # written by forward: sublayer -> states [n, d]
    _allowed: dict[Heads, Tensor] = field(default_factory=dict)
    _stacked: Tensor | None = None

    def events(self) -> set[int]:
        """The sublayers where the rows that are computed may change, or a state is wanted."""
        turns = {self.stop, *self.starts, *self.plan.skip, *(s + 1 for s in self.plan.skip)}
        return turns.union(self.snapshot, (2 * tap for tap in self.taps), range(self.stop) if self.copying else ())

    def active(self, sublayer: int) -> Sequence[int]:
        """The rows that are computed in this sublayer."""
        if sublayer >= self.stop or sublayer in self.plan.skip or (self.copying and sublayer % 2):
            return ()
        if sublayer >= max(self.starts):
            return range(len(self.starts))
        return [row for row, start in enumerate(self.starts) if start <= sublayer]

    def places(self, rows: Sequence[int]) -> slice | Tensor:
        """The slots of these rows, to index the cache with; neighbours are a slice, which is cheaper."""
        slots = self.slots if len(rows) == len(self.slots) else [self.slots[row] for row in rows]
        first, n = slots[0], len(slots)
        if n == 1 or slots == list(range(first, first + n)):
            return slice(first, first + n)
        return torch.tensor(slots, device=self.cache.store.device)

    def looks(self, layer: int, rows: Sequence[int], groups: int) -> Tensor | None:
        """The mask `ops.attend` takes for these rows in this layer; where no layer differs it is made once."""
        if self.plan.visible is not None or self.prefix is not None or len(rows) != len(self.tokens):
            return self.sees(layer, rows)
        if self._stacked is None and self.mask is not None:
            self._stacked = stacked(self.mask, groups, self.cache.store.dtype)
        return self._stacked

    def sees(self, layer: int, rows: Sequence[int]) -> Tensor | None:
        """Where these rows may look in this layer: bool [n, P + high], [KV, n, P + high] by head, or None."""
        whole = len(rows) == len(self.tokens)
        mask = self.mask if self.mask is None or whole else self.mask[list(rows)]
        visible = self.plan.visible
        heads = visible.layers[layer] if visible else None
        device = self.cache.store.device
        if visible is not None and heads is not None:
            if heads not in self._allowed:
                self._allowed[heads] = self._window(heads, visible.since)
            allowed = self._allowed[heads] if whole else self._allowed[heads][:, list(rows)]
            mask = allowed if mask is None else mask & allowed
        if self.prefix is not None and self.probes is not None:
            if mask is None:
                mask = torch.ones(len(rows), self.high, dtype=torch.bool, device=device)
            shown = self.probes[list(rows)][:, None].expand(*mask.shape[:-1], self.prefix[0].shape[2])
            mask = torch.cat((shown, mask), dim=-1)
        return mask

    def _window(self, heads: Heads, since: int) -> Tensor:
        """What a visible set lets every row see: bool [KV, n, high]. A row always sees itself."""
        device = self.cache.store.device
        columns = torch.arange(self.high, device=device) if self.columns is None else self.columns
        window = (columns >= since).expand(len(heads), len(self.tokens), -1).clone()
        for head, positions in enumerate(heads):
            chosen = torch.tensor(sorted(positions or ()), dtype=torch.long, device=device)
            window[head] |= True if positions is None else torch.isin(columns, chosen)
        window[:, range(len(self.slots)), self.slots] = True
        return window
