"""Sequoia: choose the draft tree that yields the most tokens per second.

Paper: Chen, May, Svirschevski, Huang, Ryabinin, Jia, Chen 2024, arXiv 2402.12374. Nothing is
trained.

Idea. A tree of draft tokens commits more tokens per target pass than a chain, but which tree?
Sequoia assumes that the chance of accepting a child depends only on its rank among its siblings
(the *positional acceptance assumption*) and measures it: P[k] is how often the k-th sampled child
is the accepted one. A tree T is then expected to commit

    F(T) = sum over nodes v, root included, of the product of P[rank] along the path to v

tokens. Dynamic programming finds the best tree of every size n and depth d. n and d are chosen to
minimize the time per token

    (d c + t(n)) / F(n, d)        c: time of a draft pass
                                  t(n): time of a target pass over n draft tokens

Sampling. Siblings are sampled without replacement, and verified one by one, each against the
renormalized draft distribution it was sampled from. If the draft has no token left, the remaining
siblings are sampled uniformly. At temperature 0 they are the draft's top-k tokens, as point masses.

Guarantee: EXACT for any tree, because the tree is fixed before any of its tokens is sampled.
Pitfall: the released code samples its noise once a prompt and reuses it in every round. The first
token is still right; the joint distribution of two tokens is not. Here every round samples fresh
noise.
State: P, c and t are estimated while decoding, from a prior on. With a clock they are kept per
model pair and sampling settings while the target lives. Above temperature 0 the text of a seed
therefore depends on timing; fix `accepts` and `costs` to prevent that. The paper measures P
beforehand: `tinyspec bench acceptance` does, and the knob `accepts` takes its file.
Defaults that are not the paper's. The paper measures P, c and t before it decodes; `accepts` and
`costs` are empty, so here they are learnt, because a reader's pair of models comes without figures.
The chapter's table measures P beforehand, as the paper does; its row `accepts=learnt` is ours.
The bounds of the search, `nodes` 32, `depth` 8 and `ranks` 8, are ours: on a CPU t(n) rises from
the first nodes on, so a larger tree seldom pays.
Tests: tests/speculative/test_sequoia.py (`most_tokens` against the code that runs and the tree
against all trees; F against enumerated rounds; P against enumerated draws; the reused noise).
Left out: the paper's trees of 768 nodes for offloaded targets: planning time grows with n squared.
A P for each depth, which the paper has for heads such as Medusa's.
Ours: trees are planned again in rounds 0, 1, 2, 4, 8 and so on; the paper plans once. n and d do
not count the root, and leaves are not drafted from. The released code cuts only the target's rows
by top-p; here the draft's are cut too. `bench acceptance` averages P over given texts, as the
authors' fast_test.py does.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyspec._core.reference import acceptance_ratio
from tinyspec.decoding.costs import CostModel
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams, top_k_tokens
from tinyspec.decoding.verify import exclude_token, residual, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.speculative.goodput import LearntCosts, update_ema
from tinyspec.speculative.treedraft import Shape, TreeDrafter, sample_siblings
from tinyspec.technique import (
    Clock,
    Guarantee,
    Knob,
    PolicyOverride,
    Request,
    per_model_state,
    technique,
)
from tinyspec.tree import ROOT, Probs, TokenTree

PRIOR = (0.6, 0.12, 0.06, 0.04, 0.03, 0.02, 0.01, 0.01)  # P of a small draft of the storyteller
PRIOR_WEIGHT = 16  # observed nodes that the prior counts for: soon outweighed
ACCEPTS_DIGITS = 3  # decimals to which P is rounded before a tree is planned


@cache
def most_tokens(accepts: tuple[float, ...], nodes: int, depth: int) -> float:
    """Return the tokens committed by the best tree of at most so many draft tokens and levels.

    accepts  P: accepts[k] is the probability that the k-th child is the accepted one

        T(n, d) = 1 + max over n_1 + n_2 + ... = n of the sum of P[k] T(n_k - 1, d - 1)

    The nodes are given to the children; one of those that a child gets is the child itself. The
    paper's recursion adds one child at a time and has the same maximum. `solve_tree_dp` computes
    all n and d at once. A test compares the two.

    >>> round(most_tokens((0.6, 0.3), 3, 2), 2)  # two children of the root, one below the first
    2.26
    """
    if nodes == 0 or depth == 0:
        return 1.0
    return 1 + max(
        sum(
            p * most_tokens(accepts, n - 1, depth - 1) for p, n in zip(accepts, sizes, strict=False)
        )
        for sizes in split_nodes(nodes, len(accepts))
    )


def split_nodes(nodes: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to give all nodes to at most `most` children in order, none without a node.

    >>> list(split_nodes(3, 2))
    [(1, 2), (2, 1), (3,)]
    """
    if nodes == 0:
        yield ()
    elif most:
        for first in range(1, nodes + 1):
            for rest in split_nodes(nodes - first, most - 1):
                yield (first, *rest)


