"""The input and output of a forward pass: rows, the plan they run under, and the cache.

A `Plan` says how much of the model runs. A `Cache` holds keys and values by slot. A `ForwardBatch`
has the rows that one session runs in one pass: a row is one token at one position. Batches are
ragged: each has its own number of rows and its own cache. Rows may start at different sublayers,
because some were partly computed before.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec.lm.config import Config
from tinyspec.lm.host import copy_tensor, make_zeros, view_as_ints
from tinyspec.lm.ops import additive_mask

Heads = tuple[frozenset[int] | None, ...]


@dataclass(frozen=True)
class VisibleSet:
    """The old positions that attention may read. Evicted positions stay in the cache, unread.

    layers   for each layer None (all positions are visible), or for each key/value head a set of
             positions (None: all)
    since    positions >= since are always visible: they came after the set was chosen
    ordered  the positions of each head from the lowest up, by the heads of a layer
    """

    layers: tuple[Heads | None, ...]
    since: int
    ordered: dict[Heads, list[tuple[int, ...]]] = field(init=False, repr=False, compare=False)

    @classmethod
    def for_all_layers(
        cls, positions: Sequence[int], since: int, n_layers: int, n_kv_heads: int
    ) -> "VisibleSet":
        """Return the same positions for every layer and head, as StreamingLLM's window needs."""
        return cls((((frozenset(positions),) * n_kv_heads),) * n_layers, since)

    def __post_init__(self) -> None:
        """Sort the positions once: a set may have thousands, and serves many passes."""
        ordered = {
            heads: [tuple(sorted(chosen or ())) for chosen in heads]
            for heads in self.layers
            if heads is not None
        }
        object.__setattr__(self, "ordered", ordered)  # the dataclass is frozen


@dataclass(frozen=True, eq=False)
class Plan:
    """The part of the model that runs. Sublayer 2l is the attention of layer l, 2l + 1 its MLP.

    last     number of layers that run; None: all
    skip     sublayers that are left out
    visible  what attention may read; None: everything
    """

    last: int | None = None
    skip: frozenset[int] = frozenset()
    visible: VisibleSet | None = None

    def __eq__(self, other: object) -> bool:
        """Compare; fast if the plans are one object, which is the usual case."""
        if self is other:
            return True
        if not isinstance(other, Plan):
            return False
        mine, theirs = (self.last, self.skip), (other.last, other.skip)
        return mine == theirs and self.visible == other.visible

    def __hash__(self) -> int:
        return hash((self.last, self.skip, self.visible))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.last is None and not self.skip and self.visible is None

    def stop_sublayer(self, n_layers: int) -> int:
        """Return the sublayer where this plan stops."""
        return 2 * (n_layers if self.last is None else self.last)

    def attention_layers(self, first: int, last: int) -> slice | list[int]:
        """Return which of the layers first..last-1 run their attention, as an index."""
        if not self.skip:
            return slice(first, last)
        return [layer for layer in range(first, last) if 2 * layer not in self.skip]

    def first_difference(self, other: "Plan", n_layers: int) -> int:
        """Return the first sublayer where two plans differ; 2 * n_layers if they never do.

        What was computed under one plan up to there holds under the other. This is the only rule
        of reuse.

        >>> Plan(last=3).first_difference(Plan(), 12)
        6
        >>> Plan(skip=frozenset({4, 9})).first_difference(Plan(), 12)
        4
        """
        if self is other:
            return 2 * n_layers
        ends = {self.stop_sublayer(n_layers), other.stop_sublayer(n_layers)}
        firsts = [
            2 * n_layers,
            *(min(ends) for _ in range(len(ends) - 1)),
            *(self.skip ^ other.skip),
        ]
        if self.visible != other.visible:
            firsts.extend(
                2 * layer
                for layer in range(n_layers)
                if self._visible_in(layer) != other._visible_in(layer)
            )
        return min(firsts)

    def _visible_in(self, layer: int) -> tuple[Heads, int] | None:
        heads = self.visible.layers[layer] if self.visible else None
        return None if self.visible is None or heads is None else (heads, self.visible.since)


