"""Laws of assignment A4 on ranks: how often each candidate is right, and the tree that follows."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain, product
from math import prod
from random import Random
from typing import Any

import torch

from tinyspec.grade.a4_heads import (
    CLOSE,
    Text,
    Weights,
    compute_logits,
    draw_heads,
    make_generator,
    show_all,
)
from tinyspec.grade.task import (
    Cases,
    Function,
    GradedLaw,
    Task,
    describe_result,
    graded_law,
    is_number,
    is_token,
    require_list,
)
from tinyspec.laws.evidence import accuse
from tinyspec.tree import ROOT

MEASURED = "entry [i][r] is how often the candidate of rank r of head i is right"
POOLED = "all positions count alike, in whatever text they stand"
IS_TREE = "a tree has n different paths of ranks, and with a path also its beginning"
BEST = "no tree of n nodes is expected to have more tokens accepted"

Path = tuple[int, ...]
"""The ranks from the root down to a node."""


# ---------------------------------------------------------------------- the table


def draw_held_out(cases: Cases, lengths: Sequence[int]) -> Iterator[tuple[Weights, list[Text]]]:
    """Yield weights of two heads, and texts of these lengths. Logits of a state all differ."""
    for number in range(12 * cases.times):
        generator = make_generator(cases.seed, "texts", number)
        d, vocabulary = 2 + number % 3, 3 + number % 2
        weights = draw_heads(2, d, vocabulary, generator)
        texts = list[Text]()
        for length in lengths:
            ids = torch.randint(vocabulary, (length,), generator=generator)
            states = torch.randn(length, d, generator=generator, dtype=torch.float64)
            texts.append((ids, states))
        weights["rows"] = torch.randn(vocabulary, d, generator=generator, dtype=torch.float64)
        yield weights, texts


def count_ranks(weights: Weights, texts: Sequence[Text], ranks: int) -> list[list[Fraction]]:
    """Return the table position by position, in Fractions."""
    table = []
    for depth in range(2):
        found = list[int]()
        for ids, states in texts:
            for position in range(len(ids) - depth - 2):
                logits = compute_logits(weights, states[position], depth)
                order = logits.argsort(descending=True).tolist()
                found.append(order.index(int(ids[position + depth + 2])))
        table.append([Fraction(found.count(rank), len(found)) for rank in range(ranks)])
    return table


def table_law(points: int, sentence: str, lengths: Sequence[int]) -> GradedLaw:
    """Return the law of tables that are measured on texts of these lengths."""

    @graded_law(points, sentence)
    def look(rank_table: Function, cases: Cases) -> Iterator[bool]:
        for number, (weights, texts) in enumerate(draw_held_out(cases, lengths)):
            ranks = 1 + number % 3
            parts = (show_all(ids=ids, states=states) for ids, states in texts)
            case = {"ranks": ranks, "texts": list(parts), **show_all(weights=weights)}
            answer = rank_table(weights, texts, ranks)
            rows = require_list(sentence, answer, 2, "a row for each head", **case)
            for row in rows:
                row = require_list(sentence, row, ranks, "a number for each rank", **case)
                if not all(map(is_number, row)):
                    accuse(sentence, "numbers", row, **case)
            expected = count_ranks(weights, texts, ranks)
            got = [list(row) for row in rows]
            pairs = zip(chain(*expected), chain(*got), strict=True)
            if any(abs(float(x) - float(y)) > CLOSE for x, y in pairs):
                accuse(sentence, expected, got, **case)
            yield True

    return look


table_has_the_shares = table_law(6, MEASURED, (6,))
positions_count_alike = table_law(4, POOLED, (9, 2, 5, 3))


# ---------------------------------------------------------------------- the tree


Table = tuple[tuple[Fraction, ...], ...]


def draw_tables(cases: Cases) -> Iterator[tuple[Table, int]]:
    """Yield tables and numbers of nodes: small ones by hand, then drawn ones.

    Ranks mostly fall. Some tables do not fall, have a deeper head that is better, or chances of 0.
    """
    half, fifth = Fraction(1, 2), Fraction(1, 5)
    yield ((half, fifth),), 0
    yield ((half, fifth),), 1
    yield ((half, fifth),), 5
    yield ((fifth, half),), 1
    yield ((half, fifth), (half, fifth)), 3
    random = Random(f"{cases.seed} tables")
    for number in range(40 * cases.times):
        heads, ranks = ((1, 4), (2, 2), (2, 3), (3, 2))[number % 4]
        rows = list[tuple[Fraction, ...]]()
        for _ in range(heads):
            row = [Fraction(random.randrange(7), 24 + random.randrange(8)) for _ in range(ranks)]
            rows.append(tuple(row if number % 5 == 4 else sorted(row, reverse=True)))
        yield tuple(rows), 1 + random.randrange(5)


def list_paths(table: Table) -> list[Path]:
    """Return every path of ranks, the shortest first."""
    depths = range(1, len(table) + 1)
    return [path for depth in depths for path in product(range(len(table[0])), repeat=depth)]


def path_chance(table: Table, path: Path) -> Fraction:
    """Return the product of the chances along a path."""
    return prod((table[depth][rank] for depth, rank in enumerate(path)), start=Fraction(1))


@lru_cache(maxsize=4096)
def greatest_worth(table: Table, n: int) -> Fraction:
    """Return the greatest worth of a tree of n nodes, or of all paths, by trying every tree."""
    paths = list_paths(table)
    trees = {frozenset[Path]()}
    for _ in range(min(n, len(paths))):
        trees = {
            tree | {path}
            for tree in trees
            for path in paths
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
    return max(sum((path_chance(table, path) for path in tree), Fraction(0)) for tree in trees)


def find_paths(got: Any, table: Table, n: int) -> list[Path]:
    """Return the paths of a tree's nodes; accuse what is no tree."""
    case = {"table": [list(row) for row in table], "n": n}
    count = min(n, len(list_paths(table)))
    nodes = require_list(IS_TREE, got, count, "nodes", **case)
    paths = list[Path]()
    for number, node in enumerate(nodes):
        if not isinstance(node, (list, tuple)) or len(node) != 2:
            accuse(IS_TREE, f"node {number}: a parent and a rank", describe_result(node), **case)
        parent, rank = node
        if type(parent) is not int or not ROOT <= parent < number:
            what = f"node {number}: a parent that comes before it, or {ROOT}"
            accuse(IS_TREE, what, describe_result(parent), **case)
        path = (*(paths[parent] if parent != ROOT else ()), rank)
        if not is_token(rank, len(table[0])) or len(path) > len(table) or path in paths:
            what = f"node {number}: a rank from 0 to {len(table[0]) - 1} that its siblings lack"
            what += f", {len(table)} levels at most"
            accuse(IS_TREE, what, {"nodes": list(nodes)}, **case)
        paths.append(path)
    return paths


