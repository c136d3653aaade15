"""Which guesses of a draft that was looked up are worth a row: how a retrieval drafter switches
itself off.

A guess is run where it is expected to hold with at least `price`: what a further row costs, in
calls. What is expected of it:

    share * first(match) * further(match)^(depth - 1)

where share is its frequency among the first guesses of the draft, first(match) how often the text
lately went on with one of those behind a match so long, and further(match) how often, once it did,
it did again. Both are exponential averages over what was looked up, run or not: guesses that were
not run are compared with the text that came, so trust that was lost comes back at no cost. Of a
draft found behind several matches, the longest is judged. Lossless: what is proposed depends on the
past alone, and nothing is drawn. Where nothing was worth a row for a while, only some rounds are
looked at until something is: a look costs little, and where a token costs little too that is too
much. At price 0 all is looked at, and all is run.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from tinyspec._core import Forest
from tinyspec.decoding.decode import BaseDrafter, Round
from tinyspec.lm.forward import Scores
from tinyspec.technique import Clock, per_model_state
from tinyspec.tree import ROOT, TokenTree

RATE = 0.1  # weight of the newest outcome: one hit of many must not look like a habit
FIRST = {
    8: 0.7,
    5: 0.5,
    3: 0.3,
    2: 0.15,
    1: 0.05,
}  # least length of a match -> before anything is known
FURTHER = 0.8
PATIENCE, EVERY = 8, 4  # looks in vain after which only every fourth round is looked at
BUCKETS = tuple(next((n for n in FIRST if n <= match), 1) for match in range(max(FIRST) + 1))
NOTHING = TokenTree()


class AcceptanceTracker:
    """How far the latest drafts came true, by the length of the match they were found behind."""

    def __init__(self, price: float, rate: float = RATE, prior: Mapping[int, float] = FIRST):
        self.price, self.rate, self.prior = price, rate, prior
        self.forget()

    def forget(self) -> None:
        """Another text: what was copied well in the last one says nothing of it."""
        self.first, self.further = dict(self.prior), dict.fromkeys(self.prior, FURTHER)
        self.tokens: Sequence[int] = ()
        self.parents: Sequence[int] = ()
        self.matches: Sequence[int] = ()
        self.vain = self.rested = 0  # looks without a guess worth a row; rounds since the last look

    def skip_this_round(self, max_draft_depth: int) -> bool:
        """Whether this round, with room for so many guesses, is not even looked at; the last look
        is judged no more.
        """
        if max_draft_depth > 0:
            if self.price == 0 or self.vain < PATIENCE or self.rested == EVERY - 1:
                self.rested = 0
                return False
            self.rested += 1
        self.tokens = self.parents = self.matches = ()
        return True

    def worth(self, shares: Sequence[float], match: int) -> bool:
        """Whether one of these first guesses behind such a match may be run."""
        return max(shares) * self.first[match_bucket(match)] >= self.price * sum(shares)

    def record_without_running(
        self, tokens: Sequence[int], parents: Sequence[int], matches: Sequence[int]
    ) -> TokenTree:
        """Run none of these guesses, and let the text judge them all the same."""
        self.tokens, self.parents, self.matches = tokens, parents, matches
        self.vain += 1
        return NOTHING

    def chances(
        self, parents: Sequence[int], shares: Sequence[float], matches: Sequence[int]
    ) -> list[float]:
        """How likely each guess is to hold, and all above it: what is expected of it by the rule on
        top of this file.
        """
        whole = dict[
            int, float
        ]()  # of the first guesses behind each match: a draft may join trees, or leave some out
        for parent, share, match in zip(parents, shares, matches, strict=True):
            if parent == ROOT:
                whole[match] = whole.get(match, 0.0) + share
        trusted = {
            match: (self.first[match_bucket(match)], self.further[match_bucket(match)])
            for match in set(matches)
        }
        depths, found = list[int](), list[float]()
        for parent, share, match in zip(parents, shares, matches, strict=True):
            first, further = trusted[match]
            depths.append(0 if parent == ROOT else depths[parent] + 1)
            found.append(share / max(whole.get(match, 0.0), share) * first * further ** depths[-1])
        return found

    def tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        shares: Sequence[float],
        matches: Sequence[int],
    ) -> TokenTree:
        """The guesses that are worth a row; all of them are remembered, to be judged by the
        text.
        """
        self.record_without_running(tokens, parents, matches)
        if not tokens:
            return NOTHING
        place = {ROOT: ROOT}
        kept, above = list[int](), list[int]()
        for node, (token, parent, chance) in enumerate(
            zip(tokens, parents, self.chances(parents, shares, matches), strict=True)
        ):
            if parent in place and chance >= self.price:
                place[node] = len(kept)
                kept.append(token)
                above.append(place[parent])
        if not kept:
            return NOTHING
        self.vain = 0
        return TokenTree(kept, above, (None,) * len(kept), (False,) * len(kept))

    def learn(self, text: Sequence[int]) -> None:
        """What came instead of, or as, the last guesses."""
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
    """The least length of the matches that are counted with this one."""
    return BUCKETS[min(match, len(BUCKETS) - 1)]


LookupDraft = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]
"""What a look found: tokens, parents, shares, and of each guess how long the match is that it
stands behind.
"""


def merge_drafts(
    drafts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
) -> tuple[list[int], list[int], list[float]]:
    """One tree of several drafts (tokens, parents, chances): equal paths are one, with the greatest
    of their chances.

    A parent stands before its children, and is at least as likely.

    >>> merge_drafts([([5, 6], [-1, 0], [0.5, 0.25]), ([5, 7], [-1, 0], [0.75, 0.5])])
    ([5, 6, 7], [-1, 0, 0], [0.75, 0.25, 0.5])
    """
    tokens, parents, chances = list[int](), list[int](), list[float]()
    known: dict[tuple[int, int], int] = {}
    for given in drafts:
        place = list[int]()
        for token, parent, chance in zip(*given, strict=True):
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
    """What a draft behind the text without its newest token says comes behind that one: it was put
    in another's place.

    Where a copy changes a word, no suffix of the text is known behind it. So each first guess is
    taken for what `newest` replaced, and what follows that guess is offered. Guesses behind
    `newest` itself are what any look finds.

    >>> continue_after_substitution(([5, 9, 6, 7], [-1, -1, 0, 2], [0.5, 0.5, 0.5, 0.5], [4, 4, 4, 4]), 9)
    ([6, 7], [-1, 0], [0.5, 0.5], [4, 4])
    """
    place: dict[int, int] = {}
    kept = list[int]()
    for node, (token, parent) in enumerate(zip(draft[0], draft[1], strict=True)):
        if parent == ROOT:
            if token != newest:
                place[node] = ROOT
        elif parent in place:
            place[node] = len(kept)
            kept.append(node)
    tokens, parents, shares, matches = draft
    return (
        [tokens[node] for node in kept], [place[parents[node]] for node in kept],
        [shares[node] for node in kept], [matches[node] for node in kept],
    )  # fmt: skip


OUTPUTS = 0  # the tree of what was said; those of requests are 1, 2, ...


class RequestForest(BaseDrafter):
    """The texts of a request in a forest: prompts in a tree of its own, outputs in that of all
    requests.

    `runs` are the pieces of the text in their order: (number in the forest, its tree, where it
    begins). No window crosses from one to the next.
    """

    def __init__(self, forest: Forest, numbers: "count[int]"):
        self.forest, self.numbers = forest, numbers
        self.own = next(numbers)
        self.runs: list[tuple[int, int, int]] = []
        self.length = self.reach = 0  # of the text; where its last piece ends
        self.fresh: list[int] = []  # said, and not yet counted: that is done when it is looked at

    def insert(self, tree: int, tokens: Sequence[int]) -> int:
        """These tokens go on with the text, and belong to this tree; returns its nodes."""
        if not self.runs or self.runs[-1][1] != tree or self.reach != self.length:
            self.runs.append((self.forest.open(tree), tree, self.length))
        self.length = self.reach = self.length + len(tokens)
        return self.forest.append(self.runs[-1][0], tokens)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.settle()
        self.insert(self.own, tokens)

    def observe(self, round: Round) -> None:
        self.fresh += round.tokens

    def settle(self) -> None:
        """Count what was said since the last time."""
        if self.fresh:
            said, self.fresh = self.fresh, []
            if self.insert(OUTPUTS, said) > self.forest.bound:
                self.forest.prune(OUTPUTS)

    def rewind(self, length: int) -> None:
        self.settle()
        while self.runs and self.runs[-1][2] >= length:
            text, _, _ = self.runs.pop()
            self.forest.rewind(text, 0)
            self.forest.close(text)
        if self.runs:
            text, _, begin = self.runs[-1]
            self.reach = min(begin + self.forest.length(text), length)
            self.forest.rewind(text, self.reach - begin)
        self.length = min(self.length, length)

    def end(self) -> None:
        """The request is over: what was said stays, what was asked goes."""
        self.release()
        self.own, self.runs, self.length, self.reach = next(self.numbers), [], 0, 0

    def release(self) -> None:
        """Leave nothing in the forest but what was said."""
        self.settle()
        for text, _, _ in self.runs:
            self.forest.close(text)
        self.forest.drop(self.own)

    def __del__(self) -> None:
        if hasattr(self, "runs"):  # a request that nobody ended leaves nothing behind either
            self.release()


def shared_forest(
    target: Any, clock: Clock | None, name: str, depth: int, bound: int, remember: bool
) -> "tuple[Forest, count[int]]":
    """The forest of this model under these knobs, and the numbers of its requests.

    A new one where nothing is to be kept, and in a batch (no clock), where a row must equal the row
    run alone.
    """

    def make() -> "tuple[Forest, count[int]]":
        return Forest(depth, bound), count(OUTPUTS + 1)

    return (
        per_model_state(target, (name, depth, bound), make)
        if remember and clock is not None
        else make()
    )
