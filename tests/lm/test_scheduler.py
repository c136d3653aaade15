"""A scheduler shares forward passes: every text equals the text alone.

This holds whichever request comes first, whoever joins, leaves, fails or is cancelled, and under
every policy. No request waits for ever.
"""

import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tests.lm.small import GPT2, LLAMA, model
from tinyspec import _core
from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.schedule_laws import (
    SCHEDULED_ALONE,
    network,
    random_limits,
    random_trace,
    run_trace,
    scheduled_request_is_alone,
)
from tinyspec.lm import scheduler as scheduling
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.policies import AlignedPolicy, FirstComePolicy, LockstepPolicy, Pending, Policy
from tinyspec.lm.scheduler import RequestCancelled, Scheduler, SharedPass, Ticket, run_together
from tinyspec.speculative.integrated.sarathi import SarathiPolicy
from tinyspec.tree import TokenTree

TARGET, DRAFT = model(LLAMA, 0), model(GPT2, 1)
TARGET.name, DRAFT.name = "target", "draft"


def greedy(
    scheduler: Scheduler | None,
    prompt: list[int],
    new: int,
    forward_log: list[ForwardRecord] | None = None,
    jitter: float = 0.0,
):
    """A small speculative loop: two models in turn, a rewind now and then. Returns text and
    target's logits.
    """
    target, draft = TARGET.session(forward_log, scheduler), DRAFT.session(forward_log, scheduler)
    target.extend(prompt)
    draft.extend(prompt)
    rows = []
    while len(target) < len(prompt) + new:
        drafted = int(draft.score(TokenTree()).logits[0].argmax())
        time.sleep(jitter * random.random())
        scores = target.score(TokenTree.chain([drafted, 3]))
        best = scores.logits.argmax(dim=-1).tolist()
        path = [0] if best[0] == drafted else []
        target.commit(path, best[len(path)])
        rows.append(scores.logits)
        draft.append(target.text[len(draft) :])
        if len(target) % 3 == 0:
            target.rewind(len(target) - 1)
            target.append([7])
            draft.rewind(len(target) - 1)
            draft.append([7])
    return target.text, torch.cat(rows)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 3], [12, 0, 1]]


@pytest.mark.parametrize("jitter", [0.0, 0.002])
def test_a_prompt_in_a_batch_equals_the_prompt_alone(jitter: float) -> None:
    alone = [greedy(None, p, 4 + 3 * i) for i, p in enumerate(PROMPTS)]
    together = run_together(
        [
            lambda scheduler, p=p, i=i: greedy(scheduler, p, 4 + 3 * i, jitter=jitter)
            for i, p in enumerate(PROMPTS)
        ]
    )
    for (text, rows), (text_alone, rows_alone) in zip(together, alone, strict=True):
        assert text == text_alone
        torch.testing.assert_close(rows, rows_alone, rtol=0, atol=1e-12)


def test_the_order_of_the_requests_does_not_matter() -> None:
    """Lengths, prompts and drafts differ; nothing leaks between the texts."""
    one = run_together([lambda scheduler, p=p: greedy(scheduler, p, 6) for p in PROMPTS])
    other = run_together(
        [lambda scheduler, p=p: greedy(scheduler, p, 6) for p in reversed(PROMPTS)]
    )
    for (text, rows), (text_other, rows_other) in zip(one, reversed(other), strict=True):
        assert text == text_other
        torch.testing.assert_close(rows, rows_other, rtol=0, atol=1e-12)


def test_the_ledger_stays_with_the_request() -> None:
    alone: list[ForwardRecord] = []
    greedy(None, PROMPTS[0], 6, alone)
    forward_logs: list[list[ForwardRecord]] = [[] for _ in PROMPTS]
    run_together(
        [
            lambda scheduler, p=p, n=n: greedy(scheduler, p, 6, n)
            for p, n in zip(PROMPTS, forward_logs, strict=True)
        ]
    )
    assert forward_logs[0] == alone


def test_between_two_passes_one_request_runs_after_the_other() -> None:
    """So what they decide for each other does not depend on the machine."""
    order = list[tuple[int, int]]()

    def job(number: int, scheduler: Scheduler) -> None:
        session = TARGET.session(scheduler=scheduler)
        for step in range(4):
            order.append((step, number))
            time.sleep(0.001 * (5 - number))  # the last would be the first
            session.extend([1, 2])

    run_together([partial(job, number) for number in range(5)])
    assert order == sorted(order)


