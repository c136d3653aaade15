"""Small checkpoint folders for the tests, and ways to damage them.

There is one for every configuration, with random weights.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.lm.small import LLAMA
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config

QWEN2 = replace(LLAMA, qkv_bias=True, family="qwen2")
QWEN3 = replace(LLAMA, qk_norm=True, family="qwen3")
MISTRAL = replace(LLAMA, family="mistral")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Every setting a checkpoint of the five families can have, small."""
    family = draw(st.sampled_from(["gpt2", "llama", "mistral", "qwen2", "qwen3"]))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * per_group
    head_dim = draw(st.sampled_from([2, 4, 6]))
    biases: dict[str, bool] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), family == "gpt2")
    if family == "llama":
        biases = dict(zip(biases, [b := draw(st.booleans()), b, draw(st.booleans())], strict=True))
    elif family == "qwen2":
        biases["qkv_bias"] = True
    elif family == "qwen3":
        biases["qkv_bias"] = biases["out_bias"] = draw(st.booleans())
    scaling = draw(st.sampled_from([None, {"rope_type": "linear", "factor": 2.5}, LLAMA3]))
    rotary = family != "gpt2"
    return Config(
        vocab_size=draw(st.integers(5, 40)),
        d_model=heads
        * (
            draw(st.sampled_from([2, 3, 4])) if rotary else head_dim
        ),  # transformers wants a multiple
        n_layers=draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=groups if rotary else heads,
        head_dim=head_dim,
        d_ff=draw(st.integers(3, 20)),
        max_positions=draw(st.integers(24, 64)),
        norm="rms" if rotary else "layer",
        norm_eps=draw(st.sampled_from([1e-5, 1e-6, 1e-2])),
        positions="rope" if rotary else "learned",
        rope_theta=draw(st.sampled_from([10000.0, 100000.0, 500.0])) if rotary else 10000.0,
        rope_scaling=scaling if rotary else None,
        activation="silu" if rotary else "gelu_new",
        gated=rotary,
        tied=draw(st.booleans()),
        bos=draw(st.sampled_from([None, 0, 1])),
        eos=draw(st.sampled_from([(), (2,), (2, 4)])),
        family=family,
        qk_norm=family == "qwen3",
        extra=draw(st.sampled_from([{}, {"draft": "apprentice", "licence": "MIT"}])),
        **biases,
    )


def random(
    config: Config, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Every weight random, also norms and biases, and large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in config.shapes().items()
    }
    return {name: (w + 1 if "norm" in name else w).to(dtype) for name, w in weights.items()}


def folder(
    tmp_path: Path, config: Config = LLAMA, tokenizer=None, dtype: torch.dtype = torch.float32
) -> Path:
    checkpoint.write_checkpoint(tmp_path / "model", config, random(config, dtype=dtype), tokenizer)
    return tmp_path / "model"


def edit(file: Path, **changes) -> None:
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))


def shard(path: Path) -> dict[str, str]:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    where = {}
    for i in range(3):
        name = f"model-{i + 1:05d}-of-00003.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::3]}
        save_file(part, path / name)
        where |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def expect_error(path: Path | str, pattern: str) -> None:
    with pytest.raises(TinyspecError, match=pattern) as error:
        checkpoint.read_checkpoint(path)
    assert "\n" not in str(error.value)
