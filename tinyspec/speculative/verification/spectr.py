"""SpecTr: sample several drafts and select one of their tokens by near-optimal transport.

Paper: Sun, Suresh, Ro, Beirami, Jain, Yu, NeurIPS 2023, arXiv 2310.15141. Nothing is trained.

Idea. The draft model samples k texts of gamma tokens, independently. At each position the target's
token y ~ p is to be coupled with the k draft tokens so that y is among them as often as possible.
The best coupling is a linear program of V^(k+1) variables. K-SEQ comes close in O(kV): all drafts
are tested, one after the other, against the same p, divided by one factor rho between 1 and k.

    P(accept x)  = min(1, p(x) / (rho q(x)))
    beta         = sum over x of min(q(x), p(x) / rho)             one draft is accepted
    1 - (1 - beta)^k                                               one of k drafts is accepted
    residual(x)  = norm(p(x) - min(q(x), p(x) / rho) (1 - (1 - beta)^k) / beta)
    rho          = the least factor with 1 - (1 - beta)^k <= rho beta

If a draft token is accepted, all drafts with the same token here go on to the next position, where
rho is computed for as many drafts. A draft that is accepted to its end earns a bonus token.

Why it is exact. With left(x) = max(0, p - rho q) an accepted token has mass s (p - left), where
s = (1 - (1 - beta)^k) / (rho beta) <= 1. What is missing is (1 - s) p + s left, the residual. At
the best rho, s is 1. If rho is rounded *up*, s falls and the output is still exact, so fractions
prove the code that floats run.

Guarantee: EXACT, on any tree: siblings that declare one distribution are the drafts of one K-SEQ,
groups with other distributions follow on its residual, and a node without one is a point mass. At
temperature 0 the drafts begin with the k most likely tokens.
Pitfall: recursive rejection under this name (it tests each draft against the last residual, with no
rho); rho = k always; rho = 1, which is not exact.
Tests: tests/speculative/test_spectr.py (`select_k_seq` against the code that runs, outcome by
outcome; rho solves its equation; at least 1 - (1 - 1/k)^k of the optimum and at most the optimum,
by the linear program and by the least cut; one draft is token verification).
Left out: decoding by the linear program itself, which is feasible for about six tokens; it is the
oracle in laws/theorems.py. The paper reports 2.13x over plain decoding and 1.37x over speculative
decoding.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.verify import Verdict
from tinyspec.speculative.treedraft import TreeDrafter, branching_parents
from tinyspec.speculative.verification.vectors import (
    acceptance_ratio,
    as_probs,
    as_vectors,
    is_rational,
    is_same_distribution,
)
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, Probs, TokenTree

HALVINGS = 50  # bisection steps for rho in floats: below the rounding of a double
HALVINGS_EXACT = 3  # in Fractions, whose denominators grow with each step; rho is rounded up


def select_k_seq(p: Any, q: Any, drafts: list[int], rng: Any) -> tuple[int, bool]:
    """Select one of k draft tokens for a position, or sample another token by K-SEQ.

    p       [V] target probabilities
    q       [V] draft probabilities
    drafts  [k] tokens, sampled from q independently
    rng     a numpy.random.Generator

    Returns the next token and whether it is a draft token. The decoder runs `verify_tree_k_seq`,
    which does this at every position. A test compares the two on every outcome.
    """
    p, q, k = np.asarray(p), np.asarray(q), len(drafts)
    rho = division_factor(p, q, k)
    for token in drafts:
        if rng.random() < min(1, p[token] / (rho * q[token])):
            return token, True
    each = np.minimum(q, p / rho)  # how often one draft is token x and is accepted
    beta = each.sum()
    accepted = each * (chance_of_any(beta, k) / beta) if beta > 0 else each
    residual = p - accepted
    return rng.choice(len(p), p=residual / residual.sum()), False


def division_factor(p: Any, q: Any, k: int) -> Any:
    """Return rho, the least factor in [1, k] with 1 - (1 - beta)^k <= rho beta, rounded up.

    p, q  [V] arrays of floats or of Fractions, or tensors

    rho beta = sum_x min(rho q, p) grows with rho and 1 - (1 - beta)^k falls, so there is one root.
    It is at most k, because 1 - (1 - beta)^k <= k beta. Between two neighbouring values of p / q
    the sum is linear in rho. A step solves the equation on this line; then tokens with p <= rho q
    count by their p, which is constant. The sum is concave, so each step ends at or below the root.
    There are few steps of O(V) each.
    """
    rho, whole = Fraction(1) if is_rational(p) else 1.0, p.sum()
    while k > 1:
        over = p > rho * q
        p, q = p[over], q[over]
        constant, slope = _scalar(whole - p.sum()), _scalar(q.sum())
        if rho >= k or _slack(constant + rho * slope, rho, k) >= 0:
            break
        low, rho = rho, 0 * rho + k
        for _ in range(HALVINGS_EXACT if is_rational(p) else HALVINGS):
            middle = (low + rho) / 2
            low, rho = (
                (low, middle)
                if _slack(constant + middle * slope, middle, k) >= 0
                else (middle, rho)
            )
    return rho


def _scalar(x: Any) -> Any:
    """Return a sum as a float or a Fraction."""
    return x.item() if hasattr(x, "item") else x


def _slack(mass: Any, rho: Any, k: int) -> Any:
    """Return rho beta - (1 - (1 - beta)^k) for mass = rho beta; not negative if rho is valid."""
    return mass - chance_of_any(mass / rho, k)


def chance_of_any(beta: Any, k: int) -> Any:
    """Return the probability that one of k drafts is accepted if each is with probability beta."""
    return 1 - (1 - beta) ** k


def k_seq_residual(p: Any, q: Any, k: int, rho: Any) -> Any:
    """Return the unnormalized residual, (1 - s) p + s max(0, p - rho q).

    >>> import numpy as np
    >>> k_seq_residual(np.array([1.0, 0.0]), np.array([0.25, 0.75]), 2, 1.75).tolist()
    [0.5625, 0.0]
    """
    mass = p.clip(max=rho * q).sum()
    s = min(1, chance_of_any(mass / rho, k) / mass) if mass > 0 else 1  # above 1 by rounding only
    return (1 - s) * p + s * (p - rho * q).clip(min=0)


def verify_tree_k_seq(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """Verify a tree by K-SEQ at every position. The output follows p exactly.

    Only the drafts that agree with the accepted tokens go on. It takes one `accept` for each tested
    node and one `draw`. A position with one draft left needs no search: rho is 1. Raises
    TinyspecError as `verify_tree` does.
    """
    path, rejected, row = list[int](), list[int](), p[ROOT]
    siblings = waiting = _children(tree, {ROOT})
    while waiting:
        drafts = _draws_of_one(tree, waiting)
        q, tokens = tree.draft_probs[drafts[0]], [tree.tokens[node] for node in drafts]
        # `acceptance_ratio` raises if a token breaks the drafter's contract, so all are computed
        # before the first is tested.
        ratios = [acceptance_ratio(row, q, token) for token in tokens]
        p_and_q = as_vectors(row, q, tokens[0])
        rho = division_factor(*p_and_q, len(drafts))
        passed = next((i for i, x in enumerate(ratios) if rng.accept(x / rho)), None)
        rejected += drafts[:passed]
        if passed is None:
            waiting = [node for node in waiting if node not in drafts]
            left = k_seq_residual(*p_and_q, len(drafts), rho)
            # If nothing is left, p and q agree up to rounding, and p stays as it is.
            row = as_probs(left / left.sum()) if left.sum() > 0 else row
        else:
            path.append(drafts[passed])
            row = p[path[-1]]
            siblings = waiting = _children(
                tree, {node for node in siblings if tree.tokens[node] == tokens[passed]}
            )
    return Verdict(tuple(path), rng.draw(row), tuple(rejected))


def _children(tree: TokenTree, parents: set[int]) -> list[int]:
    """Return the draft tokens after these nodes, in draw order."""
    return [node for node, up in enumerate(tree.parents) if up in parents and not tree.probe[node]]


def _draws_of_one(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    """Return the first of these siblings and all others that declare the same distribution."""
    first = tree.draft_probs[nodes[0]]
    return [
        node
        for node in nodes
        if node == nodes[0]
        or (first is not None and is_same_distribution(first, tree.draft_probs[node]))
    ]


# ------------------------------ the analysis: what one position accepts


def k_seq_acceptance(p: Probs, q: Probs, k: int) -> Any:
    """Return the probability that K-SEQ accepts one of k drafts: 1 - (1 - beta)^k at its rho.

    >>> from fractions import Fraction as F
    >>> str(k_seq_acceptance([F(1, 2), F(1, 2)], [F(1), F(0)], 1))
    '1/2'
    """
    a, b = as_vectors(p, q, 0)
    rho = division_factor(a, b, k)
    return chance_of_any(a.clip(max=rho * b).sum() / rho, k)


def optimal_acceptance(p: Probs, q: Probs, k: int) -> Any:
    """Return the most that any lossless selection among k independent drafts can accept.

        1 + min over sets of tokens H of (p(H) - q(H)^k)

    P - Q^k is concave, grows in P and falls in Q. So its least value over all (p(H), q(H)) lies at
    one of the sets of the smallest p / q: O(V log V). Tokens that are never drafted are not in H.

    >>> from fractions import Fraction as F
    >>> [str(optimal_acceptance([F(1), F(0)], [F(1, 3), F(2, 3)], k)) for k in (1, 2)]
    ['1/3', '5/9']
    """
    a, b = as_vectors(p, q, 0)
    a, b = a[b > 0], b[b > 0]
    order = (a / b).argsort()
    return 1 + min(0, (a[order].cumsum(0) - b[order].cumsum(0) ** k).min())


# ------------------------------ the card


@technique(
    title="SpecTr",
    summary="several drafts, matched by optimal transport",
    paper="Sun et al. 2023, arXiv 2310.15141",
    reported="2.13x, PaLM-2 (survey)",
    family="verification",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(
        Knob("k", 8, "drafts, independent of each other", low=1, high=1024, small=(2, 3)),
        Knob("gamma", 8, "tokens of a draft", low=1, high=64, small=(1, 2), advised=True),
    ),
)
def spectr(request: Request, *, k: int, gamma: int) -> Decoder:
    """Return a decoder whose draft model samples k texts of gamma tokens."""
    drafts = branching_parents((k, *[1] * (gamma - 1)))
    return request.decoder(
        TreeDrafter(request.drafts[0], drafts, request.stop.eos, request.draft_max_length),
        verify_tree_k_seq,
    )
