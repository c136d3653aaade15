"""A session: one text, and the draft tokens under its newest token.

Every token is a `Node`. A node knows the plan it was computed under, how many sublayers were
computed, and the states from which it can continue. So scoring a tree twice, or growing it depth by
depth, runs only what is missing. Draft trees, half-computed tokens, LayerSkip's continuation and
postponed K/V fills are all this one mechanism.

Committed tokens stand in cache slots 0..n-1, where slot == position. Uncommitted nodes stand after
them, a parent before its children. `commit` moves a path to the slots of its positions, and the
nodes below it right after. The newest committed token is run with the first tree, not before.

A `View` (view.py) is the same session under another plan, with draft tokens of its own.
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
from tinyspec.lm.forward import (
    Cache,
    ForwardBatch,
    ForwardFn,
    ForwardRecord,
    Plan,
    Scores,
    SeenSlots,
)
from tinyspec.lm.host import stack_rows, to_numpy
from tinyspec.lm.scheduler import ScheduledForward
from tinyspec.lm.transformer import Transformer
from tinyspec.lm.view import View
from tinyspec.tree import ROOT, TokenTree

PREFILL_CHUNK = 512  # positions of a long prompt that run together: bounds the attention mask
FULL = Plan()


class Node:
    """A committed token or an uncommitted draft token.

    slot            cache slot of its keys and values; -1: none yet
    plan            the plan it was computed under
    sublayers_done  how many sublayers were computed under that plan
    states          sublayer -> its input state [d], to continue from there
    logits          [V], computed from the state after `logits_at` sublayers
    hidden          layer -> its output [d], for a drafter that asked for it
    filled          its keys and values above `sublayers_done` were made without running the layers
    exact           no token that it attended to was filled
    """

    __slots__ = (
        "children",
        "exact",
        "filled",
        "hidden",
        "logits",
        "logits_at",
        "parent",
        "plan",
        "position",
        "probe",
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
        self.reset()

    def reset(self) -> None:
        """Reset to a token that was never computed."""
        self.plan, self.sublayers_done, self.logits_at = FULL, 0, 0
        self.states: dict[int, Tensor] = {}
        self.logits: Tensor | None = None
        self.hidden: dict[int, Tensor] = {}
        self.filled, self.exact = False, True

    @property
    def is_begun(self) -> bool:
        """Whether something of it was computed, so that it continues from there."""
        return bool(self.sublayers_done or self.states or self.filled)

    def sublayers_valid(self, plan: Plan, n_layers: int) -> int:
        """Return how many of its computed sublayers are valid under this plan."""
        if plan == self.plan:
            return self.sublayers_done
        return min(self.sublayers_done, self.plan.first_difference(plan, n_layers))

    def needs_compute(
        self, plan: Plan, stop: int, n_layers: int, hidden_layers: Iterable[int], head: bool
    ) -> bool:
        """Return whether it must be run, up to `stop` under `plan`.

        hidden_layers  layers whose outputs are wanted;  head: its logits are wanted
        """
        if (
            self.plan != plan
            or self.sublayers_done < stop
            or (head and (self.logits is None or self.logits_at != stop))
        ):
            return True
        return any(
            layer not in self.hidden or (layer == n_layers and self.logits_at != stop)
            for layer in hidden_layers
        )

    def resume_point(
        self, plan: Plan, stop: int, n_layers: int, hidden_layers: Iterable[int] = ()
    ) -> tuple[int, Tensor | None]:
        """Return the latest sublayer that it can continue from, and its state there.

        At sublayer 0 the state is None: it starts from its embedding. It starts at sublayer 2 l or
        before, for each hidden layer l that is not stored yet.
        """
        agreed = min(self.sublayers_valid(plan, n_layers), stop)
        for layer in hidden_layers:
            if layer < n_layers and (layer not in self.hidden or 2 * layer > agreed):
                agreed = min(agreed, 2 * layer)
        at = max((at for at in self.states if at <= agreed), default=0)
        return at, self.states.get(at)

    def mark_computed(
        self,
        plan: Plan,
        stop: int,
        n_layers: int,
        states: dict[int, Tensor],
        logits: Tensor | None = None,
        start: int = 0,
        hidden: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Record that it was run from sublayer `start` to `stop` under `plan`.

        states  sublayer -> its input, for sublayers after `start`
        logits  if they were wanted
        hidden  layer -> its output, for the layers that a drafter asked for; None: for none
        """
        above = self.parent
        sees_exact = above is None or (above.exact and not above.filled)
        if not self.sublayers_done and stop and hidden is None and not self.hidden:
            self.exact = sees_exact
            self.plan, self.sublayers_done, self.filled = plan, stop, False
            self.logits, self.logits_at, self.states = logits, stop, states
            return  # the usual case: it was never run before, so it started at 0
        self.exact = sees_exact and (start == 0 or self.exact)
        if self.plan != plan:  # outputs below the first difference of the plans are still valid
            self.hidden = {layer: s for layer, s in self.hidden.items() if 2 * layer <= start}
        if self.plan != plan or self.filled or stop > self.sublayers_done:
            self.plan, self.sublayers_done, self.logits, self.filled = plan, stop, None, False
            self.states = {at: state for at, state in self.states.items() if 0 < at <= start}
        self.states |= states
        if self.logits_at != stop:  # these were the outputs of another exit
            self.logits = None
            self.hidden.pop(n_layers, None)
        self.hidden |= hidden or {}
        self.logits, self.logits_at = self.logits if logits is None else logits, stop

    def invalidate_beyond(self, plan: Plan, n_layers: int) -> bool:
        """Drop what is not valid under this plan, and return whether anything was dropped."""
        agreed = self.sublayers_valid(plan, n_layers)
        if agreed == self.sublayers_done:
            return False
        self.plan, self.sublayers_done, self.logits, self.logits_at = plan, agreed, None, 0
        self.states = {at: state for at, state in self.states.items() if at <= agreed}
        self.hidden = {layer: h for layer, h in self.hidden.items() if 2 * layer <= agreed}
        return True

    def drop_outputs(self) -> None:
        """Free its logits and hidden states, which are read of the newest token only."""
        self.logits, self.hidden = None, {}

    def detach(self) -> None:
        """Detach it and its descendants from each other, and free their tensors.

        Parents and children refer to each other, so otherwise only a garbage collection would free
        them.
        """
        for node in (self, *self.descendants()):
            node.reset()
            node.parent, node.slot, node.children = None, -1, {}

    def descendants(self) -> "list[Node]":
        """Return all nodes below it, parents before children."""
        below = list(self.children.values())
        for node in below:  # the list grows while the loop runs over it
            below.extend(node.children.values())
        return below

    def copy(self, parent: "Node | None") -> "Node":
        """Return the same computed token under another parent, without its children."""
        twin = Node(self.token, None)
        for name in self.__slots__:
            if name not in ("parent", "children"):
                setattr(twin, name, getattr(self, name))
        twin.parent, twin.states, twin.hidden = parent, dict(self.states), dict(self.hidden)
        return twin


