"""What attention asks with: the queries of one token in every layer, made again from the states
that entered the layers.

Retrieval over the cache (which old keys matter now?) needs them; a pass does not keep them. The
states are what a tap shows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.cache import Cache
from tinyspec.lm.ops import linear
from tinyspec.lm.rope import rotate, rotations
from tinyspec.lm.transformer import Model


def queries(model: Model, states: Tensor, position: int) -> Tensor:
    """The queries of the token at `position`, turned to it: [L, H, hd].

    states  [L, d]: what entered each layer (hidden layers 0 to L - 1)
    """
    c, weights = model.config, model.weights
    made: list[Tensor] = []
    for layer, state in enumerate(states):
        gain, bias = (
            _as(state, weights.get(f"{layer}.norm1.{kind}")) for kind in ("weight", "bias")
        )
        if c.norm == "rms":
            x = F.rms_norm(state, (c.d_model,), gain, c.norm_eps)
        else:
            x = F.layer_norm(state, (c.d_model,), gain, bias, c.norm_eps)
        qkv, more = (_as(state, weights.get(f"{layer}.qkv.{kind}")) for kind in ("weight", "bias"))
        assert qkv is not None
        made.append(
            linear(x[None], qkv[: c.q_dim].contiguous(), None if more is None else more[: c.q_dim])[
                0
            ]
        )
    turned = torch.stack(made).view(len(made), c.n_heads, c.head_dim)
    if c.positions == "rope":
        cos, sin = rotations(c, states.dtype, states.device)
        turned = rotate(turned, cos[position], sin[position])
    return turned


def mean_keys(cache: Cache, layer: int, chunk: int, chunks: int) -> Tensor:
    """The mean key of each of the first `chunks` chunks of so many slots, by key/value head: [KV,
    chunks, hd].
    """
    keys = cache.keys[layer][:, : chunk * chunks].contiguous()
    wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
    means: Tensor = keys.to(wide).view(len(keys), chunks, chunk, -1).mean(dim=2)
    return means


def chosen(scores: Tensor, keep: int) -> list[list[int]]:
    """For every head the `keep` chunks with the highest scores [KV, chunks], the first chunk always
    among them; of equals the earlier one."""
    order: Sequence[Sequence[int]] = (
        scores[:, 1:].argsort(dim=-1, descending=True, stable=True).tolist()
    )
    return [sorted([0, *(chunk + 1 for chunk in row[: keep - 1])]) for row in order]


def _as(state: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.to(state.device, state.dtype)
