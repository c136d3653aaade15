"""Choose the draft with the greatest goodput: expected tokens per expected second.

The objective is that of SmartSpec (Liu et al. 2024, arXiv 2406.14066), for one request instead of a
batch. The estimates are ours. Two things are learned as exponential averages that start from a
prior: the seconds of a round, by its number of draft tokens, and the acceptance of a draft model's
tokens, by their position. Of a trained head the same is learned, but by the node of its tree. The
acceptance of looked-up tokens comes from speculative/lookup.py. The technique is `auto`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from tinyspec.decoding.costs import CostModel, interpolate_seconds
from tinyspec.decoding.decode import Round
from tinyspec.technique import Clock

DRAFT_SIZES = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15, 23, 31, 47)
"""Draft tokens in a round. The sizes are few, so that each is measured often. With the root, 11
draft tokens are 12 positions, as many as a kernel takes at once."""
PRIOR_SLOPE = 0.1  # assumed cost of one more draft token, in target passes
PRIOR_STEP = 0.3  # assumed cost of a step of the draft model, in target passes
PRIOR_HEAD = 0.1  # assumed cost of a draft by a head, in target passes
PRIOR_ACCEPTANCE = (0.5, 0.75)  # assumed chance of the first draft token, and of each further one
CATCH_UP_ROUNDS = 16  # rounds over which a head's missed states are paid: it mostly stays in use
EMA_RATE = 0.2  # weight of the newest value in an average
EMA_RATE_FALLING = 0.5  # the same if a time is shorter: a disturbance only makes times longer
MIN_WEIGHT = 0.05  # least weight of a round in the cost of its size, however many came before
MAX_TIME_RATIO = 1.5  # a time counts as at most this many times the expected one
MAX_FIRST_TIME_RATIO = 3.0  # the same for the first time of a size, which is less well known
WARM_UP_ROUNDS = 2  # plain rounds at the start, to learn the cost of a plain round
MAX_GROWTH = 3  # a round is at most this many times as wide as any before it
MARGIN = 0.03  # least gain over plain decoding; below it nothing is drafted
TRIAL_SHARE = 0.01  # share of the time that trials may take
TRIAL_INTERVAL = 16  # rounds from one possible trial to the next
STALE_ROUNDS = 64  # rounds after which the cost of a size counts as unknown
DRAFT_MODEL = 0  # source: a draft model
LOOKUP = 1  # source: texts in which the draft is looked up
HEAD = 2  # source: a trained head of the target


class Choice(NamedTuple):
    """A possible round: the source of the draft, and how many draft tokens it has."""

    source: int
    size: int


class Candidate(NamedTuple):
    """What a source can draft: the probability of each draft token to be accepted.

    No probability is greater than the one before it. A head is the exception: its tokens stand in
    the order of its tree.

    missed  tokens whose states a head lacks; a pass over them comes before its draft
    """

    source: int
    chances: Sequence[float]
    missed: int = 0


PLAIN = Choice(DRAFT_MODEL, 0)


class HeadFigures:
    """What the drafts of a trained head yield, and what they take.

    seconds     of a draft, however many of its nodes are used; None: never measured
    chances     probability of each node to be accepted
    last_draft  the round in which it last drafted
    """

    def __init__(self, longest: int):
        first, further = PRIOR_ACCEPTANCE
        self.seconds: float | None = None
        self.chances = [first * further**node for node in range(longest)]
        self.last_draft = 0

    def learn(self, round: Round, size: int) -> None:
        """Learn which nodes of a draft were accepted. A node that the tree lacks was not.

        size  how many nodes the draft was to have
        """
        for node in range(size):
            is_accepted = node in round.verdict.accepted
            self.chances[node] += EMA_RATE * (is_accepted - self.chances[node])


class LearntCosts(CostModel):
    """The seconds of a request's rounds by their draft tokens, and the figures of a draft model.

    Other work on the machine makes rounds of all sizes longer. So the seconds of a size are a
    product: the *pace* of the machine, which follows every round, times the seconds at pace 1,
    which follow the rounds of that size alone. In the latter every round has the same weight until
    there are many rounds. The policy prefers sizes whose cost was estimated too low, so these
    estimates must not vary much.

    seconds  at pace 1, by size; None: never measured
    counts   how often each size was timed
    step     seconds of a step of the draft model; None: never measured
    accepts  probability of a token of the draft model to be accepted, by position, if all before it
             are
    credit   seconds that trials may still take
    head     the figures of a trained head
    """

    def __init__(self, longest: int):
        self.sizes = (*(size for size in DRAFT_SIZES if size < longest), longest)
        self.index_of = {size: at for at, size in enumerate(self.sizes)}
        self.seconds: list[float | None] = [None] * len(self.sizes)
        self.counts = [0] * len(self.sizes)
        self.pace = 1.0
        self.last_run = [0] * len(self.sizes)  # the round in which each size was last run
        self.rounds = self.plain_rounds = self.widest = 0
        self.credit = 0.0
        self.last_draft = -STALE_ROUNDS  # the round in which the draft model last drafted
        self.step: float | None = None
        first, further = PRIOR_ACCEPTANCE
        self.accepts = [first] + [further] * (longest - 1)
        self.head = HeadFigures(longest)
        self._costs: list[float] | None = None

    def draft_chances(self, most: int) -> list[float]:
        """Return the acceptance probabilities of the draft model's first `most` tokens."""
        return list(accumulate(self.accepts[:most], mul))

    def record_round(self, size: int, seconds: float) -> None:
        """Learn from a round of this size. A time far above the expected one is cut."""
        self.rounds += 1
        self.plain_rounds += size == 0
        self.widest = max(self.widest, size)
        at = self.index_of.get(size)
        if at is None:
            return  # cut short by the end of a text
        self.last_run[at] = self.rounds
        if seconds > 0:
            if self.seconds[0] is not None:
                expected, known = self.costs()[at], self.seconds[at] is not None
                seconds = min(
                    seconds, (MAX_TIME_RATIO if known else MAX_FIRST_TIME_RATIO) * expected
                )
                if known:
                    self.pace *= 1 + EMA_RATE * (seconds / expected - 1)
            self.counts[at] += 1
            old, new = self.seconds[at], seconds / self.pace
            weight = max(MIN_WEIGHT, 1 / self.counts[at])
            self.seconds[at] = new if old is None else old + weight * (new - old)
            self._costs = None

    def verify_seconds(self, n_requests: int, n_drafted: int) -> float:
        """Return the seconds of a round. Those of other requests are in what was learnt."""
        if n_drafted in self.index_of:
            return self.costs()[self.index_of[n_drafted]]
        return interpolate_seconds(dict(zip(self.sizes, self.costs(), strict=True)), n_drafted)

    def step_seconds(self, n_requests: int) -> float:
        return PRIOR_STEP * self.costs()[0] if self.step is None else self.step

    def set_batch(self, n_requests: int, costs: CostModel) -> None:
        """Take the costs of a batch in place of what was learnt.

        n_requests  how many share a pass; the plan assumes that all draft as much as this one

        The heads of all requests run one after another.
        """
        self._costs = [costs.verify_seconds(n_requests, n_requests * n) for n in self.sizes]
        self.step = costs.step_seconds(n_requests)
        self.head.seconds = n_requests * PRIOR_HEAD * costs.verify_seconds(1, 0)

    def pass_seconds(self, rows: int) -> float:
        """Return the seconds of a pass over so many rows, as a round of that width takes."""
        costs = self.costs()
        if not rows:
            return 0.0
        near = min(range(len(costs)), key=lambda at: abs(self.sizes[at] + 1 - rows))
        return costs[near] * max(rows / (self.sizes[near] + 1), 1.0)

    def costs(self) -> list[float]:
        """Return the seconds of a round of each size.

        A size that was never measured lies on the slope of the next smaller one that was, else of
        the next larger one.
        """
        if self._costs is None:
            base, slope, self._costs = self.seconds[0] or 1.0, None, []
            for size, own in zip(self.sizes[1:], self.seconds[1:], strict=True):
                if own is not None:  # the smallest size that was measured
                    slope = max(0.0, (own - base) / size)
                    break
            slope = PRIOR_SLOPE * base if slope is None else slope
            for size, own in zip(self.sizes, self.seconds, strict=True):
                if own is not None and size:
                    slope = max(0.0, (own - base) / size)
                self._costs.append(self.pace * (base + slope * size if own is None else own))
        return self._costs