class Session:
    """One request on one model under one plan (the whole model unless another is given).

    forward  the function that computes; None: `Transformer.forward`. A scheduler gives its own
    """

    def __init__(
        self,
        model: Transformer,
        *,
        plan: Plan | None = None,
        forward_log: list[ForwardRecord] | None = None,
        forward: ForwardFn | None = None,
    ):
        self.model, self.plan = model, plan or FULL
        self.forward_log: list[ForwardRecord] = [] if forward_log is None else forward_log
        self.forward: ForwardFn = forward or model.forward
        self.cache = Cache(model.config, model.dtype, model.device)
        self.committed: list[Node] = []
        self.scored: list[Node] = []  # the nodes of the last tree, in its order
        self.probes: Tensor | None = None  # embeddings [m, d] of the ids V..V+m-1
        # K and V [L, KV, P, hd] that only probes attend to.
        self.prefix: tuple[Tensor, Tensor] | None = None
        self._probe_nodes: list[Node] = []  # probes of the last tree
        self._shared = 0  # positions that a fork took over, until its first pass records them
        # Committed tokens before this one are complete. The newest never is: views run it again.
        self._ready = 0

    # ------------------------------------------------------------------ the text

    @property
    def is_alone(self) -> bool:
        """Return whether no other request shares its passes; see `Scheduler.is_alone`."""
        if isinstance(self.forward, ScheduledForward):
            return self.forward.is_alone
        return self.forward == self.model.forward

    @property
    def text(self) -> list[int]:
        """Return the committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    @property
    def cache_exact(self) -> bool:
        """Whether the cache equals that of a plain pass over the text.

        True if every layer of every token was run.
        """
        self._advance_ready()
        return all(node.exact and not node.filled for node in self.committed[: self._ready])

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens without running anything.

        If the draft has nodes with these tokens, they keep what was computed for them.
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

        The hidden states are those of every position from the previously newest one (in an empty
        session: the first) up to the last but one.
        """
        n_layers = self.model.config.n_layers
        hidden_layers = self._check_hidden_layers(hidden_layers, self._end)
        first = max(len(self) - 1, 0)
        self.append(tokens)
        nodes = self.committed[first:-1]
        late = [
            node
            for node in nodes
            if node.needs_compute(self.plan, self._end, n_layers, hidden_layers, head=False)
        ]
        before = [node for node in self._unfinished_tokens(self._end) if node.position < first]
        todo = [*before, *late]
        self._run_prompt(todo, self._end, hidden_layers)
        states = self._hidden_states(nodes, hidden_layers)
        self._advance_ready()
        return Scores(self._no_logits(), states, [self._end // 2] * len(nodes))

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Commit a path of the last scored tree, then `next`, which is not run.

        Nodes below the last committed token stay. All other nodes are dropped.
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
        """Forget the text after its first `length` tokens; the last of them will be run again."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        if length == len(self):
            return
        for node in list(self.committed[-1].children.values()):
            node.detach()
        del self.committed[length:]
        self.scored, self._probe_nodes = [], []
        self._ready = min(self._ready, max(length - 1, 0))
        if self.committed:
            tip = self.committed[-1]
            tip.reset()
            tip.children = {}
            self.cache.mark_missing(tip.slot)

    def end(self) -> None:
        """Close the request: forget the text."""
        self.rewind(0)

    def fork(
        self,
        length: int | None = None,
        *,
        forward_log: list[ForwardRecord] | None = None,
        forward: ForwardFn | None = None,
    ) -> "Session":
        """Return a session with the same committed text; uncommitted nodes stay here.

        What was computed for this text is not computed again. The first pass of the new session
        records how many positions that spares: `ForwardRecord.shared`.

        length       how many tokens of the text it begins with; None: all
        forward_log  where it records its passes; None: the log of this session
        forward      what computes its passes; None: what computes those of this session
        """
        if length is not None and not 0 <= length <= len(self):
            raise ValueError(f"cannot fork at {length}: the text has {len(self)} tokens")
        self._advance_ready()
        twin = Session(
            self.model,
            plan=self.plan,
            forward_log=self.forward_log if forward_log is None else forward_log,
            forward=forward or self.forward,
        )
        twin.cache = self.cache.clone()
        last: Node | None = None
        for node in self.committed[:length]:
            last = node.copy(last)
            twin.committed.append(last)
        twin._ready = min(self._ready, max(len(twin) - 1, 0))
        twin._shared = min(self._ready, len(twin))
        twin.set_probe_embeddings(self.probes, self.prefix)
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the scores of the root and of every node; run what is missing.

        At most one forward pass runs nodes of the tree.
        """
        rows = None if hidden_layers else self._match_chain(tree)
        if rows is None:
            scores, self.scored = self.score_tree(tree, hidden_layers, self.plan)
            return scores
        stop = 2 * self.model.config.n_layers
        late = self.committed[self._ready : -1]
        todo = [*late, *(node for node in rows if not node.sublayers_done)]
        logits = self.run_nodes(todo, stop, chain_heads=len(late)).logits if todo else None
        if logits is None or len(logits) < len(rows):
            logits = stack_rows([node.logits for node in rows if node.logits is not None])
        self._advance_ready()
        self.scored = rows[1:]
        return Scores(logits, self._hidden_states(rows, ()), [stop // 2] * len(rows))

    def score_with_late_rows(
        self, tree: TokenTree, hidden_layers: Sequence[int] = ()
    ) -> tuple[Scores, dict[int, Tensor]]:
        """Return what `score` returns, and the logits of the committed tokens that ran along.

        Tokens that exited early are run further with the next one that goes deep. Their logits [V]
        after the last layer stand under their positions; each costs a product with the head.
        """
        rows: dict[int, Tensor] = {}
        scores, self.scored = self.score_tree(tree, hidden_layers, self.plan, late_rows=rows)
        return scores, rows

    def draft_chain(self, most: int, choose: NextTokenFn) -> bool:
        """Run draft tokens one after another, as a draft model does.

        `choose` gets the logits [V] after each of at most `most` positions, and returns the next
        token; None: stop. The nodes are kept as if each draft had been scored as a tree. Returns
        False if the fast path does not apply: then `choose` was not called.
        """
        tip, c = self._newest(), self.model.config
        self._advance_ready()
        if self._ready < len(self) - 1:  # after a draft that was accepted whole, its last token
            self.score(TokenTree())
        stop, is_begun = 2 * c.n_layers, tip.is_begun
        if is_begun and tip.needs_compute(self.plan, stop, c.n_layers, (), True):
            return False
        first = len(self) - (not is_begun)  # the slot of the first token that is run
        is_plain = self.is_alone and self.plan.is_whole and tip.slot == tip.position
        if (
            not is_plain
            or self._probe_nodes
            or tip.children
            or first + most > c.max_positions
            or not self.cache.present[:first].all()
        ):
            return False
        above, row = tip.parent, tip.logits
        token: int | None = tip.token
        if row is not None:
            shown = row if self.model.engine is None else to_numpy(row)
            above, most, token = tip, most - 1, choose(shown)
        if token is None or most == 0:
            return True
        self.cache.reserve(first + most)
        self.scored = []
        if self.model.engine is None:
            node = tip if above is tip.parent else Node(token, above)
            for _ in range(most):
                node.slot = node.position
                row = self.run_nodes([node], stop, chain_heads=0).logits[0]
                self.scored += [] if node is tip else [node]
                if (token := choose(row)) is None:
                    break
                node = Node(token, node)
            return True
        run = self.forward if isinstance(self.forward, ScheduledForward) else self.model
        ran = run.run_chain(self.cache, token, first, most, choose, self.forward_log)
        self.cache.mark_present(slice(first, first + len(ran)))
        for token, row, state in ran:
            node = tip if above is tip.parent else Node(token, above)
            node.slot = node.position
            node.mark_computed(self.plan, stop, c.n_layers, {stop: state}, row)
            if node is not tip:
                self.scored.append(node)
            above = node
        return True

    def run_to_layer(
        self, tree: TokenTree, layer: int, hidden_layers: Sequence[int] = (), head: bool = False
    ) -> Scores:
        """Run a tree through its first `layer` layers; a later `score` continues from there.

        With `head`, return the logits of an exit at this layer.
        """
        if not 0 <= layer <= self.model.config.n_layers:
            raise TinyspecError(
                f"layer {layer} is out of range: {self.model.name} has {self.model.config.n_layers}"
            )
        scores, self.scored = self.score_tree(
            tree, hidden_layers, self.plan, stop=2 * layer, head=head
        )
        return scores

    def run_committed(self, positions: Iterable[int], layer: int) -> None:
        """Run committed tokens up to a layer; what was run already is not run again.

        This is for a prompt whose tokens leave early. All that a token attends to must have been
        run as far, or filled.
        """
        stop, n_layers = min(2 * layer, self._end), self.model.config.n_layers
        todo = [
            node
            for node in (self.committed[at] for at in sorted(positions))
            if node.needs_compute(self.plan, stop, n_layers, (), head=False)
        ]
        self._run_prompt(todo, stop)

    def restart(self, positions: Iterable[int]) -> None:
        """Forget what was computed for committed tokens: the next pass runs them from layer 1."""
        for position in positions:
            self.committed[position].reset()
            self.cache.mark_missing(self.committed[position].slot)
            self._ready = min(self._ready, position)

    def fill_cache(
        self, how: Literal["copy", "recompute"], slots: Sequence[int] | None = None
    ) -> None:
        """Complete the keys and values of committed tokens that exited early.

        slots  positions of the tokens, of which those never run are skipped; None: all but the last
        how    copy       make keys and values of the layers above from the state at the exit (CALM)
               recompute  run these layers now; the next `score` does the same for what is left
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
            self.run_nodes(todo, self._end, copying=how == "copy")
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

    def set_plan(self, plan: Plan) -> None:
        """Use another plan from now on, as a sliding window does. What was run stays as it is."""
        self._advance_ready()  # under the old plan: else its newest token would be run again
        self.plan = plan

    def view(self, plan: Plan) -> View:
        """Return a view: the same weights, text and nodes under another plan."""
        return View(self, plan)

    def score_tree(
        self,
        tree: TokenTree,
        hidden_layers: Sequence[int],
        plan: Plan,
        stop: int | None = None,
        head: bool = True,
        trunk: Sequence[Node] = (),
        late_rows: dict[int, Tensor] | None = None,
    ) -> tuple[Scores, list[Node]]:
        """Attach a tree to the newest token (or to a view's trunk), and run what is missing of it.

        This is `score` for any tree, plan and exit. Returns the scores, and the nodes of the tree.
        `late_rows` gets the logits of the committed tokens that are run along, by position.
        """
        n_layers = self.model.config.n_layers
        end = plan.stop_sublayer(n_layers)
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
        waiting = late = self._unfinished_tokens(min(stop, self._end))
        read = waiting if head and late_rows is not None else []
        while late and (plan != self.plan or len(late) > PREFILL_CHUNK):
            self.run_nodes(late[:PREFILL_CHUNK], min(stop, self._end), heads=read)
            late = late[PREFILL_CHUNK:]
        fresh = None
        if todo or above or late:
            fresh = self.run_nodes(
                [*late, *above, *todo],
                stop,
                heads=[*read, *todo] if head else (),
                hidden_layers=hidden_layers,
                plan=plan,
            )
        if not head:
            logits = self._no_logits()
        elif fresh is not None and todo == rows:
            logits = fresh.logits[-len(rows) :] if read else fresh.logits  # theirs stand first
        else:
            logits = stack_rows([node.logits for node in rows if node.logits is not None])
        states = self._hidden_states(rows, hidden_layers)
        if late_rows is not None:
            late_rows.update((n.position, n.logits) for n in waiting if n.logits is not None)
        self._advance_ready()
        return Scores(logits, states, [stop // 2] * len(rows)), nodes

    def run_nodes(
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

        Each node continues from where it stopped, and records what was computed. A scheduler may
        run only the first `len(scores.layers)` nodes of a prompt.

        heads        nodes whose logits are wanted
        copying      make keys and values from the nodes' states, run no layer
        chain_heads  for the usual case: a chain of new nodes after all that they attend to, through
                     the whole model, each in the slot of its position; the logits of the nodes from
                     this index on are wanted
        """
        plan, n_layers = plan or self.plan, self.model.config.n_layers
        slots = [node.slot for node in nodes]
        seen: list[SeenSlots]
        saved_sublayers: tuple[int, ...]
        entering: list[Tensor] = []
        has_state = probing = None
        if chain_heads is not None:
            positions, starts, saved_sublayers = slots, [0] * len(slots), (stop,)
            n_slots, seen = slots[-1] + 1, [(slot + 1, ()) for slot in slots]
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
            has_state = [state is not None for state in states] if entering else None
            n_slots, seen = find_seen_slots(nodes)
            wanted = set(heads)
            head_rows = [i for i, node in enumerate(nodes) if node in wanted]
            # Save the states where this plan stops, and where it differs from the session's own.
            differs_at = min(stop, plan.first_difference(self.plan, n_layers))
            # A prompt that stops below the top is continued, or filled, from the state there.
            saved_sublayers = () if prefill and stop == self._end else tuple({stop, differs_at})
            if self.prefix is not None and any(node.probe for node in nodes):
                probing = torch.tensor([node.probe for node in nodes], device=self.model.device)
        if not copying:
            self.check_keys(slots, starts, stop, plan, seen, n_slots)
        feed = ForwardBatch(
            cache=self.cache,
            plan=plan,
            tokens=[node.token for node in nodes],
            positions=positions,
            slots=slots,
            starts=starts,
            stop=stop,
            n_slots=n_slots,
            seen=seen,
            entry_states=torch.stack(entering) if entering else None,
            has_state=has_state,
            heads=head_rows,
            hidden_layers=hidden_layers,
            saved_sublayers=saved_sublayers,
            probes=probing,
            prefix=None if probing is None else self.prefix,
            copying=copying,
            prefill=prefill,
            shared=self._shared,
            forward_log=self.forward_log,
        )
        scores = self.forward([feed])[0]
        self._shared = 0
        rows: list[Tensor | None]
        if chain_heads is not None:
            self.cache.mark_present(slice(slots[0], n_slots))
            rows = [*[None] * chain_heads, *scores.logits]
            for node, row, state in zip(nodes, rows, feed.saved_states[stop], strict=True):
                node.mark_computed(plan, stop, n_layers, {stop: state}, row)
            return scores
        logits = dict(zip(head_rows, scores.logits, strict=True))
        ran = nodes[: len(scores.layers)]
        for i, (node, start) in enumerate(zip(ran, starts, strict=False)):
            first, last = (start + 1) // 2, (stop + 1) // 2  # the layers whose attention was run
            if node.plan != plan or node.filled:
                self.cache.mark_missing(node.slot, first)
            self.cache.mark_present(node.slot, plan.attention_layers(first, last))
            if copying:
                node.filled = True
                continue
            saved = {at: kept[i] for at, kept in feed.saved_states.items() if at > start}
            hidden = {
                layer: scores.hidden[k, i]
                for k, layer in enumerate(hidden_layers)
                if 2 * layer >= start or layer == n_layers
            }
            node.mark_computed(
                plan,
                stop,
                n_layers,
                saved,
                logits.get(i),
                start,
                hidden if hidden_layers else None,
            )
        return scores

    # ------------------------------------------------------------------ inside

    def _run_prompt(
        self, nodes: Sequence[Node], stop: int, hidden_layers: tuple[int, ...] = ()
    ) -> None:
        """Run nodes of a prompt in chunks. A scheduler may run fewer rows than a chunk has."""
        n = min(getattr(self.forward, "most_rows", PREFILL_CHUNK), PREFILL_CHUNK)
        while nodes:
            scores = self.run_nodes(nodes[:n], stop, hidden_layers=hidden_layers, prefill=True)
            nodes = nodes[len(scores.layers) :]

    @property
    def _end(self) -> int:
        """The sublayer where the session's own plan stops."""
        return self.plan.stop_sublayer(self.model.config.n_layers)

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
                f"{length} tokens do not fit into the context of {c.max_positions} tokens of "
                f"{self.model.name}: shorten the prompt"
            )

    def _check_hidden_layers(self, hidden_layers: Sequence[int], stop: int) -> tuple[int, ...]:
        """Return the layers a drafter asks for; raise ValueError for one that is not run.

        The top layer (n_layers), which the head reads, may always be asked for.
        """
        for layer in hidden_layers:
            if not (0 <= 2 * layer <= stop or layer == self.model.config.n_layers):
                raise ValueError(
                    f"hidden layer {layer} is not among the {stop // 2} layers that are run"
                )
        return tuple(hidden_layers)

    def check_keys(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        stop: int,
        plan: Plan,
        seen: Sequence[SeenSlots],
        n_slots: int,
    ) -> None:
        """Raise RuntimeError if attention would read a slot without keys in some layer."""
        own = set(slots)
        low = min(own)
        if self.cache.present[:low].all() and all(
            slot < low or slot in own for _, more in seen for slot in more
        ):
            prefixes = [prefix for prefix, _ in seen if prefix > low]
            if not prefixes or own.issuperset(range(low, max(prefixes))):
                return  # the usual case, at little cost
        read: NDArray[np.bool_] = np.zeros(n_slots, dtype=np.bool_)
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
                f"slot {slot} has no keys in layer {layers[column]}: "
                "call fill_cache() or run it first"
            )

    def _no_logits(self) -> Tensor:
        wide = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.empty(0, self.model.config.vocab_size, dtype=wide, device=self.model.device)

    def _hidden_states(self, nodes: Sequence[Node], hidden_layers: tuple[int, ...]) -> Tensor:
        """Return the states of these nodes: [layers asked for, n, d]."""
        if not (nodes and hidden_layers):
            shape = len(hidden_layers), len(nodes), self.model.config.d_model
            return torch.empty(shape, dtype=self.model.state_dtype, device=self.model.device)
        return torch.stack(
            [torch.stack([node.hidden[layer] for node in nodes]) for layer in hidden_layers]
        )

    def _probe_embedding(self, node: Node) -> Tensor | None:
        """Return the embedding that an id beyond the vocabulary names; None for an ordinary id."""
        vocabulary = self.model.config.vocab_size
        if node.token < vocabulary or self.probes is None:
            return None
        return self.probes[node.token - vocabulary].to(self.model.device)

    def _unfinished_tokens(self, stop: int) -> list[Node]:
        """Return the committed tokens before the newest that were not run up to `stop`.

        They were appended, or they exited early and were not filled.
        """
        n_layers = self.model.config.n_layers
        return [
            node
            for node in self.committed[self._ready : -1]
            if not node.filled and node.needs_compute(self.plan, stop, n_layers, (), head=False)
        ]

    def _advance_ready(self) -> None:
        """Move `_ready` past the tokens that are complete, and free what is not read again."""
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
        """Return the newest token and the nodes of a single-branch draft, or None.

        None means that the fast path of `score` does not apply. It covers plain decoding, a draft
        model's own steps, and chains on the whole model: every node stands in the slot of its
        position, none is partly computed, and what is missing is at the end. `score_tree` would
        find the same, but at a cost that shows if a forward pass takes a tenth of a millisecond.
        """
        self._advance_ready()
        tokens, n, committed, c = tree.tokens, len(tree.tokens), self.committed, self.model.config
        if self._probe_nodes or not committed or not self.plan.is_whole or (n and any(tree.probe)):
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
        fresh, n_slots = tokens[len(rows) - 1 :], len(committed) + n
        if fresh and (
            not is_single
            or rows[-1].children
            or n_slots > c.max_positions
            or not 0 <= min(fresh) <= max(fresh) < c.vocab_size
        ):
            return None  # other nodes hold the slots, or `score_tree` has an error to report
        if len(late) + n >= PREFILL_CHUNK:
            return None
        self.cache.reserve(n_slots)
        for token in fresh:
            rows.append(Node(token, rows[-1]))
            rows[-1].slot = rows[-1].position
        return rows

    def _attach(self, above: Sequence[Node], tree: TokenTree) -> list[Node]:
        """Return the node of every tree entry below `above`; make those that are missing.

        Probes are always made anew.
        """
        vocabulary, limit = self.model.config.vocab_size, self.model.config.max_positions
        probe_ids = 0 if self.probes is None else len(self.probes)
        self._drop_probes()
        held = [node.slot for node in self.committed[-1].descendants()]
        free = max([len(self) - 1, *held]) + 1
        attached: list[Node] = []
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = above[-1] if up == ROOT else attached[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a draft token")
            if not 0 <= token < vocabulary + (probe_ids if probe else 0):
                raise TinyspecError(f"token id {token} is outside the vocabulary of {vocabulary}")
            node = None if probe else parent.children.get(token)
            if node is None:
                if parent.position + 1 >= limit:
                    raise TinyspecError(f"the draft reaches beyond the context of {limit} tokens")
                node = Node(token, parent, probe=probe)
                self._probe_nodes += [node] if probe else []
            attached.append(node)
        for node in (*above, *attached):
            if node.slot < 0:
                node.slot, free = free, free + 1
                self.cache.reserve(free)
                self.cache.mark_missing(node.slot)
        return attached

    def _commit_nodes(self, nodes: list[Node]) -> None:
        """Commit these nodes: move them, and the nodes below the last, into contiguous slots.

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
                    other.detach()
            node.children = {}
        self.committed.extend(nodes)
        below = nodes[-1].descendants()
        self._assign_slots([*nodes, *below], first)
        for node in self.committed[max(first - 1, 0) : -1]:
            node.drop_outputs()
        # A view may have computed these nodes under its own plan: drop what is not valid here.
        for node in (nodes[-1], *below):
            if node.invalidate_beyond(self.plan, self.model.config.n_layers):
                self.cache.mark_missing(node.slot, (node.sublayers_done + 1) // 2)

    def _assign_slots(self, nodes: list[Node], first: int) -> None:
        """Give nodes the slots first, first + 1, ..., and move their keys and values there."""
        self.cache.reserve(first + len(nodes))
        old = [node.slot if node.slot >= 0 else first + i for i, node in enumerate(nodes)]
        self.cache.move_slots(old, first)
        for i, node in enumerate(nodes):
            if node.slot < 0:
                self.cache.mark_missing(first + i)
            node.slot = first + i

    def _drop_probes(self) -> None:
        for probe in self._probe_nodes:
            probe.detach()
        self._probe_nodes = []


def find_seen_slots(nodes: Sequence[Node]) -> tuple[int, list[SeenSlots]]:
    """Return how many slots are in use, and the slots that each node attends to.

    A node attends to every committed slot up to its own, to its ancestors and to itself; never to a
    sibling. If its slot equals its position, the slots below hold only ancestors.
    """
    seen: list[SeenSlots] = []
    for node in nodes:
        path: list[int] = []
        at: Node | None = node
        while at is not None and at.slot != at.position:
            path.append(at.slot)
            at = at.parent
        seen.append((0 if at is None else at.slot + 1, tuple(reversed(path))))
    return max(node.slot for node in nodes) + 1, seen
