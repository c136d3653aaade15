"""Any order of submit, cancel, passes and close on a scheduler, against each request alone.

Texts, logits and forward logs are compared: logits up to rounding in float64, and bit for bit in
float32 and bfloat16, where the compiled transformer computes.

A gate stands before every forward pass. While it is closed, the passes that were picked stand
there and every other request waits, so that a rule acts at one moment of the schedule, however fast
the threads are. Rules open it for some passes.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tinyspec import _core
from tinyspec.errors import TinyspecError
from tinyspec.laws.museum.rows import Mutant
from tinyspec.laws.museum.scheduling import CHUNKS, SHARED
from tinyspec.laws.schedule_laws import (
    METHODS,
    POLICIES,
    SECONDS,
    VOCABULARY,
    Arrival,
    Arrivals,
    count_awake,
    count_rows,
    join_chunks,
    logits_differ,
    network,
    stands_still,
    sum_rows,
)
from tinyspec.lm.scheduler import Scheduler, Ticket

ENDLESS = 1 << 30  # passes: the gate stays open
POLL_SECONDS = 0.002  # between two looks whether all wait
MAX_SLOTS = 24
COMPILED_DTYPES = [] if _core.compute is None else [torch.float32, torch.bfloat16]
DTYPES = [torch.float64, *COMPILED_DTYPES]
NETWORKS = [network(seed, dtype) for seed in (1, 2) for dtype in DTYPES]


class Gate:
    """Lets through as many forward passes as it is told; the next one stands before it."""

    def __init__(self) -> None:
        self.passes, self.is_blocked = 0, False
        self.owner = threading.get_ident()  # its own passes are not held: texts that are alone
        self.changed = threading.Condition()

    def wait(self) -> None:
        """Wait until this pass may run."""
        if threading.get_ident() == self.owner:
            return
        with self.changed:
            self.is_blocked = self.passes == 0
            self.changed.wait_for(lambda: self.passes > 0)
            self.passes, self.is_blocked = self.passes - 1, False

    def open(self, passes: int) -> None:
        with self.changed:
            self.passes += passes
            self.is_blocked = False
            self.changed.notify_all()

    def shut(self) -> None:
        """Let no more through: fewer came than it would have let."""
        with self.changed:
            self.passes = 0


@dataclass(eq=False)
class Submitted:
    """A request: what arrived, its ticket, what was read of it so far, and when it was cancelled."""

    arrival: Arrival
    ticket: Ticket[int]
    items: list[int] = field(default_factory=list)
    cancelled: int | None = None

    def read(self) -> list[int]:
        """Return what it has yielded so far."""
        for _ in range(self.ticket.events.qsize()):
            event = self.ticket.events.get()
            self.items += [] if event.is_end else [event.item]
        return self.items


@cache
def run_alone(prompt: tuple[int, ...], n: int, method: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the text, the logits of each round, and the forward log of a request that is alone."""
    arrival = Arrival(0, prompt, n, method, seed=1, dtype=dtype)
    return list(arrival.decode(None)), arrival.logits, join_chunks(arrival.log)


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)
lengths = st.integers(1, 5)
methods = st.sampled_from(METHODS)


