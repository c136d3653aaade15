"""The shape of a draft: a tree of guesses hanging from the newest committed token.

Nodes stand in topological order (a parent before its children) and siblings in the order they were drawn. Siblings may be
equal: they are proposals, not positions, and the model computes equal paths once. Each node carries the law it was drawn
from *given all the past and its earlier siblings*, or None: judge it as a point mass. None is always safe; a declared law
is an optimisation that the drafter must earn.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Row: TypeAlias = Any
"""A law over the vocabulary, [V], summing to 1: float64 ndarray on the CPU, a tensor on a device, a list of Fractions in
the exact laws. Everything that takes a Row takes all three."""

ROOT = -1
"""The parent of the first guesses: the newest committed token."""


class TokenTree(NamedTuple):
    """A draft of n nodes.

    tokens  [n] ids; an id >= V names an adopted probe embedding
    parents [n] index of the parent node, ROOT for children of the newest committed token
    laws    [n] Row or None
    probe   [n] a probe is computed and observed, never verified, committed or built upon by a guess
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    laws: Sequence[Row | None] = ()
    probe: Sequence[bool] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], laws: Sequence[Row | None] | None = None) -> "TokenTree":
        """One guess after the other.

        >>> TokenTree.chain([5, 7]).parents
        (-1, 0)
        """
        n = len(tokens)
        return cls(
            tuple(tokens),
            tuple(range(-1, n - 1)),
            tuple(laws) if laws else (None,) * n,
            (False,) * n,
        )

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the first guess down to `node`; empty for ROOT.

        >>> TokenTree((5, 6, 7), (-1, -1, 1), (None,) * 3, (False,) * 3).path(2)
        (1, 2)
        """
        steps: list[int] = []
        while node != ROOT:
            steps.append(node)
            node = self.parents[node]
        return tuple(reversed(steps))

    def spelled(self, path: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a path of nodes."""
        return tuple(self.tokens[node] for node in path)

    def depths(self) -> list[int]:
        """Depth of every node; a child of ROOT has depth 1."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(1 if parent == ROOT else depth[parent] + 1)
        return depth