# ------------------------------ the acceptance vector


def acceptance_by_rank(p: Probs, children: Iterable[tuple[int, Probs | None]]) -> list[Any]:
    """Return for each sibling the probability that it is the accepted one.

    children  tokens in draw order, each with the distribution it was drawn from
    """
    reached, chances = 1, list[Any]()
    for token, q in children:
        accept_prob = min(1, acceptance_ratio(p, q, token))
        chances.append(reached * accept_prob)
        reached *= 1 - accept_prob
        p = exclude_token(p, token) if q is None else residual(p, q)
    return chances


def mean_acceptance_by_rank(
    pairs: Iterable[tuple[Probs, Probs]], ranks: int, rng: RandomSource | None
) -> list[Any]:
    """Return P, averaged over pairs of target and draft distributions. Nothing is decoded.

    rng  draws the children; None: they are the top-k tokens of q, as at temperature 0 (where p is
         one-hot and q is not)
    """
    total, seen = [0 for _ in range(ranks)], 0
    for p, q in pairs:
        drawn = (
            [(x, None) for x in top_k_tokens(q, ranks)]
            if rng is None
            else sample_siblings(q, ranks, rng)
        )
        for rank, share in enumerate(acceptance_by_rank(p, drawn)):
            total[rank] += share
        seen += 1
    return [share / seen for share in total]


def estimate_acceptance(
    target: Model,
    draft: Model,
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    ranks: int,
    rng: RandomSource,
) -> list[float]:
    """Return P of two models over every position of some texts, from one pass of each.

    The shares are rounded down to four digits, so that their sum is at most 1.
    """

    def pairs() -> Iterable[tuple[Probs, Probs]]:
        for text in texts:
            for at, (p, q) in enumerate(
                zip(target.logits(text), draft.logits(text), strict=True), start=1
            ):
                yield (
                    sampling.probs(p, text[:at]),
                    (sampling if sampling.temperature else UNCHANGED).probs(q, text[:at]),
                )

    return [
        math.floor(1e4 * share) / 1e4
        for share in mean_acceptance_by_rank(pairs(), ranks, rng if sampling.temperature else None)
    ]


# ------------------------------ the tree


def expected_tree_tokens(tree: Shape, accepts: Sequence[Any]) -> Any:
    """Return F(T): 1 for the root, and for every node the product of P along its path.

    >>> expected_tree_tokens((-1, -1, 0), [0.5, 0.25])
    2.0
    """
    reach: dict[int, Any] = {ROOT: 1}
    ranks: dict[int, int] = {}
    for node, parent in enumerate(tree):
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        reach[node] = reach[parent] * (accepts[rank] if rank < len(accepts) else 0)
    return sum(reach.values())


