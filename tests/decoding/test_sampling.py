"""SamplingParams: its settings, their order, and ties.

The result equals that of transformers' processors. It is exact over Fractions, and the same on a
device.
"""

import math
from fractions import Fraction as F
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec.decoding.sampling import (
    DEVICE,
    SamplingParams,
    exponential_race,
    is_on_device,
    sample_inverse_cdf,
    sample_without_replacement,
)
from tinyspec.errors import TinyspecError

LAST = 1 - 2**-53


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_p": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": -0.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
    ],
)
def test_a_setting_without_a_meaning_is_one_sentence_that_names_it(bad):
    with pytest.raises(TinyspecError, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "edge", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1}]
)
def test_the_ends_of_a_range_are_settings(edge):
    (name,) = edge
    assert getattr(SamplingParams(**edge), name) == edge[name]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.1, False), (1, False)])
def test_sampling_is_greedy_at_temperature_0_alone(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_a_tensor_is_on_a_device_unless_it_is_on_the_cpu():
    assert not is_on_device(torch.zeros(1))
    for name in ("cuda", "meta"):
        assert is_on_device(SimpleNamespace(device=torch.device(name)))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    st.sampled_from([None, 1, 5, 40]),
    st.sampled_from([None, 0.1, 0.5, 0.9, 0.99]),
    st.sampled_from([None, 0.05, 0.3]),
    st.sampled_from([1.0, 1.2]),
)
@settings(max_examples=150)
def test_warp_equals_transformers_processors(seed, temperature, top_k, top_p, min_p, penalty):
    from transformers.generation import logits_process as hf

    logits = (
        torch.randn(1, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    )
    history = torch.tensor([[3, 3, 8, 21]])
    scores = (
        hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits) if penalty != 1 else logits
    )
    scores = (
        hf.TemperatureLogitsWarper(temperature)(history, scores) if temperature != 1 else scores
    )
    scores = hf.TopKLogitsWarper(top_k)(history, scores) if top_k else scores
    scores = hf.TopPLogitsWarper(top_p)(history, scores) if top_p else scores
    scores = hf.MinPLogitsWarper(min_p)(history, scores) if min_p else scores
    theirs = scores.softmax(-1)[0].numpy()
    ours = SamplingParams(temperature, top_k, top_p, min_p, penalty).probs(
        logits[0], history[0].tolist()
    )
    assert ((ours > 0) == (theirs > 0)).all()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_ties_go_to_the_lowest_id_everywhere():
    logits = np.array([0.0, 2.0, 2.0, 2.0, 1.0])
    assert SamplingParams(temperature=0.0).probs(logits).tolist() == [0, 1, 0, 0, 0]
    assert np.flatnonzero(SamplingParams(top_k=2).probs(logits)).tolist() == [1, 2]
    assert np.flatnonzero(SamplingParams(top_p=0.1).probs(logits)).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_cpu_dtype_gives_a_float64_distribution(dtype):
    row = SamplingParams(temperature=0.8).probs(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))
    assert row.dtype == np.float64
    assert (
        row.tolist() == SamplingParams(temperature=0.8).probs(np.array([1.0, -2.0, 0.5])).tolist()
    )


def test_the_penalty_hits_each_distinct_id_once():
    row = SamplingParams(repetition_penalty=2.0).probs(np.array([2.0, -1.0, 0.0]), [0, 0, 1, 99])
    np.testing.assert_allclose(row, np.exp([1.0, -2.0, 0.0]) / np.exp([1.0, -2.0, 0.0]).sum())


def test_weights_that_are_fractions_give_exact_distributions():
    weights = [F(1), F(4), F(5), F(0)]
    assert SamplingParams().probs(weights) == [F(1, 10), F(4, 10), F(5, 10), 0]
    assert SamplingParams(temperature=0.5).probs(weights) == [F(1, 42), F(16, 42), F(25, 42), 0]
    assert SamplingParams(temperature=1 / 3).probs(weights) == [
        F(1, 190),
        F(64, 190),
        F(125, 190),
        0,
    ]
    assert SamplingParams(temperature=0).probs([F(1), F(3), F(3)]) == [0, 1, 0]
    assert SamplingParams(top_k=2).probs(weights) == [0, F(4, 9), F(5, 9), 0]
    assert SamplingParams(top_p=0.9).probs(weights) == [
        0,
        F(4, 9),
        F(5, 9),
        0,
    ]  # nine tenths are reached exactly
    assert SamplingParams(top_p=F(91, 100)).probs(weights) == SamplingParams().probs(weights)
    assert SamplingParams(min_p=0.5).probs(weights) == [0, F(4, 9), F(5, 9), 0]
    for bad in (SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.1)):
        with pytest.raises(TinyspecError, match="rational"):
            bad.probs(weights)
    with pytest.raises(TinyspecError, match="non-negative"):
        SamplingParams().probs([F(0), F(0)])


def test_pick_never_returns_an_impossible_token():
    for row in ([F(0), F(1), F(0)], np.array([0.0, 1.0, 0.0]), [0.0, 0.1, 0.2, 0.0]):
        for u in (0.0, 0.5, LAST):
            assert row[sample_inverse_cdf(row, u)] > 0


@given(
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, 3]),
    st.sampled_from([None, 0.7]),
)
def test_the_device_path_decides_as_the_kernels_do(seed, temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (50,), generator=generator) + 0.37 * torch.randint(
        2, (50,), generator=generator
    )
    knobs = (temperature, top_k, top_p, 0.01, 1.2)
    ours, theirs = (
        SamplingParams(*knobs).probs(logits, [1, 1, 4]),
        DEVICE.probs(logits, [1, 1, 4], SamplingParams(*knobs)),
    )
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=0, atol=1e-14)
    rng = np.random.default_rng(seed)
    uniforms = rng.random(6)
    assert [DEVICE.sample_inverse_cdf(theirs, u) for u in (*uniforms, 0.0, LAST)] == [
        sample_inverse_cdf(ours, u) for u in (*uniforms, 0.0, LAST)
    ]
    assert DEVICE.sample_without_replacement(
        theirs, uniforms.tolist()
    ) == sample_without_replacement(ours, uniforms)
    noise = rng.exponential(size=50)
    assert DEVICE.exponential_race(theirs, noise) == exponential_race(ours, noise)