class Cache:
    """The keys and values of one session.

    store    [L, 2, KV, capacity, hd], grown by doubling
    present  [capacity, L]: whether a slot has keys and values in a layer
    """

    def __init__(
        self, config: Config, dtype: torch.dtype, device: torch.device, capacity: int = 64
    ):
        self.config = config
        self.present: NDArray[np.bool_] = np.zeros((capacity, config.n_layers), dtype=np.bool_)
        self._use_store(
            make_zeros(
                (config.n_layers, 2, config.n_kv_heads, capacity, config.head_dim), dtype, device
            )
        )

    def _use_store(self, store: Tensor) -> None:
        self.store, self.address, self.ints = store, store.data_ptr(), view_as_ints(store)
        self.keys = [layer[0] for layer in store]  # views, each [KV, capacity, hd]
        self.values = [layer[1] for layer in store]

    @property
    def capacity(self) -> int:
        return len(self.present)

    def reserve(self, slots: int) -> None:
        """Make room for slots 0..slots-1. The capacity at least doubles: copies stay linear."""
        if slots <= self.capacity:
            return
        room = max(slots, 2 * self.capacity)
        shape = (*self.store.shape[:3], room, self.store.shape[4])
        self.move_to_store(make_zeros(shape, self.store.dtype, self.store.device), room)

    def move_to_store(self, store: Tensor, room: int) -> None:
        """Move into a store of at least `room` slots, of which the first `room` are used."""
        here = view_as_ints(store)
        if here is not None and self.ints is not None:
            here[:, :, :, : self.capacity] = self.ints[:, :, :, : self.capacity]
        else:
            with torch.inference_mode():
                store[:, :, :, : self.capacity] = self.store[:, :, :, : self.capacity]
        present = np.zeros((room, self.config.n_layers), dtype=np.bool_)
        present[: self.capacity] = self.present
        self.present = present
        self._use_store(store)

    def write(self, layer: int, where: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [n, KV, hd] into n slots of a layer."""
        self.keys[layer][:, where] = k.transpose(0, 1)
        self.values[layer][:, where] = v.transpose(0, 1)

    def read(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer in these slots, each [KV, m, hd].

        slots  the same for all heads, or [KV, m]: then they are copied
        """
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(slots, slice):
            return keys[:, slots], values[:, slots]
        index = slots[:, :, None]
        return keys.take_along_dim(index, dim=1), values.take_along_dim(index, dim=1)

    def layer_range(self, first: int, n: int) -> "Cache":
        """Return n of the layers, from `first` on, as a cache of their own over the same memory.

        It is for one forward pass: it does not grow, and does not follow where this one moves.
        """
        part = Cache.__new__(Cache)
        part.config, part.present = self.config, self.present[:, first : first + n]
        part._use_store(self.store[first : first + n])
        return part

    def mark_present(self, slots: int | slice, layers: slice | list[int] = slice(None)) -> None:
        """Record that these slots have keys and values in these layers; by default in all."""
        self.present[slots, layers] = True

    def mark_missing(self, slot: int, first: int = 0) -> None:
        """Record that a slot has no keys and values from layer `first` up."""
        self.present[slot, first:] = False

    def move_slots(self, old: Sequence[int], first: int) -> None:
        """Move slots `old`, in this order, to slots first, first + 1, ... (after a commit)."""
        stay = next((i for i, slot in enumerate(old) if slot != first + i), len(old))
        old, first = list(old[stay:]), first + stay
        if not old:
            return
        if self.ints is not None:
            self.ints[:, :, :, first : first + len(old)] = self.ints[:, :, :, old]
        else:
            with torch.inference_mode():
                moved = self.store[:, :, :, torch.tensor(old, device=self.store.device)]
                self.store[:, :, :, first : first + len(old)] = moved
        self.present[first : first + len(old)] = self.present[old]

    def clone(self) -> "Cache":
        """Return an independent copy."""
        twin = Cache.__new__(Cache)
        twin.config = self.config
        twin.present = self.present.copy()
        twin._use_store(copy_tensor(self.store))
        return twin


SeenSlots = tuple[int, tuple[int, ...]]
"""(prefix, others): a row attends to slots 0..prefix-1, where slot == position, then to others.

These slots are in order of position."""


class Scores(NamedTuple):
    """A target's scores of a tree of n nodes.

    Entry 0 is the root, the newest committed token; entry i + 1 is node i.

    logits  [n + 1, V]     float32, or float64 in a float64 model
    hidden  [k, n + 1, d]  the states after the k layers that the drafter asked for
    layers  [n + 1]        how many layers were run
    """

    logits: Tensor
    hidden: Tensor
    layers: Sequence[int]


class ForwardRecord(NamedTuple):
    """One forward pass in the forward log. All cost figures and simulated clocks come from it.

    rows        positions that were run
    row_layers  (row, layer) evaluations; a skipped sublayer is half a layer less
    head_rows   rows whose logits were computed
    fills       (row, layer) pairs whose keys and values were written without running the layer
    shared      positions before these whose keys and values a fork took over from another text
    """

    model: str
    rows: int
    row_layers: float
    head_rows: int
    fills: int = 0
    prefill: bool = False
    shared: int = 0


@dataclass
class ForwardBatch:
    """The rows of one session for one pass.

    tokens, positions, slots  [n]
    starts           [n] sublayer that each row starts at; 0: from its embedding
    stop             sublayer where all rows stop
    n_slots          slots 0..n_slots-1 of the cache are in use
    seen             [n] the slots that each row attends to, its own included
    entry_states     [m, d] the states that m of the rows start from
    has_state        [n] whether a row takes its state from `entry_states`; None: no row does
    has_position     these states have learned positions in them already
    heads            rows whose logits are wanted
    hidden_layers    layers whose output is wanted (0: embeddings; n_layers: after the final norm)
    saved_sublayers  sublayers whose input is saved, to continue from there
    probes           bool [n]: rows that also attend to `prefix`
    prefix           K and V [L, KV, P, hd] that only probes attend to
    copying          only write keys and values, made from `entry_states`; run no layer
    shared           positions that this session took over from another one, for the forward log
    saved_states     written by the pass: sublayer -> its input [n, d]
    """

    cache: Cache
    plan: Plan
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    starts: list[int]
    stop: int
    n_slots: int
    seen: list[SeenSlots]
    entry_states: Tensor | None = None
    has_state: list[bool] | None = None
    has_position: bool = False
    heads: list[int] = field(default_factory=list)
    hidden_layers: tuple[int, ...] = ()
    saved_sublayers: tuple[int, ...] = ()
    probes: Tensor | None = None
    prefix: tuple[Tensor, Tensor] | None = None
    copying: bool = False
    prefill: bool = False
    shared: int = 0
    forward_log: list[ForwardRecord] | None = None
    saved_states: dict[int, Tensor] = field(default_factory=dict)
    _seen_by_heads: dict[Heads, list[list[SeenSlots]]] = field(default_factory=dict)
    _mask: Tensor | None = None

    def first_rows(self, n: int) -> "ForwardBatch":
        """Return a pass over the first n rows of a prompt: they attend to no later ones."""
        has_state, entering = self.has_state, self.entry_states
        if has_state is not None and entering is not None:
            has_state = has_state[:n]
            entering = entering[: sum(has_state)]
        return replace(
            self,
            tokens=self.tokens[:n],
            positions=self.positions[:n],
            slots=self.slots[:n],
            starts=self.starts[:n],
            n_slots=max(self.slots[:n]) + 1,
            seen=self.seen[:n],
            entry_states=entering,
            has_state=has_state,
        )

    @property
    def tokens_to_embed(self) -> list[int]:
        """The tokens [n], with 0 where a row brings its own state."""
        if self.has_state is None:
            return self.tokens
        return [0 if own else t for t, own in zip(self.tokens, self.has_state, strict=True)]

    def is_full_pass(self, n_layers: int) -> bool:
        """Return whether every row runs from its embedding through every layer: the usual case."""
        end = 2 * n_layers
        if (
            self.stop != end
            or self.plan.skip
            or self.plan.visible is not None
            or self.has_state is not None
            or self.copying
        ):
            return False
        return (
            self.prefix is None
            and not any(self.starts)
            and all(at == end for at in self.saved_sublayers)
        )

    def sublayer_boundaries(self) -> set[int]:
        """Return the sublayers where the active rows may change, or where a state is wanted."""
        boundaries = {self.stop, *self.starts, *self.plan.skip, *(s + 1 for s in self.plan.skip)}
        return boundaries.union(
            self.saved_sublayers,
            (2 * tap for tap in self.hidden_layers),
            range(self.stop) if self.copying else (),
        )

    def active_rows(self, sublayer: int) -> Sequence[int]:
        """Return the rows that are computed in this sublayer."""
        if sublayer >= self.stop or sublayer in self.plan.skip or (self.copying and sublayer % 2):
            return ()
        if sublayer >= max(self.starts):
            return range(len(self.starts))
        return [row for row, start in enumerate(self.starts) if start <= sublayer]

    def slot_mapping(self, rows: Sequence[int]) -> slice | Tensor:
        """Return an index of these rows' slots in the cache; a slice, if they are neighbours."""
        slots = self.slots if len(rows) == len(self.slots) else [self.slots[row] for row in rows]
        first, n = slots[0], len(slots)
        if n == 1 or slots == list(range(first, first + n)):
            return slice(first, first + n)
        return torch.tensor(slots, device=self.cache.store.device)

    def cached_attention_mask(self, layer: int, rows: Sequence[int], groups: int) -> Tensor | None:
        """Return the mask that `ops.attend` takes; made once a pass if all layers share it."""
        is_shared = (
            self.plan.visible is None and self.prefix is None and len(rows) == len(self.tokens)
        )
        if is_shared and self._mask is not None:
            return self._mask
        mask = self.attention_mask(layer, rows)
        if mask is None:
            return None
        moved = torch.from_numpy(mask).to(self.cache.store.device)
        if is_shared:
            self._mask = moved = additive_mask(moved, groups, self.cache.store.dtype)
        return moved

    def visible_slots(self, layer: int, rows: Sequence[int]) -> tuple[int, list[SeenSlots]]:
        """Return what these rows attend to in this layer.

        Either (1, one entry for each row), or (KV, one entry for each row and key/value head).
        """
        visible = self.plan.visible
        heads = visible.layers[layer] if visible else None
        if visible is None or heads is None:
            return 1, self.seen if len(rows) == len(self.seen) else [self.seen[row] for row in rows]
        if heads not in self._seen_by_heads:
            sets = list(zip(heads, visible.ordered[heads], strict=True))
            self._seen_by_heads[heads] = [
                [_restrict(seen, slot, *chosen, visible.since) for chosen in sets]
                for seen, slot in zip(self.seen, self.slots, strict=True)
            ]
        return len(heads), [entry for row in rows for entry in self._seen_by_heads[heads][row]]

    def attention_mask(self, layer: int, rows: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return `visible_slots` as a mask, True where a row may attend.

        bool [n, P + n_slots], or [KV, n, P + n_slots] if heads differ; None if every row attends to
        all n_slots slots.
        """
        heads, entries = self.visible_slots(layer, rows)
        lead = self._n_lead
        if heads == 1 and not lead and all(seen == (self.n_slots, ()) for seen in entries):
            return None
        mask = np.zeros((len(rows), heads, lead + self.n_slots), dtype=bool)
        for row, (prefix, extra) in zip(
            mask.reshape(-1, lead + self.n_slots), entries, strict=True
        ):
            row[lead : lead + prefix] = True
            row[[lead + slot for slot in extra]] = True
        if lead and self.probes is not None:
            mask[:, :, :lead] = self.probes[list(rows)].cpu().numpy()[:, None, None]
        return np.ascontiguousarray(mask[:, 0] if heads == 1 else mask.swapaxes(0, 1))

    def attended_slots(
        self, layer: int, rows: Sequence[int], groups: int
    ) -> tuple[slice | Tensor, Tensor | None]:
        """Return the slots that attention reads in this layer, and the mask that `attend` takes.

        slots  all n_slots; if the plan hides some, [KV, m]: those that any of the rows attends to
        mask   over the P positions of the prefix, and the slots
        """
        device = self.cache.store.device
        visible = self.plan.visible
        if visible is None or visible.layers[layer] is None:
            return slice(self.n_slots), self.cached_attention_mask(layer, rows, groups)
        mask, lead = self.attention_mask(layer, rows), self._n_lead
        if mask is None:
            return slice(self.n_slots), None
        mask = mask.reshape(-1, len(rows), lead + self.n_slots)
        read = np.logical_or.reduce(mask[:, :, lead:], axis=1)  # [KV, n_slots]
        counts = read.sum(axis=1)
        m = int(counts.max())
        # A head that reads fewer slots than another repeats its last one, masked.
        chosen = [np.flatnonzero(own) for own in read]
        slots = np.stack([np.pad(own, (0, m - len(own)), mode="edge") for own in chosen])
        seen = np.take_along_axis(mask[:, :, lead:], slots[:, None], axis=2)
        seen &= np.arange(m) < counts[:, None, None]
        whole = np.concatenate((mask[:, :, :lead], seen), axis=2)
        return torch.from_numpy(slots).to(device), torch.from_numpy(whole).to(device)

    @property
    def _n_lead(self) -> int:
        """Return how many positions the prefix has, to which only probes attend."""
        return 0 if self.prefix is None or self.probes is None else self.prefix[0].shape[2]


ForwardFn = Callable[[Sequence[ForwardBatch]], list[Scores]]
"""A forward pass: `Transformer.forward`, or a `Scheduler` in front of it.

A scheduler may run fewer rows of a prompt than it was given.
"""


def _restrict(
    seen: SeenSlots,
    slot: int,
    chosen: frozenset[int] | None,
    ordered: Sequence[int],
    since: int,
) -> SeenSlots:
    """Return what a visible set leaves of `seen`. A row always attends to itself.

    ordered  the chosen positions from the lowest up

    Committed tokens stand where slot == position.
    """
    if chosen is None:
        return seen
    prefix, extra = seen
    recent = range(min(max(since, 0), prefix), prefix)
    old = ordered[: bisect_left(ordered, recent.start)]
    drafted = [s for at, s in enumerate(extra, prefix) if at >= since or at in chosen or s == slot]
    own = [slot] if slot < prefix and slot not in recent and slot not in chosen else []
    return 0, (*old, *own, *recent, *drafted)
