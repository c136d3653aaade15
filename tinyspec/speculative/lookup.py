"""Decide which looked-up draft tokens are run, and keep the texts in which they are looked up.

A looked-up token costs nothing to draft, but running it costs a position of the target's forward
pass. The papers run all of them, which is `price` 0, the default of every technique. The *price
gate* is an addition of ours: a drafter with `price` > 0 runs a token only if its estimated
acceptance probability is at least `price`:

    share * first(match) * further(match)^(depth - 1)

    share           the token's frequency, over the sum of the frequencies of the draft's first
                    tokens
    first(match)    how often, after a match of this length, one of the first tokens was lately the
                    next token of the text
    further(match)  how often, once it was, the token after it was right too

`first` and `further` are exponential averages over all looked-up tokens, whether they were run or
not: those not run are compared with the text. So a drafter that ran nothing for a while learns at
no cost that its lookups are right again. If a draft comes from several matches, the longest counts.
After some lookups without a token worth running, only some rounds look up anything, because a
lookup takes time too. At price 0 every round looks up, and all tokens are run.

The output is exact at any price: what is proposed depends on the past alone, and nothing is drawn.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from tinyspec._core import Forest
from tinyspec.decoding.decode import BaseDrafter, Round
from tinyspec.lm.forward import Scores
from tinyspec.technique import Clock, Knob, per_model_state
from tinyspec.tree import ROOT, TokenTree

EMA_RATE = 0.1  # weight of the newest outcome; low, because one hit is no habit
FIRST_PRIOR = {8: 0.7, 5: 0.5, 3: 0.3, 2: 0.15, 1: 0.05}
"""Least length of a match -> `first` before anything is known."""
FURTHER_PRIOR = 0.8  # `further` before anything is known
MAX_FAILED_LOOKUPS = 8  # lookups without a token worth running; then rounds are skipped
LOOKUP_INTERVAL = 4  # then only every fourth round looks up
MATCH_BUCKETS = tuple(
    next((least for least in FIRST_PRIOR if least <= match), 1)
    for match in range(max(FIRST_PRIOR) + 1)
)
"""[match] the key of FIRST_PRIOR under which a match of this length is counted."""
PRICE_KNOB = Knob(
    "price",
    0.0,
    "least probability to be accepted of a draft token that is run; 0: all, as in the paper",
    low=0.0,
    high=1.0,
    small=(0.0, 0.25),
    ours=0.25,  # about what a position costs, in passes
)
REMEMBER_KNOB = Knob(
    "remember", True, "whether outputs are kept for later requests", choices=(True, False)
)


class AcceptanceTracker:
    """The acceptance of recently looked-up tokens, by the length of the match before them.

    price           least acceptance probability of a token that is run
    rate            weight of the newest outcome in an average
    prior           least length of a match -> `first` at the beginning of a text
    failed_lookups  lookups in a row without a token worth running
    skipped_rounds  rounds since the last lookup
    """

    def __init__(
        self, price: float, rate: float = EMA_RATE, prior: Mapping[int, float] = FIRST_PRIOR
    ):
        self.price, self.rate, self.prior = price, rate, prior
        self.reset()

    def reset(self) -> None:
        """Start anew, for another text."""
        self.first, self.further = dict(self.prior), dict.fromkeys(self.prior, FURTHER_PRIOR)
        self.tokens: Sequence[int] = ()
        self.parents: Sequence[int] = ()
        self.matches: Sequence[int] = ()
        self.failed_lookups = self.skipped_rounds = 0

    def should_skip_round(self, max_draft_depth: int) -> bool:
        """Return whether this round looks up nothing. Then the last lookup is forgotten."""
        if max_draft_depth > 0:
            is_due = self.skipped_rounds == LOOKUP_INTERVAL - 1
            if self.price == 0 or self.failed_lookups < MAX_FAILED_LOOKUPS or is_due:
                self.skipped_rounds = 0
                return False
            self.skipped_rounds += 1
        self.tokens = self.parents = self.matches = ()
        return True

    def is_worth_running(self, shares: Sequence[float], match: int) -> bool:
        """Return whether one of these first tokens, found after such a match, is worth running."""
        return max(shares) * self.first[match_bucket(match)] >= self.price * sum(shares)

    def remember_lookup(
        self, tokens: Sequence[int], parents: Sequence[int], matches: Sequence[int]
    ) -> TokenTree:
        """Remember these tokens, to compare them with the text later. Return the empty draft.

        The lookup counts as failed; `select_tree` takes that back if it runs any of its tokens.
        """
        self.tokens, self.parents, self.matches = tokens, parents, matches
        self.failed_lookups += 1
        return TokenTree()

    def estimate_chances(
        self, parents: Sequence[int], shares: Sequence[float], matches: Sequence[int]
    ) -> list[float]:
        """Return for each token the estimated probability that it and its ancestors are right.

        shares   frequency of each token: a count, or D(N) of suffix decoding
        matches  length of the match before each token
        """
        # Sum of the shares of the first tokens after each match, because a draft may join trees.
        total = dict[int, float]()
        for parent, share, match in zip(parents, shares, matches, strict=True):
            if parent == ROOT:
                total[match] = total.get(match, 0.0) + share
        rates = {
            match: (self.first[match_bucket(match)], self.further[match_bucket(match)])
            for match in set(matches)
        }
        depths, chances = list[int](), list[float]()
        for parent, share, match in zip(parents, shares, matches, strict=True):
            first, further = rates[match]
            depths.append(0 if parent == ROOT else depths[parent] + 1)
            share /= max(total.get(match, 0.0), share)
            chances.append(share * first * further ** depths[-1])
        return chances

    def select_tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        shares: Sequence[float],
        matches: Sequence[int],
    ) -> TokenTree:
        """Return the tokens worth running. All are remembered, to compare them with the text."""
        self.remember_lookup(tokens, parents, matches)
        if not tokens:
            return TokenTree()
        place = {ROOT: ROOT}
        chosen, above = list[int](), list[int]()
        chances = self.estimate_chances(parents, shares, matches)
        for node, (token, parent, chance) in enumerate(zip(tokens, parents, chances, strict=True)):
            if parent in place and chance >= self.price:
                place[node] = len(chosen)
                chosen.append(token)
                above.append(place[parent])
        if not chosen:
            return TokenTree()
        self.failed_lookups = 0
        return TokenTree.point_masses(chosen, above)

    def learn(self, text: Sequence[int]) -> None:
        """Compare the tokens that were looked up last with the text that followed."""
        if not self.tokens:
            return
        longest = self.matches[0]
        at, rates = ROOT, self.first
        for token in text:
            below = [
                n
                for n, parent in enumerate(self.parents)
                if parent == at and self.matches[n] == longest
            ]
            if not below:
                return
            at = next((node for node in below if self.tokens[node] == token), ROOT)
            rates[match_bucket(longest)] += self.rate * (
                (at != ROOT) - rates[match_bucket(longest)]
            )
            if at == ROOT:
                return
            rates = self.further


def match_bucket(match: int) -> int:
    """Return the least length of the matches that are counted together with this one."""
    return MATCH_BUCKETS[min(match, len(MATCH_BUCKETS) - 1)]


LookupDraft = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]
"""What a lookup found: tokens, parents, shares, and for each token the length of the match before
it."""


def merge_drafts(
    drafts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
) -> tuple[list[int], list[int], list[float]]:
    """Merge drafts (tokens, parents, chances) into one tree.

    Equal paths become one, with the greatest of their chances. In a draft a parent comes before its
    children, and its chance is at least theirs. So it is in the result.

    >>> merge_drafts([([5, 6], [-1, 0], [0.5, 0.25]), ([5, 7], [-1, 0], [0.75, 0.5])])
    ([5, 6, 7], [-1, 0, 0], [0.75, 0.25, 0.5])
    """
    tokens, parents, chances = list[int](), list[int](), list[float]()
    known: dict[tuple[int, int], int] = {}
    for draft in drafts:
        place = list[int]()
        for token, parent, chance in zip(*draft, strict=True):
            above = ROOT if parent == ROOT else place[parent]
            at = known.setdefault((above, token), len(tokens))
            place.append(at)
            if at == len(tokens):
                tokens.append(token)
                parents.append(above)
                chances.append(chance)
            elif chance > chances[at]:
                chances[at] = chance
    return tokens, parents, chances


def continue_after_substitution(draft: LookupDraft, newest: int) -> LookupDraft:
    """Continue a copy after its newest token was replaced by `newest`.

    draft  what was found for the text without its newest token

    If the model copies a passage but changes one word, the text with that word matches nothing. So
    each first token of `draft` is taken as the word that was replaced, and what follows it is the
    new draft. First tokens equal to `newest` are left out: an ordinary lookup finds them.

    >>> draft = ([5, 9, 6, 7], [-1, -1, 0, 2], [0.5, 0.5, 0.5, 0.5], [4, 4, 4, 4])
    >>> continue_after_substitution(draft, newest=9)
    ([6, 7], [-1, 0], [0.5, 0.5], [4, 4])
    """
    tokens, parents, shares, matches = draft
    place: dict[int, int] = {}
    nodes = list[int]()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == ROOT:
            if token != newest:
                place[node] = ROOT
        elif parent in place:
            place[node] = len(nodes)
            nodes.append(node)
    return (
        [tokens[node] for node in nodes],
        [place[parents[node]] for node in nodes],
        [shares[node] for node in nodes],
        [matches[node] for node in nodes],
    )


OUTPUTS = 0  # the tree of all outputs; the trees of requests are 1, 2, ...


class RequestForest(BaseDrafter):
    """A request's texts in a forest: its prompts have a tree of their own, outputs share one.

    own        the request's own tree
    pieces     the pieces of the text in order: (number in the forest, its tree, where it begins).
               No window of tokens crosses from one piece to the next.
    length     tokens of the text
    piece_end  where the last piece ends
    uncounted  output tokens that are not in the forest yet; they enter it before the next lookup
    """

    def __init__(self, forest: Forest, numbers: "count[int]"):
        self.forest, self.numbers = forest, numbers
        self.own = next(numbers)
        self.pieces: list[tuple[int, int, int]] = []
        self.length = self.piece_end = 0
        self.pending_outputs: list[int] = []

    def insert(self, tree: int, tokens: Sequence[int]) -> int:
        """Append these tokens to the text, in this tree. Return how many nodes the tree has."""
        if not self.pieces or self.pieces[-1][1] != tree or self.piece_end != self.length:
            self.pieces.append((self.forest.open(tree), tree, self.length))
        self.length = self.piece_end = self.length + len(tokens)
        return self.forest.append(self.pieces[-1][0], tokens)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.insert_outputs()
        self.insert(self.own, tokens)

    def observe(self, round: Round) -> None:
        self.pending_outputs += round.tokens

    def insert_outputs(self) -> None:
        """Insert the output tokens that are not in the forest yet."""
        if self.pending_outputs:
            tokens, self.pending_outputs = self.pending_outputs, []
            if self.insert(OUTPUTS, tokens) > self.forest.bound:
                self.forest.prune(OUTPUTS)

    def rewind(self, length: int) -> None:
        self.insert_outputs()
        while self.pieces and self.pieces[-1][2] >= length:
            text, _, _ = self.pieces.pop()
            self.forest.rewind(text, 0)
            self.forest.close(text)
        if self.pieces:
            text, _, begin = self.pieces[-1]
            self.piece_end = min(begin + self.forest.length(text), length)
            self.forest.rewind(text, self.piece_end - begin)
        self.length = min(self.length, length)

    def end(self) -> None:
        """End the request: its outputs stay in the forest, its prompts leave it."""
        self.release()
        self.own, self.pieces, self.length, self.piece_end = next(self.numbers), [], 0, 0

    def release(self) -> None:
        """Remove the prompts from the forest."""
        self.insert_outputs()
        for text, _, _ in self.pieces:
            self.forest.close(text)
        self.forest.drop(self.own)

    def __del__(self) -> None:
        if hasattr(self, "pieces"):  # the same for a request that nobody ended
            self.release()


def shared_forest(
    target: Any, clock: Clock | None, name: str, depth: int, bound: int, remember: bool
) -> "tuple[Forest, count[int]]":
    """Return the forest of this model for these settings, and the numbers of its requests.

    The forest is new if nothing is remembered. It is also new in a batch (no clock), because there
    a request must get the text that it gets alone.
    """

    def make() -> "tuple[Forest, count[int]]":
        return Forest(depth, bound), count(OUTPUTS + 1)

    return (
        per_model_state(target, (name, depth, bound), make)
        if remember and clock is not None
        else make()
    )
