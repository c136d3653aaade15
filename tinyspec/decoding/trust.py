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
        return max(shares) * self.first[bucket(match)] >= self.price * sum(shares)

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
            match: (self.first[bucket(match)], self.further[bucket(match)])
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
            rates[bucket(longest)] += self.rate * ((at != ROOT) - rates[bucket(longest)])
            if at == ROOT:
                return
            rates = self.further


def bucket(match: int) -> int:
    """The least length of the matches that are counted with this one."""
    return BUCKETS[min(match, len(BUCKETS) - 1)]