def test_what_waits_together_is_one_forward_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    forward = TARGET.forward

    def counted(feeds):  # type: ignore[no-untyped-def]
        widths.append(len(feeds))
        return forward(feeds)

    monkeypatch.setattr(TARGET, "forward", counted)

    def job(scheduler: Scheduler, steps: int) -> None:
        session = TARGET.session(scheduler=scheduler)
        session.extend([1])
        for _ in range(steps):
            session.score(TokenTree())
            session.commit((), 2)

    run_together([lambda scheduler, n=n: job(scheduler, n) for n in (5, 2, 3)])
    assert widths == [3, 3, 2, 1, 1]  # and whoever has finished is not waited for


def test_a_worker_that_fails_ends_all_and_says_why() -> None:
    def bad(scheduler: Scheduler) -> None:
        session = TARGET.session(scheduler=scheduler)
        session.extend([1, 2, 3])
        raise RuntimeError("my own mistake")

    def good(scheduler: Scheduler) -> None:
        session = TARGET.session(scheduler=scheduler)
        session.extend([1, 2])
        for _ in range(50):
            session.score(TokenTree())
            session.commit((), 1)

    with pytest.raises(RuntimeError, match="my own mistake"):
        run_together([good, bad, good])


def test_a_forward_that_fails_ends_all_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(feeds):  # type: ignore[no-untyped-def]
        raise MemoryError("no room")

    monkeypatch.setattr(TARGET, "forward", broken)
    with pytest.raises(MemoryError, match="no room"):
        run_together([lambda scheduler: greedy(scheduler, [1, 2], 3)] * 3)


def test_ctrl_c_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is interrupted while it waits; requests end at their next pass."""
    ended: list[bool] = []

    def endless(scheduler: Scheduler) -> None:
        session = TARGET.session(scheduler=scheduler)
        session.extend([1])
        try:
            while True:
                session.score(TokenTree())
                session.rewind(0)
                session.extend([1])
        except RequestCancelled:
            ended.append(True)
            raise

    class Interrupted(SimpleQueue):  # type: ignore[type-arg]
        def get(self, *args):  # type: ignore[no-untyped-def]
            time.sleep(0.05)
            raise KeyboardInterrupt

    monkeypatch.setattr(scheduling, "SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_together([endless, endless])
    assert ended == [True, True]


def test_no_jobs_and_one_job() -> None:
    assert run_together([]) == []
    assert run_together([lambda scheduler: greedy(scheduler, [1, 2], 3)[0]]) == [
        greedy(None, [1, 2], 3)[0]
    ]


def test_threads_that_come_together_pack_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward packs the weights; a thread that comes meanwhile must not find a model
    without any.
    """
    from tinyspec.lm import transformer

    plain, asked = transformer.can_pack, list[bool]()

    def slow(*args):  # type: ignore[no-untyped-def]
        asked.append(plain(*args))
        time.sleep(0.02)
        return asked[-1]

    m = model().to(dtype=torch.float32)
    monkeypatch.setattr(transformer, "can_pack", slow)
    run_together([lambda scheduler: m.session(scheduler=scheduler).extend([1, 2, 3])] * 6)
    assert len(asked) == 1 or not asked[0]  # without compiled kernels every pass asks again


# ---------------------------------------------------------------------- requests that come and go


def write(
    prompt: Sequence[int], n: int, log: list[ForwardRecord] | None = None
) -> Callable[[Scheduler | None], Iterator[int]]:
    """Return a job that yields n greedy tokens after a prompt."""

    def run(scheduler: Scheduler | None) -> Iterator[int]:
        session = TARGET.session(log, scheduler)
        session.extend(prompt)
        for _ in range(n):
            token = int(session.score(TokenTree()).logits[0].argmax())
            session.commit((), token)
            yield token

    return run


def run_for_ever(sessions: "list[weakref.ref[Any]]", scheduler: Scheduler) -> Iterator[int]:
    """Run passes until it is cancelled. Its session is noted."""
    session = TARGET.session(None, scheduler)
    sessions.append(weakref.ref(session))
    session.extend([1, 2])
    for number in count():
        session.score(TokenTree())
        yield number
        session.rewind(1)
        session.append([2])


