"""auto: measure what a forward pass costs and what draft tokens yield, and draft as much as pays.

Paper: none, this is our own design. Its objective, goodput, is that of SmartSpec (Liu et al. 2024,
arXiv 2406.14066), which plans for a batch; the sources, the trials, the estimates of costs and the
rules below are ours. Nothing is trained.

Idea. Choose the draft with the most expected tokens per expected second. Plain decoding is one of
the choices, and is taken unless another one is 3 % better.

    tokens(s)  = 1 + c_1 + ... + c_s           c_i: probability that draft token i is accepted
    goodput(s) = tokens(s) / (t(s) + s d)      t(s): seconds of a target pass over s draft tokens
                                               d: seconds of a draft step; 0 if looked up

Up to three sources compete. Looked-up drafts come from the text itself, the references and earlier
outputs (suffix decoding, Oliaro et al. 2024, arXiv 2411.04975). There are two lookups. The first
finds what followed a suffix of the text. The second leaves out the newest token: it assumes that
the model wrote this token in place of another one, and goes on after that one. Both results are
merged into one tree. c_i is a frequency times how often drafts of that kind were lately accepted
(speculative/lookup.py). Of a draft model, if there is one, c_i is learned by position. Of a trained
head, if one is given, it is learned by the node of its tree, and its draft has one price.

A head reads the target's hidden states, and a round that asks for them is slower. So they are asked
for on the prompt, and then only while the head is in use: up to 8 rounds after its last draft. When
it drafts again later, one pass over the tokens in between computes what it missed. The policy
spreads the price of that pass over 16 rounds.

Measurement. The first two rounds are plain. The cost of a size that was never run is read off a
line: from plain decoding through the next smaller size that was run, else through the next larger
one (at first a further token costs 10 % of a pass). A round is at most three
times as wide as any before it. Sizes that were not run for long, and a draft model whose gain is
unknown, are tried now and then, in 1 % of the time. Looked-up tokens are compared with the text
even if they were not run. After eight lookups without a token worth running, only every fourth
round looks up. If lookups take more than 3 % of a pass, the second one is left out. A draft model
reads the prompt when it is first tried.

Guarantee: EXACT, whatever is chosen. The choice is made before anything is drawn, from the past and
the clock alone; looked-up tokens and those of a head are point masses, and the draft model declares
its distributions.
Pitfall: a choice that looks at the tokens just drawn is biased. Above temperature 0 the text of a
seed depends on timing (its distribution does not).
State: outputs outlive the request (`persistent`). Times and the acceptance of the draft model are
kept per pair of models while the target lives (`shared_cost_model`). Without a clock (in the laws)
no time passes, and nothing is kept.
Batch: a pass's time is shared, so no request can measure its own. Passes over 1 to 64 rows are
timed once, while the requests that ask first wait. Every 8 rounds a request asks how many decode,
and then waits for all others. Its plan assumes that all draft as much as it does:

    t(s) = T(n (1 + s))    T(r): seconds of a pass over r rows      n: requests that decode

Tests: tests/speculative/test_auto.py (`best_draft_size` against the code that runs; the joint
distribution under all policies at once, by branching over every choice of every round; the feature
laws of heads that draft now and then).
Left out: heads that need probes or sample their drafts; draft tokens of two sources in one tree;
the time that an idle draft model takes to catch up, which is measured but not foreseen; in a batch,
trials, and lengths on which the requests agree (`smartspec`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.features import FeatureDrafter
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.lm.model import Model
from tinyspec.lm.session import Session
from tinyspec.speculative.batched import BatchTimes, TimesRule
from tinyspec.speculative.drafting.suffix_decoding import SuffixDecodingDrafter
from tinyspec.speculative.goodput import (
    DRAFT_MODEL,
    HEAD,
    LOOKUP,
    MARGIN,
    PLAIN,
    STALE_ROUNDS,
    Candidate,
    Choice,
    Goodput,
    LearntCosts,
)
from tinyspec.speculative.lookup import (
    OUTPUTS,
    REMEMBER_KNOB,
    AcceptanceTracker,
    LookupDraft,
    continue_after_substitution,
    merge_drafts,
    shared_forest,
)
from tinyspec.technique import Guarantee, Knob, Request, find_technique, technique
from tinyspec.tree import ROOT, TokenTree

# Of suffix decoding. Drafts are long, because goodput cuts them short.
DEPTH = 32  # tokens of match and draft together
BOUND = 1 << 20  # nodes of the tree of outputs; then counts are halved
ALPHA = 4.0  # draft tokens per token of the match
FLOOR = 0.1  # least frequency of a draft token
INITIAL_TRUST = {8: 0.9, 5: 0.8, 3: 0.65, 2: 0.5, 1: 0.25}
INITIAL_TRUST_AFTER_SUBSTITUTION = {8: 0.3, 5: 0.25, 3: 0.2, 2: 0.1, 1: 0.05}
"""Least length of the match -> acceptance rate that is assumed at first; the second table is for
drafts that continue after a replaced token."""
BATCH_ROUNDS = 8  # rounds after which a request asks again how many decode
HEAD_ROUNDS = 8  # rounds after a head's last draft in which its states are still asked for
HEAD_NODES = 8  # most draft tokens of a head that are used: wide rounds do not pay on a CPU
TRUST_EMA_RATE = 0.3  # weight of the newest outcome; high, as long drafts make trust expensive


def best_draft_size(chances: Sequence[float], costs: Sequence[float], margin: float = 0.0) -> int:
    """Return the draft size with the greatest goodput; 0 is plain decoding.

    chances  [s] probability that draft token i is accepted
    costs    [s + 1] seconds of a round with so many draft tokens, drafting included
    margin   share by which a draft must beat plain decoding

    `Goodput.choose` does this for every source, and also plans trials of sizes it does not know.

    >>> best_draft_size([0.9, 0.8, 0.1], [1.0, 1.1, 1.2, 1.3])
    2
    """
    best, goodput = 0, (1 + margin) / costs[0]
    for size in range(1, len(chances) + 1):
        expected_tokens = 1 + sum(chances[:size])
        if expected_tokens / costs[size] > goodput:
            best, goodput = size, expected_tokens / costs[size]
    return best


class LazyDrafter(ModelDrafter):
    """A draft model that reads the text only when it is asked to draft: an idle one costs nothing.

    unread  tokens that it has not read yet
    """

    def __init__(self, *how: Any):
        super().__init__(*how)
        self.unread: list[int] = []

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        if self._count(tokens):
            self.unread += tokens

    def catch_up(self) -> None:
        """Read the unread tokens if they are many; few are read with the first draft token."""
        if self.unread:
            self.model.append(self.unread)
            if len(self.unread) > STALE_ROUNDS:
                self.model.extend(())
            self.unread = []

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
        if self._count(round.tokens):
            self.unread += round.tokens

    def rewind(self, length: int) -> None:
        read = self.length - len(self.unread)
        del self.unread[max(length - read, 0) :]
        if length < read:
            super().rewind(length)
        elif length <= self.length:
            self.length, self.left_behind = length, False

    def end(self) -> None:
        super().end()
        self.unread = []


class LazyHead:
    """A trained head of the target, whose states are asked for only while it is in use.

    drafter  the head's own; it has read the first `read` tokens of the text
    unread   the tokens after them, whose states it lacks
    idle     rounds since its last draft, or since the text began
    """

    def __init__(self, request: Request):
        self.target, self.drafter = request.target, make_head_drafter(request)
        self.unread = list[int]()
        self.read = self.idle = 0

    def wanted_layers(self) -> Sequence[int]:
        """Return the layers whose states the next pass must show; none while the head rests."""
        is_used = self.idle < HEAD_ROUNDS and not self.unread
        return self.drafter.hidden_layers if is_used else ()

    def extend(self, tokens: Sequence[int], scores: Scores, is_asked: bool) -> None:
        """Take note of forced text, whose states are known if they were asked for."""
        if is_asked:
            self.drafter.extend(tokens, scores)
            self.read += len(tokens)
        else:
            self.unread += tokens

    def catch_up(self) -> None:
        """Run the tokens that it missed once more, for their states."""
        self.idle = 0
        if self.unread:
            tokens, self.unread = self.unread, []
            self.target.rewind(self.read)
            scores = self.target.extend(tokens, self.drafter.hidden_layers)
            self.extend(tokens, scores, is_asked=True)

    def propose(self, size: int, *how: Any) -> TokenTree:
        """Return the first nodes of its tree. Where a tree is cut depends on no drawn token."""
        tree = self.drafter.propose(*how)
        return TokenTree(
            tree.tokens[:size], tree.parents[:size], tree.draft_probs[:size], tree.probe[:size]
        )

    def observe(self, round: Round, is_own: bool, is_asked: bool) -> None:
        """Take note of a round, in which it drafted or another source did."""
        self.idle = 0 if is_own else self.idle + 1
        if is_own:
            self.drafter.observe(round)
            self.read += len(round.tokens)
            return
        states = round.scores.hidden
        if is_asked:  # of the newest token before the round, and of all new ones but the newest
            path = (ROOT, *round.verdict.accepted)[: len(round.tokens)]
            states = states[:, [node + 1 for node in path]]
        self.extend(round.tokens, round.scores._replace(hidden=states), is_asked)

    def rewind(self, length: int) -> None:
        """Forget the text after its first `length` tokens."""
        del self.unread[max(length - self.read, 0) :]
        if length < self.read:
            self.drafter.rewind(length)
            self.read = length

    def end(self) -> None:
        """Forget the request. The states of the next prompt are asked for."""
        self.drafter.end()
        self.unread = []
        self.read = self.idle = 0


def make_head_drafter(request: Request) -> FeatureDrafter:
    """Return the drafter of the head that the target has, with a tree for a CPU.

    The knobs have the values of our own rows in the results (`Knob.ours`), so the tree is small.
    Siblings are the likeliest tokens. Raises TinyspecError for a head that needs probes or samples
    its drafts.
    """
    card = find_technique(request.head)
    chosen = {knob.name: knob.ours for knob in card.knobs if knob.ours is not None}
    likeliest = {knob.name: "top_k" for knob in card.knobs if "top_k" in knob.choices}
    own = replace(request, drafts=(), references=(), draft_max_lengths=())
    drafter = card.make(own, **chosen, **likeliest).drafter
    is_usable = isinstance(drafter, FeatureDrafter) and (card.point_masses or likeliest)
    if not is_usable:
        raise TinyspecError(
            "auto drafts by heads that read the target's states and propose likeliest tokens, such "
            f"as those of medusa; use --method {card.name} for a head of {card.name}"
        )
    assert isinstance(drafter, FeatureDrafter)
    return drafter


class LookupDrafter(SuffixDecodingDrafter):
    """Look up drafts in texts, rank their tokens, and track how often they are accepted."""

    def __init__(self, request: Request, most: int, remember: bool):
        forest, numbers = shared_forest(
            request.target, request.clock, "auto", DEPTH, BOUND, remember
        )
        super().__init__(forest, numbers, ALPHA, most, FLOOR, MARGIN)
        self.trusts = [
            AcceptanceTracker(MARGIN, TRUST_EMA_RATE, prior)
            for prior in (INITIAL_TRUST, INITIAL_TRUST_AFTER_SUBSTITUTION)
        ]
        self.trust, self.references = self.trusts[0], request.references
        self.compared = self.trusts[
            :1
        ]  # the kinds of lookup that the next tokens are compared with
        self.tree, self.order = TokenTree(), list[int]()
        self._refer()

    def _refer(self) -> None:
        for tokens in self.references:
            self.forest.append(self.forest.open(self.own), tokens)

    def look_up_drafts(
        self, context: Sequence[int], max_draft_depth: int, both: bool
    ) -> list[LookupDraft]:
        """Return the draft after any suffix of the text.

        both  whether to return also the draft that continues after a replaced token; this second
          lookup is made only if lookups are cheap
        """
        found = [self.look_up(context, max_draft_depth)]
        if both:
            trees, before = (self.own, OUTPUTS), context[-DEPTH - 1 : -1]
            before_newest = self.forest.best(
                trees, before, ALPHA, self.most + 2, max_draft_depth + 1, FLOOR / 2
            )
            found.append(continue_after_substitution(before_newest, context[-1]))
        return found

    def rank_lookups(
        self, context: Sequence[int], max_draft_depth: int, both: bool = True
    ) -> list[float]:
        """Return the acceptance probabilities of the looked-up tokens, the greatest first."""
        looks = self.look_up_drafts(context, max_draft_depth, both)
        self.compared = self.trusts[: len(looks)]
        drafts = list[tuple[Sequence[int], Sequence[int], Sequence[float]]]()
        for trust, (tokens, parents, shares, matches) in zip(self.compared, looks, strict=True):
            trust.remember_lookup(tokens, parents, matches)
            if tokens:
                drafts.append((tokens, parents, trust.estimate_chances(parents, shares, matches)))
        tokens, parents, chances = drafts[0] if len(drafts) == 1 else merge_drafts(drafts)
        self.tree = TokenTree(tokens, parents)
        # No token is likelier than its parent, and the sort is stable: parents come first.
        self.order = sorted(range(len(tokens)), key=chances.__getitem__, reverse=True)
        return [chances[node] for node in self.order]

    def best_tree(self, size: int) -> TokenTree:
        """Return the tree of the `size` most likely tokens that were looked up last."""
        chosen, tokens, parents = self.order[:size], self.tree.tokens, self.tree.parents
        place = {ROOT: ROOT} | {node: at for at, node in enumerate(chosen)}
        return TokenTree(
            [tokens[node] for node in chosen], [place[parents[node]] for node in chosen],
            (None,) * size, (False,) * size,
        )  # fmt: skip

    def should_skip_round(self, max_draft_depth: int) -> bool:
        """Return whether this round makes no lookup. If so, no tracker learns from it."""
        if resting := self.trust.should_skip_round(max_draft_depth):
            self.compared = []
        return resting

    def observe(self, round: Round) -> None:
        super().observe(round)
        for trust in self.compared[1:]:  # the first one has learned above
            trust.learn(round.tokens)

    def end(self) -> None:
        super().end()
        for trust in self.trusts[1:]:
            trust.reset()
        self._refer()


class AutoDrafter(BaseDrafter):
    """Propose the draft that the policy chooses, or that the laws choose in its place."""

    def __init__(self, policy: Goodput, request: Request, texts: LookupDrafter, gamma: int):
        self.policy, self.pick, self.texts, self.gamma = policy, request.choose, texts, gamma
        self.draft: LazyDrafter | None = None
        if request.drafts:
            self.draft = LazyDrafter(
                request.drafts[0], gamma, request.stop.eos, request.draft_max_length
            )
        self.head = LazyHead(request) if request.head else None
        self.option = PLAIN
        self.scheduler, self.clock = request.scheduler, request.batch_clock
        self.times, self.models = BatchTimes(1, self.policy.curve), list[Model]()
        if self.clock is not None:  # only transformers have passes that can be timed
            used = [request.target, *request.drafts[:1]]
            self.models = [cast(Model, one.model) for one in used if isinstance(one, Session)]
        self._want_states()

    def _plan_for_batch(self) -> None:
        """Plan by how many requests decode, and by measured passes. Every few rounds it asks."""
        if self.scheduler is None or self.clock is None or not self.models:
            return
        if self.policy.curve.rounds % BATCH_ROUNDS == 0:
            rule = partial(TimesRule, self.models, self.clock)
            self.times = self.scheduler.consult(("auto", *self.models), rule, None)
        self.policy.curve.set_batch(*self.times)

    def _want_states(self) -> None:
        """Decide which states the next pass of the target must show."""
        if self.head is not None:
            self.hidden_layers = self.head.wanted_layers()

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.texts.extend(tokens, scores)
        if self.draft is not None:
            self.draft.extend(tokens, scores)
        if self.head is not None:
            self.head.extend(tokens, scores, bool(self.hidden_layers))
        self._want_states()

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        offers = self._offers(context, max_draft_depth)
        if self.pick is None:
            self._plan_for_batch()
            self.option = self.policy.choose(offers)
        else:
            ways = [
                PLAIN,
                *(
                    Choice(source, n + 1)
                    for source, chances, _ in offers
                    for n in range(len(chances))
                ),
            ]
            self.option = ways[self.pick(len(ways), rng)]
        source, size = self.option
        if source == DRAFT_MODEL and size and self.draft is not None:
            self.draft.catch_up()
            self.policy.start_timer()
            self.draft.gamma = size
            tree = self.draft.propose(context, max_draft_depth, sampling, rng)
        elif source == HEAD and self.head is not None:
            self.head.catch_up()
            self._want_states()
            self.policy.start_timer()
            tree = self.head.propose(size, context, max_draft_depth, sampling, rng)
        elif size:
            if self.policy.gain >= self.policy.lookup_seconds:
                self.texts.trust.failed_lookups = 0
            tree = self.texts.best_tree(size)
        else:
            tree = TokenTree()
        self.policy.record_draft(self.option, len(tree.tokens))
        return tree

    def _offers(self, context: Sequence[int], max_draft_depth: int) -> list[Candidate]:
        """Return what each source can draft. Looking up draws no random number."""
        offers = []
        if not self.texts.should_skip_round(max_draft_depth):
            self.policy.start_timer()
            chances = self.texts.rank_lookups(
                context,
                max_draft_depth,
                self.policy.lookup_seconds <= MARGIN * self.policy.curve.costs()[0],
            )
            self.policy.record_lookup()
            if chances:
                offers.append(Candidate(LOOKUP, chances))
        if self.draft is not None and max_draft_depth and not self.draft.left_behind:
            offers.append(
                Candidate(
                    DRAFT_MODEL, self.policy.curve.draft_chances(min(self.gamma, max_draft_depth))
                )
            )
        if self.head is not None and max_draft_depth and len(context) > 1:
            chances = self.policy.curve.head.chances[:HEAD_NODES]
            offers.append(Candidate(HEAD, chances, len(self.head.unread)))
        return offers

    def observe(self, round: Round) -> None:
        self.texts.observe(round)
        if self.pick is None:
            self.policy.learn(self.option, round)
        if self.draft is not None:
            self.draft.observe(round)
        if self.head is not None:
            self.head.observe(round, self.option.source == HEAD, bool(self.hidden_layers))
        self._want_states()

    def rewind(self, length: int) -> None:
        self.texts.rewind(length)
        if self.draft is not None:
            self.draft.rewind(length)
        if self.head is not None:
            self.head.rewind(length)
        self._want_states()

    def end(self) -> None:
        self.texts.end()
        if self.draft is not None:
            self.draft.end()
        if self.head is not None:
            self.head.end()
        self._want_states()


_curves: WeakKeyDictionary[Any, WeakKeyDictionary[Any, LearntCosts]] = WeakKeyDictionary()


def shared_cost_model(request: Request, longest: int) -> LearntCosts:
    """Return the cost model of this pair of models, for drafts of at most `longest` tokens.

    It is kept, and replaced by a new one if `longest` changes. Without a clock, or if the target is
    no session of a model, it is new and is not kept.
    """
    target = getattr(request.target, "model", None)
    if request.clock is None or target is None:
        return LearntCosts(longest)
    pairs = _curves.setdefault(target, WeakKeyDictionary())
    partner = getattr(request.drafts[0], "model", target) if request.drafts else target
    if partner not in pairs or pairs[partner].sizes[-1] != longest:
        pairs[partner] = LearntCosts(longest)
    return pairs[partner]


def zero_clock() -> float:
    """Return 0 seconds: the clock of a request without one."""
    return 0.0


@technique(
    title="auto: measure, then draft as much as pays",
    summary="measures, then drafts what pays",
    paper="our own design",
    family="planning",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    optional_draft=True,
    optional_head=True,
    timed=True,
    of_batch=True,
    copies=True,
    persistent=True,
    knobs=(
        Knob("k", 16, "most draft tokens looked up in a round", low=1, high=1024),
        Knob(
            "gamma",
            4,
            "most tokens a draft model proposes in a round",
            low=1,
            high=64,
            small=(1, 2),
            advised=True,
        ),
        REMEMBER_KNOB,
    ),
)
def auto(request: Request, *, k: int, gamma: int, remember: bool) -> Decoder:
    """Return a decoder that drafts from texts, a draft model, a head, or not at all, by goodput."""
    longest = max(k, gamma, HEAD_NODES if request.head else 0)
    policy = Goodput(shared_cost_model(request, longest), request.clock or zero_clock)
    return request.decoder(
        AutoDrafter(policy, request, LookupDrafter(request, k, remember), gamma), verify_tree
    )
