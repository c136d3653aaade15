"""A view: the text and draft tokens of a session, under another plan."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan, Scores
from tinyspec.tree import TokenTree

if TYPE_CHECKING:
    from tinyspec.lm.session import Node, Session


class View:
    """The text and nodes of a session under another plan.

    Its text is the session's committed text plus its *trunk*, a chain of the session's uncommitted
    nodes. So a decoder can run on a view (LayerSkip's draft, TriForce's middle level) while the
    session keeps the trunk as draft tokens that it may verify. What both plans compute alike is
    computed once.
    """

    cache_exact = False  # its nodes are computed under the plan

    def __init__(self, session: "Session", plan: Plan):
        self.session, self.plan = session, plan
        self._trunk: list[Node] = []
        self._nodes: list[Node] = []  # the nodes of the last tree, in its order
        self._position: int | None = (
            None  # rewound into the session's text: where; None: at its end
        )

    @property
    def text(self) -> list[int]:
        self._sync_trunk()
        return [*self.session.text, *(node.token for node in self._trunk)][: self._position]

    def __len__(self) -> int:
        self._sync_trunk()
        return len(self.session) + len(self._trunk) if self._position is None else self._position

    def _sync_trunk(self) -> None:
        """Drop the part of the trunk that the session has committed.

        Drop all of it if the session has committed other tokens.
        """
        committed = self.session.committed
        kept = [node for node in self._trunk if node.position >= len(committed)]
        # The node's own parent proves nothing: after a commit and a rewind a token still refers to
        # the parent that has dropped it.
        is_attached = (
            bool(kept and committed) and committed[-1].children.get(kept[0].token) is kept[0]
        )
        self._trunk = kept if is_attached else []
        if self._position is not None and self._position >= len(self.session):
            self._position = None

    def append(self, tokens: Iterable[int]) -> None:
        """Extend the trunk by these tokens. Inside the session's own text they must equal it."""
        self._sync_trunk()
        self._nodes = []
        limit = self.session.model.config.max_positions
        for token in tokens:
            if self._position is not None:
                if self.session.committed[self._position].token != token:
                    raise ValueError("a view cannot leave its session's committed text")
                self._position += 1
                self._position = None if self._position == len(self.session) else self._position
                continue
            if not 0 <= token < self.session.model.config.vocab_size:
                raise TinyspecError(
                    f"token id {token} is outside the vocabulary of "
                    f"{self.session.model.config.vocab_size}"
                )
            if not self.session.committed:
                raise TinyspecError(
                    "there is no text yet: extend the view's session with a prompt first"
                )
            tip = self._trunk[-1] if self._trunk else self.session.committed[-1]
            if tip.position + 1 >= limit:
                raise TinyspecError(
                    f"the draft reaches beyond the context of {limit} tokens: draft fewer"
                )
            self._trunk.append(tip.children.get(token) or type(tip)(token, tip))

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens to the trunk. They run with the next tree, without hidden states."""
        self.append(tokens)
        return self.session.extend((), hidden_layers)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the scores of the newest token and the tree under the view's plan."""
        self._sync_trunk()
        if self._position is not None:
            raise ValueError("the view stands inside its session's text: extend it first")
        scores, self._nodes = self.session.score_tree(
            tree, hidden_layers, self.plan, trunk=self._trunk
        )
        return scores

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Extend the trunk by a path of the last tree, then `next`."""
        self._sync_trunk()
        nodes = [self._nodes[i] for i in path]
        for tip, node in pairwise(
            (self._trunk[-1] if self._trunk else self.session.committed[-1], *nodes)
        ):
            if node.probe or node.parent is not tip:
                raise ValueError(f"{list(path)} is not a path down the view's last tree")
        self._trunk += nodes
        self.append(() if next is None else (next,))

    def rewind(self, length: int) -> None:
        """Shorten the trunk. Inside the session's text, only the end of the view's text moves."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        self._nodes = []
        self._trunk = self._trunk[: max(length - len(self.session), 0)]
        self._position = length if length < len(self.session) else None

    def end(self) -> None:
        """Return to the session's own text."""
        self._trunk, self._nodes, self._position = [], [], None
