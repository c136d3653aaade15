"""Staged speculative decoding: draft a tree, and let an n-gram model speculate for the draft.

Spector & Re 2023, arXiv 2308.04623. Two ideas, for one request on one machine. First, the batch
that the target verifies is a *tree*, grown where the draft's own probability is: always the most
probable leaf so far gets children next, so the tree is wide near the root and deep along likely
paths; its leaves cost the draft nothing. Second, the draft is decoded speculatively too: a Katz
back-off n-gram model, counted in text that the draft said, guesses ahead, and one call of the draft
runs its guesses together with the leaves that may be opened next. Where it guessed the path that
the tree takes, the rows are there already. The draft is not trained for this; the n-grams are
counted once a model.

Guarantee: EXACT. Children are drawn without replacement and declare their laws (or are the
likeliest, as point masses; at temperature 0 always). Which leaf is opened depends on what was drawn
before; a guess of the n-grams decides what is run, not what is drawn. Tested in
tests/speculative/test_staged.py: the tree is the same without n-grams, and costs more calls; on a
biased table it beats fixed trees of its size; one call of the target a round.
Left out: nothing known; the paper's tree sizes were not to be had, so the defaults are ours.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, nsmallest
from typing import Any

from tinyspec.decoding.decode import Decoder, Target, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.ngram import Katz, sampled
from tinyspec.speculative.treedraft import sample_siblings
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, Probs, TokenTree

Path = tuple[int, ...]


class ComputedPaths:
    """What the draft was run over in this round: paths, and the laws behind them. One `run` is one
    call.
    """

    def __init__(self, model: Target, sampling: SamplingParams, context: Sequence[int]):
        self.model, self.sampling, self.context = model, sampling, context
        self.place: dict[Path, int] = {(): -1}  # path -> node of the tree that is run
        self.tokens, self.parents = list[int](), list[int]()
        self.laws: TargetProbs | None = None
        self.size = -1  # nodes whose laws are there

    def add(self, path: Path) -> None:
        """Run this path with the next call."""
        for end in range(1, len(path) + 1):
            if path[:end] not in self.place:
                self.place[path[:end]] = len(self.tokens)
                self.tokens.append(path[end - 1])
                self.parents.append(self.place[path[: end - 1]])

    def lacks(self, path: Path) -> bool:
        """Whether the law behind this path is not there yet."""
        return self.laws is None or self.place.get(path, self.size) >= self.size

    def run(self) -> None:
        """One call: what was added. What was run before is kept by the session."""
        self.size = n = len(self.tokens)
        tree = TokenTree(tuple(self.tokens), tuple(self.parents), (None,) * n, (False,) * n)
        self.laws = TargetProbs(self.model.score(tree), self.sampling, self.context, tree)


class StagedDrafter(ModelDrafter):
    """Grows a tree of `budget` nodes from a model: the most probable leaf gets `width` children,
    again and again.

    table, guesses  the n-gram model, and how many tokens it guesses ahead (0: stage two is off)
    drawn           children are drawn without replacement; else they are the likeliest
    """

    def __init__(
        self,
        model: Target,
        budget: int,
        width: int,
        table: Katz | None,
        guesses: int,
        drawn: bool,
        ends: frozenset[int] = frozenset(),
        positions: int | None = None,
    ):
        super().__init__(model, budget, ends, positions)
        self.budget, self.width, self.table, self.guesses, self.drawn = (
            budget,
            width,
            table,
            guesses,
            drawn,
        )

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        deepest = (
            max_draft_depth
            if self.positions is None
            else min(max_draft_depth, self.positions - self.length)
        )
        tokens, parents, laws = list[int](), list[int](), list[Probs | None]()
        known = ComputedPaths(self.model, sampling, context)
        leaves: list[
            tuple[Any, int, Path]
        ] = []  # (-probability, node, path): the most probable first
        if deepest > 0 and not self.left_behind:
            leaves.append((-1, ROOT, ()))
        while leaves and len(tokens) < self.budget:
            left = self.budget - len(tokens)
            if known.lacks(leaves[0][2]):
                self.look(known, leaves, -(-left // self.width), deepest)
            value, node, path = heappop(leaves)
            assert known.laws is not None
            for token, law, share in self.children(
                known.laws, known.place[path], min(self.width, left), rng
            ):
                if token not in self.ends and len(path) + 1 < deepest:
                    heappush(leaves, (value * share, len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
                laws.append(law)
        return TokenTree(tuple(tokens), tuple(parents), tuple(laws), (False,) * len(tokens))

    def look(
        self, known: ComputedPaths, leaves: list[tuple[Any, int, Path]], most: int, deepest: int
    ) -> None:
        """One call of the draft, where at most so many leaves are still to get children: the first
        of them, the next few, and the n-gram model's guesses below the first. None is run that
        could have no children."""
        for _, _, path in nsmallest(min(most, self.width), leaves):
            known.add(path)
        path = leaves[0][2]
        for _ in range(min(self.guesses, most - 1, deepest - 1 - len(path))):
            guess = (
                self.table.likeliest([*known.context[-self.table.order :], *path])
                if self.table
                else None
            )
            if guess is None or guess in self.ends:
                break
            path = (*path, guess)
            known.add(path)
        known.run()

    def children(
        self, laws: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Probs | None, Any]]:
        """At most k tokens behind a node of the run tree: (token, its declared law, its probability
        under the draft).
        """
        if laws.sampling.temperature == 0:
            q = laws.probs_under(
                node, SamplingParams(repetition_penalty=laws.sampling.repetition_penalty)
            )
        else:
            q = laws[node]
            if self.drawn:
                return [(token, law, q[token]) for token, law in sample_siblings(q, k, rng)]
        return [(token, None, q[token]) for token in top_k_tokens(q, k) if q[token] > 0]


@technique(
    title="Staged speculative decoding",
    summary="an n-gram model drafts for the draft",
    paper="Spector & Re 2023, arXiv 2308.04623",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(
        Knob("budget", 8, "nodes of the tree", low=1, small=(3, 4)),
        Knob("width", 2, "children that a leaf gets at a time", low=1, small=(2, 1)),
        Knob("children", "drawn", "how they are found", choices=("drawn", "likeliest")),
        Knob("guesses", 3, "tokens that the n-gram model guesses ahead of the draft; 0: no second stage", low=0, small=(1, 0)),
        Knob("order", 3, "of the n-gram model", low=2),
        Knob("sample", 2048, "tokens that the draft says once, to count n-grams in", low=0, small=(8,)),
    ),
)  # fmt: skip
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
    """A tree from a draft model, and n-grams ahead of that."""
    draft: Any = request.drafts[0]
    table = None
    if guesses and sample:
        model = draft.model
        table = per_model_state(
            draft,
            ("n-grams", order, sample),
            lambda: Katz(sampled(model, sample), order, model.config.vocab_size),
        )
    reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
    drafter = StagedDrafter(
        draft, budget, width, table, guesses, children == "drawn", request.stop.eos, reach
    )
    return request.decoder(drafter, verify_tree)
