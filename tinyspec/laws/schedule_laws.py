"""Laws of a scheduler: which requests share a forward pass changes nothing but when they run.

Random requests arrive, end, fail, and are cancelled while others run, on a small transformer. They
decode plainly or with a draft model, and their prompts differ in length. Some submit others, and
some fail inside a forward pass that others share.

Logits differ by rounding only in float64; in float32 and bfloat16, where the compiled transformer
computes, by no bit.

Whether a pass waits for ever is asked of the policies alone, without threads: simulated requests
arrive without end, and each policy has a bound (`Waited`) that it must keep.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from itertools import count, product
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.parts import Parts
from tinyspec.laws.session_laws import rows_differ
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.policies import AlignedPolicy, FirstComePolicy, LockstepPolicy, Pending, Policy
from tinyspec.lm.scheduler import Scheduler, SharedPass, Ticket
from tinyspec.speculative.integrated.sarathi import SarathiPolicy
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

SCHEDULED_ALONE = "a scheduled request is the request alone"
NO_STANDSTILL = "a schedule comes to its end"
ADMITTED = "requests run as soon as there is a place, the oldest first"
CANCELLED = "a request that is cancelled runs no more"
DECODING = "a rule is told how many requests decode, without those that read a prompt"
HELD = "a policy is told for how many turns a pass was held"
STREAMED = "a reader has each token before its request computes again"
NO_STARVATION = "a waiting pass is picked within the bound of its policy"
SECONDS = 60.0  # a schedule that has not ended by then never does
POLL_SECONDS = 0.02  # between two looks whether a schedule stands still
VOCABULARY = 4
METHODS = ("autoregressive", "speculative_decoding")


@lru_cache
def network(seed: int, dtype: torch.dtype) -> Model:
    """Return a small transformer. All requests share it, so that their passes can be shared."""
    return small_network(seed, VOCABULARY).to(dtype=dtype)


class RequestFailed(Exception):
    """Raised by a request of a trace that fails on purpose."""


@dataclass
class Arrival:
    """A request of a trace.

    turn       the turn in which it arrives
    cancelled  the turn in which it is cancelled; -1: never
    fails      after how many tokens it raises an error; -1: never
    breaks     after how many tokens its next forward pass cannot run; -1: never
    parent     which request submits it, after its own first token; -1: it arrives by itself
    dtype      of its models
    log        the forward passes that it records
    written    how many tokens it has yielded
    logits     of the target, in each of its rounds
    """

    turn: int
    prompt: tuple[int, ...]
    n: int
    method: str
    seed: int
    cancelled: int = -1
    fails: int = -1
    breaks: int = -1
    parent: int = -1
    dtype: torch.dtype = torch.float64
    log: list[ForwardRecord] = field(default_factory=list)
    written: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Positions of the cache that it reserves."""
        return len(self.prompt) + self.n

    @property
    def may_end_by(self) -> str | None:
        """Name of the error by which it may end; None: it ends by itself."""
        if self.cancelled >= 0:
            return "RequestCancelled"
        if self.fails >= 0:
            return "RequestFailed"
        unknown_token = "IndexError" if self.dtype == torch.float64 else "ValueError"
        return unknown_token if self.breaks >= 0 else None

    def decode(self, scheduler: Scheduler | None) -> Iterator[int]:
        """Yield the new tokens; a scheduler shares the passes with other requests."""
        self.log.clear()
        self.logits.clear()
        self.written = 0
        target = network(1, self.dtype).session(self.log, scheduler)
        request = Request(
            target=target,
            drafts=[network(2, self.dtype).session(self.log, scheduler)],
            sampling=SamplingParams(0.8),
            stop=StoppingCriteria(max_new_tokens=self.n),
            forward_log=self.log,
        )
        decoder = find_technique(self.method).make(request)
        decoder.extend(self.prompt)
        for round in decoder.run(Seeded(self.seed)):
            self.logits.append(round.scores.logits)
            for token in round.tokens:
                self.written += 1
                yield token
            if scheduler is not None and 0 <= self.fails <= self.written:
                raise RequestFailed
            if scheduler is not None and 0 <= self.breaks <= self.written:
                target.committed[-1].token = VOCABULARY  # it has no embedding
        decoder.end()


