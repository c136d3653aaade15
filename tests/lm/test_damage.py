"""A damaged or hostile checkpoint is an error of one line that names what is wrong.

So is a checkpoint that the package does not compute.
"""

import json
import re
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.lm.checkpoints import MISTRAL, QWEN2, QWEN3, edit, expect_error, folder, shard
from tests.lm.small import GPT2, LLAMA
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.model import Model


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (
            LLAMA,
            {"model_type": "mamba"},
            "config.json: unknown architecture 'mamba'.*known: gpt2.*llama.*mistral.*qwen2.*qwen3",
        ),
        (
            LLAMA,
            {"hidden_size": "big"},
            "config.json: hidden_size is 'big', expected a whole number",
        ),
        (LLAMA, {"model_type": ["llama"]}, r"unknown architecture \['llama'\]"),
        (LLAMA, {"hidden_size": "absent"}, "config.json: hidden_size is missing"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0, expected"),
        (
            LLAMA,
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3, expected a divisor of num_attention_heads 4",
        ),
        (LLAMA, {"head_dim": 3}, "head_dim is 3, expected an even number"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_scaling: rope_type is 'yarn'; known: .*llama3",
        ),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (LLAMA, {"rope_scaling": 3}, "rope_scaling is 3"),
        (LLAMA, {"rope_theta": -1}, "rope_theta is -1, expected a positive number"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            LLAMA,
            {"tie_word_embeddings": "yes"},
            "tie_word_embeddings is 'yes', expected true or false",
        ),
        (
            LLAMA,
            {"tie_word_embeddings": False},
            "missing lm_head.weight.*set tie_word_embeddings to true",
        ),
        (
            LLAMA,
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000, expected a whole number from 1 to",
        ),
        (LLAMA, {"hidden_size": [1] * 10**5}, r"hidden_size is \[1, 1, .*\.\.\., expected"),
        (LLAMA, {"num_hidden_layers": 4}, r"missing model.layers.3.*, which the config asks for"),
        (LLAMA, {"num_hidden_layers": 2}, r"model.layers.2.*and 4 more not in the architecture"),
        (
            LLAMA,
            {"intermediate_size": 23},
            r"gate_proj.weight has shape \[24, 16\], the config makes it \[23, 16\]",
        ),
        (
            LLAMA,
            {"vocab_size": 99},
            r"embed_tokens.weight has shape \[13, 16\], the config makes it \[99, 16\]",
        ),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config.*unquantised"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
        (LLAMA, {"tinyspec": 3}, "tinyspec is 3, expected a JSON object"),
        (
            GPT2,
            {"activation_function": "relu"},
            "activation_function is 'relu', expected 'gelu_new'",
        ),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
        (GPT2, {"n_head": 3}, "n_head is 3, expected a divisor of n_embd 16"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is True"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window is True"),
        (
            MISTRAL,
            {"sliding_window": 63},
            (
                "sliding_window 63 is less than max_position_embeddings 64.*lower "
                "max_position_embeddings to 63"
            ),
        ),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0, expected a whole number"),
    ],
)
def test_a_config_that_we_would_compute_wrongly_is_an_error_that_names_the_field(
    tmp_path, config, changes, says
):
    path = folder(tmp_path, config)
    edit(path / "config.json", **changes)
    expect_error(path, says)


@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps"])
def test_a_number_beyond_a_double_is_refused(tmp_path, field):
    path = folder(tmp_path)
    edit(path / "config.json", **{field: 10**400})
    expect_error(path, f"{field} is 1000.*, expected a positive number")


def test_a_whole_number_beyond_64_bits_is_read_as_a_float(tmp_path):
    path = folder(tmp_path)
    edit(path / "config.json", rope_theta=10**20)
    parts = checkpoint.read_checkpoint(path)
    assert Model(parts.config, dict(parts.weights)).logits([1, 2]).isfinite().all()


