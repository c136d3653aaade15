"""Turns nodes into a feed, passes it through the gate, and writes back how far each node has
come.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec.lm.forward import Cache, ForwardBatch, ForwardRecord, Plan, Scores, Seen
from tinyspec.lm.node import Node
from tinyspec.lm.transformer import Model

PREFILL_CHUNK = 512  # rows of a long prompt that run together: bounds the attention mask

ForwardFn = Callable[[Sequence[ForwardBatch]], list[Scores]]


class Runner:
    """The computing half of a session: its cache, its forward log, what it adopted, and the gate to
    the model.
    """

    def __init__(self, model: Model, plan: Plan, forward_log: list[ForwardRecord], gate: ForwardFn):
        self.model, self.plan, self.forward_log, self.gate = model, plan, forward_log, gate
        self.cache = Cache(model.config, model.dtype, model.device)
        self.probes: Tensor | None = None  # [m, d] adopted embeddings, ids V..V+m-1
        self.prefix: tuple[Tensor, Tensor] | None = (
            None  # K and V [L, KV, P, hd] that probes alone see
        )

    def run(
        self,
        nodes: Sequence[Node],
        stop: int,
        *,
        heads: Sequence[Node] = (),
        hidden_layers: tuple[int, ...] = (),
        plan: Plan | None = None,
        prefill: bool = False,
        copying: bool = False,
    ) -> Scores:
        """One forward over these nodes (parents before children), each from where it was left up to
        sublayer `stop`.
        """
        plan = plan or self.plan
        n_layers, vocabulary = self.model.config.n_layers, self.model.config.vocab_size
        device = self.model.device
        entries = [node.resume_point(plan, stop, n_layers, hidden_layers) for node in nodes]
        starts = [start for start, _ in entries]
        states = [
            self._embedding(node, vocabulary) if state is None else state
            for node, (_, state) in zip(nodes, entries, strict=True)
        ]
        entering = [state for state in states if state is not None]
        high, seen = visibility(nodes)
        if not copying:
            self._check(nodes, starts, stop, plan, seen, high)
        probing = self.prefix is not None and any(node.probe for node in nodes)
        wanted = set(heads)
        feed = ForwardBatch(
            cache=self.cache,
            plan=plan,
            tokens=[node.token for node in nodes],
            positions=[node.position for node in nodes],
            slots=[node.slot for node in nodes],
            starts=starts,
            stop=stop,
            high=high,
            seen=seen,
            entering=torch.stack(entering) if entering else None,
            given=[state is not None for state in states] if entering else None,
            heads=[i for i, node in enumerate(nodes) if node in wanted],
            hidden_layers=hidden_layers,
            # left where the plan stops, and where the session's own plan would go another way
            snapshot=() if prefill else tuple({stop, min(stop, plan.differs(self.plan, n_layers))}),
            probes=torch.tensor([node.probe for node in nodes], device=device) if probing else None,
            prefix=self.prefix if probing else None,
            copying=copying,
            prefill=prefill,
            forward_log=self.forward_log,
        )
        scores = self.gate([feed])[0]
        rows = (
            iter(scores.logits)
            if len(scores.logits) > 1
            else iter([scores.logits[0]] if len(scores.logits) else [])
        )
        for i, (node, start) in enumerate(zip(nodes, starts, strict=True)):
            self._mark(node, plan, start, stop)
            if copying:
                node.filled = True
                continue
            above = node.parent
            node.exact = (node.exact or start == 0) and (
                above is None or (above.exact and not above.filled)
            )
            if node.plan != plan:  # what was shown below the parting still holds
                node.shown = {tap: state for tap, state in node.shown.items() if 2 * tap <= start}
            node.mark_computed(plan, start, stop, {at: kept[i] for at, kept in feed.kept.items()})
            if node.row_at != stop:  # what the head read and said at another exit
                node.row = None
                node.shown.pop(n_layers, None)
            if hidden_layers:
                for tap, state in zip(hidden_layers, scores.hidden[:, i], strict=True):
                    if 2 * tap >= start or tap == n_layers:
                        node.shown[tap] = state
            if node in wanted:
                node.row = next(rows)
            node.row_at = stop
        return scores

    def run_chain(self, nodes: Sequence[Node], first: int) -> Scores:
        """`run` where nothing is special: nodes that follow one another, each in the slot of its
        position and behind all that it sees, none of them begun, through the whole model. Logits
        from the node `first` on."""
        stop, slots = 2 * self.model.config.n_layers, [node.slot for node in nodes]
        starts = [0] * len(nodes)
        seen: list[Seen] = [(slot + 1, ()) for slot in slots]
        self._check(nodes, starts, stop, self.plan, seen, slots[-1] + 1)
        feed = ForwardBatch(
            cache=self.cache,
            plan=self.plan,
            tokens=[node.token for node in nodes],
            positions=slots,
            slots=slots,
            starts=starts,
            stop=stop,
            high=slots[-1] + 1,
            seen=seen,
            heads=list(range(first, len(nodes))),
            snapshot=(stop,),
            forward_log=self.forward_log,
        )
        scores = self.gate([feed])[0]
        self.cache.present[slots[0] : slots[-1] + 1] = True
        rows: list[Tensor | None] = [*[None] * first, *scores.logits]
        for node, row, state in zip(nodes, rows, feed.kept[stop], strict=True):
            above = node.parent
            node.exact = above is None or (above.exact and not above.filled)
            node.plan, node.sublayers_done, node.row, node.row_at, node.states = (
                self.plan,
                stop,
                row,
                stop,
                {stop: state},
            )
        return scores

    def _embedding(self, node: Node, vocabulary: int) -> Tensor | None:
        """The embedding an id beyond the vocabulary names."""
        if node.token < vocabulary or self.probes is None:
            return None
        return self.probes[node.token - vocabulary].to(self.model.device)

    def _mark(self, node: Node, plan: Plan, start: int, stop: int) -> None:
        """Note the layers whose keys and values the node now has, and forget those that no longer
        belong to it.
        """
        first = (start + 1) // 2  # the first layer whose attention was run
        present = self.cache.present[node.slot : node.slot + 1]
        if node.plan != plan or node.filled:
            present[:, first:] = False
        if plan.skip:
            present[
                :, [layer for layer in range(first, (stop + 1) // 2) if 2 * layer not in plan.skip]
            ] = True
        else:
            present[:, first : (stop + 1) // 2] = True

    def _check(
        self,
        nodes: Sequence[Node],
        starts: list[int],
        stop: int,
        plan: Plan,
        paths: Sequence[Seen],
        high: int,
    ) -> None:
        """Every attention read has its keys: no position is silently missing in a layer that will
        be read.
        """
        own = {node.slot for node in nodes}
        low = min(own)
        if self.cache.present[:low].all() and all(
            s < low or s in own for _, more in paths for s in more
        ):
            prefixes = [prefix for prefix, _ in paths if prefix > low]
            if not prefixes or own.issuperset(range(low, max(prefixes))):
                return  # the usual case, for next to nothing
        seen: NDArray[np.bool_] = np.zeros(high, dtype=np.bool_)
        seen[: max(prefix for prefix, _ in paths)] = True
        seen[[slot for _, more in paths for slot in more]] = True
        seen[[node.slot for node in nodes]] = False  # they bring their own
        read = [
            layer
            for layer in range((min(starts) + 1) // 2, (stop + 1) // 2)
            if 2 * layer not in plan.skip
        ]
        slots = np.flatnonzero(seen)
        missing = np.argwhere(~self.cache.present[np.ix_(slots, np.array(read, dtype=int))])
        if len(missing):
            slot, column = int(slots[missing[0][0]]), int(missing[0][1])
            raise RuntimeError(
                f"slot {slot} has no keys in layer {read[column]}: fill() it or run it first"
            )


def visibility(nodes: Sequence[Node]) -> tuple[int, list[Seen]]:
    """What each row sees: (slots in use, for each row a prefix of committed slots and the slots of
    its other ancestors).

    A row sees every committed slot up to its own, its ancestors, and itself; never a sibling.
    Ancestors stand in lower slots, so a row whose slot equals its position has nothing but
    ancestors below it.
    """
    seen: list[Seen] = []
    for node in nodes:
        path: list[int] = []
        at: Node | None = node
        while at is not None and at.slot != at.position:
            path.append(at.slot)
            at = at.parent
        seen.append((0 if at is None else at.slot + 1, tuple(reversed(path))))
    return max(node.slot for node in nodes) + 1, seen
