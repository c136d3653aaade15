"""Sampling at its edges, in every kernel and in its twin.

Draws are possible tokens, ties go to the lowest id, and an error is one sentence. That every kernel
equals its twin bit for bit is a law (tests/laws/test_twins.py).
"""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tinyspec import _core
from tinyspec._core import fallback, reference
from tinyspec._core.reference_exp import exponential
from tinyspec.errors import TinyspecError
from tinyspec.laws.strategies import (
    VOCABULARY_SIZES,
    FloatRow,
    WalkCase,
    cdf_edges,
    edge_uniforms,
    float_rows,
    tree_walks,
)

cores = pytest.mark.parametrize("core", [_core, fallback])


@given(VOCABULARY_SIZES.flatmap(float_rows), st.data())
def test_a_draw_is_a_token_that_the_distribution_allows(row: FloatRow, data: st.DataObject) -> None:
    given = np.array(data.draw(st.lists(edge_uniforms(cdf_edges(row)), min_size=1, max_size=6)))
    assert row[_core.sample_inverse_cdf(row, given[0])] > 0
    drawn = _core.sample_without_replacement(row, given)
    assert len(set(drawn)) == len(drawn) == min(len(given), np.count_nonzero(row))
    assert all(row[token] > 0 for token in drawn)
    noise = np.resize(given, len(row))
    assert row[_core.exponential_race(row, noise)] > 0


@given(VOCABULARY_SIZES.flatmap(tree_walks))
@pytest.mark.slow
def test_a_walk_uses_one_uniform_a_tested_node_and_one_for_the_draw(case: WalkCase) -> None:
    path, _, rejected, used = _core.verify_tree(*case)
    assert used == len(path) + len(rejected) + 1
    assert not any(case.probe[node] for node in (*path, *rejected))


def test_exp_is_within_two_units_of_the_last_place_from_0_to_where_it_vanishes() -> None:
    x = -np.concatenate(
        [np.linspace(0, 40, 5000), np.linspace(40, 746, 5000), [1e4, 1e300, math.inf]]
    )
    found, wanted = np.array(exponential(x.tolist())), np.array([math.exp(e) for e in x])
    assert found[0] == 1 and not found[-3:].any()
    assert (np.abs(found - wanted) <= 2 * np.spacing(wanted)).all()
    for temperature in (1.0, 0.7):
        ours = _core.apply_sampling(temperature * x, (), temperature, None, None, None, 1.0)
        assert ours.tolist() == reference.apply_sampling(
            (temperature * x).tolist(), (), temperature, None, None, None, 1.0
        )


def test_equal_weights_across_a_whole_vocabulary_keep_the_lowest_ids() -> None:
    row = _core.apply_sampling(np.zeros(5000), (), 1.0, 7, None, None, 1.0)
    assert np.flatnonzero(row).tolist() == list(range(7))
    row = _core.apply_sampling(np.zeros(1000), (), 1.0, None, 0.25, None, 1.0)
    assert np.flatnonzero(row).tolist() == list(range(250))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 64, 101])
def test_a_greedy_distribution_is_the_first_of_the_largest_wherever_it_stands(
    n: int, dtype: type
) -> None:
    knobs = ((), 0.0, None, None, None, 1.0)
    for at in range(n):
        for again in {at, min(at + 1, n - 1), n - 1}:
            row = np.full(n, -math.inf, dtype)
            row[at] = row[again] = -3.0
            assert (
                np.flatnonzero(_core.apply_sampling(row, *knobs)).tolist()
                == [at]
                == [_core.sample_from_logits(row, *knobs, 0.9)]
            )
            row[-1 - at] = math.nan
            with pytest.raises(TinyspecError, match="NaN"):
                _core.sample_from_logits(row, *knobs, 0.9)


@given(
    st.lists(
        st.sampled_from([-2.0, -1.5, -1.0, 0.0, 1.0, 1.2, 1.5, -math.inf]), min_size=1, max_size=6
    ),
    st.lists(st.integers(0, 7), max_size=6),
    st.sampled_from([0.5, 0.8, 1.0, 1.2, 1.5, 2.0]),
    st.sampled_from([np.float32, np.float64]),
)
def test_a_greedy_distribution_under_a_penalty_is_that_of_the_penalised_scores(
    logits: FloatRow, history: list[int], penalty: float, dtype: type
) -> None:
    """Ties too: a score that falls may meet another one, which then stands first."""
    assume(max(logits) > -math.inf)
    row, knobs = np.array(logits, dtype), (history, 0.0, None, None, None, penalty)
    wanted = reference.apply_sampling(row.tolist(), *knobs)
    assert _core.apply_sampling(row, *knobs).tolist() == wanted
    assert wanted[_core.sample_from_logits(row, *knobs, 0.9)] == 1


@cores
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_or_distributions_are_an_error_of_one_sentence(core, temperature) -> None:  # type: ignore[no-untyped-def]
    knobs = ((), temperature, None, None, None, 1.0)
    for bad in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], []):
        with pytest.raises(TinyspecError, match="logits"):
            core.apply_sampling(np.array(bad, np.float64), *knobs)
    with pytest.raises(TinyspecError, match="sum is 0"):
        core.sample_inverse_cdf(np.zeros(3), 0.5)
    with pytest.raises(TinyspecError, match="pad it"):
        core.residual(np.ones(3) / 3, np.ones(2) / 2)
    with pytest.raises(TinyspecError, match="without mass"):
        core.exponential_race(np.zeros(2), np.ones(2))
    with pytest.raises(TinyspecError, match="sum is inf"):
        core.sample_without_replacement(np.array([math.inf, 0.0]), np.array([0.5]))
    with pytest.raises(ValueError):
        core.exponential_race(np.ones(2), np.ones(3))


@cores
def test_a_walk_that_cannot_be_judged_is_one_sentence(core) -> None:  # type: ignore[no-untyped-def]
    walk = ([0], [-1], [None], [False], {-1: np.ones(2) / 2, 0: np.ones(2) / 2})
    with pytest.raises(TinyspecError, match="used up"):
        core.verify_tree(*walk, np.array([0.1]))
    with pytest.raises(TinyspecError, match="outside"):
        core.verify_tree([2], *walk[1:], np.array([0.1, 0.1]))
    with pytest.raises(TinyspecError, match="declare None"):
        core.verify_tree([0], [-1], [np.array([0.0, 1.0])], *walk[3:], np.array([0.1, 0.1]))
    for row in (np.zeros(2), np.zeros(0)):
        with pytest.raises(TinyspecError, match="cannot draw"):
            core.verify_tree([], [], [], [], {-1: row}, np.array([0.5]))


@cores
def test_a_noise_of_zero_never_crowns_an_impossible_token(core) -> None:  # type: ignore[no-untyped-def]
    assert core.exponential_race(np.array([0.0, 1.0]), np.array([0.0, math.inf])) == 1


def test_the_twin_sums_blocks_in_lanes() -> None:
    row = [float(x) for x in np.random.default_rng(1).random(1000)]
    assert math.isclose(reference.ordered_sum(row), math.fsum(row), rel_tol=1e-14)
    lanes = (
        [1e16, 1.0] + [0.0] * 6 + [0.0, 1.0] + [0.0] * 6
    )  # 1 + 1 in the second lane survives beside 1e16
    assert reference.ordered_sum(lanes) == 1e16 + 2
