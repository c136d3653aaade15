"""Keys and values by slot, and what is known of each slot.

A session's committed tokens stand in slots 0..n-1 (slot == position); its uncommitted nodes stand behind them in any order.
Each slot has keys and values for the layers where `present` says so: a row that left early has fewer, and reading a layer
that is missing is an error, never silence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinyspec.lm.config import Config


class Cache:
    """K/V of one session: store [L, 2, KV, capacity, hd], grown by doubling; present [capacity, L]."""

    def __init__(self, config: Config, dtype: torch.dtype, device: torch.device, capacity: int = 64):
        self.config = config
        self.present = np.zeros((capacity, config.n_layers), dtype=bool)
        shape = (config.n_layers, 2, config.n_kv_heads, capacity, config.head_dim)
        self._hold(torch.zeros(shape, dtype=dtype, device=device))

    def _hold(self, store: Tensor) -> None:
        self.store = store
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
        grown = self.store.new_zeros((*self.store.shape[:3], room, self.store.shape[4]))
        grown[:, :, :, : self.capacity] = self.store
        present = np.zeros((room, self.config.n_layers), dtype=bool)
        present[: self.capacity] = self.present
        self.present = present
        self._hold(grown)

    def write(self, layer: int, slots: Sequence[int], k: Tensor, v: Tensor) -> None:
        """k and v [n, KV, hd] into n slots of a layer."""
        first, n = slots[0], len(slots)
        where: slice | Tensor
        if n == 1 or list(slots) == list(range(first, first + n)):
            where = slice(first, first + n)
        else:
            where = torch.tensor(slots, device=self.store.device)
        self.keys[layer][:, where] = k.transpose(0, 1)
        self.values[layer][:, where] = v.transpose(0, 1)

    def move(self, old: Sequence[int], first: int) -> None:
        """Slots `old`, in this order, become slots first, first + 1, ...: the path gather after a commit."""
        target = range(first, first + len(old))
        if list(old) == list(target):
            return
        self.store[:, :, :, first : first + len(old)] = self.store[:, :, :, torch.tensor(old, device=self.store.device)]
        self.present[first : first + len(old)] = self.present[list(old)]

    def clone(self) -> "Cache":
        """An independent copy."""
        twin = Cache.__new__(Cache)
        twin.config = self.config
        twin.present = self.present.copy()
        twin._hold(self.store.clone())
        return twin
