"""Laws of a scheduler in their smallest cases, and what each of them cannot promise.

The museum holds the laws to whole traces. Here are single requests: what a reader sees, who is
hurt by a failure, how long a pass waits, and what padding costs.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.padded_batch import (
    NEW_TOKENS,
    PROMPTS,
    draft_partly_right,
    rounds_alone,
    run_padded,
)
from tinyspec.laws.schedule_laws import (
    BOUNDED,
    CANCELLED,
    HELD,
    LOADS,
    NO_STANDSTILL,
    NO_STARVATION,
    POLICIES,
    POLL_SECONDS,
    SECONDS,
    TURNS,
    Arrival,
    Bound,
    Load,
    bound_first_come,
    bound_sarathi,
    count_awake,
    decodes_and_a_long_prompt,
    long_prompts_and_a_short_one,
    network,
    no_pass_starves,
    random_limits,
    random_trace,
    run_trace,
    short_ones_and_a_long_prompt,
    simulate_policy,
    stands_still,
)
from tinyspec.lm.policies import FirstComePolicy, LockstepPolicy, Pending, Policy, fill_budget
from tinyspec.lm.scheduler import Scheduler, SharedPass
from tinyspec.speculative.integrated.sarathi import SarathiPolicy

PLAIN, SPECULATIVE = "autoregressive", "speculative_decoding"
LONG = (1, 2, 3, 0, 1, 2, 3, 0, 1)


def alone(one: Arrival) -> list[int]:
    return list(Arrival(0, one.prompt, one.n, one.method, one.seed).decode(None))


# ---------------------------------------------------------------------- what a reader sees


@pytest.mark.parametrize("method", [PLAIN, SPECULATIVE])
def test_a_reader_has_each_token_before_its_request_computes_again(method: str) -> None:
    one, read, counts = Arrival(0, (1, 2), 5, method, seed=3), list[int](), list[int]()

    class Reads(LockstepPolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            read.extend(ticket.events.get().item for _ in range(ticket.events.qsize()))
            counts.append(len(read))
            assert len(read) == one.written
            return super().pick(waiting)

    with Scheduler(Reads()) as scheduler:
        with scheduler.together():
            ticket = scheduler.submit(one.decode)
        scheduler.join()
        assert [*read, *ticket] == alone(one)
    assert counts[0] == 0 and 0 < counts[-1] < 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["cancelled", "fails", "breaks"])
def test_of_a_request_that_ends_early_a_reader_has_a_prefix(
    policy: Callable[[], Policy], way: str
) -> None:
    one = Arrival(0, (1, 2), 9, PLAIN, seed=3, **{way: 4})
    got = run_trace(policy(), [Arrival(0, (3,), 9, PLAIN, seed=1), one])
    assert got.errors == [None, one.may_end_by]
    assert got.texts[1] == alone(one)[: len(got.texts[1])]
    assert 0 < len(got.texts[1]) < 9


# ---------------------------------------------------------------------- who is hurt by another one


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["fails", "breaks"])
@pytest.mark.parametrize("method", [PLAIN, SPECULATIVE])
def test_a_neighbour_that_fails_changes_nothing_else(
    policy: Callable[[], Policy], way: str, method: str
) -> None:
    """In its own code, or inside the forward pass that both share."""
    one = Arrival(0, LONG, 6, method, seed=1)
    got = run_trace(policy(), [one, Arrival(0, (2,), 9, PLAIN, 2, **{way: 2})])
    assert got.errors == [None, "RequestFailed" if way == "fails" else "IndexError"]
    rows, logits = got.rows[0], list(one.logits)
    assert got.texts[0] == list(one.decode(None))
    assert rows == (sum(x.rows for x in one.log), sum(x.head_rows for x in one.log))
    for shared, own in zip(logits, one.logits, strict=True):
        assert (shared - own).abs().max() < 1e-9


@pytest.mark.parametrize("policy", POLICIES)
def test_a_neighbour_that_submits_others_changes_nothing_else(
    policy: Callable[[], Policy],
) -> None:
    trace = [
        Arrival(0, LONG, 6, SPECULATIVE, seed=1),
        Arrival(0, (2,), 6, PLAIN, seed=2),
        Arrival(0, (3, 1), 4, PLAIN, seed=4, parent=1),
        Arrival(0, LONG, 2, SPECULATIVE, seed=5, parent=1),
    ]
    got = run_trace(policy(), trace)
    assert got.errors == [None] * 4 and not got.broken
    assert got.texts == [alone(one) for one in trace]


# ---------------------------------------------------------------------- whoever leaves


def test_who_leaves_is_not_waited_for() -> None:
    """The second one is held until the first one has left, for a pass has one row."""
    trace = [Arrival(0, (n,), 2, PLAIN, seed=n) for n in (1, 2)]
    got = run_trace(FirstComePolicy(1, 1), trace)
    assert [one.requests for one in got.pass_log] == [(0,), (0,), (1,), (1,)]


def test_a_schedule_that_stands_still_is_accused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline is waited for: no thread can go on, so none ever will."""
    monkeypatch.setattr("tinyspec.laws.schedule_laws.SECONDS", math.inf)
    monkeypatch.setattr(Scheduler, "_run_if_all_wait", lambda self: None)
    with pytest.raises(LawViolated, match=NO_STANDSTILL):
        run_trace(LockstepPolicy(), [Arrival(0, (1,), 2, PLAIN, seed=1)])


