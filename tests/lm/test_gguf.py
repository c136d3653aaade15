"""A .gguf file gives what the gguf package dequantises, by our names and unpermuted.

Its tokenizer splits texts as the original does.
"""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tinyspec import _core, models
from tinyspec.bench.curve import count_read_bytes, count_weight_bytes
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint, engine, families
from tinyspec.lm.config import Config
from tinyspec.lm.gguf_file import unpermute_rows
from tinyspec.lm.model import Model
from tinyspec.lm.ops import rotary_frequencies
from tinyspec.lm.quantised import QuantisedWeights
from tinyspec.pairing import drafts_for
from tinyspec.technique import find_technique

CONFIG = Config(
    vocab_size=300, d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512,
    max_positions=32,
    norm_eps=1e-6, rope_theta=50000.0, tied=True, bos=1, eos=(2,),
)  # fmt: skip
GPT2 = replace(
    CONFIG, norm="layer", positions="learned", activation="gelu_new", gated=False, n_kv_heads=4,
    qkv_bias=True,
    out_bias=True, mlp_bias=True, rope_theta=10000.0, family="gpt2",
)  # fmt: skip
QUANTISED = [
    Quant.F32,
    Quant.F16,
    Quant.BF16,
    Quant.Q8_0,
    Quant.Q4_0,
    Quant.Q4_1,
    Quant.Q4_K,
    Quant.Q6_K,
]


