"""A view of a table model's text under another plan: what `lm.view.View` is to a session."""

from collections.abc import Iterable, Sequence

from tinyspec.errors import TinyspecError
from tinyspec.laws.tablesession import TableSession
from tinyspec.laws.tabletext import TableNode
from tinyspec.lm.forward import Plan, Scores
from tinyspec.tree import TokenTree


class TableView:
    """A target on somebody else's text: the session's committed tokens, then a trunk of its
    uncommitted nodes.
    """

    cache_exact = False

    def __init__(self, session: TableSession, plan: Plan):
        self.session, self.plan = session, plan
        self._trunk: list[TableNode] = []
        self._nodes: list[TableNode] = []
        self._at: int | None = None  # rewound into the session's text: where

    @property
    def model(self) -> object:
        """The session's."""
        return self.session.model

    @property
    def text(self) -> list[int]:
        """The session's text, then the trunk."""
        self._follow()
        return [*self.session.text, *(node.token for node in self._trunk)][: self._at]

    def __len__(self) -> int:
        return len(self.text)

    def _follow(self) -> None:
        """The session has gone on: what is committed leaves the trunk; if it went another way, all
        of it.
        """
        committed = self.session.committed
        kept = [node for node in self._trunk if node.position >= len(committed)]
        if not (kept and committed and committed[-1].children.get(kept[0].token) is kept[0]):
            kept = []
        self._trunk = kept
        if self._at is not None and self._at >= len(committed):
            self._at = None

    def append(self, tokens: Iterable[int]) -> None:
        """Go on with these tokens; inside the session's own text they must agree with it."""
        self._follow()
        self._nodes = []
        session = self.session
        for token in tokens:
            if self._at is not None:
                if session.committed[self._at].token != token:
                    raise ValueError("a view cannot leave its session's committed text")
                self._at = None if self._at + 1 == len(session) else self._at + 1
                continue
            tip = self._tip()
            tree = TokenTree.chain((token,))
            self._trunk += session._attach(tip, tree)

    def _tip(self) -> TableNode:
        if not self.session.committed:
            raise TinyspecError(
                "there is no text yet: extend the view's session with a prompt first"
            )
        return self._trunk[-1] if self._trunk else self.session.committed[-1]

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens to the trunk; they run with the next tree."""
        self.append(tokens)
        return self.session.extend((), hidden_layers)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Rows of the newest token and the tree under the view's plan."""
        self._follow()
        if self._at is not None:
            raise ValueError("the view stands inside its session's text: extend it first")
        scores, self._nodes = self.session.score_tree(
            tree, hidden_layers, self.plan, trunk=self._trunk
        )
        return scores

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Grow the trunk by a path of the last tree, then `next`."""
        self._follow()
        tip, nodes = self._tip(), [self._nodes[i] for i in path]
        for node in nodes:
            if node.probe or node.parent is not tip:
                raise ValueError(f"{list(path)} is not a path of guesses down the view's last tree")
            tip = node
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
        """Back to the session's own text."""
        self._trunk, self._nodes, self._at = [], [], None
