"""A session: one text, the guesses that hang from it, and how far each has been computed.

Guesses are keyed by their path: scoring a tree twice, or growing it depth by depth, runs only what
has not been run. A node remembers under which plan it was computed, how many sublayers it has
reached, and the states it can continue from. That makes draft trees, half-run children, LayerSkip's
continuation and postponed fills one mechanism. The newest committed token is left unrun: it is fed
with the first tree.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.chain import match_chain, score_chain
from tinyspec.lm.forward import ForwardRecord, Plan, Scores
from tinyspec.lm.host import stack
from tinyspec.lm.node import Node
from tinyspec.lm.runner import PREFILL_CHUNK, ForwardFn, Runner
from tinyspec.lm.text import Text
from tinyspec.lm.transformer import Model
from tinyspec.tree import TokenTree

if TYPE_CHECKING:
    from tinyspec.lm.view import View


class Session(Text):
    """One request on one model under one plan (the whole model unless told otherwise).

    `gate` stands in front of `Model.forward`: batching and concurrency are other gates.
    """

    def __init__(
        self,
        model: Model,
        *,
        plan: Plan | None = None,
        forward_log: list[ForwardRecord] | None = None,
        gate: ForwardFn | None = None,
    ):
        self.plan = plan or Plan()
        self.alone = gate is None
        self.runner = Runner(
            model, self.plan, [] if forward_log is None else forward_log, gate or model.forward
        )
        super().__init__(model, self.runner.cache)
        self._ready = 0  # committed tokens before this one are done for good; the newest never is: views rerun it

    # ------------------------------------------------------------------ the text

    @property
    def cache_exact(self) -> bool:
        """Whether the cache is what teacher-forcing the text would give. A session that ran every
        layer says yes.
        """
        self._advance_ready()
        return all(node.exact and not node.filled for node in self.committed[: self._ready])

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens and run all but the last; no logits.

        Shows the hidden states of every position from the one that was newest before (the first, in
        an empty session) up to the last but one, whether they had to be run or not.
        """
        n_layers, hidden_layers = (
            self.model.config.n_layers,
            self._check_hidden_layers(hidden_layers, self._end),
        )
        first = max(len(self) - 1, 0)
        self.append(tokens)
        shown = self.committed[first:-1]
        late = [
            node
            for node in shown
            if node.needs_compute(self.plan, self._end, n_layers, hidden_layers, head=False)
        ]
        todo = [
            *(node for node in self._unfinished_tokens(self._end) if node.position < first),
            *late,
        ]
        for at in range(0, len(todo), PREFILL_CHUNK):
            self.runner.run(
                todo[at : at + PREFILL_CHUNK], self._end, hidden_layers=hidden_layers, prefill=True
            )
        states = self._states(shown, hidden_layers)
        self._advance_ready()
        return Scores(self._no_logits(), states, [self._end // 2] * len(shown))

    def rewind(self, length: int) -> None:
        """Take back committed text to `length` tokens. The new newest token will be run again."""
        super().rewind(length)
        self._ready = min(self._ready, max(length - 1, 0))

    def end(self) -> None:
        """Close the request: forget the text."""
        self.rewind(0)

    def fork(self) -> "Session":
        """Another text with the same prefix; what is uncommitted stays here."""
        twin = Session(
            self.model,
            plan=self.plan,
            forward_log=self.runner.forward_log,
            gate=None if self.alone else self.runner.gate,
        )
        twin.runner.cache = twin.cache = self.cache.clone()
        last: Node | None = None
        for node in self.committed:
            last = node.copy(last)
            twin.committed.append(last)
        twin._ready = self._ready
        twin.set_probe_embeddings(self.runner.probes, self.runner.prefix)
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """The target's rows for the root and every node. Runs only what is missing, in one
        forward.
        """
        rows = None if hidden_layers else match_chain(self, tree)
        if rows is None:
            scores, self.scored = self.score_tree(tree, hidden_layers, self.plan)
        else:
            scores, self.scored = score_chain(self, rows), rows[1:]
        return scores

    def advance(
        self, tree: TokenTree, layer: int, hidden_layers: Sequence[int] = (), head: bool = False
    ) -> Scores:
        """Run a tree up to the end of `layer` layers and leave it there; a later `score` continues.

        With `head`, the logits an exit at this layer would give.
        """
        if not 0 <= layer <= self.model.config.n_layers:
            raise TinyspecError(
                f"layer {layer} is out of range: {self.model.name} has {self.model.config.n_layers}"
            )
        scores, self.scored = self.score_tree(
            tree, hidden_layers, self.plan, stop=2 * layer, head=head
        )
        return scores

    def fill(self, how: Literal["copy", "recompute"], slots: Sequence[int] | None = None) -> None:
        """Give committed tokens that left early the keys and values they lack; all but the newest,
        unless told which.

        copy       the state at their exit is copied up: keys and values of the layers above are
                   made from it (CALM)
        recompute  the layers are run after all; this is also what the next `score` does to whatever
                   is left (postpone)
        """
        n_layers = self.model.config.n_layers
        chosen = [
            self.committed[i] for i in (range(len(self) - 1) if slots is None else sorted(slots))
        ]
        todo = [
            node
            for node in chosen
            if node.sublayers_done > 0
            and node.needs_compute(self.plan, self._end, n_layers, (), head=False)
        ]
        if how == "copy":
            todo = [node for node in todo if not node.filled]
            if any(node.sublayers_valid(self.plan, n_layers) not in node.states for node in todo):
                raise ValueError(
                    "the exit states of these tokens are gone: only 'recompute' can fill them"
                )
        if todo:
            self.runner.run(todo, self._end, copying=how == "copy")
            self._advance_ready()

    def set_probe_embeddings(
        self, rows: Tensor | None, prefix: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Probe embeddings [m, d], named by ids V, V + 1, ...; and K and V [L, KV, P, hd] that
        probes alone may see.
        """
        c = self.model.config
        if rows is not None and rows.shape[-1] != c.d_model:
            raise ValueError(f"probe embeddings are [m, {c.d_model}], got {tuple(rows.shape)}")
        shape = (c.n_layers, c.n_kv_heads, c.head_dim)
        if prefix is not None and any((*part.shape[:2], part.shape[3]) != shape for part in prefix):
            raise ValueError(
                f"a probe prefix is [{c.n_layers}, {c.n_kv_heads}, P, {c.head_dim}] twice"
            )
        self.runner.probes, self.runner.prefix = rows, prefix
        self.adopted = 0 if rows is None else len(rows)

    def replan(self, plan: Plan) -> None:
        """Run what comes from now on under another plan; what was run stays as it is (a window that
        moves on, say).
        """
        self.plan = self.runner.plan = plan

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

    def _check_hidden_layers(self, hidden_layers: Sequence[int], stop: int) -> tuple[int, ...]:
        """The layers a drafter asks to see: those that are run, or the top (n_layers), which the
        head reads.
        """
        for tap in hidden_layers:
            if not (0 <= 2 * tap <= stop or tap == self.model.config.n_layers):
                raise ValueError(f"tap {tap} is not among the {stop // 2} layers that are run")
        return tuple(hidden_layers)

    def _states(self, nodes: Sequence[Node], hidden_layers: tuple[int, ...]) -> Tensor:
        """Return what these nodes show: [layers asked for, n, d]."""
        if not (nodes and hidden_layers):
            return torch.empty(
                len(hidden_layers),
                len(nodes),
                self.model.config.d_model,
                dtype=self.model.stream,
                device=self.model.device,
            )
        return torch.stack(
            [torch.stack([node.shown[tap] for node in nodes]) for tap in hidden_layers]
        )

    def _unfinished_tokens(self, stop: int) -> list[Node]:
        """Committed tokens before the newest that are not at `stop` yet: appended, or left early
        and not filled.
        """
        n_layers, late = self.model.config.n_layers, self.committed[self._ready : -1]
        return [
            n
            for n in late
            if not n.filled and n.needs_compute(self.plan, stop, n_layers, (), head=False)
        ]

    def _advance_ready(self) -> None:
        n_layers = self.model.config.n_layers
        while self._ready < len(self) - 1:
            node = self.committed[self._ready]
            if not node.filled and node.needs_compute(
                self.plan, self._end, n_layers, (), head=False
            ):
                break
            node.drop_outputs()
            if not node.filled:  # one that left early may be run further
                node.states = {}
            self._ready += 1

    def _adopt_path(self, nodes: list[Node]) -> None:
        """What a view computed above tokens that are committed now looked at them as the view ran
        them: that goes.
        """
        super()._adopt_path(nodes)
        for node in (nodes[-1], *nodes[-1].descendants()) if nodes else ():
            if node.invalidate_beyond(self.plan, self.model.config.n_layers):
                self.cache.present[node.slot, (node.sublayers_done + 1) // 2 :] = False

    def score_tree(
        self,
        tree: TokenTree,
        hidden_layers: Sequence[int],
        plan: Plan,
        stop: int | None = None,
        head: bool = True,
        trunk: Sequence[Node] = (),
    ) -> tuple[Scores, list[Node]]:
        """Hang the tree below the newest token (or a view's trunk), run what is missing, and read
        it off.

        Returns the scores, and the node of every tree entry.
        """
        n_layers = self.model.config.n_layers
        end = plan.sublayers(n_layers)
        stop = end if stop is None else min(stop, end)
        hidden_layers = self._check_hidden_layers(hidden_layers, stop)
        above = [self._newest(), *trunk]
        nodes = self._attach(above, tree)
        rows = [above.pop(), *nodes]
        todo = [
            n
            for n in dict.fromkeys(rows)
            if n.needs_compute(plan, stop, n_layers, hidden_layers, head)
        ]  # equal paths are one row
        above = [n for n in above if n.needs_compute(plan, stop, n_layers, (), head=False)]
        behind = self._unfinished_tokens(min(stop, self._end))
        while behind and (plan != self.plan or len(behind) > PREFILL_CHUNK):
            self.runner.run(behind[:PREFILL_CHUNK], min(stop, self._end))
            behind = behind[PREFILL_CHUNK:]
        fresh = None
        if todo or above or behind:
            fresh = self.runner.run(
                [*behind, *above, *todo],
                stop,
                heads=todo if head else (),
                hidden_layers=hidden_layers,
                plan=plan,
            )
        if not head:
            logits = self._no_logits()
        elif fresh is not None and todo == rows:
            logits = fresh.logits
        else:
            logits = stack([n.row for n in rows if n.row is not None])
        scores = Scores(logits, self._states(rows, hidden_layers), [stop // 2] * len(rows))
        self._advance_ready()
        return scores, nodes
