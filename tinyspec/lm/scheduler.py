"""Run many requests on shared forward passes: a scheduler in front of `Transformer.forward`.

Each request runs its own decoding loop in a thread of its own, as if it were alone. Its forward
passes wait here until every other live request waits, too, or has ended. Then a policy
(policies.py) picks which of them run. These run as one ragged forward pass for each model, and
their loops go on with their own scores. The others wait for the next turn. So every technique can
be batched without knowing it. If one request drafts while another verifies, their two models make
one forward pass each.

Between two passes the loops run one after the other, in the order of the requests' numbers. Python
runs one thread at a time anyway, and threads that compete for its lock lose time.

A request may arrive, end, fail or be cancelled at any time. The others notice nothing: on a CPU no
row of the compiled transformer depends on what is computed beside it. A request that fails ends
alone.

A schedule is a function of the arrivals and the past, because a policy is asked only when every
live request waits. So it does not matter which thread is faster, and a run can be repeated and
simulated. The pass log (`Scheduler.pass_log`) says who shared which pass. A request may submit
others, which join the next pass.

Requests may decide something together, as the length of their drafts: they ask a `BatchRule`, which
answers when every live request waits.
"""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.engine import NextTokenFn
from tinyspec.lm.forward import Cache, ForwardBatch, ForwardRecord, Scores
from tinyspec.lm.policies import LockstepPolicy, Pending, Policy
from tinyspec.lm.transformer import Transformer

T = TypeVar("T")
JOIN_SECONDS = 5.0  # to wait for cancelled requests: each ends at its next pass
MOST_RULES = 64  # rules that are kept: each client of a server may ask for another


class RequestCancelled(Exception):
    """Raised in a request that was cancelled, at its next forward pass."""


class SharedPass(NamedTuple):
    """An entry of the pass log: one forward pass, and whose rows ran in it.

    turn       passes that were picked together have the same turn; they differ in their models
    requests   [n] numbers of the requests, in the order of their rows
    rows       [n] how many rows each of them has
    cached     [n] slots of the cache that its rows may read, their own among them
    heads      [n] rows whose logits were computed
    prefill    [n] whether its rows belong to a prompt
    """

    turn: int
    model: str
    requests: tuple[int, ...]
    rows: tuple[int, ...]
    cached: tuple[int, ...]
    heads: tuple[int, ...]
    prefill: tuple[bool, ...]


class Event(NamedTuple):
    """What a request yielded, or that it has ended."""

    ticket: "Ticket[Any]"
    item: Any = None
    is_end: bool = False


