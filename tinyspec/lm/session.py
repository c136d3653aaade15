"""A session: one text, the draft tokens that hang from it, and how far each has been computed.

Draft tokens are nodes, keyed by their path: scoring a tree twice, or growing it depth by depth,
runs only what has not been run. A node remembers under which plan it was computed, how many
sublayers it has done, and the states from which it can continue. Draft trees, half-computed tokens,
LayerSkip's continuation and postponed K/V fills are therefore one mechanism.

Committed tokens stand in cache slots 0..n-1 (slot == position). Uncommitted nodes stand after them,
a parent before its children. Committing a path moves it, and the nodes below it, to where they
belong. The newest committed token is not run: it is fed with the first tree.

A view is the same session under another plan, with a text of its own beyond the session's.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.engine import NextTokenFn
from tinyspec.lm.forward import Cache, ForwardBatch, ForwardFn, ForwardRecord, Plan, Scores, Seen
from tinyspec.lm.host import stack, to_numpy
from tinyspec.lm.transformer import Transformer
from tinyspec.tree import ROOT, TokenTree

PREFILL_CHUNK = 512  # positions of a long prompt that run together: bounds the attention mask
FULL = Plan()


class Node:
    """A committed token or an uncommitted draft token.

    slot            cache slot of its keys and values (-1: none yet)
    plan            the plan it was computed under
    sublayers_done  sublayers computed under that plan
    states          sublayer -> state [d] that enters it, to continue from
    row             logits [V], computed from the state after `row_at` sublayers
    shown           layer -> state [d] that a drafter asked to see
    filled          keys and values above `sublayers_done` were made without running the layers
    exact           none of the tokens it attended to was filled
    """

    __slots__ = (
        "children",
        "exact",
        "filled",
        "parent",
        "plan",
        "position",
        "probe",
        "row",
        "row_at",
        "shown",
        "slot",
        "states",
        "sublayers_done",
        "token",
    )  # fmt: skip

    def __init__(self, token: int, parent: "Node | None", probe: bool = False):
        self.token, self.parent, self.probe = token, parent, probe
        self.position: int = 0 if parent is None else parent.position + 1
        self.slot = -1
        self.children: dict[int, Node] = {}
        if parent is not None and not probe:
            parent.children[token] = self
        self.forget()

    def forget(self) -> None:
        """Reset to a token that was never computed."""
        self.plan, self.sublayers_done, self.row_at = FULL, 0, 0
        self.states: dict[int, Tensor] = {}
        self.row: Tensor | None = None
        self.shown: dict[int, Tensor] = {}
        self.filled, self.exact = False, True

    @property
    def is_begun(self) -> bool:
        """Whether anything of it was computed, so that it would continue from there."""
        return bool(self.sublayers_done or self.states or self.filled)

    def sublayers_valid(self, plan: Plan, n_layers: int) -> int:
        """Return how many of the sublayers it has done hold under this plan."""
        if plan == self.plan:
            return self.sublayers_done
        return min(self.sublayers_done, self.plan.differs(plan, n_layers))

    def needs_compute(
        self, plan: Plan, stop: int, n_layers: int, hidden_layers: Iterable[int], head: bool
    ) -> bool:
        """Return whether it must be run to have these hidden layers at `stop` under `plan`.

        With `head`, its logits are wanted too.
        """
        if (
            self.plan != plan
            or self.sublayers_done < stop
            or (head and (self.row is None or self.row_at != stop))
        ):
            return True
        return any(
            layer not in self.shown or (layer == n_layers and self.row_at != stop)
            for layer in hidden_layers
        )

    def resume_point(
        self, plan: Plan, stop: int, n_layers: int, hidden_layers: Iterable[int] = ()
    ) -> tuple[int, Tensor | None]:
        """Return the last sublayer it can enter at on the way to `stop`, and its state there.

        The state is None at sublayer 0, where it enters from its embedding. A hidden layer that was
        not asked for before lies on the way, so the token enters below it.
        """
        agreed = min(self.sublayers_valid(plan, n_layers), stop)
        for layer in hidden_layers:
            if layer < n_layers and (layer not in self.shown or 2 * layer > agreed):
                agreed = min(agreed, 2 * layer)
        at = max((at for at in self.states if at <= agreed), default=0)
        return at, self.states.get(at)

    def mark_computed(
        self,
        plan: Plan,
        stop: int,
        n_layers: int,
        states: dict[int, Tensor],
        row: Tensor | None = None,
        start: int = 0,
        hidden: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Record that it was run from sublayer `start` to `stop` under `plan`.

        states  the states that entered sublayers after `start`
        row     its logits, if they were wanted
        hidden  the states of the layers that a drafter asked to see; None: it asked for none
        """
        above = self.parent
        sees_exact = above is None or (above.exact and not above.filled)
        if not self.sublayers_done and stop and hidden is None and not self.shown:
            self.exact = sees_exact
            self.plan, self.sublayers_done, self.filled = plan, stop, False
            self.row, self.row_at, self.states = row, stop, states
            return  # the usual case: it was never run before, so it started at 0
        self.exact = sees_exact and (start == 0 or self.exact)
        if self.plan != plan:  # what was shown below the parting of the plans still holds
            self.shown = {layer: s for layer, s in self.shown.items() if 2 * layer <= start}
        if self.plan != plan or self.filled or stop > self.sublayers_done:
            self.plan, self.sublayers_done, self.row, self.filled = plan, stop, None, False
            self.states = {at: state for at, state in self.states.items() if 0 < at <= start}
        self.states |= states
        if self.row_at != stop:  # what the head read, and its logits, were those of another exit
            self.row = None
            self.shown.pop(n_layers, None)
        self.shown |= hidden or {}
        self.row, self.row_at = self.row if row is None else row, stop

    def invalidate_beyond(self, plan: Plan, n_layers: int) -> bool:
        """Keep only what also holds under this plan, and return whether anything had to go."""
        agreed = self.sublayers_valid(plan, n_layers)
        if agreed == self.sublayers_done:
            return False
        self.plan, self.sublayers_done, self.row, self.row_at = plan, agreed, None, 0
        self.states = {at: state for at, state in self.states.items() if at <= agreed}
        self.shown = {tap: state for tap, state in self.shown.items() if 2 * tap <= agreed}
        return True

    def drop_outputs(self) -> None:
        """Free its logits and hidden states: nobody asks for those of a token that is not newest."""
        self.row, self.shown = None, {}

    def release(self) -> None:
        """Drop it and its descendants, and free their tensors.

        Parents and children refer to each other, so nothing would be freed before a garbage
        collection.
        """
        for node in (self, *self.descendants()):
            node.forget()
            node.parent, node.slot, node.children = None, -1, {}

    def descendants(self) -> "list[Node]":
        """Return all nodes below it, parents before children."""
        below = list(self.children.values())
        for node in below:  # the list grows while the loop walks it
            below.extend(node.children.values())
        return below

    def copy(self, parent: "Node | None") -> "Node":
        """Return the same computed token under another parent, without its children."""
        twin = Node(self.token, None)
        for name in self.__slots__:
            if name not in ("parent", "children"):
                setattr(twin, name, getattr(self, name))
        twin.parent, twin.states, twin.shown = parent, dict(self.states), dict(self.shown)
        return twin


