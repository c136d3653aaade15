"""BiLD (Kim et al. 2023): the text is that of the paper's algorithm.

There is no ratio test. An unsure token is not drafted, the first bad one is taken back, and nothing
after it is kept.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import exp
from typing import Any

from tinyspec.decoding.decode import Decoder, Verifier
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.loop_laws import (
    SMALL_TABLES,
    Table,
    format_table,
    table_model,
    table_reference,
)
from tinyspec.laws.row_laws import normalize_weights
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, check_table_law
from tinyspec.speculative.verification.bild import BildDrafter
from tinyspec.technique import Request

ALGORITHM = "the text is algorithm 1's (Kim et al. 2023)"

LARGE: Table = ((1, 30, 4), (8, 1, 1), (1, 2, 1))
LITTLE: Table = ((9, 1, 2), (1, 1, 9), (3, 4, 2))
DISTANCES = (0.0, 0.5, 1.5, 3.0)
WANTED, CAP = 8, 4


def run_algorithm(
    large: Table, little: Table, fallback: float, rollback: float, rule: str
) -> Iterator[list[int]]:
    """Yield the text after each call of the large model, by algorithm 1 at temperature 0."""
    least = exp(-rollback)
    best = [row.index(max(row)) for row in large]
    text = [0]
    while True:
        settled = len(text)
        while len(text) < settled + CAP and max(normalize_weights(little[text[-1]])) > fallback:
            text.append(little[text[-1]].index(max(little[text[-1]])))
        for at in range(settled, len(text)):
            before, token = text[at - 1], text[at]
            if normalize_weights(large[before])[token] < least and (
                rule == "paper" or best[before] != token
            ):
                text = text[:at]
                break
        text.append(best[text[-1]])
        yield list(text)


def algorithm_cases() -> Iterator[tuple[Table, Table, float, float, str]]:
    """Yield large and small table, fallback, rollback, rule."""
    tables = [(p, q) for p, q in SMALL_TABLES if len(p) > 1] + [(LARGE, LITTLE), (LITTLE, LARGE)]
    for (p, q), rollback, fallback, rule in product(
        tables, DISTANCES, (0.0, 0.6), ("paper", "safe")
    ):
        yield _spread_rows(p), _spread_rows(q), fallback, rollback, rule


def _spread_rows(table: Table) -> Table:
    """Return a table with a row for every last token."""
    return tuple(table[token % len(table)] for token in range(len(table[0])))


@collect_evidence(ALGORITHM)
def follows_the_algorithm(build: Build) -> Iterator[int]:
    """Check every text, and the rounds it took, against the loop of the paper at temperature 0."""
    for p, q, fallback, rollback, rule in algorithm_cases():
        knobs: dict[str, Any] = {"fallback": fallback, "rollback": rollback, "rule": rule}
        decoder = begin_decoder(build, [table_model(p), table_model(q)], (0,), gamma=CAP, **knobs)
        case = {"large": format_table(p), "small": format_table(q), **knobs}
        for expected in run_algorithm(p, q, fallback, rollback, rule):
            decoder.step(Seeded(decoder.rounds))
            expect_equal(ALGORITHM, expected, decoder.context, **case, calls=decoder.rounds)
            yield 0
            if len(expected) > WANTED:
                break


@collect_evidence(JOINT)
def exact_where_nothing_is_trusted(build: Build) -> Iterator[int]:
    """Check that at rollback 0 the joint distribution of two tokens is the large model's own."""
    for (p, q), rule in product(SMALL_TABLES[2:7], ("paper", "safe")):
        case = {"large": format_table(p), "small": format_table(q), "rule": rule}
        knobs: dict[str, Any] = {"fallback": 0.0, "rollback": 0.0, "rule": rule, "gamma": 2}
        yield check_table_law(build, (p, q), table_reference(p), case, **knobs)


def build_with_policy(policy: Callable[[float, str], Verifier]) -> Build:
    """Return a builder of the technique with another rollback policy."""

    def build(request: Request, fallback: float, rollback: float, rule: str, gamma: int) -> Decoder:
        drafter = BildDrafter(fallback, request.drafts[0], gamma, frozenset(), None)
        return request.decoder(drafter, policy(rollback, rule))

    return build


TRAPS = [
    Trap(ALGORITHM, follows_the_algorithm, card("bild")),
    Trap(JOINT, exact_where_nothing_is_trusted, card("bild")),
]