@graded_law(3, IS_TREE)
def nodes_make_a_tree(best_tree: Function, cases: Cases) -> Iterator[bool]:
    """Check the form alone."""
    for table, n in draw_tables(cases):
        yield bool(find_paths(best_tree([list(row) for row in table], n), table, n))


@graded_law(11, BEST)
def tree_has_the_greatest_worth(best_tree: Function, cases: Cases) -> Iterator[bool]:
    """Compare the expected number of accepted tokens with that of every other tree."""
    for table, n in draw_tables(cases):
        paths = find_paths(best_tree([list(row) for row in table], n), table, n)
        expected = greatest_worth(table, n)
        got = sum((path_chance(table, path) for path in paths), Fraction(0))
        if got != expected:
            case = {"table": [list(row) for row in table], "n": n, "your paths of ranks": paths}
            texts = (f"accepted tokens expected: {worth}" for worth in (expected, got))
            accuse(BEST, *texts, **case)
        yield bool(paths)


RANK_TABLE_TASK = Task(
    "rank_table",
    "A4.4 Measuring the ranks",
    (table_has_the_shares, positions_count_alike),
    uses=("head_logits",),
)
BEST_TREE_TASK = Task(
    "best_tree", "A4.5 The best tree", (nodes_make_a_tree, tree_has_the_greatest_worth)
)
