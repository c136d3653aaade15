"""Laws of a policy: which requests share a forward pass changes nothing but when they run.

Random requests arrive, end, fail, and are cancelled while others run, on a small float64
transformer. They decode plainly or with a draft model, and their prompts differ in length.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.policies import Pending, Policy
from tinyspec.lm.scheduler import RequestCancelled, Scheduler, SharedPass, Ticket
from tinyspec.technique import Request, find_technique

SCHEDULED_ALONE = "a scheduled request is the request alone"
NO_STANDSTILL = "a schedule comes to its end"
SECONDS = 60.0  # a schedule that has not ended by then stands still
VOCABULARY = 4
METHODS = ("autoregressive", "speculative_decoding")


@lru_cache
def network(seed: int) -> Model:
    """Return a small transformer. All requests share it, so that their passes can be shared."""
    return small_network(seed, VOCABULARY)


class RequestFailed(Exception):
    """Raised by a request of a trace that fails on purpose."""


@dataclass
class Arrival:
    """A request of a trace.

    turn       the turn in which it arrives
    cancelled  the turn in which it is cancelled; -1: never
    fails      after how many tokens it fails; -1: never
    log        the forward passes that it records
    """

    turn: int
    prompt: tuple[int, ...]
    n: int
    method: str
    seed: int
    cancelled: int = -1
    fails: int = -1
    log: list[ForwardRecord] = field(default_factory=list)

    def decode(self, scheduler: Scheduler | None) -> Iterator[int]:
        """Yield the new tokens; a scheduler shares the passes with other requests."""
        self.log.clear()
        request = Request(
            target=network(1).session(self.log, scheduler),
            drafts=[network(2).session(self.log, scheduler)],
            sampling=SamplingParams(0.8),
            stop=StoppingCriteria(max_new_tokens=self.n),
            forward_log=self.log,
        )
        decoder = find_technique(self.method).make(request)
        decoder.extend(self.prompt)
        written = 0
        for round in decoder.run(Seeded(self.seed)):
            yield from round.tokens
            written += len(round.tokens)
            if scheduler is not None and 0 <= self.fails <= written:
                raise RequestFailed
        decoder.end()


class Arrivals:
    """A policy that asks another one, and lets requests arrive while it is asked."""

    def __init__(self, policy: Policy, trace: Sequence[Arrival], max_live: int | None):
        self.policy, self.trace = policy, trace
        self.tickets: dict[int, Ticket[int]] = {}
        self.scheduler = Scheduler(self, max_live=max_live)

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        picked = self.policy.pick(waiting)
        self.let_arrive(self.scheduler.turn)
        return picked

    def let_arrive(self, turn: int) -> None:
        """Submit and cancel what is due at this turn."""
        for number, one in enumerate(self.trace):
            if number not in self.tickets and one.turn <= turn:
                self.tickets[number] = self.scheduler.submit(one.decode)
            elif 0 <= one.cancelled <= turn and not self.tickets[number].is_done:
                self.tickets[number].cancel()


def random_trace(seed: int) -> list[Arrival]:
    """Return some requests; the first one ends by itself."""
    rng = random.Random(seed)
    trace = list[Arrival]()
    for number in range(rng.randint(1, 5)):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 13])))
        turn = rng.randint(0, 8) if number else 0
        one = Arrival(turn, prompt, rng.randint(1, 6), rng.choice(METHODS), number)
        match rng.choice(["ends", "ends", "is cancelled", "fails"]) if number else "ends":
            case "is cancelled":
                one.cancelled = turn + rng.randint(1, 6)
            case "fails":
                one.fails = rng.randint(0, 3)
        trace.append(one)
    return trace


class Schedule(NamedTuple):
    """What came of a trace.

    texts  tokens of each request; is_whole: whether it ended by itself
    rows   positions that each request ran, and head rows, in all passes
    """

    texts: list[list[int]]
    is_whole: list[bool]
    rows: list[tuple[int, int]]
    pass_log: list[SharedPass]


def run_trace(policy: Policy, trace: Sequence[Arrival], max_live: int | None = None) -> Schedule:
    """Run the requests of a trace under a policy. Raises LawViolated if they do not end."""
    arrivals = Arrivals(policy, trace, max_live)
    tickets = arrivals.tickets
    with arrivals.scheduler as scheduler:
        while len(tickets) < len(trace):  # where nobody runs, time goes on to the next arrival
            with scheduler.together():
                due = min(one.turn for n, one in enumerate(trace) if n not in tickets)
                scheduler.turn = max(scheduler.turn, due)
                arrivals.let_arrive(scheduler.turn)
            if not scheduler.join(SECONDS):
                accuse(NO_STANDSTILL, "an end", "none", **describe_trace(trace))
    texts, is_whole = list[list[int]](), list[bool]()
    for number in range(len(trace)):
        texts.append([])
        with suppress(RequestCancelled, RequestFailed):
            texts[-1].extend(token for token in tickets[number])
        is_whole.append(tickets[number].error is None)
    rows = [count_rows(scheduler.pass_log, tickets[n].number) for n in range(len(trace))]
    return Schedule(texts, is_whole, rows, list(scheduler.pass_log))


def count_rows(pass_log: Iterable[SharedPass], number: int) -> tuple[int, int]:
    """Return how many rows a request had in all passes, and how many of them had logits."""
    own = [
        (rows, heads)
        for entry in pass_log
        for request, rows, heads in zip(entry.requests, entry.rows, entry.heads, strict=True)
        if request == number
    ]
    return sum(rows for rows, _ in own), sum(heads for _, heads in own)


def describe_trace(trace: Sequence[Arrival]) -> dict[str, Any]:
    """Return a trace for a counterexample."""
    return {
        "arrivals": [(one.turn, one.prompt, one.n, one.method) for one in trace],
        "cancelled": [one.cancelled for one in trace],
        "fail after": [one.fails for one in trace],
    }


@collect_evidence(SCHEDULED_ALONE)
def scheduled_request_is_alone(make: Callable[[], Policy], seeds: Sequence[int]) -> Iterator[int]:
    """Check that each text is the one that its request has alone, as far as it goes.

    A request runs each row once. The same arrivals give the same schedule.
    """
    for seed in seeds:
        trace, max_live = random_trace(seed), (None, 2, 1)[seed % 3]
        case = {**describe_trace(trace), "max_live": max_live}
        got = run_trace(make(), trace, max_live)
        ran = [
            (sum(one.rows for one in ran.log), sum(one.head_rows for one in ran.log))
            for ran in trace
        ]
        expect_equal(SCHEDULED_ALONE, ran, got.rows, **case, compared="rows that ran")
        for number, (one, text) in enumerate(zip(trace, got.texts, strict=True)):
            alone = list(one.decode(None))
            shown = len(alone) if got.is_whole[number] else len(text)
            expect_equal(SCHEDULED_ALONE, alone[:shown], text, **case, request=number)
            if one.cancelled < 0 and one.fails < 0:
                expect_equal(SCHEDULED_ALONE, True, got.is_whole[number], **case, request=number)
        again = run_trace(make(), random_trace(seed), max_live)
        expect_equal(SCHEDULED_ALONE, got, again, **case, compared="the same arrivals again")
        yield 0
