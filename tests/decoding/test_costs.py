"""Costs of shared passes: a model that gives back what it was fitted to, and a roofline."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from tests.lm.small import LLAMA
from tinyspec.decoding.costs import (
    LLAMA_13B,
    FittedCosts,
    ForecastRounds,
    MeasuredRounds,
    PassSample,
    RooflineCosts,
    RowCosts,
    a100_costs,
    count_reads,
    fit_costs,
    list_relative_errors,
    solve_nonnegative,
)
from tinyspec.errors import TinyspecError
from tinyspec.lm.scheduler import SharedPass
from tinyspec.speculative.drafting.sequoia import fastest_tree
from tinyspec.speculative.goodput import LearntCosts
from tinyspec.speculative.integrated.smartspec import choose_lengths
from tinyspec.speculative.integrated.synergy import best_lengths

COSTS = FittedCosts(
    model="m",
    dtype="bfloat16",
    threads=2,
    per_pass=4.0,
    per_session=0.25,
    per_read=0.001,
    per_head_pass=1.0,
    per_head=0.125,
    knots=(1, 8, 32),
    slopes=(0.0, 0.5, 0.75),
)
CELLS = [
    *(((k,) * b, (cached + k,) * b, (k,) * b)
      for b, k, cached in product((1, 2, 4, 8, 16), (1, 2, 3, 5, 9), (64, 384))),
    *(((chunk,), (cached + chunk,), (0,))
      for chunk, cached in product((32, 64, 128, 256), (64, 384))),
]  # fmt: skip
Shares = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=1, max_size=6)


def sample(costs: FittedCosts, noise: float = 0.0) -> list[PassSample]:
    """Passes that take as long as the costs say, up to some noise."""
    rng = np.random.default_rng(0)
    return [
        PassSample(*cell, costs.seconds_of(*cell) * (1 + noise * rng.uniform(-1, 1)))
        for cell in CELLS
    ]


# ---------------------------------------------------------------------- measured costs


def test_each_part_is_paid_as_often_as_it_occurs() -> None:
    # 4 a pass, 0.25 a session, 0.001 a read, 1 for the head's weights, 0.125 a row of it
    assert COSTS.seconds_of([1], [10], [0]) == pytest.approx(4 + 0.25 + 0.010)
    assert COSTS.seconds_of([1], [10], [1]) == pytest.approx(4 + 0.25 + 0.010 + 1 + 0.125)
    assert COSTS.seconds_of([1, 1], [10, 20], [1, 1]) == pytest.approx(4 + 0.5 + 0.030 + 1.25)
    # 40 rows are 24 beyond the 8th, and 8 beyond the 32nd; their reads are 1 + 2 + ... + 40
    assert COSTS.seconds_of([40], [40], [0]) == pytest.approx(4.25 + 0.820 + 12 + 6)


def test_an_entry_of_the_pass_log_costs_what_its_rows_cost() -> None:
    entry = SharedPass(0, "m", (0, 3), (2, 1), (9, 5), (0, 1), (True, False))
    assert COSTS.seconds(entry) == COSTS.seconds_of((2, 1), (9, 5), (0, 1))


@given(Shares)
def test_a_row_reads_its_own_slot_and_all_before_it(shares: list[tuple[int, int]]) -> None:
    rows, slots = [n for n, _ in shares], [n + cached for n, cached in shares]
    assert count_reads(rows, slots) == sum(
        cached + row + 1 for n, cached in shares for row in range(n)
    )


def test_a_fit_gives_back_the_costs_that_made_its_data() -> None:
    data = sample(COSTS)
    assert max(map(abs, list_relative_errors(fit_costs(data), data))) < 1e-9
    rows, slots, heads = (40, 1, 1), (300, 200, 100), (0, 1, 1)  # of no cell
    assert fit_costs(data).seconds_of(rows, slots, heads) == pytest.approx(
        COSTS.seconds_of(rows, slots, heads), rel=1e-6
    )


def test_a_fit_to_noisy_data_is_as_good_as_the_noise() -> None:
    fit = fit_costs(sample(COSTS, noise=0.1))
    assert max(map(abs, list_relative_errors(fit, sample(COSTS)))) < 0.1


NOISY = fit_costs(sample(COSTS, noise=0.3))


@given(Shares, st.integers(0, 5), st.integers(1, 20))
def test_more_rows_never_cost_less(shares: list[tuple[int, int]], at: int, more: int) -> None:
    rows, slots = [n for n, _ in shares], [n + cached for n, cached in shares]
    wider, at = list(rows), at % len(rows)
    wider[at] += more
    heads = [0] * len(rows)
    longer = [slots + more * (i == at) for i, slots in enumerate(slots)]
    assert NOISY.seconds_of(wider, longer, heads) >= NOISY.seconds_of(rows, slots, heads)
    assert NOISY.seconds_of(rows, slots, rows) >= NOISY.seconds_of(rows, slots, heads)


def test_costs_survive_a_file() -> None:
    fit = fit_costs(sample(COSTS, noise=0.1), "storyteller", "bfloat16", 2)
    assert FittedCosts.from_json(json.loads(json.dumps(fit.to_json()))) == fit
    assert (fit.model, fit.dtype, fit.threads) == ("storyteller", "bfloat16", 2)


@pytest.mark.parametrize("wrong", [{"knots": [1]}, {"slopes": ["x"] * 3}, {"per_row": 1}])
def test_a_file_without_costs_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(TinyspecError, match="measure them with `tinyspec bench serve`"):
        FittedCosts.from_json({**COSTS.to_json(), **wrong})


def test_a_fit_needs_as_many_passes_as_coefficients() -> None:
    with pytest.raises(TinyspecError, match="3 passes do not tell"):
        fit_costs(sample(COSTS)[:3])


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 12))
def test_the_solver_is_as_close_as_scipys(seed: int, m: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(m, n)) * 10.0 ** rng.integers(-4, 4, size=n), rng.normal(size=m)
    x, (_, least) = solve_nonnegative(a, b), nnls(a, b)
    assert (x >= 0).all() and np.linalg.norm(a @ x - b) <= least + 1e-9


# ---------------------------------------------------------------------- shared passes


def draw_costs(slopes: list[float]) -> FittedCosts:
    """Costs in which a further row is at most as dear as the rows before it are in the mean."""
    knots, capped, value = (1, 4, 16), list[float](), COSTS.per_pass
    for i, share in enumerate(slopes):
        capped.append(share * value / knots[i])
        value += capped[-1] * (knots[min(i + 1, 2)] - knots[i])
    return replace(COSTS, knots=knots, slopes=tuple(capped))


@given(Shares, st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_one_pass_of_several_requests_is_never_dearer_than_a_pass_of_each(
    shares: list[tuple[int, int]], slopes: list[float]
) -> None:
    rows, slots = [n for n, _ in shares], [n + cached for n, cached in shares]
    for costs in (draw_costs(slopes), a100_costs()):
        for heads in (rows, [0] * len(rows)):
            alone = [
                costs.seconds_of([n], [m], [k]) for n, m, k in zip(rows, slots, heads, strict=True)
            ]
            assert costs.seconds_of(rows, slots, heads) <= sum(alone) * (1 + 1e-9)


# ---------------------------------------------------------------------- a roofline


def test_a_roofline_is_the_slower_one_of_memory_and_arithmetic() -> None:
    roof = RooflineCosts(
        model="m",
        device="d",
        bandwidth=10.0,
        peak=100.0,
        weight_bytes=20.0,
        head_bytes=5.0,
        row_operations=40.0,
        head_operations=10.0,
        slot_bytes=1.0,
        read_operations=2.0,
    )
    assert roof.seconds_of([1], [5], [0]) == 2.5  # 20 + 5 bytes; 40 + 10 operations take 0.5
    assert roof.seconds_of([1], [5], [1]) == 3.0  # the head is read too
    assert roof.seconds_of([8], [8], [0]) == 3.92  # 320 + 2 * 36 operations; 28 bytes take 2.8
    assert roof.knee == 5.0


def test_a_roofline_counts_all_weights_of_a_model_and_each_of_its_keys() -> None:
    big = a100_costs()
    embedding = LLAMA_13B.vocab_size * LLAMA_13B.d_model
    assert (big.weight_bytes + big.head_bytes) / 2 + embedding == pytest.approx(13.0e9, rel=2e-3)
    assert big.slot_bytes == 2 * 40 * 2 * 5120  # bytes of K and V, in 40 layers
    assert big.knee == pytest.approx(153, abs=0.1)  # 312e12 / 2.039e12
    small = RooflineCosts.of_model("m", LLAMA, 4, "d", 1.0, 1.0)
    gains = (2 * LLAMA.n_layers + 1) * LLAMA.d_model
    assert (small.weight_bytes + small.head_bytes) / 4 == LLAMA.parameters() - gains


# ---------------------------------------------------------------------- rounds


def test_a_forecast_round_takes_its_pass_and_its_draft_steps() -> None:
    rounds = ForecastRounds(COSTS, COSTS, context=10)
    assert rounds.verify_seconds(1, 0) == COSTS.seconds_of([1], [11], [1])
    assert rounds.verify_seconds(3, 7) == COSTS.seconds_of([4, 3, 3], [14, 13, 13], [4, 3, 3])
    assert rounds.step_seconds(2) == COSTS.seconds_of([1, 1], [11, 11], [1, 1])
    few = replace(rounds, draft_context=4)
    assert few.step_seconds(2) == COSTS.seconds_of([1, 1], [5, 5], [1, 1])
    assert few.verify_seconds(2, 2) == rounds.verify_seconds(2, 2)
    assert ForecastRounds(COSTS, 0.5).step_seconds(64) == 0.5


def test_passes_by_their_rows_alone_cost_what_was_measured() -> None:
    rows = RowCosts("m", {1: 1.0, 4: 4.0, 8: 4.0})
    assert [rows.seconds_of([n, 1], [], []) for n in (1, 3, 5, 9)] == [2.0, 4.0, 4.0, 4.0]
    assert ForecastRounds(rows).verify_seconds(2, 1) == 3.0


def test_every_source_of_costs_gives_the_same_choice_for_the_same_machine() -> None:
    """A pass takes 1 second up to eight rows, and 0.2 more for each further row."""
    passes = RowCosts("m", {1: 1.0, 8: 1.0, 64: 12.2})
    forecast, sizes = ForecastRounds(passes, 0.1), [1, 2, 4, 8]
    verify = {b: [forecast.verify_seconds(b, b * n) for n in range(9)] for b in sizes}
    measured, learnt = MeasuredRounds(verify, dict.fromkeys(sizes, 0.1)), LearntCosts(8)
    for size in [0] * 4 + [*learnt.sizes] * 40:
        learnt.record_round(size, forecast.verify_seconds(1, size))
    learnt.step = 0.1
    reach = [0.7**n for n in range(1, 9)]
    assert best_lengths(measured, reach, sizes) == best_lengths(forecast, reach, sizes)
    alone = best_lengths(forecast, reach, [1])
    assert best_lengths(learnt, reach, [1]) == alone == {1: 4}
    trees = [fastest_tree((0.6, 0.2), one, range(1, 9), 4) for one in (forecast, measured, learnt)]
    assert trees[0] == trees[1] == trees[2]
    lengths = [choose_lengths([0.9, 0.4], one, 8) for one in (forecast, measured)]
    assert lengths[0] == lengths[1] and lengths[0][0] > lengths[0][1]
