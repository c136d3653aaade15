"""The operations that cost anything: products with a weight matrix, attention, rotary positions.

Everything that the transformer computes in torch goes through `linear`, `attend` and `rotate`, so a
faster kernel has one place to stand.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config

TRANSPOSE_MAX_ROWS = 6  # rows up to which torch's float32 product is faster turned round


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., i] times weight [o, i] transposed, plus bias [o]: [..., o].

    torch's float32 product of a few rows runs on one thread of a CPU at a fraction of the memory's
    speed. The same product turned round (weight @ x) is a matrix product that uses all threads; a
    single row is doubled, for with one column it would be a vector again. In bfloat16, and on one
    thread, the plain form is the faster one.
    """
    n = x.shape[0]
    if (
        n <= TRANSPOSE_MAX_ROWS
        and x.ndim == 2
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.get_num_threads() > 1
    ):
        columns = x.t() if n > 1 else torch.cat((x, x)).t()
        y = torch.mm(weight, columns).t()[:n]
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)


def scatter_logits(logits: Tensor, says: Tensor | None, vocabulary: int) -> Tensor:
    """Logits [..., len(says)] of some ids as logits [..., V] of all: -inf for those that the head
    has no row for.
    """
    if says is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    whole[..., says] = logits
    return whole


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of n rows over m keys, each key/value head shared by H / KV query heads.

    q [n, H, hd], k and v [KV, m, hd], mask bool [n, m] or [KV, n, m], True where a row may look
    (None: everywhere), or what `stacked` made of it.
    Returns [n, H * hd]. The query heads of a group are stacked as rows, so keys are never copied
    once per head.
    """
    n, heads, width = q.shape
    shared = k.shape[0]
    groups = heads // shared
    rows = (
        q.view(n, shared, groups, width).permute(1, 2, 0, 3).reshape(1, shared, groups * n, width)
    )
    if mask is not None and mask.dtype == torch.bool:
        mask = stacked(mask, groups, q.dtype)
    out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask)
    return out.view(shared, groups, n, width).permute(2, 0, 1, 3).reshape(n, heads * width)


def stacked(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A bool mask once for every query head of a group, as what is added to scores: 0 or -inf, [..,
    groups * n, m].

    It is the same in every layer, so it is made once a pass.
    """
    tall = mask.repeat(groups, 1) if mask.ndim == 2 else mask.repeat(1, groups, 1)
    return torch.zeros(tall.shape, dtype=dtype, device=mask.device).masked_fill_(~tall, -torch.inf)


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention for training: q [B, T, H, hd], k and v [B, T, KV, hd] -> [B, T, H *
    hd].
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(2)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [B, T, H, hd] over k and v [B or 1, S, H, hd]; mask bool [B or 1, T or 1, S], True where a
    row may look. -> [B, T, d].

    A row that may look nowhere gets zeros.
    """
    batch = len(q)
    q, k, v = (
        q.transpose(1, 2),
        k.transpose(1, 2).expand(batch, -1, -1, -1),
        v.transpose(1, 2).expand(batch, -1, -1, -1),
    )
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    nowhere = ~mask.any(dim=-1, keepdim=True)  # [B or 1, T or 1, 1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=(mask | nowhere)[:, None])
    return out.transpose(1, 2).flatten(2).masked_fill(nowhere, 0)


def frequencies(config: Config) -> Tensor:
    """Angle per position of each pair of dimensions, [hd / 2], with linear or llama3 scaling
    applied.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return freq / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(freq, scaling)
    if kind != "default":
        raise TinyspecError(
            f"config.json: rope_scaling type '{kind}' is not known here; known: default, linear, llama3"
        )
    return freq


def _llama3(freq: Tensor, scaling: dict[str, float]) -> Tensor:
    """Slow waves (longer than the old context) are stretched by `factor`, fast ones kept, those
    between blended.
    """
    old = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi / freq
    blend = (old / wavelength - low) / (high - low)
    mixed = (1 - blend) * freq / factor + blend * freq
    stretched = torch.where(wavelength > old / low, freq / factor, freq)
    between = ~(wavelength < old / high) & ~(wavelength > old / low)
    return torch.where(between, mixed, stretched)


def rotations(config: Config, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin for every position, each [max_positions, 1, hd], the sign of the rotation folded
    into sin.

    The axis of size 1 broadcasts over heads. A model with learned positions gets empty tables.
    """
    n = config.max_positions if config.positions == "rope" else 0
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(
        torch.arange(n, dtype=precise), frequencies(config).to(precise)
    )  # [n, hd / 2]
    cos, sin = angles.cos(), angles.sin()
    signed = torch.cat((-sin, sin), dim=-1)
    return torch.cat((cos, cos), dim=-1)[:, None].to(device, dtype), signed[:, None].to(
        device, dtype
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., heads, hd] by its positions' tables [..., 1, hd]: x cos + swap(x) sin."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), dim=-1), sin)
