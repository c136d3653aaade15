"""Sequoia (Chen et al. 2024): the tree is computed from measured figures, and every round has noise
of its own.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.loop_laws import Build
from tinyspec.laws.theorems import play_siblings, without_replacement
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.drafting import sequoia as seq
from tinyspec.speculative.treedraft import Shape
from tinyspec.tree import ROOT, TokenTree

BEST = "no tree of its size and depth commits more"
VECTOR = "P is the chance that the child of a rank is the one that is kept"
TOKENS = "the tokens of a round are the sum of the path products"

ACCEPTS = [(0.6, 0.2, 0.1), (0.9, 0.05), (0.3, 0.25, 0.2), (0.5, 0.0, 0.3), (1.0, 0.0)]


def joint_law(build: Build) -> Evidence:
    """The law of two rounds: one round cannot see noise that is kept."""
    knobs = {"nodes": 2, "depth": 2, "ranks": 2, "accepts": "0.5,0.4", "costs": "0,1,1,1"}
    return loop_laws.tree_joint_law(build, [knobs | {"depth": 1}], [knobs], tokens=3)


def every_tree(nodes: int, depth: int) -> set[Shape]:
    """All trees of so many nodes, so deep at most: a node more below any node of a smaller one."""
    trees: set[Shape] = {()}
    for n in range(nodes):
        trees = {
            (*tree, up)
            for tree in trees
            for up in range(max(tree, default=ROOT), n)
            if _deep((*tree, up)) <= depth
        }
    return trees


def _deep(tree: Shape) -> int:
    return max(TokenTree((0,) * len(tree), tree).depths(), default=0)


def worth(tree: Shape, accepts: Sequence[Any]) -> Any:
    """1 and, for every child, its share times what its own subtree is worth."""

    def below(node: int) -> Any:
        children = [child for child, up in enumerate(tree) if up == node]
        return 1 + sum(
            share * below(child) for share, child in zip(accepts, children, strict=False)
        )

    return below(ROOT)


def commits_most(plan: Callable[[Sequence[float], int, int], Shape]) -> Evidence:
    """Against every tree of up to six nodes."""
    seen = 0
    for accepts in ACCEPTS:
        for nodes, depth in ((1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 4)):
            best = max(
                worth(tree, accepts) for n in range(nodes + 1) for tree in every_tree(n, depth)
            )
            tree = plan(accepts, nodes, depth)
            got, seen = worth(tree, accepts), seen + 1
            if len(tree) > nodes or _deep(tree) > depth or got < best - 1e-12:
                accuse(
                    BEST,
                    best,
                    {"tree": tree, "tokens": got},
                    accepts=accepts,
                    nodes=nodes,
                    depth=depth,
                )
    return Evidence(BEST, seen)


def shares_of_ranks(hits: Callable[..., Any]) -> Evidence:
    """The shares over all draws add up to the acceptance of that many children without
    replacement.
    """
    seen = 0
    for p, q in distribution_pairs(largest=5):
        before = Fraction(0)
        for k in (1, 2):
            upto, _, _ = play_siblings(verify_tree, without_replacement, p, q, k)
            expected, before = upto - before, upto
            got: Any = 0
            for order, mass in _orders(q, k):
                shares = hits(list(p), order)
                got += mass * (shares[k - 1] if len(shares) >= k else 0)
            seen += 1
            if got != expected:
                accuse(VECTOR, expected, got, p=p, q=q, rank=k)
    return Evidence(VECTOR, seen)


def _orders(q: Any, k: int, drawn: Any = ()) -> Any:
    """(children in draw order with their laws, probability)."""
    left = [Fraction(0) if x in [token for token, _ in drawn] else mass for x, mass in enumerate(q)]
    if len(drawn) == k or not sum(left):
        yield drawn, Fraction(1)
        return
    law = [x / sum(left) for x in left]
    for token, mass in enumerate(law):
        if mass:
            yield from (
                (order, mass * rest) for order, rest in _orders(q, k, (*drawn, (token, law)))
            )


def tokens_of_a_tree(formula: Callable[[Shape, Sequence[Any]], Any]) -> Evidence:
    """Against the sum over subtrees."""
    seen = 0
    for accepts in (
        [Fraction(1, 2), Fraction(1, 4)],
        [Fraction(2, 3), Fraction(0), Fraction(1, 5)],
    ):
        for tree in every_tree(4, 4):
            got, expected, seen = formula(tree, accepts), worth(tree, accepts), seen + 1
            if got != expected:
                accuse(TOKENS, expected, got, tree=tree, accepts=accepts)
    return Evidence(TOKENS, seen)


TRAPS = [
    Trap(JOINT, joint_law, card("sequoia")),
    Trap(BEST, commits_most, lambda: seq.best_tree),
    Trap(VECTOR, shares_of_ranks, lambda: seq.acceptance_by_rank),
    Trap(TOKENS, tokens_of_a_tree, lambda: seq.expected_tree_tokens),
]
