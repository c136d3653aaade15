"""The twin of tree.pyx in plain Python."""

from collections.abc import Sequence

from tinyspec._core.limits import MAX_TREE_NODES, check_range, read_ids
from tinyspec.errors import TinyspecError


def check_parents(parents: Sequence[int]) -> None:
    """Raise TinyspecError unless every parent stands before its children."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise TinyspecError(
                f"node {node} has parent {parent}: a tree lists every parent before its children"
            )


def ancestors(parents: Sequence[int]) -> list[list[int]]:
    """Return 0/1 [n, n]: row i marks node i and its ancestors, which it attends to. O(n^2).

    >>> ancestors([-1, 0, 0])
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    parents = read_ids(parents)
    check_range("the number of nodes", len(parents), 0, MAX_TREE_NODES)
    check_parents(parents)
    mask: list[list[int]] = []
    for node, parent in enumerate(parents):
        row = list(mask[parent]) if parent >= 0 else [0] * len(parents)
        row[node] = 1
        mask.append(row)
    return mask


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node, [n]; a child of the root has depth 1. O(n).

    >>> depths([-1, 0, 0, 2])
    [1, 2, 2, 3]
    """
    parents = read_ids(parents)
    check_parents(parents)
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return depth


def unique_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return for every node the first node with the same path of tokens, perhaps itself: [n]. O(n).

    >>> unique_paths([5, 5, 7, 7], [-1, -1, 0, 1])
    [0, 0, 2, 2]
    """
    tokens, parents = read_ids(tokens), read_ids(parents)
    if len(tokens) != len(parents):
        raise TinyspecError(f"a tree of {len(tokens)} tokens has {len(parents)} parents")
    check_parents(parents)
    seen: dict[tuple[int, int], int] = {}
    first: list[int] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        first.append(seen.setdefault((first[parent] if parent >= 0 else -1, token), node))
    return first
