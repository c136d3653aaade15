"""A race: several decoders write from the same prompt, each on its own clock.

Each step is timed alone, with nothing else running. The lane whose clock shows least takes the next
step. Turning ids into text happens between the steps, while every clock stands still, and nothing
is drawn until the race is over: `cut_lane` says what a lane had written at any moment, and so a
race can be played back at any speed. A clock covers the prompt (for a technique with a draft model,
the draft's prompt too) and every round; loading models is outside.
"""

import gc
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, median_low
from typing import Any

from tinyspec.decoding.decode import Round
from tinyspec.decoding.trace import Statistics, Trace, distinct_share
from tinyspec.generation import GenerationRun
from tinyspec.lm.model import Model

WARM_UP = 4  # rounds that are not timed: the first passes of a process fill caches


@dataclass
class Lane:
    """One decoder's part in a race. Times are seconds on its own clock.

    knobs  the value of every knob of its method
    """

    method: str
    prefill: float = 0.0
    rounds: list[float] = field(default_factory=list)  # how long each round took
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(
        default_factory=list
    )  # the text that each token completed; "" inside a character
    stats: Statistics = field(default_factory=Statistics)
    trace: Trace = field(default_factory=Trace)
    finished: str | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return what the clock shows."""
        return self.prefill + sum(self.rounds)

    @property
    def ends(self) -> list[float]:
        """When each round ended."""
        return list(accumulate(self.rounds, initial=self.prefill))[1:]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / len(self.tokens) if self.tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def distinct(self) -> float:
        """Share of distinct 4-grams: looping text flatters every drafter."""
        return distinct_share(self.tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
        return {
            "method": self.method,
            **self.stats.as_dict(),
            "prefill_seconds": self.prefill,
            "tokens_per_second": self.tokens_per_second,
            "distinct_4grams": self.distinct,
            "finish_reason": self.finished,
            "text": self.text,
            "tokens": self.tokens,
        }


Start = Callable[[], GenerationRun]  # a new request, with its prompt run


def warm_up(starts: Sequence[Start]) -> None:
    """Run the first rounds of every request, untimed."""
    for start in starts:
        for _ in zip(range(WARM_UP), start(), strict=False):
            pass


def race(
    model: Model,
    starts: Sequence[tuple[str, Start]],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Lane]:
    """Run the requests against each other, one lane each.

    Among equal clocks the request that is listed first goes first.
    """
    lanes = [Lane(method) for method, _ in starts]
    running: list[GenerationRun] = []
    gc.collect()
    for lane, (_, start) in zip(lanes, starts, strict=True):
        began = clock()
        request = start()
        lane.prefill = clock() - began
        lane.stats, lane.trace = request.stats, request.trace  # they grow with every round
        lane.knobs = request.knobs
        running.append(request)
    steps = [iter(request) for request in running]
    texts = [model.tokenizer.stream() if model.has_tokenizer else None for _ in lanes]
    while unfinished := [i for i, lane in enumerate(lanes) if lane.finished is None]:
        i = min(unfinished, key=lambda i: lanes[i].seconds)
        lane = lanes[i]
        began = clock()
        round: Round | None = next(steps[i], None)
        took = clock() - began
        if round is None:  # the iterator has nothing to run: its request is over
            lane.finished = running[i].decoder.finished
            lane.stats.seconds = lane.seconds
            if (text := texts[i]) is not None and (rest := text.flush()) and lane.pieces:
                lane.pieces[-1] += rest
        else:
            lane.rounds.append(took)
            lane.tokens += round.tokens
            lane.pieces += [
                text.push([token]) if (text := texts[i]) is not None else ""
                for token in round.tokens
            ]
    return lanes


def cut_lane(lane: Lane, seconds: float) -> Lane:
    """Return the lane as it stood when its clock showed `seconds`.

    It has the rounds that had ended by then, and what they wrote.
    """
    if seconds >= lane.seconds:
        return lane
    ended = bisect_right(lane.ends, seconds)
    ran = lane.trace.rounds[:ended]
    emitted = sum(len(round.emitted) for round in ran)
    under_way = max(seconds - [lane.prefill, *lane.ends][ended], 0.0)
    return Lane(
        lane.method,
        prefill=min(seconds, lane.prefill),
        rounds=[*lane.rounds[:ended], under_way],
        tokens=lane.tokens[:emitted],
        pieces=lane.pieces[:emitted],
        stats=Statistics(target_calls=ended, emitted=emitted),
        trace=Trace(lane.trace.prompt, ran),
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first position where two texts differ; None where they are identical.

    >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1, 2], [1, 2])
    (2, None)
    """
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@dataclass(frozen=True)
class Outcome:
    """One technique against plain decoding, over all repeats.

    ratio      how many times as fast as plain decoding, in seconds per token: median over the
               repeats. Below 1: a slow-down
    ratios     the same of each repeat
    identical  whether every text is plain decoding's; None where it need not be (temperature above
               0, and a draft with probabilities)
    """

    method: str
    ratio: float
    ratios: list[float]
    identical: bool | None
    differs_at: int | None  # the first position that differs, in the first repeat that does


def compare_lanes(repeats: Sequence[Sequence[Lane]], keeps_text: Sequence[bool]) -> list[Outcome]:
    """Judge every lane against the first, which is plain decoding.

    repeats     repeats[r][i] is lane i of repeat r
    keeps_text  for each lane after the first, whether its text must be plain decoding's
    """
    outcomes: list[Outcome] = []
    for i in range(1, len(repeats[0])):
        pairs = [(lanes[0], lanes[i]) for lanes in repeats]
        ratios = [a.seconds_per_token / b.seconds_per_token if b.tokens else 1.0 for a, b in pairs]
        differences = [first_difference(a.tokens, b.tokens) for a, b in pairs]
        at = next((d for d in differences if d is not None), None)
        outcomes.append(
            Outcome(
                repeats[0][i].method,
                median(ratios),
                ratios,
                at is None if keeps_text[i - 1] else None,
                at if keeps_text[i - 1] else None,
            )
        )
    return outcomes


def find_median_race(ratios: Sequence[float]) -> int:
    """Return the index of the race with the median ratio: the one to show.

    Of two in the middle it is the one with the lower ratio.

    >>> find_median_race([1.3, 1.0, 1.1])
    2
    """
    return list(ratios).index(median_low(ratios))
