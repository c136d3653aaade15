"""Rotary positions: a query or key at position m is turned by m * frequency in each pair of its
dimensions.

Su et al. 2021, arXiv 2104.09864; the pairing (i, i + hd/2) and the scalings are those of Hugging
Face's LLaMA.
"""

import math

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config


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
