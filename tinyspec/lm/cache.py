"""Keys and values by slot, and what is known of each slot.

A session's committed tokens stand in slots 0..n-1 (slot == position), its uncommitted nodes behind
them. Each slot has keys and values for the layers where `present` says so: a row that left early
has fewer, and reading a layer that is missing is an error, never silence.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec.lm.config import Config
from tinyspec.lm.host import copied, view_as_ints, zeros


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