def byte_metadata(
    pre: str | None, extra: tuple[str, ...] = (), small: bool = False
) -> dict[str, Any]:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = list("abcĠ") if small else sorted(ByteLevel.alphabet())
    merges = ["a b", "Ġ a", *extra]
    tokens = ["<|end|>", *alphabet, *(merge.replace(" ", "") for merge in merges), "<note>"]
    types = [3, *[1] * (len(tokens) - 2), 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
        **({"tokenizer.ggml.pre": pre} if pre else {}),
    }


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, written as a loop: rows i and i + hd/2 of a head become neighbours."""
    out, hd = np.empty_like(rows), rows.shape[0] // heads
    for head in range(heads):
        for i in range(hd // 2):
            out[head * hd + 2 * i] = rows[head * hd + i]
            out[head * hd + 2 * i + 1] = rows[head * hd + i + hd // 2]
    return out


def blocks(shape: tuple[int, ...], kind: Quant, rng: np.random.Generator) -> np.ndarray:
    """Raw blocks of a kind that the package only reads: random bits, with the float16 scales kept
    small and finite.
    """
    size, width = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // size, width), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.01, (*raw.shape[:2], 2)).astype("<f2").view(np.uint8)
    if kind == Quant.Q4_K:
        raw[..., 0:4] = scale
    else:  # Q6_K ends with its scale
        raw[..., -2:] = scale[..., :2]
    return raw.reshape(shape[0], -1)


def write(
    path: Path, config: Config, kind: Quant | dict[str, Quant], seed: int = 0, **metadata: Any
) -> dict[str, torch.Tensor]:
    """A .gguf of random weights, and our weights that it should give.

    kind  of all matrices; or of those with these parts of a name, and Q4_0 of the others
    """
    kinds = kind
    rng, writer = np.random.default_rng(seed), GGUFWriter(path, config.family)
    add = {
        "context_length": config.max_positions, "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff, "attention.head_count": config.n_heads,
    }  # fmt: skip
    floats = {"attention.layer_norm_epsilon": config.norm_eps}
    if config.family != "gpt2":
        add |= {
            "attention.head_count_kv": config.n_kv_heads,
            "attention.key_length": config.head_dim,
        }
        floats = {
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "rope.freq_base": config.rope_theta,
        }
    for name, value in add.items():
        writer.add_uint32(f"{config.family}.{name}", value)
    for name, value in floats.items():
        writer.add_float32(f"{config.family}.{name}", value)
    writer.add_bos_token_id(config.bos)
    writer.add_eos_token_id(config.eos[0])
    for key, value in metadata.items():
        name = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    theirs = {}
    for source in families.weight_sources(config, gguf=True).values():
        for name, rows in zip(source.names, source.rows, strict=True):
            shape = (rows, *_inner(config, name))
            if isinstance(kinds, dict):
                kind = next((kinds[part] for part in kinds if part in name), Quant.Q4_0)
            heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(
                name.split(".")[-2], 0
            )
            if len(shape) == 1 or kind == Quant.F32:
                plain = rng.standard_normal(shape).astype(np.float32)
                theirs[name] = torch.from_numpy(plain)
                stored = permute(plain, heads) if heads and config.family == "llama" else plain
                writer.add_tensor(name, stored)
                continue
            if kind in (Quant.Q4_K, Quant.Q6_K):
                stored = blocks(shape, kind, rng)
            else:
                stored = quantize(rng.standard_normal(shape).astype(np.float32), kind)
            expanded = dequantize(
                stored, kind
            )  # a row is quantised by itself, so permuting rows commutes with it
            theirs[name] = torch.from_numpy(np.array(expanded, dtype=np.float32))
            stored = permute(stored, heads) if heads and config.family == "llama" else stored
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        ours: torch.cat([theirs[name] for name in source.names])
        for ours, source in families.weight_sources(config, gguf=True).items()
    }


def _inner(config: Config, name: str) -> tuple[int, ...]:
    if name.endswith(".bias") or "norm" in name:
        return ()
    return (
        config.d_ff
        if "ffn_down" in name
        else config.q_dim
        if "attn_output" in name
        else config.d_model,
    )


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_kind_of_block_gives_what_gguf_dequantises_in_our_order(tmp_path, kind):
    want = write(tmp_path / "model.gguf", CONFIG, kind)
    parts = checkpoint.read_checkpoint(tmp_path / "model.gguf")
    assert parts.config == CONFIG
    assert (parts.name, parts.tokenizer) == ("model", None)
    assert parts.weights.keys() == want.keys()
    for name, weight in want.items():
        assert parts.weights[name].dtype == torch.float32
        assert torch.equal(parts.weights[name], weight), name


needs_kernels = pytest.mark.skipif(_core.compute is None, reason="needs compiled kernels")


@needs_kernels
@pytest.mark.parametrize(
    "config", [CONFIG, GPT2, replace(CONFIG, tied=False)], ids=["llama", "gpt2", "untied"]
)
@pytest.mark.parametrize("kind", [Quant.Q8_0, Quant.Q4_0, Quant.Q4_1], ids=lambda kind: kind.name)
def test_quantised_weights_give_the_logits_of_bfloat16_bit_for_bit(tmp_path, config, kind):
    write(tmp_path / "model.gguf", config, kind)
    kept = checkpoint.read_checkpoint(tmp_path / "model.gguf", quantised=True)
    assert isinstance(kept.weights, QuantisedWeights)
    assert {one.kind for one in kept.weights.matrices.values()} == {kind.name}
    packed = Model(kept.config, kept.weights)
    whole = models.load(tmp_path / "model.gguf", dtype="bfloat16")
    assert packed.dtype == whole.dtype == torch.bfloat16
    for name in whole.weights:
        assert torch.equal(packed.weights[name], whole.weights[name]), name
    ids = [5, 9, 3, 270, 0, 7]
    assert torch.equal(packed.logits(ids), whole.logits(ids))
    assert packed.to(dtype=torch.float32).dtype == torch.float32  # it is expanded for that


@needs_kernels
def test_a_quantised_matrix_counts_as_it_is_stored(tmp_path):
    write(tmp_path / "model.gguf", CONFIG, Quant.Q8_0)
    kept = checkpoint.read_checkpoint(tmp_path / "model.gguf", quantised=True)
    packed, whole = Model(kept.config, kept.weights), models.load(tmp_path / "model.gguf")
    shapes = CONFIG.shapes()
    sizes = {name: shapes[name][0] * shapes[name][1] for name in packed.quantised_bytes}
    assert packed.quantised_bytes == {name: n * 34 // 32 for name, n in sizes.items()}
    saved = sum(2 * n - n * 34 // 32 for n in sizes.values())
    assert count_read_bytes(packed) == count_weight_bytes(CONFIG, 2) - saved
    expanded = whole.to(dtype=torch.float32)
    assert not expanded.quantised_bytes
    assert count_read_bytes(expanded) == count_weight_bytes(CONFIG, 4)


@needs_kernels
def test_a_draft_of_quantised_weights_stays_as_it_is_stored_too(tmp_path):
    """Named by its path; beside a target of floats it has the target's type."""
    write(tmp_path / "model.gguf", CONFIG, Quant.Q8_0)
    model, card = models.load(tmp_path / "model.gguf"), find_technique("speculative_decoding")
    for target in (model, model.to(dtype=torch.float32)):
        (draft,) = drafts_for(target, card, tmp_path / "model.gguf")
        assert bool(draft.quantised_bytes) == bool(target.quantised_bytes)
        assert draft.dtype == target.dtype


