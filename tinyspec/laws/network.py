"""The second tier: a random transformer in float64, so small that all its outcomes can be walked.

What needs hidden states, and what stands on real caches and views, is enumerated here, to 1e-10.
The judge is one dense pass over the whole text, which knows no cache, tree or view.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from tinyspec.lm.config import Config
from tinyspec.lm.transformer import Model

NETWORK_TOLERANCE = 1e-10


@lru_cache(maxsize=64)
def small_network(seed: int, vocabulary: int = 4, layers: int = 3) -> Model:
    """A transformer of width 8; its gains are random and its weights large, so that every layer and
    position tells.
    """
    config = Config(
        vocab_size=vocabulary, d_model=8, n_layers=layers, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12, max_positions=64
    )  # fmt: skip
    model = Model.random(config, seed=seed, dtype=torch.float64, scale=0.6)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.weights.items():
        if "norm" in name:
            weight += 0.4 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    model.name = f"network {seed}"
    return model


def likeliest_token(row: Sequence[Any]) -> int:
    """The likeliest token, the lowest id of equals."""
    return max(range(len(row)), key=lambda token: (row[token], -token))
