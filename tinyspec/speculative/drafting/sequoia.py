"""Sequoia: the best tree for what was measured, of the pair of models and of the machine.

Chen, May, Svirschevski, Huang, Ryabinin, Jia, Chen 2024, arXiv 2402.12374. Which tree should a
draft of n tokens be? Measure how often the child that is kept is the first, the second, ... (the
acceptance vector P; that only the rank matters is the paper's positional assumption). A tree then
commits F(T) = sum over its nodes, the root included, of the product of P along the path: its
expected tokens. Dynamic programming finds the best tree of n nodes and depth d: the first child's
subtree takes some of the nodes, the later children share the others. Tokens are drawn without
replacement and verified by their shrinking laws, and where the draft's law ends, the tokens not yet
drawn are covered uniformly. The size and depth are those that minimise the time of a token, (d c +
t(n)) / F(n, d), with the measured times of a draft call and of a target call over n guesses.

What makes it Sequoia: P and t are measured, the tree is computed. Nothing is trained. Its released
code draws the noise of the drafts once and keeps it for all rounds, and then a later round's tokens
are not independent of what was refused before: the joint law of two tokens is wrong, which no test
of one token can see. Here every round has fresh noise, as in the paper.

Guarantee: EXACT, whatever the tree: it is chosen from the past and the clock, before anything is
drawn. Tested in tests/speculative/test_sequoia.py: the tree against all trees, F against the mean
of enumerated rounds, P against enumerated draws, and the kept noise as a trap. At temperature 0 the
children are the draft's likeliest tokens, as point masses.
State: P is learnt from the rounds' own rows, and t by the clock; both start from a prior, and where
there is a clock they are kept for the pair of models and the warp as long as the target lives. So
above temperature 0 the text of a seed depends on time, unless `accepts` and `costs` are given.
`estimate_acceptance` takes P from paired rows beforehand, as the paper does.
Left out: trees of hundreds of nodes for offloaded targets (the bound is a knob, and the planning
grows with its square).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyspec._core.reference import ratio
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams, top_k_tokens
from tinyspec.decoding.verify import exclude_token, residual, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.speculative.goodput import STEP, CostModel, update_ema
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

PRIOR = (
    0.6,
    0.12,
    0.06,
    0.04,
    0.03,
    0.02,
    0.01,
    0.01,
)  # of a small draft for the storyteller, rounded
WEIGHT = 16  # nodes that the prior counts for


# ---------------------------------------------------------------------- the acceptance vector


def acceptance_by_rank(p: Probs, children: Iterable[tuple[int, Probs | None]]) -> list[Any]:
    """For siblings in draw order, each with its law: the chance that it is the one that is kept."""
    reach, chances = 1, list[Any]()
    for token, q in children:
        passed = min(1, ratio(p, q, token))
        chances.append(reach * passed)
        reach *= 1 - passed
        p = exclude_token(p, token) if q is None else residual(p, q)
    return chances


def mean_acceptance_by_rank(
    pairs: Iterable[tuple[Probs, Probs]], ranks: int, rng: RandomSource | None
) -> list[Any]:
    """P: the mean over paired rows (p, q) of how often the first, second, ... child is kept.
    Nothing is decoded.

    rng     draws the children; None: they are the likeliest of q, as at temperature 0 (p is one-hot
            then, and q is not)
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
    """P of two models at every position of some texts, from one pass of each."""

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
        float(share)
        for share in mean_acceptance_by_rank(pairs(), ranks, rng if sampling.temperature else None)
    ]


# ---------------------------------------------------------------------- the tree