@needs_kernels
@pytest.mark.parametrize("stays", [True, False])
def test_quantised_or_expanded_a_file_gives_the_same_logits_on_every_kernel(
    tmp_path, monkeypatch, stays
):
    """Which of both is faster may be measured, for no bit depends on it."""
    write(tmp_path / "model.gguf", CONFIG, Quant.Q4_1)
    monkeypatch.setattr(engine, "prefers_quantised", lambda config: stays)
    before = _core.compute.kernel()
    try:
        for kernel in _core.compute.kernels():
            _core.compute.use(kernel)
            found = models.load(tmp_path / "model.gguf")
            whole = models.load(tmp_path / "model.gguf", dtype="bfloat16")
            assert found.dtype == torch.bfloat16 and bool(found.quantised_bytes) == stays
            assert torch.equal(found.logits([5, 9, 3, 7]), whole.logits([5, 9, 3, 7])), kernel
    finally:
        _core.compute.use(before)


@needs_kernels
def test_what_is_expanded_is_named_once(tmp_path, capsys):
    for kind, said in ((Quant.Q4_1, ""), (Quant.Q6_K, "weights in Q6_K are expanded")):
        write(tmp_path / "model.gguf", CONFIG, kind)
        models.load(tmp_path / "model.gguf")
        told = capsys.readouterr().err
        assert told.count("\n") == bool(said) and said in told


@needs_kernels
def test_weights_stay_quantised_where_bfloat16_ones_do_not_fit(monkeypatch):
    """However slow they are: two bytes a weight must be free."""
    monkeypatch.setattr(engine, "is_quantised_faster", lambda kernel, threads: False)
    for free, stays in ((None, False), (2 * CONFIG.parameters(), False), (0, True)):
        monkeypatch.setattr(engine, "find_free_memory", lambda free=free: free)
        assert engine.prefers_quantised(CONFIG) == stays


def test_a_folder_may_hold_the_quantised_weights_beside_their_expansion(tmp_path):
    folder = tmp_path / "folder"
    write(tmp_path / "file.gguf", CONFIG, Quant.Q4_1)
    whole = models.load(tmp_path / "file.gguf", dtype="bfloat16")
    weights = dict(whole.weights)
    checkpoint.write_checkpoint(folder, CONFIG, weights, quantised=tmp_path / "file.gguf")
    kept = checkpoint.read_checkpoint(tmp_path / "folder", quantised=True)
    whole = checkpoint.read_checkpoint(tmp_path / "folder")
    assert isinstance(kept.weights, QuantisedWeights) and isinstance(whole.weights, dict)
    assert (kept.config, kept.name) == (whole.config, "folder")
    for name in whole.weights:
        assert torch.equal(kept.weights[name], whole.weights[name]), name
    write(folder / "model.gguf", CONFIG, Quant.Q4_1, seed=1)  # not the file that was written
    assert isinstance(checkpoint.read_checkpoint(folder, quantised=True).weights, dict)


