"""transformers computes the same logits.

This holds for every configuration, every prompt, and every split of the prompt.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.checkpoints import configs
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.tree import TokenTree

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@st.composite
def splits(draw: st.DrawFn, length: int) -> list[int]:
    """Lengths that sum to `length`."""
    cuts = sorted({length, *draw(st.lists(st.integers(1, length), max_size=3))})
    return [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


@settings(max_examples=60, deadline=None)
@given(config=configs(), seed=st.integers(0, 3), data=st.data())
@pytest.mark.slow
def test_logits_equal_transformers_for_any_config_prompt_and_split(
    tmp_path_factory, config, seed, data
):
    path = tmp_path_factory.mktemp("peer")
    torch.manual_seed(seed)
    peer = transformers.AutoModelForCausalLM.from_config(transformers_config(config)).eval()
    for (
        name,
        p,
    ) in (
        peer.named_parameters()
    ):  # transformers starts biases at 0 and norms at 1: nothing would be tested
        with torch.no_grad():
            p.copy_(torch.randn_like(p) * 0.3 + ("norm" in name or "ln_" in name))
    peer.save_pretrained(path)
    parts = checkpoint.read_checkpoint(path)
    assert replace(parts.config, bos=config.bos, eos=config.eos, extra=config.extra) == config
    model = Model(*parts)
    ids = data.draw(st.lists(st.integers(0, config.vocab_size - 1), min_size=2, max_size=20))
    with torch.no_grad():
        want = peer(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)
        ).logits[0]
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
            vocab_size=config.vocab_size, n_embd=config.d_model, n_layer=config.n_layers,
            n_head=config.n_heads,
            n_inner=config.d_ff, n_positions=config.max_positions,
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tied, bos_token_id=config.bos,
            eos_token_id=list(config.eos) or None,
        )  # fmt: skip
    rope = {"rope_theta": config.rope_theta, **(config.rope_scaling or {"rope_type": "default"})}
    kind, own = {
        "llama": (
            transformers.LlamaConfig,
            {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias},
        ),
        "mistral": (transformers.MistralConfig, {"sliding_window": None}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"attention_bias": config.qkv_bias}),
    }[config.family]
    return kind(
        vocab_size=config.vocab_size, hidden_size=config.d_model, intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope, tie_word_embeddings=config.tied, bos_token_id=config.bos,
        eos_token_id=list(config.eos) or None, **own,
    )  # fmt: skip
