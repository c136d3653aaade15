"""Table models: models over a few tokens whose probabilities are exact Fractions.

A table stands where a transformer stands: it has layers, keys and values, views and exits. Its
states are hashes. The state of a token above a sublayer is a hash of its state below, of its
position, and of the keys and values that it may attend to, *as they were written when those tokens
were run*; the head turns the last state into small integer weights. So a missing ancestor, a
visible sibling, a wrong position, stale keys, and a skipped or repeated layer all change the next
distribution, and an exact law sees them.

Sessions are written apart from `lm.session`, whose meaning they share, and are compared with it in
tests/laws/test_tables.py.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord, Plan, Scores
from tinyspec.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from tinyspec.lm.view import View

HEAVIEST = 4  # weights are 0..4: small enough that a counterexample can be read


class HashNetwork:
    """A network whose states are hashes, the same in every run and process."""

    def __init__(self, seed: int, vocabulary: int, zeros: bool):
        self.seed, self.vocabulary, self.zeros = seed, vocabulary, zeros

    def embed(self, token: int) -> Any:
        """Return the state that enters the first layer."""
        return hash((self.seed, 11, token))

    def keys(self, layer: int, state: Any, position: int) -> Any:
        """Return what later tokens see of this one in this layer."""
        return hash((state, layer, position))

    def attend(self, layer: int, state: Any, seen: Sequence[Any]) -> Any:
        """Return the state after attention; `seen` are keys by position, the token's own last."""
        return hash((state, layer, *seen))

    def feed_forward(self, layer: int, state: Any) -> Any:
        """Return the state after the second half of a layer."""
        return hash((state, layer))

    def weights(self, state: Any) -> Sequence[Any]:
        """Return the weights of the next token: 0 (or 1, without zeros) to 4, not all zero."""
        low = 0 if self.zeros else 1
        most = HEAVIEST + 1 - low
        row = [low + (hash((state, 13, token)) >> 9) % most for token in range(self.vocabulary)]
        return row if any(row) else [1, *row[1:]]


class RowsByHand:
    """A network whose states are the tokens it saw, for conditionals written by hand."""

    def __init__(self, rows: Callable[[tuple[int, ...]], Sequence[Any]]):
        self.rows = rows

    def embed(self, token: int) -> Any:
        return (token,)

    def keys(self, layer: int, state: Any, position: int) -> Any:
        return (position, state[-1])

    def attend(self, layer: int, state: Any, seen: Sequence[Any]) -> Any:
        return tuple(token for _, token in seen)

    def feed_forward(self, layer: int, state: Any) -> Any:
        return state

    def weights(self, state: Any) -> Sequence[Any]:
        return self.rows(state)


def is_visible(plan: Plan, layer: int, row: int, at: int) -> bool:
    """Return whether a position may attend to another one under a plan.

    The first head stands for all.
    """
    heads = None if plan.visible is None else plan.visible.layers[layer]
    if plan.visible is None or heads is None or at == row or at >= plan.visible.since:
        return True
    return heads[0] is None or at in heads[0]


FULL_PLAN = Plan()


