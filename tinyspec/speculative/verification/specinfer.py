"""SpecInfer: verify a token tree that one or several small models drafted.

Paper: Miao et al., ASPLOS 2024, arXiv 2305.09781 (its small speculative models, SSMs, are our draft
models).

Idea. Expansion-based trees: at depth i every leaf gets k_i tokens drawn from one model, as in
<1,1,3,1,1,1,1,1>. Merge-based trees: every model grows its own tree, and the trees are merged, so
that a prefix which several of them propose is computed once. The target scores the merged tree in
one forward pass. At a node the verifier picks one of the children at random, whoever proposed it,
and tests it against the distribution q_s of the model s that drew it. After a rejection it goes on
with the residual and the children that remain.

    P(accept x_s) = min(1, p(x_s) / q_s(x_s))        s: uniform among the untested children
    p            <- max(0, p - q_s), divided by its sum        after a rejection

Training. The draft models are made for each other (*collective boost-tuning*): the first is
fine-tuned on the target's own greedy texts, the prompts on which it now agrees with the target are
taken out, the next is tuned on the rest, and so on. The loss is cross-entropy on the target's
tokens; no data set is needed.

Guarantee: EXACT for any draft models. At temperature 0 the tokens of an expansion are the draft's
most likely ones, as point masses.
Pitfall: merging a token that two models proposed into one test. It is two proposals, each tested
against its own distribution. Sampling y from p and looking whether it is in the tree (naive
sampling) is exact too, and accepts less.
Tests: tests/speculative/test_specinfer.py (`multi_step_sampling` against the code that runs,
outcome by outcome; theorem 4.2, the token's distribution under colliding drafts; theorem 4.3,
acceptance never below naive sampling; boosting on tiny models).
Left out: distributed serving, offloading and kernels, which are no part of the method.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec._core.reference import acceptance_ratio
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round, TargetProbs
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, exclude_token, residual
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.lm.model import Model
from tinyspec.speculative.treedraft import TreeDrafter, branching_parents, parse_branching
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree

D = TypeVar("D")
P = TypeVar("P")


def multi_step_sampling(p: Any, dists: Any, drafts: list[int], rng: Any) -> tuple[int, bool]:
    """Test the children of one node in random order (algorithm 2).

    p       [V] target probabilities
    dists   [k, V] the distribution that each child was sampled from
    drafts  [k] the children's tokens
    rng     a numpy.random.Generator

    Returns the next token and whether it is a draft token. The decoder runs
    `verify_tree_multi_step`, which does this at every node. A test compares the two on every
    outcome.
    """
    p, untested = np.asarray(p), list(range(len(drafts)))
    while untested:
        s = untested.pop(rng.integers(len(untested)))
        token, q = drafts[s], np.asarray(dists[s])
        if rng.random() < min(1, p[token] / q[token]):
            return token, True
        p = np.maximum(0, p - q)
        p = p / p.sum()
    return rng.choice(len(p), p=p), False


class SpecInferDrafter(BaseDrafter):
    """Grow one tree per draft model, side by side.

    The session that scores the merged tree computes an equal prefix once.
    """

    def __init__(self, drafts: Sequence[TreeDrafter]):
        self.drafts = drafts

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        for draft in self.drafts:
            draft.extend(tokens, scores)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return merge_trees(
            [draft.propose(context, max_draft_depth, sampling, rng) for draft in self.drafts]
        )

    def observe(self, round: Round) -> None:
        for draft in self.drafts:
            draft.observe(round)

    def rewind(self, length: int) -> None:
        for draft in self.drafts:
            draft.rewind(length)

    def end(self) -> None:
        for draft in self.drafts:
            draft.end()


def merge_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the nodes of all trees below one root.

    Equal nodes stay two proposals, because each has its own distribution.

    >>> merge_trees([TokenTree.chain([5, 7]), TokenTree.chain([5, 8])]).parents
    (-1, 0, -1, 2)
    """
    parents, n_before = list[int](), 0
    for tree in trees:
        parents += [up if up == ROOT else up + n_before for up in tree.parents]
        n_before += len(tree.tokens)
    tokens, _, draft_probs, probe = (
        tuple(chain.from_iterable(columns)) for columns in zip(*trees, strict=True)
    )
    return TokenTree(tokens, tuple(parents), draft_probs, probe)