class Arrivals:
    """A policy that asks another one, and lets requests arrive while it is asked.

    It observes what a policy can see, and keeps what is wrong in `broken`: by the name of the law,
    what it expected, what it saw, and in which turn.
    """

    def __init__(
        self,
        policy: Policy,
        trace: Sequence[Arrival],
        max_live: int | None = None,
        max_slots: int | None = None,
    ):
        self.policy, self.trace = policy, trace
        self.max_live, self.max_slots = max_live, max_slots
        self.tickets: dict[int, Ticket[int]] = {}
        self.held: dict[int, int] = {}
        self.cancelled: dict[int, int] = {}
        self.broken: dict[str, tuple[Any, Any, int]] = {}
        self.scheduler = Scheduler(self, max_live=max_live, max_slots=max_slots)

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        self.observe(waiting)
        picked = self.policy.pick(waiting)
        for one in waiting:
            held = self.held.get(one.request, 0) + 1
            self.held[one.request] = 0 if one.request in picked else held
        self.let_arrive(self.scheduler.turn)
        return picked

    def observe(self, waiting: Sequence[Pending]) -> None:
        """Compare what waits with what should."""
        held = {one.request: self.held.get(one.request, 0) for one in waiting}
        self.expect_equal(HELD, held, {one.request: one.held for one in waiting})
        asked = {self.tickets[n].number: n for n in self.tickets}
        written = [self.trace[asked[one.request]].written for one in waiting]
        items = [self.tickets[asked[one.request]].events.qsize() for one in waiting]
        self.expect_equal(STREAMED, written, items)
        due = [ticket for ticket in self.tickets.values() if not ticket.is_done]
        self.expect_equal(ADMITTED, self.admit(due), [one.request for one in waiting])

    def expect_equal(self, law: str, expected: Any, got: Any) -> None:
        """Keep what broke a law first."""
        if expected != got:
            self.broken.setdefault(law, (expected, got, self.scheduler.turn))

    def admit(self, tickets: Iterable[Ticket[int]]) -> list[int]:
        """Return the requests that may run: the oldest, as far as the limits go."""
        admitted, slots = list[int](), 0
        for ticket in sorted(tickets, key=lambda ticket: ticket.number):
            slots += ticket.slots
            is_full = self.max_slots is not None and slots > self.max_slots
            if is_full or len(admitted) == self.max_live:
                break
            admitted.append(ticket.number)
        return admitted

    def let_arrive(self, turn: int) -> None:
        """Submit and cancel what is due at this turn."""
        for number, one in enumerate(self.trace):
            if number not in self.tickets:
                if one.parent < 0 and one.turn <= turn:
                    self.submit(number)
            elif 0 <= one.cancelled <= turn and not self.tickets[number].is_done:
                self.cancelled.setdefault(self.tickets[number].number, turn)
                self.tickets[number].cancel()

    def submit(self, number: int) -> None:
        """Submit a request of the trace. After its first token, it submits its own ones."""

        def run(scheduler: Scheduler) -> Iterator[int]:
            for at, token in enumerate(self.trace[number].decode(scheduler)):
                for other, one in enumerate(self.trace):
                    if not at and one.parent == number:
                        self.submit(other)
                yield token

        with self.scheduler.together():
            self.tickets[number] = self.scheduler.submit(run, slots=self.trace[number].slots)


def random_trace(seed: int, dtype: torch.dtype = torch.float64) -> list[Arrival]:
    """Return some requests; the first one ends by itself, and may submit the last one."""
    rng = random.Random(seed)
    trace = list[Arrival]()
    for number in range(rng.randint(1, 5)):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 13])))
        turn = rng.randint(0, 8) if number else 0
        one = Arrival(turn, prompt, rng.randint(1, 6), rng.choice(METHODS), number, dtype=dtype)
        match rng.choice(["ends", "is cancelled", "fails", "breaks"]) if number else "ends":
            case "is cancelled":
                one.cancelled = turn + rng.randint(1, 6)
            case "fails":
                one.fails = rng.randint(0, 3)
            case "breaks":
                one.breaks = rng.randint(0, 3)
        trace.append(one)
    if seed % 2 and len(trace) > 1:
        trace[-1].parent = 0
    return trace


def random_limits(seed: int) -> dict[str, int | None]:
    """Return how many requests of a trace run at once, and how many positions they may reserve."""
    return {"max_live": (None, 2, 1)[seed % 3], "max_slots": (None, None, 25, 20)[seed % 4]}