class Arrivals:
    """A policy that asks another one, and first calls what is due: `due[turn](scheduler)`."""

    def __init__(self, policy: Policy, due: Mapping[int, Callable[[Scheduler], object]]):
        self.policy, self.due = policy, dict(due)
        self.most_rows = getattr(policy, "most_rows", sys.maxsize)
        self.scheduler: Scheduler
        self.waiting: list[list[Pending]] = []

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        picked = self.policy.pick(waiting)
        self.waiting.append(list(waiting))
        if (act := self.due.pop(self.scheduler.turn, None)) is not None:
            act(self.scheduler)
        return picked


def run_arrivals(
    policy: Policy, due: Mapping[int, Callable[[Scheduler], object]], *first: Any, **limits: Any
) -> tuple[list[list[int]], list[SharedPass], list[list[Pending]]]:
    """Run jobs, and what is submitted later. Return the texts, the pass log and who waited."""
    arrivals, texts, tickets = Arrivals(policy, due), dict[int, list[int]](), list[Ticket[int]]()
    with Scheduler(arrivals, **limits) as scheduler:
        arrivals.scheduler, submit = scheduler, scheduler.submit

        def keep(*args: Any, **options: Any) -> Ticket[int]:
            tickets.append(submit(*args, **options))
            return tickets[-1]

        scheduler.submit = keep  # type: ignore[method-assign]
        with scheduler.together():
            for job in first:
                scheduler.submit(job)
        scheduler.join(30)
        assert not scheduler.live and not scheduler.queued
        for ticket in tickets:
            texts[ticket.number] = collect(ticket)
        return [texts[n] for n in sorted(texts)], list(scheduler.pass_log), arrivals.waiting


def collect(ticket: Ticket[int]) -> list[int]:
    got = list[int]()
    with suppress(RequestCancelled):
        got.extend(token for token in ticket)
    return got


LONG = [1, 5, 2, 7, 3, 9, 4, 8, 6, 0, 11, 10]
POLICIES = [LockstepPolicy, lambda: FirstComePolicy(5, 3), lambda: AlignedPolicy(2)]


