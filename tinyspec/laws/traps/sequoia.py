"""Sequoia (Chen et al. 2024): the tree is computed from measured figures.

Every round has noise of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.theorems import play_siblings, without_replacement
from tinyspec.laws.traps import Build, Trap, card
from tinyspec.speculative.drafting import sequoia as seq
from tinyspec.speculative.treedraft import Shape
from tinyspec.tree import ROOT, TokenTree

BEST = "no tree of its size and depth commits more"
VECTOR = "P is the probability that the child of a rank is the one that is accepted"
TOKENS = "the tokens of a round are the sum of the path products"

ACCEPTS = [(0.6, 0.2, 0.1), (0.9, 0.05), (0.3, 0.25, 0.2), (0.5, 0.0, 0.3), (1.0, 0.0)]


def joint_distribution_of_two_rounds(build: Build) -> Evidence:
    """Check the joint distribution of two rounds: one round cannot see noise that is used again."""
    knobs: dict[str, Any] = {
        "nodes": 2,
        "depth": 2,
        "ranks": 2,
        "accepts": "0.5,0.4",
        "costs": "0,1,1,1",
    }
    return loop_laws.tree_joint_distribution(build, [knobs | {"depth": 1}], [knobs], tokens=3)


def every_tree(nodes: int, depth: int) -> set[Shape]:
    """Return all trees of so many nodes, at most so deep.

    A tree is a smaller one with one more node below any of its nodes.
    """
    trees: set[Shape] = {()}
    for n in range(nodes):
        trees = {
            (*tree, up)
            for tree in trees
            for up in range(max(tree, default=ROOT), n)
            if _depth((*tree, up)) <= depth
        }
    return trees


def _depth(tree: Shape) -> int:
    return max(TokenTree((0,) * len(tree), tree).depths(), default=0)


def worth(tree: Shape, accepts: Sequence[Any]) -> Any:
    """Return 1 and, for every child, its share times the worth of its own subtree."""

    def below(node: int) -> Any:
        children = [child for child, up in enumerate(tree) if up == node]
        return 1 + sum(
            share * below(child) for share, child in zip(accepts, children, strict=False)
        )

    return below(ROOT)


@collect_evidence(BEST)
def commits_most(plan: Callable[[Sequence[float], int, int], Shape]) -> Iterator[int]:
    """Check a planned tree against every tree of up to six nodes."""
    for accepts in ACCEPTS:
        for nodes, depth in ((1, 1), (2, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 4)):
            best = max(
                worth(tree, accepts) for n in range(nodes + 1) for tree in every_tree(n, depth)
            )
            tree = plan(accepts, nodes, depth)
            got = worth(tree, accepts)
            if len(tree) > nodes or _depth(tree) > depth or got < best - 1e-12:
                case = {"accepts": accepts, "nodes": nodes, "depth": depth}
                accuse(BEST, best, {"tree": tree, "tokens": got}, **case)
            yield 0


@collect_evidence(VECTOR)
def shares_of_ranks(hits: Callable[..., Any]) -> Iterator[int]:
    """Check that the shares of k ranks add up to the acceptance of k children.

    The children are drawn without replacement.
    """
    for p, q in distribution_pairs(largest=5):
        before = Fraction(0)
        for k in (1, 2):
            upto, _, _ = play_siblings(verify_tree, without_replacement, p, q, k)
            expected, before = upto - before, upto
            got: Any = 0
            for order, mass in _orders(q, k):
                shares = hits(list(p), order)
                got += mass * (shares[k - 1] if len(shares) >= k else 0)
            expect_equal(VECTOR, expected, got, p=p, q=q, rank=k)
            yield 0


def _orders(q: Any, k: int, drawn: Any = ()) -> Any:
    """Yield the children in draw order with their distributions, and the probability."""
    left = [Fraction(0) if x in [token for token, _ in drawn] else mass for x, mass in enumerate(q)]
    if len(drawn) == k or not sum(left):
        yield drawn, Fraction(1)
        return
    row = [x / sum(left) for x in left]
    for token, mass in enumerate(row):
        if mass:
            for order, rest in _orders(q, k, (*drawn, (token, row))):
                yield order, mass * rest


@collect_evidence(TOKENS)
def tokens_of_a_tree(formula: Callable[[Shape, Sequence[Any]], Any]) -> Iterator[int]:
    """Check a formula against the sum over subtrees."""
    for accepts in (
        [Fraction(1, 2), Fraction(1, 4)],
        [Fraction(2, 3), Fraction(0), Fraction(1, 5)],
    ):
        for tree in every_tree(4, 4):
            got = formula(tree, accepts)
            expect_equal(TOKENS, worth(tree, accepts), got, tree=tree, accepts=accepts)
            yield 0


TRAPS = [
    Trap(JOINT, joint_distribution_of_two_rounds, card("sequoia")),
    Trap(BEST, commits_most, lambda: seq.best_tree),
    Trap(VECTOR, shares_of_ranks, lambda: seq.acceptance_by_rank),
    Trap(TOKENS, tokens_of_a_tree, lambda: seq.expected_tree_tokens),
]