class Schedule(NamedTuple):
    """What came of a trace.

    texts   tokens of each request
    errors  names of the errors by which they ended; None: by themselves
    rows    positions that each request ran, and head rows, in all passes
    broken  what broke one of the laws that look at every turn: expected, got, and the turn
    """

    texts: list[list[int]]
    errors: list[str | None]
    rows: list[tuple[int, int]]
    pass_log: list[SharedPass]
    broken: dict[str, tuple[Any, Any, int]]


def run_trace(policy: Policy, trace: Sequence[Arrival], **limits: int | None) -> Schedule:
    """Run the requests of a trace under a policy. Raises LawViolated if they do not end."""
    arrivals = Arrivals(policy, trace, **limits)
    tickets, deadline = arrivals.tickets, time.monotonic() + SECONDS
    with arrivals.scheduler as scheduler:
        while due := [
            one.turn for n, one in enumerate(trace) if n not in tickets and one.parent < 0
        ]:
            with scheduler.together():  # where nobody runs, time goes on to the next arrival
                scheduler.turn = max(scheduler.turn, min(due))
                arrivals.let_arrive(scheduler.turn)
            while not scheduler.join(POLL_SECONDS):
                if stands_still(scheduler) or time.monotonic() > deadline:
                    accuse(NO_STANDSTILL, "an end", "none", **describe_trace(trace), **limits)
    texts, errors, rows = list[list[int]](), list[str | None](), list[tuple[int, int]]()
    absent = [number for number in range(len(trace)) if number not in tickets]
    expect_equal(SCHEDULED_ALONE, [], absent, **describe_trace(trace), compared="who never came")
    for number, one in enumerate(trace):
        ticket = tickets[number]
        texts.append(read_items(ticket))
        errors.append(None if ticket.error is None else type(ticket.error).__name__)
        rows.append(count_rows(scheduler.pass_log, ticket.number))
        arrivals.expect_equal(STREAMED, one.written, len(texts[-1]))
    for entry in scheduler.pass_log:
        late = [n for n in entry.requests if arrivals.cancelled.get(n, math.inf) <= entry.turn]
        arrivals.expect_equal(CANCELLED, [], late)
    return Schedule(texts, errors, rows, list(scheduler.pass_log), arrivals.broken)


def read_items(ticket: Ticket[int]) -> list[int]:
    """Return what a request that has ended yielded. Its error is not raised."""
    events = [ticket.events.get() for _ in range(ticket.events.qsize())]
    return [event.item for event in events if not event.is_end]


def count_awake(scheduler: Scheduler) -> int:
    """Return how many threads of requests do not wait for another one to wake them."""
    with scheduler.lock:
        waking = [scheduler._computed, *(one.may_go_on for one in scheduler._live.values())]
        asleep: list[deque[Any]] = [vars(condition)["_waiters"] for condition in waking]
        return sum(thread.is_alive() for thread in scheduler._threads) - sum(map(len, asleep))


def stands_still(scheduler: Scheduler) -> bool:
    """Return whether requests are left and none of them can go on, at whatever speed."""
    with scheduler.together():
        is_left = bool(scheduler.live or scheduler.queued)
        return is_left and not scheduler._is_computing and count_awake(scheduler) == 0


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
        "pass fails after": [one.breaks for one in trace],
        "submitted by": [one.parent for one in trace],
    }


@collect_evidence(SCHEDULED_ALONE)
def scheduled_request_is_alone(
    make: Callable[[], Policy], seeds: Sequence[int], dtype: torch.dtype = torch.float64
) -> Iterator[int]:
    """Check that each text is the one that its request has alone, as far as it goes.

    So are its logits (`logits_differ`), and its forward log but for how its prompt is cut. Whoever
    ends by itself alone does so here: the failures of others are not its own. A request runs each
    row once. The same arrivals give the same schedule.
    """
    for seed in seeds:
        trace, limits = random_trace(seed, dtype), random_limits(seed)
        case = {**describe_trace(trace), **limits, "dtype": str(dtype)}
        got = run_trace(make(), trace, **limits)
        logs, logits = [list(one.log) for one in trace], [list(one.logits) for one in trace]
        ran = [sum_rows(log) for log in logs]
        expect_equal(SCHEDULED_ALONE, ran, got.rows, **case, compared="rows that ran")
        for number, (one, text, error) in enumerate(zip(trace, got.texts, got.errors, strict=True)):
            if error is not None:
                expect_equal(SCHEDULED_ALONE, one.may_end_by, error, **case, request=number)
            alone = list(one.decode(None))
            shown = len(alone) if error is None else len(text)
            expect_equal(SCHEDULED_ALONE, alone[:shown], text, **case, request=number)
            for rows, rows_alone in zip(logits[number], one.logits, strict=False):
                if logits_differ(rows, rows_alone, dtype):
                    accuse(SCHEDULED_ALONE, rows_alone, rows, **case, request=number)
            if error is None:
                records = [join_chunks(log) for log in (one.log, logs[number])]
                compared = f"forward log of request {number}"
                expect_equal(SCHEDULED_ALONE, *records, **case, compared=compared)
        again = run_trace(make(), random_trace(seed, dtype), **limits)
        expect_equal(SCHEDULED_ALONE, got, again, **case, compared="the same arrivals again")
        yield 0