def test_a_folder_may_hold_the_quantised_weights_alone(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    write(file, CONFIG, Quant.Q4_1)
    whole = models.load(file, dtype="bfloat16")
    checkpoint.write_checkpoint(folder, CONFIG, dict(whole.weights), quantised=file)
    (folder / "model.safetensors").unlink()
    for dtype in (None, "float32", "bfloat16"):
        found = models.load(folder, dtype=dtype)
        for name, weight in whole.weights.items():
            assert torch.equal(found.weights[name].bfloat16(), weight), (dtype, name)


def test_a_lone_gguf_must_be_of_the_model_that_the_config_describes(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    write(file, CONFIG, Quant.Q4_1)
    whole = models.load(file, dtype="bfloat16")
    checkpoint.write_checkpoint(folder, CONFIG, dict(whole.weights), quantised=file)
    (folder / "model.safetensors").unlink()
    values = json.loads((folder / "config.json").read_text())
    other_heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    for change in ({"rope_theta": 500.0}, {"rms_norm_eps": 0.1}, other_heads):
        (folder / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(TinyspecError, match="another model than"):
            models.load(folder)


def test_weights_that_another_program_saved_count(tmp_path, monkeypatch):
    """transformers keeps what config.json says of the .gguf file, whatever weights it saves."""
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    monkeypatch.setattr(engine, "prefers_quantised", lambda config: True)
    write(file, CONFIG, Quant.Q4_1)
    whole = models.load(file, dtype="bfloat16")
    checkpoint.write_checkpoint(folder, CONFIG, dict(whole.weights), quantised=file)
    assert models.load(folder).quantised_bytes
    theirs = safetensors.torch.load_file(folder / "model.safetensors")
    changed = {name: 2 * tensor for name, tensor in theirs.items()}
    safetensors.torch.save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    found = models.load(folder)
    assert not found.quantised_bytes
    assert torch.equal(found.weights["embed"], 2 * whole.weights["embed"])


def test_a_folder_may_be_named_like_a_file(tmp_path):
    folder, file = tmp_path / "folder.gguf", tmp_path / "file.gguf"
    write(file, CONFIG, Quant.Q4_1)
    weights = dict(models.load(file, dtype="bfloat16").weights)
    checkpoint.write_checkpoint(folder, CONFIG, weights, quantised=file)
    assert models.load(folder).config.d_model == CONFIG.d_model


def place_tensor(file: Path, name: str, offset: int) -> None:
    """Let a two-dimensional tensor of a .gguf begin at another byte of the data."""
    data = bytearray(file.read_bytes())
    at = data.index(name.encode()) + len(name) + 4 + 16 + 4
    data[at : at + 8] = offset.to_bytes(8, "little")
    file.write_bytes(data)


@pytest.mark.parametrize("offset", [0, 32, 2**63, 2**64 - 64])
def test_a_tensor_begins_where_the_one_before_it_ends(tmp_path, offset, recwarn):
    write(tmp_path / "m.gguf", CONFIG, Quant.Q8_0)
    place_tensor(tmp_path / "m.gguf", "blk.1.attn_q.weight", offset)
    with pytest.raises(TinyspecError, match="damaged"):
        models.load(tmp_path / "m.gguf")
    assert not recwarn


def test_the_other_byte_order_is_named(tmp_path, monkeypatch):
    big = partial(GGUFWriter, endianess=GGUFEndian.BIG)
    monkeypatch.setitem(globals(), "GGUFWriter", big)
    write(tmp_path / "m.gguf", CONFIG, Quant.F32)
    with pytest.raises(TinyspecError, match="other byte order"):
        models.load(tmp_path / "m.gguf")


def test_a_rope_factor_without_a_type_is_linear(tmp_path):
    factor: dict[str, Any] = {"llama.rope.scaling.factor": 4.0}
    write(tmp_path / "m.gguf", CONFIG, Quant.F32, **factor)
    found = checkpoint.read_checkpoint(tmp_path / "m.gguf").config
    assert torch.allclose(rotary_frequencies(found) * 4, rotary_frequencies(CONFIG))


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.attn_factor"])
def test_what_is_not_computed_here_is_named(tmp_path, key):
    write(tmp_path / "m.gguf", CONFIG, Quant.F32, **{f"llama.{key}": 2.0})
    with pytest.raises(TinyspecError, match=key):
        models.load(tmp_path / "m.gguf")


def test_a_file_of_which_nothing_stays_quantised_keeps_its_floats(tmp_path):
    """attn_v is one of three tensors that are one matrix here, and the others are floats."""
    write(tmp_path / "m.gguf", CONFIG, {"attn_v": Quant.Q8_0, "": Quant.F32})
    found = models.load(tmp_path / "m.gguf")
    assert found.dtype == torch.float32 and not found.quantised_bytes


def test_what_is_saved_over_quantised_weights_counts(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file.gguf"
    write(file, CONFIG, Quant.Q4_1)
    before = models.load(file, dtype="bfloat16")
    checkpoint.write_checkpoint(folder, CONFIG, dict(before.weights), quantised=file)
    other = {name: 2 * weight for name, weight in before.weights.items()}
    Model(models.load(folder).config, other).save(folder)
    found = models.load(folder).weights
    assert all(torch.equal(found[name], weight) for name, weight in other.items())


@needs_kernels
def test_a_file_without_quantised_matrices_is_float32_as_before(tmp_path):
    write(tmp_path / "model.gguf", CONFIG, Quant.F16)
    assert models.load(tmp_path / "model.gguf").dtype == torch.float32
    odd = replace(CONFIG, d_ff=33)  # its rows cannot be read in pairs: torch computes
    write(tmp_path / "odd.gguf", odd, {"ffn_down": Quant.F32, "": Quant.Q4_0})
    model = models.load(tmp_path / "odd.gguf")
    assert model.engine is None or model.dtype == torch.float32
    assert model.logits([1, 2]).isfinite().all()


def test_damaged_quantised_weights_are_an_error_as_floats_are(tmp_path):
    """A scale that is no number, and a tensor of another shape than the metadata say."""
    file = tmp_path / "model.gguf"
    write(file, CONFIG, Quant.Q4_0)
    raw = bytearray(file.read_bytes())
    (embed,) = (t for t in GGUFReader(file).tensors if t.name == "token_embd.weight")
    raw[embed.data_offset : embed.data_offset + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(bytes(raw))
    with pytest.raises(TinyspecError, match=r"token_embd\.weight holds NaN or infinity"):
        checkpoint.read_checkpoint(file, quantised=True)
    write(file, replace(CONFIG, d_ff=544), Quant.Q4_0, llama__feed_forward_length=512)
    with pytest.raises(TinyspecError, match=r"ffn_gate\.weight has shape \[544, 256\]"):
        checkpoint.read_checkpoint(file, quantised=True)


def test_a_quantised_vector_is_an_error(tmp_path):
    """llama.cpp keeps norms as floats. Here one of the metadata's tensors is written as Q8_0."""
    file, raw = tmp_path / "model.gguf", quantize(np.ones((1, 256), np.float32), Quant.Q8_0)
    real = GGUFWriter.add_tensor

    def add(self, name, tensor, raw_dtype=None, **more):
        is_norm = name == "output_norm.weight"
        real(self, name, raw[0] if is_norm else tensor,
             raw_dtype=Quant.Q8_0 if is_norm else raw_dtype, **more)  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", add)
        write(file, CONFIG, Quant.Q4_0)
    for quantised in (True, False):
        with pytest.raises(TinyspecError, match=r"'output_norm\.weight' is Q8_0, but vectors"):
            checkpoint.read_checkpoint(file, quantised=quantised)


@needs_kernels
def test_what_no_kernel_multiplies_is_expanded(tmp_path):
    """So is a matrix that is made of tensors of two kinds: here queries, keys and values."""
    want = write(tmp_path / "model.gguf", CONFIG, Quant.Q6_K)
    parts = checkpoint.read_checkpoint(tmp_path / "model.gguf", quantised=True)
    assert isinstance(parts.weights, dict)
    for name, weight in want.items():
        assert torch.equal(parts.weights[name], weight), name
    mixed = write(tmp_path / "mixed.gguf", CONFIG, {"attn_v": Quant.Q8_0})
    parts = checkpoint.read_checkpoint(tmp_path / "mixed.gguf", quantised=True)
    assert not any("qkv" in name for name in parts.weights.matrices)
    assert any("up" in name for name in parts.weights.matrices)
    for name, weight in mixed.items():
        assert torch.equal(parts.weights[name], weight.to(torch.bfloat16)), name


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, tied=False),
        replace(CONFIG, qkv_bias=True, out_bias=True, mlp_bias=True),
        replace(CONFIG, head_dim=32),
        replace(CONFIG, family="qwen2", qkv_bias=True),
        replace(CONFIG, family="qwen3", qk_norm=True),
        GPT2,
    ],
    ids=["untied", "biases", "head_dim", "qwen2", "qwen3", "gpt2"],
)
def test_every_family_reads_as_it_was_written(tmp_path, config):
    want = write(tmp_path / "model.gguf", config, Quant.F32)
    parts = checkpoint.read_checkpoint(tmp_path / "model.gguf")
    assert parts.config == config
    for name, weight in want.items():
        assert torch.equal(parts.weights[name], weight), name


@given(heads=st.integers(1, 4), half=st.integers(1, 5), width=st.integers(0, 3))
def test_unpermute_undoes_the_permutation(heads, half, width):
    rows = np.arange(heads * 2 * half * max(width, 1), dtype=np.float32)
    rows = rows.reshape(-1, width) if width else rows
    assert torch.equal(
        unpermute_rows(torch.from_numpy(permute(rows, heads)), heads), torch.from_numpy(rows)
    )


def test_llama3_frequencies_are_recognised_from_their_factors_and_others_are_an_error(tmp_path):
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled = replace(CONFIG, rope_scaling=scaling)
    factors = (rotary_frequencies(CONFIG) / rotary_frequencies(scaled)).numpy()
    assert factors.max() == 32
    write(tmp_path / "model.gguf", CONFIG, Quant.F32, rope_freqs__weight=factors)
    assert checkpoint.read_checkpoint(tmp_path / "model.gguf").config == scaled
    write(tmp_path / "other.gguf", CONFIG, Quant.F32, rope_freqs__weight=factors[::-1].copy())
    expect_error(tmp_path / "other.gguf", "rope_freqs.weight is not the llama3 scaling")


def test_linear_scaling_is_read(tmp_path):
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    write(tmp_path / "model.gguf", CONFIG, Quant.F32, **linear)
    assert checkpoint.read_checkpoint(tmp_path / "model.gguf").config.rope_scaling == {
        "rope_type": "linear",
        "factor": 4.0,
    }


# ------------------------------------------------------------------ bad input


def expect_error(path: Path, pattern: str) -> None:
    with pytest.raises(TinyspecError, match=pattern) as error:
        checkpoint.read_checkpoint(path)
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama__expert_count": 8}, "llama.expert_count is 8"),
        ({"llama__rope__dimension_count": 32}, "llama.rope.dimension_count is 32, expected 64"),
        ({"llama__attention__value_length": 32}, "llama.attention.value_length is 32, expected 64"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.tokens is missing"),
        (
            {"blk__0__attn_norm2__weight": np.ones(4, np.float32)},
            "blk.0.attn_norm2.weight not in the architecture",
        ),
    ],
)
def test_what_we_would_compute_wrongly_is_an_error_that_names_the_field(tmp_path, metadata, says):
    write(tmp_path / "model.gguf", CONFIG, Quant.F32, **metadata)
    expect_error(tmp_path / "model.gguf", says)


def set_number(path: Path, key: str, value: int) -> None:
    """Overwrite a uint32 of the metadata: it stands after its key and four bytes of its type."""
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)


