"""Suffix decoding: copy from earlier text, and copy further the longer the match.

Paper: Oliaro et al., NeurIPS 2025, arXiv 2411.04975. Nothing is trained.

Idea. Two suffix trees are kept: one over the prompt and output of the request, one over the outputs
of all requests. Every node counts how often its text occurred. For every suffix of the text that
occurs in a tree, p tokens long, a draft tree is grown greedily from what followed it: the leaf with
the greatest D(N) is added next, up to MAX_SPEC(p) nodes. Of all these drafts, over both trees and
all p, the one with the greatest score is verified.

    D(N)        = D(parent) count(N) / (sum of count over N and its siblings),   D(root) = 1
    score       = sum over its nodes of D(N)          the tokens that the draft can hope for
    MAX_SPEC(p) = alpha p

So short or doubtful matches draft little, and long certain ones a lot.

Guarantee: EXACT. A draft token is a point mass, so verification is exact at any temperature,
whatever the trees hold.
Pitfall: a fixed number of draft tokens after the longest match. LLMA copies k tokens and REST takes
a fixed number of nodes; here the size adapts to the match, and the best draft need not follow the
longest one.
State: outputs outlive the request (`persistent`), one tree per model, while the model lives. In a
batch each request has its own: no text may depend on other requests. What is known
changes the speed and never the text of a seed.
Tests: tests/speculative/test_suffix_decoding.py (`best_suffix_draft` against the code that runs; a
draft has at most alpha p nodes; both trees serve; a second request is faster than the first).
Additions of ours: with `price` > 0 (off by default) only the draft tokens that are expected to be
accepted with at least that probability are run (speculative/lookup.py).
The authors' code (ArcticInference) drafts one path by default, not a tree. There an occurrence
after which the text ends counts in the denominator of D(N) too.
Defaults that are not the paper's. `floor` 0.1 is the least D(N) that the authors' code drafts
(suffix_min_token_prob); the paper has no floor. `alpha` 1 is that code's default too. `most` 32 and
`depth` 32 bound the work of a round; vLLM's documentation suggests 32 for the first, and the code
has 64 for the second (vLLM: 24).
Left out: the hybrid with a draft model, used where the best score is small. The trees are bounded:
`depth` tokens for match and draft together, `bound` nodes for outputs (then counts are halved). The
paper lets them grow; its code bounds the depth too.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import count

from tinyspec._core import Forest
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.speculative.lookup import (
    OUTPUTS,
    PRICE_KNOB,
    REMEMBER_KNOB,
    AcceptanceTracker,
    LookupDraft,
    RequestForest,
    shared_forest,
)
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree


def best_suffix_draft(
    texts: Sequence[Sequence[int]], text: Sequence[int], alpha: float
) -> dict[tuple[int, ...], float]:
    """Return the draft with the greatest score, as D(N) of every path in it.

    texts  the texts of one suffix tree; its counts are taken here by searching them

    The compiled `Forest.best`, which `SuffixDecodingDrafter` calls, keeps the counts in a tree. A
    test holds it to this function.

    >>> best_suffix_draft([[1, 2, 3, 1, 2, 4]], [9, 1, 2], alpha=1.0)
    {(3,): 0.5, (3, 1): 0.5}
    """
    best: dict[tuple[int, ...], float] = {}
    for p in range(len(text), 0, -1):
        count: Counter[tuple[int, ...]] = Counter()  # what followed the last p tokens
        for known in texts:
            for end in range(p, len(known)):
                if tuple(known[end - p : end]) == tuple(text[-p:]):
                    count.update(tuple(known[end:i]) for i in range(end + 1, len(known) + 1))
        children: Counter[tuple[int, ...]] = Counter()
        for path, n in count.items():
            children[path[:-1]] += n
        draft: dict[tuple[int, ...], float] = {(): 1.0}
        while len(draft) <= int(alpha * p):
            leaves = {
                path: draft[path[:-1]] * count[path] / children[path[:-1]]
                for path in count
                if path not in draft and path[:-1] in draft
            }
            if not leaves:
                break
            path = max(leaves, key=lambda leaf: leaves[leaf])
            draft[path] = leaves[path]
        del draft[()]
        best = max(best, draft, key=lambda one: sum(one.values()))
    return best


class SuffixDecodingDrafter(RequestForest):
    """Propose the best draft after any suffix of the text, from either tree.

    text  number of the request's whole text, prompt and output in one, in its own tree
    """

    def __init__(
        self,
        forest: Forest,
        numbers: "count[int]",
        alpha: float,
        most: int,
        floor: float,
        price: float,
    ):
        super().__init__(forest, numbers)
        self.alpha, self.most, self.floor, self.trust = alpha, most, floor, AcceptanceTracker(price)
        self.text = forest.open(self.own)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.insert_outputs()
        self.forest.append(self.text, tokens)
        self.length += len(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return (
            TokenTree()
            if self.trust.should_skip_round(max_draft_depth)
            else self.trust.select_tree(*self.look_up(context, max_draft_depth))
        )

    def look_up(self, context: Sequence[int], max_draft_depth: int) -> LookupDraft:
        """Return the best draft: tokens, parents, D(N), and the match length of each node."""
        self.insert_outputs()
        suffix, most = context[-self.forest.depth :], self.most
        found: LookupDraft = self.forest.best(
            (self.own, OUTPUTS), suffix, self.alpha, most, max_draft_depth, self.floor
        )
        return found

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)
        self.pending_outputs += round.tokens

    def insert_outputs(self) -> None:
        self.forest.append(self.text, self.pending_outputs)
        super().insert_outputs()

    def rewind(self, length: int) -> None:
        self.insert_outputs()
        self.forest.rewind(self.text, min(length, self.forest.length(self.text)))
        super().rewind(length)

    def end(self) -> None:
        super().end()
        self.trust.reset()
        self.text = self.forest.open(self.own)


@technique(
    title="Suffix decoding",
    summary="copies what followed the same suffix",
    paper="Oliaro et al. 2024, arXiv 2411.04975",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    persistent=True,
    knobs=(
        Knob(
            "alpha",
            1.0,
            "draft tokens per token of the match: MAX_SPEC = alpha p",
            low=0.0,
            high=64.0,
            small=(1.0, 2.0),
        ),
        Knob("most", 32, "draft tokens verified in a round", low=1, high=1024, small=(3, 1)),
        Knob("floor", 0.1, "least D(N) of a draft token", low=0.0, high=1.0, small=(0.0, 0.5)),
        Knob(
            "depth",
            32,
            "tokens of the trees' windows: match and draft together",
            low=2,
            high=1024,
            small=(5, 2),
        ),
        Knob("bound", 1 << 20, "nodes of the tree of outputs", low=1, high=1 << 28, small=(64, 2)),
        PRICE_KNOB,
        REMEMBER_KNOB,
    ),
)
def suffix_decoding(
    request: Request,
    *,
    alpha: float,
    most: int,
    floor: float,
    depth: int,
    bound: int,
    price: float,
    remember: bool,
) -> Decoder:
    """Return a decoder that drafts as far as the frequencies of earlier texts suggest."""
    forest, numbers = shared_forest(
        request.target, request.clock, "suffix_decoding", depth, bound, remember
    )
    return request.decoder(
        SuffixDecodingDrafter(forest, numbers, alpha, most, floor, price), verify_tree
    )
