"""Goodput: which draft, and how long, has the most expected tokens an expected second. The figures
and the choice.

The model of SmartSpec (Liu et al. 2024, arXiv 2406.14066) for one request. What a round costs is
learnt by its number of guesses, what a guess of a draft model earns by its position; both are
exponential averages over priors. What a guess earns that was looked up is said by whoever looked
(speculative/lookup.py). `auto` is the technique.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from tinyspec.decoding.decode import Round
from tinyspec.technique import Clock

GRID = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15, 23, 31, 47)
"""Guesses in a round: few sizes, so that each is measured often. With the root, 12 rows: what a
kernel takes at once.
"""
SLOPE = 0.1  # prior cost of a further draft token, in target passes
STEP = 0.3  # prior cost of a draft model's step, in target passes
RATE = 0.2  # weight of the newest figure in an average
FALL = 0.5  # the same for a time that is shorter: disturbances only make times longer
SLOW = 0.05  # least weight of a round in the cost of its size, however many came before
CLIP = 1.5  # a time counts as at most so many times the expected one
FIRST = 3.0  # the same for the first time of a size, which is expected less surely
WARM = 2  # plain rounds at first, to know the cost of a plain round
RAMP = 3  # a round is at most so many times as wide as any before it
MARGIN = 0.03  # gain over plain decoding below which nothing is drafted
SHARE = 0.01  # share of the time that trials may take
EVERY = 16  # rounds between trials
STALE = 64  # rounds after which a size counts as not known any more
DRAFT = 0  # source: a draft model
LOOKED = 1  # source: what was looked up in texts


class Choice(NamedTuple):
    """What a round may do: run so many guesses of a source."""

    source: int
    size: int


class Candidate(NamedTuple):
    """What a source has: of each guess the chance that it is accepted, never more than that of the
    one before.
    """

    source: int
    chances: Sequence[float]


PLAIN = Choice(DRAFT, 0)


class CostModel:
    """Seconds of a round by the number of its guesses, and of a draft model's step, with its
    acceptance by position.

    What else a machine has to do makes rounds of all sizes longer, so pace and shape are learnt
    apart: the pace from every round, and soon; the seconds of a size at pace 1 from its own rounds,
    each of which counts alike until there are many. The choice takes the size with the least cost,
    and with it the errors of figures that were too small: they have to be few.
    """

    def __init__(self, longest: int):
        self.sizes = (*(size for size in GRID if size < longest), longest)
        self.place = {size: at for at, size in enumerate(self.sizes)}
        self.seconds: list[float | None] = [None] * len(self.sizes)  # at pace 1
        self.counts = [0] * len(self.sizes)  # how often each was timed
        self.pace = 1.0
        self.last = [0] * len(self.sizes)  # the round in which each size was last run
        self.rounds = self.plain = self.widest = 0
        self.credit = 0.0  # seconds for trials
        self.asked = -STALE  # the round in which the draft model last guessed
        self.step: float | None = (
            None  # seconds of the draft model for a token; None: never measured
        )
        self.accepts = [0.5] + [0.75] * (longest - 1)
        self._costs: list[float] | None = None

    def chances(self, most: int) -> list[float]:
        """Of so many guesses of the draft model, the chance that each is accepted."""
        return list(accumulate(self.accepts[:most], mul))

    def enter(self, size: int, seconds: float) -> None:
        """A round of this size took so long; nothing took much longer than it was expected to."""
        self.rounds += 1
        self.plain += size == 0
        self.widest = max(self.widest, size)
        at = self.place.get(size)
        if at is None:
            return  # cut short by the end of a text
        self.last[at] = self.rounds
        if seconds > 0:
            if self.seconds[0] is not None:
                expected, known = self.costs()[at], self.seconds[at] is not None
                seconds = min(seconds, (CLIP if known else FIRST) * expected)
                if known:
                    self.pace *= 1 + RATE * (seconds / expected - 1)
            self.counts[at] += 1
            old, new = self.seconds[at], seconds / self.pace
            self.seconds[at] = (
                new if old is None else old + max(SLOW, 1 / self.counts[at]) * (new - old)
            )
            self._costs = None

    def costs(self) -> list[float]:
        """Seconds of a round of each size: as measured, else on the slope of the next smaller (else
        larger) size that was.
        """
        if self._costs is None:
            base, slope, self._costs = self.seconds[0] or 1.0, None, []
            for size, own in zip(self.sizes[1:], self.seconds[1:], strict=True):
                if own is not None:  # the smallest that was
                    slope = max(0.0, (own - base) / size)
                    break
            slope = SLOPE * base if slope is None else slope
            for size, own in zip(self.sizes, self.seconds, strict=True):
                if own is not None and size:
                    slope = max(0.0, (own - base) / size)
                self._costs.append(self.pace * (base + slope * size if own is None else own))
        return self._costs


def update_ema(old: float | None, new: float) -> float:
    """The exponential average of a time. It falls faster than it rises: whatever disturbs a
    measurement makes it longer.
    """
    return new if old is None else old + (FALL if new < old else RATE) * (new - old)


class Goodput:
    """The policy: the (source, size) with the most expected tokens an expected second."""

    def __init__(self, curve: CostModel, clock: Clock):
        self.curve, self.clock = curve, clock
        self.began = self.ready = 0.0
        self.look = self.gain = (
            0.0  # seconds: what a look takes, and what the latest choice is expected to save
        )

    def choose(self, offers: Sequence[Candidate]) -> Choice:
        """What to do, given what each source has to offer."""
        self.gain = 0.0
        return self._best(offers) if offers and self.curve.plain >= WARM else PLAIN

    def _best(self, offers: Sequence[Candidate]) -> Choice:
        curve, costs = self.curve, self.curve.costs()
        best, goodput = PLAIN, (1 + MARGIN) / costs[0]
        due = curve.rounds % EVERY == 0 and self.curve.credit > 0
        trials = [(PLAIN, costs[0], 1.0, curve.rounds - curve.last[0])] if due else []
        for source, chances in offers:
            known, step = True, 0.0
            if source == DRAFT:
                known, step = curve.step is not None, curve.step or STEP * costs[0]
            expected = 1.0
            for at, (before, size) in enumerate(pairwise(curve.sizes), start=1):
                if size > len(chances) or size >= RAMP * (curve.widest + 1):
                    break
                expected += sum(chances[before:size])
                cost = costs[at] + size * step
                if known and expected > goodput * cost:
                    best, goodput = Choice(source, size), expected / cost
                    self.gain = expected * costs[0] - cost
                if due:  # of a draft model never tried nothing is expected
                    age = curve.rounds - (curve.asked if source == DRAFT else curve.last[at])
                    trials.append((Choice(source, size), cost, expected if known else 1.0, age))
        losses = [
            (age, cost - tokens / goodput, option)
            for option, cost, tokens, age in trials
            if age >= STALE
        ]
        affordable = [trial for trial in losses if trial[1] <= self.curve.credit]
        if affordable:
            _, loss, best = max(affordable, key=lambda trial: (trial[0], -trial[1]))
            self.curve.credit -= max(loss, 0.0)
        return best

    def begin(self) -> None:
        """Guesses are about to be made, or looked up."""
        self.began = self.clock()

    def looked(self) -> None:
        """They were looked up."""
        self.look = update_ema(self.look, self.clock() - self.began)

    def drafted(self, option: Choice, size: int) -> None:
        """So many guesses are there."""
        self.ready = self.clock()
        if option.source == DRAFT and size:
            self.curve.asked = self.curve.rounds
            self.curve.step = update_ema(self.curve.step, (self.ready - self.began) / size)

    def learn(self, option: Choice, round: Round) -> None:
        """How long it took, and of the draft model's guesses, which held."""
        seconds, drafted = self.clock() - self.ready, len(round.tree.tokens)
        self.curve.enter(drafted, seconds)
        self.curve.credit += SHARE * seconds
        if option.source == DRAFT and drafted and not round.truncated:
            accepts, kept = self.curve.accepts, len(round.verdict.accepted)
            for at in range(min(kept + 1, drafted)):  # behind a mismatch nothing is known
                accepts[at] += RATE * ((at < kept) - accepts[at])
