"""Kangaroo: layers run once, the adapter's rows, and where a draft stops."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.kangaroo import KangarooSettings, adapter_shapes, initialize_adapter
from tinyspec.early_exit.kangaroo import predict_by_adapter as predict
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.traps import kangaroo as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import HeadFile, embedding_checksum, freeze_target, write_head
from tinyspec.lm.model import Model
from tinyspec.pairing import attach_head
from tinyspec.technique import Request, find_technique

CARD = find_technique("kangaroo")
assert CARD.trained is not None
TRAINED = CARD.trained


def test_trap_no_layer_is_run_twice() -> None:
    assert traps.runs_no_layer_twice(CARD.make).cases > 20


def test_trap_drafts_of_the_past_leave_no_trace() -> None:
    assert traps.drafts_of_the_past_leave_no_trace(CARD.make).branches > 150


def test_trap_a_fitted_adapter_drafts_the_text() -> None:
    assert traps.fitted_exit_drafts_the_text(CARD.make).branches > 20


def test_trap_a_draft_token_is_what_the_training_forward_says() -> None:
    assert traps.check_kangaroo_drafts(CARD.make).branches > 150


def begin(model: Model, text: Any, sampling: SamplingParams, **knobs: Any) -> Any:
    log: list[Any] = []
    stop = StoppingCriteria(eos=frozenset(knobs.pop("eos", ())))
    request = Request(model.session(log), sampling=sampling, stop=stop, forward_log=log)
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder


def propose(decoder: Any, depth: int = 9) -> Any:
    return decoder.drafter.propose(decoder.context, depth, decoder.sampling, Seeded(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_uncertain_token_is_the_drafts_last_and_stays(temperature: float) -> None:
    """What decides is the adapter's highest probability before temperature, not the token."""
    lengths = set()
    for seed in range(6):
        model, text = traps.adapted_network(seed), [0, 1, 2]
        decoder = begin(model, text, SamplingParams(temperature), gamma=6, threshold=0.6)
        tokens = propose(decoder).tokens
        for n in range(len(tokens)):
            row = feature_laws.trained_forward(CARD, model, text, tokens[:n])
            assert row is not None
            is_sure = max(UNCHANGED.probs(row)) >= 0.6
            assert is_sure or n == len(tokens) - 1
            assert not is_sure or n < len(tokens) - 1 or len(tokens) == 6
        lengths.add(len(tokens))
    assert len(lengths) > 1


def test_nothing_follows_the_end_of_a_text() -> None:
    decoder = begin(
        traps.adapted_network(1), [0, 1], SamplingParams(0.0), gamma=6, threshold=0.0, eos=range(4)
    )
    assert len(propose(decoder).tokens) == 1


def test_a_text_of_one_token_has_no_draft() -> None:
    assert not propose(begin(traps.adapted_network(1), [0], SamplingParams(0.0))).tokens


def test_an_untrained_adapter_is_an_early_exit_with_its_own_norm() -> None:
    model, ids = small_network(2), torch.tensor([[0, 1, 2, 3]])
    settings, target = KangarooSettings(exit=1), freeze_target(small_network(2))
    weights = initialize_adapter(target, settings, 0)
    states = model.torch_blocks().hidden_states(ids, (1, 3))
    normed = torch.nn.functional.rms_norm(states[:, 0], (8,), eps=model.config.norm_eps)
    expected = normed @ target.head.T
    got = predict(weights, target, ids, states, 0)
    assert torch.allclose(got[:, :-1], expected[:, 1:])


def test_the_file_has_the_names_of_the_authors_code() -> None:
    shapes = adapter_shapes(Config(99, 8, 3, 2, 1, 4, 12, 64), KangarooSettings(exit=1))
    assert {name for name in shapes if "attn" in name} == {
        f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"
    }
    assert {"layers.0.input_layernorm.weight", "norm.weight"} < shapes.keys()
    assert not any("mlp" in name for name in shapes)


def test_an_exit_at_the_last_layer_is_refused() -> None:
    with pytest.raises(TinyspecError, match="exit is 3: the model has 3 layers"):
        TRAINED.layers(small_network(0).config, KangarooSettings(exit=3))


def test_a_file_whose_exit_the_target_lacks_is_refused(tmp_path: Path) -> None:
    target = small_network(0)
    shapes = TRAINED.all_shapes(target.config, KangarooSettings())
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    check = embedding_checksum(target.weights["embed"])
    file = HeadFile("kangaroo", target.name, check, {"exit": 3}, {}, weights)
    write_head(tmp_path / "head", file)
    with pytest.raises(TinyspecError, match="exit is 3: the model has 3 layers"):
        attach_head(target, CARD, tmp_path / "head")
