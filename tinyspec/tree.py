"""The shape of a draft: a tree of draft tokens under the newest committed token.

Nodes stand in topological order: a parent before its children, siblings in draw order. Siblings may
be equal, because a token may be drawn twice. The model computes equal paths once.

Each node carries the distribution it was drawn from, *given all the past and its earlier siblings*,
or None. A node with None is verified as a point mass, which is always exact.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from tinyspec.errors import TinyspecError

Probs: TypeAlias = Any
"""A distribution over the vocabulary, [V], summing to 1: a float64 ndarray on the CPU, a tensor on
a device, a list of Fractions in the exact laws. Everything that takes Probs takes all three."""

ROOT = -1
"""The parent of the first draft tokens: the newest committed token."""


class TokenTree(NamedTuple):
    """A draft of n nodes.

    tokens       [n] ids; an id >= V names one of the session's probe embeddings
    parents      [n] index of the parent node; ROOT for children of the newest committed token
    draft_probs  [n] Probs, or None for a point mass
    probe        [n] whether the node is a probe: computed and observed, never verified or
                 committed, never the parent of a draft token
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    draft_probs: Sequence[Probs | None] = ()
    probe: Sequence[bool] = ()

    @classmethod
    def chain(
        cls, tokens: Sequence[int], draft_probs: Sequence[Probs | None] | None = None
    ) -> "TokenTree":
        """Return a tree with a single branch.

        >>> TokenTree.chain([5, 7]).parents
        (-1, 0)
        """
        n = len(tokens)
        return cls(
            tuple(tokens),
            tuple(range(-1, n - 1)),
            tuple(draft_probs) if draft_probs else (None,) * n,
            (False,) * n,
        )

    @classmethod
    def point_masses(cls, tokens: Sequence[int], parents: Sequence[int]) -> "TokenTree":
        """Return a tree of draft tokens that declare no distribution.

        >>> TokenTree.point_masses([5, 6], [ROOT, ROOT]).draft_probs
        (None, None)
        """
        return cls(tokens, parents, (None,) * len(tokens), (False,) * len(tokens))

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the first draft token down to `node`; none for ROOT.

        >>> TokenTree((5, 6, 7), (-1, -1, 1), (None,) * 3, (False,) * 3).path(2)
        (1, 2)
        """
        steps: list[int] = []
        while node != ROOT:
            steps.append(node)
            node = self.parents[node]
        return tuple(reversed(steps))

    def tokens_on(self, path: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of these nodes.

        >>> TokenTree.chain([5, 7]).tokens_on((0, 1))
        (5, 7)
        """
        return tuple(self.tokens[node] for node in path)

    def chain_nodes(self, rule: str) -> list[int]:
        """Return the nodes of a chain from the first down, without probes.

        Raises TinyspecError, which names the verification rule, if the draft branches.

        >>> TokenTree((5, 9, 7), (-1, -1, 0), (None,) * 3, (False, True, False)).chain_nodes("-")
        [0, 2]
        """
        draft = [node for node, is_probe in enumerate(self.probe) if not is_probe]
        if [self.parents[node] for node in draft] != [ROOT, *draft][: len(draft)]:
            raise TinyspecError(
                f"{rule} judges one chain of draft tokens, and this draft branches: draft a chain, "
                "or judge it with spectr"
            )
        return draft

    def depths(self) -> list[int]:
        """Return the depth of every node; a child of ROOT has depth 1."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(1 if parent == ROOT else depth[parent] + 1)
        return depth
