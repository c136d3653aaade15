"""SARATHI: prompts are read in chunks, beside the requests that decode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA, model
from tests.zoo import failed
from tests.zoo import run as run_command
from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.schedule_laws import scheduled_request_is_alone
from tinyspec.lm.policies import FirstComePolicy, LockstepPolicy, Pending, Policy
from tinyspec.lm.scheduler import Scheduler, SharedPass
from tinyspec.speculative.integrated.sarathi import SarathiPolicy, fill_pass
from tinyspec.technique import find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("sarathi")
M = model(LLAMA)


def read_and_write(n_prompt: int, n: int) -> Callable[[Scheduler | None], Iterator[int]]:
    """Return a job that reads a prompt and then decodes n tokens."""

    def job(scheduler: Scheduler | None) -> Iterator[int]:
        session = M.session(scheduler=scheduler)
        session.extend([1 + i % 9 for i in range(n_prompt)])
        for _ in range(n):
            token = int(session.score(TokenTree()).logits[0].argmax())
            session.commit((), token)
            yield token

    return job


def run(policy: Policy, *jobs: Callable[[Scheduler | None], Iterator[int]]) -> list[SharedPass]:
    """Return the pass log of these jobs. Each text is the one that its job writes alone."""
    with Scheduler(policy) as scheduler:
        with scheduler.together():
            tickets = [scheduler.submit(job) for job in jobs]
        for ticket in tickets:
            assert list(ticket) == list(jobs[ticket.number](None))
        return list(scheduler.pass_log)


# ---------------------------------------------------------------------- the trap


class Stalling(SarathiPolicy):
    """Chunks in passes of their own: while a prompt is read, nobody decodes."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        prompts = [pending for pending in waiting if pending.is_prefill]
        return super().pick(prompts or waiting)


def longest_gap(log: Sequence[SharedPass], request: int) -> int:
    """Return how many passes in a row went by without a token of a request that decodes."""
    seen = [-1, *(n for n, one in enumerate(log) if request in one.requests)]
    return max(b - a - 1 for a, b in pairwise(seen))


def test_a_request_that_decodes_gets_a_token_in_every_pass_however_long_the_prompts() -> None:
    jobs = read_and_write(1, 12), read_and_write(30, 1), read_and_write(25, 1)
    assert longest_gap(run(SarathiPolicy(8), *jobs), 0) == 0
    assert longest_gap(run(Stalling(8), *jobs), 0) >= 6  # 53 rows of prompts, 8 in a pass


# ---------------------------------------------------------------------- the rule


def test_what_is_left_of_the_budget_goes_to_the_oldest_prompt_first() -> None:
    assert fill_pass([], [9, 9], 12) == [9, 3]
    assert fill_pass([1, 4], [9, 9], 12) == [7, 0]
    assert fill_pass([6, 6], [9], 12) == [0]
    assert fill_pass([6, 7], [9], 12) == [0]  # all that decode take part


def test_least_leaves_rows_to_prompts_where_decodes_have_spent_the_budget() -> None:
    assert fill_pass([6, 6], [9, 9], 12, least=1) == [1, 0]
    assert fill_pass([6, 6], [2, 9], 12, least=5) == [2, 3]
    assert fill_pass([1], [9, 9], 12, least=5) == [9, 2]  # the budget leaves more than that


