"""SpecTr: several drafts, and the target's token carried over to one of them by optimal transport.

Sun, Suresh, Ro, Beirami, Jain, Yu, NeurIPS 2023, arXiv 2310.15141. The draft model writes k texts
of gamma tokens, independently. At a position that is a transport problem: couple the k drafted
tokens with y ~ p so that y is among them as often as can be. The best plan is a linear program of
V^(k+1) variables. K-SEQ comes close in O(kV): one division factor rho for all drafts, draft after
draft passes with probability min(1, p(x) / (rho q(x))), and the first that passes is taken. With
beta = sum_x min(q, p / rho), one passes with probability 1 - (1 - beta)^k; the law is kept where
that is at most rho beta, and rho is the least such factor. Drafts whose token was taken, or is
equal, stay in the race at the next position, with a rho for as many as they are; a draft that
survives whole earns a bonus token. Nothing is trained.

What makes it SpecTr: the same p for all k drafts and a rho between 1 and k, where recursive
rejection tests each draft against what the refusals before it left. Why p is kept: with left(x) =
max(0, p - rho q), a taken token has the law s (p - left), s = (1 - (1 - beta)^k) / (rho beta) <= 1,
so what is missing is (1 - s) p + s left, and that is the residual. At the best rho s is 1. Where
rho is rounded *up*, s falls and the law is still exact: Fractions prove the code that floats run.

Guarantee: EXACT, on any tree: siblings of one declared law are drafts of one K-SEQ, groups of other
laws follow on what it leaves, a law of None is a point mass. At temperature 0 the drafts begin with
the k likeliest tokens. Tested in tests/speculative/test_spectr.py: K-SEQ accepts at least (1 - (1 -
1/k)^k) of the optimum and at most the optimum, by the linear program and by the least cut; rho
solves its equation; one draft is token verification; more drafts accept more. The paper reports
2.13x over plain decoding and 1.37x over speculative decoding.
Left out: decoding by the linear program itself, whose size allows six tokens or so; it is the
oracle in laws/theorems.py.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.verify import Verdict
from tinyspec.speculative.treedraft import TreeDrafter, shape
from tinyspec.speculative.verification.vectors import as_row, exact, ratio, same, vectors
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, Probs, TokenTree

HALVINGS, COARSE = (
    50,
    3,
)  # of rho's bracket in floats, and in Fractions, whose denominators grow with each


def division_factor(p: Any, q: Any, k: int) -> Any:
    """rho: the least factor in [1, k] with 1 - (1 - beta)^k <= rho beta, rounded up. p, q are
    vectors, [V].

    rho beta = sum_x min(rho q, p) grows with rho and 1 - (1 - beta)^k falls, so there is one root;
    k is never below it, because 1 - (1 - beta)^k <= k beta. Between two values of p / q the sum is
    a straight line: the root on the line is found, and the tokens that have left it are dropped.
    Lines lie above the (concave) sum, so this comes from below; a few passes, O(V) each.
    """
    rho, whole = Fraction(1) if exact(p) else 1.0, p.sum()
    while k > 1:
        over = p > rho * q
        p, q = p[over], q[over]
        said, slope = _number(whole - p.sum()), _number(q.sum())
        if rho >= k or _spare(said + rho * slope, rho, k) >= 0:
            break
        low, rho = rho, 0 * rho + k
        for _ in range(COARSE if exact(p) else HALVINGS):
            middle = (low + rho) / 2
            low, rho = (
                (low, middle) if _spare(said + middle * slope, middle, k) >= 0 else (middle, rho)
            )
    return rho


def _number(x: Any) -> Any:
    """A float, or a Fraction."""
    return x.item() if hasattr(x, "item") else x


def _spare(mass: Any, rho: Any, k: int) -> Any:
    """rho beta - (1 - (1 - beta)^k) for mass = rho beta: rho keeps the law of k drafts where it is
    not negative.
    """
    return mass - chance_of_any(mass / rho, k)


def chance_of_any(beta: Any, k: int) -> Any:
    """The probability that one of k drafts passes where each does with beta."""
    return 1 - (1 - beta) ** k


def k_seq_residual(p: Any, q: Any, k: int, rho: Any) -> Any:
    """The residual, not normalised: (1 - s) p + s max(0, p - rho q).

    >>> import numpy as np
    >>> k_seq_residual(np.array([1.0, 0.0]), np.array([0.25, 0.75]), 2, 1.75).tolist()
    [0.5625, 0.0]
    """
    mass = p.clip(max=rho * q).sum()
    s = min(1, chance_of_any(mass / rho, k) / mass) if mass > 0 else 1  # above 1 by rounding only
    return (1 - s) * p + s * (p - rho * q).clip(min=0)


def verify_tree_k_seq(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """Follow the drafts that spell what was taken so far; at every position K-SEQ takes one of
    their tokens, or none.

    One `accept` a tested node, one `draw`. A position with one draft left needs no search: rho is
    1. Raises TinyspecError as `verify_tree` does.
    """
    path, refused, row = list[int](), list[int](), p[ROOT]
    siblings = waiting = _below(tree, {ROOT})
    while waiting:
        drafts = _independent(tree, waiting)
        law, tokens = tree.draft_probs[drafts[0]], [tree.tokens[node] for node in drafts]
        ratios = [
            ratio(row, law, token) for token in tokens
        ]  # refuses what breaks the drafter's contract
        laws = vectors(row, law, tokens[0])
        rho = division_factor(*laws, len(drafts))
        passed = next((i for i, x in enumerate(ratios) if rng.accept(x / rho)), None)
        refused += drafts[:passed]
        if passed is None:
            waiting = [node for node in waiting if node not in drafts]
            left = k_seq_residual(*laws, len(drafts), rho)
            row = (
                as_row(left / left.sum()) if left.sum() > 0 else row
            )  # nothing left: p and q agree up to rounding
        else:
            path.append(drafts[passed])
            row = p[path[-1]]
            siblings = waiting = _below(
                tree, {node for node in siblings if tree.tokens[node] == tokens[passed]}
            )
    return Verdict(tuple(path), rng.draw(row), tuple(refused))


def _below(tree: TokenTree, parents: set[int]) -> list[int]:
    """The guesses behind these nodes, in the order of the draws."""
    return [node for node, up in enumerate(tree.parents) if up in parents and not tree.probe[node]]


def _independent(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    """The first of these siblings and all others that declare its law: given that law they are
    independent draws of it.
    """
    first = tree.draft_probs[nodes[0]]
    return [
        node
        for node in nodes
        if node == nodes[0] or (first is not None and same(first, tree.draft_probs[node]))
    ]


@technique(
    title="SpecTr",
    summary="several drafts, matched by optimal transport",
    paper="Sun et al. 2023, arXiv 2310.15141",
    family="verification",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(
        Knob("k", 8, "drafts, independent of each other", low=1, small=(2, 3)),
        Knob("gamma", 8, "tokens of a draft", low=1, small=(1, 2)),
    ),
)
def spectr(request: Request, *, k: int, gamma: int) -> Decoder:
    """A draft model writes k texts of gamma tokens; K-SEQ selects among them."""
    reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
    drafts = shape((k, *[1] * (gamma - 1)))
    return request.decoder(
        TreeDrafter(request.drafts[0], drafts, request.stop.eos, reach), verify_tree_k_seq
    )


# ---------------------------------------------------------------------- the analysis: what one position accepts


def k_seq_acceptance(p: Probs, q: Probs, k: int) -> Any:
    """The probability that K-SEQ takes one of k drafts: 1 - (1 - beta)^k at its rho.

    >>> from fractions import Fraction as F
    >>> str(k_seq_acceptance([F(1, 2), F(1, 2)], [F(1), F(0)], 1))
    '1/2'
    """
    a, b = vectors(p, q, 0)
    rho = division_factor(a, b, k)
    return chance_of_any(a.clip(max=rho * b).sum() / rho, k)


def optimal_acceptance(p: Probs, q: Probs, k: int) -> Any:
    """The most that any lossless selection can accept of k independent drafts: 1 + min_H (p(H) -
    q(H)^k). O(V log V).

    Over all sets of tokens H; P - Q^k is concave, so its least value lies at a corner of the region
    of all (p(H), q(H)), and growing in P and falling in Q, at one of the sets of the smallest p /
    q. Tokens that are never drafted stay outside of H.

    >>> from fractions import Fraction as F
    >>> [str(optimal_acceptance([F(1), F(0)], [F(1, 3), F(2, 3)], k)) for k in (1, 2)]
    ['1/3', '5/9']
    """
    a, b = vectors(p, q, 0)
    a, b = a[b > 0], b[b > 0]
    order = (a / b).argsort()
    return 1 + min(0, (a[order].cumsum(0) - b[order].cumsum(0) ** k).min())
