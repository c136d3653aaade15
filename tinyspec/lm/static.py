"""Steps of fixed shape: on a CUDA device a step of a small model is hundreds of launches, and
waiting for them is most of it.

A CUDA graph is launched once and replays them all, if every shape and every address stays what it
was. So here nothing depends on the text: the rows of a pass are padded to one of a few sizes; a
cache has its full room from the beginning, and who may look where is a mask over all of it; padding
rows write into a slot that nobody reads; and stores of keys and values are never freed but handed
from a finished session to the next, so the graphs captured on them serve again.

The arithmetic is `blocks.py`'s own. What does not fit the mould goes there: a long prompt, several
sessions in one pass, rows that enter late, skipped layers, visible sets, prefixes. Without a device
nothing is captured and the same steps run as they are written, which is how they are tested on a
CPU.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.forward import Cache, ForwardBatch
from tinyspec.lm.ops import attend, linear, stacked

SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of a step
ROOM = 256  # slots of the smallest store; they double
_NOTHING = torch.empty(0, 0, 0)


class Step:
    """One pass of `size` rows over one store: its inputs, its outputs, and how to run it.

    given    int64 [3, size]: tokens, positions, slots;  looks  bool [size, slots]
    states   [L + 1, size, d] before every layer and behind the last;  normed [size, d], logits
             [size, V]
    """

    def __init__(self, blocks: Blocks, store: Tensor, size: int):
        self.blocks, self.store, self.size = blocks, store, size
        device, slots = store.device, store.shape[3]
        self.given = torch.zeros(3, size, dtype=torch.long, device=device)
        self.looks = torch.ones(size, slots, dtype=torch.bool, device=device)
        self.states = self.normed = self.logits = torch.empty(0)
        self.run: Callable[[], None] = self.compute

    def compute(self) -> None:
        """The pass as it is written."""
        blocks, c = self.blocks, self.blocks.config
        tokens, positions, slots = self.given
        x = F.embedding(tokens, blocks.embed)
        if c.positions == "learned":
            x = x + blocks.weights["positions"][positions]
        turn = (
            (blocks.cos[positions], blocks.sin[positions])
            if c.positions == "rope"
            else (blocks.cos, blocks.sin)
        )
        mask = stacked(self.looks, c.n_heads // c.n_kv_heads, x.dtype)
        states = [x]
        for layer, block in enumerate(blocks.layers):
            q, k, v = blocks._qkv(block, x, *turn)
            keys, values = self.store[layer]
            keys.index_copy_(1, slots, k.transpose(0, 1))
            values.index_copy_(1, slots, v.transpose(0, 1))
            x = x + linear(attend(q, keys, values, mask), block.out, block.out_bias)
            x = x + blocks._mlp(block, x)
            states.append(x)
        self.states, self.normed, self.logits = torch.stack(states), blocks.final(x), blocks.head(x)

    def capture(self, pool: Any) -> None:
        """Record the pass; from now on `run` replays it. It is run before, on a stream of its own,
        as torch asks.
        """
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


class Static:
    """The steps of one model, made as they are needed."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.captures = blocks.device.type == "cuda"
        self._steps: dict[tuple[int, int], Step] = {}
        self._known: set[int] = set()  # addresses of the stores that are ours
        self._free: dict[int, list[Tensor]] = {}  # by slots
        self._memory = torch.cuda.graph_pool_handle() if self.captures else None

    def run(self, feed: ForwardBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """A whole pass: states behind the last layer [n, d], hidden [layers asked for, n, d],
        logits [heads, V]; None: too many rows.
        """
        cache, n, n_layers = feed.cache, len(feed.tokens), self.blocks.config.n_layers
        if n > SIZES[-1]:
            return None
        self._house(cache)
        size = next(size for size in SIZES if size >= n)
        key = cache.store.data_ptr(), size
        if key not in self._steps:
            self._steps[key] = Step(self.blocks, cache.store, size)
        step = self._steps[key]
        spare = cache.store.shape[3] - 1  # the slot of the padding
        pad = size - n
        columns = [feed.tokens + [0] * pad, feed.positions + [0] * pad, feed.slots + [spare] * pad]
        looks = np.zeros((size, spare + 1), dtype=bool)
        looks[n:, spare] = True
        for row, (prefix, extra) in zip(looks, feed.seen, strict=False):
            row[:prefix] = True
            row[list(extra)] = True
        step.given.copy_(torch.tensor(columns), non_blocking=True)
        step.looks.copy_(torch.from_numpy(looks), non_blocking=True)
        if self.captures and step.run == step.compute:
            kept = cache.store[
                :, :, :, feed.slots
            ].clone()  # the trial runs write the same, but may round otherwise
            step.capture(self._memory)
            cache.store[:, :, :, feed.slots] = kept
        step.run()  # the next run overwrites what it leaves, so what is handed out is copied
        shown = [step.normed if tap == n_layers else step.states[tap] for tap in feed.hidden_layers]
        hidden = torch.stack(shown)[:, :n] if shown else _NOTHING
        logits = step.logits[:n].clone() if len(feed.heads) == n else step.logits[feed.heads]
        return step.states[n_layers, :n].clone(), hidden, logits

    def _house(self, cache: Cache) -> None:
        """Move a cache into a store of ours, if it does not live in one: of its own capacity,
        rounded up, and a spare slot.
        """
        if cache.store.data_ptr() in self._known:
            return
        slots = ROOM
        while slots < cache.capacity:
            slots *= 2
        free = self._free.setdefault(slots, [])
        shape = (*cache.store.shape[:3], slots + 1, cache.store.shape[4])
        store = (
            free.pop().zero_()
            if free
            else torch.zeros(shape, dtype=cache.store.dtype, device=cache.store.device)
        )
        self._known.add(store.data_ptr())
        cache.settle(store, slots)
        weakref.finalize(cache, free.append, store)
