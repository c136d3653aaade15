"""A session on a table model: what `lm.session.Session` does for a transformer, over hashes, in
plain Python.

A token remembers its state before every sublayer and its keys in every layer, so that it can be
continued, exited, copied up, or run again under another plan. What it looks at are the keys as they
stand, be they stale or not.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinyspec.errors import TinyspecError
from tinyspec.laws.hashes import is_visible
from tinyspec.laws.tabletext import FULL_PLAN, TableNode, TableText
from tinyspec.lm.forward import ForwardRecord, Plan, Scores
from tinyspec.tree import TokenTree

if TYPE_CHECKING:
    from tinyspec.laws.tables import TableModel
    from tinyspec.laws.tableview import TableView

PassWork: TypeAlias = tuple[Sequence[TableNode], int, Plan]
"""Nodes, the sublayer they are wanted at, and the plan."""


class TableSession(TableText):
    """One text on a table model, under one plan. The same promises as `lm.session.Session`."""

    def __init__(
        self,
        model: "TableModel",
        *,
        plan: Plan | None = None,
        forward_log: list[ForwardRecord] | None = None,
    ):
        super().__init__(model, plan or FULL_PLAN)
        self.forward_log: list[ForwardRecord] = [] if forward_log is None else forward_log
        self.prefixed: Any = None  # what probes alone see

    # ------------------------------------------------------------------ the text

    @property
    def cache_exact(self) -> bool:
        """Whether the keys are what teacher-forcing the text would give, as far as the text has
        been run.
        """
        for node in self.committed[:-1]:
            if node.filled or not node.exact:
                return False
            if self._lacks(node, self.plan, self._end):
                break
        return True

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens and run all but the last; shows the states from the one that was
        newest before.
        """
        self._check_taps(hidden_layers, self._end)
        first = max(len(self) - 1, 0)
        self.append(tokens)
        shown = self.committed[first:-1]
        behind = [node for node in self._unfinished_tokens(self._end) if node.position < first]
        self._pass([(behind, self._end, self.plan), (shown, self._end, self.plan)], prefill=True)
        no_logits: Any = []
        hidden: Any = self._hidden(shown, hidden_layers, self._end)
        return Scores(no_logits, hidden, [self._end // 2] * len(shown))

    def end(self) -> None:
        """Close the request: forget the text."""
        self.rewind(0)

    def fork(self) -> "TableSession":
        """Another text with the same prefix; what is uncommitted stays here."""
        twin = TableSession(self.model, plan=self.plan, forward_log=self.forward_log)
        last: TableNode | None = None
        for node in self.committed:
            copy = TableNode(node.token, last, self._layers)
            copy.plan, copy.row_at, copy.filled, copy.exact = (
                node.plan,
                node.row_at,
                node.filled,
                node.exact,
            )
            copy.states, copy.keys = list(node.states), list(node.keys)
            if last is not None:
                last.children = {}
            twin.committed.append(copy)
            last = copy
        twin.adopted, twin.prefixed = self.adopted, self.prefixed
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Rows of the newest token and of every node; runs what is missing."""
        scores, self.scored = self.score_tree(tree, hidden_layers, self.plan)
        return scores

    def advance(
        self, tree: TokenTree, layer: int, hidden_layers: Sequence[int] = (), head: bool = False
    ) -> Scores:
        """Run a tree up to the end of `layer` layers; with `head`, the rows an exit there would
        give.
        """
        if not 0 <= layer <= self._layers:
            raise TinyspecError(
                f"layer {layer} is out of range: {self.model.name} has {self._layers}"
            )
        scores, self.scored = self.score_tree(
            tree, hidden_layers, self.plan, stop=2 * layer, head=head
        )
        return scores

    def fill(self, how: Literal["copy", "recompute"], slots: Sequence[int] | None = None) -> None:
        """Give committed tokens that left early the keys they lack: from the state at their exit,
        or by running on.
        """
        chosen = [
            self.committed[i] for i in (range(len(self) - 1) if slots is None else sorted(slots))
        ]
        todo = [
            node
            for node in chosen
            if node.sublayers_done > 0 and self._lacks(node, self.plan, self._end)
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
                    node.keys[layer] = self.model.network.keys(
                        layer, node.states[-1], node.position
                    )
                    fills += 1
            node.filled = True
        if todo:
            self.forward_log.append(ForwardRecord(self.model.name, len(todo), 0.0, 0, fills))

    def set_probe_embeddings(self, rows: Any, prefix: Any = None) -> None:
        """Probe ids V, V + 1, ...; and a prefix that probes alone see."""
        self.adopted = 0 if rows is None else len(rows)
        self.prefixed = None if prefix is None else 17

    def replan(self, plan: Plan) -> None:
        """Run what comes from now on under another plan."""
        self.plan = plan

    def view(self, plan: Plan) -> "TableView":
        """The same text and nodes under another plan."""
        from tinyspec.laws.tableview import TableView

        return TableView(self, plan)

    def score_tree(
        self,
        tree: TokenTree,
        hidden_layers: Sequence[int],
        plan: Plan,
        stop: int | None = None,
        head: bool = True,
        trunk: Sequence[TableNode] = (),
    ) -> tuple[Scores, list[TableNode]]:
        """Hang the tree below the newest token (or a view's trunk), run what is missing, and read
        it off.
        """
        end = plan.sublayers(self._layers)
        stop = end if stop is None else min(stop, end)
        self._check_taps(hidden_layers, stop)
        above = [self._newest(), *trunk]
        nodes = self._attach(above[-1], tree)
        rows = [above[-1], *nodes]
        late = min(stop, self._end)
        behind: list[PassWork] = [(self._unfinished_tokens(late), late, self.plan)]
        if plan != self.plan:  # another plan is another pass
            self._pass(behind)
            behind = []
        self._pass(
            [*behind, (above[:-1], stop, plan), (list(dict.fromkeys(rows)), stop, plan)],
            rows if head else (),
        )
        logits: Any = [self.model.head(node.states[stop]) for node in rows] if head else []
        hidden: Any = self._hidden(rows, hidden_layers, stop)
        return Scores(logits, hidden, [stop // 2] * len(rows)), nodes

    # ------------------------------------------------------------------ inside

    @property
    def _end(self) -> int:
        return self.plan.sublayers(self._layers)

    def _check_taps(self, hidden_layers: Sequence[int], stop: int) -> None:
        for tap in hidden_layers:
            if not (0 <= 2 * tap <= stop or tap == self._layers):
                raise ValueError(f"tap {tap} is not among the {stop // 2} layers that are run")

    def _hidden(
        self, nodes: Sequence[TableNode], hidden_layers: Sequence[int], stop: int
    ) -> list[list[Any]]:
        return [
            [node.states[stop if tap == self._layers else 2 * tap] for node in nodes]
            for tap in hidden_layers
        ]

    def _lacks(self, node: TableNode, plan: Plan, stop: int) -> bool:
        return node.plan != plan or node.sublayers_done < stop or not node.states

    def _unfinished_tokens(self, stop: int) -> list[TableNode]:
        """Committed tokens before the newest that are not at `stop` yet: appended, or left early
        and not filled.
        """
        return [
            node
            for node in self.committed[:-1]
            if not node.filled and self._lacks(node, self.plan, stop)
        ]

    def _pass(
        self, work: Sequence[PassWork], heads: Iterable[TableNode] = (), prefill: bool = False
    ) -> None:
        """One forward over those of these nodes (parents before children) that lack something, and
        its forward log entry.
        """
        read = {
            node
            for nodes, stop, plan in work[-1:]
            for node in heads
            if node.row_at != stop or self._lacks(node, plan, stop)
        }
        rows, sublayers = 0, 0
        for nodes, stop, plan in work:
            for node in nodes:
                if node in read or self._lacks(node, plan, stop):
                    rows, sublayers = rows + 1, sublayers + self._run_one(node, plan, stop)
                    node.row_at = stop if node in read else node.row_at
        if rows:
            self.forward_log.append(
                ForwardRecord(self.model.name, rows, sublayers / 2, len(read), prefill=prefill)
            )

    def _run_one(self, node: TableNode, plan: Plan, stop: int) -> int:
        """Run a token from where it is to `stop` under `plan`; returns the sublayers it took."""
        network = self.model.network
        node.invalidate_beyond(plan, self._layers)
        if node.filled:  # it is run after all
            node.cut(node.sublayers_done)
        node.plan = plan
        if not node.states:
            node.states = [network.embed(node.token)]
        begun, above = node.sublayers_done, node.parent
        node.exact = (node.exact or begun == 0) and (
            above is None or (above.exact and not above.filled)
        )
        path = self._looked_at(node)
        for sublayer in range(begun, stop):
            layer, state = sublayer // 2, node.states[-1]
            if sublayer in plan.skip:
                pass
            elif sublayer % 2:
                state = network.feed_forward(layer, state)
            else:
                node.keys[layer] = network.keys(layer, state, node.position)
                keys = [
                    at.keys[layer]
                    for at in path
                    if is_visible(plan, layer, node.position, at.position)
                ]
                if None in keys:
                    raise RuntimeError(
                        f"a token before position {node.position} has no keys in layer {layer}: run it"
                    )
                state = network.attend(
                    layer, state, keys if self.prefixed is None else [*self._prefix(node), *keys]
                )
            node.states.append(state)
        return sum(sublayer not in plan.skip for sublayer in range(begun, stop))

    def _prefix(self, node: TableNode) -> list[Any]:
        return [self.prefixed] if node.probe else []

    def _looked_at(self, node: TableNode) -> list[TableNode]:
        """What stands above a token, itself last: the committed text, then its guessed
        ancestors.
        """
        guesses: list[TableNode] = []
        at: TableNode | None = node
        while at is not None and not (
            at.position < len(self.committed) and self.committed[at.position] is at
        ):
            guesses.append(at)
            at = at.parent
        return [*self.committed[: 0 if at is None else at.position + 1], *reversed(guesses)]
