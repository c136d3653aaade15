"""Staged speculative decoding: draft a tree, and let an n-gram model speculate for the draft model.

Paper: Spector & Re 2023, arXiv 2308.04623. The draft model is not trained for this; the n-grams are
counted in a sampling run of the draft model, `tinyspec train ngrams --draft NAME --tokens N`.

Idea. Two ideas, for one request on one machine. First, the target verifies a *tree* that is built
while it is drafted. Here the most probable leaf so far always gets children next, so the tree is
wide near the root and deep along likely paths. Second, the draft model is decoded
speculatively too. A Katz back-off n-gram model samples the next tokens, and one forward pass of the
draft model runs them together with the leaves that may be expanded next. The draft model accepts or
rejects each of them as the first child of the node before it. If it accepts, the distribution after
that child is there already.

    value(node) = product of q(token) along the path        the leaf with the greatest value expands

A token x that the n-gram model drew from g is accepted by the draft model q with probability

    min(1, q(x) / g(x))        over all x: 1 - TV(q, g)

A rejected x is replaced by a token drawn from max(0, q - g), normalized.

Guarantee: EXACT. Children are sampled without replacement and declare their distributions (or are
the draft's most likely tokens, as point masses; at temperature 0 always). Which leaf expands
depends on what was drawn before.
Pitfall: declaring g for a token that the draft model has judged: it follows q by then. A token that
ends the text must be judged like any other, although nothing is computed after it. A fixed tree, or
n-grams that draft for the target, leave out one of the two stages.
Tests: tests/speculative/test_staged.py (`grow_tree` against the code that runs; how often a guess
is kept; every tree is as likely without n-grams, and costs more passes; on a biased table it beats
fixed trees of its size; one target pass per round), tests/speculative/test_ngram.py (Katz's
formula).
Left out: n-grams that draft a tree (section 3.2); ours draft a chain below the most probable leaf.
One draft pass for each depth; ours runs the next `width` leaves. The paper's run of 120 million
tokens at temperature 1.5: ours has temperature 1, and `sample` says how many of its tokens are
counted. Up to 8,192 are sampled when the draft model is loaded; more are read from the cache, where
the command above keeps them. With point masses nothing is drawn, so the n-gram model's most likely
tokens are compared with the children.
Ours: which leaf expands (the paper says only that the tree is built dynamically), and its sizes
`budget`, `width` and `guesses`. Children are drawn by default; the paper takes the second and third
likeliest tokens.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, nsmallest
from typing import Any

from tinyspec.decoding.decode import Decoder, Target, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.decoding.verify import exclude_token, residual, verify_tree
from tinyspec.speculative.ngram import KatzModel, has_exact_rows, read_own_texts
from tinyspec.speculative.treedraft import sample_siblings
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, Probs, TokenTree

Path = tuple[int, ...]

Guess = tuple[int, Probs]
"""A token that the n-gram model sampled, and the distribution it was sampled from."""


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


def judge_guess(q: Probs, guess: Guess, rng: RandomSource) -> int:
    """Return a token that follows q: the guess if it is accepted, else a draw from the residual.

    One token of speculative decoding, with the draft model in the place of the target.
    """
    token, g = guess
    if rng.accept(q[token] / g[token]):
        return token
    return rng.draw(residual(q, g))


class ComputedPaths:
    """The paths that the draft model has run in this round, and the distributions after them.

    guesses  path -> what the n-gram model guesses for its first child. Each is judged at most once.
    """

    def __init__(self, model: Target, sampling: SamplingParams, context: Sequence[int]):
        self.model, self.sampling, self.context = model, sampling, context
        self.place: dict[Path, int] = {(): -1}  # path -> node of the computed tree
        self.tokens, self.parents = list[int](), list[int]()
        self.probs: TargetProbs | None = None
        self.size = -1  # nodes whose distributions are known
        self.guesses: dict[Path, Guess] = {}

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
                self.run_ahead(computed, leaves, -(-left // self.width), deepest, rng)
            value, node, path = heappop(leaves)
            for token, q, prob in self.draw_children(computed, path, min(self.width, left), rng):
                if token not in self.ends and len(path) + 1 < deepest:
                    heappush(leaves, (value * prob, len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
                dists.append(q)
        return TokenTree(tuple(tokens), tuple(parents), tuple(dists), (False,) * len(tokens))

    def run_ahead(
        self,
        computed: ComputedPaths,
        leaves: list[tuple[Any, int, Path]],
        most: int,
        deepest: int,
        rng: RandomSource,
    ) -> None:
        """Run the draft model once, over the first leaves and the n-grams after the first of them.

        most  leaves that can still get children; no more are run
        """
        for _, _, path in nsmallest(min(most, self.width), leaves):
            computed.add(path)
        path = leaves[0][2]
        for _ in range(min(self.guesses, most - 1, deepest - 1 - len(path))):
            token = self.guess_token(computed, path, rng)
            if token is None or token in self.ends:
                break
            path = (*path, token)
            computed.add(path)
        computed.run()

    def guess_token(self, computed: ComputedPaths, path: Path, rng: RandomSource) -> int | None:
        """Return what the n-gram model says after a path; None if it does not know the last token.

        Where children are sampled, the guess is sampled under the same settings, and kept for the
        draft model to judge. Else it is the most likely token.
        """
        text = [*computed.context, *path]
        if self.table is None or not self.table.knows(text):
            return None
        if not self.drawn or computed.sampling.greedy:
            return self.table.most_likely(text)
        g = computed.sampling.probs(self.table.logits(text), text)
        token = rng.draw(g)
        computed.guesses[path] = token, g
        return token

    def draw_children(
        self, computed: ComputedPaths, path: Path, k: int, rng: RandomSource
    ) -> list[tuple[int, Probs | None, Any]]:
        """Return at most k tokens after a path that was computed.

        Each comes with its declared distribution and its probability under the draft model.
        """
        probs, node = computed.probs, computed.place[path]
        assert probs is not None
        if probs.sampling.temperature == 0:
            q = probs.probs_under(
                node, SamplingParams(repetition_penalty=probs.sampling.repetition_penalty)
            )
        else:
            q = probs[node]
            if self.drawn:
                drawn = draw_siblings(q, k, computed.guesses.get(path), rng)
                return [(token, dist, q[token]) for token, dist in drawn]
        return [(token, None, q[token]) for token in top_k_tokens(q, k) if q[token] > 0]


def draw_siblings(
    q: Probs, k: int, guess: Guess | None, rng: RandomSource
) -> list[tuple[int, Probs | None]]:
    """Draw k tokens without replacement, as `sample_siblings`; a guess may become the first."""
    if guess is None:
        return sample_siblings(q, k, rng)
    first = judge_guess(q, guess, rng)
    others = exclude_token(q, first)  # q itself if it has no other token
    return [(first, q), *(sample_siblings(others, k - 1, rng) if others[first] == 0 else ())]


@technique(
    title="Staged speculative decoding",
    summary="an n-gram model drafts for the draft",
    paper="Spector & Re 2023, arXiv 2308.04623",
    reported="3.16x, GPT-2 Large (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(
        Knob("budget", 8, "nodes of the tree", low=1, high=512, small=(3, 4)),
        Knob("width", 2, "children that a leaf gets at a time", low=1, high=1024, small=(2, 1)),
        Knob(
            "children",
            "drawn",
            "the children of a leaf: drawn from the draft model, or its likeliest tokens",
            choices=("drawn", "likeliest"),
        ),
        Knob(
            "guesses",
            3,
            "tokens that the n-gram model drafts for the draft; 0: no second stage",
            low=0,
            high=64,
            small=(1, 0),
        ),
        Knob("order", 3, "n: the last n - 1 tokens predict the next one", low=2, high=16),
        Knob(
            "sample",
            2048,
            "tokens of the draft's own sampling run in which n-grams are counted; 0: none; more "
            "than 8192 need `tinyspec train ngrams` first",
            low=0,
            high=1 << 20,
            small=(64,),
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
                read_own_texts(model, sample), order, model.config.vocab_size, has_exact_rows(model)
            ),
        )
    ends, max_length = request.stop.eos, request.draft_max_length
    drafter = StagedDrafter(
        draft, budget, width, table, guesses, children == "drawn", ends, max_length
    )
    return request.decoder(drafter, verify_tree)
