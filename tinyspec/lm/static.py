"""Forward passes of fixed shape, for CUDA graphs.

On a CUDA device a pass of a small model is hundreds of kernel launches, and waiting for them is
most of its time. A CUDA graph launches them all at once, if no shape and no address changes. So:

- the rows of a pass are padded to one of a few sizes; padding writes into a slot that nobody reads
- a cache has its full size from the beginning, and a mask over all of it says what is visible
- a finished session hands its store of keys and values to the next one, and the graphs that were
  captured on it serve again; of each size a few free stores are kept, and others are released
  together with their graphs

The layers are those of `blocks.py`. What has no fixed shape runs there: long prompts, several
sessions in one pass, rows that start in a later layer, skipped layers, visible sets, prefixes.
Without a CUDA device nothing is captured and the same passes run directly; so a CPU can test them.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.forward import Cache, ForwardBatch
from tinyspec.lm.ops import additive_mask, attend

SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of a pass
MIN_SLOTS = 256  # slots of the smallest store; larger ones double it
SPARE_SLOTS = 16  # slots that only padding writes to: a mask of 16 n columns takes the fast kernel
FREE_STORES = 4  # of one size, kept for the next sessions
_NOTHING = torch.empty(0, 0, 0)


class FixedShapePass:
    """One pass of `size` rows over one store: its inputs, its outputs, and how to run it.

    inputs   int64 [3, size]: tokens, positions, slots
    visible  bool [size, slots]: the slots that each row attends to
    states   [L + 1, size, d]: before every layer, and after the last
    normed   [size, d], after the final norm
    logits   [size, V]
    """

    def __init__(self, blocks: Blocks, store: Tensor, size: int):
        self.blocks, self.store, self.size = blocks, store, size
        device, slots = store.device, store.shape[3]
        # A position is never above its slot. A graph reads these tables wherever they lie, so the
        # pass holds them, also after the model has made larger ones.
        self.rotary = blocks.reserve_rotary(slots)
        self.inputs = torch.zeros(3, size, dtype=torch.long, device=device)
        self.visible = torch.ones(size, slots, dtype=torch.bool, device=device)
        self.states = self.normed = self.logits = torch.empty(0)
        self.run: Callable[[], None] = self.compute

    def compute(self) -> None:
        """Run the pass as it is written."""
        blocks, c = self.blocks, self.blocks.config
        tokens, positions, slots = self.inputs
        x = F.embedding(tokens, blocks.embed)
        if c.positions == "learned":
            x = x + blocks.weights["positions"][positions]
        rotary = self.rotary
        if c.positions == "rope":
            rotary = rotary[0][positions], rotary[1][positions]
        mask = additive_mask(self.visible, c.n_heads // c.n_kv_heads, x.dtype)
        states = [x]
        for block, (keys, values) in zip(blocks.layers, self.store, strict=True):
            attend_fn = partial(_attend_in_store, keys, values, slots, mask)
            x = blocks.add_mlp(block, blocks.add_attention(block, x, rotary, attend_fn))
            states.append(x)
        self.normed = blocks.apply_final_norm(x)
        self.states, self.logits = torch.stack(states), blocks.apply_head(self.normed)

    def capture(self, pool: Any) -> None:
        """Capture the pass as a CUDA graph, which `run` replays from then on.

        torch wants it to be run before, on a stream of its own.
        """
        with torch.cuda.device(self.store.device):  # the stream is that of the model's device
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.compute()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.compute()
        self.run = graph.replay


def _attend_in_store(
    keys: Tensor, values: Tensor, slots: Tensor, mask: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Write keys and values of the pass into their slots, then attend over all slots."""
    keys.index_copy_(1, slots, k.transpose(0, 1))
    values.index_copy_(1, slots, v.transpose(0, 1))
    return attend(q, keys, values, mask)


