"""Autoregressive decoding: the printed loop is what runs."""

from fractions import Fraction as F

from tests.speculative.printed import outcomes_of
from tests.table import Table, exact_distribution
from tinyspec.speculative.autoregressive import generate_tokens
from tinyspec.technique import Request, find_technique

CARD = find_technique("autoregressive")


def test_printed_algorithm_is_what_runs() -> None:
    """`generate_tokens` gives every text of three tokens with the decoder's probability."""
    for seed in range(6):
        table = Table(seed)

        def p(text: list[int], table: Table = table) -> list[F]:
            weights = table.row(text)
            return [F(x, sum(weights)) for x in weights]

        printed = outcomes_of(lambda *given: tuple(generate_tokens(*given)), p, [0], 3)
        decoder = exact_distribution(lambda seed=seed: CARD.make(Request(Table(seed))), 3, (0,))  # type: ignore[misc]
        assert printed == dict(decoder)