def solve_tree_dp(
    accepts: tuple[float, ...], nodes: int, depth: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Solve the recursion of `most_tokens` for all sizes and depths, in O(depth ranks nodes^2).

    The first child's subtree takes some of the nodes, and the later children share the others.

    Returns
    best   [depth + 1, nodes + 2] F of the best subtree of so many nodes, its root included, and at
           most so many edges down; -inf if there is none
    sizes  [depth + 1, ranks, nodes + 1] the subtree's size of the child of this rank, if so many
           nodes are left for it and its later siblings
    """
    best = np.full((depth + 1, nodes + 2), -np.inf)
    best[:, 1] = 1.0
    sizes = np.zeros((depth + 1, len(accepts), nodes + 1), int)
    # left[m, s]: nodes left for later siblings if s of m nodes are given to this child
    left = np.subtract.outer(np.arange(nodes + 1), np.arange(nodes + 1))
    for d in range(1, depth + 1):
        below = best[d - 1, : nodes + 1]
        # later[m]: F of m nodes for the ranks to come; after the last one no child can take them
        later = np.array([0.0, *[-np.inf] * nodes])
        for r in reversed(range(len(accepts))):
            child = np.multiply(
                accepts[r], below, out=np.full_like(below, -np.inf), where=np.isfinite(below)
            )
            ways = np.where(left >= 0, child + later[left], -np.inf)
            ways[:, 0] = -np.inf  # a rank without nodes ends the list of children
            sizes[d, r] = ways.argmax(axis=1)
            later = ways.max(axis=1)
            later[0] = 0.0
        best[d, 1:] = 1.0 + later
    return best, sizes


def backtrack_tree(sizes: NDArray[Any], nodes: int, depth: int) -> Shape:
    """Return the tree that `solve_tree_dp` found for so many nodes and this depth."""
    parents: list[int] = []

    def grow(node: int, left: int, d: int) -> None:
        first, parts = len(parents), list[int]()
        while left:
            parts.append(int(sizes[d, len(parts), left]))
            left -= parts[-1]
        parents.extend([node] * len(parts))
        for child, part in enumerate(parts, start=first):
            grow(child, part - 1, d - 1)

    grow(ROOT, nodes, depth)
    return tuple(parents)


def best_tree(accepts: Sequence[float], nodes: int, depth: int) -> Shape:
    """Return the tree that commits most tokens; of equals the smallest, then the flattest.

    nodes, depth  upper bounds

    >>> best_tree((0.6, 0.3), 3, 2)
    (-1, -1, 0)
    """
    best, sizes = solve_tree_dp(tuple(accepts), nodes, depth)
    n, d = max(
        ((n, d) for n in range(1, nodes + 1) for d in range(1, depth + 1)),
        key=lambda size: best[size[1], size[0] + 1],
    )
    return backtrack_tree(sizes, n, d)


def fastest_tree(
    accepts: Sequence[float], costs: CostModel, nodes: Sequence[int], depth: int
) -> Shape:
    """Return the tree with the least time per token.

    nodes  numbers of nodes that are tried, in rising order
    depth  greatest depth; all smaller ones are tried
    """
    best, sizes = solve_tree_dp(tuple(accepts), nodes[-1], depth)
    step = costs.step_seconds(1)
    time_per_token = {
        (n, d): (d * step + costs.verify_seconds(1, n)) / float(best[d, n + 1])
        for n in nodes
        for d in range(1, depth + 1)
        if best[d, n + 1] > 1
    }
    if not time_per_token:
        return (ROOT,)
    return backtrack_tree(sizes, *min(time_per_token, key=lambda size: time_per_token[size]))


# ------------------------------ the drafter


class OnlineEstimates:
    """What was measured of a pair of models: P by rank, and the times of a round."""

    def __init__(self, ranks: int, longest: int):
        prior = [*PRIOR, *[PRIOR[-1]] * ranks][:ranks]
        self.shares = [PRIOR_WEIGHT * share for share in prior]
        self.seen = [float(PRIOR_WEIGHT)] * ranks
        self.curve = LearntCosts(longest)

    @property
    def accepts(self) -> tuple[float, ...]:
        return tuple(
            round(share / seen, ACCEPTS_DIGITS)
            for share, seen in zip(self.shares, self.seen, strict=True)
        )

    def learn(self, shares: Sequence[Any]) -> None:
        for rank, share in enumerate(shares[: len(self.shares)]):
            self.shares[rank] += float(share)
            self.seen[rank] += 1


class SequoiaDrafter(TreeDrafter):
    """Draw trees without replacement, of the shape that is best for what was measured so far.

    fixed  whether P, and whether the costs, are given and not learnt
    """

    def __init__(
        self, request: Request, learnt: OnlineEstimates, depth: int, fixed: tuple[bool, bool]
    ):
        super().__init__(
            request.drafts[0],
            (ROOT,),
            request.stop.eos,
            request.draft_max_length,
            replace=False,
            cover=True,
        )
        self.learnt, self.depth, self.fixed = learnt, depth, fixed
        self.clock: Clock = request.clock or (lambda: 0.0)
        self.choose: PolicyOverride | None = request.choose
        self.rounds, self.ready = 0, 0.0

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        accepts, curve = self.learnt.accepts, self.learnt.curve
        if self.choose is not None:
            ways = sorted(
                {
                    best_tree(accepts, n, d)
                    for n in range(1, curve.sizes[-1] + 1)
                    for d in range(1, self.depth + 1)
                }
            )
            self.reshape(ways[self.choose(len(ways), rng)])
        elif self.rounds & (self.rounds - 1) == 0:
            # In rounds 0, 1, 2, 4, 8, ... only: planning takes longer than drafting a token.
            self.reshape(fastest_tree(accepts, curve, curve.sizes[1:], self.depth))
        began = self.clock()
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.ready = self.clock()
        if tree.tokens and self.ready > began and not self.fixed[1]:
            seconds = (self.ready - began) / max(tree.depths())
            curve.step = update_ema(curve.step, seconds)
        return tree

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.rounds += 1
        if self.choose is not None:
            return  # the laws choose the tree, so there is nothing to learn
        if not self.fixed[1]:
            self.learnt.curve.record_round(len(round.tree.tokens), self.clock() - self.ready)
        if not self.fixed[0]:
            for node, p in zip((ROOT, *round.verdict.accepted), round.output_probs, strict=False):
                below = [child for child, up in enumerate(round.tree.parents) if up == node]
                self.learnt.learn(
                    acceptance_by_rank(
                        p,
                        [
                            (round.tree.tokens[child], round.tree.draft_probs[child])
                            for child in below
                        ],
                    )
                )


LEARNT = "learnt"  # the value of `accepts` that asks for the online estimates


def _read_acceptance(path: str) -> str:
    """Return the vector that `tinyspec bench acceptance` has written."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return ",".join(f"{share}" for share in found["accepts"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TinyspecError(
            f"{path} is no result of `tinyspec bench acceptance` ({type(error).__name__}): write "
            f"one with `tinyspec bench acceptance --out {path}`"
        ) from error


