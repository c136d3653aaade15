"""The text of a table model: what `lm.session.Session` does for a transformer, over hashes, in plain Python.

A token is a node that remembers its state before every sublayer and its keys in every layer, so that it can be continued,
exited, copied up, or run again under another plan.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tinyspec.errors import TinyspecError
from tinyspec.laws.tables import FULL, TableModel, seen
from tinyspec.lm.feed import Call, Scores
from tinyspec.lm.plan import Plan
from tinyspec.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from tinyspec.laws.tableview import TableView


class TableNode:
    """A token: where it stands, how far it was run and under which plan.

    states  before sublayer 0, 1, ..., as far as it came: [reach + 1]
    keys    by layer; None where it has none
    filled  keys above its reach were made from the state at its exit
    exact   nothing it looked at was filled
    """

    __slots__ = (
        "children", "exact", "filled", "keys", "parent", "plan", "position", "probe", "row_at", "states", "token",
    )  # fmt: skip

    def __init__(self, token: int, parent: "TableNode | None", n_layers: int, probe: bool = False):
        self.token, self.parent, self.probe = token, parent, probe
        self.position: int = 0 if parent is None else parent.position + 1
        self.children: dict[int, TableNode] = {}
        if parent is not None and not probe:
            parent.children[token] = self
        self.forget(n_layers)

    def forget(self, n_layers: int) -> None:
        """Back to not run at all."""
        self.plan, self.row_at = FULL, -1
        self.states: list[Any] = []
        self.keys: list[Any] = [None] * n_layers
        self.filled, self.exact = False, True

    @property
    def reach(self) -> int:
        """Sublayers done."""
        return max(len(self.states) - 1, 0)

    def part(self, plan: Plan, n_layers: int) -> None:
        """Keep only what also holds under this plan."""
        if self.plan == plan:
            return
        agreed = self.plan.differs(plan, n_layers)
        self.plan = plan
        if agreed < self.reach or self.filled:
            self.cut(agreed)

    def cut(self, reach: int) -> None:
        """Take back what was run beyond `reach` sublayers."""
        del self.states[reach + 1 :]
        first = (self.reach + 1) // 2  # an odd reach keeps the attention half of its layer
        self.keys[first:] = [None] * (len(self.keys) - first)
        self.row_at, self.filled = -1, False

    def descendants(self) -> "list[TableNode]":
        """All below, parents before children."""
        below = list(self.children.values())
        for node in below:
            below.extend(node.children.values())
        return below


class TableSession:
    """One text on a table model, under one plan. The same promises as `lm.session.Session`."""

    def __init__(self, model: TableModel, *, plan: Plan | None = None, ledger: list[Call] | None = None):
        self.model, self.plan = model, plan or FULL
        self.ledger: list[Call] = [] if ledger is None else ledger
        self.committed: list[TableNode] = []
        self.scored: list[TableNode] = []  # nodes of the last tree, by its indices
        self.adopted = 0
        self.prefixed: Any = None  # what probes alone see

    # ------------------------------------------------------------------ the text

    @property
    def text(self) -> list[int]:
        """Committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    @property
    def cache_exact(self) -> bool:
        """Whether the keys are what teacher-forcing the text would give."""
        return all(node.exact and not node.filled for node in self.committed[:-1] if node.reach >= self._end)

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens; nodes that already spell them keep what they computed."""
        tokens = list(tokens)
        self._admit(tokens)
        tip, path = (self.committed[-1] if self.committed else None), []
        for token in tokens:
            tip = (tip.children.get(token) if tip else None) or TableNode(token, tip, self._layers)
            path.append(tip)
        self._adopt_path(path)

    def extend(self, tokens: Sequence[int], taps: Sequence[int] = ()) -> Scores:
        """Commit forced tokens and run all but the last; shows the states from the one that was newest before."""
        self._check_taps(taps, self._end)
        first = max(len(self) - 1, 0)
        self.append(tokens)
        shown = self.committed[first:-1]
        self._run(self._behind(self._end), self._end, self.plan, prefill=True)
        return Scores([], self._hidden(shown, taps, self._end), [self._end // 2] * len(shown))  # type: ignore[arg-type]

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep a path of the last scored tree, then `next` (unrun)."""
        tip, nodes = self._newest(), [self.scored[i] for i in path]
        for node in nodes:
            if node.probe or node.parent is not tip:
                raise ValueError(f"{list(path)} is not a path of guesses from the newest token down the last tree")
            tip = node
        if next is not None:
            self._admit((next,), len(nodes))
            nodes.append(tip.children.get(next) or TableNode(next, tip, self._layers))
        self._adopt_path(nodes)

    def rewind(self, length: int) -> None:
        """Take back committed text to `length` tokens. The new newest token will be run again."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        if length == len(self):
            return
        del self.committed[length:]
        self.scored = []
        if self.committed:
            self.committed[-1].forget(self._layers)
            self.committed[-1].children = {}

    def end(self) -> None:
        """Close the request: forget the text."""
        self.rewind(0)

    def fork(self) -> "TableSession":
        """Another text with the same prefix; what is uncommitted stays here."""
        twin = TableSession(self.model, plan=self.plan, ledger=self.ledger)
        last: TableNode | None = None
        for node in self.committed:
            copy = TableNode(node.token, last, self._layers)
            copy.plan, copy.row_at, copy.filled, copy.exact = node.plan, node.row_at, node.filled, node.exact
            copy.states, copy.keys = list(node.states), list(node.keys)
            if last is not None:
                last.children = {}
            twin.committed.append(copy)
            last = copy
        twin.adopted, twin.prefixed = self.adopted, self.prefixed
        return twin

    # ------------------------------------------------------------------ computing

    def score(self, tree: TokenTree, taps: Sequence[int] = ()) -> Scores:
        """Rows of the newest token and of every node; runs what is missing."""
        scores, self.scored = self.grow(tree, taps, self.plan)
        return scores

    def advance(self, tree: TokenTree, layer: int, taps: Sequence[int] = (), head: bool = False) -> Scores:
        """Run a tree up to the end of `layer` layers; with `head`, the rows an exit there would give."""
        if not 0 <= layer <= self._layers:
            raise TinyspecError(f"layer {layer} is out of range: {self.model.name} has {self._layers}")
        scores, self.scored = self.grow(tree, taps, self.plan, stop=2 * layer, head=head)
        return scores

    def fill(self, how: Literal["copy", "recompute"], slots: Sequence[int] | None = None) -> None:
        """Give committed tokens that left early the keys they lack: from the state at their exit, or by running on."""
        chosen = [self.committed[i] for i in (range(len(self)) if slots is None else sorted(slots))]
        todo = [node for node in chosen if node.reach > 0 and self._lacks(node, self.plan, self._end)]
        if how == "recompute":
            self._run(todo, self._end, self.plan)
            return
        todo = [node for node in todo if not node.filled]
        fills = 0
        for node in todo:
            node.part(self.plan, self._layers)
            for layer in range((node.reach + 1) // 2, self._end // 2):
                if 2 * layer not in self.plan.skip:
                    node.keys[layer] = self.model.network.keys(layer, node.states[-1], node.position)
                    fills += 1
            node.filled = True
        if todo:
            self.ledger.append(Call(self.model.name, len(todo), 0.0, 0, fills))

    def adopt(self, rows: Any, prefix: Any = None) -> None:
        """Probe ids V, V + 1, ...; and a prefix that probes alone see."""
        self.adopted = 0 if rows is None else len(rows)
        self.prefixed = None if prefix is None else hash(("prefix", 17)[1:])

    def view(self, plan: Plan) -> "TableView":
        """The same text and nodes under another plan."""
        from tinyspec.laws.tableview import TableView

        return TableView(self, plan)

    def grow(
        self,
        tree: TokenTree,
        taps: Sequence[int],
        plan: Plan,
        stop: int | None = None,
        head: bool = True,
        trunk: Sequence[TableNode] = (),
    ) -> tuple[Scores, list[TableNode]]:
        """Hang the tree below the newest token (or a view's trunk), run what is missing, and read it off."""
        end = plan.sublayers(self._layers)
        stop = end if stop is None else min(stop, end)
        self._check_taps(taps, stop)
        above = [self._newest(), *trunk]
        nodes = self._plant(above[-1], tree)
        rows = [above[-1], *nodes]
        self._run(self._behind(min(stop, self._end)), min(stop, self._end), self.plan)
        self._run([*above[:-1], *dict.fromkeys(rows)], stop, plan, heads=rows if head else ())
        logits = [self.model.head(node.states[stop]) for node in rows] if head else []
        return Scores(logits, self._hidden(rows, taps, stop), [stop // 2] * len(rows)), nodes  # type: ignore[arg-type]

    # ------------------------------------------------------------------ inside

    @property
    def _layers(self) -> int:
        return self.model.config.n_layers

    @property
    def _end(self) -> int:
        return self.plan.sublayers(self._layers)

    def _newest(self) -> TableNode:
        if not self.committed:
            raise TinyspecError("there is no text yet: extend the session with a prompt first")
        return self.committed[-1]

    def _admit(self, tokens: Sequence[int], more: int = 0) -> None:
        for token in tokens:
            if not 0 <= token < self.model.vocabulary:
                raise TinyspecError(f"token id {token} is outside the vocabulary of {self.model.vocabulary}")
        if len(self) + more + len(tokens) > self.model.config.max_positions:
            raise TinyspecError(f"the text does not fit into the context of {self.model.config.max_positions}")

    def _check_taps(self, taps: Sequence[int], stop: int) -> None:
        for tap in taps:
            if not (0 <= 2 * tap <= stop or tap == self._layers):
                raise ValueError(f"tap {tap} is not among the {stop // 2} layers that are run")

    def _hidden(self, nodes: Sequence[TableNode], taps: Sequence[int], stop: int) -> list[list[Any]]:
        return [[node.states[stop if tap == self._layers else 2 * tap] for node in nodes] for tap in taps]

    def _lacks(self, node: TableNode, plan: Plan, stop: int) -> bool:
        return node.plan != plan or node.reach < stop or not node.states

    def _behind(self, stop: int) -> list[TableNode]:
        """Committed tokens before the newest that are not at `stop` yet: appended, or left early and not filled."""
        return [node for node in self.committed[:-1] if not node.filled and self._lacks(node, self.plan, stop)]

    def _adopt_path(self, nodes: list[TableNode]) -> None:
        """Make nodes committed. Other guesses go, and so does what a view computed above them."""
        self.scored = []
        for node in nodes:
            if self.committed:
                self.committed[-1].children = {}
            self.committed.append(node)
        for node in (nodes[-1], *nodes[-1].descendants()) if nodes else ():
            node.part(self.plan, self._layers)

    def _plant(self, root: TableNode, tree: TokenTree) -> list[TableNode]:
        """The node of every tree entry: found, or made; probes are always made anew."""
        planted: list[TableNode] = []
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = root if up == ROOT else planted[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a guess")
            if not 0 <= token < self.model.vocabulary + (self.adopted if probe else 0):
                raise TinyspecError(f"token id {token} is outside the vocabulary of {self.model.vocabulary}")
            if parent.position + 1 >= self.model.config.max_positions:
                raise TinyspecError(f"the draft reaches beyond the context of {self.model.config.max_positions}")
            found = None if probe else parent.children.get(token)
            planted.append(found or TableNode(token, parent, self._layers, probe))
        return planted

    def _run(
        self,
        nodes: Iterable[TableNode],
        stop: int,
        plan: Plan,
        heads: Iterable[TableNode] = (),
        prefill: bool = False,
    ) -> None:
        """One pass over those of these nodes (parents before children) that lack something."""
        read = [node for node in dict.fromkeys(heads) if node.row_at != stop or self._lacks(node, plan, stop)]
        todo = [node for node in nodes if self._lacks(node, plan, stop) or node in read]
        work = sum(self._run_one(node, plan, stop) for node in todo)
        for node in read:
            node.row_at = stop
        if todo:
            self.ledger.append(Call(self.model.name, len(todo), work / 2, len(read), prefill=prefill))

    def _run_one(self, node: TableNode, plan: Plan, stop: int) -> int:
        """Run a token from where it is to `stop` under `plan`; returns the sublayers it took."""
        network = self.model.network
        node.part(plan, self._layers)
        if node.filled and node.reach < stop:  # it is run after all
            node.cut(node.reach)
        if not node.states:
            node.states = [network.embed(node.token)]
        begun, above = node.reach, node.parent
        node.exact = (node.exact or begun == 0) and (above is None or (above.exact and not above.filled))
        path = self._looked_at(node)
        for sublayer in range(begun, stop):
            layer, state = sublayer // 2, node.states[-1]
            if sublayer in plan.skip:
                pass
            elif sublayer % 2:
                state = network.feed_forward(layer, state)
            else:
                node.keys[layer] = network.keys(layer, state, node.position)
                keys = [at.keys[layer] for at in path if seen(plan, layer, node.position, at.position)]
                if None in keys:
                    raise RuntimeError(f"a token before position {node.position} has no keys in layer {layer}: run it")
                state = network.attend(layer, state, keys if self.prefixed is None else [*self._prefix(node), *keys])
            node.states.append(state)
        return sum(sublayer not in plan.skip for sublayer in range(begun, stop))

    def _prefix(self, node: TableNode) -> list[Any]:
        return [self.prefixed] if node.probe else []

    def _looked_at(self, node: TableNode) -> list[TableNode]:
        """What stands above a token, itself last: the committed text, then its guessed ancestors."""
        guesses: list[TableNode] = []
        at: TableNode | None = node
        while at is not None and not (at.position < len(self.committed) and self.committed[at.position] is at):
            guesses.append(at)
            at = at.parent
        return [*self.committed[: 0 if at is None else at.position + 1], *reversed(guesses)]
