"""MagicDec: the target drafts with a fixed number of keys."""

from typing import Any

import pytest

from tests.lm.small import LLAMA, model
from tinyspec.decoding.costs import ForecastRounds, PassCosts, RooflineCosts
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import begin_decoder
from tinyspec.laws.traps import magicdec as traps
from tinyspec.speculative.integrated.magicdec import forecast_gain
from tinyspec.technique import Request, find_technique

CARD = find_technique("magicdec")
M = model(LLAMA)
TEXT = [(7 * n * n + n) % 11 for n in range(30)]


def test_trap_the_draft_reads_the_first_tokens_and_the_latest_ones() -> None:
    assert traps.reads_a_fixed_number_of_keys(CARD.make).cases == 9


def test_a_budget_that_holds_the_text_drafts_with_the_target_itself() -> None:
    decoder = begin_decoder(CARD.make, [M], TEXT, SamplingParams(), 20, budget=64, gamma=4)
    rounds = [*decoder.run(Seeded(0))]
    assert all(len(one.verdict.accepted) == len(one.tree.tokens) for one in rounds)
    assert [len(one.tokens) for one in rounds] == [5, 5, 5, 5]


def test_the_number_of_keys_does_not_grow_with_the_text() -> None:
    decoder = begin_decoder(CARD.make, [M], TEXT, SamplingParams(), 20, budget=8, sink=2)
    drafter: Any = decoder.drafter
    while not decoder.finished:
        n = len(decoder.context)
        decoder.step(Seeded(decoder.rounds))
        seen = drafter.view.plan.visible
        assert seen.since == n - 6
        assert all(head == {0, 1} for heads in seen.layers for head in heads)


def test_the_gain_is_forecast_where_only_weights_or_only_keys_take_time() -> None:
    """A pass takes its bytes. Where keys are free, a draft step takes a whole pass. Where weights are
    free, it takes its share of the keys. Where only arithmetic takes time, each row costs the same."""
    limits: dict[str, Any] = {"bandwidth": 1.0, "peak": 1e12, "head_bytes": 0, "row_operations": 0}
    limits |= {"head_operations": 0, "read_operations": 0}
    weights = RooflineCosts("m", "d", weight_bytes=100, slot_bytes=0, **limits)
    keys = RooflineCosts("m", "d", weight_bytes=0, slot_bytes=1, **limits)

    def gain(passes: PassCosts, n_requests: int = 4) -> float:
        costs = ForecastRounds(passes, passes, context=1000, draft_context=100)
        return forecast_gain(costs, n_requests, gamma=3, alpha=1.0)

    assert gain(weights) == pytest.approx(4 / (3 + 1))
    assert gain(keys) == pytest.approx(4 * 1001 / (3 * 101 + 1004))
    rows = RooflineCosts(
        *("m", "d"), weight_bytes=0, slot_bytes=0, **{**limits, "row_operations": 1, "peak": 1.0}
    )
    assert gain(rows) == pytest.approx(4 / (3 + 4))  # four rows are verified
    both = RooflineCosts("m", "d", weight_bytes=1000, slot_bytes=1, **limits)
    gains = [gain(both, n) for n in (1, 4, 16, 64)]
    assert gains == sorted(gains)  # it grows with the batch


def test_the_window_must_have_a_token() -> None:
    with pytest.raises(TinyspecError, match="give a sink below the budget"):
        CARD.make(Request(M.session()), budget=4, sink=4)