def update_ema(old: float | None, new: float) -> float:
    """Return the exponential average of a time.

    It falls faster than it rises, because a disturbance only makes a measurement longer.
    """
    return new if old is None else old + (EMA_RATE_FALLING if new < old else EMA_RATE) * (new - old)


class Goodput:
    """The policy: choose the source and the size with the greatest goodput.

    lookup_seconds  what a lookup takes
    gain            seconds that the latest choice is expected to save
    """

    def __init__(self, curve: LearntCosts, clock: Clock):
        self.curve, self.clock = curve, clock
        self.started = self.ready = 0.0
        self.lookup_seconds = self.gain = 0.0

    def choose(self, offers: Sequence[Candidate]) -> Choice:
        """Return the best choice among what the sources can draft."""
        self.gain = 0.0
        if not offers or self.curve.plain_rounds < WARM_UP_ROUNDS:
            return PLAIN
        return self._best(offers)

    def _best(self, offers: Sequence[Candidate]) -> Choice:
        curve, costs = self.curve, self.curve.costs()
        best, goodput = PLAIN, (1 + MARGIN) / costs[0]
        is_due = curve.rounds % TRIAL_INTERVAL == 0 and self.curve.credit > 0
        trials = [(PLAIN, costs[0], 1.0, curve.rounds - curve.last_run[0])] if is_due else []
        for source, chances, missed in offers:
            known, step, fixed, once = True, 0.0, 0.0, 0.0
            if source == DRAFT_MODEL:
                known, step = curve.step is not None, curve.step or PRIOR_STEP * costs[0]
            if source == HEAD:
                measured, once = curve.head.seconds, curve.pass_seconds(missed)
                fixed = PRIOR_HEAD * costs[0] if measured is None else measured
            expected = 1.0
            for at, (before, size) in enumerate(pairwise(curve.sizes), start=1):
                if size > len(chances) or size >= MAX_GROWTH * (curve.widest + 1):
                    break
                expected += sum(chances[before:size])
                cost = costs[at] + size * step + fixed
                usual = cost + once / CATCH_UP_ROUNDS
                if known and expected > goodput * usual:
                    best, goodput = Choice(source, size), expected / usual
                    self.gain = expected * costs[0] - usual
                if is_due:
                    last = {DRAFT_MODEL: curve.last_draft, HEAD: curve.head.last_draft}.get(
                        source, curve.last_run[at]
                    )
                    # Nothing is expected of a draft model that was never tried.
                    tokens = expected if known else 1.0
                    trials.append((Choice(source, size), cost + once, tokens, curve.rounds - last))
        losses = [
            (age, cost - tokens / goodput, option)
            for option, cost, tokens, age in trials
            if age >= STALE_ROUNDS
        ]
        affordable = [trial for trial in losses if trial[1] <= self.curve.credit]
        if affordable:
            _, loss, best = max(affordable, key=lambda trial: (trial[0], -trial[1]))
            self.curve.credit -= max(loss, 0.0)
        return best

    def start_timer(self) -> None:
        """Note the time before drafting or a lookup."""
        self.started = self.clock()

    def record_lookup(self) -> None:
        """Learn the time that the lookup took."""
        self.lookup_seconds = update_ema(self.lookup_seconds, self.clock() - self.started)

    def record_draft(self, option: Choice, size: int) -> None:
        """Learn the time that a draft of `size` tokens took."""
        self.ready = self.clock()
        if option.source == DRAFT_MODEL and size:
            self.curve.last_draft = self.curve.rounds
            self.curve.step = update_ema(self.curve.step, (self.ready - self.started) / size)
        if option.source == HEAD:
            self.curve.head.last_draft = self.curve.rounds
            self.curve.head.seconds = update_ema(self.curve.head.seconds, self.ready - self.started)

    def learn(self, option: Choice, round: Round) -> None:
        """Learn the time of the round, and which tokens of a model or head were accepted."""
        seconds, drafted = self.clock() - self.ready, len(round.tree.tokens)
        self.curve.record_round(drafted, seconds)
        self.curve.credit += TRIAL_SHARE * seconds
        if option.source == DRAFT_MODEL and drafted and not round.truncated:
            accepts, n = self.curve.accepts, len(round.verdict.accepted)
            for at in range(min(n + 1, drafted)):  # after a rejection nothing is known
                accepts[at] += EMA_RATE * ((at < n) - accepts[at])
        if option.source == HEAD and not round.truncated:
            self.curve.head.learn(round, option.size)
