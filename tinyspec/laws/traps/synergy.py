"""Synergy (Su et al. 2023): the table follows from measurements, and plain decoding is in it."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tinyspec.decoding.costs import MeasuredRounds
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.speculative.batched import BatchProfile
from tinyspec.speculative.integrated.synergy import SynergyRule, best_lengths

BEST = "the table has the length whose tokens take least time"
COUNTED = "requests that draft at another moment count, too"


def random_profile(seed: int, longest: int = 5) -> BatchProfile:
    """Return a profile of a machine whose passes grow with their rows beyond a knee."""
    rng = random.Random(seed)
    knee, step = rng.randint(1, 30), rng.uniform(0.01, 0.3)
    verify = {
        size: [1 + 0.1 * max(size * (n + 1) - knee, 0) for n in range(longest + 1)]
        for size in (1, 2, 4, 8, 16)
    }
    chance = rng.uniform(0.2, 0.95)
    costs = MeasuredRounds(verify, dict.fromkeys(verify, step))
    return BatchProfile(costs, [chance**n for n in range(1, longest + 1)])


@collect_evidence(BEST)
def table_has_the_best_lengths(choose: Callable[..., dict[int, int]]) -> Iterator[int]:
    """Check each length of the table against all lengths: 1,000 tokens are written with each."""
    plain, drafted = 0, 0
    for seed in range(40):
        costs, reach = profile = random_profile(seed)
        table = choose(costs, reach, costs.sizes)
        expect_equal(BEST, set(costs.verify), set(table), profile=profile)
        for size, length in table.items():
            seconds = []
            for n in range(len(reach) + 1):
                rounds = 1000 / (1 + sum(reach[:n]))
                seconds.append(rounds * (costs.verify[size][n] + n * costs.step[size]))
            expect_equal(BEST, round(min(seconds), 9), round(seconds[length], 9), size=size)
            plain, drafted = plain + (length == 0), drafted + (length > 0)
        yield 0
    expect_equal(BEST, True, plain > 10 and drafted > 10, compared="both are best somewhere")


@collect_evidence(COUNTED)
def all_that_decode_are_counted(make: Callable[..., Any]) -> Iterator[int]:
    """Check the lengths of a table for requests that ask together, and for those that do not."""
    table = {1: 5, 2: 4, 8: 1, 16: 0}
    due = {1: 5, 2: 4, 4: 4, 5: 4, 6: 1, 8: 1, 11: 1, 13: 0, 40: 0}
    for n_decoding, length in due.items():
        for n_asking in range(1, n_decoding + 1):
            rule = make(table, None)
            got = rule.decide(dict.fromkeys(range(n_asking), ()), n_decoding)
            case = {"table": table, "asking": n_asking, "decoding": n_decoding}
            expect_equal(COUNTED, dict.fromkeys(range(n_asking), length), got, **case)
        yield 0


TRAPS = [
    Trap(BEST, table_has_the_best_lengths, lambda: best_lengths),
    Trap(COUNTED, all_that_decode_are_counted, lambda: SynergyRule),
]

_synergy = partial(Toy, technique="synergy")

TOYS = [
    _synergy(
        "always a draft",
        "range(len(reach) + 1)",
        "range(1, len(reach) + 1)",
        best_lengths,
        law=BEST,
    ),
    _synergy(
        "one table for all batch sizes",
        "costs.verify_seconds(size, size * length)",
        "costs.verify_seconds(1, length)",
        best_lengths,
        law=BEST,
    ),
    _synergy(
        "draft steps are free",
        "length * costs.step_seconds(size)",
        "0",
        best_lengths,
        law=BEST,
    ),
    _synergy(
        "those that ask are the batch",
        "abs(size - n_decoding)",
        "abs(size - len(questions))",
        SynergyRule.decide,
        law=COUNTED,
    ),
]