def sum_rows(log: Iterable[ForwardRecord]) -> tuple[int, int]:
    """Return how many rows ran, and how many of them had logits."""
    records = list(log)
    return sum(one.rows for one in records), sum(one.head_rows for one in records)


def join_chunks(log: Iterable[ForwardRecord]) -> list[ForwardRecord]:
    """Return a forward log in which each prompt is one pass, however it was cut."""
    joined = list[ForwardRecord]()
    for one in log:
        if one.prefill and joined and joined[-1].prefill and joined[-1].model == one.model:
            before = joined.pop()
            counts = [*map(add, before[1:5], one[1:5]), True, before.shared + one.shared]
            one = ForwardRecord(one.model, *counts)
        joined.append(one)
    return joined


def logits_differ(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits differ: in float64 by more than rounding, else by any bit."""
    if dtype == torch.float64:
        return rows_differ(got, expected)
    return not np.array_equal(np.asarray(got), np.asarray(expected))


@collect_evidence(NO_STANDSTILL)
def schedules_end(make: Callable[[], Policy], seeds: Sequence[int]) -> Iterator[int]:
    """Check that every request ends, whoever leaves before it."""
    for seed in seeds:
        run_trace(make(), random_trace(seed), **random_limits(seed))
        yield 0


def check_every_turn(law: str, make: Callable[[], Policy], seeds: Sequence[int]) -> Evidence:
    """Check one of the laws that look at every turn: ADMITTED, CANCELLED, HELD or STREAMED."""

    @collect_evidence(law)
    def check() -> Iterator[int]:
        for seed in seeds:
            trace, limits = random_trace(seed), random_limits(seed)
            broken = run_trace(make(), trace, **limits).broken
            if law in broken:
                expected, got, turn = broken[law]
                accuse(law, expected, got, **describe_trace(trace), **limits, turn=turn)
            yield 0

    return check()


class CountedRule:
    """A rule that keeps what it is told of how many requests decode."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def decide(self, questions: Mapping[int, Any], n_decoding: int) -> Mapping[int, Any]:
        self.told.append(n_decoding)
        return questions


@collect_evidence(DECODING)
def rule_is_told_who_decodes(parts: Parts) -> Iterator[int]:
    """Check what a rule is told while other requests read their prompts, one row in each pass."""
    steps = 4

    def decode(rule: CountedRule, scheduler: Scheduler) -> Iterator[int]:
        session = network(1, torch.float64).session(scheduler=scheduler)
        session.append((1,))
        for _ in range(steps):
            scheduler.consult("count", lambda: rule, None)
            session.score(TokenTree())
            session.commit((), 1)
            yield 1

    def read(scheduler: Scheduler) -> Iterator[int]:
        network(1, torch.float64).session(scheduler=scheduler).extend((1,) * (steps + 9))
        yield 1

    for decoding, reading in product((1, 2), (0, 1, 3)):
        rule = CountedRule()
        with Scheduler(FirstComePolicy(decoding + reading, 1)) as scheduler:
            with scheduler.together():
                for _ in range(decoding):
                    scheduler.submit(partial(decode, rule))
                for _ in range(reading):
                    scheduler.submit(read)
            scheduler.join(SECONDS)
        expect_equal(DECODING, [decoding] * steps, rule.told, decoding=decoding, reading=reading)
        yield 0


# ---------------------------------------------------------------------- no pass waits for ever


class SimulatedPass(NamedTuple):
    """A forward pass of a simulated request. The model with the name "draft" is the smaller one."""

    rows: int
    is_prefill: bool = False
    model: str = "target"


Load = Callable[[int], Sequence[Sequence[SimulatedPass]]]
"""The requests that arrive in a turn: the passes of each, in their order."""


@dataclass
class Waited:
    """How long a pass waited, and what was ahead of it when it began to.

    rows_ahead     that all older requests still had to run on its model
    prompts_ahead  those of them that belong to prompts
    widest         most rows of a pass that cannot be cut: its own, and those of older requests
    decodes        most rows of passes that cannot be cut, in a turn in which it waited
    held           turns in which it was not picked
    """

    pending: Pending
    rows_ahead: int
    prompts_ahead: int
    widest: int
    decodes: int = 0
    held: int = 0


Bound = Callable[[Waited], float]
"""Return the most turns that a pass may be held."""


def simulate_policy(policy: Policy, load: Load, turns: int) -> list[Waited]:
    """Return how long each pass of a load waited, in the order in which they began to."""
    live, waits = dict[int, deque[SimulatedPass]](), dict[int, Waited]()
    seen, number = list[Waited](), count()
    for turn in range(turns):
        live |= {next(number): deque(passes) for passes in load(turn)}
        for request in sorted(live.keys() - waits.keys()):
            seen.append(waits.setdefault(request, begin_to_wait(request, live)))
        waiting = [waits[n].pending._replace(held=waits[n].held) for n in live]
        picked = policy.pick(waiting) if waiting else {}
        for pending in waiting:
            one = waits[pending.request]
            uncut = [p.rows for p in waiting if p.model == pending.model and not p.is_prefill]
            one.decodes = max(one.decodes, sum(uncut))
            one.held += 1
        for request, rows in picked.items():
            waits.pop(request).held -= 1
            first = live[request].popleft()
            if rows < first.rows:
                live[request].appendleft(first._replace(rows=first.rows - rows))
            if not live[request]:
                del live[request]
    return seen


def begin_to_wait(request: int, live: Mapping[int, Sequence[SimulatedPass]]) -> Waited:
    """Return a pass that begins to wait, with what is ahead of it."""
    rows, is_prefill, model = live[request][0]
    weights = 1 if model == "draft" else 9
    older = [one for n in live if n < request for one in live[n] if one.model == model]
    uncut = [one.rows for one in (*older, live[request][0]) if not one.is_prefill]
    return Waited(
        Pending(request, model, weights, rows, is_prefill, held=0),
        rows_ahead=sum(one.rows for one in older),
        prompts_ahead=sum(one.rows for one in older if one.is_prefill),
        widest=max(uncut, default=1),
    )


def bound_first_come(budget: int) -> Bound:
    """Return the bound of first come, first served.

    No one overtakes. So a turn in which a pass is not picked is full of older ones: what comes next
    does not fit, which leaves less than the widest pass.

        rows ahead // max(budget - widest + 1, 1)
    """
    return lambda one: one.rows_ahead // max(budget - one.widest + 1, 1)


def bound_sarathi(budget: int, least: int = 0) -> Bound:
    """Return the bound of SARATHI: none, if decodes may use up the budget and `least` is 0.

    A decoding request is in every pass. A prompt waits while older prompts fill what those leave.

        rows of older prompts // max(budget - rows of decodes, least)
    """

    def bound(one: Waited) -> float:
        if not one.pending.is_prefill:
            return 0
        left = max(budget - one.decodes, least)
        return one.prompts_ahead // left if left else math.inf

    return bound


def bound_by(turns: int) -> Bound:
    """Return a bound that is the same for every pass: the patience of `AlignedPolicy`."""
    return lambda one: turns


BOUNDED: Sequence[tuple[Callable[[], Policy], Bound]] = (
    (LockstepPolicy, bound_by(0)),
    *(
        (partial(FirstComePolicy, budget, chunk), bound_first_come(budget))
        for budget, chunk in ((1, 1), (4, 2), (4, 9), (16, 16))
    ),
    *((partial(AlignedPolicy, patience), bound_by(patience)) for patience in (0, 1, 5)),
    *((partial(SarathiPolicy, budget), bound_sarathi(budget)) for budget in (5, 16)),
    (partial(SarathiPolicy, 1, 2), bound_sarathi(1, 2)),
)
"""Policies that let no pass wait for ever, and their bounds."""

STEP = SimulatedPass(1)


def prefill(rows: int, model: str = "target") -> SimulatedPass:
    """Return the pass that reads a prompt."""
    return SimulatedPass(rows, True, model)


def short_ones_and_a_long_prompt(turn: int) -> Sequence[Sequence[SimulatedPass]]:
    """Return a short request in each turn; in the second one, a long prompt comes with it."""
    return [[prefill(2), STEP], *([[prefill(40), STEP, STEP]] if turn == 1 else [])]


def long_prompts_and_a_short_one(turn: int) -> Sequence[Sequence[SimulatedPass]]:
    """Return a long prompt in each turn, the first the longest; in the second one, a short request.

    It decodes at once, for its prompt has one token.
    """
    return [[prefill(40 if turn == 0 else 20), STEP], *([[STEP, STEP]] if turn == 1 else [])]


def decodes_and_a_long_prompt(turn: int) -> Sequence[Sequence[SimulatedPass]]:
    """Return two requests that decode in each turn; first of all, a long prompt."""
    return [*([[prefill(9), STEP]] if turn == 0 else []), [STEP, STEP], [STEP, STEP]]


def drafts_and_a_target(turn: int) -> Sequence[Sequence[SimulatedPass]]:
    """Return one request that decodes plainly, and in each turn one that drafts."""
    draft = SimulatedPass(1, model="draft")
    return [*([[STEP] * 9] if turn == 0 else []), [draft, draft, SimulatedPass(3)]]


def random_load(seed: int) -> Load:
    """Return requests that arrive at random: with prompts or without, with drafts or without."""

    def arrive(turn: int) -> Sequence[Sequence[SimulatedPass]]:
        rng = random.Random(f"{seed} {turn}")
        requests = list[list[SimulatedPass]]()
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            passes = [prefill(rng.choice([1, 3, 12]), rng.choice(["target", "draft"]))]
            for _ in range(rng.randint(0, 3)):
                passes += [SimulatedPass(1, model="draft")] * rng.randint(0, 2)
                passes.append(SimulatedPass(rng.randint(1, 4)))
            requests.append(passes[rng.randint(0, 1) if passes[1:] else 0 :])
        return requests

    return arrive


LOADS: dict[str, Load] = {
    "short requests without end, one long prompt": short_ones_and_a_long_prompt,
    "long prompts without end, one short request": long_prompts_and_a_short_one,
    "decodes without end, one long prompt": decodes_and_a_long_prompt,
    "drafts without end, one plain request": drafts_and_a_target,
    **{f"random {seed}": random_load(seed) for seed in range(8)},
}
TURNS = 60  # of a simulated load: what waits in all of them waits for ever


@collect_evidence(NO_STARVATION)
def no_pass_starves(make: Callable[[], Policy], bound: Bound) -> Iterator[int]:
    """Check how long each pass waits, whoever arrives without end."""
    for name, load in LOADS.items():
        for one in simulate_policy(make(), load, TURNS):
            if one.held > (most := bound(one)):
                case = {"load": name, "waits": one.pending, "rows ahead": one.rows_ahead}
                accuse(NO_STARVATION, f"at most {most} turns", one.held, **case)
        yield 0


# ---------------------------------------------------------------------- what the museum asks

POLICIES: Sequence[Callable[[], Policy]] = (
    LockstepPolicy,
    partial(FirstComePolicy, 2, 2),
    partial(AlignedPolicy, 2),
    partial(SarathiPolicy, 3),
)
SEEDS = range(12)  # traces under each policy

PolicyLaw = Callable[[Callable[[], Policy], Sequence[int]], Evidence]


def hold_under_policies(law: PolicyLaw) -> Callable[[Parts], Evidence]:
    """Return a law of schedules as a law of parts: it must hold under every policy."""
    return lambda parts: reduce(add, (law(make, SEEDS) for make in POLICIES))


SCHEDULE_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    SCHEDULED_ALONE: hold_under_policies(scheduled_request_is_alone),
    NO_STANDSTILL: hold_under_policies(schedules_end),
    **{
        law: hold_under_policies(partial(check_every_turn, law))
        for law in (ADMITTED, CANCELLED, HELD, STREAMED)
    },
    DECODING: rule_is_told_who_decodes,
    NO_STARVATION: lambda parts: reduce(
        add, (no_pass_starves(make, bound) for make, bound in BOUNDED)
    ),
}