def test_a_request_that_joins_shares_the_pass_of_another_ones_third_chunk() -> None:
    policy = FirstComePolicy(budget=8, chunk=3)
    due = {1: lambda scheduler: scheduler.submit(write([4], 2))}
    texts, log, _ = run_arrivals(policy, due, write(LONG, 2))
    assert texts == [list(write(LONG, 2)(None)), list(write([4], 2)(None))]
    assert [(one.requests, one.rows) for one in log[:3]] == [
        ((0,), (3,)),
        ((0,), (3,)),
        ((0, 1), (3, 1)),
    ]
    assert log[2].prefill == (True, False) and log[2].heads == (0, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_joins_leaves_or_is_cancelled_changes_no_other_text(policy: Any) -> None:
    alone: list[ForwardRecord] = []
    text = list(write([3, 1], 9, alone)(None))
    logs: list[list[ForwardRecord]] = [[] for _ in range(2)]
    third: list[Ticket[int]] = []
    due = {
        2: lambda scheduler: third.append(scheduler.submit(write(LONG, 50))),
        4: lambda scheduler: scheduler.submit(write([2, 2, 2], 1)),
        6: lambda _: third[0].cancel(),
    }
    texts, _, _ = run_arrivals(policy(), due, write([3, 1], 9, logs[0]), write([3, 1], 9, logs[1]))
    assert texts[0] == texts[1] == text
    assert texts[2] == list(write(LONG, len(texts[2]))(None)) and len(texts[2]) < 9
    assert texts[3] == list(write([2, 2, 2], 1)(None))
    assert logs[0] == logs[1] == alone


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_arrivals_give_the_same_schedule(policy: Any) -> None:
    def run() -> list[SharedPass]:
        due = {1: lambda s: s.submit(write(LONG, 2)), 3: lambda s: s.submit(write([9, 9], 4))}
        return run_arrivals(policy(), due, write([4, 4], 6), write(LONG[:7], 3))[1]

    assert run() == run()


LONGER = [(5 * n + n // 13) % LLAMA.vocab_size for n in range(150)]
ROOMY = model(replace(LLAMA, max_positions=256))


@pytest.mark.parametrize(
    ("prompt", "chunk"),
    [
        *((LONG, chunk) for chunk in (1, 5, 7, 11)),
        *((LONGER, chunk) for chunk in (1, 7, 64, len(LONGER))),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{len(value)} tokens, chunk",
)
def test_how_a_prompt_is_cut_changes_no_logit(prompt: list[int], chunk: int) -> None:
    """Bit for bit where the compiled transformer computes."""
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}
    for dtype in rounding:
        target = ROOMY.to(dtype=dtype)

        def last(scheduler: Scheduler | None, target: Any = target) -> torch.Tensor:
            session = target.session(scheduler=scheduler)
            session.extend(prompt, hidden_layers=(1,))
            return session.score(TokenTree.chain([3, 5])).logits

        policy = FirstComePolicy(chunk, chunk)
        (cut,) = run_together([last], scheduler := Scheduler(policy))
        assert len(scheduler.pass_log) == -(-(len(prompt) - 1) // chunk) + 1
        whole = last(None)
        if target.engine is None:
            torch.testing.assert_close(cut, whole, rtol=0, atol=rounding[dtype])
        else:
            assert torch.equal(cut, whole)


def test_a_pass_that_fails_ends_only_the_request_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = TARGET.forward

    def fail_at_9(feeds: Any) -> Any:
        if any(feed.tokens == [9] for feed in feeds):
            raise RuntimeError("a nine")
        return forward(feeds)

    monkeypatch.setattr(TARGET, "forward", fail_at_9)
    with Scheduler() as scheduler:
        with scheduler.together():
            good, bad, other = (scheduler.submit(write(p, 4)) for p in ([4], [9], [5, 6]))
        with pytest.raises(RuntimeError, match="a nine"):
            list(bad)
        assert list(good) == list(write([4], 4)(None))
        assert list(other) == list(write([5, 6], 4)(None))


def test_a_pass_of_nobodys_request_that_fails_leaves_the_others_their_turn() -> None:
    tickets = list[Ticket[int]]()

    class Fails:
        def forward(self, feeds: Sequence[Any]) -> list[Any]:
            tickets.append(scheduler.submit(write([1], 2)))
            while not scheduler._waiting:
                time.sleep(0.001)
            raise ValueError("no memory")

    with Scheduler() as scheduler:
        with pytest.raises(ValueError, match="no memory"):
            scheduler.forward(Fails(), [])  # type: ignore[arg-type]
        assert scheduler.join(30)
        assert len(list(tickets[0])) == 2


def test_a_request_that_raises_ends_alone_and_keeps_what_it_yielded() -> None:
    def raises(scheduler: Scheduler) -> Iterator[int]:
        yield from write([2], 2)(scheduler)
        raise RuntimeError("my own mistake")

    with Scheduler() as scheduler:
        with scheduler.together():
            bad, good = scheduler.submit(raises), scheduler.submit(write([4], 8))
        got = list[int]()
        with pytest.raises(RuntimeError, match="my own mistake"):
            got.extend(token for token in bad)
        assert got == list(write([2], 2)(None)) and list(good) == list(write([4], 8)(None))


def test_at_most_so_many_requests_run_and_the_oldest_is_next() -> None:
    jobs = [write([number], 1 + number % 2) for number in range(6)]
    texts, log, _ = run_arrivals(LockstepPolicy(), {}, *jobs, max_live=2)
    assert texts == [list(job(None)) for job in jobs]
    assert max(len(one.requests) for one in log) == 2
    first = [min(one.turn for one in log if n in one.requests) for n in range(6)]
    assert first == sorted(first)


def test_live_requests_reserve_no_more_slots_than_there_are() -> None:
    reserved = list[int]()

    class Watch(LockstepPolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            reserved.append(sum(10 + 5 * one.request for one in waiting))
            return super().pick(waiting)

    with Scheduler(Watch(), max_slots=27) as scheduler:
        with pytest.raises(TinyspecError, match=r"needs 28 positions of the cache.* have 27"):
            scheduler.submit(write([1], 1), slots=28)
        with scheduler.together():
            tickets = [scheduler.submit(write([n], 3), slots=10 + 5 * n) for n in range(3)]
        assert [list(ticket) for ticket in tickets] == [list(write([n], 3)(None)) for n in range(3)]
    assert max(reserved) == 25  # 10 + 15; then 20


def test_a_request_that_is_cancelled_before_it_starts_never_runs() -> None:
    with Scheduler(max_live=1) as scheduler:
        with scheduler.together():
            one, other = scheduler.submit(write([1], 5)), scheduler.submit(write([2], 5))
            other.cancel()
        assert len(list(one)) == 5 and collect(other) == []
        assert isinstance(other.error, RequestCancelled)
        assert {n for entry in scheduler.pass_log for n in entry.requests} == {0}


def test_who_is_cancelled_in_the_queue_is_in_nobodys_way() -> None:
    """A small request does not wait for slots that a large one before it wanted."""
    begun = threading.Event()

    def small(scheduler: Scheduler) -> Iterator[int]:
        begun.set()
        yield from write([3], 1)(scheduler)

    with Scheduler(max_slots=10) as scheduler:
        running = scheduler.submit(partial(run_for_ever, []), slots=6)
        large, behind = scheduler.submit(write([2], 1), slots=5), scheduler.submit(small, slots=1)
        assert scheduler.queued == 2
        large.cancel()
        assert begun.wait(30) and len(list(behind)) == 1
        assert not running.is_done


def test_a_request_for_which_there_is_no_thread_ends_with_that_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Scheduler() as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            ticket = scheduler.submit(write([1], 1))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            list(ticket)
        assert len(list(scheduler.submit(write([2], 1)))) == 1


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_request_that_ends_early_gives_its_cache_back(how: str) -> None:
    """At once: the error that its ticket keeps holds no session. No garbage is collected."""
    sessions = list[weakref.ref[Any]]()

    def job(scheduler: Scheduler) -> Iterator[int]:
        for number in run_for_ever(sessions, scheduler):
            yield number
            if how == "failed":
                raise ValueError("it fails")

    gc.disable()
    try:
        with Scheduler() as scheduler:
            ticket = scheduler.submit(job)
            assert next(iter(ticket)) == 0
            ticket.cancel()
            scheduler.join()
            assert isinstance(ticket.error, ValueError if how == "failed" else RequestCancelled)
            assert sessions[0]() is None
    finally:
        gc.enable()


def test_a_closed_scheduler_takes_no_request() -> None:
    scheduler = Scheduler()
    running = scheduler.submit(write([1], 10_000))
    scheduler.close()
    assert running.is_done and isinstance(running.error, RequestCancelled)
    with pytest.raises(TinyspecError, match="the scheduler is closed"):
        scheduler.submit(write([1], 1))


def test_a_policy_that_picks_nothing_or_fails_ends_its_requests_with_that_error() -> None:
    class Nothing(LockstepPolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            return {}

    with pytest.raises(RuntimeError, match="Nothing picked no pass"):
        run_together([lambda s: list(write([1], 1)(s))], Scheduler(Nothing()))


@pytest.mark.parametrize(
    ("picked", "why"),
    [
        ({7: 1}, "picked request 7, which does not wait"),
        ({0: 0}, "picked 0 of 5 rows of request 0: of a prompt, at least one must run"),
        ({0: 6}, "picked 6 of 5 rows of request 0"),
        ({1: 1}, "picked 1 of 3 rows of request 1: they run together"),
    ],
)
def test_a_policy_may_cut_prompts_alone_and_pick_who_waits(
    picked: dict[int, int], why: str
) -> None:
    class Strange(LockstepPolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            return picked

    def score_three(scheduler: Scheduler) -> None:
        session = TARGET.session(scheduler=scheduler)
        session.append([1])
        session.score(TokenTree.chain([2, 3]))

    jobs = [lambda s: TARGET.session(scheduler=s).extend([1] * 6), score_three]
    with pytest.raises(RuntimeError, match=why):
        run_together(jobs, Scheduler(Strange()))


# ---------------------------------------------------------------------- policies


def waits(*rows: int, prefill: str = "", weights: str = "", held: int = 0) -> list[Pending]:
    """Requests that wait with so many rows; p in `prefill` marks a prompt, d a draft model."""
    prompts, models = prefill.ljust(len(rows)), weights.ljust(len(rows))
    return [
        Pending(n, models[n], 1 if models[n] == "d" else 9, rows[n], prompts[n] == "p", held)
        for n in range(len(rows))
    ]


def test_first_come_first_served_cuts_a_prompt_to_the_budget_and_lets_no_one_overtake() -> None:
    policy = FirstComePolicy(budget=8, chunk=6)
    assert policy.pick(waits(20, 1, 20, prefill="p p")) == {0: 6, 1: 1, 2: 1}
    assert policy.pick(waits(1, 20, 20, prefill=" pp")) == {0: 1, 1: 6, 2: 1}
    assert policy.pick(waits(20, 5, 1, prefill="p  ")) == {0: 6}  # 2 may not pass before 1
    assert policy.pick(waits(9, 1)) == {0: 9}  # it cannot be cut
    assert policy.pick(waits(8, 8, weights="td")) == {0: 8, 1: 8}  # each model has its own pass


@pytest.mark.parametrize("make", [lambda: FirstComePolicy(5, 3), lambda: SarathiPolicy(3, 2)])
def test_no_more_of_a_prompt_is_prepared_than_its_policy_takes(make: Any) -> None:
    """And the schedule is that of a policy which does not say how much it takes."""
    logs = list[list[SharedPass]]()
    for most in (make().most_rows, sys.maxsize):
        policy = make()
        policy.most_rows = most
        _, log, waiting = run_arrivals(policy, {}, *(write(LONG, 2) for _ in range(3)))
        logs.append(log)
        prompts = [one.rows for turn in waiting for one in turn if one.is_prefill]
        assert max(prompts) == min(most, len(LONG) - 1)
    assert logs[0] == logs[1]


def test_aligned_holds_the_target_while_a_draft_step_waits_but_not_for_ever() -> None:
    policy = AlignedPolicy(patience=3)
    assert policy.pick(waits(5, 1, weights="td")) == {1: 1}
    assert policy.pick(waits(5, 1, weights="td", held=3)) == {0: 5, 1: 1}
    assert policy.pick(waits(5, 5, weights="tt")) == {0: 5, 1: 5}


def test_aligned_runs_fewer_target_passes_than_lockstep_where_drafts_differ_in_length() -> None:
    def drafting(first: int) -> Callable[[Scheduler], Iterator[int]]:
        def run(scheduler: Scheduler) -> Iterator[int]:
            target, draft = TARGET.session(scheduler=scheduler), DRAFT.session(scheduler=scheduler)
            target.extend([1])
            draft.extend([1])
            for at in range(8):
                for _ in range((first + at) % 4):
                    draft.score(TokenTree())
                    draft.commit((), 2)
                target.score(TokenTree())
                target.commit((), 3)
                yield at

        return run

    def target_passes(policy: Policy) -> int:
        _, log, _ = run_arrivals(policy, {}, *(drafting(n) for n in range(4)))
        assert sum(len(one.requests) for one in log if one.model == TARGET.name) == 32
        return sum(one.model == TARGET.name for one in log)

    assert target_passes(AlignedPolicy()) < target_passes(LockstepPolicy())


def test_a_draft_chain_runs_at_once_while_its_request_is_the_only_one() -> None:
    m, log = model(LLAMA).to(dtype=torch.float32), list[ForwardRecord]()

    def chain(scheduler: Scheduler) -> list[bool]:
        session = m.session(log, scheduler)
        session.extend([1, 2, 3])
        ran = list[bool]()
        for _ in range(6):
            ran.append(session.draft_chain(2, lambda row: int(row.argmax())))
            session.score(TokenTree())
            session.commit((), 3)
        return ran

    def short(scheduler: Scheduler) -> list[bool]:
        session = m.session(scheduler=scheduler)
        session.extend([1, 2])
        session.score(TokenTree())
        return []

    together, _ = run_together([chain, short], scheduler := Scheduler())
    assert together == [False] * 2 + [True] * 4
    logged = [sum(one.rows) for one in scheduler.pass_log if one.requests == (0,)]
    shared = [one.rows[0] for one in scheduler.pass_log if one.requests == (0, 1)]
    assert sum(logged) + sum(shared) == sum(record.rows for record in log)
    assert run_together([chain]) == [[True] * 6]


# ---------------------------------------------------------------------- any trace


@pytest.mark.parametrize("policy", POLICIES)
def test_under_any_schedule_a_text_is_what_it_is_alone_and_every_row_runs_once(policy: Any) -> None:
    assert scheduled_request_is_alone(policy, range(12)).cases == 12


compiled = pytest.mark.skipif(
    _core.compute is None,
    reason="NO COMPILED TRANSFORMER: rows of torch's products have no fixed bits",
)
narrow = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TRACES = range(8)  # seeds of random traces


@compiled
@narrow
@pytest.mark.parametrize("policy", [*POLICIES, lambda: SarathiPolicy(3)])
def test_under_any_schedule_text_logits_and_log_are_those_alone_bit_for_bit(
    policy: Any, dtype: torch.dtype
) -> None:
    assert scheduled_request_is_alone(policy, TRACES, dtype).cases == len(TRACES)


@compiled
@narrow
def test_in_the_random_traces_requests_join_leave_are_cancelled_and_read_in_chunks(
    dtype: torch.dtype,
) -> None:
    """Without them the law above would say little."""
    seen = set[str]()
    for seed in TRACES:
        got = run_trace(FirstComePolicy(5, 3), random_trace(seed, dtype), **random_limits(seed))
        seen |= {str(error) for error in got.errors}
        turns = defaultdict(list)
        for one in got.pass_log:
            for number in one.requests:
                turns[number].append(one.turn)
        for one in got.pass_log:
            seen |= {"joins"} if len({turns[n][0] for n in one.requests}) > 1 else set()
            seen |= {"leaves"} if len({turns[n][-1] for n in one.requests}) > 1 else set()
        prompts = Counter(
            (one.model, number)
            for one in got.pass_log
            for number, is_prompt in zip(one.requests, one.prefill, strict=True)
            if is_prompt
        )
        seen |= {"is read in chunks"} if max(prompts.values(), default=0) > 1 else set()
    fails = {"RequestCancelled", "RequestFailed", "ValueError"}
    assert seen == {"None", "joins", "leaves", "is read in chunks", *fails}


@compiled
@narrow
def test_a_row_that_depends_on_its_neighbours_by_one_bit_breaks_the_law(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests share a pass, each logit is the next larger number."""
    target = network(1, dtype)
    forward = target.forward

    def rounded_otherwise(feeds: Any) -> Any:
        scores = forward(feeds)
        if len(feeds) > 1:
            for one in scores:
                one.logits[...] = torch.nextafter(one.logits, torch.tensor(torch.inf))
        return scores

    monkeypatch.setattr(target, "forward", rounded_otherwise)
    with pytest.raises(LawViolated, match=SCHEDULED_ALONE) as accused:
        scheduled_request_is_alone(LockstepPolicy, TRACES, dtype)
    found = accused.value.counterexample
    torch.testing.assert_close(found.got, found.expected)  # they differ, but hardly


def test_who_has_left_already_does_not_depend_on_its_thread() -> None:
    """A request whose thread is slow to end is not in the way of another one's draft chain."""
    m = model(LLAMA).to(dtype=torch.float32)

    def chain(scheduler: Scheduler) -> list[bool]:
        session = m.session(scheduler=scheduler)
        session.extend([1, 2, 3])
        ran = list[bool]()
        for _ in range(4):
            ran.append(session.draft_chain(2, lambda row: int(row.argmax())))
            session.score(TokenTree())
            session.commit((), 3)
        return ran

    def short(scheduler: Scheduler, seconds: float) -> list[bool]:
        session = m.session(scheduler=scheduler)
        session.extend([1, 2])
        session.score(TokenTree())
        time.sleep(seconds)
        return []

    for seconds in (0.0, 0.1):
        ran, _ = run_together([chain, partial(short, seconds=seconds)])
        assert ran == [False, False, True, True]


def step(m: Any) -> Callable[[Scheduler], list[float]]:
    """Return a job of one forward pass; it notes the time at which it goes on."""

    def job(scheduler: Scheduler) -> list[float]:
        session = m.session(scheduler=scheduler)
        session.append([1])
        session.score(TokenTree())
        return [time.monotonic()]

    return job


def test_the_requests_of_a_turn_go_on_when_the_last_of_its_passes_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass of one model is ready earlier. Who goes on with it must not find the turn open."""
    ends: list[float] = []
    scheduler, forward = Scheduler(), DRAFT.forward

    def slow(feeds: Any) -> Any:
        with scheduler.lock:  # wake all that wait
            for ticket in scheduler._live.values():
                ticket.may_go_on.notify()
        time.sleep(0.02)
        scores = forward(feeds)
        ends.append(time.monotonic())
        return scores

    monkeypatch.setattr(DRAFT, "forward", slow)
    went_on = [at for [at] in run_together([step(TARGET), step(DRAFT), step(TARGET)], scheduler)]
    assert [one.model for one in scheduler.pass_log] == ["target", "draft"]
    assert min(went_on) > ends[0]


def test_how_long_a_request_was_held_does_not_depend_on_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is held while others are picked, not while the pass runs in which it arrived."""
    seen: list[tuple[int, int]] = []
    forward = TARGET.forward

    class Joined(LockstepPolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            seen.extend((one.request, one.held) for one in waiting)
            if scheduler.turn == 0:
                scheduler.submit(step(TARGET))
            return {waiting[0].request: waiting[0].rows}

    def slow(feeds: Any) -> Any:
        time.sleep(0.02)
        return forward(feeds)

    monkeypatch.setattr(TARGET, "forward", slow)
    scheduler = Scheduler(Joined())
    run_together([step(TARGET), step(TARGET)], scheduler)
    assert seen == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]


# ---------------------------------------------------------------------- rules


class Largest:
    """Answers the largest question to all who ask; `asked` keeps who asked together."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.n_decoding: list[int] = []

    def decide(self, questions: Mapping[int, int], n_decoding: int) -> Mapping[int, int]:
        self.asked.append(list(questions))
        self.n_decoding.append(n_decoding)
        if min(questions.values()) < 0:
            raise ValueError("a question without an answer")
        return dict.fromkeys(questions, max(questions.values()))


def asks(rule: Largest, *questions: int, passes: int = 0) -> Callable[[Scheduler], list[int]]:
    def job(scheduler: Scheduler) -> list[int]:
        for _ in range(passes):
            step(TARGET)(scheduler)
        return [scheduler.consult("largest", lambda: rule, one) for one in questions]

    return job


def test_requests_that_ask_one_rule_are_answered_together() -> None:
    rule, other = Largest(), Largest()
    assert run_together([asks(rule, 1, 5), asks(other, 4, 2)]) == [[4, 5], [4, 5]]
    assert rule.asked == [[0, 1], [0, 1]]
    assert other.asked == []  # the oldest request makes the rule, for all who ask under its name


def test_a_question_is_answered_when_every_request_waits_and_before_the_next_pass() -> None:
    rule, scheduler = Largest(), Scheduler()
    jobs = [asks(rule, 1), asks(rule, 7, passes=2), asks(rule, passes=3)]
    assert run_together(jobs, scheduler) == [[1], [7], []]
    assert rule.asked == [[0], [1]]
    assert rule.n_decoding == [1, 2]  # of the others, one that asks and one that has decoded
    assert [one.requests for one in scheduler.pass_log] == [(1, 2), (1, 2), (2,)]


def test_the_rules_that_nobody_has_asked_for_longest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "MOST_RULES", 2)
    made = list[str]()

    def ask(scheduler: Scheduler) -> Iterator[int]:
        for name in "abacab":
            rule = Largest()
            yield scheduler.consult(
                name, lambda rule=rule, name=name: (made.append(name), rule)[1], 1
            )

    with Scheduler() as scheduler:
        assert list(scheduler.submit(ask)) == [1] * 6
    assert made == ["a", "b", "c", "b"]


def test_a_rule_that_fails_fails_in_those_that_ask_it_alone() -> None:
    rule = Largest()
    with Scheduler() as scheduler:
        with scheduler.together():
            tickets = [scheduler.submit(asks(rule, one)) for one in (-1, 2)]
            plain = scheduler.submit(step(TARGET))
        for ticket in tickets:
            with pytest.raises(ValueError, match="without an answer"):
                list(ticket)
        assert list(plain)


def test_a_request_that_is_cancelled_while_it_asks_ends_with_the_answer() -> None:
    rule = Largest()

    class Cancels(Largest):
        def decide(self, questions: Mapping[int, int], n_decoding: int) -> Mapping[int, int]:
            tickets[1].cancel()
            return super().decide(questions, n_decoding)

    with Scheduler() as scheduler:
        with scheduler.together():
            tickets = [scheduler.submit(asks(Cancels(), 1)), scheduler.submit(asks(rule, 9, 9))]
        assert list(tickets[0]) == [9]  # it was asked before it was cancelled
        with pytest.raises(RequestCancelled):
            list(tickets[1])
