"""What one forward pass takes and returns: its rows, the plan they run under, and the cache.

A plan says how much of the model runs. A cache holds keys and values by slot. A `ForwardBatch` is
the rows that one session wants run in one pass. Batches are ragged: each has its own number of rows
and its own cache, and rows may enter at different sublayers (those that were run part of the way
before).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec.lm.config import Config
from tinyspec.lm.host import copied, view_as_ints, zeros
from tinyspec.lm.ops import stacked

Heads = tuple[frozenset[int] | None, ...]


@dataclass(frozen=True)
class Visible:
    """Which old positions attention may read: eviction is a set that is not looked at, never a
    physical drop.

    layers  one entry a layer: None (sees everything) or, per key/value head, a set of positions
            (None: everything)
    since   positions >= since are always visible (what came after the set was chosen)
    """

    layers: tuple[Heads | None, ...]
    since: int

    @classmethod
    def everywhere(
        cls, positions: Sequence[int], since: int, n_layers: int, n_kv_heads: int
    ) -> "Visible":
        """The same positions in every layer and head (a StreamingLLM window with its sinks,
        say).
        """
        return cls((((frozenset(positions),) * n_kv_heads),) * n_layers, since)


@dataclass(frozen=True, eq=False)
class Plan:
    """A way through the layers. Sublayer 2l is the attention of layer l, 2l + 1 its feed-forward
    part.

    last     number of layers run (None: all)
    skip     sublayers that are the identity
    visible  what attention sees (None: everything)
    """

    last: int | None = None
    skip: frozenset[int] = frozenset()
    visible: Visible | None = None

    def __eq__(self, other: object) -> bool:
        """Most comparisons are of a plan with itself."""
        if self is other:
            return True
        same = isinstance(other, Plan) and (self.last, self.skip, self.visible) == (
            other.last,
            other.skip,
            other.visible,
        )
        return same

    def __hash__(self) -> int:
        return hash((self.last, self.skip, self.visible))

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.last is None and not self.skip and self.visible is None

    def sublayers(self, n_layers: int) -> int:
        """Where this plan stops, in sublayers."""
        return 2 * (n_layers if self.last is None else self.last)

    def attention_layers(self, first: int, last: int) -> slice | list[int]:
        """Return which of the layers first..last-1 run their attention, as an index."""
        if not self.skip:
            return slice(first, last)
        return [layer for layer in range(first, last) if 2 * layer not in self.skip]

    def differs(self, other: "Plan", n_layers: int) -> int:
        """The first sublayer where the two part; 2 * n_layers if they never do.

        This is the one reuse rule: what was computed under one plan up to here holds under the
        other.

        >>> Plan(last=3).differs(Plan(), 12), Plan(skip=frozenset({4, 9})).differs(Plan(), 12)
        (6, 4)
        """
        if self is other:
            return 2 * n_layers
        ends = {self.sublayers(n_layers), other.sublayers(n_layers)}
        firsts = [
            2 * n_layers,
            *(min(ends) for _ in range(len(ends) - 1)),
            *(self.skip ^ other.skip),
        ]
        if self.visible != other.visible:
            firsts.extend(
                2 * layer for layer in range(n_layers) if self._sees(layer) != other._sees(layer)
            )
        return min(firsts)

    def _sees(self, layer: int) -> tuple[Heads, int] | None:
        heads = self.visible.layers[layer] if self.visible else None
        return None if self.visible is None or heads is None else (heads, self.visible.since)


class Cache:
    """K/V of one session: store [L, 2, KV, capacity, hd], grown by doubling; present [capacity,
    L].
    """

    def __init__(
        self, config: Config, dtype: torch.dtype, device: torch.device, capacity: int = 64
    ):
        self.config = config
        self.present: NDArray[np.bool_] = np.zeros((capacity, config.n_layers), dtype=np.bool_)
        self._hold(
            zeros((config.n_layers, 2, config.n_kv_heads, capacity, config.head_dim), dtype, device)
        )

    def _hold(self, store: Tensor) -> None:
        self.store, self.address, self.words = store, store.data_ptr(), view_as_ints(store)
        self.keys = [layer[0] for layer in store]  # views, each [KV, capacity, hd]
        self.values = [layer[1] for layer in store]

    @property
    def capacity(self) -> int:
        return len(self.present)

    def reserve(self, slots: int) -> None:
        """Make room for slots 0..slots-1, at least doubling, so that growth is linear in all."""
        if slots <= self.capacity:
            return
        room = max(slots, 2 * self.capacity)
        shape = (*self.store.shape[:3], room, self.store.shape[4])
        self.settle(zeros(shape, self.store.dtype, self.store.device), room)

    def settle(self, store: Tensor, room: int) -> None:
        """Move into a store with `room` slots, or more: what lies behind them is not the
        cache's.
        """
        here = view_as_ints(store)
        if here is not None and self.words is not None:
            here[:, :, :, : self.capacity] = self.words[:, :, :, : self.capacity]
        else:
            with torch.inference_mode():
                store[:, :, :, : self.capacity] = self.store[:, :, :, : self.capacity]
        present = np.zeros((room, self.config.n_layers), dtype=np.bool_)
        present[: self.capacity] = self.present
        self.present = present
        self._hold(store)

    def write(self, layer: int, where: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [n, KV, hd] into n slots of a layer."""
        self.keys[layer][:, where] = k.transpose(0, 1)
        self.values[layer][:, where] = v.transpose(0, 1)

    def mark_present(self, slots: int | slice, layers: slice | list[int] = slice(None)) -> None:
        """Record that these slots have keys and values in these layers (all, unless some are named)."""
        self.present[slots, layers] = True

    def mark_missing(self, slot: int, first: int = 0) -> None:
        """Record that a slot has no keys and values from layer `first` up."""
        self.present[slot, first:] = False

    def move(self, old: Sequence[int], first: int) -> None:
        """Slots `old`, in this order, become slots first, first + 1, ...: the path gather after a
        commit.
        """
        stay = next((i for i, slot in enumerate(old) if slot != first + i), len(old))
        old, first = list(old[stay:]), first + stay
        if not old:
            return
        if self.words is not None:
            self.words[:, :, :, first : first + len(old)] = self.words[:, :, :, old]
        else:
            with torch.inference_mode():
                moved = self.store[:, :, :, torch.tensor(old, device=self.store.device)]
                self.store[:, :, :, first : first + len(old)] = moved
        self.present[first : first + len(old)] = self.present[old]

    def clone(self) -> "Cache":
        """An independent copy."""
        twin = Cache.__new__(Cache)
        twin.config = self.config
        twin.present = self.present.copy()
        twin._hold(copied(self.store))
        return twin


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


ForwardFn = Callable[[Sequence[ForwardBatch]], list[Scores]]
"""What a session calls to compute: `Transformer.forward`, or a gate in front of it."""


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
