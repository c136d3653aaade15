"""What a recipe says reaches the loss of a translator: dropout, smoothing and its settings."""

from typing import Any

import pytest
import torch

from tinyspec.laws.rewriting_laws import reader_of
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.nag_bert import nag_bert_loss
from tinyspec.nonautoregressive.sat import sat_loss
from tinyspec.technique import TranslatorTraining, find_technique

BATCH = torch.tensor([[4, 6, 5, 7], [7, 5, 0, 0]]), torch.tensor([[5, 8, 6, 0], [4, 4, 7, 5]])
FERTILITIES = torch.tensor([[1, 1, 1, 0], [2, 2, 0, 0]])
STEPS = 400  # in which both pairs are learnt by heart


def train_once(
    method: str, dropout: float = 0.0, smoothing: float = 0.0, **given: Any
) -> tuple[Any, float]:
    """Return a random model of a method, and the loss of a batch at the end of its training."""
    trained = find_technique(method).translator
    assert trained is not None
    settings = trained.settings(**given)
    model = reader_of(trained, 0, **given)
    batch = (*BATCH, FERTILITIES) if trained.aligned else BATCH
    training = TranslatorTraining(model, None, settings, dropout, smoothing, 1.0)
    torch.manual_seed(0)
    return model, float(trained.loss(training, batch, torch.Generator().manual_seed(0)))


METHODS = (
    *("depa", "enat", "fcl_nat", "flowseq", "iterative_refinement", "latent_transformer"),
    *("mask_predict", "nag_bert", "nar_crf", "nat", "parallel", "sat"),
)


@pytest.mark.parametrize("method", METHODS)
def test_dropout_reaches_the_loss(method: str) -> None:
    assert train_once(method)[1] != train_once(method, dropout=0.5)[1]


@pytest.mark.parametrize("method", [method for method in METHODS if method != "nag_bert"])
def test_smoothing_reaches_the_loss(method: str) -> None:
    """The loss of NAG-BERT does not smooth its labels."""
    assert train_once(method)[1] != train_once(method, smoothing=0.1)[1]


def test_the_words_of_a_group_reach_the_loss() -> None:
    for k in (1, 2, 3):
        model, got = train_once("sat", k=k)
        assert got == float(sat_loss(model, BATCH, k))


def test_the_window_of_neighbours_reaches_the_loss() -> None:
    for window in (0, 1, 3):
        model, got = train_once("nag_bert", window=window)
        assert got == float(nag_bert_loss(model, BATCH, window=window))


@pytest.mark.parametrize("method", METHODS)
def test_in_bfloat16_the_loss_is_nearly_that_in_float32(method: str) -> None:
    """Of every technique that does not ask for float32."""
    trained = find_technique(method).translator
    assert trained is not None
    if trained.float32:
        assert method in ("flowseq", "latent_transformer", "nag_bert", "nar_crf")
        return
    found = reader_of(trained, 0)
    weights = {name: w.float() for name, w in found.weights.items()}
    batch = (*BATCH, FERTILITIES) if trained.aligned else BATCH
    losses = list[float]()
    for is_mixed in (False, True):
        training = TranslatorTraining(
            Seq2Seq(found.config, weights), None, trained.settings(), 0.0, 0.0, 1.0
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            loss = trained.loss(training, batch, torch.Generator().manual_seed(0))
        assert loss.dtype is torch.float32
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method != "mask_predict"])
def test_pairs_that_were_learnt_by_heart_are_written(method: str) -> None:
    """So the loss that falls is that of what is written.

    Mask-Predict tries several lengths, and the likeliest word by word need not be the one it learnt.
    """
    trained = find_technique(method).translator
    assert trained is not None and trained.translate is not None
    settings, model = trained.settings(), reader_of(trained, 0)
    trained.initialize(model.weights)
    batch = (*BATCH, FERTILITIES) if trained.aligned else BATCH
    weights = [weight.requires_grad_() for weight in model.weights.values()]
    optimizer, generator = torch.optim.Adam(weights, lr=0.01), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for step in range(STEPS):
        training = TranslatorTraining(model, None, settings, 0.0, 0.0, step / STEPS)
        optimizer.zero_grad()
        trained.loss(training, batch, generator).backward()
        optimizer.step()
    with torch.no_grad():
        written = trained.translate(model, settings, BATCH[0])
    assert written == [[token for token in row if token] for row in BATCH[1].tolist()]
