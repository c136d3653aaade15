"""MPEE: a classifier that runs fewer layers over fewer tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA
from tests.lm.small import model as network
from tinyspec.early_exit.mpee import (
    ALPHA,
    TEMPERATURE,
    MpeeClassifier,
    count_tokens,
    fuse_tokens,
    mpee_loss,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import mpee as traps
from tinyspec.lm.config import Config
from tinyspec.technique import Guarantee, Request, find_technique

CARD = find_technique("mpee")


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- fewer tokens


@given(st.integers(1, 200), st.floats(0, 1), st.integers(1, 12))
def test_the_number_of_tokens_never_rises(n: int, rho: float, depth: int) -> None:
    counts = count_tokens(n, rho, depth)
    assert len(counts) == depth and counts == sorted(counts, reverse=True) and counts[0] == n
    assert rho < 1 or counts == [n] * depth


def test_a_fused_token_is_the_weighted_mean_of_the_others() -> None:
    x = torch.tensor([[[9.0], [1.0], [2.0], [4.0]]])
    told = torch.tensor([[0.0, 0.1, 0.7, 0.3]])
    states, memory = fuse_tokens(x, told, 0.3)
    weights = torch.tensor([0.1, 0.3]).softmax(0)
    fused = float(weights[0] * 1.0 + weights[1] * 4.0)
    assert states[0, :, 0].tolist() == pytest.approx([9.0, 2.0, fused])
    assert memory[0].tolist() == pytest.approx([0.0, 0.7, 0.4])
    dropped, _ = fuse_tokens(x, told, 0.3, is_fused=False)
    assert dropped[0, :, 0].tolist() == [9.0, 2.0]


def test_a_text_alone_has_the_rows_that_it_has_in_a_batch() -> None:
    model = traps.small_classifier(3)
    ids = torch.randint(9, (5, 10), generator=torch.Generator().manual_seed(0))
    together = torch.stack(list(model.layer_logits(ids, 0.6)))
    for row, text in enumerate(ids):
        alone = torch.stack(list(model.layer_logits(text[None], 0.6)))
        torch.testing.assert_close(alone[:, 0], together[:, row], rtol=0, atol=1e-10)


def test_what_was_fused_is_still_heard() -> None:
    """A token that is fused after the first layer changes the class after the last one."""
    model, ids = traps.small_classifier(3), torch.arange(8)[None]
    heard = list(model.layer_logits(ids, 0.0))[-1]
    model.is_fused = False
    assert not torch.allclose(heard, list(model.layer_logits(ids, 0.0))[-1])


# ---------------------------------------------------------------------- fewer layers


def test_a_sure_text_runs_no_further_layer() -> None:
    model, ids = traps.small_classifier(0), torch.arange(8)
    firsts = [row[0].softmax(0).max() for row in model.layer_logits(ids[None])]
    for layer in range(traps.DEPTH - 1):
        tau = float(firsts[layer]) - 1e-6
        n_run = model.classify(ids, 1.0, tau)[1]
        assert n_run == 1 + next(at for at, sure in enumerate(firsts) if sure > tau)
    assert model.classify(ids, 1.0, 0.0)[1] == 1


def test_a_classifier_without_memory_reads_its_own_layer_alone() -> None:
    """The first one has no memory in either case."""
    both = [traps.small_classifier(1, is_recycled=recycled) for recycled in (True, False)]
    first, second = (list(model.layer_logits(torch.arange(8)[None])) for model in both)
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])


def test_the_memory_joins_what_two_layers_tell() -> None:
    """The paper's idea, and its ablation. Made-up states: each layer tells one bit of the class.

    Right answers of the second classifier, of 100: 100 with the memory, 44 without it. Who knows
    one bit of two is right in 50.
    """
    config = Config(9, 8, 2, 2, 1, 4, 12, 12, positions="learned")
    right = {}
    for is_recycled in (True, False):
        generator = torch.Generator().manual_seed(0)
        model = MpeeClassifier.create(config, 4, seed=0, is_recycled=is_recycled)
        names = ("update.weight", "gate.weight", "1.exit.weight")
        weights = [model.weights[name].requires_grad_() for name in names]
        optimizer = torch.optim.Adam(weights, lr=0.03)
        for _ in range(80):
            bits = torch.randint(2, (200, 2), generator=generator)
            memory = torch.zeros(200, 8)
            for layer in range(2):
                state = 0.3 * torch.randn(200, 8, generator=generator)
                state[:, layer] += 2.0 * bits[:, layer] - 1
                memory = model.update_memory(state, memory)
            logits, labels = memory @ weights[-1].T, bits @ torch.tensor([2, 1])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        right[is_recycled] = float((logits.argmax(dim=1) == labels).float().mean())
    print(right)
    assert right[True] >= 0.9 and right[False] <= 0.7


# ---------------------------------------------------------------------- training


def test_the_loss_is_that_of_all_classifiers() -> None:
    """By hand, in probabilities: the last one teaches, and gets no gradient for it."""
    generator = torch.Generator().manual_seed(0)
    logits = [
        torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    labels = torch.tensor([0, 2, 1, 1, 0])

    def nats(row: Any) -> Any:
        return -row.softmax(1)[range(5), labels].log().mean()

    teacher = (logits[2] / TEMPERATURE).softmax(1).detach()
    expected = nats(logits[2])
    for weight, early in ((1 / 3, logits[0]), (2 / 3, logits[1])):
        student = (early / TEMPERATURE).softmax(1)
        distance = (teacher * (teacher / student).log()).sum(1).mean()
        own = (1 - ALPHA) * nats(early) + ALPHA * TEMPERATURE**2 * distance
        expected = expected + weight * own
    got = mpee_loss(logits, labels)
    assert got.item() == pytest.approx(expected.item(), abs=1e-9)
    gradients = torch.autograd.grad(got, logits)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, logits))


def make_passages(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts [n, 24] of noise with three words of the class among them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    ids = torch.randint(3, 20, (n, 24), generator=generator)
    places = torch.rand(n, 24, generator=generator).argsort(1)[:, :3]
    return ids.scatter(1, places, labels[:, None].expand(-1, 3)), labels


@pytest.mark.slow
def test_a_trained_classifier_needs_fewer_layers_and_fewer_tokens() -> None:
    config = Config(20, 32, 4, 2, 2, 16, 64, 32, positions="learned")
    model = MpeeClassifier.create(config, 3, seed=0)
    for weight in model.weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(model.weights.values(), lr=3e-3)
    for step in range(200):
        ids, labels = make_passages(32, step + 1)
        optimizer.zero_grad()
        rho = (1.0, 0.8, 0.6)[step % 3]
        mpee_loss(list(model.layer_logits(ids, rho)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ids, labels = make_passages(100, 0)
    for rho, tau, most in ((1.0, 1.0, 4.0), (1.0, 0.9, 3.0), (0.6, 0.9, 3.0)):
        answers = [model.classify(text, rho, tau) for text in ids]
        right = sum(int(p.argmax()) == int(y) for (p, _), y in zip(answers, labels, strict=True))
        assert right >= 90
        assert sum(n for _, n in answers) / len(answers) <= most


# ---------------------------------------------------------------------- the card


def test_it_decodes_nothing() -> None:
    assert CARD.guarantee is Guarantee.NONE and CARD.kind == "analysis"
    with pytest.raises(TinyspecError, match=r"run: tinyspec bench mpee$"):
        CARD.make(Request(network(LLAMA).session()))
