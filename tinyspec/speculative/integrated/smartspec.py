"""SmartSpec: choose the draft length of each request so that the batch has the greatest goodput.

Paper: Liu et al. 2024, arXiv 2406.14066, version 1 ("Optimizing Speculative Decoding for Serving
Large Language Models Using Goodput"; version 3 of 2025 is called TurboSpec). Nothing is trained.
The released code is dsd.py in the copy of vLLM that the authors of TETRIS published.

Idea. Goodput counts the tokens that a batch is expected to generate in a second; draft tokens that
will be rejected do not count. Longer drafts give more tokens, and longer passes. What is best
depends on the batch size and on how well each request is drafted. So lengths are chosen anew in
each round, from what was accepted so far and from measured times:

    goodput(k_1, ..., k_b) = sum over i of (1 - a_i^(k_i + 1)) / (1 - a_i) / seconds(k_1, ..., k_b)

    a_i: acceptance rate of request i       k_i: its draft length; 0 is plain decoding
    seconds: a draft step for each of max k_i tokens, then one target pass over all rows

One more draft token of request i adds a_i^(k_i + 1). For each number of draft steps, tokens are
added one at a time, the greatest gain first, and the lengths with the greatest goodput on the way
are chosen. No other lengths have a greater goodput. Plain decoding is kept unless drafts are more
than 10 % better, as in the released code.

So it is per request (`per`), as in version 1. The released code has one length for the batch: with
`per` "batch" all k_i are the same k, the one with the greatest goodput.

The times are measured once, when requests ask first; all requests wait meanwhile.

Guarantee: EXACT. Lengths follow from earlier rounds and the clock.
Pitfall: a rate that counts tokens after a rejection, of which nothing is known (the released code's
does); one request's time taken from a pass that others shared.
Tests: tests/speculative/test_smartspec.py (the chosen lengths against all lengths of a small batch;
one length against all equal lengths; the rate against its definition; a request that is drafted
badly stops drafting, and tries again).
Left out: the released code's one rate for the batch (here each request has its own, also with one
length), its moving average (0.85 of the old rate), its decision every 20 steps, and its times by
the length of the contexts. Its memory check is the scheduler's (`max_slots`). Its lengths for
prompt lookup are those of `auto`.
Ours: the rate is a mean over all rounds; the code's first value, 0.7, counts as 4 tokens; a request
that drafts nothing for 100 rounds tries again; `longest` 8; all lengths are tried, where the
released code stops at the first fall of the goodput.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tinyspec.decoding.costs import CostModel
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.batched import BatchDrafter, BatchProfile, find_profile, read_models
from tinyspec.technique import Guarantee, Knob, Request, technique

FIRST_RATE = 0.7  # of acceptance, before anything is known: the released code's
FIRST_WEIGHT = 4  # draft tokens that it counts for
PLAIN_BONUS = 1.1  # on the goodput of plain decoding: the released code's
TRIAL_ROUNDS = 100  # without a draft, after which a request forgets how badly it was drafted


class DraftHistory(NamedTuple):
    """What a rule is told about a request.

    tested    draft tokens that were accepted or rejected; those after a rejection were not tested
    accepted  how many of them were accepted
    """

    text: Sequence[int]
    tested: int
    accepted: int

    @property
    def rate(self) -> float:
        """Return the acceptance rate.

        >>> DraftHistory((), tested=0, accepted=0).rate, DraftHistory((), tested=4, accepted=0).rate
        (0.7, 0.35)
        """
        return (FIRST_RATE * FIRST_WEIGHT + self.accepted) / (FIRST_WEIGHT + self.tested)


def choose_lengths(rates: Sequence[float], costs: CostModel, longest: int) -> list[int]:
    """Return the draft lengths with the greatest goodput of the batch.

    Plain decoding is kept unless drafts have more than PLAIN_BONUS times its goodput.

    rates    [b] acceptance rates
    longest  most tokens of a draft

    >>> from tinyspec.decoding.costs import MeasuredRounds
    >>> choose_lengths([0.9, 0.1], MeasuredRounds({2: [1.0, 1.1, 1.2]}, {2: 0.1}), 2)
    [2, 0]
    """
    n_requests = len(rates)
    ordered = sorted(
        (-(rate**depth), depth, at)
        for at, rate in enumerate(rates)
        for depth in range(1, longest + 1)
    )
    shared = [costs.verify_seconds(n_requests, n) for n in range(n_requests * longest + 1)]
    step = costs.step_seconds(n_requests)
    best, goodput = (0, 0), PLAIN_BONUS * n_requests / shared[0]
    for most in range(1, longest + 1):  # draft steps of the round
        tokens, n_drafted = float(n_requests), 0
        for gain, depth, _ in ordered:
            if depth <= most:
                tokens -= gain
                n_drafted += 1
                if (now := tokens / (shared[n_drafted] + most * step)) > goodput:
                    best, goodput = (most, n_drafted), now
    most, n_drafted = best
    chosen = [at for _, depth, at in ordered if depth <= most][:n_drafted]
    return [chosen.count(at) for at in range(n_requests)]


def choose_equal_lengths(rates: Sequence[float], costs: CostModel, longest: int) -> list[int]:
    """Return the one draft length of all requests with the greatest goodput; of two, the shorter.

    Plain decoding is kept as in `choose_lengths`, which says what the arguments are.

    >>> from tinyspec.decoding.costs import MeasuredRounds
    >>> costs = MeasuredRounds({2: [1.0, 1.2, 1.8]}, {2: 0.1})
    >>> choose_lengths([0.9, 0.1], costs, 2), choose_equal_lengths([0.9, 0.1], costs, 2)
    ([2, 0], [1, 1])
    """

    def goodput(length: int) -> float:
        tokens = sum(rate**depth for rate in rates for depth in range(length + 1))
        bonus = 1.0 if length else PLAIN_BONUS
        return bonus * tokens / seconds_of([length] * len(rates), costs)

    return [max(range(longest + 1), key=goodput)] * len(rates)


def seconds_of(lengths: Sequence[int], costs: CostModel) -> float:
    """Return the seconds of a round whose drafts have these lengths."""
    n = len(lengths)
    return costs.verify_seconds(n, sum(lengths)) + max(lengths) * costs.step_seconds(n)


class SmartSpecRule:
    """Choose a length for each request.

    measure  texts -> the profile of the models; it is called when requests ask first
    per      whether each "request" has a length of its own, or all of the "batch" the same one
    """

    def __init__(
        self,
        measure: Callable[[Sequence[Sequence[int]]], BatchProfile],
        longest: int,
        per: str = "request",
    ):
        self.measure, self.longest = measure, longest
        self.choose = choose_lengths if per == "request" else choose_equal_lengths
        self.profile: BatchProfile | None = None

    def decide(self, questions: Mapping[int, DraftHistory], n_decoding: int) -> Mapping[int, int]:
        """Return the lengths. The requests that do not ask now are taken to be like these."""
        if self.profile is None:
            self.profile = self.measure([one.text for one in questions.values()])
        rates = [one.rate for one in questions.values()]
        others = [rates[n % len(rates)] for n in range(max(n_decoding - len(rates), 0))]
        longest = min(self.longest, len(self.profile.reach))  # what was measured
        lengths = self.choose([*rates, *others], self.profile.costs, longest)
        return dict(zip(questions, lengths, strict=False))


class SmartSpecDrafter(BatchDrafter):
    """Draft as many tokens as the batch chooses, and count what is accepted."""

    tested = accepted = plain_rounds = 0

    def question(self) -> DraftHistory:
        return DraftHistory(self.context, self.tested, self.accepted)

    def observe(self, round: Round) -> None:
        super().observe(round)
        if not round.tree.tokens:
            self.plain_rounds += 1
            if self.plain_rounds >= TRIAL_ROUNDS:
                self.tested = self.accepted = self.plain_rounds = 0
            return
        accepted = len(round.verdict.accepted)
        self.plain_rounds = 0
        self.accepted += accepted
        self.tested += accepted + len(round.verdict.rejected[:1])


@technique(
    title="SmartSpec: draft lengths by goodput",
    summary="lengths with the batch's best goodput",
    paper="Liu et al. 2024, arXiv 2406.14066",
    reported="up to 3.2x lower latency (arXiv 2406.14066)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    of_batch=True,
    knobs=(
        Knob("longest", 8, "longest draft", low=1, high=64, small=(2,)),
        Knob("per", "request", "what has a draft length of its own", choices=("request", "batch")),
    ),
)
def smartspec(request: Request, *, longest: int, per: str) -> Decoder:
    """Return a decoder whose draft length is chosen with those of its batch."""

    def make_rule() -> SmartSpecRule:
        models = *read_models(request), request.sampling
        return SmartSpecRule(lambda texts: find_profile(*models, texts, longest), longest, per)

    drafter = SmartSpecDrafter(request, longest, ("smartspec", longest, per), make_rule)
    return request.decoder(drafter, verify_tree)
