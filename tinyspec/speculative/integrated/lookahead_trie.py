"""Lookahead with a trie: draft the branches that followed the last tokens in earlier texts.

Paper: Zhao et al. (Ant Group), KDD 2024, arXiv 2312.12728. It is not the Jacobi method of Fu et al.
that has the same name. Nothing is trained.

Idea. A trie counts all windows of tokens of every prompt and, as it grows, of every output; it
outlives the request. The last tokens are looked up in it. What followed them is not one draft but a
tree of drafts, and the target checks the tree in one forward pass. Four procedures make it this
technique:

    branch inserting       a branch of `branch_length` tokens is stored after every position
    branch eliminating     the branches of a prompt are removed when its request ends
    node pruning           beyond `bound` nodes all counts are halved; a count of 0 is removed
    multi-stage retrieval  the longest match is looked up first. While a stage finds fewer than
                           `branch_length` draft tokens, a match one token shorter is looked up.
                           What the last stage with a result found is the draft. Of too many tokens
                           the most frequent are kept: half of the draft is reserved for outputs,
                           and the rest is filled from the prompt first

*Stop words* are tokens that say little about what follows. No branch of an output begins at one,
and a stop word alone is not looked up. The default is none, as in the authors' code.

Branches are checked as a tree (hierarchical), side by side (parallel), or the best alone (single).

Guarantee: EXACT. A branch is a point mass, so verification is exact at any temperature, whatever
the trie holds.
Pitfall: a dictionary of the prompt's n-grams, which forgets what other requests wrote.
State: outputs outlive the request (`persistent`), one trie for each model. In a batch each request
has its own: no text may depend on other requests. What the trie knows changes the
speed and never the text of a seed.
Addition of ours: with `price` > 0 (off by default) a draft token is run only if its probability to
be accepted is at least `price` (speculative/lookup.py). Then the stages are joined, because a token
that also follows a longer match is more likely.
Tests: tests/speculative/test_lookahead_trie.py (`retrieve_branches` against the code that runs;
each procedure alone; one request shortens the next; shared beginnings are checked once).
Left out: the authors' code bounds the branches of each first token by itself (65,536 nodes, 512 of
them from outputs; it looks when 1,024 first tokens have changed). Here one `bound` holds for all
outputs together, after every round. Our forest finds the longest match because it keeps every
suffix of a window; to halve the windows of one first token would break that. The code ranks the
second half of a draft by 0.9999 times the prompt's counts plus 0.0001 times those of outputs; here
it is ranked by the prompt's counts, then by those of outputs, so only ties differ. In the code the
number of draft tokens that are enough counts the newest token, and a single branch needs half.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import count

from tinyspec._core import Forest
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
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
from tinyspec.tree import ROOT, TokenTree

Branch = tuple[int, ...]
"""Tokens that follow the newest token of the text."""


def retrieve_branches(
    outputs: Mapping[Branch, int],
    prompt: Mapping[Branch, int],
    text: Sequence[int],
    branch_length: int,
    decoding_length: int,
    stop_words: Collection[int] = (),
) -> list[Branch]:
    """Return the draft, as the branches that end at its nodes (multi-stage retrieval, section 4.2).

    outputs, prompt  how often each window of up to branch_length + 1 tokens occurred in what the
                     model wrote, and in this prompt
    text             the prompt and the output so far
    branch_length    tokens of the longest match; a stage with so many draft tokens is the last
    decoding_length  draft tokens of a round
    stop_words       tokens at which no branch of an output begins, and no match of one token

    Half of the draft is reserved for outputs; the rest is filled from the prompt first. A parent
    occurs at least as often as its children, so every branch follows the branch that it extends.

    >>> windows = {(1,): 2, (2,): 1, (3,): 1, (1, 2): 1, (1, 3): 1, (1, 2, 1): 1}
    >>> retrieve_branches({}, windows, [7, 1], branch_length=2, decoding_length=2)
    [(2,), (3,)]
    """
    half, draft = decoding_length // 2, list[Branch]()
    for size in range(min(branch_length, len(text)), 0, -1):  # the longest match first
        match, stage = tuple(text[len(text) - size :]), list[Branch]()
        sources = [(outputs, half), (prompt, decoding_length), (outputs, decoding_length)]
        if match[0] in stop_words:
            sources = [(prompt, decoding_length)] if size > 1 else []
        for windows, budget in sources:
            found = {w[size:]: n for w, n in windows.items() if w[:size] == match and w != match}
            for branch in sorted(found, key=lambda branch: (-found[branch], len(branch))):
                if len(stage) < budget and branch not in stage:
                    stage.append(branch)
        draft = stage or draft
        if len(stage) >= min(branch_length, decoding_length):
            break  # enough: a shorter match is a weaker one
    return draft


class LookaheadTrieDrafter(RequestForest):
    """Propose the branches that follow the last tokens, from the prompt and from all outputs.

    length      draft tokens of a round
    branch      tokens of a branch, and of the longest match
    mode        form of the draft: "hierarchical", "parallel" or "single"
    price       least probability to be accepted of a draft token that is run; 0: all are run
    stop_words  tokens at which no branch of an output begins, and no match of one token
    """

    def __init__(
        self,
        forest: Forest,
        prompts: "count[int]",
        length: int,
        branch: int,
        mode: str,
        price: float,
        stop_words: Collection[int] = frozenset(),
    ):
        super().__init__(forest, prompts)
        self.budget, self.branch, self.mode = length, branch, mode
        self.stop_words = stop_words
        self.trust = AcceptanceTracker(price)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.trust.should_skip_round(max_draft_depth):
            return TokenTree()
        self.insert_outputs()
        suffix, deepest = context[-self.branch :], min(self.branch, max_draft_depth)
        enough = min(self.branch, self.budget)
        if self.trust.price > 0:
            # A few nodes tell whether a draft would be worth its cost; growing it takes longer.
            plan = [(self.own, 2), (OUTPUTS, 4)]
            tokens, parents, shares, matches = self.forest.gather(plan, suffix, self.branch, 1, 1)
            if not tokens or not self.trust.is_worth_running(shares, matches[0]):
                return self.trust.remember_lookup(tokens, parents, matches)
        draft = self.retrieve(suffix, enough, deepest)
        return reshape_branches(self.trust.select_tree(*draft), self.mode, self.budget)

    def retrieve(self, suffix: Sequence[int], enough: int, deepest: int) -> LookupDraft:
        """Return the branches of the last stage; with a price, of all stages, joined."""
        prompts = [(self.own, self.budget)]
        both = [(OUTPUTS, self.budget // 2), *prompts, (OUTPUTS, self.budget)]
        found: LookupDraft = ([], [], [], [])
        size = len(suffix)
        while size > 0:
            is_stop = suffix[-size] in self.stop_words
            if is_stop and size == 1:
                break
            plan, least = prompts if is_stop else both, enough if self.trust.price > 0 else 1
            stage: LookupDraft = self.forest.gather(plan, suffix, size, least, deepest)
            match = stage[3][0] if stage[3] else 0
            if match == size:
                found = stage
                if len(stage[0]) >= enough or self.trust.price > 0:
                    break
            # A longer match than the one found has no branch in any tree that was asked.
            size = size - 1 if is_stop or match == size else match
        return found

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)
        self.pending_outputs += round.tokens

    def end(self) -> None:
        super().end()
        self.trust.reset()


def reshape_branches(tree: TokenTree, mode: str, budget: int) -> TokenTree:
    """Return the branches of a tree in the form that `mode` names, with at most `budget` nodes.

    hierarchical  the tree as it is
    parallel      its branches side by side, sharing nothing
    single        the branch that was found first

    >>> tree = TokenTree((5, 6, 7), (-1, 0, 0), (None,) * 3, (False,) * 3)
    >>> reshape_branches(tree, "parallel", 4).tokens, reshape_branches(tree, "parallel", 3).tokens
    ((5, 6, 5, 7), (5, 6))
    >>> reshape_branches(tree, "single", 4).tokens
    (5, 6)
    """
    if mode == "hierarchical" or not tree.tokens:
        return tree
    if mode == "single":
        return TokenTree.chain(follow_first_branch(tree))
    inner = set(tree.parents)
    tokens, parents = list[int](), list[int]()
    for leaf in (node for node in range(len(tree.tokens)) if node not in inner):
        branch = tree.tokens_on(tree.path(leaf))
        if len(tokens) + len(branch) <= budget:
            parents += [ROOT, *range(len(tokens), len(tokens) + len(branch) - 1)]
            tokens += branch
    return TokenTree.point_masses(tuple(tokens), tuple(parents))


def follow_first_branch(tree: TokenTree) -> Branch:
    """Return the tokens from the root along the first child of each node."""
    at, tokens = ROOT, list[int]()
    for node, parent in enumerate(tree.parents):
        if parent == at:
            at = node
            tokens.append(tree.tokens[node])
    return tuple(tokens)


def parse_stop_words(text: str) -> frozenset[int]:
    """Return the token ids of a list with commas. Raises TinyspecError if it is none.

    >>> sorted(parse_stop_words("13, 7"))
    [7, 13]
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise TinyspecError(
            f"stop_words is '{text}': write token ids with commas, such as 13,29892"
        )
    return frozenset(map(int, words))


