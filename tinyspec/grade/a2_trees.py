"""Laws of assignment A2 on trees: positions, the mask, and one forward pass for a whole tree.

The oracle of a row is the model itself, on the text of one path without any tree.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

from tinyspec.grade.props_a2 import TreeSession
from tinyspec.grade.task import (
    Cases,
    Function,
    Task,
    describe_result,
    expect_close,
    graded_law,
    is_close,
    is_number,
    require_list,
)
from tinyspec.laws.evidence import accuse

STANDS = "a node stands where its token would stand if its path were the text"
SEES = "a node sees the committed text, its ancestors and itself, and nothing else"
ROWS = "every row is the row of its path alone"
BILL = "one forward pass for the whole tree, and each path is fed once"

ROOT = -1
Parents = tuple[int, ...]


# ---------------------------------------------------------------------- trees


def node_path(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the first draft token down to this one."""
    return [] if node == ROOT else [*node_path(parents, parents[node]), node]


def all_shapes(largest: int) -> Iterator[Parents]:
    """Yield the parents of every tree of up to so many nodes, a parent before its children."""
    for count in range(largest + 1):
        yield from product(*(range(ROOT, node) for node in range(count)))


def draw_shape(random: Random, largest: int) -> Parents:
    """Return a tree of up to so many nodes."""
    return tuple(random.randrange(ROOT, node) for node in range(random.randint(1, largest)))


def draw_deep_shape(random: Random, largest: int) -> Parents:
    """Return a tree in which a node hangs from one of the last two before it: most are far down."""
    count = random.randint(1, largest)
    return tuple(random.randrange(max(ROOT, node - 2), node) for node in range(count))


CHAIN = tuple(range(ROOT, 7))  # of 8 nodes
TWO_CHAINS = (ROOT, *range(ROOT, 14))  # of 8 nodes each, one node of each in turn
CHAIN_WITH_SIBLINGS = (ROOT, *(node - node % 2 - 1 for node in range(1, 16)))


def draw_trees(cases: Cases) -> Iterator[tuple[Parents, int]]:
    """Yield trees and lengths of committed text: all of up to four nodes, then larger ones."""
    for parents in all_shapes(4):
        for committed in (1, 0, 3):
            yield parents, committed
    for parents in (CHAIN, TWO_CHAINS, CHAIN_WITH_SIBLINGS):
        for committed in (5, 0):
            yield parents, committed
    random = Random(f"{cases.seed} trees")
    larger = [(draw_shape(random, 12), random.randrange(9)) for _ in range(60 * cases.times)]
    larger += [(draw_deep_shape(random, 20), random.randrange(9)) for _ in range(20 * cases.times)]
    yield from sorted(larger, key=lambda tree: len(tree[0]))


# ---------------------------------------------------------------------- positions and the mask


@graded_law(10, STANDS)
def positions_are_right(positions: Function, cases: Cases) -> Iterator[bool]:
    """Check that a node stands neither at its index, nor one off, nor counted from the tree."""
    for parents, committed in draw_trees(cases):
        case: dict[str, Any] = {"parents": list(parents), "committed": committed}
        answer = positions(list(parents), committed)
        got = list(require_list(STANDS, answer, len(parents), "positions", **case))
        expected = [committed + len(node_path(parents, node)) - 1 for node in range(len(parents))]
        for node, position in enumerate(got):
            if type(position) is not int:
                what = f"the position of node {node} is {describe_result(position)}"
                case["what is wrong"] = f"{what}, not a whole number"
                accuse(STANDS, expected, got, **case)
        expect_close(STANDS, expected, got, **case)
        yield True


@graded_law(15, SEES)
def mask_is_right(mask: Function, cases: Cases) -> Iterator[bool]:
    """Check that a node sees all of its ancestors and the text, and no siblings or cousins."""
    for parents, committed in draw_trees(cases):
        case: dict[str, Any] = {"parents": list(parents), "committed": committed}
        rows = require_list(SEES, mask(list(parents), committed), len(parents), "rows", **case)
        for node, row in enumerate(rows):
            case["row of node"] = node
            got = require_list(SEES, row, committed + len(parents), "entries", **case)
            above = node_path(parents, node)
            expected = [True] * committed + [other in above for other in range(len(parents))]
            if list(got) != expected or not all(map(_is_bit, got)):
                case["what is wrong"] = describe_entry(expected, got, committed, node)
                accuse(SEES, expected, list(got), **case)
        yield True


def _is_bit(entry: Any) -> bool:
    """Return whether this is True or False, 1 or 0, and no float."""
    return type(entry) in (bool, int) and entry in (0, 1)


def describe_entry(expected: Sequence[bool], got: Sequence[Any], committed: int, node: int) -> str:
    """Return the first wrong entry of a mask's row in words."""
    entries = enumerate(zip(expected, got, strict=True))
    column = next(at for at, (a, b) in entries if a != b or not _is_bit(b))
    if not _is_bit(got[column]):
        return f"entry {column} is {describe_result(got[column])}, neither True nor False"
    if column < committed:
        return f"it does not see committed token {column}"
    other = column - committed
    if not expected[column]:
        return f"it sees node {other}, which is no ancestor of it"
    if other == node:
        return "it does not see itself"
    return f"it does not see node {other}, its ancestor"