class TableNode:
    """A token: its position, how far it was run and under which plan.

    states  before sublayer 0, 1, ..., as far as it was run: [sublayers_done + 1]
    keys    by layer; a layer that it has no keys in is missing
    filled  keys above its last sublayer were made from the state at its exit
    exact   nothing it attended to was filled
    """

    __slots__ = (
        "children", "exact", "filled", "keys", "parent", "plan", "position", "probe", "row_at",
        "states", "token",
    )  # fmt: skip

    def __init__(self, token: int, parent: "TableNode | None", probe: bool = False):
        self.token, self.parent, self.probe = token, parent, probe
        self.position: int = 0 if parent is None else parent.position + 1
        self.children: dict[int, TableNode] = {}
        if parent is not None and not probe:
            parent.children[token] = self
        self.forget()

    def forget(self) -> None:
        """Reset the node to not having been run at all."""
        self.plan, self.row_at = FULL_PLAN, -1
        self.states: list[Any] = []
        self.keys: dict[int, Any] = {}
        self.filled, self.exact = False, True

    @property
    def sublayers_done(self) -> int:
        """Return how many sublayers have been run."""
        return max(len(self.states) - 1, 0)

    def invalidate_beyond(self, plan: Plan, n_layers: int) -> None:
        """Keep only what is also valid under this plan."""
        agreed = self.sublayers_done
        if self.plan != plan:
            agreed = self.plan.first_difference(plan, n_layers)
        if agreed < self.sublayers_done:
            self.plan = plan
            self.drop_beyond(agreed)

    def drop_beyond(self, sublayers: int) -> None:
        """Discard what was run beyond so many sublayers."""
        del self.states[sublayers + 1 :]
        first = (
            self.sublayers_done + 1
        ) // 2  # an odd number keeps the attention half of its layer
        self.keys = {layer: key for layer, key in self.keys.items() if layer < first}
        self.row_at, self.filled = -1, False

    def descendants(self) -> "list[TableNode]":
        """Return all nodes below, parents before children."""
        below = list(self.children.values())
        for node in below:
            below.extend(node.children.values())
        return below


PassWork: TypeAlias = tuple[Sequence[TableNode], int, Plan]
"""Nodes, the sublayer they are wanted at, and the plan."""