def passes_to_read(policy: Policy, decodes: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """Return after how many passes each prompt is read; fewer entries: those that starve.

    decodes  rows of the requests that decode, in every pass

    The prompts are the oldest first.
    """
    left, most = dict(enumerate(prompts)), sum(prompts)
    steps = [Pending(-1 - n, "m", 1, rows, False, held=0) for n, rows in enumerate(decodes)]
    read = list[int]()
    for n in range(1, most + 1):
        waiting = [Pending(at, "m", 1, rows, True, held=0) for at, rows in left.items()]
        picked = policy.pick([*steps, *waiting])
        left = {at: rows - picked.get(at, 0) for at, rows in left.items()}
        read += [n for rows in left.values() if rows == 0]
        left = {at: rows for at, rows in left.items() if rows}
    return read


def test_a_prompt_starves_while_decodes_use_up_the_budget_and_least_ends_it() -> None:
    assert passes_to_read(SarathiPolicy(2), [1, 1], [3]) == []
    assert passes_to_read(SarathiPolicy(2, least=1), [1, 1], [3]) == [3]
    assert passes_to_read(SarathiPolicy(2, least=2), [1, 1], [3, 2]) == [2, 3]


rows_of_requests = st.lists(st.integers(1, 12), max_size=6)


@given(rows_of_requests, rows_of_requests, st.integers(1, 20), st.integers(1, 8))
def test_with_least_every_prompt_is_read_within_the_stated_passes(
    decodes: list[int], prompts: list[int], budget: int, least: int
) -> None:
    """At most ceil((rows of older prompts + its own) / least) passes, whoever decodes."""
    read = passes_to_read(SarathiPolicy(budget, least), decodes, prompts)
    bounds = [-(-rows // least) for rows in accumulate(prompts)]
    assert len(read) == len(prompts)
    assert all(n <= bound for n, bound in zip(read, bounds, strict=True))


def test_with_least_a_prompt_is_read_beside_requests_that_decode() -> None:
    """Two that decode spend the budget of 2. The third text waits for their end, or does not."""
    jobs = read_and_write(1, 12), read_and_write(1, 12), read_and_write(6, 1)

    def last_pass(policy: Policy) -> int:
        log = run(policy, *jobs)
        return max(n for n, one in enumerate(log) if 2 in one.requests)

    assert last_pass(SarathiPolicy(2)) >= 12
    assert last_pass(SarathiPolicy(2, least=1)) == 5  # one row of 5 in each pass, then a token


def test_what_runs_is_what_the_rule_says() -> None:
    for decodes, prompts, budget in product(
        ((), (1,), (1, 5)), ((), (3,), (9, 2), (2, 2, 9)), (1, 4, 8)
    ):
        rows = [*decodes, *prompts]
        waiting = [Pending(n, "m", 1, rows[n], n >= len(decodes), held=0) for n in range(len(rows))]
        if not waiting:
            continue
        chunks = fill_pass(decodes, prompts, budget)
        expected = {n: n_rows for n, n_rows in enumerate([*decodes, *chunks]) if n_rows}
        assert SarathiPolicy(budget).pick(waiting) == expected


def test_draft_and_target_have_a_budget_each() -> None:
    waiting = [Pending(n, "ab"[n % 2], 1 + n % 2, 9, True, held=0) for n in range(4)]
    assert SarathiPolicy(12).pick(waiting) == {0: 9, 2: 3, 1: 9, 3: 3}


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_no_pass_is_over_the_budget_and_a_prompt_takes_as_few_as_it_can(budget: int) -> None:
    log = run(SarathiPolicy(budget), read_and_write(30, 2))
    assert all(sum(one.rows) <= budget for one in log)
    assert len(log) == -(-29 // budget) + 2


def test_rows_of_a_chunk_that_ends_inside_a_prompt_have_no_logits() -> None:
    log = run(SarathiPolicy(5), read_and_write(12, 1), read_and_write(1, 6))
    heads = [(p, h) for one in log for p, h in zip(one.prefill, one.heads, strict=True)]
    assert {h for is_prompt, h in heads if is_prompt} == {0}
    assert {h for is_prompt, h in heads if not is_prompt} == {1}


def test_short_prompts_read_fewer_passes_than_one_after_another() -> None:
    """The rest of a prompt and the begin of the next one share a pass."""
    jobs = [read_and_write(4, 1) for _ in range(4)]
    assert len(run(SarathiPolicy(12), *jobs)) < len(run(FirstComePolicy(3, 3), *jobs))


# ---------------------------------------------------------------------- the card


def test_the_card_makes_a_policy_and_no_decoder() -> None:
    assert CARD.policy(budget=64).pick([Pending(0, "m", 1, 99, True, 0)]) == {0: 64}
    with pytest.raises(TinyspecError, match="give it as `tinyspec serve --policy sarathi`"):
        CARD.make(None)  # type: ignore[arg-type]
    told = failed(run_command("generate", "Once", "--method", "sarathi"))
    assert "give it as `tinyspec serve --policy sarathi`" in told
    with pytest.raises(TinyspecError, match="llma schedules no requests"):
        find_technique("llma").policy()


class Unequal(LockstepPolicy):
    """Decides by something else than the arrivals."""

    calls = 0

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        Unequal.calls += 1
        picked = dict(super().pick(waiting))
        if len(picked) > 1 and Unequal.calls % 3 == 0:
            picked.popitem()
        return picked


def test_the_law_of_policies_accuses_one_that_decides_by_more_than_the_arrivals() -> None:
    with pytest.raises(LawViolated, match="the same arrivals again"):
        scheduled_request_is_alone(Unequal, range(20))
