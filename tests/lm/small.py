"""Small random models for the tests: every setting of the transformer, in float64."""

from dataclasses import replace

import torch

from tinyspec.lm.config import Config
from tinyspec.lm.transformer import Model

LLAMA = Config(
    vocab_size=13, d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, max_positions=64, tied=True
)
GPT2 = replace(
    LLAMA, norm="layer", positions="learned", activation="gelu_new", gated=False, n_kv_heads=4, qkv_bias=True,
    out_bias=True, mlp_bias=True, family="gpt2",
)  # fmt: skip


def model(config: Config = LLAMA, seed: int = 0, dtype: torch.dtype = torch.float64) -> Model:
    """Weights large enough that every layer, position and token changes the logits."""
    return Model.random(config, seed=seed, dtype=dtype, scale=0.4)


def forced(m: Model, ids: list[int]) -> torch.Tensor:
    """Logits after the last token by one plain pass over the whole text: the oracle."""
    return m.logits(ids)[-1]
