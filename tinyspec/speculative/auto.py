"""auto: measure what a call costs and what a guess earns, and draft as much as pays, or nothing.

No paper of its own: the objective is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066), for one request instead of
a batch: expected tokens of a round over its expected seconds. A round of s guesses commits 1 + a_1 + a_1 a_2 + ... tokens,
where a_i is the chance that guess i is accepted after those before it, learnt by exponential averages for every length of
match; it costs t(s + 1), the measured time of a call over s + 1 rows, and for a draft model s times its measured step. Two
sources are weighed: copying what followed the longest match in the text or the references, and, where there is one, a draft
model. The best (source, size) is taken if it beats plain decoding by 3 %. Nothing is trained.

What makes it a planner and not a heuristic: the curve is measured, so the same text is drafted long where extra rows are free
and not at all where they cost what a token costs; and plain decoding is one of the choices. Copied guesses are judged without
being run: they are compared with the text that came, so trust that was lost comes back at no cost. The first two rounds
are plain; sizes never run take the slope of the nearest that was (at first 10 % of a call a row), and a round is at most three
times as wide as any before it. Sizes not run for long, and a draft model whose gain is unknown, are tried now and then, out of
a budget of 1 % of the time spent; a draft model reads the prompt when it is first tried, not before.

Guarantee: EXACT, whatever is chosen: the choice is made before anything is drawn, from the past and the clock alone; copied
tokens are point masses and the draft declares its laws, so the walk is exact under every policy. Proved for all policies at
once in tests/speculative/test_auto.py, by branching over every choice of every round. The law does not depend on time, but
above temperature 0 the text of a seed does, since which noise a token meets depends on the draft it was in.
State: acceptances of copied tokens end with the request. Times, and the acceptance of the draft model, are kept for a pair of
models as long as the target lives (`kept`): they speak of the machine, not of any text. Without a clock (the laws; a batch,
where a call's time is the others' too) no time passes, the prior curve stands, and nothing is kept.
Left out: trees (several matches side by side), a copied chain continued by the draft model, the load of other requests, and
the catching up of a draft model that was idle, which is timed but not foreseen.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tinyspec._core import NgramIndex
from tinyspec.decoding.chance import Chance
from tinyspec.decoding.decode import Decoder, NoDraft, Round
from tinyspec.decoding.goodput import DRAFT, MATCHES, PLAIN, STALE, Curve, Goodput, Option
from tinyspec.decoding.modeldraft import ModelDraft
from tinyspec.decoding.sampling import Warp
from tinyspec.decoding.verify import walk
from tinyspec.lm.feed import Scores
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

OWN, LONGEST = 0, 8  # the request's own text in the index; the longest match that is looked for


class Waiting(ModelDraft):
    """A draft model that reads the text when it is asked, not before: an idle one costs nothing."""

    behind = 0

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        if self._follow(tokens):
            self.model.append(tokens)
            self.behind += len(tokens)

    def catch_up(self) -> None:
        """Read what is much to read; a little is read with the first guess."""
        if self.behind > STALE and not self.left_behind:
            self.model.extend(())
        self.behind = 0

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.behind += len(round.tokens)


class Planned(NoDraft):
    """Proposes what the policy says, or who was put in its place; that one learns nothing."""

    def __init__(self, policy: Goodput, request: Request, k: int, gamma: int):
        self.policy, self.pick, self.k, self.gamma = policy, request.choose, k, gamma
        self.index = NgramIndex(LONGEST)
        for text, tokens in enumerate(request.references, start=OWN + 1):
            self.index.append(text, tokens)
        self.draft: Waiting | None = None
        if request.drafts:
            self.draft = Waiting(request.drafts[0], gamma, request.stop.eos, *request.reach[:1])
        self.option, self.source, self.copies = PLAIN, DRAFT, list[int]()

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.index.append(OWN, tokens)
        if self.draft is not None:
            self.draft.extend(tokens, scores)

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        offers = self._offers(context, room)
        if self.pick is None:
            self.option = self.policy.choose(offers)
        else:
            ways = [PLAIN, *(Option(source, size) for source, most in offers for size in range(1, most + 1))]
            self.option = ways[self.pick(len(ways), chance)]
        source, size = self.option
        if source == DRAFT and size and self.draft is not None:
            self.draft.catch_up()
            self.policy.begin()
            self.draft.gamma = size
            tree = self.draft.propose(context, room, warp, chance)
        else:
            tree = TokenTree.chain(self.copies[:size]) if size else TokenTree()
        self.policy.drafted(self.option, len(tree.tokens))
        return tree

    def _offers(self, context: Sequence[int], room: int) -> list[Option]:
        """The most that each source could propose. Copies are looked up here: that is cheap and draws nothing."""
        suffix, offers = context[-LONGEST:], []
        self.copies = self.index.lookup(suffix, min(self.k, room), LONGEST)
        if self.copies:
            self.source = next(n for n in MATCHES if n == 1 or self.index.lookup(suffix, 1, LONGEST, n))
            offers.append(Option(self.source, len(self.copies)))
        if self.draft is not None and room and not self.draft.left_behind:
            offers.append(Option(DRAFT, min(self.gamma, room)))
        return offers

    def observe(self, round: Round) -> None:
        if self.pick is None:
            self.policy.learn(self.option, self.source, self.copies, round)
        self.index.append(OWN, round.tokens)
        if self.draft is not None:
            self.draft.observe(round)

    def rewind(self, length: int) -> None:
        if self.index.length(OWN) > length:
            self.index.rewind(OWN, length)
        if self.draft is not None:
            self.draft.rewind(length)

    def end(self) -> None:
        self.index.rewind(OWN, 0)
        self.policy.forget()
        if self.draft is not None:
            self.draft.end()


_curves: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Curve]] = WeakKeyDictionary()


def kept(request: Request, longest: int) -> Curve:
    """The curve of this pair of models; a new one where time stands still or the target is no session."""
    target = getattr(request.target, "model", None)
    if request.clock is None or target is None:
        return Curve(longest)
    pairs = _curves.setdefault(target, WeakKeyDictionary())
    partner = getattr(request.drafts[0], "model", target) if request.drafts else target
    if partner not in pairs or pairs[partner].sizes[-1] != longest:
        pairs[partner] = Curve(longest)
    return pairs[partner]


@technique(
    title="auto: measure, then draft as much as pays",
    paper="goodput: Liu et al. 2024, arXiv 2406.14066",
    family="planning",
    guarantee=Guarantee.EXACT,
    optional_draft=True,
    timed=True,
    copies=True,
    knobs=(
        Knob("k", 16, "most tokens copied in a round", low=1),
        Knob("gamma", 4, "most tokens a draft model proposes in a round", low=1, small=(1, 2)),
    ),
)
def auto(request: Request, *, k: int, gamma: int) -> Decoder:
    """Copying, a draft model if there is one, or neither: whatever has the greatest goodput now."""
    policy = Goodput(kept(request, max(k, gamma)), request.clock or still)
    return request.decoder(Planned(policy, request, k, gamma), walk)


def still() -> float:
    """The clock of whoever has none."""
    return 0.0