NUMBERS = {
    "llama.context_length": "llama.context_length is 0, expected a whole number",
    "llama.embedding_length": "llama.embedding_length is 0, expected a whole number",
    "llama.block_count": "llama.block_count is 0, expected a whole number",
    "llama.feed_forward_length": "llama.feed_forward_length is 0, expected a whole number",
    "llama.attention.head_count": "llama.attention.head_count is 0, expected a whole number",
    "llama.attention.head_count_kv": "llama.attention.head_count_kv is 0, expected a whole number",
    "llama.attention.key_length": "llama.attention.key_length is 0, expected a whole number",
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_of_zero_is_an_error_that_names_it(tmp_path, key):
    write(tmp_path / "model.gguf", CONFIG, Quant.F32)
    set_number(tmp_path / "model.gguf", key, 0)
    expect_error(tmp_path / "model.gguf", NUMBERS[key])


def test_zero_heads_of_length_zero_are_an_error(tmp_path):
    write(tmp_path / "model.gguf", CONFIG, Quant.F32)
    for key in ("head_count", "key_length"):
        set_number(tmp_path / "model.gguf", f"llama.attention.{key}", 0)
    expect_error(tmp_path / "model.gguf", "llama.attention.head_count is 0")


def test_an_unknown_architecture_lists_the_known(tmp_path):
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect_error(
        tmp_path / "model.gguf",
        "unknown general.architecture 'mamba'; known: llama, qwen2, qwen3, gpt2",
    )


@given(cut=st.floats(0, 0.999))
def test_a_truncated_file_is_an_error(tmp_path_factory, cut):
    path = tmp_path_factory.getbasetemp() / "whole.gguf"
    if not path.exists():
        write(
            path,
            replace(CONFIG, n_layers=1, vocab_size=8, d_ff=8, d_model=64, n_heads=1, n_kv_heads=1),
            Quant.F32,
        )
    data = path.read_bytes()
    part = path.with_name("part.gguf")
    part.write_bytes(data[: int(cut * len(data))])
    expect_error(part, "truncated or damaged")


@settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # to shrink a hostile file says nothing more
@given(flips=st.lists(st.tuples(st.integers(4, 1400), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_file_is_read_or_an_error_and_never_crashes(tmp_path_factory, flips):
    path = tmp_path_factory.getbasetemp() / "sound.gguf"
    if not path.exists():
        small = replace(
            CONFIG, n_layers=1, vocab_size=8, d_ff=8, d_model=64, n_heads=1, n_kv_heads=1
        )
        write(path, small, Quant.F32, **byte_metadata("gpt-2", small=True))
    data = bytearray(path.read_bytes())
    for where, value in flips:
        data[where] = value
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(data)
    with suppress(TinyspecError):
        checkpoint.read_checkpoint(damaged)


def test_nan_is_named(tmp_path):
    write(
        tmp_path / "model.gguf",
        CONFIG,
        Quant.F32,
        rope_freqs__weight=np.full(32, np.nan, np.float32),
    )
    expect_error(tmp_path / "model.gguf", "rope_freqs.weight")