def verify_tree_multi_step(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    """Verify a tree by multi-step speculative sampling at every node.

    The output follows p exactly.
    """
    path, rejected = list[int](), list[int]()
    row, here = p[ROOT], {ROOT}
    while untested := [
        node
        for node, up in enumerate(tree.parents)
        if up in here and not tree.probe[node] and node not in rejected
    ]:
        node = untested[_draw_index(len(untested), rng)]
        token, q = tree.tokens[node], tree.draft_probs[node]
        if rng.accept(acceptance_ratio(row, q, token)):
            path.append(node)
            here = {
                twin
                for twin, up in enumerate(tree.parents)
                if up in here and tree.tokens[twin] == token
            }
            row = p[node]
        else:
            rejected.append(node)
            row = exclude_token(row, token) if q is None else residual(row, q)
    return Verdict(tuple(path), rng.draw(row), tuple(rejected))


def _draw_index(ways: int, rng: RandomSource) -> int:
    return rng.draw([Fraction(1, ways)] * ways) if ways > 1 else 0


# ------------------------------ collective boost-tuning (section 3)


def tune_collectively(
    drafts: Iterable[D],
    prompts: Sequence[P],
    tune: Callable[[D, Sequence[P]], D],
    covers: Callable[[D, P], bool],
) -> list[D]:
    """Tune each draft on the prompts that no draft before it covers.

    If none are left, the remaining drafts stay as they are.
    """
    tuned, left = list[D](), list(prompts)
    for draft in drafts:
        tuned.append(tune(draft, left) if left else draft)
        left = [prompt for prompt in left if not covers(tuned[-1], prompt)]
    return tuned


@torch.no_grad()
def append_greedy_answers(target: Model, prompts: Tensor, length: int) -> Tensor:
    """Return each prompt with the target's greedy answer, [N, T + length]."""
    for _ in range(length):
        nexts = [target.training_logits(part)[:, -1:].argmax(dim=-1) for part in _parts(prompts)]
        prompts = torch.cat([prompts, torch.cat(nexts)], dim=1)
    return prompts


def _parts(rows: Tensor) -> list[Tensor]:
    """Return the rows in batches of 64, because a pass over all of them would not fit."""
    return [rows[at : at + 64] for at in range(0, len(rows), 64)]


def answer_loss(draft: Model, text: Tensor, length: int) -> Tensor:
    """Return the draft's mean cross-entropy on the last `length` tokens, the target's answer."""
    logits = draft.training_logits(text[:, :-1])[:, -length:]
    return F.cross_entropy(logits.flatten(0, 1), text[:, -length:].flatten())


@torch.no_grad()
def answers_match(draft: Model, texts: Tensor, length: int) -> Tensor:
    """Return whether a draft's greedy answer is the text's, [N] bools.

    It is if each token of the answer is the draft's most likely one after those before it.
    """
    same = [
        (draft.training_logits(part[:, :-1])[:, -length:].argmax(dim=-1) == part[:, -length:]).all(
            dim=1
        )
        for part in _parts(texts)
    ]
    return torch.cat(same)


# ------------------------------ the card


@technique(
    title="SpecInfer: tree-based speculative inference",
    summary="verifies a tree of draft tokens",
    paper="Miao et al. 2024, arXiv 2305.09781",
    reported="1.5x to 2.8x, distributed (survey)",
    family="verification",
    guarantee=Guarantee.EXACT,
    drafts=1,
    several=True,
    knobs=(
        Knob(
            "expansion",
            "1x1x3x1x1x1x1x1",
            "tokens below every node, by depth; A+B: one tree for each draft model (the last "
            "serves the others too)",
            small=(1, "1x1+2"),
        ),
    ),
)
def specinfer(request: Request, *, expansion: str) -> Decoder:
    """Return a decoder in which every draft model grows a tree, verified as one."""
    trees = [branching_parents(parse_branching(word)) for word in str(expansion).split("+")]
    if len(trees) > len(request.drafts):
        given = f"{len(request.drafts)} draft model" + "s" * (len(request.drafts) > 1)
        raise TinyspecError(
            f"expansion {expansion} names {len(trees)} trees for {given}: give one for each, or "
            "more drafts"
        )
    max_lengths = [*request.draft_max_lengths, *[None] * len(request.drafts)]
    drafts = [
        TreeDrafter(
            model, trees[min(number, len(trees) - 1)], request.stop.eos, max_lengths[number]
        )
        for number, model in enumerate(request.drafts)
    ]
    return request.decoder(SpecInferDrafter(drafts), verify_tree_multi_step)
