"""A2: trees.

Five functions and a class. The hand-out (handout.md) says what each is for, with an example by hand; here stand their exact
terms. A draft is a tree of n nodes, numbered from 0 so that a parent comes before its children: `tokens` [n] and `parents` [n].
The parent of a first draft token is ROOT: the newest committed token. Rows are lists of Fractions, which calculate like floats,
without rounding: write ordinary code. Use the standard library alone.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

ROOT = -1

Row = Sequence[Fraction]  # [V] a distribution over the tokens 0 to V - 1: it adds up to one
Tree = tuple[list[int], list[int]]  # tokens [n], parents [n]


class Chance(Protocol):
    """Where randomness comes from, and the only place: `random` would make your distribution impossible to compute."""

    def accept(self, ratio: Any) -> bool:
        """True with probability min(1, ratio)."""
        ...

    def draw(self, row: Row) -> int:
        """A token, drawn from the row."""
        ...


class Session(Protocol):
    """What `score` is given: a model that has read `text` but for its newest token, which must be fed with the tree."""

    text: list[int]  # at least one token

    def score(
        self, tokens: list[int], positions: list[int], mask: list[list[bool]]
    ) -> list[list[Fraction]]:
        """One forward pass: k tokens, k rows. Nothing that is fed stays in the cache.

        Args:
            tokens, positions: [k] what is fed, and where in the text each token stands, counted from 0.
            mask: [k][c + k] True or False: what each row sees, of the c = len(text) - 1 tokens that were read and then of the
                k that are fed.
        Returns:
            [k][V] the distribution of the token after each.
        """
        ...


class Submission(Protocol):
    """What `submission.py` offers. Write the functions here, or anywhere else and import them here."""

    def positions(self, parents: list[int], committed: int) -> list[int]: ...
    def mask(self, parents: list[int], committed: int) -> list[list[bool]]: ...
    def score(self, session: Any, tokens: list[int], parents: list[int]) -> list[Row]: ...
    def siblings(
        self, p: Row, q: Row | None, candidates: list[int], chance: Any
    ) -> tuple[int | None, int]: ...
    def walk(
        self,
        tokens: list[int],
        parents: list[int],
        p_rows: list[Row],
        q_rows: list[Row | None],
        chance: Any,
    ) -> tuple[list[int], int]: ...
    def answers(self, depth: int, operations: list[Any]) -> list[Tree | None]: ...


def positions(parents: list[int], committed: int) -> list[int]:
    """Where in the text each node stands, counted from 0.

    Args:
        parents: [n] a node's parent, or ROOT. A parent comes before its children; nothing else is known of the order.
        committed: tokens of the committed text, 0 or more. They stand at positions 0 to committed - 1.
    Returns:
        [n] whole numbers, of type int. Siblings stand at one position: they are candidates for the same token.

    >>> positions([-1, -1, 0, 0, 2], committed=10)
    [10, 10, 11, 11, 12]
    """
    # solution
    found: list[int] = []
    for parent in parents:
        found.append(committed if parent == ROOT else found[parent] + 1)
    return found
    # end of solution


def mask(parents: list[int], committed: int) -> list[list[bool]]:
    """What each node sees: the committed text, its ancestors and itself.

    Args:
        parents, committed: as for `positions`.
    Returns:
        [n][committed + n] True or False (or 1 and 0, but no floats): first the columns of the committed text, then those of
        the nodes.

    >>> for row in mask([-1, -1, 1], committed=1):
    ...     print(row)
    [True, True, False, False]
    [True, False, True, False]
    [True, False, True, True]
    """
    # solution
    sees: list[list[bool]] = []
    for node, parent in enumerate(parents):
        row = [True] * committed + [False] * len(parents) if parent == ROOT else list(sees[parent])
        row[committed + node] = True
        sees.append(row)
    return sees
    # end of solution


def score(session: Session, tokens: list[int], parents: list[int]) -> list[Row]:
    """The target's rows for a whole tree, of one forward pass.

    The newest token of `session.text` was not read yet: feed it with the tree, as the root of all of it. Nodes that spell the
    same path have the same row: feed it once.

    Args:
        tokens, parents: [n] the tree; siblings may be equal, and n may be 0.
    Returns:
        [n + 1][V] entry 0 is the root's row: the distribution of the token after the text. Entry i + 1 is that of node i:
        the distribution of the token after the text and the path to node i.
    """
    # solution
    fed, above, found = [session.text[-1]], [ROOT], dict[tuple[int, int], int]()
    place: list[int] = []  # [n] where among what is fed a node's path ends
    for token, parent in zip(tokens, parents, strict=True):
        path = (0 if parent == ROOT else place[parent], token)
        if path not in found:
            found[path] = len(fed)
            fed.append(token)
            above.append(path[0])
        place.append(found[path])
    read = len(session.text) - 1
    rows = session.score(fed, positions(above, read), mask(above, read))
    return [rows[0], *(rows[at] for at in place)]
    # end of solution


# solution
def scaled(row: Row) -> Row:
    """The row divided by its sum; where nothing is left, as it is."""
    whole = sum(row)
    return [x / whole for x in row] if whole else row


# end of solution


def siblings(
    p: Row, q: Row | None, candidates: list[int], chance: Chance
) -> tuple[int | None, int]:
    """Verify several candidates for one token, in their order, by recursive rejection. The token returned has distribution p.

    Args:
        p: [V] the target's distribution.
        q: [V] the distribution that the candidates were drawn from, one after the other, without replacement; or None: they
            were not drawn, and each is verified as a point mass (a distribution that gives it probability 1).
        candidates: tokens that are all different; there may be none.
    Returns:
        The place of the candidate that was accepted (0 is the first), or None if none was; and the token: that candidate, or
        else a token drawn from what the rejections left of p.

    >>> class Stubborn:  # a chance that accepts only what is certain, and draws the likeliest token
    ...     def accept(self, ratio):
    ...         return ratio >= 1
    ...     def draw(self, row):
    ...         return max(range(len(row)), key=lambda token: row[token])
    >>> sixth, quarter, third, half = (Fraction(1, n) for n in (6, 4, 3, 2))
    >>> siblings([sixth, half, third], [half, quarter, quarter], [0, 2], Stubborn())
    (None, 1)
    """

    # solution
    for place, token in enumerate(candidates):
        drawn = q if q is not None else [Fraction(i == token) for i in range(len(p))]
        if chance.accept(p[token] / drawn[token]):
            return place, token
        p = scaled([max(Fraction(0), x - y) for x, y in zip(p, drawn, strict=True)])
        q = scaled([x * (i != token) for i, x in enumerate(q)]) if q is not None else None
    return None, chance.draw(p)
    # end of solution


def walk(
    tokens: list[int],
    parents: list[int],
    p_rows: list[Row],
    q_rows: list[Row | None],
    chance: Chance,
) -> tuple[list[int], int]:
    """Follow a tree from its root as far as the target accepts, then return one token more.

    The text that comes out, token by token, has exactly the target's distribution.

    Args:
        tokens, parents: [n] the tree. Siblings were drawn in the order of their numbers, and all differ; n may be 0.
        p_rows: [n + 1][V] the target's rows, as `score` gives them.
        q_rows: [n + 1] entry i + 1 is the distribution [V] that the children of node i were drawn from without replacement;
            entry 0 is that of the root's; None where there are no children, or where each is a point mass.
    Returns:
        The accepted nodes from the top down, and one token: what `siblings` gave in place of the rejected ones, or a bonus
        token, drawn after a node that has no children.
    """
    # solution
    path: list[int] = []
    here = ROOT
    while True:
        children = [node for node, parent in enumerate(parents) if parent == here]
        place, token = siblings(
            p_rows[here + 1], q_rows[here + 1], [tokens[node] for node in children], chance
        )
        if place is None:
            return path, token
        here = children[place]
        path.append(here)
    # end of solution


class Node:
    """A node of the trie: how often the tokens on the way to it stood in a row, and what followed them. Use it, or your own."""

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


class Trie:
    """Remembers texts by their ends: which tokens followed the last ones, and how often. The task `answers` judges it.

    >>> trie = Trie(depth=3)
    >>> trie.insert([1, 2, 3, 1, 2, 5, 1, 2, 5])
    >>> trie.retrieve([9, 1, 2], budget=2)
    ([5, 3], [-1, -1])
    >>> trie.retrieve([7, 2], budget=3)  # 5 followed 2 twice, and 1 followed that once
    ([5, 3, 1], [-1, -1, 1])
    >>> trie.retrieve([7], budget=3)
    ([], [])
    """

    def __init__(self, depth: int):
        """A trie that counts every run of 1 to `depth` tokens; depth is 2 or more."""
        # solution
        self.depth, self.root = depth, Node()
        # end of solution

    def insert(self, text: Sequence[int]) -> None:
        """Count every run of 1 to `depth` tokens of a text, as often as it occurs.

        The counts of all texts add up; no run crosses from one text to the next.
        """
        # solution
        for start in range(len(text)):
            node = self.root
            for token in text[start : start + self.depth]:
                node = node.children.setdefault(token, Node())
                node.count += 1
        # end of solution

    def retrieve(self, context: Sequence[int], budget: int) -> Tree:
        """A draft: what followed the longest known end of the context.

        That end is the longest of 1 to depth - 1 tokens that was seen *with something after it*; if there is none, the tree is
        empty. Every path of tokens that was seen after it (end and path have at most `depth` tokens together) is a node, and
        its count is how often end and path occurred in a row. Of all of them the tree has the first `budget`: those of the
        highest counts; of equal counts the path that comes first in the order of lists ([1] before [1, 0] before [2]).

        Returns:
            tokens, parents: the nodes in this order, so that a parent comes before its children.
        """
        # solution
        for length in range(min(len(context), self.depth - 1), 0, -1):
            end: Node | None = self.root
            for token in context[len(context) - length :]:
                end = end.children.get(token) if end else None
            if end and end.children:
                break
        else:
            return [], []
        tokens, parents = list[int](), list[int]()
        waiting: list[tuple[int, tuple[int, ...], int, Node]]
        waiting = [(-child.count, (token,), ROOT, child) for token, child in end.children.items()]
        while waiting and len(tokens) < budget:
            best = min(waiting, key=lambda entry: entry[:2])  # a heap, where budgets are large
            waiting.remove(best)
            _, path, parent, node = best
            waiting += [
                (-child.count, (*path, token), len(tokens), child)
                for token, child in node.children.items()
            ]
            tokens.append(path[-1])
            parents.append(parent)
        return tokens, parents
        # end of solution


def answers(depth: int, operations: list[Any]) -> list[Tree | None]:
    """What a new trie answers to operations, in order. It is written for you: as the task `answers` the grader judges Trie.

    Args:
        operations: ("insert", text), answered by None, and ("retrieve", context, budget), answered by the tree.

    >>> answers(2, [("insert", [4, 5]), ("retrieve", [4], 1)])
    [None, ([5], [-1])]
    """
    trie = Trie(depth)
    found: list[Tree | None] = []
    for what, *rest in operations:
        if what == "insert":
            trie.insert(rest[0])
            found.append(None)
        else:
            found.append(trie.retrieve(rest[0], rest[1]))
    return found