class Ticket(Generic[T]):
    """A submitted request. Iterate it for what its job yields, as it comes.

    number  requests count in the order of their arrival
    slots   positions of the cache that are reserved for it
    events  where its items go; a reader may collect those of several requests in one queue
    error   why it ended early: what its job raised, or `RequestCancelled`
    may_go_on  wakes its thread

    It `is_decoding` from its first pass after the prompt, or its first question to a rule.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        number: int,
        job: "Job[T]",
        slots: int,
        events: "SimpleQueue[Event] | None",
    ):
        self.scheduler, self.number, self.job, self.slots = scheduler, number, job, slots
        self.events: SimpleQueue[Event] = SimpleQueue() if events is None else events
        self.may_go_on = threading.Condition(scheduler.lock)
        self.error: BaseException | None = None
        self.is_cancelled = self.is_done = self.is_decoding = False

    def __iter__(self) -> Iterator[T]:
        """Yield the items. An error of the job is raised here."""
        while not (event := self.events.get()).is_end:
            yield event.item
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """End the request at its next forward pass; at once, if it still waits to start."""
        self.scheduler.cancel(self)

    def check_running(self) -> None:
        """Raise RequestCancelled if it was cancelled."""
        if self.is_cancelled:
            raise RequestCancelled

    def end(self, error: BaseException | None) -> None:
        """Note that it has ended, and why."""
        self.error, self.is_done = error, True
        self.events.put(Event(self, is_end=True))


Job = Callable[["Scheduler"], Iterable[T]]
"""Run a request: its sessions compute through the scheduler."""


class BatchRule(Protocol):
    """Decides for several requests at one moment.

    It is asked when every live request waits, so it may run forward passes of its own.
    """

    def decide(self, questions: Mapping[int, Any], n_decoding: int) -> Mapping[int, Any]:
        """Return an answer for each question. Both are by the number of the request, in order.

        n_decoding  live requests whose prompt is read, those that ask among them
        """


@dataclass(eq=False)
class _Wait:
    """A request that waits. Its result wakes it: what it waited for, or an error."""

    ticket: Ticket[Any]
    is_picked: bool = False
    is_ready: bool = False
    result: Any = None

    def end(self, result: Any) -> None:
        self.result, self.is_picked, self.is_ready = result, True, True

    def get(self) -> Any:
        """Return the result, or raise the error."""
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@dataclass(eq=False)
class _Question(_Wait):
    """A request that waits for the answer of a rule."""

    name: Hashable = field(kw_only=True)
    make: Callable[[], BatchRule] = field(kw_only=True)
    question: Any = None


@dataclass(eq=False)
class _PassWait(_Wait):
    """A request that waits for a forward pass."""

    model: Transformer = field(kw_only=True)
    feeds: Sequence[ForwardBatch] = ()
    held: int = 0  # turns in which it was not picked

    def describe(self) -> Pending:
        rows, model = sum(len(feed.tokens) for feed in self.feeds), self.model
        can_be_cut = len(self.feeds) == 1 and self.feeds[0].prefill
        return Pending(self.ticket.number, model.name, model.n_weights, rows, can_be_cut, self.held)


class Scheduler:
    """Requests that share forward passes.

    policy     picks the passes of a turn; None: all that wait
    max_live   how many requests run at once; the others wait for a place, first come first served
    max_slots  positions of the cache that live requests may reserve, all together
    log_size   how many passes the log keeps; None: all
    turn       turns so far
    lock       held while any of this changes
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        max_live: int | None = None,
        max_slots: int | None = None,
        log_size: int | None = None,
    ):
        self.policy = LockstepPolicy() if policy is None else policy
        self.max_live, self.max_slots = max_live, max_slots
        self.turn = 0
        self.pass_log: deque[SharedPass] = deque(maxlen=log_size)
        self._numbers = count()
        self._queue: deque[Ticket[Any]] = deque()
        self._live: dict[int, Ticket[Any]] = {}
        self._waiting: dict[int, _Wait] = {}
        self._rules: dict[Hashable, BatchRule] = {}
        self._alone: int | None = None  # the only live request when a pass was last picked
        self._threads: list[threading.Thread] = []
        self._is_computing = self._is_closed = False
        self.lock = threading.RLock()
        self._ended = threading.Condition(self.lock)  # a request has ended
        self._computed = threading.Condition(self.lock)  # a thread computes no more
        self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ requests

    def submit(
        self, job: Job[T], *, slots: int = 0, events: "SimpleQueue[Event] | None" = None
    ) -> Ticket[T]:
        """Run a job in a thread of its own, as soon as there is a place. A job may submit others.

        slots   positions of the cache that it needs at most
        events  where its items go; None: into a queue of its own
        """
        with self.lock:
            if self._is_closed:
                raise TinyspecError("the scheduler is closed: it takes no more requests")
            if self.max_slots is not None and slots > self.max_slots:
                raise TinyspecError(
                    f"the request needs {slots} positions of the cache, and all requests together "
                    f"have {self.max_slots}: shorten it, or raise max_slots"
                )
            ticket = Ticket(self, next(self._numbers), job, slots, events)
            self._queue.append(ticket)
            self._admit()
        return ticket

    def together(self) -> AbstractContextManager[Any]:
        """Submit several requests at one moment: until the block ends, no pass begins."""
        return self.lock

    def cancel(self, *tickets: Ticket[Any]) -> None:
        """End these requests at their next forward pass; at once, if they still wait to start."""
        with self.lock:
            for ticket in tickets:
                ticket.is_cancelled = not ticket.is_done
                self._waiting.pop(ticket.number, None)
                ticket.may_go_on.notify()
                if ticket in self._queue:
                    self._queue.remove(ticket)
                    ticket.end(RequestCancelled())
            self._admit()  # it may have been in the way of smaller ones
            self._ended.notify_all()

    def cancel_all(self) -> None:
        """Cancel all requests, and wait up to JOIN_SECONDS until they have ended."""
        with self.lock:
            self.cancel(*self._queue, *self._live.values())
        self.join(JOIN_SECONDS)

    def close(self) -> None:
        """Cancel all requests, and take no more."""
        with self.lock:
            self._is_closed = True
        self.cancel_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until every request has ended, those that requests submit among them.

        Returns False if they have not after `timeout` seconds.
        """
        with self.lock:
            if not self._ended.wait_for(lambda: not (self._live or self._queue), timeout):
                return False
            threads = [one for one in self._threads if one is not threading.current_thread()]
        for thread in threads:
            thread.join()
        return True

    @property
    def live(self) -> int:
        """Return how many requests run."""
        return len(self._live)

    @property
    def queued(self) -> int:
        """Return how many requests wait for a place."""
        return len(self._queue)

    def is_alone(self) -> bool:
        """Return whether the request that asks was the only one when a pass was last picked.

        Whether it is at this moment would depend on how fast the threads of others are.
        """
        ticket: Ticket[Any] | None = getattr(self._local, "ticket", None)
        return ticket is not None and ticket.number == self._alone

    def _admit(self) -> None:
        """Start queued requests, the oldest first, while there is a place. The lock is held."""
        while self._queue:
            slots = sum(ticket.slots for ticket in (*self._live.values(), self._queue[0]))
            if self.max_live is not None and len(self._live) >= self.max_live:
                return
            if self.max_slots is not None and slots > self.max_slots:
                return
            ticket = self._queue.popleft()
            self._live[ticket.number] = ticket
            thread = threading.Thread(target=self._work, args=(ticket,), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads
                del self._live[ticket.number]
                ticket.end(error)
                self._ended.notify_all()
            else:
                self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _work(self, ticket: Ticket[Any]) -> None:
        self._local.ticket, error = ticket, None
        try:
            self._wait_for_turn(ticket)
            for item in ticket.job(self):
                ticket.events.put(Event(ticket, item))
        except BaseException as raised:  # whoever reads the ticket gets it
            error = raised
            traceback.clear_frames(raised.__traceback__)  # else they hold sessions and their caches
        with self.lock:
            ticket.end(error)
            del self._live[ticket.number]
            self._admit()
            self._run_if_all_wait()
            self._ended.notify_all()

    # ------------------------------------------------------------------ forward passes

    def forward_of(self, model: Transformer) -> "ScheduledForward":
        """Return the forward function that a session of `model` uses instead of its own."""
        return ScheduledForward(self, model)

    def forward(self, model: Transformer, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        """Run feeds in a pass that other requests share. Of a prompt, perhaps the first rows only.

        Raises `RequestCancelled` in a request that was cancelled.
        """
        ticket: Ticket[Any] | None = getattr(self._local, "ticket", None)
        with self.lock:
            if ticket is None:  # a session that outlived its request, or warms up before it
                self._computed.wait_for(lambda: not self._is_computing)
                try:
                    with self._compute():
                        return model.forward(feeds)
                finally:
                    self._run_if_all_wait()  # they could not while this thread computed
            ticket.check_running()
            scores: list[Scores] = self._wait_for(_PassWait(ticket, model=model, feeds=feeds))
            return scores

    def consult(self, name: Hashable, make: Callable[[], BatchRule], question: Any) -> Any:
        """Ask a rule that requests share, and return its answer.

        name  of the rule: those who ask under one name ask the same rule
        make  makes the rule; of those who ask first together, the oldest request makes it
        """
        ticket: Ticket[Any] = self._local.ticket
        with self.lock:
            ticket.check_running()
            return self._wait_for(_Question(ticket, name=name, make=make, question=question))

    def _wait_for(self, wait: _Wait) -> Any:
        """Wait until a request has its result, and return it. The lock is held."""
        self._waiting[wait.ticket.number] = wait
        self._run_if_all_wait()
        self._wait_for_turn(wait.ticket, wait)
        return wait.get()

    def run_chain(
        self,
        model: Transformer,
        cache: Cache,
        token: int,
        slot: int,
        most: int,
        choose: NextTokenFn,
        forward_log: list[ForwardRecord],
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Run `Transformer.run_chain`. Who arrives or is cancelled meanwhile waits for its end."""
        ticket: Ticket[Any] = self._local.ticket
        with self.lock:
            ticket.check_running()
            self._computed.wait_for(lambda: not self._is_computing)
            with self._compute():
                ran = model.run_chain(cache, token, slot, most, choose, forward_log)
            for at in range(slot, slot + len(ran)):
                entry = (ticket.number,), (1,), (at + 1,), (1,), (False,)
                self.pass_log.append(SharedPass(self.turn, model.name, *entry))
                self.turn += 1
        return ran

    def _wait_for_turn(self, ticket: Ticket[Any], wait: _Wait | None = None) -> None:
        """Wait until a request may go on: its pass has run, and no one is before it."""

        def may_go_on() -> bool:
            is_picked = wait is not None and wait.is_picked
            if ticket.is_cancelled and not is_picked:
                return True
            return self._find_next() is ticket and (wait is None or wait.is_ready)

        with self.lock:
            ticket.may_go_on.wait_for(may_go_on)
            ticket.check_running()

    def _find_next(self) -> Ticket[Any] | None:
        """Return the first live request that does not wait for a result; None: all do."""
        number = min(self._live.keys() - self._waiting.keys(), default=None)
        return None if number is None else self._live[number]

    def _run_if_all_wait(self) -> None:
        """Answer questions; where there are none, run what the policy picks. The lock is held.

        Then wake the next request. Nothing runs while a live request does not wait: it may want to
        take part. If the policy cancels all that it picked, it is asked again about the others.
        """
        while self._waiting and not self._is_computing and len(self._waiting) == len(self._live):
            asked = [one for one in self._waiting.values() if isinstance(one, _Question)]
            if asked:
                self._answer(asked)
                continue
            try:
                picked = self._pick()
            except BaseException as error:  # a policy that fails ends those that wait for it
                for wait in self._waiting.values():
                    wait.end(error)
                self._waiting = {}
                break
            self._alone = next(iter(self._live)) if len(self._live) == 1 else None
            with self._compute():
                results = [(waits, self._run_pass(waits)) for waits in picked]
            for waits, ran in results:  # all of a turn go on at one moment
                for wait, result in zip(waits, ran, strict=True):
                    wait.end(result)
            self.turn += 1
        if (ticket := self._find_next()) is not None:
            ticket.may_go_on.notify()

    def _answer(self, asked: Sequence[_Question]) -> None:
        """Let each rule answer those that ask it. An error of a rule is raised in all of them."""
        by_rule: dict[Hashable, list[_Question]] = {}
        for one in sorted(asked, key=lambda one: one.ticket.number):
            self._waiting.pop(one.ticket.number).is_picked = True
            one.ticket.is_decoding = True
            by_rule.setdefault(one.name, []).append(one)
        answers: dict[int, Any] = {}
        n_decoding = sum(ticket.is_decoding for ticket in self._live.values())
        with self._compute():
            for name, its in by_rule.items():
                questions = {one.ticket.number: one.question for one in its}
                try:
                    rule = self._rules.pop(name) if name in self._rules else its[0].make()
                    self._rules[name] = rule
                    answers |= rule.decide(questions, n_decoding)
                except BaseException as error:
                    answers |= dict.fromkeys(questions, error)
        for name in [*self._rules][:-MOST_RULES]:  # those that nobody has asked for longest
            del self._rules[name]
        for one in asked:
            one.end(answers[one.ticket.number])

    def _pick(self) -> list[list[_PassWait]]:
        """Return the waiting requests whose passes run now, those of one model together."""
        passes = {n: one for n, one in self._waiting.items() if isinstance(one, _PassWait)}
        waiting = {number: wait.describe() for number, wait in passes.items()}
        granted = self.policy.pick([waiting[number] for number in sorted(waiting)])
        self._check_picked(waiting, granted)
        batches: dict[int, list[_PassWait]] = {}
        for number in sorted(granted):
            if number not in self._waiting:  # it was cancelled meanwhile
                continue
            wait = passes.pop(number)
            self._waiting.pop(number).is_picked = True
            wait.ticket.is_decoding = not waiting[number].is_prefill
            if granted[number] < waiting[number].rows:
                wait.feeds = [wait.feeds[0].first_rows(granted[number])]
            batches.setdefault(id(wait.model), []).append(wait)
        for wait in passes.values():
            wait.held += 1
        return list(batches.values())

    def _check_picked(self, waiting: Mapping[int, Pending], granted: Mapping[int, int]) -> None:
        """Raise RuntimeError unless a policy picked what can run."""
        policy = type(self.policy).__name__
        if not granted:
            raise RuntimeError(f"{policy} picked no pass")
        for number, n in granted.items():
            if number not in waiting:
                raise RuntimeError(f"{policy} picked request {number}, which does not wait")
            rows, can_be_cut = waiting[number].rows, waiting[number].is_prefill
            if not (0 < n < rows and can_be_cut) and n != rows:
                raise RuntimeError(
                    f"{policy} picked {n} of {rows} rows of request {number}: "
                    + ("of a prompt, at least one must run" if can_be_cut else "they run together")
                )

    def _run_pass(self, waits: Sequence[_PassWait]) -> list[list[Scores] | BaseException]:
        """Run the feeds of some requests in one forward pass of their model; return their results.

        If it fails, each request runs alone, so that only those fail that cannot run at all.
        """
        model = waits[0].model
        feeds = [feed for wait in waits for feed in wait.feeds]
        try:
            scores = iter(model.forward(feeds))
        except BaseException as error:
            if len(waits) == 1:
                return [error]
            return [result for wait in waits for result in self._run_pass([wait])]
        entry = SharedPass(
            turn=self.turn,
            model=model.name,
            requests=tuple(wait.ticket.number for wait in waits for _ in wait.feeds),
            rows=tuple(len(feed.tokens) for feed in feeds),
            cached=tuple(feed.n_slots for feed in feeds),
            heads=tuple(len(feed.heads) for feed in feeds),
            prefill=tuple(feed.prefill for feed in feeds),
        )
        self.pass_log.append(entry)
        return [[next(scores) for _ in wait.feeds] for wait in waits]

    @contextmanager
    def _compute(self) -> Iterator[None]:
        """Release the lock while this thread computes. Until the block ends, no other computes."""
        self._is_computing = True
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()
            self._is_computing = False
            self._computed.notify_all()


