"""BASS (Qian et al. 2024): one draft length for a batch, and no request is cut to another's."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.speculative.integrated.bass import BassRule, next_length

LENGTH = "the draft length of a batch follows what each of its requests accepted"


def list_lengths(first: int, limit: int, rounds: list[list[int]]) -> list[int]:
    """Return the draft lengths by algorithm 1, each case in a line of its own."""
    length, falls, lengths = min(first, limit), 0, []
    for accepted in rounds:
        if any(n >= length for n in accepted):
            length, falls = length + 2, 0
        else:
            tenth = length // 10 + (1 if length % 10 else 0)
            length -= tenth + (1 if falls else 0)
            for n in [1, *accepted]:
                length = n if n > length else length
            falls = 1
        length = limit if length > limit else length
        lengths.append(length)
    return lengths


@collect_evidence(LENGTH)
def length_follows_the_batch(make: Callable[[int, int], Any]) -> Iterator[int]:
    """Check the lengths against a plain list, on random rounds of some requests."""
    for seed in range(60):
        rng = random.Random(seed)
        first, limit, size = rng.randint(1, 12), rng.choice([4, 16, 32]), rng.randint(1, 5)
        rule, rounds, got = make(first, limit), list[list[int]](), list[int]()
        length = rule.decide(dict.fromkeys(range(size)), size)[0]
        for _ in range(12):
            best = rng.choice([length, length, rng.randint(0, length)])
            rounds.append([rng.randint(0, best) for _ in range(size - 1)] + [best])
            lengths = rule.decide(dict(enumerate(rounds[-1])), size)
            length = lengths[0]
            case = {"first": first, "limit": limit, "accepted": rounds}
            expect_equal(LENGTH, {length}, set(lengths.values()), **case, compared="one for all")
            got.append(length)
        expect_equal(LENGTH, list_lengths(first, limit, rounds), got, **case)
        yield 0


TRAPS = [Trap(LENGTH, length_follows_the_batch, lambda: BassRule)]

_bass = partial(Toy, technique="bass", function=next_length, law=LENGTH)

TOYS = [
    _bass("the length follows the mean", "max(accepted) >=", "sum(accepted) / len(accepted) >="),
    _bass("all requests are cut to the least", "max(1, *accepted,", "max(1, min(accepted),"),
    _bass("a second fall is no faster", "ceil(length / 10) - fell", "ceil(length / 10)"),
]
