"""A folder written is the folder read, in our hands and in transformers'."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.lm.checkpoints import (
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    configs,
    edit,
    expect_error,
    folder,
    random,
    shard,
)
from tests.lm.small import GPT2, LLAMA
from tests.lm.test_tokenizer import byte_level
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(config=configs(), seed=st.integers(0, 9))
def test_read_after_write_is_the_identity(tmp_path_factory, config, seed, dtype):
    weights = random(config, seed, dtype)
    path = tmp_path_factory.mktemp("round") / "zoo"
    checkpoint.write_checkpoint(path, config, weights)
    parts = checkpoint.read_checkpoint(path)
    assert parts.config == config
    assert (parts.name, parts.tokenizer) == ("zoo", None)
    assert parts.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert parts.weights[name].dtype == dtype
        assert parts.weights[name].is_contiguous()
        assert torch.equal(parts.weights[name], weight), name


@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN2, QWEN3, MISTRAL])
def test_write_after_read_gives_the_same_bytes_and_transformers_loads_them(tmp_path, config):
    first = folder(tmp_path, config)
    parts = checkpoint.read_checkpoint(first)
    checkpoint.write_checkpoint(tmp_path / "again", parts.config, parts.weights)
    assert (first / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    assert (first / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()
    peer, info = transformers.AutoModelForCausalLM.from_pretrained(first, output_loading_info=True)
    assert not any(info.values()), info
    assert sum(p.numel() for p in peer.parameters()) == config.parameters()


def test_shards_with_their_index_read_as_one_file(tmp_path):
    path = folder(tmp_path)
    whole = checkpoint.read_checkpoint(path).weights
    shard(path)
    for name, weight in checkpoint.read_checkpoint(path).weights.items():
        assert torch.equal(weight, whole[name])


def test_tokenizer_template_and_add_bos_survive(tmp_path):
    path = folder(
        tmp_path, replace(LLAMA, vocab_size=300, bos=263, eos=(264,), add_bos=True), byte_level()
    )
    parts = checkpoint.read_checkpoint(path)
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
    assert checkpoint.read_checkpoint(path).config.eos == (3, 4)
    assert checkpoint.read_checkpoint(path).config.bos == 1
    (path / "generation_config.json").unlink()
    assert checkpoint.read_checkpoint(path).config.eos == (2,)


def test_add_bos_comes_from_the_config_else_from_the_post_processor(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    path = folder(tmp_path, replace(LLAMA, vocab_size=300), byte_level())
    file = path / "tokenizer_config.json"
    assert not checkpoint.read_checkpoint(path).config.add_bos
    edit(file, add_bos_token="absent")
    assert not checkpoint.read_checkpoint(path).config.add_bos
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    start = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    backend.save(str(path / "tokenizer.json"))
    parts = checkpoint.read_checkpoint(path)
    assert parts.config.add_bos
    assert parts.config.bos == start
    assert parts.tokenizer.encode("h")[0] != start  # encode never adds it
    edit(file, add_bos_token=False)
    assert not checkpoint.read_checkpoint(path).config.add_bos


def test_writing_over_the_folder_one_reads_from_is_safe(tmp_path):
    path = folder(tmp_path)
    before = checkpoint.read_checkpoint(path)
    doubled = {name: w * 2 for name, w in before.weights.items()}
    checkpoint.write_checkpoint(path, before.config, doubled)
    for name, weight in checkpoint.read_checkpoint(path).weights.items():
        assert torch.equal(weight, doubled[name])
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    with pytest.raises(TinyspecError, match="No space left"):
        checkpoint.write_checkpoint(tmp_path / "model", LLAMA, random(LLAMA))
    assert not list(tmp_path.iterdir())


def test_a_config_that_no_family_has_is_not_written(tmp_path):
    mixed = replace(LLAMA, norm="layer", qkv_bias=True)
    with pytest.raises(
        TinyspecError, match="a llama checkpoint cannot express this Config's norm, out_bias"
    ):
        checkpoint.write_checkpoint(tmp_path / "model", mixed, random(mixed))
    with pytest.raises(TinyspecError, match=r"weight embed has shape \[2, 2\]"):
        checkpoint.write_checkpoint(
            tmp_path / "model", LLAMA, {**random(LLAMA), "embed": torch.zeros(2, 2)}
        )
    assert not (tmp_path / "model").exists()


# ------------------------------------------------------------- older and other ways to say the same


def test_old_and_new_keys_of_rope_scaling_mean_the_same(tmp_path):
    path = folder(tmp_path, replace(LLAMA, rope_theta=500.0, rope_scaling=LLAMA3))
    file, want = path / "config.json", checkpoint.read_checkpoint(path).config
    old = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}
    edit(file, rope_scaling=old)
    assert checkpoint.read_checkpoint(path).config == want
    edit(
        file,
        rope_scaling="absent",
        rope_theta="absent",
        rope_parameters={**LLAMA3, "rope_theta": 500.0},
    )
    assert checkpoint.read_checkpoint(path).config == want


def test_gpt2_without_its_prefix_and_with_old_buffers_reads_the_same(tmp_path):
    path = folder(tmp_path, GPT2)
    want = checkpoint.read_checkpoint(path).weights
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): w for name, w in tensors.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path / "model.safetensors")
    for name, weight in checkpoint.read_checkpoint(path).weights.items():
        assert torch.equal(weight, want[name])


def test_model_type_may_be_left_to_the_architecture(tmp_path):
    path = folder(tmp_path)
    edit(path / "config.json", model_type="absent")
    assert checkpoint.read_checkpoint(path).config.family == "llama"


def test_a_tied_head_may_be_stored_too_if_it_is_the_embedding(tmp_path):
    path = folder(tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        path / "model.safetensors",
    )
    assert checkpoint.read_checkpoint(path).config.tied
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        path / "model.safetensors",
    )
    expect_error(path, "lm_head.weight differs from the embedding.*tie_word_embeddings")
