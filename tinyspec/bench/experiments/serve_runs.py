"""Run a trace of requests under a policy: on a real model, or under a simulated clock.

A trace says when requests arrive, how long their prompts are, and how many tokens they want. A
request reads its prompt, and then decodes plainly and greedily. What its tokens say does not
matter.

    real       a thread submits each request at its time, whatever the others do (an open loop)
    simulated  the same scheduler and policy run a tiny transformer with the same context. The clock
               goes on by the costs of each forward pass, times a factor that is drawn from the
               spread of equal passes. Where nobody runs, it jumps to the next arrival.

A request that arrives during a pass takes part in the next one. In a simulation it is submitted
from inside the forward pass, so that this is the same.

`PassGrid` times the passes from which the costs are fitted. They run in a scheduler too, and count
from one turn to the next. So the work of Python between two passes is part of them. A pass may be
slower where the last one was of the other kind: one of the two reads a prompt, and one only
decodes. Such a *change* is timed apart. The grid runs in slices between the runs, which also tell
the *pace* of the machine: other work makes all passes slower for a while, and a run is simulated at
the pace of the slices before and after it.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

from tinyspec.bench.arms import Clock, collect_garbage
from tinyspec.bench.plan import ArmSpec
from tinyspec.decoding.costs import PassCosts, PassSample, choose_knots
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch, Scores
from tinyspec.lm.model import Model
from tinyspec.lm.policies import LockstepPolicy, Pending, Policy, fill_budget, split_by_model
from tinyspec.lm.scheduler import Scheduler, SharedPass, Ticket
from tinyspec.lm.session import Session
from tinyspec.lm.transformer import Transformer
from tinyspec.technique import Knob, find_policy, read_settings
from tinyspec.tree import TokenTree

SPREAD = 1 / 3  # standard deviation of the lengths of prompts and answers, against their mean


# ---------------------------------------------------------------------- traces


class Visit(NamedTuple):
    """A request of a trace: seconds from its begin, tokens of the prompt, tokens to write."""

    at: float
    prompt: int
    new: int


def draw_trace(
    n: int, rate: float | None, prompt: float, new: float, room: int, seed: int
) -> list[Visit]:
    """Draw n requests, of normally distributed lengths.

    rate         requests per second, as a Poisson process; None: all arrive at once
    prompt, new  mean lengths
    room         positions of the context; longer prompts are cut
    """
    rng, at, trace = random.Random(seed), 0.0, list[Visit]()
    for _ in range(n):
        at += 0.0 if rate is None else rng.expovariate(rate)
        tokens = min(max(round(rng.gauss(new, SPREAD * new)), 1), room - 1)
        length = max(round(rng.gauss(prompt, SPREAD * prompt)), 1)
        trace.append(Visit(at, min(length, room - tokens), tokens))
    return trace


class ServeRun(NamedTuple):
    """What came of a trace. All times are seconds from its begin.

    times     of each request, when its tokens came
    pass_log  the forward passes;  spans: begin and end of each, where they were simulated
    """

    times: list[list[float]]
    pass_log: list[SharedPass]
    spans: list[tuple[float, float]]


# ---------------------------------------------------------------------- policies


class PrefillFirstPolicy:
    """Run prompts as long as there are any, and decode after that: never both in one pass.

    So does nano-vllm. `budget` has the meaning that it has in `FirstComePolicy`.
    """

    def __init__(self, budget: int = 512):
        self.budget = self.most_rows = budget

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        picked: dict[int, int] = {}
        for own in split_by_model(waiting):
            prompts = [pending for pending in own if pending.is_prefill]
            if prompts:
                picked |= fill_budget(prompts, self.budget, self.budget)
            else:
                picked |= {pending.request: pending.rows for pending in own}
        return picked


PREFILL_FIRST, FCFS = "prefill-first", "fcfs"


def make_policy(label: str) -> Policy:
    """Return a policy by its name and knobs, such as sarathi:budget=64.

    Raises TinyspecError if there is none.
    """
    spec = ArmSpec.parse(label)
    if spec.name == PREFILL_FIRST:
        knobs = (Knob("budget", 512, "rows of a pass", low=1),)
        return PrefillFirstPolicy(**read_settings(PREFILL_FIRST, knobs, dict(spec.knobs)))
    return find_policy(spec.name, **dict(spec.knobs))


# ---------------------------------------------------------------------- runs


def make_job(
    model: Model, visit: Visit, clock: Clock, times: list[float]
) -> Callable[[Scheduler], Iterator[int]]:
    """Return a job that reads a prompt and then decodes. It notes when each token comes."""

    def job(scheduler: Scheduler) -> Iterator[int]:
        session = model.session(scheduler=scheduler)
        session.extend(make_tokens(model, visit.prompt))
        for _ in range(visit.new):
            token = int(session.score(TokenTree()).logits[0].argmax())
            session.commit((), token)
            times.append(clock())
            yield token

    return job


def make_tokens(model: Transformer, n: int) -> list[int]:
    """Return n tokens of some prompt."""
    return [7 * i % model.config.vocab_size for i in range(n)]


def run_real(
    model: Model,
    policy: Policy,
    trace: Sequence[Visit],
    max_live: int,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> ServeRun:
    """Run a trace on a model, in real time."""
    times, tickets = [list[float]() for _ in trace], list[Ticket[int]]()
    collect_garbage()
    with Scheduler(policy, max_live=max_live) as scheduler:
        begun = clock()

        def tell_time() -> float:
            return clock() - begun

        for at, visits in groupby(zip(trace, times, strict=True), lambda one: one[0].at):
            if (left := at - tell_time()) > 0:
                sleep(left)
            with scheduler.together():
                for visit, own in visits:
                    tickets.append(scheduler.submit(make_job(model, visit, tell_time, own)))
        scheduler.join()
    _raise_first_error(tickets)
    return ServeRun(times, list(scheduler.pass_log), [])


def _raise_first_error(tickets: Sequence[Ticket[int]]) -> None:
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error


class SimulatedModel(Model):
    """A transformer that says which forward passes it has run."""

    on_pass: Callable[[Sequence[ForwardBatch]], None]

    def forward(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        scores = super().forward(feeds)
        self.on_pass(feeds)
        return scores


class Simulation:
    """A trace under a policy, with a clock that goes on by the costs of each pass.

    spread  factors of these costs; each pass draws one
    seed    of these draws
    change  seconds of a change: see `find_change`
    now     seconds of the simulated clock
    """

    def __init__(
        self,
        policy: Policy,
        costs: PassCosts,
        trace: Sequence[Visit],
        max_live: int,
        spread: Sequence[float] = (1.0,),
        seed: int = 0,
        change: float = 0.0,
    ):
        self.costs, self.trace, self.now = costs, trace, 0.0
        self.spread, self._rng, self.change = spread, random.Random(seed), change
        self._had_prompt: bool | None = None
        self.scheduler = Scheduler(policy, max_live=max_live)
        self.times = [list[float]() for _ in trace]
        self.tickets, self.spans = list[Ticket[int]](), list[tuple[float, float]]()
        self._expected = deque(zip(trace, self.times, strict=True))
        room = max(visit.prompt + visit.new for visit in trace)
        shape = Config(
            vocab_size=8,
            d_model=8,
            n_layers=1,
            n_heads=1,
            n_kv_heads=1,
            head_dim=8,
            d_ff=8,
            max_positions=room,
        )
        self.model = SimulatedModel(shape, Model.random(shape).weights)
        self.model.on_pass = self._spend

    def run(self) -> ServeRun:
        """Run the whole trace."""
        with self.scheduler as scheduler:
            while self._expected:
                with scheduler.together():  # nobody runs: time jumps to the next arrival
                    self.now = max(self.now, self._expected[0][0].at)
                    self._let_arrive()
                scheduler.join()
        _raise_first_error(self.tickets)
        return ServeRun(self.times, list(scheduler.pass_log), self.spans)

    def _spend(self, feeds: Sequence[ForwardBatch]) -> None:
        """Let the time of a pass go by. Who arrives in it takes part in the next one."""
        begun, heads = self.now, [len(feed.heads) for feed in feeds]
        seconds = self.costs.seconds_of(
            [len(feed.tokens) for feed in feeds], [feed.n_slots for feed in feeds], heads
        )
        if self._had_prompt is not None and self._had_prompt != has_prompt(heads):
            seconds += self.change
        self._had_prompt = has_prompt(heads)
        self.now += self._rng.choice(self.spread) * seconds
        self.spans.append((begun, self.now))
        self._let_arrive()

    def _let_arrive(self) -> None:
        while self._expected and self._expected[0][0].at <= self.now:
            visit, times = self._expected.popleft()
            job = make_job(self.model, visit, lambda: self.now, times)
            self.tickets.append(self.scheduler.submit(job))


def has_prompt(heads: Sequence[int]) -> bool:
    """Return whether a pass reads rows of a prompt: they need no logits."""
    return 0 in heads


def count_changes(pass_log: Sequence[SharedPass]) -> int:
    """Return how often a pass reads a prompt and the next one does not, or the reverse."""
    return sum(has_prompt(a.heads) != has_prompt(b.heads) for a, b in pairwise(pass_log))


# ---------------------------------------------------------------------- measured passes


SESSIONS = (1, 2, 4, 8, 16)
ROWS = (1, 2, 3, 5, 9)  # of each session: its newest token, and draft tokens
CHUNKS = (32, 64, 128, 256)  # rows of a prompt; and LONGEST, or as many as fit
LONGEST = 512
MIXED = ((32, 4), (32, 12), (128, 4), (128, 12))  # a chunk, and sessions that decode beside it
CACHED = (64, 512)  # positions before these rows, where the context has so many
PASSES = 5  # of a cell in a slice: the last one is not timed


class TimedPolicy(LockstepPolicy):
    """Run all that wait, and note when: to measure passes, with the work between them.

    times  of each turn, when it began
    """

    def __init__(self, clock: Clock):
        self.clock, self.times = clock, list[float]()

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        self.times.append(self.clock())
        return super().pick(waiting)


class PassCell(NamedTuple):
    """A kind of pass: rows of each session, and how many of these are chunks of a prompt."""

    rows: tuple[int, ...]
    prompts: int
    cached: int


def list_cells(positions: int) -> list[PassCell]:
    """Return the passes to measure in a context of so many positions."""
    cells = list[PassCell]()
    for cached in sorted({min(CACHED[0], positions // 8), min(CACHED[1], 3 * positions // 4)}):
        cells += [PassCell((k,) * b, 0, cached) for b in SESSIONS for k in ROWS]
        longest = min(LONGEST, positions - cached)
        cells += [PassCell((chunk,), 1, cached) for chunk in sorted({*CHUNKS, longest})]
        cells += [PassCell((chunk, *(1,) * b), 1, cached) for chunk, b in MIXED]
    return [cell for cell in cells if 1 <= cell.cached <= positions - max(cell.rows)]


Slice = list[list[float]]
"""What was timed between two runs: rows of the number of a cell, and seconds of its passes.

