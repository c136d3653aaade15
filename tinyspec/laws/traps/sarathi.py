"""SARATHI (Agrawal et al. 2023): prompts in chunks *beside* those that decode, not in turn."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.schedule_laws import random_trace, run_trace
from tinyspec.laws.traps import Trap
from tinyspec.lm.policies import Pending, Policy
from tinyspec.lm.session import Session
from tinyspec.speculative.integrated.sarathi import SarathiPolicy, fill_pass
from tinyspec.technique import find_technique

NO_STALL = "a request that decodes takes part in every pass of its model"
FILLED = "the rows of a pass go to the oldest prompt until the budget is spent"
KEPT = "no pass has more rows than its budget, but for those that decode"

MakePolicy = Callable[..., Policy]
DECODES = ((), (1,), (1, 4), (3, 3, 3))
PROMPTS = ((), (5,), (2, 9), (20, 1, 7))


def make_waiting(decodes: tuple[int, ...], prompts: tuple[int, ...]) -> list[Pending]:
    """Return what waits; those that decode and the prompts in turn."""
    kinds = [(rows, False) for rows in decodes], [(rows, True) for rows in prompts]
    longest = max(len(decodes), len(prompts))
    mixed = [each[at] for at in range(longest) for each in kinds if at < len(each)]
    return [Pending(n, "m", 1, *kind, held=0) for n, kind in enumerate(mixed)]


@collect_evidence(NO_STALL)
def decodes_always_run(make: MakePolicy) -> Iterator[int]:
    """Check what is picked, however much of prompts waits."""
    for decodes, prompts, budget in product(DECODES[1:], PROMPTS, (1, 4, 16)):
        waiting = make_waiting(decodes, prompts)
        picked = make(budget=budget).pick(waiting)
        due = {one.request: one.rows for one in waiting if not one.is_prefill}
        got = {request: rows for request, rows in picked.items() if request in due}
        expect_equal(NO_STALL, due, got, decodes=decodes, prompts=prompts, budget=budget)
        yield 0


@collect_evidence(FILLED)
def prompts_fill_the_pass(make: MakePolicy) -> Iterator[int]:
    """Check the chunks against rows that are dealt one by one."""
    for decodes, prompts, budget in product(DECODES, PROMPTS[1:], (1, 4, 16)):
        waiting = make_waiting(decodes, prompts)
        row_by_row = [one.request for one in waiting if one.is_prefill for _ in range(one.rows)]
        dealt = row_by_row[: max(budget - sum(decodes), 0)]
        expected = {request: dealt.count(request) for request in dealt}
        picked = make(budget=budget).pick(waiting)
        got = {one.request: picked[one.request] for one in waiting if one.request in picked}
        chunks = {n: rows for n, rows in got.items() if waiting[n].is_prefill}
        expect_equal(FILLED, expected, chunks, decodes=decodes, prompts=prompts, budget=budget)
        yield 0


@collect_evidence(KEPT)
def budget_is_kept(make: MakePolicy) -> Iterator[int]:
    """Check the pass log of random arrivals. A chunk that ends inside a prompt has no logits."""
    for seed, budget in product(range(6), (1, 3, 8)):
        for one in run_trace(make(budget=budget), random_trace(seed)).pass_log:
            shares = zip(one.rows, one.prefill, strict=True)
            read = sum(rows for rows, is_prompt in shares if is_prompt)
            case = {"budget": budget, "rows": one.rows, "is_prompt": one.prefill, "turn": one.turn}
            if read and sum(one.rows) > budget:
                accuse(KEPT, f"at most {budget} rows", sum(one.rows), **case)
            if any(n for n, is_prompt in zip(one.heads, one.prefill, strict=True) if is_prompt):
                accuse(KEPT, "no logits of a prompt's rows", one.heads, **case)
            if any(
                rows > 5 for rows, prompt in zip(one.rows, one.prefill, strict=True) if not prompt
            ):
                accuse(KEPT, "5 rows of a round at most", one.rows, **case)
        yield 0


def sarathi_policy() -> MakePolicy:
    """Return a function that makes the registered policy."""
    return find_technique("sarathi").policy


TRAPS = [
    Trap(NO_STALL, decodes_always_run, sarathi_policy),
    Trap(FILLED, prompts_fill_the_pass, sarathi_policy),
    Trap(KEPT, budget_is_kept, sarathi_policy),
]

_sarathi = partial(Toy, technique="sarathi")

TOYS = [
    _sarathi(
        "chunks in passes of their own",
        "for pending in decodes}",
        "for pending in decodes if not prompts}",
        SarathiPolicy.pick,
        law=NO_STALL,
    ),
    _sarathi(
        "whole prompts",
        "rows.append(max(min(prompt, left), 0))",
        "rows.append(prompt if left > 0 else 0)",
        fill_pass,
        law=FILLED,
    ),
    _sarathi(
        "a budget for prompts alone",
        "budget - sum(decodes)",
        "budget",
        fill_pass,
        law=FILLED,
    ),
    _sarathi(
        "the first chunk is cut, the rest is one",
        "nodes = nodes[len(scores.layers) :]",
        "nodes = nodes[PREFILL_CHUNK:]",
        Session._run_prompt,
        law=KEPT,
    ),
]