def expected_tokens(tree: Shape, accepts: Sequence[Any]) -> Any:
    """F: the tokens of a round, 1 for the root's own and for every node the product of P along its
    path.

    >>> expected_tokens((-1, -1, 0), [0.5, 0.25])
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
    """The dynamic programme, O(depth ranks nodes^2).

    Returns F [depth + 1, nodes + 2], of the best subtree of so many nodes, its own root included,
    and at most so many edges down (-inf where there is none), and the sizes [depth + 1, ranks,
    nodes + 1] of the subtree of the child of a rank, where so many nodes are left for it and its
    later siblings.
    """
    best = np.full((depth + 1, nodes + 2), -np.inf)
    best[:, 1] = 1.0
    sizes = np.zeros((depth + 1, len(accepts), nodes + 1), int)
    left = np.subtract.outer(
        np.arange(nodes + 1), np.arange(nodes + 1)
    )  # [m, s]: of m nodes s are given to this child
    for d in range(1, depth + 1):
        below = best[d - 1, : nodes + 1]
        later = np.array(
            [0.0, *[-np.inf] * nodes]
        )  # what m nodes are worth behind the last rank: there is no child to take them
        for r in reversed(range(len(accepts))):
            child = np.multiply(
                accepts[r], below, out=np.full_like(below, -np.inf), where=np.isfinite(below)
            )
            ways = np.where(left >= 0, child + later[left], -np.inf)
            ways[:, 0] = -np.inf  # no child, then no later one
            sizes[d, r] = ways.argmax(axis=1)
            later = ways.max(axis=1)
            later[0] = 0.0
        best[d, 1:] = 1.0 + later
    return best, sizes


def backtrack_tree(sizes: NDArray[Any], nodes: int, depth: int) -> Shape:
    """The tree that the programme chose for so many nodes and this depth."""
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
    """The tree of at most so many nodes and so deep that commits most; of equals the smallest, then
    the flattest.

    >>> best_tree((0.6, 0.3), 3, 2)
    (-1, -1, 0)
    """
    best, sizes = solve_tree_dp(tuple(accepts), nodes, depth)
    n, d = max(
        ((n, d) for n in range(1, nodes + 1) for d in range(1, depth + 1)),
        key=lambda way: best[way[1], way[0] + 1],
    )
    return backtrack_tree(sizes, n, d)


def fastest_tree(accepts: Sequence[float], curve: CostModel, depth: int) -> Shape:
    """The tree with the least time a token, (d c + t(n)) / F(n, d), over the sizes of the curve and
    all depths.
    """
    costs = curve.costs()
    step = STEP * costs[0] if curve.step is None else curve.step
    best, sizes = solve_tree_dp(tuple(accepts), curve.sizes[-1], depth)
    ways = {
        (n, d): (d * step + cost) / float(best[d, n + 1])
        for n, cost in zip(curve.sizes[1:], costs[1:], strict=True)
        for d in range(1, depth + 1)
        if best[d, n + 1] > 1
    }
    return backtrack_tree(sizes, *min(ways, key=lambda way: ways[way])) if ways else (ROOT,)


# ---------------------------------------------------------------------- the drafter


class OnlineEstimates:
    """What is known of a pair of models: shares kept by rank, and the times."""

    def __init__(self, ranks: int, longest: int):
        prior = [*PRIOR, *[PRIOR[-1]] * ranks][:ranks]
        self.shares, self.seen = [WEIGHT * share for share in prior], [float(WEIGHT)] * ranks
        self.curve = CostModel(longest)

    @property
    def accepts(self) -> tuple[float, ...]:
        return tuple(
            round(share / seen, 3) for share, seen in zip(self.shares, self.seen, strict=True)
        )

    def learn(self, shares: Sequence[Any]) -> None:
        for rank, share in enumerate(shares[: len(self.shares)]):
            self.shares[rank] += float(share)
            self.seen[rank] += 1


class SequoiaDrafter(TreeDrafter):
    """A tree drawn without replacement, of the shape that is best for what was measured so far."""

    def __init__(
        self, request: Request, learnt: OnlineEstimates, depth: int, fixed: tuple[bool, bool]
    ):
        super().__init__(
            request.drafts[0], (ROOT,), request.stop.eos, *request.draft_max_lengths[:1], replace=False, cover=True
        )  # fmt: skip
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
        accepts, nodes = self.learnt.accepts, self.learnt.curve.sizes[-1]
        if self.choose is not None:
            ways = sorted(
                {
                    best_tree(accepts, n, d)
                    for n in range(1, nodes + 1)
                    for d in range(1, self.depth + 1)
                }
            )
            self.reshape(ways[self.choose(len(ways), rng)])
        elif (
            self.rounds & (self.rounds - 1) == 0
        ):  # in round 0, 1, 2, 4, 8, ...: planning takes longer than a guess
            self.reshape(fastest_tree(accepts, self.learnt.curve, self.depth))
        began = self.clock()
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.ready = self.clock()
        if tree.tokens and self.ready > began and not self.fixed[1]:
            seconds = (self.ready - began) / max(tree.depths())
            self.learnt.curve.step = update_ema(self.learnt.curve.step, seconds)
        return tree

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.rounds += 1
        if self.choose is not None:
            return  # who plans in its place has nothing to learn
        if not self.fixed[1]:
            self.learnt.curve.enter(len(round.tree.tokens), self.clock() - self.ready)
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


def _numbers(knob: str, text: str) -> list[float]:
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
            "costs": "that of a draft call, then of a target call over 0, 1, ... guesses, as in 0.3,1,1.1,1.2",
        }
        raise TinyspecError(f"{knob} is {text!r}: give {what[knob]}")
    return numbers


@technique(
    title="Sequoia: the tree that measurements call for",
    summary="builds the tree that measures fastest",
    paper="Chen et al. 2024, arXiv 2402.12374",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    timed=True,
    knobs=(
        Knob("nodes", 32, "most tokens in a tree", low=1, high=1024, small=(1, 2)),
        Knob("depth", 8, "greatest depth of a tree", low=1, high=64, small=(2,)),
        Knob("ranks", 8, "most children of a node", low=1, high=64, small=(2,)),
        Knob("accepts", "", "the acceptance vector, as 0.6,0.2,0.1; empty: learnt while decoding"),
        Knob(
            "costs",
            "",
            "of a draft call, then of a target call over 0, 1, ... guesses; empty: timed while decoding",
        ),
    ),
)
def sequoia(
    request: Request, *, nodes: int, depth: int, ranks: int, accepts: str, costs: str
) -> Decoder:
    """A draft model draws the tree that is best for what was measured; the target walks it."""
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
    if accepts != "":
        learnt.shares = [*_numbers("accepts", accepts), *[0.0] * ranks][:ranks]
        learnt.seen = [1.0] * ranks
    if costs != "":
        learnt.curve.step, *calls = _numbers("costs", costs)
        last = len(calls) - 1  # beyond what was given, on the last slope
        learnt.curve.seconds = [
            calls[min(size, last)] + max(0, size - last) * (calls[-1] - calls[-2])
            for size in learnt.curve.sizes
        ]
    return request.decoder(
        SequoiaDrafter(request, learnt, depth, (accepts != "", costs != "")), verify_tree
    )