The first of these follows the pass of another cell.
"""


class PassGrid:
    """Times passes of several kinds, in slices.

    Slices take the kinds in turn, in an order in which neighbours differ. So all kinds are timed
    equally often over a whole experiment, and a slice tells the pace of the machine.

    knots     of the costs that are fitted to all cells
    order     the cells' numbers, as they take turns
    sessions  by the positions before the rows of a cell
    """

    def __init__(
        self,
        model: Model,
        clock: Clock = time.perf_counter,
        cells: Sequence[PassCell] | None = None,
    ):
        self.cells = list_cells(model.config.max_positions) if cells is None else cells
        self.knots = choose_knots([sum(cell.rows) for cell in self.cells])
        self.order = random.Random(0).sample(range(len(self.cells)), len(self.cells))
        self.policy = TimedPolicy(clock)
        self.scheduler = Scheduler(self.policy, log_size=0)
        self.sessions = dict[int, list[Session]]()
        for cached in {cell.cached for cell in self.cells}:
            most = max(len(cell.rows) for cell in self.cells if cell.cached == cached)
            self.sessions[cached] = [model.session(scheduler=self.scheduler) for _ in range(most)]
            for session in self.sessions[cached]:
                session.extend(make_tokens(model, cached))

    def measure_slice(self, number: int, size: int) -> Slice:
        """Return what was timed of the next `size` cells."""
        collect_garbage()
        places = range(number * size, (number + 1) * size)
        return [[at, *self._time(self.cells[at])] for at in map(self._choose, places)]

    def _choose(self, place: int) -> int:
        return self.order[place % len(self.order)]

    def _time(self, cell: PassCell) -> list[float]:
        first = len(self.policy.times)
        with self.scheduler.together():
            for i, rows in enumerate(cell.rows):
                session, is_prompt = self.sessions[cell.cached][i], i < cell.prompts
                self.scheduler.submit(partial(repeat_pass, session, cell.cached, rows, is_prompt))
        self.scheduler.join()
        return [round(b - a, 7) for a, b in pairwise(self.policy.times[first:])]


def summarize_slices(
    cells: Sequence[PassCell], slices: Sequence[Slice]
) -> tuple[list[PassSample], list[float]]:
    """Return every cell that was timed, with its median and its spread, and each slice's pace.

    The pace is how slow the machine was, against its median. The spread is what is left of a
    cell's times without it.
    """
    times = dict[int, list[float]]()
    for at, _, *seconds in (row for one in slices for row in one):
        times.setdefault(int(at), []).extend(seconds)
    middles = {at: median(own) for at, own in sorted(times.items())}
    paces = [median(median(row[2:]) / middles[int(row[0])] for row in one) for one in slices]
    spread: dict[int, list[float]] = {at: [] for at in middles}
    for one, pace in zip(slices, paces, strict=True):
        for at, _, *seconds in one:
            spread[int(at)] += [round(own / middles[int(at)] / pace, 3) for own in seconds]
    samples = [_describe_cell(cells[at], middles[at], tuple(spread[at])) for at in middles]
    return samples, paces


def find_change(cells: Sequence[PassCell], slices: Sequence[Slice]) -> float:
    """Return by how many seconds a pass is slower where the last one was of the other kind.

    The kinds are: with rows of a prompt, and without. 0 if there was no change, or if it is free.
    """
    slower = [
        row[1] - median(row[2:])
        for one in slices
        for last, row in pairwise(one)
        if (cells[int(last[0])].prompts > 0) != (cells[int(row[0])].prompts > 0)
    ]
    return max(median(slower or [0.0]), 0.0)


def _describe_cell(cell: PassCell, seconds: float, spread: tuple[float, ...]) -> PassSample:
    """Return the pass of a cell: its first row is the last token of the text."""
    cached = tuple(cell.cached - 1 + rows for rows in cell.rows)
    heads = (*(0,) * cell.prompts, *cell.rows[cell.prompts :])
    return PassSample(cell.rows, cached, heads, seconds, spread)


def repeat_pass(
    session: Session, cached: int, rows: int, is_prompt: bool, scheduler: Scheduler
) -> list[Any]:
    """Run so many rows after a text of `cached` tokens, `PASSES` times. A scheduler runs this."""
    tokens = make_tokens(session.model, rows)
    for _ in range(PASSES):
        session.rewind(cached)  # the last token of the text will be the first row
        if is_prompt:
            session.extend(tokens)
        else:
            best = session.score(TokenTree.chain(tokens[1:])).logits.argmax(-1)
            session.commit((), int(best[0]))
    return []
