"""A view: the same weights, text and nodes under another plan.

A view has a text of its own beyond the session's: its trunk, a chain of the session's uncommitted
nodes. So a decoder can run on a view (LayerSkip's draft, TriForce's middle level) while the session
knows its trunk as nodes that it may verify; what both plans compute alike is computed once.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan, Scores
from tinyspec.lm.node import Node
from tinyspec.lm.session import Session
from tinyspec.tree import TokenTree


class View:
    """A target on somebody else's session. Its text is the session's committed text plus its
    trunk.
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
        """The session has gone on: drop what is committed by now, or everything if it went another
        way.
        """
        committed = self.session.committed
        kept = [node for node in self._trunk if node.position >= len(committed)]
        # its parent would not do: a token that was committed and taken back still names the parent
        # that has dropped it
        hangs = bool(kept and committed) and committed[-1].children.get(kept[0].token) is kept[0]
        self._trunk = kept if hangs else []
        if self._at is not None and self._at >= len(self.session):
            self._at = None

    def append(self, tokens: Iterable[int]) -> None:
        """Go on with these tokens; inside the session's own text they must agree with it."""
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
            self._trunk.append(tip.children.get(token) or Node(token, tip))

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens to the trunk. They run with the next tree; no hidden states are
        shown.
        """
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
        """Back to the session's own text."""
        self._trunk, self._nodes, self._at = [], [], None
