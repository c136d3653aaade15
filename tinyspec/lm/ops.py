"""The operations that cost time: products with a weight matrix, attention, rotary positions.

All that the transformer computes in torch goes through `linear`, `attend` and `rotate`.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config

TRANSPOSE_MAX_ROWS = 6  # rows up to which the transposed float32 product is faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., i] times weight [o, i] transposed, plus bias [o]: [..., o].

    torch's float32 product of a few rows uses one thread of a CPU. The transposed product,
    weight @ x, uses all of them; a single row is doubled, because one column would be a vector
    again. In bfloat16, and on one thread, the plain product is faster.
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


def scatter_logits(logits: Tensor, head_ids: Tensor | None, vocabulary: int) -> Tensor:
    """Return logits [..., len(head_ids)] as logits [..., V]: -inf for all other ids.

    On a CPU numpy fills them, unless a gradient is needed: torch would wake its threads (host.py).
    """
    if head_ids is None:
        return logits
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and not logits.requires_grad:
        filled = np.full((*logits.shape[:-1], vocabulary), -np.inf, np.float32)
        filled[..., head_ids.numpy()] = logits.numpy()
        return torch.from_numpy(filled)
    whole = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    whole[..., head_ids] = logits
    return whole


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention of n rows over m keys: [n, H * hd].

    q [n, H, hd], k and v [KV, m, hd]: H / KV query heads share a key/value head.
    mask: bool [n, m] or [KV, n, m], True where a row may attend; or what `additive_mask` made of
    it; None: everywhere. The query heads of a group are stacked as rows, so that keys are not
    copied for each head.
    """
    n, heads, width = q.shape
    shared = k.shape[0]
    groups = heads // shared
    rows = (
        q.view(n, shared, groups, width).permute(1, 2, 0, 3).reshape(1, shared, groups * n, width)
    )
    if mask is not None and mask.dtype == torch.bool:
        mask = additive_mask(mask, groups, q.dtype)
    out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask)
    return out.view(shared, groups, n, width).permute(2, 0, 1, 3).reshape(n, heads * width)


def additive_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as what is added to the scores, 0 or -inf: [.., groups * n, m].

    It is repeated for each query head of a group. All layers share it.
    """
    tall = mask.repeat(groups, 1) if mask.ndim == 2 else mask.repeat(1, groups, 1)
    return torch.zeros(tall.shape, dtype=dtype, device=mask.device).masked_fill_(~tall, -torch.inf)


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return dense causal attention for training: [B, T, H * hd].

    q [B, T, H, hd], k and v [B, T, KV, hd].
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return out.transpose(1, 2).flatten(2)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return dense attention under any mask: [B, T, d].

    q [B, T, H, hd], k and v [B or 1, S, H, hd]. mask: bool [B or 1, T or 1, S], True where a row
    may attend. A row that may attend nowhere gets zeros.
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


def rotary_frequencies(config: Config) -> Tensor:
    """Return the angle per position of each pair of dimensions, [hd / 2], after its scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return freq / float(scaling["factor"])
    if kind == "llama3":
        return _scale_llama3(freq, scaling)
    if kind != "default":
        raise TinyspecError(
            f"config.json: rope_scaling type '{kind}' is not known here; "
            "known: default, linear, llama3"
        )
    return freq


def _scale_llama3(freq: Tensor, scaling: dict[str, float]) -> Tensor:
    """Stretch slow waves (longer than the old context) by `factor`, and keep fast ones.

    Those between are blended.
    """
    old = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelength = 2 * math.pi / freq
    blend = (old / wavelength - low) / (high - low)
    mixed = (1 - blend) * freq / factor + blend * freq
    stretched = torch.where(wavelength > old / low, freq / factor, freq)
    between = ~(wavelength < old / high) & ~(wavelength > old / low)
    return torch.where(between, mixed, stretched)


ROTARY_ROWS = 4096  # positions of the first tables of cos and sin: a millisecond, a few megabytes


def rotary_rows(config: Config, positions: int) -> int:
    """Return how many positions the tables of cos and sin have, where so many are needed.

    The number doubles from ROTARY_ROWS on. What config.json calls the context may be larger by far
    than any text, and its number may be damaged: tables of 2**31 positions fill no memory here.
    """
    rows = ROTARY_ROWS
    while rows < positions:
        rows *= 2
    return min(rows, config.max_positions)


def rotary_tables(
    config: Config, dtype: torch.dtype, device: torch.device, n: int
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0..n-1, each [n, 1, hd]; sin has the sign in it.

    The axis of size 1 broadcasts over heads. A model with learned positions gets empty tables. No
    bit of a row depends on n.
    """
    n = n if config.positions == "rope" else 0
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(
        torch.arange(n, dtype=precise), rotary_frequencies(config).to(precise)
    )  # [n, hd / 2]
    cos, sin = angles.cos(), angles.sin()
    signed = torch.cat((-sin, sin), dim=-1)
    tables = torch.cat((cos, cos), dim=-1), signed
    return tables[0][:, None].to(device, dtype), tables[1][:, None].to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, hd] by cos and sin [..., 1, hd]: x cos + swap(x) sin."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), dim=-1), sin)
