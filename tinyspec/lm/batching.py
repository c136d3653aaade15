"""Batch the forward passes of several requests, by a barrier in front of `Transformer.forward`.

Each request runs its own decoding loop in a thread of its own, as if it were alone. Its forward
passes wait at the barrier until every other live request waits there too, or has finished. Then
all waiting feeds run as one ragged forward pass for each model, and each loop continues with its
own scores. So every technique can be batched without knowing it. If one request drafts while
another verifies, their two models make one forward pass each.

Only the thread that arrives last computes; the others sleep. The result does not depend on which
thread is scheduled first: feeds run in the order of the jobs.

A request may start others, which join the next shared pass. Streams of *one* request decide what
the others do (how many more may start), so they take turns: between two passes one thread runs
after the other, in the order of their numbers, and a run can be repeated decision by decision.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from tinyspec.lm.forward import ForwardBatch, ForwardFn, Scores
from tinyspec.lm.transformer import Transformer

T = TypeVar("T")


class BatchAborted(Exception):
    """Raised in a request when another request of the batch failed."""


class BatchBarrier:
    """A barrier for `workers` requests. Each runs inside `with barrier.run_as_worker(i):`.

    in_turns  between two passes, workers run one after the other, in the order of their numbers
    passes    shared passes so far
    threads   those that `start` began;  results: what their jobs returned, by number
    """

    def __init__(self, workers: int = 0, in_turns: bool = False):
        self.alive = set(range(workers))
        self.in_turns, self.passes = in_turns, 0
        self.threads: list[threading.Thread] = []
        self.results: dict[int, Any] = {}
        self._numbers = count(workers)
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Transformer, Sequence[ForwardBatch]]] = {}
        self._done: dict[int, list[Scores]] = {}
        self._local = threading.local()

    def run_as_worker(self, number: int) -> AbstractContextManager[None]:
        """Make this thread the worker of that number until the block ends, or raises."""
        return _Worker(self, number)

    def forward_of(self, model: Transformer) -> ForwardFn:
        """Return the forward function that a session of `model` uses instead of its own."""
        return lambda feeds: self._forward(model, feeds)

    def start(self, jobs: Sequence[Callable[["BatchBarrier"], Any]]) -> None:
        """Start each job in a thread of its own. The next pass waits for all of them.

        A job that runs may start others.
        """
        with self._changed:
            numbers = [next(self._numbers) for _ in jobs]
            self.alive.update(numbers)
        threads = [
            threading.Thread(target=self._work, args=(number, job), daemon=True)
            for number, job in zip(numbers, jobs, strict=True)
        ]
        self.threads += threads
        for thread in threads:
            thread.start()

    def _work(self, number: int, job: Callable[["BatchBarrier"], Any]) -> None:
        try:
            with self.run_as_worker(number):
                self.results[number] = job(self)
        except BaseException:  # the barrier keeps the first; it is raised in the caller's thread
            return

    def abort(self, failure: BaseException) -> None:
        """Abort the batch: every thread that waits, or comes later, gets `BatchAborted`."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def _forward(self, model: Transformer, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        number: int | None = getattr(self._local, "number", None)
        if number is None:  # a session that outlived the batch, or warms up before it
            return model.forward(feeds)
        with self._changed:
            self._waiting[number] = (model, feeds)
            self._run_if_complete()
            self._wait_for_turn(number, lambda: number in self._done)
            return self._done.pop(number)

    def _wait_for_turn(self, number: int, is_ready: Callable[[], bool]) -> None:
        """Wait until a worker may go on. Raise `BatchAborted` if the batch failed meanwhile.

        In turns, the first of those that do not wait for a pass goes on. The caller holds the lock.
        """

        def may_go_on() -> bool:
            if self.failure is not None:
                return True
            first = not self.in_turns or number == min(self.alive - self._waiting.keys())
            return is_ready() and first

        if self.in_turns:
            self._changed.notify_all()  # it may be another's turn
        self._changed.wait_for(may_go_on)
        if self.failure is not None:
            raise BatchAborted from self.failure

    def _run_if_complete(self) -> None:
        """Run what waits, one forward pass per model, if every live request waits.

        The caller holds the lock.
        """
        if not self._waiting or self._waiting.keys() != self.alive or self.failure is not None:
            return
        batches: dict[int, list[int]] = {}
        for number in sorted(self._waiting):
            batches.setdefault(id(self._waiting[number][0]), []).append(number)
        try:
            for numbers in batches.values():
                model = self._waiting[numbers[0]][0]
                feeds = [feed for number in numbers for feed in self._waiting[number][1]]
                scores = iter(model.forward(feeds))
                for number in numbers:
                    self._done[number] = [next(scores) for _ in self._waiting[number][1]]
        except BaseException as error:
            self.failure = error
        self._waiting = {}
        self.passes += 1
        self._changed.notify_all()

    def _remove_worker(self, number: int) -> None:
        with self._changed:
            self.alive.discard(number)
            self._run_if_complete()
            if self.in_turns:
                self._changed.notify_all()


class _Worker:
    def __init__(self, barrier: BatchBarrier, number: int):
        self.barrier, self.number = barrier, number

    def __enter__(self) -> None:
        self.barrier._local.number = self.number
        if self.barrier.in_turns:
            with self.barrier._changed:
                self.barrier._wait_for_turn(self.number, lambda: True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.barrier._local.number = None
        if error is not None:
            self.barrier.abort(error)
        self.barrier._remove_worker(self.number)


def run_together(
    jobs: Sequence[Callable[[BatchBarrier], T]], barrier: BatchBarrier | None = None
) -> list[T]:
    """Run every job in a thread of its own, batch their forward passes, and return their results.

    The results stand in the order of the jobs, then those of the jobs that they started. The first
    failure, or Ctrl-C, ends all jobs and is raised here.
    """
    barrier = BatchBarrier() if barrier is None else barrier
    threads = barrier.threads  # grows where a job starts others
    try:
        barrier.start(jobs)
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)  # a timeout lets Ctrl-C in
    except BaseException as stopped:
        barrier.abort(stopped)
        for thread in threads:
            if thread.ident is not None:
                thread.join(5)
        raise
    if barrier.failure is not None:
        raise barrier.failure
    return [barrier.results[number] for number in sorted(barrier.results)]