@technique(
    title="Lookahead with a trie of branches",
    summary="copies branches from a trie",
    paper="Zhao et al. 2023, arXiv 2312.12728",
    reported="5.03x, AntGLM-10B (survey)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    persistent=True,
    knobs=(
        Knob(
            "decoding_length", 64, "draft tokens checked in a round", low=1, high=1024, small=(3, 1)
        ),
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
        Knob(
            "stop_words",
            "",
            "ids of stop words, with commas: no branch of an output begins at one",
            small=("", "1"),
        ),
        Knob(
            "bound",
            1 << 18,
            "nodes of the trie of outputs; ours, the authors' bounds are for each first token",
            low=1,
            high=1 << 24,
            small=(64, 2),
        ),
        PRICE_KNOB,
        REMEMBER_KNOB,
    ),
)
def lookahead_trie(
    request: Request,
    *,
    decoding_length: int,
    branch_length: int,
    mode: str,
    stop_words: str,
    bound: int,
    price: float,
    remember: bool,
) -> Decoder:
    """Return a decoder that drafts branches of the prompt and of earlier outputs of this model."""
    forest, prompts = shared_forest(
        request.target, request.clock, "lookahead_trie", branch_length + 1, bound, remember
    )
    stops = parse_stop_words(str(stop_words))
    return request.decoder(
        LookaheadTrieDrafter(forest, prompts, decoding_length, branch_length, mode, price, stops),
        verify_tree,
    )
