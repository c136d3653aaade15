"""auto: measure what a call costs and what a guess earns, and draft as much as pays, or nothing.

No paper of its own: the objective is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066),
for one request instead of a batch: expected tokens of a round over its expected seconds. A round of
s guesses commits 1 + c_1 + ... + c_s tokens, where c_i is the chance that guess i is accepted; it
costs t(s + 1), the measured time of a call over s + 1 rows, and for a draft model s times its
measured step. Two sources are weighed. What is looked up, by the frequencies of the text itself,
the references, and earlier outputs (suffix decoding, Oliaro et al. 2024, arXiv 2411.04975), in two
looks that are merged into one tree: the best draft behind any suffix of the text, and the best
behind what stands before its newest token, as if that had replaced another one (where a copy
changes a word, no suffix is known behind it). The chance of a guess is its frequency times how far
guesses of its look lately held (speculative/lookup.py), and the likeliest are run. And, where there is
one, a draft model, whose chances by position are learnt. The best (source, size) is taken if it
beats plain decoding by 3 %. Nothing is trained.

What makes it a planner and not a heuristic: the curve is measured, so the same text is drafted long
where extra rows are free and not at all where they cost what a token costs; and plain decoding is
one of the choices. Guesses that were looked up are judged without being run: they are compared with
the text that came, so trust that was lost comes back at no cost. The first two rounds are plain;
sizes never run take the slope of the nearest that was (at first 10 % of a call a row), and a round
is at most three times as wide as any before it. Sizes not run for long, and a draft model whose
gain is unknown, are tried now and then, out of a budget of 1 % of the time spent; a draft model
reads the prompt when it is first tried, not before.

Guarantee: EXACT, whatever is chosen: the choice is made before anything is drawn, from the past and
the clock alone; guesses that were looked up are point masses and the draft declares its laws, so
the walk is exact under every policy. Proved for all policies at once in
tests/speculative/test_auto.py, by branching over every choice of every round. The law does not
depend on time, but above temperature 0 the text of a seed does, since which noise a token meets
depends on the draft it was in.
State: outputs outlive the request (`persistent`), as in suffix decoding; how far they are trusted
ends with it. Times, the acceptance of the draft model, and what is saved for trials are kept for a
pair of models as long as the target lives (`shared_cost_model`): they speak of the machine, not of any text.
Without a clock (the laws; a batch, where a call's time is the others' too) no time passes, the
prior curve stands, and nothing is kept. Off by itself: looks are timed too, and in vain where what
they are expected to gain is less than they take. After eight in vain only every fourth round is
looked at: what is nothing beside a large model's call is much beside a small one's. And where they
take more than 3 % of a call, there is only the first.
Left out: guesses of both sources in one tree, the load of other requests, and the catching up of a
draft model that was idle, which is timed but not foreseen.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.speculative.drafting.suffix_decoding import SuffixDecodingDrafter
from tinyspec.speculative.goodput import (
    DRAFT,
    LOOKED,
    MARGIN,
    PLAIN,
    STALE,
    Candidate,
    Choice,
    CostModel,
    Goodput,
)
from tinyspec.speculative.lookup import (
    OUTPUTS,
    AcceptanceTracker,
    LookupDraft,
    continue_after_substitution,
    memory,
    merge_drafts,
)
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree

DEPTH, BOUND, ALPHA, FLOOR = 32, 1 << 20, 4.0, 0.1
"""Of suffix decoding: windows, nodes, guesses a token of the match, least frequency. Long drafts:
goodput cuts them short.
"""
INITIAL_TRUST = {8: 0.9, 5: 0.8, 3: 0.65, 2: 0.5, 1: 0.25}
INITIAL_TRUST_AFTER_SUBSTITUTION = {8: 0.3, 5: 0.25, 3: 0.2, 2: 0.1, 1: 0.05}
"""What is believed at first, by the length of the match: that a guess holds, and that one behind a
replaced token does.
"""
TRUST_EMA_RATE = 0.3  # weight of the newest outcome in how far guesses are trusted: drafts are long, so doubt must come soon


class LazyDrafter(ModelDrafter):
    """A draft model that is told of the text when it is asked, not before: an idle one costs
    nothing.
    """

    def __init__(self, *how: Any):
        super().__init__(*how)
        self.push_back: list[int] = []  # what came since it was last told

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        if self._follow(tokens):
            self.push_back += tokens

    def catch_up(self) -> None:
        """Read what is much to read; a little is read with the first guess."""
        if self.push_back:
            self.model.append(self.push_back)
            if len(self.push_back) > STALE:
                self.model.extend(())
            self.push_back = []

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.catch_up()
        return super().propose(context, max_draft_depth, sampling, rng)

    def observe(self, round: Round) -> None:
        if self._follow(round.tokens):
            self.push_back += round.tokens

    def rewind(self, length: int) -> None:
        read = self.length - len(self.push_back)
        del self.push_back[max(length - read, 0) :]
        if length < read:
            super().rewind(length)
        elif length <= self.length:
            self.length, self.left_behind = length, False

    def end(self) -> None:
        super().end()
        self.push_back = []


class LookupDrafter(SuffixDecodingDrafter):
    """What texts have to offer behind this one, the likeliest guess first, and how far each look is
    trusted.
    """

    def __init__(self, request: Request, most: int, remember: bool):
        forest, numbers = memory(request.target, request.clock, "auto", DEPTH, BOUND, remember)
        super().__init__(forest, numbers, ALPHA, most, FLOOR, MARGIN)
        self.trusts = [
            AcceptanceTracker(MARGIN, TRUST_EMA_RATE, prior)
            for prior in (INITIAL_TRUST, INITIAL_TRUST_AFTER_SUBSTITUTION)
        ]
        self.trust, self.references = self.trusts[0], request.references
        self.asked = self.trusts[:1]  # whose looks the coming text judges
        self.tree, self.order = TokenTree(), list[int]()
        self._refer()

    def _refer(self) -> None:
        for tokens in self.references:
            self.forest.append(self.forest.open(self.own), tokens)

    def look_up_drafts(
        self, context: Sequence[int], max_draft_depth: int, both: bool
    ) -> list[LookupDraft]:
        """Behind any suffix of the text, and, where looks are cheap, behind what stands before its
        last token.
        """
        found = [self.look(context, max_draft_depth)]
        if both:
            trees, before = (self.own, OUTPUTS), context[-DEPTH - 1 : -1]
            behind = self.forest.best(
                trees, before, ALPHA, self.most + 2, max_draft_depth + 1, FLOOR / 2
            )
            found.append(continue_after_substitution(behind, context[-1]))
        return found

    def rank_lookups(
        self, context: Sequence[int], max_draft_depth: int, both: bool = True
    ) -> list[float]:
        """The chances of the guesses, the greatest first: a guess stands behind the one it
        follows.
        """
        looks = self.look_up_drafts(context, max_draft_depth, both)
        self.asked = self.trusts[: len(looks)]
        drafts = list[tuple[Sequence[int], Sequence[int], Sequence[float]]]()
        for trust, (tokens, parents, shares, matches) in zip(self.asked, looks, strict=True):
            trust.record_without_running(tokens, parents, matches)
            if tokens:
                drafts.append((tokens, parents, trust.chances(parents, shares, matches)))
        tokens, parents, chances = drafts[0] if len(drafts) == 1 else merge_drafts(drafts)
        self.tree = TokenTree(tokens, parents)
        # no guess is likelier than the one it follows, and the order is stable: a parent stands
        # before its child
        self.order = sorted(range(len(tokens)), key=chances.__getitem__, reverse=True)
        return [chances[node] for node in self.order]

    def best_tree(self, size: int) -> TokenTree:
        """The tree of so many of the guesses that were offered last."""
        chosen, tokens, parents = self.order[:size], self.tree.tokens, self.tree.parents
        place = {ROOT: ROOT} | {node: at for at, node in enumerate(chosen)}
        return TokenTree(
            [tokens[node] for node in chosen], [place[parents[node]] for node in chosen],
            (None,) * size, (False,) * size,
        )  # fmt: skip

    def skip_this_round(self, max_draft_depth: int) -> bool:
        """Whether this round is not even looked at; then no look is judged by it."""
        if resting := self.trust.skip_this_round(max_draft_depth):
            self.asked = []
        return resting

    def observe(self, round: Round) -> None:
        super().observe(round)
        for trust in self.asked[1:]:  # the first has learnt above
            trust.learn(round.tokens)

    def end(self) -> None:
        super().end()
        for trust in self.trusts[1:]:
            trust.forget()
        self._refer()


class AutoDrafter(BaseDrafter):
    """Proposes what the policy says, or who was put in its place; that one learns nothing."""

    def __init__(self, policy: Goodput, request: Request, texts: LookupDrafter, gamma: int):
        self.policy, self.pick, self.texts, self.gamma = policy, request.choose, texts, gamma
        self.draft: LazyDrafter | None = None
        if request.drafts:
            self.draft = LazyDrafter(
                request.drafts[0], gamma, request.stop.eos, *request.draft_max_lengths[:1]
            )
        self.option = PLAIN

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.texts.extend(tokens, scores)
        if self.draft is not None:
            self.draft.extend(tokens, scores)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        offers = self._offers(context, max_draft_depth)
        if self.pick is None:
            self.option = self.policy.choose(offers)
        else:
            ways = [
                PLAIN,
                *(Choice(source, n + 1) for source, chances in offers for n in range(len(chances))),
            ]
            self.option = ways[self.pick(len(ways), rng)]
        source, size = self.option
        if source == DRAFT and size and self.draft is not None:
            self.draft.catch_up()
            self.policy.begin()
            self.draft.gamma = size
            tree = self.draft.propose(context, max_draft_depth, sampling, rng)
        elif size:
            if self.policy.gain >= self.policy.look:
                self.texts.trust.vain = 0
            tree = self.texts.best_tree(size)
        else:
            tree = TokenTree()
        self.policy.drafted(self.option, len(tree.tokens))
        return tree

    def _offers(self, context: Sequence[int], max_draft_depth: int) -> list[Candidate]:
        """What each source has. Looking up draws nothing; where it seldom gained the time it takes,
        some rounds rest.
        """
        offers = []
        if not self.texts.skip_this_round(max_draft_depth):
            self.policy.begin()
            chances = self.texts.rank_lookups(
                context, max_draft_depth, self.policy.look <= MARGIN * self.policy.curve.costs()[0]
            )
            self.policy.looked()
            if chances:
                offers.append(Candidate(LOOKED, chances))
        if self.draft is not None and max_draft_depth and not self.draft.left_behind:
            offers.append(
                Candidate(DRAFT, self.policy.curve.chances(min(self.gamma, max_draft_depth)))
            )
        return offers

    def observe(self, round: Round) -> None:
        self.texts.observe(round)
        if self.pick is None:
            self.policy.learn(self.option, round)
        if self.draft is not None:
            self.draft.observe(round)

    def rewind(self, length: int) -> None:
        self.texts.rewind(length)
        if self.draft is not None:
            self.draft.rewind(length)

    def end(self) -> None:
        self.texts.end()
        if self.draft is not None:
            self.draft.end()


_curves: WeakKeyDictionary[Any, WeakKeyDictionary[Any, CostModel]] = WeakKeyDictionary()


def shared_cost_model(request: Request, longest: int) -> CostModel:
    """The curve of this pair of models; a new one where time stands still or the target is no
    session.
    """
    target = getattr(request.target, "model", None)
    if request.clock is None or target is None:
        return CostModel(longest)
    pairs = _curves.setdefault(target, WeakKeyDictionary())
    partner = getattr(request.drafts[0], "model", target) if request.drafts else target
    if partner not in pairs or pairs[partner].sizes[-1] != longest:
        pairs[partner] = CostModel(longest)
    return pairs[partner]


@technique(
    title="auto: measure, then draft as much as pays",
    summary="measures, then drafts what pays",
    paper="goodput: Liu et al. 2024, arXiv 2406.14066",
    family="planning",
    guarantee=Guarantee.EXACT,
    optional_draft=True,
    timed=True,
    copies=True,
    persistent=True,
    knobs=(
        Knob("k", 16, "most guesses looked up in a round", low=1),
        Knob("gamma", 4, "most tokens a draft model proposes in a round", low=1, small=(1, 2)),
        Knob(
            "remember", True, "whether outputs are kept for later requests", choices=(True, False)
        ),
    ),
)
def auto(request: Request, *, k: int, gamma: int, remember: bool) -> Decoder:
    """Guesses looked up in texts, a draft model if there is one, or neither: whatever has the
    greatest goodput now.
    """
    policy = Goodput(shared_cost_model(request, max(k, gamma)), request.clock or zero_clock)
    return request.decoder(
        AutoDrafter(policy, request, LookupDrafter(request, k, remember), gamma), verify_tree
    )


def zero_clock() -> float:
    """The clock of whoever has none."""
    return 0.0
