"""A joint target: several models score one tree, and one function makes the law of their rows.

Contrastive decoding (an expert less an amateur), cascades with deferral (a small model's row where
it is good enough, else the large one's), grammar masks (one model, and what may come next): each is
a function of the members' rows and of the text. The decoder sees one target, so every drafter,
verifier and law serves it. A member may draft as well (`SharedSessionDrafter`): its session keeps
the nodes it drafted, so that scoring the tree runs only the rows that drafting left out.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from tinyspec.decoding.decode import Target
from tinyspec.decoding.sampling import is_exact
from tinyspec.errors import TinyspecError
from tinyspec.lm.feed import Scores
from tinyspec.lm.host import stack
from tinyspec.tree import ROOT, TokenTree

Make: TypeAlias = Callable[[Sequence[Any], Sequence[int], Sequence[int]], Any]
"""(one row of each member, the committed text, the path below it) -> the joint row: logits, or a
table's weights, [V]. A function of its arguments alone. The text is shared: it is read, never
changed."""


class Joint:
    """Members that hold the same text. Hidden states, and the depth that rows ran to, are the first
    member's.
    """

    def __init__(self, members: Sequence[Target], make: Make):
        self.members, self.make = tuple(members), make
        self.text: list[int] = []
        self._tree = TokenTree()  # the last that was scored

    @property
    def cache_exact(self) -> bool:
        """Whether every member's cache is what teacher-forcing the text would give."""
        return all(member.cache_exact for member in self.members)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        first, *_ = (
            member.extend(tokens, () if i else hidden_layers)
            for i, member in enumerate(self.members)
        )
        self.text.extend(tokens)
        return first

    def append(self, tokens: Sequence[int]) -> None:
        for member in self.members:
            member.append(tokens)
        self.text.extend(tokens)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Every member scores the tree; entry i of the logits is made of their entries i."""
        first, *others = (
            member.score(tree, () if i else hidden_layers) for i, member in enumerate(self.members)
        )
        self._tree, rows = tree, list[Any]()
        for node in range(ROOT, len(tree.tokens)):
            parts = [scores.logits[node + 1] for scores in (first, *others)]
            sizes = {len(part) for part in parts}
            if len(sizes) > 1:
                raise TinyspecError(
                    f"the models of a joint target have {sorted(sizes)} tokens: use one vocabulary"
                )
            rows.append(self.make(parts, self.text, tree.tokens_on(tree.path(node))))
        return first._replace(logits=_together(rows))

    def commit(self, path: Sequence[int], next: int | None) -> None:
        for member in self.members:
            member.commit(path, next)
        self.text += [*self._tree.tokens_on(path), *(() if next is None else (next,))]

    def rewind(self, length: int) -> None:
        for member in self.members:
            member.rewind(length)
        del self.text[length:]

    def end(self) -> None:
        for member in self.members:
            member.end()
        self.text = []


def _together(rows: list[Any]) -> Any:
    """Rows as `Scores` has them: a table's Fractions as a list, logits as one tensor [n+1, V]."""
    if is_exact(rows[0]):
        return rows
    return torch.from_numpy(np.stack(rows)) if isinstance(rows[0], np.ndarray) else stack(rows)
