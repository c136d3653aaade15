"""The speculators package loads our EAGLE-3 folder and computes the same logits, at every depth.

Its own loader, its own forward, in float32; and our reader takes a folder that it saved. Optional:
`pip install speculators`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.lm import small
from tinyspec import models
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.config import Config
from tinyspec.lm.heads import RANKS, TOKEN_MAP, HeadFile, freeze_target, write_head
from tinyspec.lm.model import Model
from tinyspec.pairing import export_head, read_fitting_head
from tinyspec.technique import find_technique

speculators = pytest.importorskip(
    "speculators", reason="the package is not installed: pip install speculators"
)

CARD = find_technique("eagle3")
assert CARD.trained is not None
TRAINED = CARD.trained
LLAMA = replace(small.LLAMA, vocab_size=29, n_layers=8)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TARGETS = {
    "tied": LLAMA,
    "untied": replace(LLAMA, tied=False),
    "wide heads": replace(LLAMA, head_dim=6, norm_eps=1e-2, rope_theta=500.0),
    "llama3": replace(LLAMA, rope_scaling=LLAMA3),
}
IDS = [0, 2, 5, 6, 11, 17, 28]  # of a draft vocabulary with gaps
DEPTHS = 3
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 28, 0, 17]


def export_random_head(folder: Path, config: Config, words: int) -> tuple[Model, HeadFile]:
    """Write a target, a random head of it, and the head exported to `folder`/theirs."""
    small.model(config, seed=2, dtype=torch.float32).save(folder / "target")
    target = models.load(folder / "target", dtype="float32")
    settings = TRAINED.settings(draft_vocab=words, steps=DEPTHS)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(1)
    weights = dict[str, torch.Tensor]()
    for name, shape in TRAINED.all_shapes(target.config, settings).items():
        weights[name] = 0.4 * torch.randn(shape, generator=generator) + (len(shape) == 1)
    weights[RANKS] = torch.rand(weights[RANKS].shape, generator=generator)
    if words:
        weights[TOKEN_MAP] = torch.tensor(IDS)
    check = embedding_checksum(target.weights["embed"])
    head = HeadFile("eagle3", target.name, check, vars(settings), {}, weights)
    write_head(folder / "ours", head)
    export_head(
        folder / "ours",
        "speculators",
        folder / "theirs",
        target=folder / "target",
        verifier=str(folder / "target"),
    )
    return target, head


def load_peer(folder: Path) -> Any:
    """Load a folder as the package does: config, tensors, and what else it takes from the target."""
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    # Its default, flex attention, takes blocks of 128 tokens.
    config.transformer_layer_config._attn_implementation = "sdpa"
    peer = speculators.SpeculatorModel.from_pretrained(
        str(folder), config=config, torch_dtype=torch.float32
    )
    return peer.eval()


@pytest.mark.parametrize("words", [0, len(IDS)])
@pytest.mark.parametrize("name", TARGETS)
def test_logits_equal_those_of_the_package(name: str, words: int, tmp_path: Path) -> None:
    target, head = export_random_head(tmp_path, TARGETS[name], words)
    peer = load_peer(tmp_path / "theirs")
    ids = torch.tensor([TEXT])
    layers = TRAINED.layers(target.config, TRAINED.settings(**head.settings))
    states = target.torch_blocks().hidden_states(ids, layers)
    found = list[torch.Tensor]()
    peer.lm_head.register_forward_hook(lambda module, read, logits: found.append(logits[0]))
    joined = states[0].transpose(0, 1).flatten(1)[None]
    with torch.no_grad():  # its rows are pairs of a token and the states before it
        peer(
            joined[:, :-1],
            ids[:, 1:],
            torch.zeros(1, len(TEXT) - 1, dtype=torch.long),
            ttt_steps=DEPTHS,
        )
    assert len(found) == DEPTHS
    frozen = freeze_target(target, head.weights.get(TOKEN_MAP))
    for depth in range(DEPTHS):
        n = len(TEXT) - 1 - depth  # rows whose tokens are all in the text
        with torch.no_grad():
            want = TRAINED.predict(head.weights, frozen, ids, states, depth)[0, :n]
        assert want.shape == (n, words or target.config.vocab_size)
        bound = 1e-5 * max(1.0, want.abs().max().item())
        torch.testing.assert_close(found[depth][:n], want, rtol=0, atol=bound)


def test_the_package_finds_every_tensor_and_misses_none_of_the_heads(tmp_path: Path) -> None:
    """What it does not find in the folder it takes from the verifier."""
    export_random_head(tmp_path, LLAMA, len(IDS))
    stored = safetensors.torch.load_file(str(tmp_path / "theirs" / "model.safetensors"))
    expected = load_peer(tmp_path / "theirs").state_dict()
    of_verifier = {"verifier_norm.weight", "verifier_lm_head.weight"}
    assert set(expected) - set(stored) == of_verifier
    assert not set(stored) - set(expected)
    for name, tensor in stored.items():
        assert expected[name].dtype == tensor.dtype
        assert torch.equal(expected[name], tensor)


def test_the_package_maps_rows_to_our_tokens(tmp_path: Path) -> None:
    export_random_head(tmp_path, LLAMA, len(IDS))
    peer = load_peer(tmp_path / "theirs")
    rows = torch.arange(len(IDS))
    assert (rows + peer.d2t).tolist() == IDS  # as its converters and vLLM add them
    assert peer.t2d.nonzero().flatten().tolist() == IDS


@pytest.mark.parametrize("words", [0, len(IDS)])
def test_a_folder_that_the_package_saves_is_read(words: int, tmp_path: Path) -> None:
    """It leaves out of its config what is a default."""
    target, head = export_random_head(tmp_path, LLAMA, words)
    load_peer(tmp_path / "theirs").save_pretrained(str(tmp_path / "saved"))
    found = read_fitting_head(tmp_path / "saved", target, CARD)
    assert found.settings == head.settings
    for name, tensor in head.weights.items():
        assert name == RANKS or torch.equal(found.weights[name], tensor)