def test_who_waits_after_a_turn_whose_requests_were_all_cancelled_is_asked_about_again() -> None:
    """The turn ends when the cancelled one has left, and a third one, in its place, waits."""

    class Cancels(LockstepPolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            if scheduler.turn == 0:
                tickets[0].cancel()
            return {waiting[0].request: waiting[0].rows}

    class Slow(Scheduler):
        @contextmanager
        def _compute(self) -> Iterator[None]:
            with super()._compute():
                yield
                while self.turn == 0 and count_awake(self) > 1:  # it computes itself
                    time.sleep(0.001)

    with Slow(Cancels(), max_live=2) as scheduler:
        with scheduler.together():
            jobs = [Arrival(0, (n,), 1, PLAIN, seed=n) for n in (1, 2, 3)]
            tickets = [scheduler.submit(one.decode) for one in jobs]
        while not scheduler.join(POLL_SECONDS):
            assert not stands_still(scheduler)
    assert [one.requests for one in scheduler.pass_log] == [(1,), (2,)]


def test_a_cancelled_request_is_in_no_later_pass() -> None:
    trace = [Arrival(0, (n,), 6, PLAIN, seed=n, cancelled=3 * (n - 1) or -1) for n in (1, 2)]
    got = run_trace(LockstepPolicy(), trace)
    assert CANCELLED not in got.broken and len(got.texts[1]) == 3
    assert [one.requests for one in got.pass_log] == [(0, 1)] * 3 + [(0,)] * 3


# ---------------------------------------------------------------------- whoever computes


@pytest.mark.parametrize("first", ["a session", "a request"])
def test_a_session_of_no_request_and_a_request_do_not_compute_at_once(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes while the first one computes, and waits until it has."""
    model, running, overlaps = network(1, torch.float64), list[int](), list[bool]()
    one, forward, scheduler = Arrival(0, (1, 2), 1, PLAIN, seed=1), model.forward, Scheduler()
    session = threading.Thread(target=model.session(scheduler=scheduler).extend, args=([1, 2],))

    def watched(feeds: Any) -> Any:
        overlaps.append(bool(running))
        running.append(1)
        if len(overlaps) == 1:
            begin("a request" if first == "a session" else "a session")
            while count_awake(scheduler) > 0 and len(overlaps) == 1:
                time.sleep(0.001)
        scores = forward(feeds)
        running.pop()
        return scores

    def begin(who: str) -> None:
        if who == "a session":
            session.start()
        else:
            scheduler.submit(one.decode)

    monkeypatch.setattr(model, "forward", watched)
    begin(first)
    if first == "a session":
        session.join(SECONDS)
    assert scheduler.join(SECONDS)
    session.join(SECONDS)
    assert overlaps == [False] * 3  # a prompt of the session; a prompt and a step of the request


# ---------------------------------------------------------------------- how long a pass waits


@pytest.mark.parametrize(("policy", "bound"), BOUNDED)
def test_no_pass_waits_longer_than_the_bound_of_its_policy(
    policy: Callable[[], Policy], bound: Bound
) -> None:
    assert no_pass_starves(policy, bound).cases == len(LOADS)


@pytest.mark.parametrize(("policy", "bound"), BOUNDED)
def test_a_bound_is_reached_where_anyone_waits(policy: Callable[[], Policy], bound: Bound) -> None:
    """So it is no larger than it must be."""
    waits = [one for load in LOADS.values() for one in simulate_policy(policy(), load, TURNS)]
    waited = [one for one in waits if one.held]
    assert not waited or any(one.held == bound(one) for one in waited)


class ShortestFirst(FirstComePolicy):
    """Serves the shortest pass first."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        return super().pick(sorted(waiting, key=lambda one: one.rows))


class YoungestFirst(FirstComePolicy):
    """Serves first who came last."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        return super().pick(sorted(waiting, reverse=True))


@pytest.mark.parametrize(
    ("policy", "load"),
    [
        (ShortestFirst, short_ones_and_a_long_prompt),
        (YoungestFirst, long_prompts_and_a_short_one),
    ],
)
def test_a_policy_that_lets_others_overtake_starves_whom_it_does_not_like(
    policy: Callable[..., Policy], load: Load
) -> None:
    """A long prompt among short requests without end, and a short request among long prompts."""
    waits = simulate_policy(policy(3, 9), load, TURNS)
    assert max(one.held for one in waits if one.pending.request == 2) >= TURNS - 4
    with pytest.raises(LawViolated) as accused:
        no_pass_starves(partial(policy, 3, 9), bound_first_come(3))
    assert accused.value.counterexample.law == NO_STARVATION


def test_sarathi_bounds_the_wait_of_a_prompt_only_if_decodes_or_least_leave_room() -> None:
    """Two requests that decode twice come in every turn: four rows of decodes from then on."""

    def longest_wait(budget: int, least: int = 0) -> int:
        policy = SarathiPolicy(budget, least)
        waits = simulate_policy(policy, decodes_and_a_long_prompt, TURNS)
        first = [one for one in waits if one.pending.request == 0]
        bound = bound_sarathi(budget, least)
        assert all(one.held <= bound(one) for one in first)
        assert (bound(first[-1]) == math.inf) == (budget <= 4 and not least)
        return max(one.held for one in first)

    assert longest_wait(5) == 0  # one row of the prompt in every turn
    assert longest_wait(4) == TURNS - 1  # all turns but the first, when two decode
    assert longest_wait(4, least=1) == 0


def test_a_policy_learns_how_long_a_pass_was_held() -> None:
    told = list[list[int]]()

    class Watch(FirstComePolicy):
        def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
            told.append([one.held for one in waiting])
            return super().pick(waiting)

    trace = [Arrival(0, (n,), 2, PLAIN, seed=n) for n in (1, 2)]
    assert HELD not in run_trace(Watch(1, 1), trace).broken
    assert told == [[0, 0], [0, 1], [2], [0]]


# ---------------------------------------------------------------------- how many rows a pass has

traces = st.integers(0, 10**6)  # seeds of random traces
budgets = st.integers(1, 20)
chunks = st.integers(1, 20)


def rows_of_prompts(one: SharedPass) -> list[int]:
    """Return the rows of each prompt in a pass."""
    return [rows for rows, is_prompt in zip(one.rows, one.prefill, strict=True) if is_prompt]


def random_passes(policy: Policy, seeds: Iterable[int]) -> Iterator[SharedPass]:
    """Yield the pass logs of random traces."""
    for seed in seeds:
        yield from run_trace(policy, random_trace(seed), **random_limits(seed)).pass_log


def check_first_come(policy: Policy, budget: int, chunk: int, seeds: Iterable[int]) -> None:
    """Check that no pass has more rows than its budget, but one that cannot be cut, alone."""
    for one in random_passes(policy, seeds):
        prompts = rows_of_prompts(one)
        assert max(prompts, default=0) <= chunk
        is_one_that_cannot_be_cut = len(one.requests) == 1 and not prompts
        assert sum(one.rows) <= budget or is_one_that_cannot_be_cut


def check_sarathi(policy: Policy, budget: int, seeds: Iterable[int]) -> None:
    """Check that prompts have no more rows than those that decode leave of the budget."""
    for one in random_passes(policy, seeds):
        read = sum(rows_of_prompts(one))
        assert read <= max(budget - (sum(one.rows) - read), 0)


@given(seed=traces, budget=budgets, chunk=chunks)
def test_first_come_first_served_keeps_the_budget_and_the_chunk(
    seed: int, budget: int, chunk: int
) -> None:
    check_first_come(FirstComePolicy(budget, chunk), budget, chunk, [seed])


@given(seed=traces, budget=budgets)
def test_sarathi_reads_prompts_only_in_what_decodes_leave_of_the_budget(
    seed: int, budget: int
) -> None:
    """All that decode take part, so they alone may have more rows than the budget."""
    check_sarathi(SarathiPolicy(budget), budget, [seed])


class CutsToTheBudget(FirstComePolicy):
    """Cuts each prompt to the budget, not to what is left of it."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        most = min(self.budget, self.chunk)
        return {one.request: min(one.rows, most) if one.is_prefill else one.rows for one in waiting}


class ForgetsTheChunk(FirstComePolicy):
    """Gives a prompt all that is left of the budget."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        return fill_budget(waiting, self.budget, self.budget)


@pytest.mark.parametrize("policy", [CutsToTheBudget, ForgetsTheChunk])
def test_the_law_of_the_budget_accuses_first_come_policies(
    policy: Callable[[int, int], Policy],
) -> None:
    with pytest.raises(AssertionError, match=r"^assert"):
        check_first_come(policy(5, 3), 5, 3, range(30))


def test_the_law_of_the_budget_accuses_a_sarathi_that_reads_beside_decodes_as_without() -> None:
    with pytest.raises(AssertionError, match=r"^assert"):
        check_sarathi(CutsToTheBudget(5, 5), 5, range(30))


def test_in_random_traces_decodes_alone_may_have_more_rows_than_the_budget() -> None:
    """So both laws meet what they except: of fcfs one request, of sarathi several."""
    widths = {
        len(one.requests)
        for policy in (FirstComePolicy(1, 1), SarathiPolicy(1))
        for one in random_passes(policy, range(12))
        if sum(one.rows) > 1
    }
    assert widths >= {1, 2}


# ---------------------------------------------------------------------- what padding costs


def test_a_padded_batch_runs_rows_that_are_no_token() -> None:
    """EMS-SD (arXiv 2405.07542) counts them: here a ragged pass runs the real rows alone."""
    got = run_padded(PROMPTS, draft_partly_right)
    real = 0
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        real += len(prompt) - 1
        for tokens in rounds_alone(prompt, NEW_TOKENS - row, draft_partly_right):
            real += 1 + len(draft_partly_right(text))
            text += tokens
    assert sum(one.real_rows for one in got.passes) == real
    assert all(one.rows >= one.real_rows for one in got.passes)
    assert sum(one.rows for one in got.passes) > 1.25 * real


def test_a_padded_cache_grows_by_the_most_accepted_in_every_pass() -> None:
    """Rows that accept less have slots without a token, and keep them."""
    unused = [one.slots - one.real_slots for one in run_padded(PROMPTS, draft_partly_right).passes]
    assert unused == sorted(unused) and unused[-1] > unused[0]


def test_one_request_has_no_padding() -> None:
    for one in run_padded(PROMPTS[:1], draft_partly_right).passes:
        assert (one.rows, one.slots) == (one.real_rows, one.real_slots)