@pytest.mark.parametrize("kinds", [5, True, "full_attention", {"full_attention": 1}])
def test_kinds_of_layers_that_are_no_list_are_refused(tmp_path, kinds):
    path = folder(tmp_path, QWEN2)
    edit(path / "config.json", layer_types=kinds)
    expect_error(path, "layer_types is .*, expected a list of 'full_attention'")


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff\xfe", "[" * 100_000, '{"a": NaN'])
def test_json_that_is_not_a_config_is_an_error(tmp_path, content):
    path = folder(tmp_path)
    (path / "config.json").write_text(content, encoding="latin-1")
    expect_error(path, "config.json: (not valid JSON|expected a JSON object)")


def header(values: object, length: int | None = None) -> bytes:
    text = json.dumps(values).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


HOSTILE = {
    "empty": b"",
    "short": b"\x01\x00",
    "length beyond the file": header({}, 10**6),
    "length beyond memory": header({}, 2**63),
    "not json": struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    "deep json": struct.pack("<Q", 50_000) + b"[" * 50_000,
    "a list": header([1, 2]),
    "offsets beyond the data": header(
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    ),
    "offsets backwards": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})
    + b"0000",
    "overflowing shape": header(
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}
    )
    + b"0000",
    "negative shape": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})
    + b"0000",
    "unknown dtype": header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}})
    + b"0000",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_safetensors_header_is_an_error_of_one_line(tmp_path, content):
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(content)
    expect_error(path, "model.safetensors: truncated or damaged")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(
    cut=st.floats(0, 0.999),
    flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_file_is_read_or_an_error_and_never_crashes(tmp_path_factory, cut, flips):
    path = folder(tmp_path_factory.mktemp("damaged"))
    data = bytearray((path / "model.safetensors").read_bytes())
    for where, value in flips:
        data[where] = value
    (path / "model.safetensors").write_bytes(data)
    with suppress(TinyspecError):
        checkpoint.read_checkpoint(path)
    (path / "model.safetensors").write_bytes(data[: int(cut * len(data))])
    expect_error(path, "model.safetensors: truncated or damaged")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(tmp_path, value, dtype):
    path = folder(tmp_path, dtype=dtype)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][1, 2] = value
    save_file(tensors, path / "model.safetensors")
    expect_error(path, r"model.layers.1.self_attn.k_proj.weight holds NaN or infinity")


def test_weights_that_are_not_floats_are_an_error(tmp_path):
    path = folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: w.to(torch.int8) for name, w in tensors.items()}, path / "model.safetensors")
    expect_error(path, "is int8, expected float32, bfloat16")


@pytest.mark.parametrize("text", ["a\nb\x1b[31m", "a" * 5000])
def test_what_a_file_says_is_quoted_on_one_short_line(tmp_path, text):
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(
        header({"a": {"dtype": text, "shape": [1], "data_offsets": [0, 4]}}) + b"0000"
    )
    with pytest.raises(TinyspecError, match="truncated or damaged") as error:
        checkpoint.read_checkpoint(path)
    assert str(error.value).isprintable() and len(str(error.value)) <= 1200
    assert str(error.value).endswith("fetch or save it again")


def test_an_extra_tensor_is_an_error_that_names_it(tmp_path):
    path = folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(
        {**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(4)},
        path / "model.safetensors",
    )
    expect_error(path, "model.layers.0.self_attn.q_norm.weight not in the architecture")
    save_file({**tensors, "two\nlines\x1b[31m": torch.ones(4)}, path / "model.safetensors")
    expect_error(path, r"'two\\nlines\\x1b\[31m' not in the architecture")


def test_shards_and_index_must_agree(tmp_path):
    path = folder(tmp_path)
    where, index = shard(path), path / "model.safetensors.index.json"
    name, first = next(iter(where.items()))
    moved = {**where, name: sorted(set(where.values()))[2]}
    index.write_text(json.dumps({"weight_map": moved}))
    expect_error(
        path,
        re.escape(repr(name)) + " is missing, but model.safetensors.index.json places it there",
    )
    index.write_text(json.dumps({"weight_map": {**where, name: "../../x.safetensors"}}))
    expect_error(path, "expected a .safetensors file beside it")
    index.write_text(json.dumps({"weight_map": {k: v for k, v in where.items() if v != first}}))
    expect_error(path, f"weight_map does not name {first}")
    index.write_text(json.dumps({}))
    expect_error(path, "weight_map is missing")
    index.write_text(json.dumps({"weight_map": where}))
    (path / first).unlink()
    expect_error(path, f"{first}: missing, but model.safetensors.index.json names it")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_pickle_is_an_error_that_says_how_to_convert_it(tmp_path, file):
    path = folder(tmp_path)
    (path / "model.safetensors").rename(path / file)
    expect_error(path, f"{file}: a pickle can run code.*save_pretrained")
    expect_error(path / file, "a pickle can run code.*save_pretrained")


def test_what_is_not_there_is_named(tmp_path):
    expect_error(tmp_path / "nowhere", "nowhere: no such checkpoint")
    expect_error(tmp_path, "config.json: missing")
    path = folder(tmp_path)
    expect_error(path / "model.safetensors", "named by its folder")
    (path / "model.safetensors").unlink()
    expect_error(path, "model.safetensors: missing, and so is model.safetensors.index.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = folder(tmp_path)
    where, long = shard(path), "a" * 300 + ".safetensors"
    where[next(iter(where))] = long
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    expect_error(path, "a.safetensors: missing, but model.safetensors.index.json names it")
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    expect_error(path, r"config.json: cannot be read \(.*directory")
