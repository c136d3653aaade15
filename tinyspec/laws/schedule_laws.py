"""Laws of a policy: which requests share a forward pass changes nothing but when they run.

Random requests arrive, end, and are cancelled while others run, on a small float64 transformer.
They decode plainly or with a draft model, and their prompts are of any length.
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
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.policies import Pending, Policy
from tinyspec.lm.scheduler import RequestCancelled, Scheduler, SharedPass, Ticket
from tinyspec.technique import Request, find_technique

SCHEDULED_ALONE = "a scheduled request is the request alone"
SECONDS = 30.0  # a schedule that has not ended by then stands still
VOCABULARY = 4
METHODS = ("autoregressive", "speculative_decoding")


@lru_cache
def network(seed: int) -> Model:
    """Return a small transformer. All requests share it, so that their passes can be shared."""
    return small_network(seed, VOCABULARY)


@dataclass
class Arrival:
    """A request of a trace.

    turn       the turn in which it arrives
    cancelled  the turn in which it is cancelled; -1: never
    log        the forward passes that it records
    """

    turn: int
    prompt: tuple[int, ...]
    n: int
    method: str
    seed: int
    cancelled: int = -1
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
        for round in decoder.run(Seeded(self.seed)):
            yield from round.tokens
        decoder.end()


class Arrivals:
    """A policy that asks another one, and first lets arrive what is due."""

    def __init__(self, policy: Policy, trace: Sequence[Arrival], tickets: dict[int, Ticket[int]]):
        self.policy, self.trace, self.tickets = policy, trace, tickets
        self.scheduler = Scheduler(self)

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
    """Return some requests; the first is never cancelled."""
    rng = random.Random(seed)
    trace = list[Arrival]()
    for number in range(rng.randint(1, 5)):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 13])))
        turn = rng.randint(0, 8) if number else 0
        end = turn + rng.randint(1, 6) if number and rng.random() < 0.3 else -1
        trace.append(Arrival(turn, prompt, rng.randint(1, 6), rng.choice(METHODS), number, end))
    return trace


class Schedule(NamedTuple):
    """What came of a trace.

    texts  tokens of each request; None: it was cancelled before it ended
    rows   positions of each request in all passes
    """

    texts: list[list[int] | None]
    rows: list[int]
    pass_log: list[SharedPass]


def run_trace(policy: Policy, trace: Sequence[Arrival]) -> Schedule:
    """Run the requests of a trace under a policy."""
    tickets: dict[int, Ticket[int]] = {}
    arrivals = Arrivals(policy, trace, tickets)
    with arrivals.scheduler as scheduler:
        while len(tickets) < len(trace):  # where nobody runs, time goes on to the next arrival
            with scheduler.together():
                due = min(one.turn for n, one in enumerate(trace) if n not in tickets)
                scheduler.turn = max(scheduler.turn, due)
                arrivals.let_arrive(scheduler.turn)
            scheduler.join(SECONDS)
        texts = list[list[int] | None]()
        for number in range(len(trace)):
            text = list[int]()
            with suppress(RequestCancelled):
                text.extend(token for token in tickets[number])
            texts.append(None if tickets[number].error is not None else text)
    rows = [count_rows(scheduler.pass_log, tickets[n].number) for n in range(len(trace))]
    return Schedule(texts, rows, list(scheduler.pass_log))


def count_rows(pass_log: Iterable[SharedPass], number: int) -> int:
    """Return how many rows a request had in all passes."""
    return sum(
        rows
        for entry in pass_log
        for request, rows in zip(entry.requests, entry.rows, strict=True)
        if request == number
    )


@collect_evidence(SCHEDULED_ALONE)
def scheduled_request_is_alone(make: Callable[[], Policy], seeds: Sequence[int]) -> Iterator[int]:
    """Check texts, conservation of rows, and that the same arrivals give the same schedule."""
    for seed in seeds:
        trace = random_trace(seed)
        got = run_trace(make(), trace)
        ran = [sum(record.rows for record in one.log) for one in trace]
        case: dict[str, Any] = {
            "arrivals": [(one.turn, one.prompt, one.n, one.method) for one in trace],
            "cancelled": [one.cancelled for one in trace],
        }
        for number, (one, text) in enumerate(zip(trace, got.texts, strict=True)):
            if text is not None:
                alone = list(one.decode(None))
                expect_equal(SCHEDULED_ALONE, alone, text, **case, request=number)
        expect_equal(SCHEDULED_ALONE, ran, got.rows, **case, compared="rows that ran")
        again = run_trace(make(), random_trace(seed))
        expect_equal(SCHEDULED_ALONE, got, again, **case, compared="the same arrivals again")
        yield 0
