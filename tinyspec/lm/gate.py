"""Batch the forward passes of several requests, by a barrier in front of `Transformer.forward`.

Every request runs its own decoding loop, as if alone, in a thread of its own. Its forward passes
wait at the gate until every other live request waits there too, or has finished; then all waiting
feeds run as one ragged forward per model, and each loop goes on with its own scores. So every
technique batches without knowing it. Requests that use different models in a round (one drafts, one
verifies) make one forward each.

Only the thread that completes a round computes; the others sleep. Rounds do not depend on which
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
    """A barrier at which `workers` requests meet, each inside `with gate.worker(i):`."""

    def __init__(self, workers: int):
        self.alive = set(range(workers))
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Transformer, Sequence[ForwardBatch]]] = {}
        self._done: dict[int, list[Scores]] = {}
        self._me = threading.local()

    def worker(self, number: int) -> AbstractContextManager[None]:
        """Make this thread the worker of that number until the block ends, or raises."""
        return _Worker(self, number)

    def through(self, model: Transformer) -> ForwardFn:
        """Return what a session of `model` calls in place of `model.forward`."""
        return lambda feeds: self._pass(model, feeds)

    def shut(self, failure: BaseException) -> None:
        """Abort the batch: every thread that waits, or comes later, gets `BatchAborted`."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def _pass(self, model: Transformer, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        number: int | None = getattr(self._me, "number", None)
        if number is None:  # not one of the batch: a session that outlived it, or warms up before
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
                scores = iter(
                    self._waiting[numbers[0]][0].forward(
                        [f for n in numbers for f in self._waiting[n][1]]
                    )
                )
                for number in numbers:
                    self._done[number] = [next(scores) for _ in self._waiting[number][1]]
        except BaseException as error:
            self.failure = error
        self._waiting = {}
        self._changed.notify_all()

    def _leave(self, number: int) -> None:
        with self._changed:
            self.alive.discard(number)
            self._run_if_complete()


class _Worker:
    def __init__(self, gate: BatchBarrier, number: int):
        self.gate, self.number = gate, number

    def __enter__(self) -> None:
        self.gate._me.number = self.number

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.gate._me.number = None
        if error is not None:
            self.gate.shut(error)
        self.gate._leave(self.number)


def run_together(jobs: Sequence[Callable[[BatchBarrier], T]]) -> list[T]:
    """Run every job in a thread of its own, their forwards batched; their results in order.

    The first failure ends all jobs and is raised here, and so does Ctrl-C.
    """
    gate = BatchBarrier(len(jobs))
    results: dict[int, T] = {}

    def work(number: int) -> None:
        try:
            with gate.worker(number):
                results[number] = jobs[number](gate)
        except BaseException:  # the gate keeps the first; it is raised in the caller's thread
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
        gate.shut(stopped)
        for thread in threads:
            if thread.ident is not None:
                thread.join(5)
        raise
    if gate.failure is not None:
        raise gate.failure
    return [results[number] for number in range(len(jobs))]
