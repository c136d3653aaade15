"""Batch the forward passes of several requests, by a barrier in front of `Transformer.forward`.

Each request runs its own decoding loop in a thread of its own, as if it were alone. Its forward
passes wait at the barrier until every other live request waits there too, or has finished. Then
all waiting feeds run as one ragged forward pass for each model, and each loop continues with its
own scores. So every technique can be batched without knowing it. If one request drafts while
another verifies, their two models make one forward pass each.

Only the thread that arrives last computes; the others sleep. The result does not depend on which
thread is scheduled first: feeds run in the order of the jobs.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

from tinyspec.lm.forward import ForwardBatch, ForwardFn, Scores
from tinyspec.lm.transformer import Transformer

T = TypeVar("T")


class BatchAborted(Exception):
    """Raised in a request when another request of the batch failed."""


class BatchBarrier:
    """A barrier for `workers` requests. Each runs inside `with barrier.run_as_worker(i):`."""

    def __init__(self, workers: int):
        self.alive = set(range(workers))
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
            self._changed.wait_for(lambda: number in self._done or self.failure is not None)
            if self.failure is not None:
                raise BatchAborted from self.failure
            return self._done.pop(number)

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
        self._changed.notify_all()

    def _remove_worker(self, number: int) -> None:
        with self._changed:
            self.alive.discard(number)
            self._run_if_complete()


class _Worker:
    def __init__(self, barrier: BatchBarrier, number: int):
        self.barrier, self.number = barrier, number

    def __enter__(self) -> None:
        self.barrier._local.number = self.number

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


def run_together(jobs: Sequence[Callable[[BatchBarrier], T]]) -> list[T]:
    """Run every job in a thread of its own, batch their forward passes, and return their results.

    The results stand in the order of the jobs. The first failure, or Ctrl-C, ends all jobs and is
    raised here.
    """
    barrier = BatchBarrier(len(jobs))
    results: dict[int, T] = {}

    def work(number: int) -> None:
        try:
            with barrier.run_as_worker(number):
                results[number] = jobs[number](barrier)
        except BaseException:  # the barrier keeps the first; it is raised in the caller's thread
            return

    threads = [
        threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))
    ]
    try:
        for thread in threads:
            thread.start()
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
    return [results[number] for number in range(len(jobs))]
