"""Lookahead with a trie: what was asked and answered before is kept as branches, and many of them
are checked at once.

Zhao et al. (Ant Group), KDD 2024, arXiv 2312.12728; not the Jacobi method of Fu et al. that has the
same name. A trie of token windows is fed with every prompt and, as it grows, every output, and
outlives the request. The last tokens are looked up in it; what followed them gives not one draft
but a tree of them, checked in one call. Four procedures make it this technique: *branch inserting*
(a branch of `branch_length` tokens behind every position), *branch eliminating* (a prompt's
branches go when its request ends), *node pruning* (beyond `bound` nodes the counts are halved, and
what falls to 0 goes), *multi-stage retrieval* (the longest match first, a token less until there
are `branch_length` guesses; of too many the most frequent, half the draft being kept for outputs
and the rest filled from the prompt first). Branches are checked as a tree (hierarchical), side by
side without sharing what they begin with (parallel), or the best one alone (single). Nothing is
trained.

Guarantee: EXACT. A branch is a point mass, so the walk is exact at any temperature, whatever the
trie holds.
Tested in tests/speculative/test_lookahead_trie.py: each procedure alone; what one request said
shortens the next; the nodes that the tree shares are checked once.
State: outputs outlive the request (`persistent`), one trie a model, for as long as the model lives;
in a batch, where a row must equal the row run alone, each request has its own. Above temperature 0
the text of a seed depends on what is known. Off by itself: guesses are run where they are expected
to hold with at least `price` (speculative/lookup.py), so with no match, or where matches lately failed,
the step is plain decoding. `price` 0 is the paper's rule: whatever is found is run.
Left out: stop words as roots of branches, and the bounds of a single first token's branches: one
bound is set for all. Here the matches of all stages are joined; the paper takes the last stage's,
which are the same windows by another order.
"""

from collections.abc import Sequence
from itertools import count

from tinyspec._core import Forest
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.lookup import NOTHING, OUTPUTS, AcceptanceTracker, Remembered, memory
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


class LookaheadTrieDrafter(Remembered):
    """Proposes the branches behind the last tokens."""

    def __init__(
        self,
        forest: Forest,
        prompts: "count[int]",
        length: int,
        branch: int,
        mode: str,
        price: float,
    ):
        super().__init__(forest, prompts)
        self.budget, self.branch, self.mode, self.trust = (
            length,
            branch,
            mode,
            AcceptanceTracker(price),
        )

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.trust.skip_this_round(max_draft_depth):
            return NOTHING
        self.settle()
        suffix, deepest = context[-self.branch :], min(self.branch, max_draft_depth)
        plan = [(self.own, 2), (OUTPUTS, 4)]  # a glance: is a draft worth its while?
        tokens, parents, shares, matches = self.forest.gather(plan, suffix, self.branch, 1, 1)
        if not tokens or not self.trust.worth(shares, matches[0]):
            return self.trust.record_without_running(tokens, parents, matches)
        half = self.budget // 2
        plan = [(OUTPUTS, half), (self.own, self.budget), (OUTPUTS, self.budget)]
        draft = self.forest.gather(
            plan, suffix, self.branch, min(self.branch, self.budget), deepest
        )
        return reshape_branches(self.trust.tree(*draft), self.mode, self.budget)

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)
        self.fresh += round.tokens

    def end(self) -> None:
        super().end()
        self.trust.forget()


def reshape_branches(tree: TokenTree, mode: str, budget: int) -> TokenTree:
    """The branches of a tree: as they are, side by side (at most `budget` guesses in all), or the
    first one.

    >>> tree = TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3, (False,) * 3)
    >>> reshape_branches(tree, "parallel", 4).tokens, reshape_branches(tree, "parallel", 3).tokens
    ((5, 6, 5, 7), (5, 6))
    >>> reshape_branches(tree, "single", 4).tokens
    (5, 6)
    """
    if mode == "hierarchical" or not tree.tokens:
        return tree
    inner = set(tree.parents)
    branches = [
        tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens)) if node not in inner
    ]
    if mode == "single":
        return TokenTree.chain(follow_first_branch(tree))
    tokens, parents = list[int](), list[int]()
    for branch in branches:
        if len(tokens) + len(branch) <= budget:
            parents += [ROOT, *range(len(tokens), len(tokens) + len(branch) - 1)]
            tokens += branch
    return TokenTree(tuple(tokens), tuple(parents), (None,) * len(tokens), (False,) * len(tokens))


def follow_first_branch(tree: TokenTree) -> tuple[int, ...]:
    """From the root along the first child of each node: the one that was found first."""
    at, tokens = ROOT, list[int]()
    for node, parent in enumerate(tree.parents):
        if parent == at:
            at = node
            tokens.append(tree.tokens[node])
    return tuple(tokens)


@technique(
    title="Lookahead with a trie of branches",
    summary="copies branches from a trie",
    paper="Zhao et al. 2023, arXiv 2312.12728",
    family="integrated",
    guarantee=Guarantee.EXACT,
    persistent=True,
    knobs=(
        Knob("decoding_length", 64, "guesses checked in a round", low=1, high=1024, small=(3, 1)),
        Knob(
            "branch_length",
            12,
            "tokens of a branch, and of the longest match",
            low=1,
            high=256,
            small=(2, 1),
        ),
        Knob(
            "mode",
            "hierarchical",
            "form of the branches",
            choices=("hierarchical", "parallel", "single"),
        ),
        Knob("bound", 1 << 18, "nodes of the trie of outputs", low=1, small=(64, 2)),
        Knob(
            "price",
            0.25,
            "least chance to hold of a guess that is run; 0: all",
            low=0.0,
            high=1.0,
            small=(0.0, 0.25),
        ),
        Knob(
            "remember", True, "whether outputs are kept for later requests", choices=(True, False)
        ),
    ),
)
def lookahead_trie(
    request: Request,
    *,
    decoding_length: int,
    branch_length: int,
    mode: str,
    bound: int,
    price: float,
    remember: bool,
) -> Decoder:
    """Branches from all that was asked here and answered before."""
    forest, prompts = memory(
        request.target, request.clock, "lookahead_trie", branch_length + 1, bound, remember
    )
    return request.decoder(
        LookaheadTrieDrafter(forest, prompts, decoding_length, branch_length, mode, price),
        verify_tree,
    )