class Requests(RuleBasedStateMachine):
    """Requests on one scheduler, all on the same two networks of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.requests: list[Submitted] = []
        self.is_closed = False
        for model in NETWORKS:
            model.forward = self.behind_gate(type(model).forward.__get__(model))

    def behind_gate(self, forward: Any) -> Any:
        def run(feeds: Any) -> Any:
            self.gate.wait()
            return forward(feeds)

        return run

    @initialize(
        policy=st.sampled_from(POLICIES),
        max_live=st.sampled_from([None, 1, 2, 3]),
        max_slots=st.sampled_from([None, MAX_SLOTS]),
        dtype=st.sampled_from(DTYPES),
    )
    def begin(
        self, policy: Any, max_live: int | None, max_slots: int | None, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.limits = Arrivals(policy(), (), max_live, max_slots)  # who may be live
        self.scheduler = Scheduler(policy(), max_live=max_live, max_slots=max_slots)

    # ---- what may be done

    def submit(self, arrival: Arrival, child: Arrival | None = None) -> None:
        arrival.dtype = self.dtype

        def job(scheduler: Scheduler) -> Iterator[int]:
            for at, token in enumerate(arrival.decode(scheduler)):
                if at == 0 and child is not None:
                    self.submit(child)
                yield token

        with self.scheduler.together():
            ticket = self.scheduler.submit(job, slots=arrival.slots)
            self.requests.append(Submitted(arrival, ticket))

    @precondition(lambda self: not self.is_closed)
    @rule(prompt=prompts, n=lengths, method=methods)
    def submit_one(self, prompt: tuple[int, ...], n: int, method: str) -> None:
        self.submit(Arrival(0, prompt, n, method, seed=1))
        self.wait_for_gate()

    @precondition(lambda self: not self.is_closed)
    @rule(prompt=prompts, n=lengths, after=st.integers(0, 3), own=st.booleans())
    def submit_failing(self, prompt: tuple[int, ...], n: int, after: int, own: bool) -> None:
        """It fails in its own code, or inside a pass that others share."""
        how = {"fails" if own else "breaks": after}
        self.submit(Arrival(0, prompt, n, "autoregressive", seed=1, **how))
        self.wait_for_gate()

    @precondition(lambda self: not self.is_closed)
    @rule(prompt=prompts, n=lengths, others=lengths)
    def submit_submitting(self, prompt: tuple[int, ...], n: int, others: int) -> None:
        """It submits another one after its first token."""
        child = Arrival(0, prompt, others, "autoregressive", seed=1)
        self.submit(Arrival(0, prompt, n, "autoregressive", seed=1), child)
        self.wait_for_gate()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        one = self.requests[which % len(self.requests)]
        self.note_cancelled([one])
        one.ticket.cancel()
        self.wait_for_gate()

    @rule(passes=st.integers(1, 6))
    def run(self, passes: int) -> None:
        self.gate.open(passes)
        self.wait_for_gate()
        self.gate.shut()

    @precondition(lambda self: not self.is_closed)
    @rule()
    def close(self) -> None:
        """Whoever runs ends after the pass that is at the gate; nobody comes any more."""
        with self.scheduler.together():
            self.note_cancelled(self.requests)
            self.scheduler.cancel(*(one.ticket for one in self.requests))
        self.gate.open(ENDLESS)
        self.wait_for_gate()
        self.scheduler.close()
        self.is_closed = True
        assert all(one.ticket.is_done for one in self.requests)
        with pytest.raises(TinyspecError, match="the scheduler is closed"):
            self.scheduler.submit(lambda scheduler: iter([1]))

    def note_cancelled(self, requests: Sequence[Submitted]) -> None:
        for one in requests:
            if one.cancelled is None and not one.ticket.is_done:
                one.cancelled = self.scheduler.turn

    def wait_for_gate(self) -> None:
        """Wait until a pass stands at the gate and all others wait, or every request has ended."""
        deadline = time.monotonic() + SECONDS
        while not (self.gate.is_blocked and count_awake(self.scheduler) == 1):
            if self.scheduler.join(POLL_SECONDS):
                return
            assert not stands_still(self.scheduler), "a standstill"
            assert time.monotonic() < deadline

    # ---- what must hold

    @invariant()
    def a_text_is_a_prefix_of_the_text_alone(self) -> None:
        for one in self.requests:
            given, items = one.arrival, one.read()
            alone, logits, log = run_alone(given.prompt, given.n, given.method, given.dtype)
            assert items == alone[: len(items)]
            rounds = zip(given.logits, logits, strict=False)
            assert not any(logits_differ(*rows, given.dtype) for rows in rounds)
            assert len(items) == given.written, "a reader sees what its request yielded"
            if one.ticket.is_done and one.ticket.error is None:
                assert items == alone
                assert join_chunks(given.log) == log
            elif one.ticket.is_done and one.cancelled is None:
                assert type(one.ticket.error).__name__ == given.may_end_by

    @invariant()
    def the_oldest_run_as_far_as_the_limits_go(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        with self.scheduler.together():
            due = [one.ticket for one in self.requests if not one.ticket.is_done]
            assert sorted(self.scheduler._live) == self.limits.admit(due)
            assert self.scheduler.queued == len(due) - self.scheduler.live

    @invariant()
    def every_row_that_ran_is_in_the_pass_log_once(self) -> None:
        for one in self.requests:
            ran = count_rows(self.scheduler.pass_log, one.ticket.number)
            assert ran == sum_rows(one.arrival.log)

    @invariant()
    def turns_increase_and_a_request_runs_once_in_a_turn(self) -> None:
        log = list(self.scheduler.pass_log) if self.requests else []
        assert [entry.turn for entry in log] == sorted(entry.turn for entry in log)
        runs = Counter((entry.turn, n) for entry in log for n in entry.requests)
        assert set(runs.values()) <= {1}

    @invariant()
    def a_request_that_is_cancelled_runs_no_more(self) -> None:
        for one in self.requests:
            if one.cancelled is not None:
                turns = [e.turn for e in self.scheduler.pass_log if one.ticket.number in e.requests]
                assert max(turns, default=-1) <= one.cancelled

    def teardown(self) -> None:
        """Whoever is left comes to its end."""
        self.gate.open(ENDLESS)
        try:
            if hasattr(self, "scheduler"):
                self.wait_for_gate()
                self.a_text_is_a_prefix_of_the_text_alone()
                for one in self.requests:
                    assert one.ticket.is_done
                    may_end = one.cancelled is not None or one.arrival.may_end_by is not None
                    assert may_end or one.ticket.error is None
        finally:
            for model in NETWORKS:
                del model.forward
            if hasattr(self, "scheduler"):
                self.scheduler.close()


def checked(examples: int, *phases: Phase) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=20,
        phases=phases or tuple(Phase),
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


Requests.TestCase.settings = checked(60)
TestRequests = Requests.TestCase


# --- what the machine kills -----------------------------------------------------------------------


@pytest.mark.parametrize("mutant", [*CHUNKS, *SHARED], ids=lambda mutant: mutant.name)
@pytest.mark.slow
def test_the_machine_sees(mutant: Mutant) -> None:
    """Whether a defect shows may depend on which thread is faster: then Hypothesis says Flaky."""
    with mutant.applied(), pytest.raises((AssertionError, Flaky)):
        run_state_machine_as_test(Requests, settings=checked(400, Phase.generate))