class CudaGraphRunner:
    """The passes of one model, built when they are needed."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.captures = blocks.device.type == "cuda"
        self._passes: dict[tuple[int, int], FixedShapePass] = {}
        self._in_use: set[int] = set()  # addresses of our stores that a cache is in
        self._stores: weakref.WeakKeyDictionary[Cache, weakref.finalize[Any, Any]] = (
            weakref.WeakKeyDictionary()
        )  # what frees the store of a cache
        self._free_stores: dict[int, list[Tensor]] = {}  # by slots
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        if self.captures:  # sums of bfloat16 products are kept in float32
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def run_full_pass(self, feed: ForwardBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """Run a full pass, or return None if it has too many rows.

        Returns the states after the last layer [n, d], the hidden layers asked for [k, n, d], and
        the logits [heads, V].
        """
        cache, n, n_layers = feed.cache, len(feed.tokens), self.blocks.config.n_layers
        if n > SIZES[-1]:
            return None
        self._move_to_own_store(cache)
        size = next(size for size in SIZES if size >= n)
        key = cache.store.data_ptr(), size
        if key not in self._passes:
            self._passes[key] = FixedShapePass(self.blocks, cache.store, size)
        fixed = self._passes[key]
        spare = cache.store.shape[3] - SPARE_SLOTS  # the slot that padding writes to
        pad = size - n
        columns = [feed.tokens + [0] * pad, feed.positions + [0] * pad, feed.slots + [spare] * pad]
        visible = np.zeros((size, spare + SPARE_SLOTS), dtype=bool)
        visible[n:, spare] = True
        for row, (prefix, extra) in zip(visible, feed.seen, strict=False):
            row[:prefix] = True
            row[list(extra)] = True
        fixed.inputs.copy_(torch.tensor(columns), non_blocking=True)
        fixed.visible.copy_(torch.from_numpy(visible), non_blocking=True)
        if self.captures and fixed.run == fixed.compute:
            # The trial runs write the same keys and values, but may round them otherwise.
            kept = cache.store[:, :, :, feed.slots].clone()
            fixed.capture(self._pool)
            cache.store[:, :, :, feed.slots] = kept
        fixed.run()  # the next run overwrites its outputs, so they are copied
        shown = [
            fixed.normed if tap == n_layers else fixed.states[tap] for tap in feed.hidden_layers
        ]
        hidden = torch.stack(shown)[:, :n] if shown else _NOTHING
        logits = fixed.logits[:n].clone() if len(feed.heads) == n else fixed.logits[feed.heads]
        return fixed.states[n_layers, :n].clone(), hidden, logits

    def _move_to_own_store(self, cache: Cache) -> None:
        """Move a cache into a store of ours, unless it is in one.

        The store has the cache's capacity, rounded up, and slots for padding. The store that the
        cache outgrew is free at once, and this one when the cache is gone.
        """
        if cache.store.data_ptr() in self._in_use:
            return
        slots = MIN_SLOTS
        while slots < cache.capacity:
            slots *= 2
        free = self._free_stores.setdefault(slots, [])
        shape = (*cache.store.shape[:3], slots + SPARE_SLOTS, cache.store.shape[4])
        store = (
            free.pop().zero_()
            if free
            else torch.zeros(shape, dtype=cache.store.dtype, device=cache.store.device)
        )
        outgrown = self._stores.pop(cache, None)
        cache.move_to_store(store, slots)
        if outgrown is not None:
            outgrown()
        self._stores[cache] = weakref.finalize(cache, self._release_store, store)
        self._in_use.add(store.data_ptr())

    def _release_store(self, store: Tensor) -> None:
        """Keep a store for the next session; drop it and its passes if there are enough."""
        self._in_use.discard(store.data_ptr())
        free = self._free_stores[store.shape[3] - SPARE_SLOTS]
        if len(free) < FREE_STORES:
            free.append(store)
            return
        for key in [key for key in self._passes if key[0] == store.data_ptr()]:
            del self._passes[key]
