"""A folder written is the folder read, damage is named, and transformers computes the same logits."""

import json
import re
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.lm.small import GPT2, LLAMA
from tests.lm.test_tokenizer import byte_level
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.transformer import Model
from tinyspec.tree import TokenTree

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

QWEN2 = replace(LLAMA, qkv_bias=True, family="qwen2")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Every setting a checkpoint of the three families can have, small."""
    family = draw(st.sampled_from(["gpt2", "llama", "qwen2"]))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * per_group
    head_dim = draw(st.sampled_from([2, 4, 6]))
    biases: dict[str, bool] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), family == "gpt2")
    if family == "llama":
        biases = dict(zip(biases, [b := draw(st.booleans()), b, draw(st.booleans())], strict=True))
    elif family == "qwen2":
        biases["qkv_bias"] = True
    scaling = draw(st.sampled_from([None, {"rope_type": "linear", "factor": 2.5}, LLAMA3]))
    rotary = family != "gpt2"
    return Config(
        vocab_size=draw(st.integers(5, 40)),
        d_model=heads * (draw(st.sampled_from([2, 3, 4])) if rotary else head_dim),  # transformers wants a multiple
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
        extra=draw(st.sampled_from([{}, {"draft": "apprentice", "licence": "MIT"}])),
        **biases,
    )


def random(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every weight random, also norms and biases, and large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in config.shapes().items()}
    return {name: (w + 1 if "norm" in name else w).to(dtype) for name, w in weights.items()}


def folder(tmp_path: Path, config: Config = LLAMA, tokenizer=None, dtype: torch.dtype = torch.float32) -> Path:
    checkpoint.write(tmp_path / "model", config, random(config, dtype=dtype), tokenizer)
    return tmp_path / "model"


def edit(file: Path, **changes) -> None:
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(config=configs(), seed=st.integers(0, 9))
def test_read_after_write_is_the_identity(tmp_path_factory, config, seed, dtype):
    weights = random(config, seed, dtype)
    path = tmp_path_factory.mktemp("round") / "zoo"
    checkpoint.write(path, config, weights)
    parts = checkpoint.read(path)
    assert parts.config == config
    assert (parts.name, parts.tokenizer) == ("zoo", None)
    assert parts.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert parts.weights[name].dtype == dtype
        assert parts.weights[name].is_contiguous()
        assert torch.equal(parts.weights[name], weight), name


@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN2])
def test_write_after_read_gives_the_same_bytes_and_transformers_loads_them(tmp_path, config):
    first = folder(tmp_path, config)
    parts = checkpoint.read(first)
    checkpoint.write(tmp_path / "again", parts.config, parts.weights)
    assert (first / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()
    peer, info = transformers.AutoModelForCausalLM.from_pretrained(first, output_loading_info=True)
    assert not any(info.values()), info
    assert sum(p.numel() for p in peer.parameters()) == config.parameters()


def test_shards_with_their_index_read_as_one_file(tmp_path):
    path = folder(tmp_path)
    whole = checkpoint.read(path).weights
    shard(path)
    for name, weight in checkpoint.read(path).weights.items():
        assert torch.equal(weight, whole[name])


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


def test_tokenizer_template_and_add_bos_survive(tmp_path):
    path = folder(tmp_path, replace(LLAMA, vocab_size=300, bos=263, eos=(264,), add_bos=True), byte_level())
    parts = checkpoint.read(path)
    assert parts.config.add_bos
    assert parts.tokenizer.encode("hello é") == byte_level().encode("hello é")
    assert parts.tokenizer.chat_template == byte_level().chat_template
    peer = transformers.AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "hello é"}]
    theirs = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert parts.tokenizer.chat(messages) == theirs


def test_generation_config_says_which_tokens_end_a_text_before_config_does(tmp_path):
    path = folder(tmp_path, replace(LLAMA, bos=1, eos=(2,)))
    edit(path / "generation_config.json", eos_token_id=[3, 4], bos_token_id="absent")
    assert checkpoint.read(path).config.eos == (3, 4)
    assert checkpoint.read(path).config.bos == 1
    (path / "generation_config.json").unlink()
    assert checkpoint.read(path).config.eos == (2,)


def test_add_bos_comes_from_the_config_else_from_the_post_processor(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    path = folder(tmp_path, replace(LLAMA, vocab_size=300), byte_level())
    file = path / "tokenizer_config.json"
    assert not checkpoint.read(path).config.add_bos
    edit(file, add_bos_token="absent")
    assert not checkpoint.read(path).config.add_bos
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    start = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    backend.save(str(path / "tokenizer.json"))
    parts = checkpoint.read(path)
    assert parts.config.add_bos
    assert parts.config.bos == start
    assert parts.tokenizer.encode("h")[0] != start  # encode never adds it
    edit(file, add_bos_token=False)
    assert not checkpoint.read(path).config.add_bos


def test_writing_over_the_folder_one_reads_from_is_safe(tmp_path):
    path = folder(tmp_path)
    before = checkpoint.read(path)
    doubled = {name: w * 2 for name, w in before.weights.items()}
    checkpoint.write(path, before.config, doubled)
    for name, weight in checkpoint.read(path).weights.items():
        assert torch.equal(weight, doubled[name])
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    with pytest.raises(TinyspecError, match="No space left"):
        checkpoint.write(tmp_path / "model", LLAMA, random(LLAMA))
    assert not list(tmp_path.iterdir())


def test_a_config_that_no_family_has_is_not_written(tmp_path):
    mixed = replace(LLAMA, norm="layer", qkv_bias=True)
    with pytest.raises(TinyspecError, match="a llama checkpoint cannot express this Config's norm, out_bias"):
        checkpoint.write(tmp_path / "model", mixed, random(mixed))
    with pytest.raises(TinyspecError, match=r"weight embed has shape \[2, 2\]"):
        checkpoint.write(tmp_path / "model", LLAMA, {**random(LLAMA), "embed": torch.zeros(2, 2)})
    assert not (tmp_path / "model").exists()


# ------------------------------------------------------------------ older and other ways to say the same


def test_old_and_new_keys_of_rope_scaling_mean_the_same(tmp_path):
    path = folder(tmp_path, replace(LLAMA, rope_theta=500.0, rope_scaling=LLAMA3))
    file, want = path / "config.json", checkpoint.read(path).config
    old = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}
    edit(file, rope_scaling=old)
    assert checkpoint.read(path).config == want
    edit(file, rope_scaling="absent", rope_theta="absent", rope_parameters={**LLAMA3, "rope_theta": 500.0})
    assert checkpoint.read(path).config == want


def test_gpt2_without_its_prefix_and_with_old_buffers_reads_the_same(tmp_path):
    path = folder(tmp_path, GPT2)
    want = checkpoint.read(path).weights
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): w for name, w in tensors.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path / "model.safetensors")
    for name, weight in checkpoint.read(path).weights.items():
        assert torch.equal(weight, want[name])


def test_model_type_may_be_left_to_the_architecture(tmp_path):
    path = folder(tmp_path)
    edit(path / "config.json", model_type="absent")
    assert checkpoint.read(path).config.family == "llama"


def test_a_tied_head_may_be_stored_too_if_it_is_the_embedding(tmp_path):
    path = folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    assert checkpoint.read(path).config.tied
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / "model.safetensors")
    refused(path, "lm_head.weight differs from the embedding.*tie_word_embeddings")


# ------------------------------------------------------------------ bad input


def refused(path: Path | str, pattern: str) -> None:
    with pytest.raises(TinyspecError, match=pattern) as error:
        checkpoint.read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (LLAMA, {"model_type": "mamba"}, "config.json: unknown architecture 'mamba'.*known: gpt2.*llama.*qwen2"),
        (LLAMA, {"hidden_size": "big"}, "config.json: hidden_size is 'big', expected a whole number"),
        (LLAMA, {"hidden_size": "absent"}, "config.json: hidden_size is missing"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0, expected"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads 4"),
        (LLAMA, {"head_dim": 3}, "head_dim is 3, expected an even number"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type is 'yarn'; known: .*llama3"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (LLAMA, {"rope_scaling": 3}, "rope_scaling is 3"),
        (LLAMA, {"rope_theta": -1}, "rope_theta is -1, expected a positive number"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        (LLAMA, {"tie_word_embeddings": False}, "missing lm_head.weight.*set tie_word_embeddings to true"),
        (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, expected a whole number from 1 to"),
        (LLAMA, {"hidden_size": [1] * 10**5}, r"hidden_size is \[1, 1, .*\.\.\., expected"),
        (LLAMA, {"num_hidden_layers": 4}, r"missing model.layers.3.*, which config.json asks for"),
        (LLAMA, {"num_hidden_layers": 2}, r"model.layers.2.*and 4 more not in the architecture"),
        (LLAMA, {"intermediate_size": 23}, r"gate_proj.weight has shape \[24, 16\], config.json makes it \[23, 16\]"),
        (LLAMA, {"vocab_size": 99}, r"embed_tokens.weight has shape \[13, 16\], config.json makes it \[99, 16\]"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config.*unquantised"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
        (LLAMA, {"tinyspec": 3}, "tinyspec is 3, expected a JSON object"),
        (GPT2, {"activation_function": "relu"}, "activation_function is 'relu', expected 'gelu_new'"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2, {"n_head": 3}, "n_head is 3, expected a divisor of n_embd 16"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is True"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_a_config_we_would_compute_wrongly_is_refused_by_field(tmp_path, config, changes, says):
    path = folder(tmp_path, config)
    edit(path / "config.json", **changes)
    refused(path, says)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff\xfe", "[" * 100_000, '{"a": NaN'])
def test_json_that_is_not_a_config_is_refused(tmp_path, content):
    path = folder(tmp_path)
    (path / "config.json").write_text(content, encoding="latin-1")
    refused(path, "config.json: (not valid JSON|expected a JSON object)")


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
    "offsets beyond the data": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "offsets backwards": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}) + b"0000",
    "overflowing shape": header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}) + b"0000",
    "negative shape": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"0000",
    "unknown dtype": header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + b"0000",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_safetensors_header_is_refused_in_one_line(tmp_path, content):
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(content)
    refused(path, "model.safetensors: truncated or damaged")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(cut=st.floats(0, 0.999), flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=4))
def test_a_damaged_file_is_read_or_refused_and_never_crashes(tmp_path_factory, cut, flips):
    path = folder(tmp_path_factory.mktemp("damaged"))
    data = bytearray((path / "model.safetensors").read_bytes())
    for where, value in flips:
        data[where] = value
    (path / "model.safetensors").write_bytes(data)
    with suppress(TinyspecError):
        checkpoint.read(path)
    (path / "model.safetensors").write_bytes(data[: int(cut * len(data))])
    refused(path, "model.safetensors: truncated or damaged")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_named(tmp_path, value, dtype):
    path = folder(tmp_path, dtype=dtype)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][1, 2] = value
    save_file(tensors, path / "model.safetensors")
    refused(path, r"model.layers.1.self_attn.k_proj.weight holds NaN or infinity")


def test_weights_that_are_not_floats_are_refused(tmp_path):
    path = folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: w.to(torch.int8) for name, w in tensors.items()}, path / "model.safetensors")
    refused(path, "is int8, expected float32, bfloat16")


def test_an_extra_tensor_is_refused_by_name(tmp_path):
    path = folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, path / "model.safetensors")
    refused(path, "model.layers.0.self_attn.q_norm.weight not in the architecture")
    save_file({**tensors, "two\nlines\x1b[31m": torch.ones(4)}, path / "model.safetensors")
    refused(path, r"'two\\nlines\\x1b\[31m' not in the architecture")


def test_shards_and_index_must_agree(tmp_path):
    path = folder(tmp_path)
    where, index = shard(path), path / "model.safetensors.index.json"
    name, first = next(iter(where.items()))
    moved = {**where, name: sorted(set(where.values()))[2]}
    index.write_text(json.dumps({"weight_map": moved}))
    refused(path, re.escape(repr(name)) + " is missing, but model.safetensors.index.json places it there")
    index.write_text(json.dumps({"weight_map": {**where, name: "../../x.safetensors"}}))
    refused(path, "expected a .safetensors file beside it")
    index.write_text(json.dumps({"weight_map": {k: v for k, v in where.items() if v != first}}))
    refused(path, f"weight_map does not name {first}")
    index.write_text(json.dumps({}))
    refused(path, "weight_map is missing")
    index.write_text(json.dumps({"weight_map": where}))
    (path / first).unlink()
    refused(path, f"{first}: missing, but model.safetensors.index.json names it")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path, file):
    path = folder(tmp_path)
    (path / "model.safetensors").rename(path / file)
    refused(path, f"{file}: a pickle can run code.*save_pretrained")
    refused(path / file, "a pickle can run code.*save_pretrained")


def test_what_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such checkpoint")
    refused(tmp_path, "config.json: missing")
    path = folder(tmp_path)
    refused(path / "model.safetensors", "named by its folder")
    (path / "model.safetensors").unlink()
    refused(path, "model.safetensors: missing, and so is model.safetensors.index.json")


# ------------------------------------------------------------------ the peer


@st.composite
def splits(draw: st.DrawFn, length: int) -> list[int]:
    """Lengths that sum to `length`."""
    cuts = sorted({length, *draw(st.lists(st.integers(1, length), max_size=3))})
    return [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


@settings(max_examples=60, deadline=None)
@given(config=configs(), seed=st.integers(0, 3), data=st.data())
def test_logits_equal_transformers_for_any_config_prompt_and_split(tmp_path_factory, config, seed, data):
    path = tmp_path_factory.mktemp("peer")
    torch.manual_seed(seed)
    peer = transformers.AutoModelForCausalLM.from_config(transformers_config(config)).eval()
    for name, p in peer.named_parameters():  # transformers starts biases at 0 and norms at 1: nothing would be tested
        with torch.no_grad():
            p.copy_(torch.randn_like(p) * 0.3 + ("norm" in name or "ln_" in name))
    peer.save_pretrained(path)
    parts = checkpoint.read(path)
    assert replace(parts.config, bos=config.bos, eos=config.eos, extra=config.extra) == config
    model = Model(*parts)
    ids = data.draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=2, max_size=20))
    with torch.no_grad():
        want = peer(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits[0]
    bound = 1e-5 * max(1.0, want.abs().max().item())
    torch.testing.assert_close(model.logits(ids), want, rtol=0, atol=bound)
    session, done = model.session(), 0
    for n in data.draw(splits(len(ids))):
        session.extend(ids[done : done + n])
        done += n
        scores = session.score(TokenTree((), (), (), ()))
        torch.testing.assert_close(scores.logits[0], want[done - 1], rtol=0, atol=bound)


def transformers_config(config: Config):
    if config.family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=config.vocab_size, n_embd=config.d_model, n_layer=config.n_layers, n_head=config.n_heads,
            n_inner=config.d_ff, n_positions=config.max_positions, layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tied, bos_token_id=config.bos, eos_token_id=list(config.eos) or None,
        )  # fmt: skip
    rope = {"rope_theta": config.rope_theta, **(config.rope_scaling or {"rope_type": "default"})}
    kind = transformers.LlamaConfig if config.family == "llama" else transformers.Qwen2Config
    biases = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias} if config.family == "llama" else {}
    return kind(
        vocab_size=config.vocab_size, hidden_size=config.d_model, intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_positions, rms_norm_eps=config.norm_eps,
        rope_parameters=rope, tie_word_embeddings=config.tied, bos_token_id=config.bos,
        eos_token_id=list(config.eos) or None, **biases,
    )  # fmt: skip
