"""A session: one text, the guesses that hang from it, and how far each has been computed.

Committed tokens stand in slots 0..n-1; behind them stand nodes, keyed by their path: scoring a tree twice, or growing it
depth by depth, runs only what has not been run. A node remembers under which plan it was computed, how many sublayers it
has reached, and the state it can continue from. That makes draft trees, half-run children, LayerSkip's continuation and
postponed fills one mechanism. The newest committed token is left unrun: it is fed with the first tree.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.feed import Call, Scores
from tinyspec.lm.node import Node
from tinyspec.lm.plan import Plan
from tinyspec.lm.runner import SLAB, Gate, Runner
from tinyspec.lm.transformer import Model
from tinyspec.tree import ROOT, TokenTree


class Session:
    """One request on one model under one plan (the whole model unless told otherwise).

    `gate` stands in front of `Model.forward`: batching and concurrency are other gates.
    """

    def __init__(
        self, model: Model, *, plan: Plan | None = None, ledger: list[Call] | None = None, gate: Gate | None = None
    ):
        self.model, self.plan = model, plan or Plan()
        self.runner = Runner(model, self.plan, [] if ledger is None else ledger, gate or model.forward)
        self.cache = self.runner.cache
        self.committed: list[Node] = []
        self._ready = 0  # committed tokens before this one have keys and values in every layer of the plan
        self.scored: list[Node] = []  # nodes of the last tree, by its indices
        self._extras: list[Node] = []  # probes of the last tree

    # ------------------------------------------------------------------ the text

    @property
    def text(self) -> list[int]:
        """Committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    @property
    def cache_exact(self) -> bool:
        """Whether the cache is what teacher-forcing the text would give. A session that ran every layer says yes."""
        return all(node.exact for node in self.committed[: self._ready])

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens. Nodes that already spell them are kept with what they computed; nothing is run."""
        fresh: list[Node] = []
        tip = self.committed[-1] if self.committed else None
        for token in tokens:
            if not 0 <= token < self.model.config.vocab_size:
                raise TinyspecError(f"token id {token} is outside the vocabulary of {self.model.config.vocab_size}")
            found = tip.children.get(token) if tip else None
            tip = found or Node(token, tip)
            fresh.append(tip)
        limit = self.model.config.max_positions
        if len(self) + len(fresh) > limit:
            raise TinyspecError(
                f"{len(self) + len(fresh)} tokens do not fit into the context of {limit} tokens of {self.model.name}: "
                "shorten the prompt"
            )
        if fresh:
            self._adopt_path(fresh)

    def extend(self, tokens: Sequence[int], taps: Sequence[int] = ()) -> Scores:
        """Commit forced tokens and run all but the last. Returns the hidden states of the rows run, no logits."""
        self.append(tokens)
        hidden: list[Tensor] = []
        end = max(len(self) - 1, 0)
        while True:
            todo = self._stale(self.committed[self._ready : end])[:SLAB]
            if not todo:
                break
            scores = self.runner.run(todo, self._end, taps=tuple(taps), prefill=True)
            hidden.append(scores.hidden)
            self._advance_ready()
        width = self.model.config.d_model
        empty = torch.empty(len(taps), 0, width, dtype=self.model.dtype, device=self.model.device)
        rows = torch.cat([empty, *hidden], dim=1)
        return Scores(self._no_logits(), rows, [self._end // 2] * rows.shape[1])

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep a path of the last scored tree, then `next` (unrun). What hangs below survives, all else is dropped."""
        nodes = [self.scored[i] for i in path]
        if any(node.probe for node in nodes):
            raise ValueError("a probe cannot be committed")
        tip = nodes[-1] if nodes else self.committed[-1]
        if next is not None:
            nodes.append(tip.children.get(next) or Node(next, tip))
        if nodes:
            self._adopt_path(nodes)
        self.scored = []

    def rewind(self, length: int) -> None:
        """Take back committed text to `length` tokens. The new newest token will be run again."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        if length == len(self):
            return
        del self.committed[length:]
        self.scored, self._extras = [], []
        if self.committed:
            tip = self.committed[-1]
            tip.forget()
            self.cache.present[tip.slot] = False
        self._ready = min(self._ready, max(length - 1, 0))

    def end(self) -> None:
        """Close the request: forget the text."""
        self.rewind(0)

    def fork(self) -> "Session":
        """Another text with the same prefix; what is uncommitted stays here."""
        twin = Session(self.model, plan=self.plan, ledger=self.runner.ledger, gate=self.runner.gate)
        twin.runner.cache = twin.cache = self.cache.clone()
        last: Node | None = None
        for node in self.committed:
            last = node.copy(last)
            twin.committed.append(last)
        twin._ready = self._ready
        twin.adopt(self.runner.probes, self.runner.prefix)
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, taps: Sequence[int] = (), plan: Plan | None = None) -> Scores:
        """The target's rows for the root and every node. Runs only what is missing, in one forward."""
        return self._grow(tree, tuple(taps), plan or self.plan, None, head=True)

    def advance(self, tree: TokenTree, layer: int, taps: Sequence[int] = (), head: bool = False) -> Scores:
        """Run a tree up to the end of `layer` layers and leave it there; a later `score` continues.

        With `head`, the logits an exit at this layer would give.
        """
        if not 0 <= layer <= self.model.config.n_layers:
            raise TinyspecError(f"layer {layer} is out of range: {self.model.name} has {self.model.config.n_layers}")
        return self._grow(tree, tuple(taps), self.plan, 2 * layer, head)

    def fill(self, how: Literal["copy", "recompute"], slots: Sequence[int] | None = None) -> None:
        """Give committed tokens that left early the keys and values they lack.

        copy       the state at their exit is copied up: keys and values of the layers above are made from it (CALM)
        recompute  the layers are run after all; this is also what the next `score` does to whatever is left (postpone)
        """
        chosen = range(len(self)) if slots is None else slots
        todo = [self.committed[i] for i in chosen if 0 < self.committed[i].reach < self._end]
        if not todo:
            return
        if how == "recompute":
            self.runner.run(todo, self._end)
        else:
            if any(node.state(node.reach) is None for node in todo):
                raise ValueError("the exit states of these tokens are gone: only 'recompute' can fill them")
            self.runner.run(todo, self._end, copying=True)
        self._advance_ready()

    def adopt(self, rows: Tensor | None, prefix: tuple[Tensor, Tensor] | None = None) -> None:
        """Probe embeddings [m, d], named by ids V, V + 1, ...; and K and V [L, KV, P, hd] that probes alone may see."""
        c = self.model.config
        if rows is not None and rows.shape[-1] != c.d_model:
            raise ValueError(f"probe embeddings are [m, {c.d_model}], got {tuple(rows.shape)}")
        if prefix is not None and (prefix[0].shape[0], *prefix[0].shape[1::2]) != (c.n_layers, c.n_kv_heads, c.head_dim):
            raise ValueError(f"a probe prefix is [{c.n_layers}, {c.n_kv_heads}, P, {c.head_dim}] twice")
        self.runner.probes, self.runner.prefix = rows, prefix

    def view(self, plan: Plan) -> "View":
        """The same weights, text and nodes under another plan."""
        from tinyspec.lm.view import View  # a view stands on a session; this is its front door

        return View(self, plan)

    # ------------------------------------------------------------------ inside

    @property
    def _end(self) -> int:
        return self.plan.sublayers(self.model.config.n_layers)

    def _no_logits(self) -> Tensor:
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.empty(0, self.model.config.vocab_size, dtype=wide, device=self.model.device)

    def _stale(self, nodes: Iterable[Node], plan: Plan | None = None) -> list[Node]:
        plan = plan or self.plan
        end = plan.sublayers(self.model.config.n_layers)
        return [node for node in nodes if not (node.filled or (node.plan == plan and node.reach >= end))]

    def _advance_ready(self) -> None:
        while self._ready < len(self) and not self._stale((self.committed[self._ready],)):
            self._ready += 1

    def _adopt_path(self, nodes: list[Node]) -> None:
        """Make nodes committed: they and the subtree below the last move into contiguous slots."""
        for probe in self._extras:
            probe.detach()
        self._extras = []
        if self.committed:
            self.committed[-1].children = {}
        for node in nodes[:-1]:
            node.children = {}
        first = len(self)
        self.committed.extend(nodes)
        self._seat([*nodes, *nodes[-1].descendants()], first)
        for node in self.committed[max(first - 1, 0) : -1]:
            node.settle(self._end)
        self._advance_ready()

    def _seat(self, nodes: list[Node], first: int) -> None:
        """Give nodes the slots first, first + 1, ..., moving what they have computed."""
        self.cache.reserve(first + len(nodes))
        kept = [node.slot if node.slot >= 0 else first + i for i, node in enumerate(nodes)]
        self.cache.move(kept, first)
        for i, node in enumerate(nodes):
            if node.slot < 0:
                self.cache.present[first + i] = False
            node.slot = first + i

    def _grow(self, tree: TokenTree, taps: tuple[int, ...], plan: Plan, stop: int | None, head: bool) -> Scores:
        """Add the tree's nodes below the newest token, run what is missing under the plan, and read it off."""
        if not self.committed:
            raise TinyspecError("there is no text yet: extend the session with a prompt first")
        root = self.committed[-1]
        self._plant(root, tree)
        end = plan.sublayers(self.model.config.n_layers)
        stop = end if stop is None else min(stop, end)
        rows = [root, *self.scored]
        unique = list(dict.fromkeys(rows))  # equal paths are one node and one row
        behind = self._stale(self.committed[self._ready : -1])  # appended, or left early and not filled
        for node in unique:
            if node.taps != taps and node.reach:
                node.forget()  # states that were not asked for then cannot be shown now
        todo = [n for n in unique if n.plan != plan or n.reach < stop or (head and (n.row is None or n.row_at != stop))]
        together = todo and plan == self.plan and stop == self._end
        while behind and (len(behind) > SLAB or not together):
            self.runner.run(behind[:SLAB], self._end)
            behind = behind[SLAB:]
        if todo:
            self.runner.run([*behind, *todo], stop, heads=todo if head else (), taps=taps, plan=plan)
        logits = torch.stack([n.row for n in rows if n.row is not None]) if head else self._no_logits()
        hidden = [n.hidden for n in rows if n.hidden is not None]
        width = self.model.config.d_model
        states = torch.stack(hidden, dim=1) if taps else self.cache.store.new_empty(0, len(rows), width)
        self._advance_ready()
        return Scores(logits, states, [n.row_at // 2 if head else n.reach // 2 for n in rows])

    def _plant(self, root: Node, tree: TokenTree) -> None:
        """Find or make the node of every tree entry; probes are always made anew."""
        vocabulary = self.model.config.vocab_size
        adopted = 0 if self.runner.probes is None else len(self.runner.probes)
        for probe in self._extras:
            probe.detach()
        self._extras, self.scored = [], []
        free = self._first_free()
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = root if up == ROOT else self.scored[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a guess")
            if not 0 <= token < vocabulary + (adopted if probe else 0):
                raise TinyspecError(f"token id {token} is outside the vocabulary of {vocabulary}")
            node = None if probe else parent.children.get(token)
            if node is None:
                node = Node(token, parent, probe=probe)
                self._extras += [node] if probe else []
            if node.slot < 0:
                if node.position >= self.model.config.max_positions:
                    raise TinyspecError(f"the draft reaches beyond the context of {self.model.config.max_positions}")
                node.slot, free = free, free + 1
                self.cache.reserve(free)
                self.cache.present[node.slot] = False
            self.scored.append(node)

    def _first_free(self) -> int:
        """The slot behind everything that is held."""
        held = [n.slot for n in self.committed[-1].descendants()]
        return max([len(self) - 1, *held]) + 1
