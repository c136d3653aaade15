"""Pathwise twins: every sampling kernel equals its pure twin bit for bit in float64, and in decisions for float32."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec import _core
from tinyspec._core import fallback, reference
from tinyspec.errors import TinyspecError

LAST = 1 - 2**-53
SIZES = st.sampled_from([1, 2, 3, 7, 8, 9, 255, 256, 257, 300])
UNIFORM = st.one_of(st.sampled_from([0.0, 0.5, LAST]), st.floats(0, LAST))


@st.composite
def rows(draw, size):
    """A law: small integer weights (ties, zeros, point masses), some nudged by an ulp."""
    weights = draw(st.lists(st.integers(0, 4), min_size=min(size, 8), max_size=min(size, 8)))
    row = np.resize(np.array(weights, np.float64), size)
    row[draw(st.integers(0, size - 1))] += draw(st.sampled_from([1, 1e-9, 1e9]))
    row /= row.sum()
    nudged = draw(st.integers(0, size - 1))
    row[nudged] = max(0.0, np.nextafter(row[nudged], draw(st.sampled_from([0.0, 1.0]))))
    return row if row.sum() > 0 else np.eye(size)[0]


@st.composite
def pairs(draw):
    size = draw(SIZES)
    p = draw(rows(size))
    q = draw(st.one_of(rows(size), st.just(p.copy()), st.just(np.roll(p, 1))))
    return p, q


SCORE = st.one_of(st.integers(-4, 4).map(float), st.floats(-50, 50), st.sampled_from([-math.inf, -0.0, 1e30, -1e30]))


@st.composite
def warps(draw):
    size = draw(SIZES)
    few = draw(st.lists(SCORE, min_size=min(size, 10), max_size=min(size, 10)))
    logits = np.resize(np.array(few), size).astype(draw(st.sampled_from([np.float64, np.float32])))
    logits[draw(st.integers(0, size - 1))] = draw(st.floats(-5, 5, width=32))
    history = draw(st.lists(st.integers(0, size), max_size=4))
    temperature = draw(st.sampled_from([0.0, 1e-300, 1e-3, 0.5, 0.8, 1.0, 3.0]))
    top_k = draw(st.sampled_from([None, 1, 2, 5, 299, 1000]))
    top_p = draw(st.one_of(st.none(), st.sampled_from([1e-9, 0.5, 0.9, LAST, 1.0]), st.floats(0.01, 1)))
    min_p = draw(st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]))
    return logits, history, temperature, top_k, top_p, min_p, draw(st.sampled_from([1.0, 1.3, 0.5]))


@given(warps(), UNIFORM)
@settings(max_examples=300)
def test_warp_and_the_fused_draw_equal_their_twins(knobs, u):
    row, twin = _core.warp(*knobs), fallback.warp(*knobs)
    assert row.tobytes() == twin.tobytes()
    assert _core.draw(*knobs, u) == _core.pick(row, u) == fallback.draw(*knobs, u)
    assert row[_core.pick(row, u)] > 0


@given(pairs(), UNIFORM)
def test_pick_residual_without_equal_their_twins(pair, u):
    p, q = pair
    assert _core.pick(p, u) == fallback.pick(p, u)
    assert _core.residual(p, q).tobytes() == fallback.residual(p, q).tobytes()
    token = int(u * len(p))
    assert _core.without(p, token).tobytes() == fallback.without(p, token).tobytes()


@given(pairs(), st.lists(UNIFORM, max_size=6), st.data())
def test_order_and_race_equal_their_twins(pair, uniforms, data):
    p, _ = pair
    drawn = _core.order(p, np.array(uniforms))
    assert drawn == fallback.order(p, np.array(uniforms))
    assert len(set(drawn)) == len(drawn)
    assert all(p[token] > 0 for token in drawn)
    noise = data.draw(st.lists(st.sampled_from([0.0, 5e-324, 0.5, 1.0, math.inf]), min_size=len(p), max_size=len(p)))
    winner = _core.race(p, np.array(noise))
    assert winner == fallback.race(p, np.array(noise))
    assert p[winner] > 0


@st.composite
def walks(draw):
    size = draw(st.sampled_from([1, 2, 3, 3, 3, 300]))
    n = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    laws = [draw(st.one_of(st.none(), rows(size))) for _ in range(n)]
    tokens = [draw(st.sampled_from(np.flatnonzero(q)[:4].tolist() if q is not None else [0, size - 1])) for q in laws]
    probe = [draw(st.integers(0, 9)) == 0 for _ in range(n)]
    p = {node: draw(rows(size)) for node in range(-1, n)}
    edges = [0.0, LAST]
    for node in range(n):  # the acceptance ratio itself must refuse
        for row in p.values():
            with np.errstate(over="ignore"):
                ratio = row[tokens[node]] / (1 if laws[node] is None else laws[node][tokens[node]])
            edges += [r for r in (ratio, np.nextafter(ratio, 0)) if 0 <= r < 1]
    uniforms = [draw(st.one_of(st.sampled_from(edges), UNIFORM)) for _ in range(n + 1)]
    return tokens, parents, laws, probe, p, np.array(uniforms, np.float64)


@given(walks())
@settings(max_examples=150)
def test_walk_equals_its_twin_on_the_same_uniforms(case):
    path, token, refused, used = _core.walk(*case)
    assert (path, token, refused, used) == fallback.walk(*case)
    assert used == len(path) + len(refused) + 1


def test_kernels_equal_their_twins_at_the_size_of_a_real_vocabulary():
    rng = np.random.default_rng(0)
    size = 49152
    logits = (rng.normal(size=size) * 3).astype(np.float32)
    q = _core.warp(logits[::-1].copy(), (), 1.0, None, None, None, 1.0)
    for knobs in ((0.8, None, 0.9, None), (1.0, 50, 0.95, 0.02), (1.0, None, None, None)):
        row = _core.warp(logits, [3, 3, 7], *knobs, 1.1)
        assert row.tobytes() == fallback.warp(logits, [3, 3, 7], *knobs, 1.1).tobytes()
        assert _core.pick(row, 0.37) == fallback.pick(row, 0.37) == _core.draw(logits, [3, 3, 7], *knobs, 1.1, 0.37)
    assert _core.residual(row, q).tobytes() == fallback.residual(row, q).tobytes()
    case = ([5, 6], [-1, -1], [q, q], [False] * 2, {-1: row, 0: row, 1: row}, np.array([LAST, LAST, 0.7]))
    assert _core.walk(*case) == fallback.walk(*case)


def test_equal_weights_across_a_whole_vocabulary_keep_the_lowest_ids():
    row = _core.warp(np.zeros(5000), (), 1.0, 7, None, None, 1.0)
    assert np.flatnonzero(row).tolist() == list(range(7))
    row = _core.warp(np.zeros(1000), (), 1.0, None, 0.25, None, 1.0)
    assert np.flatnonzero(row).tolist() == list(range(250))


@pytest.mark.parametrize("core", [_core, fallback])
def test_bad_rows_are_one_sentence(core):
    knobs = ((), 1.0, None, None, None, 1.0)
    for bad in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], []):
        with pytest.raises(TinyspecError, match=r"logits|no law"):
            core.warp(np.array(bad, np.float64), *knobs)
    with pytest.raises(TinyspecError, match="sum is 0"):
        core.pick(np.zeros(3), 0.5)
    with pytest.raises(TinyspecError, match="pad it"):
        core.residual(np.ones(3) / 3, np.ones(2) / 2)
    with pytest.raises(TinyspecError, match="without mass"):
        core.race(np.zeros(2), np.ones(2))
    walk = ([0], [-1], [None], [False], {-1: np.ones(2) / 2, 0: np.ones(2) / 2})
    with pytest.raises(TinyspecError, match="used up"):
        core.walk(*walk, np.array([0.1]))
    with pytest.raises(TinyspecError, match="outside"):
        core.walk([2], *walk[1:], np.array([0.1, 0.1]))
    with pytest.raises(TinyspecError, match="declare None"):
        core.walk([0], [-1], [np.array([0.0, 1.0])], *walk[3:], np.array([0.1, 0.1]))


def test_a_noise_of_zero_never_crowns_an_impossible_token():
    assert _core.race(np.array([0.0, 1.0]), np.array([0.0, math.inf])) == 1


def test_the_twin_sums_blocks_in_lanes():
    row = [float(x) for x in np.random.default_rng(1).random(1000)]
    assert math.isclose(reference.total(row), math.fsum(row), rel_tol=1e-14)