class TableSession:
    """One text on a table model, under one plan; keeps the promises of `lm.session.Session`.

    A token remembers its state before every sublayer and its keys in every layer, so that it can be
    continued, exited, copied up, or run again under another plan. It attends to keys as they are,
    stale or not.
    """

    def __init__(
        self,
        model: "TableModel",
        *,
        plan: Plan | None = None,
        forward_log: list[ForwardRecord] | None = None,
    ):
        self.model, self.plan = model, plan or FULL_PLAN
        self.forward_log: list[ForwardRecord] = [] if forward_log is None else forward_log
        self.committed: list[TableNode] = []
        self.scored: list[TableNode] = []  # nodes of the last tree, by its indices
        self.n_settled = 0  # tokens that another plan does not change any more
        self.n_probe_ids = 0  # how many ids beyond the vocabulary name a probe
        self.prefix: Any = None  # what probes alone see

    # ------------------------------------------------------------------ the text

    @property
    def text(self) -> list[int]:
        """Return the committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens; nodes that already spell them keep what they computed."""
        tokens = list(tokens)
        self._check_tokens(tokens)
        tip, path = (self.committed[-1] if self.committed else None), []
        for token in tokens:
            tip = (tip.children.get(token) if tip else None) or TableNode(token, tip)
            path.append(tip)
        self._commit_nodes(path)

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep a path of the last scored tree, then `next` (unrun)."""
        tip, nodes = self._newest(), [self.scored[i] for i in path]
        for node in nodes:
            if node.probe or node.parent is not tip:
                raise ValueError(
                    f"{list(path)} is not a path from the newest token down the last tree"
                )
            tip = node
        if next is not None:
            self._check_tokens((next,), len(nodes))
            nodes.append(tip.children.get(next) or TableNode(next, tip))
        self._commit_nodes(nodes)

    def rewind(self, length: int) -> None:
        """Rewind the committed text to `length` tokens; its newest token will be run again."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        if length == len(self):
            return
        del self.committed[length:]
        self.scored, self.n_settled = [], min(self.n_settled, max(length - 1, 0))
        if self.committed:
            self.committed[-1].forget()
            self.committed[-1].children = {}

    # ------------------------------------------------------------------ inside

    @property
    def _layers(self) -> int:
        return self.model.config.n_layers

    def _newest(self) -> TableNode:
        if not self.committed:
            raise TinyspecError("there is no text yet: extend the session with a prompt first")
        return self.committed[-1]

    def _check_tokens(self, tokens: Sequence[int], more: int = 0) -> None:
        for token in tokens:
            self._check_token(token, self.model.vocabulary)
        most = self.model.config.max_positions
        if len(self) + more + len(tokens) > most:
            raise TinyspecError(f"the text does not fit into the context of {most}")

    def _check_token(self, token: int, ids: int) -> None:
        if not 0 <= token < ids:
            v = self.model.vocabulary
            raise TinyspecError(f"token id {token} is outside the vocabulary of {v}")

    def _commit_nodes(self, nodes: list[TableNode]) -> None:
        """Commit nodes; other nodes go, and so does what a view computed above them."""
        self.scored = []
        for node in nodes:
            if self.committed:
                self.committed[-1].children = {}
            self.committed.append(node)
        for node in (nodes[-1], *nodes[-1].descendants()) if nodes else ():
            node.invalidate_beyond(self.plan, self._layers)

    def _attach(self, root: TableNode, tree: TokenTree) -> list[TableNode]:
        """Return the node of every tree entry, found or made; probes are always made anew."""
        planted: list[TableNode] = []
        most = self.model.config.max_positions
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = root if up == ROOT else planted[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a draft token")
            self._check_token(token, self.model.vocabulary + (self.n_probe_ids if probe else 0))
            if parent.position + 1 >= most:
                raise TinyspecError(f"the draft reaches beyond the context of {most}")
            found = None if probe else parent.children.get(token)
            planted.append(found or TableNode(token, parent, probe))
        return planted

    @property
    def cache_exact(self) -> bool:
        """Return whether the keys equal those of a fresh pass, as far as the text has been run."""
        for at, node in enumerate(self.committed[:-1]):
            if node.filled or not node.exact:
                return False
            if at >= self.n_settled and self._needs_compute(node, self.plan, self._end):
                break
        return True

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens, run all but the last, and return the new states."""
        self._check_hidden_layers(hidden_layers, self._end)
        first = max(len(self) - 1, 0)
        self.append(tokens)
        shown = self.committed[first:-1]
        unfinished = [node for node in self._unfinished_tokens(self._end) if node.position < first]
        work = [(nodes, self._end, self.plan) for nodes in (unfinished, shown)]
        self._pass(work, prefill=True)
        no_logits: Any = []
        hidden: Any = self._hidden(shown, hidden_layers, self._end)
        return Scores(no_logits, hidden, [self._end // 2] * len(shown))

    def end(self) -> None:
        """End the request: forget the text."""
        self.rewind(0)

    def fork(
        self, length: int | None = None, *, forward_log: list[ForwardRecord] | None = None
    ) -> "TableSession":
        """Return another text with the same prefix; what is uncommitted stays here."""
        if forward_log is None:
            forward_log = self.forward_log
        twin = TableSession(self.model, plan=self.plan, forward_log=forward_log)
        last: TableNode | None = None
        for node in self.committed[:length]:
            copy = TableNode(node.token, last)
            for name in ("plan", "row_at", "filled", "exact"):
                setattr(copy, name, getattr(node, name))
            copy.states, copy.keys = list(node.states), dict(node.keys)
            if last is not None:
                last.children = {}
            twin.committed.append(copy)
            last = copy
        twin.n_probe_ids, twin.prefix = self.n_probe_ids, self.prefix
        twin.n_settled = self.n_settled
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the rows of the newest token and of every node; runs what is missing."""
        scores, self.scored = self.score_tree(tree, hidden_layers, self.plan)
        return scores

    def run_to_layer(
        self, tree: TokenTree, layer: int, hidden_layers: Sequence[int] = (), head: bool = False
    ) -> Scores:
        """Run a tree up to the end of `layer` layers; with `head`, return rows of an exit there."""
        if not 0 <= layer <= self._layers:
            raise TinyspecError(
                f"layer {layer} is out of range: {self.model.name} has {self._layers}"
            )
        scores, self.scored = self.score_tree(
            tree, hidden_layers, self.plan, stop=2 * layer, head=head
        )
        return scores

    def score_with_late_rows(
        self, tree: TokenTree, hidden_layers: Sequence[int] = ()
    ) -> tuple[Scores, dict[int, Any]]:
        """Return what `score` returns, and the rows of the committed tokens that ran along."""
        waiting = self._unfinished_tokens(self._end)
        scores, self.scored = self.score_tree(tree, hidden_layers, self.plan, late=waiting)
        return scores, {node.position: self.model.head(node.states[self._end]) for node in waiting}

    def run_committed(self, positions: Iterable[int], layer: int) -> None:
        """Run committed tokens up to the end of `layer` layers."""
        nodes = [self.committed[at] for at in sorted(positions)]
        self._pass([(nodes, min(2 * layer, self._end), self.plan)], prefill=True)

    def restart(self, positions: Iterable[int]) -> None:
        """Forget what was run of committed tokens."""
        for position in positions:
            self.committed[position].forget()
            self.n_settled = min(self.n_settled, position)

    def fill_cache(
        self, how: Literal["copy", "recompute"], slots: Sequence[int] | None = None
    ) -> None:
        """Give committed tokens that left early the keys they lack.

        They are made from the state at the exit, or by running on.
        """
        chosen = range(len(self) - 1) if slots is None else sorted(slots)
        todo = [
            node
            for node in (self.committed[i] for i in chosen)
            if node.sublayers_done > 0 and self._needs_compute(node, self.plan, self._end)
        ]
        if how == "recompute":
            self._pass([(todo, self._end, self.plan)])
            return
        todo = [node for node in todo if not node.filled]
        fills = 0
        for node in todo:
            node.invalidate_beyond(self.plan, self._layers)
            for layer in range((node.sublayers_done + 1) // 2, self._end // 2):
                if 2 * layer not in self.plan.skip:
                    keys = self.model.network.keys(layer, node.states[-1], node.position)
                    node.keys[layer] = keys
                    fills += 1
            node.filled = True
        if todo:
            self.forward_log.append(ForwardRecord(self.model.name, len(todo), 0.0, 0, fills))

    def set_probe_embeddings(self, rows: Any, prefix: Any = None) -> None:
        """Add the probe ids V, V + 1, ..., and a prefix that probes alone see."""
        self.n_probe_ids = 0 if rows is None else len(rows)
        self.prefix = None if prefix is None else 17

    def set_plan(self, plan: Plan) -> None:
        """Run what comes from now on under another plan; what was run stays as it is."""
        for node in self.committed[self.n_settled : -1]:
            if not node.filled and self._needs_compute(node, self.plan, self._end):
                break
            self.n_settled += 1
        self.plan = plan

    def view(self, plan: Plan) -> "View":
        """Return the same text and nodes under another plan."""
        # Imported here: through a global name the digest of a session would reach `lm.session`.
        from tinyspec.lm.view import View

        return View(self, plan)  # type: ignore[arg-type]  # it needs the text and the nodes alone

    def score_tree(
        self,
        tree: TokenTree,
        hidden_layers: Sequence[int],
        plan: Plan,
        stop: int | None = None,
        head: bool = True,
        trunk: Sequence[TableNode] = (),
        late: Sequence[TableNode] = (),
    ) -> tuple[Scores, list[TableNode]]:
        """Attach the tree below the newest token (or a view's trunk) and return its scores.

        late  tokens that run along and whose rows are read too
        """
        end = plan.stop_sublayer(self._layers)
        stop = end if stop is None else min(stop, end)
        self._check_hidden_layers(hidden_layers, stop)
        above = [self._newest(), *trunk]
        nodes = self._attach(above[-1], tree)
        rows = [above[-1], *nodes]
        least = min(stop, self._end)
        unfinished: list[PassWork] = [(self._unfinished_tokens(least), least, self.plan)]
        if plan != self.plan:  # another plan is another pass
            self._pass(unfinished)
            unfinished = []
        work = [*unfinished, (above[:-1], stop, plan), (list(dict.fromkeys(rows)), stop, plan)]
        self._pass(work, [*late, *rows] if head else ())
        logits: Any = [self.model.head(node.states[stop]) for node in rows] if head else []
        hidden: Any = self._hidden(rows, hidden_layers, stop)
        return Scores(logits, hidden, [stop // 2] * len(rows)), nodes

    # ------------------------------------------------------------------ inside

    @property
    def _end(self) -> int:
        return self.plan.stop_sublayer(self._layers)

    def _check_hidden_layers(self, hidden_layers: Sequence[int], stop: int) -> None:
        for tap in hidden_layers:
            if not (0 <= 2 * tap <= stop or tap == self._layers):
                raise ValueError(
                    f"hidden layer {tap} is not among the {stop // 2} layers that are run"
                )

    def _hidden(
        self, nodes: Sequence[TableNode], hidden_layers: Sequence[int], stop: int
    ) -> list[list[Any]]:
        return [
            [node.states[stop if tap == self._layers else 2 * tap] for node in nodes]
            for tap in hidden_layers
        ]

    def _needs_compute(self, node: TableNode, plan: Plan, stop: int) -> bool:
        return node.plan != plan or node.sublayers_done < stop or not node.states

    def _unfinished_tokens(self, stop: int) -> list[TableNode]:
        """Return committed tokens before the newest that are not at `stop` yet.

        They were appended, or left early and were not filled.
        """
        return [
            node
            for node in self.committed[self.n_settled : -1]
            if not node.filled and self._needs_compute(node, self.plan, stop)
        ]

    def _pass(
        self, work: Sequence[PassWork], heads: Iterable[TableNode] = (), prefill: bool = False
    ) -> None:
        """Run one forward pass over those of these nodes that lack something, and log it.

        Parents stand before children.
        """
        read = {
            node
            for nodes, stop, plan in work[-1:]
            for node in heads
            if node.row_at != stop or self._needs_compute(node, plan, stop)
        }
        rows, sublayers = 0, 0
        for nodes, stop, plan in work:
            for node in nodes:
                if node in read or self._needs_compute(node, plan, stop):
                    rows, sublayers = rows + 1, sublayers + self._run_one(node, plan, stop)
                    node.row_at = stop if node in read else node.row_at
        if rows:
            layers = sublayers / 2
            record = ForwardRecord(self.model.name, rows, layers, len(read), prefill=prefill)
            self.forward_log.append(record)

    def _run_one(self, node: TableNode, plan: Plan, stop: int) -> int:
        """Run a token from where it is to `stop` under `plan`; return the sublayers it took."""
        network = self.model.network
        node.invalidate_beyond(plan, self._layers)
        if node.filled:  # it is run after all
            node.drop_beyond(node.sublayers_done)
        node.plan = plan
        if not node.states:
            node.states = [network.embed(node.token)]
        begun, above = node.sublayers_done, node.parent
        sees_exact = above is None or (above.exact and not above.filled)
        node.exact = sees_exact and (node.exact or begun == 0)
        path = self._attended(node)
        for sublayer in range(begun, stop):
            layer, state = sublayer // 2, node.states[-1]
            if sublayer in plan.skip:
                pass
            elif sublayer % 2:
                state = network.feed_forward(layer, state)
            else:
                node.keys[layer] = network.keys(layer, state, node.position)
                keys = [
                    at.keys.get(layer)
                    for at in path
                    if is_visible(plan, layer, node.position, at.position)
                ]
                if None in keys:
                    raise RuntimeError(
                        f"a token before position {node.position} has no keys in layer {layer}: "
                        "run it"
                    )
                sees_prefix = node.probe and self.prefix is not None
                state = network.attend(layer, state, [self.prefix, *keys] if sees_prefix else keys)
            node.states.append(state)
        return sum(sublayer not in plan.skip for sublayer in range(begun, stop))

    def _attended(self, node: TableNode) -> list[TableNode]:
        """Return what a token attends to: committed text, then uncommitted ancestors, then
        itself."""
        uncommitted: list[TableNode] = []
        at: TableNode | None = node
        committed = self.committed
        while at is not None and committed[at.position : at.position + 1] != [at]:
            uncommitted.append(at)
            at = at.parent
        return [*self.committed[: 0 if at is None else at.position + 1], *reversed(uncommitted)]


class TableModel:
    """A model over a few tokens whose rows are exact.

    seed        which table
    vocabulary  V
    layers      depth: exits and skips have somewhere to go
    zeros       whether a token may be impossible (a support smaller than V)
    rows        context -> [V] weights, in place of the hashes: p and q by hand
    floats      rows are float64 logits (-inf where the weight is 0) instead of Fractions, for
                warpers that are irrational
    eos         ids that end a text
    """

    def __init__(
        self,
        seed: int = 0,
        vocabulary: int = 3,
        layers: int = 3,
        zeros: bool = True,
        rows: Callable[[tuple[int, ...]], Sequence[Any]] | None = None,
        name: str = "table",
        *,
        floats: bool = False,
        eos: Sequence[int] = (),
        positions: int = 64,
    ):
        self.seed, self.vocabulary, self.zeros = seed, vocabulary, zeros
        self.rows, self.floats = rows, floats
        self.name = name
        self.network = HashNetwork(seed, vocabulary, zeros) if rows is None else RowsByHand(rows)
        self.config = Config(
            vocab_size=vocabulary, d_model=1, n_layers=layers, n_heads=1, n_kv_heads=1, head_dim=1,
            d_ff=1, max_positions=positions, eos=tuple(eos),
        )  # fmt: skip
        self._heads: dict[Any, Any] = {}  # state -> row: pure, remembered

    has_tokenizer = False

    def __repr__(self) -> str:
        what = "by hand" if self.rows is not None else f"seed={self.seed}"
        return f"TableModel({what}, V={self.vocabulary}, {self.config.n_layers} layers)"

    def session(
        self, forward_log: list[ForwardRecord] | None = None, scheduler: Any = None
    ) -> TableSession:
        """Return a new text. There is nothing to batch, so a scheduler is not used."""
        return TableSession(self, forward_log=forward_log)

    def head(self, state: Any) -> Any:
        """Return the row of a state: [V] Fractions that sum to one, or float64 logits."""
        if state not in self._heads:
            weights = self.network.weights(state)
            if self.floats:
                row: Any = np.array([math.log(x) if x > 0 else -math.inf for x in weights])
            else:
                whole = sum(Fraction(x) for x in weights)
                row = [Fraction(x) / whole for x in weights]
            self._heads[state] = row
        return self._heads[state]

    def row(self, context: Sequence[int], plan: Plan = FULL_PLAN) -> Any:
        """Return the row after `context` by one fresh pass under `plan`: the judge of sessions."""
        return self.head(self.run(context, plan)[-1])

    def run(self, context: Sequence[int], plan: Plan = FULL_PLAN) -> list[Any]:
        """Return the last state of every token of `context`, by one fresh pass, layer by layer."""
        network, n_layers = self.network, self.config.n_layers
        states = [network.embed(token) for token in context]
        for sublayer in range(plan.stop_sublayer(n_layers)):
            layer = sublayer // 2
            if sublayer in plan.skip:
                continue
            if sublayer % 2:
                states = [network.feed_forward(layer, state) for state in states]
                continue
            keys = [network.keys(layer, state, position) for position, state in enumerate(states)]
            states = [
                network.attend(
                    layer,
                    state,
                    [keys[at] for at in range(row + 1) if is_visible(plan, layer, row, at)],
                )
                for row, state in enumerate(states)
            ]
        return states