class ScheduledForward:
    """The forward function of one model behind a scheduler: see `Scheduler.forward`."""

    def __init__(self, scheduler: Scheduler, model: Transformer):
        self.scheduler, self.model = scheduler, model

    def __call__(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        return self.scheduler.forward(self.model, feeds)

    @property
    def is_alone(self) -> bool:
        """Return `Scheduler.is_alone` for the request that asks."""
        return self.scheduler.is_alone()

    @property
    def most_rows(self) -> int:
        """Return how many rows of a prompt a pass takes at most: more are prepared in vain."""
        rows: int = getattr(self.scheduler.policy, "most_rows", sys.maxsize)
        return rows

    def run_chain(self, *arguments: Any) -> list[tuple[int, Tensor, Tensor]]:
        """Run one position after another: see `Transformer.run_chain`."""
        return self.scheduler.run_chain(self.model, *arguments)


def run_together(
    jobs: Sequence[Callable[[Scheduler], T]], scheduler: Scheduler | None = None
) -> list[T]:
    """Run every job as a request, and return what they return, in their order.

    It ends when the requests that they submit have ended, too. The first failure, or Ctrl-C, ends
    all and is raised here.
    """
    scheduler = Scheduler() if scheduler is None else scheduler
    events, results, failure = SimpleQueue[Event](), dict[int, T](), list[BaseException]()

    def run(job: Callable[[Scheduler], T], its: Scheduler) -> Iterable[T]:
        return [job(its)]

    try:
        with scheduler.together():
            tickets = [scheduler.submit(partial(run, job), events=events) for job in jobs]
        for _ in range(2 * len(tickets)):  # a result and an end of each
            ticket, item, is_end = events.get()
            if not is_end:
                results[ticket.number] = item
                continue
            if ticket.error is not None:
                failure.append(ticket.error)
                break
        else:
            scheduler.join()
    finally:
        scheduler.cancel_all()
    if failure:
        raise failure[0]
    return [results[ticket.number] for ticket in tickets]
