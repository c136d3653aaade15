"""SmartSpec (Liu et al. 2024): the lengths of a batch that have the greatest goodput."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from tinyspec.decoding.costs import CostModel
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.laws.traps.synergy import random_profile
from tinyspec.speculative.integrated.smartspec import (
    PLAIN_BONUS,
    SmartSpecDrafter,
    choose_equal_lengths,
    choose_lengths,
    seconds_of,
)
from tinyspec.technique import Request

GREATEST = "no other lengths of the batch have more goodput"
EQUAL = "no other length that all requests have has more goodput"
TESTED = "the rate counts the tokens that were tested"


def goodput(rates: Sequence[float], lengths: Sequence[int], costs: CostModel) -> float:
    """Return the expected tokens per second; plain decoding's with its bonus."""
    tokens = sum(
        sum(rate**n for n in range(length + 1)) for rate, length in zip(rates, lengths, strict=True)
    )
    bonus = 1.0 if any(lengths) else PLAIN_BONUS
    return bonus * tokens / seconds_of(lengths, costs)


def _check_goodput(law: str, choose: Callable[..., list[int]], is_equal: bool) -> Iterator[int]:
    """Check lengths against all others, where draft steps cost something and nothing."""
    batches = ([0.9], [0.1], [0.9, 0.1], [0.6, 0.8], [0.95, 0.5, 0.2])
    for seed, rates in product(range(8), batches):
        costly = random_profile(seed, 3).costs
        free = replace(costly, step=dict.fromkeys(costly.step, 0.0))
        for costs in (free, costly):
            got, every = choose(rates, costs, 3), [*product(range(4), repeat=len(rates))]
            if is_equal:
                every = [lengths for lengths in every if len(set(lengths)) == 1]
            if tuple(got) not in every:
                accuse(law, every, got, rates=rates)
            best = max(goodput(rates, lengths, costs) for lengths in every)
            if goodput(rates, got, costs) < best - 1e-12:
                case = {"rates": rates, "costs": costs, "lengths": got}
                accuse(law, best, goodput(rates, got, costs), **case)
        yield 0


@collect_evidence(GREATEST)
def lengths_have_the_greatest_goodput(choose: Callable[..., list[int]]) -> Iterator[int]:
    """Check the lengths against all others."""
    yield from _check_goodput(GREATEST, choose, is_equal=False)


@collect_evidence(EQUAL)
def equal_lengths_have_the_greatest_goodput(choose: Callable[..., list[int]]) -> Iterator[int]:
    """Check one length for all against every other one."""
    yield from _check_goodput(EQUAL, choose, is_equal=True)


@collect_evidence(TESTED)
def rate_counts_tested_tokens(build: Build) -> Iterator[int]:
    """Check what a drafter counts in rounds of all lengths, against the rounds themselves."""
    for seed in range(6):
        models = [TableModel(seed, 3), TableModel(seed + 9, 3)]

        def build_varied(request: Request, seed: int = seed, **knobs: Any) -> Any:
            request.choose = lambda n, rng: int(Seeded(seed).accept(0.2) + seed) % n
            return build(request, **knobs)

        decoder = begin_decoder(build_varied, models, (0,), SAMPLED, 12, longest=4)
        tested = accepted = 0
        while not decoder.finished:
            round = decoder.step(Seeded(decoder.rounds))
            stands = [*round.verdict.accepted, *round.verdict.rejected]
            tested, accepted = tested + len(stands), accepted + len(round.verdict.accepted)
            drafter: Any = decoder.drafter
            case = {"seed": seed, "drafted": len(round.tree.tokens), "verdict": round.verdict}
            expect_equal(TESTED, (tested, accepted), (drafter.tested, drafter.accepted), **case)
        yield 0


TRAPS = [
    Trap(GREATEST, lengths_have_the_greatest_goodput, lambda: choose_lengths),
    Trap(EQUAL, equal_lengths_have_the_greatest_goodput, lambda: choose_equal_lengths),
    Trap(TESTED, rate_counts_tested_tokens, card("smartspec")),
]

_smartspec = partial(Toy, technique="smartspec")

TOYS = [
    _smartspec(
        "all drafts have the greatest length",
        "(now := tokens / (shared[n_drafted] + most * step)) > goodput",
        "(now := tokens) > goodput",
        choose_lengths,
        law=GREATEST,
    ),
    _smartspec(
        "the oldest request gets its tokens first, whatever the rates",
        "ordered = sorted(",
        "ordered = list(",
        choose_lengths,
        law=GREATEST,
    ),
    _smartspec(
        "lengths are searched as if draft steps were free",
        "for most in range(1, longest + 1)",
        "for most in range(longest, longest + 1)",
        choose_lengths,
        law=GREATEST,
    ),
    _smartspec(
        "one length is chosen as if drafts were free",
        "/ seconds_of([length] * len(rates), costs)",
        "",
        choose_equal_lengths,
        law=EQUAL,
    ),
    _smartspec(
        "tokens behind a rejection count as rejected",
        "accepted + len(round.verdict.rejected[:1])",
        "len(round.tree.tokens)",
        SmartSpecDrafter.observe,
        law=TESTED,
    ),
]
