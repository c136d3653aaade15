"""Staged speculative decoding: draft a tree, and let an n-gram model speculate for the draft model.

Paper: Spector & Re 2023, arXiv 2308.04623. The draft model is not trained for this; the n-grams are
counted once per model, in text that the draft model sampled.

Idea. Two ideas, for one request on one machine. First, the target verifies a *tree* that grows
where the draft's own probability is: the most probable leaf so far always gets children next, so
the tree is wide near the root and deep along likely paths. Second, the draft model is decoded
speculatively too: a Katz back-off n-gram model predicts the next tokens, and one forward pass of
the draft model runs them together with the leaves that may be expanded next. If the tree takes the
predicted path, its distributions are there already.

    value(node) = product of q(token) along the path        the leaf with the greatest value expands

Guarantee: EXACT. Children are sampled without replacement and declare their distributions (or are
the draft's most likely tokens, as point masses; at temperature 0 always). Which leaf expands
depends on what was drawn before. The n-grams decide what is computed, not what is drawn.
Pitfall: a fixed tree, or n-grams that draft for the target: each leaves out one of the two stages.
Tests: tests/speculative/test_staged.py (`grow_tree` against what runs; the tree is the same without
n-grams, and costs more passes; on a biased table it beats fixed trees of its size; one target pass
per round).
Left out: sampling and judging in stage two. In the paper the n-gram model samples tokens, and the
draft model accepts or rejects them by the rule of speculative decoding. Here the n-gram model's
most likely tokens only choose what one pass of the draft model computes; the draft's own draw
decides, and a token that was foreseen spares a pass. Both keep the draft's distribution. They
differ in how often a pass is spared: with the probability of the foreseen token here, with
1 - TV(draft, n-gram) there. The paper counts its n-grams in a long run of the draft model that is
kept. Here `sample` tokens are sampled once for each loaded model and not written to a file. The
paper's tree sizes were not available: `budget`, `width`, `guesses` and `sample` are ours.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, nsmallest
from typing import Any

from tinyspec.decoding.decode import Decoder, Target, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.ngram import KatzModel, sample_unconditionally
from tinyspec.speculative.treedraft import sample_siblings
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, Probs, TokenTree

Path = tuple[int, ...]


def grow_tree(
    q: Callable[[list[int]], Sequence[Any]], text: list[int], budget: int, width: int
) -> list[Path]:
    """Return the paths of the tree: the most probable leaf gets `width` children, again and again.

    q  a function from a text to the draft model's next distribution [V]

    The children are the leaf's most likely tokens. `StagedDrafter` can also sample them, and runs
    several leaves per forward pass. A test compares the two.

    >>> grow_tree(lambda text: [0.6, 0.4], [], budget=4, width=2)
    [(0,), (1,), (0, 0), (0, 1)]
    """
    nodes: list[Path] = []
    leaves: list[tuple[Any, int, Path]] = [(-1, -1, ())]  # (-value, age, path)
    while leaves and len(nodes) < budget:
        value, _, path = heappop(leaves)
        row = q([*text, *path])
        best = sorted(range(len(row)), key=lambda token: (-row[token], token))
        for token in best[: min(width, budget - len(nodes))]:
            heappush(leaves, (value * row[token], len(nodes), (*path, token)))
            nodes.append((*path, token))
    return nodes


class ComputedPaths:
    """The paths that the draft model has run in this round, and the distributions after them."""

    def __init__(self, model: Target, sampling: SamplingParams, context: Sequence[int]):
        self.model, self.sampling, self.context = model, sampling, context
        self.place: dict[Path, int] = {(): -1}  # path -> node of the computed tree
        self.tokens, self.parents = list[int](), list[int]()
        self.probs: TargetProbs | None = None
        self.size = -1  # nodes whose distributions are known

    def add(self, path: Path) -> None:
        """Compute this path in the next forward pass."""
        for end in range(1, len(path) + 1):
            if path[:end] not in self.place:
                self.place[path[:end]] = len(self.tokens)
                self.tokens.append(path[end - 1])
                self.parents.append(self.place[path[: end - 1]])

    def needs_run(self, path: Path) -> bool:
        """Return whether the distribution after this path is not known yet."""
        return self.probs is None or self.place.get(path, self.size) >= self.size

    def run(self) -> None:
        """Run one forward pass over the paths that were added; the session keeps the others."""
        self.size = n = len(self.tokens)
        tree = TokenTree(tuple(self.tokens), tuple(self.parents), (None,) * n, (False,) * n)
        self.probs = TargetProbs(self.model.score(tree), self.sampling, self.context, tree)


class StagedDrafter(ModelDrafter):
    """Grow a tree of `budget` nodes: the most probable leaf gets `width` children, repeatedly.

    table, guesses  the n-gram model, and how many tokens it predicts (0: stage two is off)
    drawn           children are sampled without replacement; else they are the most likely tokens
    """

    def __init__(
        self,
        model: Target,
        budget: int,
        width: int,
        table: KatzModel | None,
        guesses: int,
        drawn: bool,
        ends: frozenset[int] = frozenset(),
        positions: int | None = None,
    ):
        super().__init__(model, budget, ends, positions)
        self.budget, self.width, self.drawn = budget, width, drawn
        self.table, self.guesses = table, guesses

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        deepest = max_draft_depth
        if self.positions is not None:
            deepest = min(deepest, self.positions - self.length)
        tokens, parents, dists = list[int](), list[int](), list[Probs | None]()
        computed = ComputedPaths(self.model, sampling, context)
        leaves: list[tuple[Any, int, Path]] = []  # (-value, node, path): the most probable first
        if deepest > 0 and not self.left_behind:
            leaves.append((-1, ROOT, ()))
        while leaves and len(tokens) < self.budget:
            left = self.budget - len(tokens)
            if computed.needs_run(leaves[0][2]):
                self.run_ahead(computed, leaves, -(-left // self.width), deepest)
            value, node, path = heappop(leaves)
            assert computed.probs is not None
            for token, q, prob in self.draw_children(
                computed.probs, computed.place[path], min(self.width, left), rng
            ):
                if token not in self.ends and len(path) + 1 < deepest:
                    heappush(leaves, (value * prob, len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
                dists.append(q)
        return TokenTree(tuple(tokens), tuple(parents), tuple(dists), (False,) * len(tokens))

    def run_ahead(
        self, computed: ComputedPaths, leaves: list[tuple[Any, int, Path]], most: int, deepest: int
    ) -> None:
        """Run the draft model once, over the first leaves and the n-grams after the first of them.

        most  leaves that can still get children; no more are run
        """
        for _, _, path in nsmallest(min(most, self.width), leaves):
            computed.add(path)
        path = leaves[0][2]
        for _ in range(min(self.guesses, most - 1, deepest - 1 - len(path))):
            token = (
                self.table.most_likely([*computed.context[-self.table.order :], *path])
                if self.table
                else None
            )
            if token is None or token in self.ends:
                break
            path = (*path, token)
            computed.add(path)
        computed.run()

    def draw_children(
        self, probs: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Probs | None, Any]]:
        """Return at most k tokens after a node of the computed tree.

        Each comes with its declared distribution and its probability under the draft model.
        """
        if probs.sampling.temperature == 0:
            q = probs.probs_under(
                node, SamplingParams(repetition_penalty=probs.sampling.repetition_penalty)
            )
        else:
            q = probs[node]
            if self.drawn:
                return [(token, dist, q[token]) for token, dist in sample_siblings(q, k, rng)]
        return [(token, None, q[token]) for token in top_k_tokens(q, k) if q[token] > 0]


@technique(
    title="Staged speculative decoding",
    summary="an n-gram model drafts for the draft",
    paper="Spector & Re 2023, arXiv 2308.04623",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(
        Knob("budget", 8, "nodes of the tree", low=1, high=512, small=(3, 4)),
        Knob("width", 2, "children that a leaf gets at a time", low=1, high=1024, small=(2, 1)),
        Knob("children", "drawn", "how they are found", choices=("drawn", "likeliest")),
        Knob(
            "guesses",
            3,
            "tokens that the n-gram model predicts for the draft; 0: no second stage",
            low=0,
            high=64,
            small=(1, 0),
        ),
        Knob("order", 3, "of the n-gram model", low=2, high=16),
        Knob(
            "sample",
            2048,
            "tokens that the draft samples once, to count n-grams in",
            low=0,
            high=1 << 20,
            small=(8,),
        ),
    ),
)
def staged(
    request: Request,
    *,
    budget: int,
    width: int,
    children: str,
    guesses: int,
    order: int,
    sample: int,
) -> Decoder:
    """Return a decoder with a tree from a draft model, for which n-grams speculate."""
    draft: Any = request.drafts[0]
    table = None
    if guesses and sample:
        model = draft.model
        table = per_model_state(
            draft,
            ("n-grams", order, sample),
            lambda: KatzModel(
                sample_unconditionally(model, sample), order, model.config.vocab_size
            ),
        )
    ends, max_length = request.stop.eos, request.draft_max_length
    drafter = StagedDrafter(
        draft, budget, width, table, guesses, children == "drawn", ends, max_length
    )
    return request.decoder(drafter, verify_tree)