class Session:
    """One request on one model under one plan (the whole model unless another is given).

    gate  what is called to compute: `Transformer.forward`, or a batch in front of it; None: forward
    """

    def __init__(
        self,
        model: Transformer,
        *,
        plan: Plan | None = None,
        forward_log: list[ForwardRecord] | None = None,
        gate: ForwardFn | None = None,
    ):
        self.model, self.plan = model, plan or FULL
        self.forward_log: list[ForwardRecord] = [] if forward_log is None else forward_log
        self.is_alone = gate is None
        self.gate: ForwardFn = gate or model.forward
        self.cache = Cache(model.config, model.dtype, model.device)
        self.committed: list[Node] = []
        self.scored: list[Node] = []  # nodes of the last tree, by its indices
        self.probes: Tensor | None = None  # embeddings [m, d] of the ids V..V+m-1
        self.prefix: tuple[Tensor, Tensor] | None = (
            None  # K, V [L, KV, P, hd] that probes alone see
        )
        self._extras: list[Node] = []  # probes of the last tree
        # Committed tokens before this one are computed for good. The newest never is: views run it
        # again.
        self._ready = 0

    # ------------------------------------------------------------------ the text

    @property
    def text(self) -> list[int]:
        """Return the committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    @property
    def cache_exact(self) -> bool:
        """Whether the cache is what a plain pass over the text would leave.

        True for a session that ran every layer of every token.
        """
        self._advance_ready()
        return all(node.exact and not node.filled for node in self.committed[: self._ready])

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens without running anything.

        Nodes that already hold these tokens are kept with what was computed for them.
        """
        tokens = list(tokens)
        self._check_tokens(tokens)
        fresh: list[Node] = []
        tip = self.committed[-1] if self.committed else None
        for token in tokens:
            tip = (tip.children.get(token) if tip else None) or Node(token, tip)
            fresh.append(tip)
        self._commit_nodes(fresh)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens and run all but the last; return no logits.

        The hidden states are those of every position from the one that was newest before (the
        first, in an empty session) up to the last but one, whether they had to be run or not.
        """
        n_layers = self.model.config.n_layers
        hidden_layers = self._check_hidden_layers(hidden_layers, self._end)
        first = max(len(self) - 1, 0)
        self.append(tokens)
        shown = self.committed[first:-1]
        late = [
            node
            for node in shown
            if node.needs_compute(self.plan, self._end, n_layers, hidden_layers, head=False)
        ]
        before = [node for node in self._unfinished_tokens(self._end) if node.position < first]
        todo = [*before, *late]
        for at in range(0, len(todo), PREFILL_CHUNK):
            chunk = todo[at : at + PREFILL_CHUNK]
            self.run(chunk, self._end, hidden_layers=hidden_layers, prefill=True)
        states = self._hidden_states(shown, hidden_layers)
        self._advance_ready()
        return Scores(self._no_logits(), states, [self._end // 2] * len(shown))

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep a path of the last scored tree, then `next`, which is not run.

        Nodes below the last committed token stay; all other nodes are dropped.
        """
        tip = self._newest()
        nodes = [self.scored[i] for i in path]
        for node in nodes:
            if node.probe:
                raise ValueError("a probe cannot be committed")
            if node.parent is not tip:
                raise ValueError(
                    f"{list(path)} is not a path from the newest token down the last scored tree"
                )
            tip = node
        if next is not None:
            self._check_tokens((next,), len(nodes))
            nodes.append(tip.children.get(next) or Node(next, tip))
        self._commit_nodes(nodes)

    def rewind(self, length: int) -> None:
        """Take back committed text to `length` tokens. The new newest token will be run again."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        if length == len(self):
            return
        for node in list(self.committed[-1].children.values()):
            node.release()
        del self.committed[length:]
        self.scored, self._extras = [], []
        self._ready = min(self._ready, max(length - 1, 0))
        if self.committed:
            tip = self.committed[-1]
            tip.forget()
            tip.children = {}
            self.cache.mark_missing(tip.slot)

    def end(self) -> None:
        """Close the request: forget the text."""
        self.rewind(0)

    def fork(self) -> "Session":
        """Return a session with the same committed text; uncommitted nodes stay here."""
        twin = Session(
            self.model,
            plan=self.plan,
            forward_log=self.forward_log,
            gate=None if self.is_alone else self.gate,
        )
        twin.cache = self.cache.clone()
        last: Node | None = None
        for node in self.committed:
            last = node.copy(last)
            twin.committed.append(last)
        twin._ready = self._ready
        twin.set_probe_embeddings(self.probes, self.prefix)
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the target's scores of the root and every node, running what is missing.

        There is at most one forward pass of the tree's nodes.
        """
        rows = None if hidden_layers else self._match_chain(tree)
        if rows is None:
            scores, self.scored = self.score_tree(tree, hidden_layers, self.plan)
            return scores
        stop = 2 * self.model.config.n_layers
        late = self.committed[self._ready : -1]
        todo = [*late, *(node for node in rows if not node.sublayers_done)]
        logits = self.run(todo, stop, chain_heads=len(late)).logits if todo else None
        if logits is None or len(logits) < len(rows):
            logits = stack([node.row for node in rows if node.row is not None])
        self._advance_ready()
        self.scored = rows[1:]
        return Scores(logits, self._hidden_states(rows, ()), [stop // 2] * len(rows))

    def draft_chain(self, most: int, choose: NextTokenFn) -> bool:
        """Draft tokens one after another from the newest token on, as a draft model does.

        choose(logits [V]) returns the token after each of at most `most` positions; None: no more.
        The session keeps what was run as if it had scored each draft as a tree. Returns False if
        the fast path does not apply: then nothing was chosen.
        """
        tip, c = self._newest(), self.model.config
        self._advance_ready()
        if self._ready < len(self) - 1:  # after a draft that was accepted whole, its last token
            self.score(TokenTree())
        stop, is_begun = 2 * c.n_layers, tip.is_begun
        if is_begun and tip.needs_compute(self.plan, stop, c.n_layers, (), True):
            return False
        first = len(self) - (not is_begun)  # the slot of the first token that is run
        is_plain = self.is_alone and self.plan.whole and tip.slot == tip.position
        if (
            not is_plain
            or self._extras
            or tip.children
            or self.model.engine is None
            or first + most > c.max_positions
            or not self.cache.present[:first].all()
        ):
            return False
        above, row = tip.parent, tip.row
        token: int | None = tip.token
        if row is not None:
            above, most, token = tip, most - 1, choose(to_numpy(row))
        if token is None or most == 0:
            return True
        self.cache.reserve(first + most)
        ran = self.model.chain(self.cache, token, first, most, choose, self.forward_log)
        self.cache.mark_present(slice(first, first + len(ran)))
        self.scored = []
        for token, row, state in ran:
            node = tip if above is tip.parent else Node(token, above)
            node.slot = node.position
            node.mark_computed(self.plan, stop, c.n_layers, {stop: state}, row)
            if node is not tip:
                self.scored.append(node)
            above = node
        return True

    def advance(
        self, tree: TokenTree, layer: int, hidden_layers: Sequence[int] = (), head: bool = False
    ) -> Scores:
        """Run a tree up to the end of `layer` layers and leave it there; a later `score` continues.

        With `head`, return the logits that an exit at this layer would give.
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
        """Give committed tokens that exited early the keys and values that they lack.

        All tokens but the newest, unless `slots` names some.

        copy       the state at their exit is copied up: keys and values of the layers above are
                   made from it (CALM)
        recompute  the layers are run after all; this is also what the next `score` does to whatever
                   is left (postpone)
        """
        n_layers = self.model.config.n_layers
        chosen = range(len(self) - 1) if slots is None else sorted(slots)
        todo = [
            node
            for node in (self.committed[i] for i in chosen)
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
            self.run(todo, self._end, copying=how == "copy")
            self._advance_ready()

    def set_probe_embeddings(
        self, rows: Tensor | None, prefix: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Set the probe embeddings [m, d], named by the ids V, V + 1, ...

        prefix  K and V [L, KV, P, hd] that only probes attend to
        """
        c = self.model.config
        if rows is not None and rows.shape[-1] != c.d_model:
            raise ValueError(f"probe embeddings are [m, {c.d_model}], got {tuple(rows.shape)}")
        shape = (c.n_layers, c.n_kv_heads, c.head_dim)
        if prefix is not None and any((*part.shape[:2], part.shape[3]) != shape for part in prefix):
            raise ValueError(
                f"a probe prefix is [{c.n_layers}, {c.n_kv_heads}, P, {c.head_dim}] twice"
            )
        self.probes, self.prefix = rows, prefix

    def replan(self, plan: Plan) -> None:
        """Run what comes from now on under another plan, such as a window that moves on.

        What was run stays as it is.
        """
        self.plan = plan

    def view(self, plan: Plan) -> "View":
        """Return the same weights, text and nodes under another plan."""
        return View(self, plan)

    def score_tree(
        self,
        tree: TokenTree,
        hidden_layers: Sequence[int],
        plan: Plan,
        stop: int | None = None,
        head: bool = True,
        trunk: Sequence[Node] = (),
    ) -> tuple[Scores, list[Node]]:
        """Attach a tree to the newest token (or a view's trunk) and run what is missing of it.

        This is `score` for any tree, plan and exit. Returns the scores, and the node of every tree
        entry.
        """
        n_layers = self.model.config.n_layers
        end = plan.sublayers(n_layers)
        stop = end if stop is None else min(stop, end)
        hidden_layers = self._check_hidden_layers(hidden_layers, stop)
        above = [self._newest(), *trunk]
        nodes = self._attach(above, tree)
        rows = [above.pop(), *nodes]
        todo = [
            node
            for node in dict.fromkeys(rows)  # two siblings with one token are one node
            if node.needs_compute(plan, stop, n_layers, hidden_layers, head)
        ]
        above = [n for n in above if n.needs_compute(plan, stop, n_layers, (), head=False)]
        late = self._unfinished_tokens(min(stop, self._end))
        while late and (plan != self.plan or len(late) > PREFILL_CHUNK):
            self.run(late[:PREFILL_CHUNK], min(stop, self._end))
            late = late[PREFILL_CHUNK:]
        fresh = None
        if todo or above or late:
            fresh = self.run(
                [*late, *above, *todo],
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
            logits = stack([node.row for node in rows if node.row is not None])
        states = self._hidden_states(rows, hidden_layers)
        self._advance_ready()
        return Scores(logits, states, [stop // 2] * len(rows)), nodes

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
        chain_heads: int | None = None,
    ) -> Scores:
        """Run one forward pass over nodes, parents before children, up to sublayer `stop`.

        Each node continues from where it was left, and is told what was computed.

        heads        nodes whose logits are wanted
        copying      make keys and values from the states where the nodes stand, run no layer
        chain_heads  the fast case: the nodes follow one another, each in the slot of its position
                     and after all that it attends to, none of them begun, through the whole model;
                     logits are wanted from the node of this index on
        """
        plan, n_layers = plan or self.plan, self.model.config.n_layers
        slots = [node.slot for node in nodes]
        seen: list[Seen]
        snapshot: tuple[int, ...]
        entering: list[Tensor] = []
        given = probing = None
        if chain_heads is not None:
            positions, starts, snapshot = slots, [0] * len(slots), (stop,)
            high, seen = slots[-1] + 1, [(slot + 1, ()) for slot in slots]
            head_rows = list(range(chain_heads, len(slots)))
        else:
            positions = [node.position for node in nodes]
            resumed = [node.resume_point(plan, stop, n_layers, hidden_layers) for node in nodes]
            starts = [start for start, _ in resumed]
            states = [
                self._probe_embedding(node) if state is None else state
                for node, (_, state) in zip(nodes, resumed, strict=True)
            ]
            entering = [state for state in states if state is not None]
            given = [state is not None for state in states] if entering else None
            high, seen = visibility(nodes)
            wanted = set(heads)
            head_rows = [i for i, node in enumerate(nodes) if node in wanted]
            # States are kept where the plan stops, and where the session's own plan would part.
            parting = min(stop, plan.differs(self.plan, n_layers))
            snapshot = () if prefill else tuple({stop, parting})
            if self.prefix is not None and any(node.probe for node in nodes):
                probing = torch.tensor([node.probe for node in nodes], device=self.model.device)
        if not copying:
            self._check_keys(slots, starts, stop, plan, seen, high)
        feed = ForwardBatch(
            cache=self.cache,
            plan=plan,
            tokens=[node.token for node in nodes],
            positions=positions,
            slots=slots,
            starts=starts,
            stop=stop,
            high=high,
            seen=seen,
            entering=torch.stack(entering) if entering else None,
            given=given,
            heads=head_rows,
            hidden_layers=hidden_layers,
            snapshot=snapshot,
            probes=probing,
            prefix=None if probing is None else self.prefix,
            copying=copying,
            prefill=prefill,
            forward_log=self.forward_log,
        )
        scores = self.gate([feed])[0]
        rows: list[Tensor | None]
        if chain_heads is not None:
            self.cache.mark_present(slice(slots[0], high))
            rows = [*[None] * chain_heads, *scores.logits]
            for node, row, state in zip(nodes, rows, feed.kept[stop], strict=True):
                node.mark_computed(plan, stop, n_layers, {stop: state}, row)
            return scores
        logits = dict(zip(head_rows, scores.logits, strict=True))
        for i, (node, start) in enumerate(zip(nodes, starts, strict=True)):
            first, last = (start + 1) // 2, (stop + 1) // 2  # the layers whose attention was run
            if node.plan != plan or node.filled:
                self.cache.mark_missing(node.slot, first)
            self.cache.mark_present(node.slot, plan.attention_layers(first, last))
            if copying:
                node.filled = True
                continue
            left = {at: kept[i] for at, kept in feed.kept.items() if at > start}
            hidden = {
                layer: scores.hidden[k, i]
                for k, layer in enumerate(hidden_layers)
                if 2 * layer >= start or layer == n_layers
            }
            node.mark_computed(
                plan, stop, n_layers, left, logits.get(i), start, hidden if hidden_layers else None
            )
        return scores

    # ------------------------------------------------------------------ inside

    @property
    def _end(self) -> int:
        """The sublayer where the session's own plan stops."""
        return self.plan.sublayers(self.model.config.n_layers)

    def _newest(self) -> Node:
        if not self.committed:
            raise TinyspecError("there is no text yet: extend the session with a prompt first")
        return self.committed[-1]

    def _check_tokens(self, tokens: Sequence[int], more: int = 0) -> None:
        """Raise TinyspecError for ids outside the vocabulary, and for a text that is too long.

        more  how many draft tokens stand between the text and these tokens
        """
        c = self.model.config
        for token in tokens:
            if not 0 <= token < c.vocab_size:
                raise TinyspecError(f"token id {token} is outside the vocabulary of {c.vocab_size}")
        length = len(self) + more + len(tokens)
        if length > c.max_positions:
            raise TinyspecError(
                f"{length} tokens do not fit into the context of {c.max_positions} tokens of {self.model.name}: "
                "shorten the prompt"
            )

    def _check_hidden_layers(self, hidden_layers: Sequence[int], stop: int) -> tuple[int, ...]:
        """Return the layers a drafter asks for; raise ValueError for one that is not run.

        The top layer (n_layers), which the head reads, may always be asked for.
        """
        for layer in hidden_layers:
            if not (0 <= 2 * layer <= stop or layer == self.model.config.n_layers):
                raise ValueError(f"tap {layer} is not among the {stop // 2} layers that are run")
        return tuple(hidden_layers)

    def _check_keys(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        stop: int,
        plan: Plan,
        seen: Sequence[Seen],
        high: int,
    ) -> None:
        """Raise RuntimeError if attention would read a slot that has no keys in some layer."""
        own = set(slots)
        low = min(own)
        if self.cache.present[:low].all() and all(
            slot < low or slot in own for _, more in seen for slot in more
        ):
            prefixes = [prefix for prefix, _ in seen if prefix > low]
            if not prefixes or own.issuperset(range(low, max(prefixes))):
                return  # the usual case, at little cost
        read: NDArray[np.bool_] = np.zeros(high, dtype=np.bool_)
        read[: max(prefix for prefix, _ in seen)] = True
        read[[slot for _, more in seen for slot in more]] = True
        read[slots] = False  # these nodes bring their own keys
        layers = [
            layer
            for layer in range((min(starts) + 1) // 2, (stop + 1) // 2)
            if 2 * layer not in plan.skip
        ]
        old = np.flatnonzero(read)
        missing = np.argwhere(~self.cache.present[np.ix_(old, np.array(layers, dtype=int))])
        if len(missing):
            slot, column = int(old[missing[0][0]]), int(missing[0][1])
            raise RuntimeError(
                f"slot {slot} has no keys in layer {layers[column]}: fill() it or run it first"
            )

    def _no_logits(self) -> Tensor:
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.empty(0, self.model.config.vocab_size, dtype=wide, device=self.model.device)

    def _hidden_states(self, nodes: Sequence[Node], hidden_layers: tuple[int, ...]) -> Tensor:
        """Return the states of these nodes: [layers asked for, n, d]."""
        if not (nodes and hidden_layers):
            shape = len(hidden_layers), len(nodes), self.model.config.d_model
            return torch.empty(shape, dtype=self.model.stream, device=self.model.device)
        return torch.stack(
            [torch.stack([node.shown[layer] for node in nodes]) for layer in hidden_layers]
        )

    def _probe_embedding(self, node: Node) -> Tensor | None:
        """Return the embedding that an id beyond the vocabulary names; None for an ordinary id."""
        vocabulary = self.model.config.vocab_size
        if node.token < vocabulary or self.probes is None:
            return None
        return self.probes[node.token - vocabulary].to(self.model.device)

    def _unfinished_tokens(self, stop: int) -> list[Node]:
        """Return committed tokens before the newest that are not at `stop` yet.

        They were appended, or exited early and were not filled.
        """
        n_layers = self.model.config.n_layers
        return [
            node
            for node in self.committed[self._ready : -1]
            if not node.filled and node.needs_compute(self.plan, stop, n_layers, (), head=False)
        ]

    def _advance_ready(self) -> None:
        """Move `_ready` past the tokens that are computed, and free what nobody asks for again."""
        n_layers = self.model.config.n_layers
        while self._ready < len(self) - 1:
            node = self.committed[self._ready]
            if not node.filled and node.needs_compute(
                self.plan, self._end, n_layers, (), head=False
            ):
                break
            node.drop_outputs()
            if not node.filled:  # a token that exited early may be run further
                node.states = {}
            self._ready += 1

    def _match_chain(self, tree: TokenTree) -> list[Node] | None:
        """Return the newest token and the nodes of a single-branch draft, in their slots.

        None if the fast path does not apply. It covers plain decoding steps, a draft model's own
        steps and chains, on the whole model: every node stands in the slot equal to its position,
        none is partly computed, and what is missing stands at the end. For these, `score_tree`
        would find out the same at a cost that a model of a tenth of a millisecond notices.
        Branches, probes and skipped layers are left to it.
        """
        self._advance_ready()
        tokens, n, committed, c = tree.tokens, len(tree.tokens), self.committed, self.model.config
        if self._extras or not committed or not self.plan.whole or (n and any(tree.probe)):
            return None
        if tuple(tree.parents) != tuple(range(ROOT, n - 1)):
            return None
        late, node, is_single = committed[self._ready : -1], committed[-1], True
        rows = [node]
        for token in tokens:
            is_single = is_single and len(node.children) < 2
            if (below := node.children.get(token)) is None:
                break
            rows.append(node := below)
        stop, done = 2 * c.n_layers, 0
        while (
            not late
            and done < len(rows)
            and not rows[done].needs_compute(self.plan, stop, c.n_layers, (), True)
        ):
            done += 1
        if any(node.slot != node.position for node in (*late, *rows)):
            return None
        if any(node.sublayers_done or node.states or node.filled for node in (*late, *rows[done:])):
            return None  # they continue from where they were left
        fresh, high = tokens[len(rows) - 1 :], len(committed) + n
        if fresh and (
            not is_single
            or rows[-1].children
            or high > c.max_positions
            or not 0 <= min(fresh) <= max(fresh) < c.vocab_size
        ):
            return None  # other nodes hold the slots, or `score_tree` has an error to report
        if len(late) + n >= PREFILL_CHUNK:
            return None
        self.cache.reserve(high)
        for token in fresh:
            rows.append(Node(token, rows[-1]))
            rows[-1].slot = rows[-1].position
        return rows

    def _attach(self, above: Sequence[Node], tree: TokenTree) -> list[Node]:
        """Find or make the node of every tree entry below `above`; probes are always made anew."""
        vocabulary, limit = self.model.config.vocab_size, self.model.config.max_positions
        probe_ids = 0 if self.probes is None else len(self.probes)
        self._drop_probes()
        held = [node.slot for node in self.committed[-1].descendants()]
        free = max([len(self) - 1, *held]) + 1
        attached: list[Node] = []
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = above[-1] if up == ROOT else attached[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a guess")
            if not 0 <= token < vocabulary + (probe_ids if probe else 0):
                raise TinyspecError(f"token id {token} is outside the vocabulary of {vocabulary}")
            node = None if probe else parent.children.get(token)
            if node is None:
                if parent.position + 1 >= limit:
                    raise TinyspecError(f"the draft reaches beyond the context of {limit}")
                node = Node(token, parent, probe=probe)
                self._extras += [node] if probe else []
            attached.append(node)
        for node in (*above, *attached):
            if node.slot < 0:
                node.slot, free = free, free + 1
                self.cache.reserve(free)
                self.cache.mark_missing(node.slot)
        return attached

    def _commit_nodes(self, nodes: list[Node]) -> None:
        """Commit these nodes: they and the nodes below the last one move into contiguous slots.

        All other uncommitted nodes are dropped.
        """
        self._drop_probes()
        self.scored = []
        if not nodes:
            return
        first = len(self)
        for node, child in pairwise((*self.committed[-1:], *nodes)):
            for other in node.children.values():
                if other is not child:
                    other.release()
            node.children = {}
        self.committed.extend(nodes)
        below = nodes[-1].descendants()
        self._assign_slots([*nodes, *below], first)
        for node in self.committed[max(first - 1, 0) : -1]:
            node.drop_outputs()
        # What a view computed above these tokens attended to them as the view ran them: that goes.
        for node in (nodes[-1], *below):
            if node.invalidate_beyond(self.plan, self.model.config.n_layers):
                self.cache.mark_missing(node.slot, (node.sublayers_done + 1) // 2)

    def _assign_slots(self, nodes: list[Node], first: int) -> None:
        """Give nodes the slots first, first + 1, ..., moving their keys and values."""
        self.cache.reserve(first + len(nodes))
        old = [node.slot if node.slot >= 0 else first + i for i, node in enumerate(nodes)]
        self.cache.move(old, first)
        for i, node in enumerate(nodes):
            if node.slot < 0:
                self.cache.mark_missing(first + i)
            node.slot = first + i

    def _drop_probes(self) -> None:
        for probe in self._extras:
            probe.release()
        self._extras = []


def visibility(nodes: Sequence[Node]) -> tuple[int, list[Seen]]:
    """Return the slots in use, and what each node attends to: a prefix, and other slots.

    A node attends to every committed slot up to its own, to its ancestors and to itself; never to a
    sibling. Ancestors stand in lower slots, so a node whose slot equals its position has nothing
    but ancestors in the slots below its own.
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


class View:
    """The text and nodes of a session under another plan.

    Its text is the session's committed text plus its trunk, a chain of the session's uncommitted
    nodes. So a decoder can run on a view (LayerSkip's draft, TriForce's middle level) while the
    session holds the trunk as nodes that it may verify. What both plans compute alike is computed
    once.
    """

    cache_exact = False  # its nodes are computed under the plan

    def __init__(self, session: Session, plan: Plan):
        self.session, self.plan = session, plan
        self._trunk: list[Node] = []
        self._nodes: list[Node] = []  # of the last tree, by its indices
        self._at: int | None = None  # rewound into the session's text: where; None: at its end

    @property
    def text(self) -> list[int]:
        self._follow()
        return [*self.session.text, *(node.token for node in self._trunk)][: self._at]

    def __len__(self) -> int:
        self._follow()
        return len(self.session) + len(self._trunk) if self._at is None else self._at

    def _follow(self) -> None:
        """Drop the part of the trunk that the session has committed.

        Drop all of it if the session has committed something else.
        """
        committed = self.session.committed
        kept = [node for node in self._trunk if node.position >= len(committed)]
        # Asking the node for its parent would not do: a token that was committed and taken back
        # still names the parent that has dropped it.
        hangs = bool(kept and committed) and committed[-1].children.get(kept[0].token) is kept[0]
        self._trunk = kept if hangs else []
        if self._at is not None and self._at >= len(self.session):
            self._at = None

    def append(self, tokens: Iterable[int]) -> None:
        """Extend the trunk by these tokens; inside the session's own text they must agree with it."""
        self._follow()
        self._nodes = []
        limit = self.session.model.config.max_positions
        for token in tokens:
            if self._at is not None:
                if self.session.committed[self._at].token != token:
                    raise ValueError("a view cannot leave its session's committed text")
                self._at += 1
                self._at = None if self._at == len(self.session) else self._at
                continue
            if not 0 <= token < self.session.model.config.vocab_size:
                raise TinyspecError(f"token id {token} is outside the vocabulary")
            if not self.session.committed:
                raise TinyspecError(
                    "there is no text yet: extend the view's session with a prompt first"
                )
            tip = self._trunk[-1] if self._trunk else self.session.committed[-1]
            if tip.position + 1 >= limit:
                raise TinyspecError(f"the draft reaches beyond the context of {limit}")
            self._trunk.append(tip.children.get(token) or type(tip)(token, tip))

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens to the trunk. They run with the next tree; no hidden states are
        shown.
        """
        self.append(tokens)
        return self.session.extend((), hidden_layers)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the scores of the newest token and the tree under the view's plan."""
        self._follow()
        if self._at is not None:
            raise ValueError("the view stands inside its session's text: extend it first")
        scores, self._nodes = self.session.score_tree(
            tree, hidden_layers, self.plan, trunk=self._trunk
        )
        return scores

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Extend the trunk by a path of the last tree, then `next`."""
        self._follow()
        nodes = [self._nodes[i] for i in path]
        for tip, node in pairwise(
            (self._trunk[-1] if self._trunk else self.session.committed[-1], *nodes)
        ):
            if node.probe or node.parent is not tip:
                raise ValueError(f"{list(path)} is not a path of guesses down the view's last tree")
        self._trunk += nodes
        self.append(() if next is None else (next,))

    def rewind(self, length: int) -> None:
        """Take back the trunk; inside the session's text only the reading position moves."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        self._nodes = []
        self._trunk = self._trunk[: max(length - len(self.session), 0)]
        self._at = length if length < len(self.session) else None

    def end(self) -> None:
        """Return to the session's own text."""
        self._trunk, self._nodes, self._at = [], [], None