# ---------------------------------------------------------------------- one forward pass


EQUAL_PATHS: tuple[tuple[list[int], list[int], Parents], ...] = (
    # the hand-out's tree: below equal siblings stand equal paths
    ([2, 0, 1], [0, 0, 2, 2], (-1, -1, 0, 1)),
    # one of these paths stands twice, another once
    ([2, 0], [1, 1, 0, 1, 0], (-1, -1, 1, 0, 0)),
    # two equal chains
    ([1], [0, 0, 1, 1, 2, 2], (-1, -1, 0, 1, 2, 3)),
    # one token alone
    ([0, 1], [2, 2, 2, 2, 2, 2], (-1, -1, 1, 0, 3, 2)),
    # equal tokens on one level, in paths of which only two are equal
    ([0, 2], [0, 1, 1, 0, 0], (-1, -1, 0, 1, 0)),
)
"""Texts, tokens and parents in which nodes with different parents have the same path."""


def draw_drafts(cases: Cases) -> Iterator[tuple[int, list[int], list[int], Parents]]:
    """Yield the seed of a model of three tokens, a text, and a tree's tokens and parents.

    The smallest come first, and siblings may be equal.
    """
    random = Random(f"{cases.seed} drafts")

    def draw_tokens(count: int) -> list[int]:
        return [random.randrange(3) for _ in range(count)]

    for parents in all_shapes(3):
        for length in (1, 2):
            yield random.randrange(5), draw_tokens(length), draw_tokens(len(parents)), parents
    for text, tokens, parents in EQUAL_PATHS:
        yield random.randrange(5), list(text), list(tokens), parents
    larger = []
    for number in range(100 * cases.times):
        parents = draw_shape(random, 8) if number % 4 else draw_deep_shape(random, 8)
        tokens = draw_tokens(len(parents))
        if number % 2 == 0:
            tokens = [token % 2 for token in tokens]
        larger.append((random.randrange(5), draw_tokens(random.randint(1, 4)), tokens, parents))
    yield from sorted(larger, key=lambda draft: len(draft[3]))


def row_without_tree(seed: int, text: Sequence[int]) -> list[Any]:
    """Return the row after a text, computed without any tree."""
    return TreeSession(text, 3, seed).score(text[-1:], [len(text) - 1], [[1] * len(text)])[0]


@graded_law(10, ROWS)
def rows_are_those_of_paths(score: Function, cases: Cases) -> Iterator[bool]:
    """Check the root's row and every node's, whatever else is in the tree."""
    for seed, text, tokens, parents in draw_drafts(cases):
        session = TreeSession(text, 3, seed)
        case: dict[str, Any] = {"text": text, "tokens": tokens, "parents": list(parents)}
        answer = score(session, list(tokens), list(parents))
        for number, (fed, positions) in enumerate(session.trace, 1):
            name = "fed" if len(session.trace) == 1 else f"fed in forward pass {number}"
            case[name] = {"tokens": fed, "positions": positions}
        what = "the root's row and one for each node"
        got = require_list(ROWS, answer, len(tokens) + 1, what, **case)
        for entry, row in enumerate(got):
            path = [*text, *(tokens[node] for node in node_path(parents, entry - 1))]
            case["entry"] = f"{entry}, the row after {path}"
            expected = row_without_tree(seed, path)
            row = require_list(ROWS, row, 3, "probabilities", **case)
            if not all(map(is_number, row)) or not is_close(expected, row):
                accuse(ROWS, expected, list(row), **case)
        yield True


@graded_law(5, BILL, ROWS)
def each_path_is_fed_once(score: Function, cases: Cases) -> Iterator[bool]:
    """Check how many forward passes and rows the tree took."""
    for seed, text, tokens, parents in draw_drafts(cases):
        session = TreeSession(text, 3, seed)
        score(session, list(tokens), list(parents))
        ends = range(ROOT, len(tokens))
        paths = {tuple(tokens[node] for node in node_path(parents, end)) for end in ends}
        n_rows = sum(len(fed) for fed, _ in session.trace)
        case: dict[str, Any] = {"text": text, "tokens": tokens, "parents": list(parents)}
        case["paths"] = sorted(paths, key=lambda tokens: (len(tokens), tokens))
        expected = {"forward passes": 1, "rows": len(paths)}
        expect_close(BILL, expected, {"forward passes": len(session.trace), "rows": n_rows}, **case)
        yield True


POSITIONS_TASK = Task("positions", "A2.1 Positions", (positions_are_right,))
MASK_TASK = Task("mask", "A2.2 The mask", (mask_is_right,))
SCORE_TASK = Task(
    "score",
    "A2.3 One forward pass for a tree",
    (rows_are_those_of_paths, each_path_is_fed_once),
    uses=("positions", "mask"),
)
