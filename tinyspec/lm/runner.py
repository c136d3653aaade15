"""Turns nodes into a feed, passes it through the gate, and writes back how far each node has come."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec.lm.cache import Cache
from tinyspec.lm.feed import Call, Feed, Scores
from tinyspec.lm.node import Node
from tinyspec.lm.plan import Plan
from tinyspec.lm.transformer import Model

SLAB = 512  # rows of a long prompt that run together: bounds the attention mask

Gate = Callable[[Sequence[Feed]], list[Scores]]


class Runner:
    """The computing half of a session: its cache, its ledger, what it adopted, and the gate to the model."""

    def __init__(self, model: Model, plan: Plan, ledger: list[Call], gate: Gate):
        self.model, self.plan, self.ledger, self.gate = model, plan, ledger, gate
        self.cache = Cache(model.config, model.dtype, model.device)
        self.probes: Tensor | None = None  # [m, d] adopted embeddings, ids V..V+m-1
        self.prefix: tuple[Tensor, Tensor] | None = None  # K and V [L, KV, P, hd] that probes alone see

    def run(
        self,
        nodes: Sequence[Node],
        stop: int,
        *,
        heads: Sequence[Node] = (),
        taps: tuple[int, ...] = (),
        plan: Plan | None = None,
        prefill: bool = False,
        copying: bool = False,
    ) -> Scores:
        """One forward over these nodes, each from where it was left up to sublayer `stop`."""
        plan = plan or self.plan
        n_layers, vocabulary = self.model.config.n_layers, self.model.config.vocab_size
        nodes = sorted(nodes, key=lambda node: node.position)  # parents before children
        wanted = set(heads)
        starts: list[int] = []
        entering: list[Tensor] = []
        given: list[bool] = []
        for node in nodes:
            start, state = node.entry(plan, stop, n_layers)
            if start == 0 and node.token >= vocabulary and self.probes is not None:
                state = self.probes[node.token - vocabulary].to(self.model.device)
            starts.append(start)
            given.append(state is not None)
            entering += [] if state is None else [state]
        high, mask = visibility(nodes)
        if not copying:
            self._check(nodes, starts, stop, plan, mask, high)
        device = self.model.device
        probing = self.prefix is not None and any(node.probe for node in nodes)
        feed = Feed(
            cache=self.cache,
            plan=plan,
            tokens=[node.token for node in nodes],
            positions=[node.position for node in nodes],
            slots=[node.slot for node in nodes],
            starts=starts,
            stop=stop,
            high=high,
            mask=None if mask is None else torch.from_numpy(mask).to(device),
            entering=torch.stack(entering) if entering else None,
            given=given if entering else None,
            heads=[i for i, node in enumerate(nodes) if node in wanted],
            taps=taps,
            # left where the plan stops, and where the session's own plan would go another way
            snapshot=() if prefill else tuple({stop, min(stop, plan.differs(self.plan, n_layers))}),
            probes=torch.tensor([node.probe for node in nodes], device=device) if probing else None,
            prefix=self.prefix if probing else None,
            copying=copying,
            prefill=prefill,
            ledger=self.ledger,
        )
        scores = self.gate([feed])[0]
        rows = iter(scores.logits)
        for i, node in enumerate(nodes):
            first = (starts[i] + 1) // 2  # the first layer whose attention was run
            present = self.cache.present[node.slot]
            present[first:] = False
            present[[layer for layer in range(first, (stop + 1) // 2) if 2 * layer not in plan.skip]] = True
            if copying:
                node.filled, node.exact = True, False
                continue
            node.arrive(plan, stop, {at: kept[i] for at, kept in feed.kept.items()})
            node.taps, node.hidden = taps, scores.hidden[:, i] if taps else None
            if node in wanted:
                node.row, node.row_at = next(rows), stop
        return scores

    def _check(
        self,
        nodes: Sequence[Node],
        starts: list[int],
        stop: int,
        plan: Plan,
        mask: NDArray[np.bool_] | None,
        high: int,
    ) -> None:
        """Every attention read has its keys: no position is silently missing in a layer that will be read."""
        seen = np.ones(high, dtype=bool) if mask is None else mask.any(axis=0)
        seen[[node.slot for node in nodes]] = False  # they bring their own
        read = [layer for layer in range((min(starts) + 1) // 2, (stop + 1) // 2) if 2 * layer not in plan.skip]
        held = self.cache.present[:high][seen][:, read]
        if not held.all():
            row, column = (int(index[0]) for index in (~held).nonzero())
            slot = int(seen.nonzero()[0][row])
            raise RuntimeError(f"slot {slot} has no keys in layer {read[column]}: fill() it or run it first")


def visibility(nodes: Sequence[Node]) -> tuple[int, NDArray[np.bool_] | None]:
    """What each row may look at: (high, bool [n, high]); the mask is None where every row sees all of 0..high-1.

    A row sees every committed slot up to its own, its ancestors, and itself; never a sibling. Ancestors stand in lower
    slots, so a row whose slot equals its position has nothing but ancestors below it.
    """
    high = max(node.slot for node in nodes) + 1
    if len(nodes) == 1 and nodes[0].slot == nodes[0].position:
        return high, None
    mask = np.zeros((len(nodes), high), dtype=bool)
    for row, node in enumerate(nodes):
        at: Node | None = node
        while at is not None and at.slot != at.position:
            mask[row, at.slot] = True
            at = at.parent
        if at is not None:
            mask[row, : at.slot + 1] = True
    return high, mask
