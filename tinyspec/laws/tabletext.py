"""The text of a table model: committed tokens and the guesses that hang from them. Nothing here
computes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan
from tinyspec.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from tinyspec.laws.tables import TableModel

FULL_PLAN = Plan()


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
        self.plan, self.row_at = FULL_PLAN, -1
        self.states: list[Any] = []
        self.keys: list[Any] = [None] * n_layers
        self.filled, self.exact = False, True

    @property
    def sublayers_done(self) -> int:
        """Sublayers done."""
        return max(len(self.states) - 1, 0)

    def invalidate_beyond(self, plan: Plan, n_layers: int) -> None:
        """Keep only what also holds under this plan."""
        agreed = self.sublayers_done if self.plan == plan else self.plan.differs(plan, n_layers)
        if agreed < self.sublayers_done:
            self.plan = plan
            self.cut(agreed)

    def cut(self, reach: int) -> None:
        """Take back what was run beyond `reach` sublayers."""
        del self.states[reach + 1 :]
        first = (self.sublayers_done + 1) // 2  # an odd reach keeps the attention half of its layer
        self.keys[first:] = [None] * (len(self.keys) - first)
        self.row_at, self.filled = -1, False

    def descendants(self) -> "list[TableNode]":
        """All below, parents before children."""
        below = list(self.children.values())
        for node in below:
            below.extend(node.children.values())
        return below


class TableText:
    """Committed tokens and guesses of one table model."""

    def __init__(self, model: "TableModel", plan: Plan):
        self.model, self.plan = model, plan
        self.committed: list[TableNode] = []
        self.scored: list[TableNode] = []  # nodes of the last tree, by its indices
        self.adopted = 0  # how many ids beyond the vocabulary name a probe

    @property
    def text(self) -> list[int]:
        """Committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens; nodes that already spell them keep what they computed."""
        tokens = list(tokens)
        self._admit(tokens)
        tip, path = (self.committed[-1] if self.committed else None), []
        for token in tokens:
            tip = (tip.children.get(token) if tip else None) or TableNode(token, tip, self._layers)
            path.append(tip)
        self._adopt_path(path)

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep a path of the last scored tree, then `next` (unrun)."""
        tip, nodes = self._newest(), [self.scored[i] for i in path]
        for node in nodes:
            if node.probe or node.parent is not tip:
                raise ValueError(
                    f"{list(path)} is not a path of guesses from the newest token down the last tree"
                )
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

    # ------------------------------------------------------------------ inside

    @property
    def _layers(self) -> int:
        return self.model.config.n_layers

    def _newest(self) -> TableNode:
        if not self.committed:
            raise TinyspecError("there is no text yet: extend the session with a prompt first")
        return self.committed[-1]

    def _admit(self, tokens: Sequence[int], more: int = 0) -> None:
        for token in tokens:
            if not 0 <= token < self.model.vocabulary:
                raise TinyspecError(
                    f"token id {token} is outside the vocabulary of {self.model.vocabulary}"
                )
        if len(self) + more + len(tokens) > self.model.config.max_positions:
            raise TinyspecError(
                f"the text does not fit into the context of {self.model.config.max_positions}"
            )

    def _adopt_path(self, nodes: list[TableNode]) -> None:
        """Make nodes committed. Other guesses go, and so does what a view computed above them."""
        self.scored = []
        for node in nodes:
            if self.committed:
                self.committed[-1].children = {}
            self.committed.append(node)
        for node in (nodes[-1], *nodes[-1].descendants()) if nodes else ():
            node.invalidate_beyond(self.plan, self._layers)

    def _attach(self, root: TableNode, tree: TokenTree) -> list[TableNode]:
        """The node of every tree entry: found, or made; probes are always made anew."""
        planted: list[TableNode] = []
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = root if up == ROOT else planted[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a guess")
            if not 0 <= token < self.model.vocabulary + (self.adopted if probe else 0):
                raise TinyspecError(
                    f"token id {token} is outside the vocabulary of {self.model.vocabulary}"
                )
            if parent.position + 1 >= self.model.config.max_positions:
                raise TinyspecError(
                    f"the draft reaches beyond the context of {self.model.config.max_positions}"
                )
            found = None if probe else parent.children.get(token)
            planted.append(found or TableNode(token, parent, self._layers, probe))
        return planted
