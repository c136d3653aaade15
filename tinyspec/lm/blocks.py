"""The blocks of the transformer in torch: what the compiled path computes, on any device and in any
type, with gradients.

Pre-norm residual blocks: x += attention(norm(x)); x += mlp(norm(x)). What differs between the
families is a setting each: LayerNorm or RMSNorm, learned positions or rotations, one key per query
head or per group, a plain or a gated MLP, biases.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch
from tinyspec.lm.ops import attend, attend_causal, linear, rotate, rotations, scatter_logits


class Block(NamedTuple):
    """The weights of one layer; a bias or the gain of a norm that the family lacks is None."""

    norm1: Tensor
    norm1_bias: Tensor | None
    qkv: Tensor  # [q_dim + 2 kv_dim, d]
    qkv_bias: Tensor | None
    out: Tensor  # [d, q_dim]
    out_bias: Tensor | None
    norm2: Tensor
    norm2_bias: Tensor | None
    up: Tensor  # [2 f, d]: gate, then up; [f, d] where there is no gate
    up_bias: Tensor | None
    down: Tensor  # [d, f]
    down_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None


class Blocks:
    """All layers, the final norm and the head, on weights with the names of `Config.shapes()`."""

    def __init__(self, config: Config, weights: dict[str, Tensor]):
        self.config, self.weights = config, weights
        self.device = weights["embed"].device
        self.says = torch.tensor(config.says, device=self.device) if config.says else None
        self.cos, self.sin = rotations(config, weights["embed"].dtype, self.device)
        self.bind()

    def bind(self) -> None:
        """Look up the tensors of every layer in `weights`."""
        self.embed = self.weights["embed"]  # [V, d]
        parts = [
            f"{part}.{kind}"
            for part in ("norm1", "qkv", "out", "norm2", "up", "down")
            for kind in ("weight", "bias")
        ] + ["q_norm.weight", "k_norm.weight"]
        self.layers = [
            Block(*(self.weights.get(f"{i}.{part}") for part in parts))  # type: ignore[arg-type]
            for i in range(self.config.n_layers)
        ]
        self.vocabulary = self.embed if self.config.tied else self.weights["head"]  # [V, d]

    def release(self) -> None:
        """Let go of every tensor but those in `weights`, whose owner may free them one by one."""
        self.layers = []
        self.embed = self.vocabulary = torch.empty(0)

    def _norm(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if self.config.norm == "rms":
            return F.rms_norm(x, (x.shape[-1],), gain, self.config.norm_eps)
        return F.layer_norm(x, (x.shape[-1],), gain, bias, self.config.norm_eps)

    def _qkv(
        self, block: Block, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, hd], keys and values [..., KV, hd], rotated to their positions."""
        c = self.config
        fused = linear(self._norm(x, block.norm1, block.norm1_bias), block.qkv, block.qkv_bias)
        heads = fused.view(*x.shape[:-1], c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        turned, v = heads[..., : -c.n_kv_heads, :], heads[..., -c.n_kv_heads :, :]
        if block.q_norm is not None:
            q, k = turned[..., : c.n_heads, :], turned[..., c.n_heads :, :]
            q = F.rms_norm(q, (c.head_dim,), block.q_norm, c.norm_eps)
            k = F.rms_norm(k, (c.head_dim,), block.k_norm, c.norm_eps)
            turned = torch.cat((q, k), dim=-2)
        if c.positions == "rope":
            turned = rotate(turned, cos, sin)
        q, k = turned[..., : c.n_heads, :], turned[..., c.n_heads :, :]
        return q, k, v

    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        h = linear(self._norm(x, block.norm2, block.norm2_bias), block.up, block.up_bias)
        activation = F.silu if self.config.activation == "silu" else _gelu_new
        if self.config.gated:
            gate, up = h.chunk(2, dim=-1)
            h = activation(gate) * up
        else:
            h = activation(h)
        return linear(h, block.down, block.down_bias)

    def training_logits(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Dense causal pass with gradients: ids [B, T] -> logits [B, T, V]. Dropout falls on what
        joins the stream.
        """
        return scatter_logits(self.head_logits(ids, dropout), self.says, self.config.vocab_size)

    def head_logits(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """The same for the ids that the head has rows for: [B, T, len(says) or V]."""
        return linear(self.states(ids, dropout), self.vocabulary)

    def states(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """What the head reads in that pass: [B, T, d]."""
        x, cos, sin = self._embedded(ids, dropout)
        for block in self.layers:
            x = self._through(block, x, cos, sin, dropout)
        return self.final(x)

    def stream(
        self, ids: Tensor, dropout: float = 0.0, dropped: Sequence[float] = ()
    ) -> Iterator[Tensor]:
        """The state after each layer in that pass, as `head` takes it: [B, T, d], L times.

        dropped  chance that a layer is left out for a sample (layer dropout); the sample then
                 passes it unchanged
        """
        x, cos, sin = self._embedded(ids, dropout)
        for block, chance in zip(self.layers, dropped or [0.0] * len(self.layers), strict=True):
            kept = (
                (torch.rand(len(x), device=x.device) >= chance).nonzero().flatten()
                if chance
                else None
            )
            if kept is None or len(kept) == len(x):
                x = self._through(block, x, cos, sin, dropout)
            elif len(kept):  # the others are not computed at all
                x = x.index_copy(
                    0, kept, self._through(block, x[kept], cos, sin, dropout).to(x.dtype)
                )
            yield x

    def _embedded(self, ids: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
        """What enters the first layer of a dense pass, [B, T, d], and the rotations of its
        positions.
        """
        x = F.embedding(ids, self.embed)
        if self.config.positions == "learned":
            x = x + self.weights["positions"][: ids.shape[1]]
        x = F.dropout(x, dropout) if dropout else x
        return x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]

    def _through(self, block: Block, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> Tensor:
        """One layer of a dense pass."""
        h = linear(attend_causal(*self._qkv(block, x, cos, sin)), block.out, block.out_bias)
        x = x + (F.dropout(h, dropout) if dropout else h)
        h = self._mlp(block, x)
        return x + (F.dropout(h, dropout) if dropout else h)

    # ------------------------------------------------------------------ inference

    def enter(self, feed: ForwardBatch) -> Tensor:
        """The state each row starts from, [n, d]: its embedding, or what it had when it was
        left.
        """
        ids = (
            feed.tokens
            if feed.given is None
            else [0 if g else t for t, g in zip(feed.tokens, feed.given, strict=True)]
        )
        x = F.embedding(torch.tensor(ids, device=self.device), self.embed)
        if feed.given is not None and feed.entering is not None:
            x[torch.tensor(feed.given, device=self.device)] = feed.entering.to(x.dtype)
        if self.config.positions == "learned":
            fresh = torch.tensor([s == 0 for s in feed.starts], device=self.device)[:, None]
            x = (
                x
                + fresh
                * self.weights["positions"][torch.tensor(feed.positions, device=self.device)]
            )
        return x

    def run(self, feed: ForwardBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """A whole pass in one go: not here."""
        return None

    def span(
        self,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Sublayers first..last-1 over the active rows x [n, d] of all feeds: their new states."""
        places = [
            feed.slot_mapping(rows) if rows else slice(0)
            for feed, rows in zip(feeds, active, strict=True)
        ]
        turn = self.cos, self.sin
        if self.config.positions == "rope":
            where = [
                feed.positions[row]
                for feed, rows in zip(feeds, active, strict=True)
                for row in rows
            ]
            turn = self.cos[where], self.sin[where]
        copied = [feed.copying for feed, rows in zip(feeds, active, strict=True) for _ in rows]
        for sublayer in range(first, last):
            block = self.layers[sublayer // 2]
            if sublayer % 2:
                x = x + self._mlp(block, x)
                continue
            mixed = linear(
                self._mix(block, sublayer // 2, feeds, active, places, x, turn),
                block.out,
                block.out_bias,
            )
            if any(copied):  # these rows only leave keys and values behind
                mixed = mixed.masked_fill(torch.tensor(copied, device=self.device)[:, None], 0)
            x = x + mixed
        return x

    def _mix(
        self,
        block: Block,
        layer: int,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        places: list[slice | Tensor],
        h: Tensor,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attention of the active rows, each feed over its own slots: [rows, q_dim]."""
        q, k, v = self._qkv(block, h, *turn)
        outs: list[Tensor] = []
        at = 0
        for feed, rows, where in zip(feeds, active, places, strict=True):
            if not rows:
                continue
            mine = slice(at, at + len(rows))
            at += len(rows)
            feed.cache.write(layer, where, k[mine], v[mine])
            if feed.copying:
                outs.append(q[mine].flatten(1))
                continue
            keys, values = (
                feed.cache.keys[layer][:, : feed.high],
                feed.cache.values[layer][:, : feed.high],
            )
            mask = feed.cached_attention_mask(
                layer, rows, self.config.n_heads // self.config.n_kv_heads
            )
            if feed.prefix is not None:  # only probes look at it; it stands before everything
                keys = torch.cat((feed.prefix[0][layer].to(keys.dtype), keys), dim=1)
                values = torch.cat((feed.prefix[1][layer].to(values.dtype), values), dim=1)
            outs.append(attend(q[mine], keys, values, mask))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def final(self, x: Tensor) -> Tensor:
        """The final norm of rows x [n, d], as the head reads it."""
        return self._norm(x, self.weights["norm.weight"], self.weights.get("norm.bias"))

    def head(self, x: Tensor) -> Tensor:
        """Logits [n, V] of rows x [n, d] before the final norm: float32, float64 for a float64
        model.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return scatter_logits(
            linear(self.final(x), self.vocabulary).to(wide), self.says, self.config.vocab_size
        )


def _gelu_new(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