def _parse_numbers(knob: str, text: str) -> list[float]:
    if knob == "accepts" and str(text).endswith(".json"):
        text = _read_acceptance(str(text))
    try:
        numbers = [float(word) for word in str(text).split(",")]
    except ValueError:
        numbers = [-1.0]
    wrong = not all(0 <= number < math.inf for number in numbers)  # also where it is no number
    if (
        wrong
        or (knob == "accepts" and sum(numbers) > 1 + 1e-9)
        or (knob == "costs" and len(numbers) < 3)
    ):
        what = {
            "accepts": "shares that add up to at most 1, as in 0.6,0.2,0.1",
            "costs": "that of a draft pass, then of a target pass over 0, 1, ... draft tokens, "
            "as in 0.3,1,1.1,1.2",
        }
        raise TinyspecError(f"{knob} is {text!r}: give {what[knob]}")
    return numbers


# ------------------------------ the card


@technique(
    title="Sequoia: the tree that measurements call for",
    summary="builds the tree that measures fastest",
    paper="Chen et al. 2024, arXiv 2402.12374",
    reported="up to 4.04x, Llama2-7B (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    timed=True,
    knobs=(
        Knob("nodes", 32, "most tokens in a tree", low=1, high=512, small=(1, 2)),
        Knob("depth", 8, "greatest depth of a tree", low=1, high=32, small=(2,)),
        Knob("ranks", 8, "most children of a node", low=1, high=16, small=(2,)),
        Knob(
            "accepts",
            "",
            "the acceptance vector, as 0.6,0.2,0.1 or a file of `tinyspec bench acceptance`; "
            "empty or learnt: estimated while decoding, which is ours",
            ours=LEARNT,
        ),
        Knob(
            "costs",
            "",
            "of a draft call, then of a target call over 0, 1, ... draft tokens; empty: timed "
            "while decoding",
        ),
    ),
)
def sequoia(
    request: Request, *, nodes: int, depth: int, ranks: int, accepts: str, costs: str
) -> Decoder:
    """Return a decoder whose draft model draws the tree that is best for what was measured."""
    known = (
        "sequoia",
        nodes,
        ranks,
        accepts,
        costs,
        request.sampling,
        id(getattr(request.drafts[0], "model", None)),
    )
    fresh = request.clock is None or getattr(request.target, "model", None) is None
    learnt = (
        OnlineEstimates(ranks, nodes)
        if fresh
        else per_model_state(request.target, known, lambda: OnlineEstimates(ranks, nodes))
    )
    measured = accepts not in ("", LEARNT)
    if measured:
        learnt.shares = [*_parse_numbers("accepts", accepts), *[0.0] * ranks][:ranks]
        learnt.seen = [1.0] * ranks
    if costs != "":
        learnt.curve.step, *calls = _parse_numbers("costs", costs)
        last = len(calls) - 1  # beyond what was given, on the last slope
        learnt.curve.seconds = [
            calls[min(size, last)] + max(0, size - last) * (calls[-1] - calls[-2])
            for size in learnt.curve.sizes
        ]
    return request.decoder(
        SequoiaDrafter(request, learnt, depth, (measured, costs != "")), verify_tree
    )
