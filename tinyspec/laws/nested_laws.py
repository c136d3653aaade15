"""The law of a cascade: a decoder drafts for a decoder, and what comes out is the outer target's
law.

Whoever finalised a token has to be the one whose law it declares. Judged on three levels of tables
by hand, the smallest first.
"""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.exact import Reference, exact_law
from tinyspec.laws.loop_laws import Table, format_table, table_model
from tinyspec.laws.parts import Parts
from tinyspec.laws.row_laws import normalised

LEVELS = "joint law of three levels"

HALF_TABLE, THIRD_TABLE, OTHER_TABLE = ((1, 1),), ((1, 2),), ((2, 1),)
CASCADE_CASES: tuple[tuple[Table, Table, Table], ...] = (
    (HALF_TABLE, HALF_TABLE, THIRD_TABLE),
    (HALF_TABLE, THIRD_TABLE, OTHER_TABLE),
    (THIRD_TABLE, OTHER_TABLE, HALF_TABLE),
    (((1, 3), (2, 1)), ((2, 1), (1, 2)), THIRD_TABLE),
    (((1, 2, 1), (1, 0, 1), (2, 1, 1)), ((1, 1, 2), (1, 1, 1), (1, 2, 1)), ((2, 1, 1),)),
)
"""Target, middle, small."""


def make_cascade(parts: Parts, tables: tuple[Table, Table, Table]) -> Decoder:
    """A small model drafts a token for the middle, which makes two for the target."""
    target, middle, small = (table_model(table).session() for table in tables)
    inner = parts.decoder(middle, parts.drafter(small, 1, frozenset()), parts.walk)
    return parts.decoder(target, parts.nested(inner, 2), parts.walk)


def three_levels(parts: Parts) -> Evidence:
    """The joint law of the first two tokens, over as many rounds as they take."""
    branches = 0
    for tables in CASCADE_CASES:
        got = exact_law(lambda tables=tables: make_cascade(parts, tables), 2)  # type: ignore[misc]
        rows = tables[0]
        expected = Reference(lambda text, rows=rows: normalised(rows[text[-1] % len(rows)])).law(2)  # type: ignore[misc]
        branches += got.branches
        if got != expected:
            told = dict(zip(("p", "middle", "small"), map(format_table, tables), strict=True))
            accuse(
                LEVELS, dict(sorted(expected.items())), dict(sorted(got.items())), **told, gamma=2
            )
    return Evidence(LEVELS, len(CASCADE_CASES), branches)


def drafted_rounds(parts: Parts) -> Any:
    """What can be seen without a law: the trees and texts of some rounds."""
    seen = []
    for tables in CASCADE_CASES:
        for seed in range(6):
            decoder, rng = make_cascade(parts, tables), Seeded(seed)
            decoder.extend((0,))
            for _ in range(3):
                round = decoder.step(rng)
                laws = [
                    None if row is None else [str(x) for x in row] for row in round.tree.draft_probs
                ]
                seen.append((tuple(round.tree.tokens), laws, round.tokens))
    return seen


CASCADE_LAWS: dict[str, Callable[[Parts], Evidence]] = {LEVELS: three_levels}
