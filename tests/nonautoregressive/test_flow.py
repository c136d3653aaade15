"""The flow: its inverse, its log-determinant by Jacobians, its first weights, its parts."""

from itertools import product
from typing import Any

import pytest
import torch

from tinyspec.laws.traps.flowseq import (
    SHAPES,
    SOURCES,
    WIDTH,
    flow_of,
    random_flower,
    random_latents,
    split_places,
)
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.flow import (
    Flow,
    fold_positions,
    kept_entries,
    normal_log_density,
    unfold_positions,
)


@pytest.mark.slow
def test_the_determinant_is_that_of_torchs_own_jacobian() -> None:
    """Texts of at most twelve numbers, in float64, in both directions."""
    for seed, settings, source in product(range(3), SHAPES, SOURCES[:2]):
        model = random_flower(seed, settings)
        flow = flow_of(Flow, model, source, settings)
        for length in range(settings.multiple, 4, settings.multiple):
            z, slots = random_latents(seed, 1, length, WIDTH), torch.ones(1, length).bool()
            noise, logdet = flow.to_noise(z, slots)
            ahead = torch.autograd.functional.jacobian(
                lambda x, f=flow, s=slots: f.to_noise(x, s)[0], z
            )
            back = torch.autograd.functional.jacobian(
                lambda x, f=flow, s=slots: f.from_noise(x, s), noise
            )
            size = length * WIDTH
            _, expected = torch.linalg.slogdet(ahead.view(size, size))
            _, inverse = torch.linalg.slogdet(back.view(size, size))
            assert float(logdet) == pytest.approx(float(expected), abs=1e-8)
            assert float(logdet) == pytest.approx(-float(inverse), abs=1e-6)


def test_padding_changes_nothing() -> None:
    for settings in SHAPES:
        model = random_flower(1, settings)
        flow = flow_of(Flow, model, SOURCES[2], settings)
        length, room = settings.multiple, 3 * settings.multiple
        z = random_latents(0, 1, room, WIDTH)
        slots = torch.arange(room)[None] < length
        other = torch.where(slots[..., None], z, 99.0)
        alone = flow.to_noise(z[:, :length], slots[:, :length])
        for text in (z, other):
            noise, logdet = flow.to_noise(text, slots)
            assert torch.allclose(noise[:, :length], alone[0], atol=1e-12)
            assert torch.allclose(logdet, alone[1], atol=1e-12) and not noise[:, length:].any()
        density = normal_log_density(*alone[:1], slots[:, :length]) + alone[1]
        assert torch.allclose(flow.log_density(other, slots), density, atol=1e-12)


def test_without_weights_in_its_couplings_the_prior_is_a_normal_distribution() -> None:
    """A plain variational autoencoder: every channel is scaled by itself, whatever the source."""
    settings = SHAPES[0]
    found = random_flower(0, settings)
    weights = {name: w.clone() for name, w in found.weights.items()}
    for name in weights:
        if name.startswith("coupling"):
            weights[name].zero_()
    weights["flow_mix_0"].copy_(torch.eye(2))
    model = Seq2Seq(found.config, weights)
    z, slots = random_latents(3, 1, 3, WIDTH), torch.ones(1, 3).bool()
    scale, shift = weights["flow_scale_0"], weights["flow_shift_0"]
    half = torch.sigmoid(torch.tensor(2.0, dtype=torch.float64)).log()
    # every entry is changed by one of two couplings of each kind: once by channels, once by time
    log_scale = scale + 2 * half
    normal = torch.distributions.Normal(-shift / scale.exp(), (-log_scale).exp())
    for source in SOURCES[:2]:
        got = flow_of(Flow, model, source, settings).log_density(z, slots)
        assert float(got) == pytest.approx(float(normal.log_prob(z).sum()), abs=1e-9)


def test_the_first_batch_gives_every_channel_mean_0_and_variance_1() -> None:
    settings = SHAPES[1]
    found = random_flower(0, settings)
    weights = {name: w.clone() for name, w in found.weights.items()}
    model = Seq2Seq(found.config, weights)
    memory = model.encode(torch.tensor([[4, 5]]))
    z = 3 + 5 * random_latents(0, 40, 4, WIDTH)
    slots = torch.arange(4) < torch.tensor([4, 2] * 20)[:, None]
    Flow(model, memory, settings.levels, settings.steps, begins=True).to_noise(z, slots)
    seen = z[slots] * weights["flow_scale_0"].exp() + weights["flow_shift_0"]
    assert torch.allclose(seen.mean(0), torch.zeros(WIDTH).double(), atol=1e-9)
    assert torch.allclose(seen.std(0, correction=0), torch.ones(WIDTH).double(), atol=1e-9)
    for k in range(settings.steps):
        matrix = weights[f"flow_mix_{k}"]
        assert torch.allclose(matrix @ matrix.T, torch.eye(2).double(), atol=1e-12)
    kept = {name: w.clone() for name, w in weights.items()}
    Flow(model, memory, settings.levels, settings.steps).to_noise(z, slots)
    assert all(torch.equal(kept[name], w) for name, w in weights.items())


def test_a_constant_channel_has_finite_weights() -> None:
    settings = SHAPES[0]
    found = random_flower(0, settings)
    model = Seq2Seq(found.config, {name: w.clone() for name, w in found.weights.items()})
    memory = model.encode(torch.tensor([[4, 5]]))
    z = torch.ones(3, 2, WIDTH).double()
    flow = Flow(model, memory, 1, 1, begins=True)
    noise, logdet = flow.to_noise(z, torch.ones(3, 2).bool())
    assert bool(noise.isfinite().all()) and bool(logdet.isfinite().all())


def test_in_bfloat16_the_matrices_are_inverted_in_float32() -> None:
    """torch has neither an inverse nor a determinant in bfloat16."""
    settings = SHAPES[0]
    exact = random_flower(0, settings)
    rough = Seq2Seq(exact.config, {name: w.bfloat16() for name, w in exact.weights.items()})
    z, slots = random_latents(0, 1, 4, WIDTH), torch.ones(1, 4).bool()
    expected = flow_of(Flow, exact, SOURCES[0], settings).to_noise(z, slots)
    flow = flow_of(Flow, rough, SOURCES[0], settings)
    noise, logdet = flow.to_noise(z.bfloat16(), slots)
    assert torch.allclose(noise.double(), expected[0], atol=0.1)
    assert float(logdet) == pytest.approx(float(expected[1]), abs=0.1)
    back = flow.from_noise(noise, slots)
    assert back.dtype == torch.bfloat16 and torch.allclose(back.double(), z, atol=0.1)


def test_every_entry_is_changed_by_two_of_four_couplings() -> None:
    for length in (1, 2, 5):
        changed = sum(~kept_entries(n, length, WIDTH) for n in range(4))
        assert changed.tolist() == [[2] * WIDTH] * length
        for n in range(8):
            places = set(split_places(n, length))
            mask = kept_entries(n, length, WIDTH)
            assert places == {tuple(place) for place in (~mask).nonzero().tolist()}


def test_neighbours_become_one_position_and_two_again() -> None:
    x: Any = torch.arange(24.0).view(2, 6, 2)
    folded = fold_positions(x)
    assert folded[0, 1].tolist() == [4, 5, 6, 7] and torch.equal(unfold_positions(folded), x)


def test_layers_are_counted_by_their_rows() -> None:
    model = random_flower(0, SHAPES[3])
    flow = flow_of(Flow, model, SOURCES[0], SHAPES[3])  # three levels of one step
    assert flow.count_row_layers(8) == 4 * (8 + 4 + 2)
