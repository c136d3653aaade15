"""The layers of the transformer in torch: on any device, in any type, and with gradients.

Each layer has two pre-norm residual sublayers:

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

`Blocks.add_attention` and `Blocks.add_mlp` are these two lines. Training, inference, CUDA graphs
and the encoder-decoder all call them, and differ only in what attention reads. The families differ
in settings: LayerNorm or RMSNorm, learned or rotary positions, one key head for each query head or
for a group of them, a plain or a gated MLP, biases.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch
from tinyspec.lm.ops import (
    attend,
    attend_causal,
    linear,
    rotary_rows,
    rotary_tables,
    rotate,
    scatter_logits,
)

AttendFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries over keys and values, and over what was cached before: [..., q_dim]."""


class Block(NamedTuple):
    """The weights of one layer. What the family lacks is None."""

    norm1: Tensor
    norm1_bias: Tensor | None
    qkv: Tensor  # [q_dim + 2 kv_dim, d]
    qkv_bias: Tensor | None
    out: Tensor  # [d, q_dim]
    out_bias: Tensor | None
    norm2: Tensor
    norm2_bias: Tensor | None
    up: Tensor  # [2 f, d]: gate, then up; [f, d] without a gate
    up_bias: Tensor | None
    down: Tensor  # [d, f]
    down_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None


class Blocks:
    """All layers, the final norm and the head, on weights with the names of `Config.shapes()`."""

    def __init__(self, config: Config, weights: dict[str, Tensor]):
        self.config, self.weights = config, weights
        self.dtype, self.device = weights["embed"].dtype, weights["embed"].device
        self.head_ids = (
            torch.tensor(config.head_ids, device=self.device) if config.head_ids else None
        )
        self.rotary = self._make_rotary(0)
        self.bind_weights()

    def _make_rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return tables of cos and sin that hold so many positions, or all of the context."""
        rows = rotary_rows(self.config, positions)
        return rotary_tables(self.config, self.weights["embed"].dtype, self.device, rows)

    def bind_weights(self) -> None:
        """Look up the tensors of every layer in `weights`."""
        self.embed = self.weights["embed"]  # [V, d]
        parts = [
            f"{part}.{kind}"
            for part in ("norm1", "qkv", "out", "norm2", "up", "down")
            for kind in ("weight", "bias")
        ] + ["q_norm.weight", "k_norm.weight"]
        self.layers = [
            Block(*(self.weights.get(f"{i}.{part}") for part in parts))  # type: ignore[arg-type]
            for i in range(self.config.distinct_layers)
        ] * self.config.repeat
        self.vocabulary = self.embed if self.config.tied else self.weights["head"]  # [V, d]

    def release_weights(self) -> None:
        """Drop every tensor but those in `weights`, whose owner may free them one by one."""
        self.layers = []
        self.embed = self.vocabulary = torch.empty(0)

    # ------------------------------------------------------------------ the parts of a layer

    def reserve_rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the tables of cos and sin, after they were grown to so many positions."""
        if len(self.rotary[0]) < min(positions, self.config.max_positions):
            self.rotary = self._make_rotary(positions)
        return self.rotary

    def rotary_at(self, positions: slice | list[int]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of these positions; empty tables if positions are learned."""
        if self.config.positions != "rope":
            return self.rotary
        last = positions.stop if isinstance(positions, slice) else max(positions) + 1
        cos, sin = self.reserve_rotary(last)
        return cos[positions], sin[positions]

    def normalize(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        """Return the RMSNorm or LayerNorm of x [..., d]."""
        if self.config.norm == "rms":
            return F.rms_norm(x, (x.shape[-1],), gain, self.config.norm_eps)
        return F.layer_norm(x, (x.shape[-1],), gain, bias, self.config.norm_eps)

    def project_qkv(
        self, block: Block, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [..., H, hd], k and v [..., KV, hd]; q and k are rotated to their positions."""
        c = self.config
        fused = linear(self.normalize(x, block.norm1, block.norm1_bias), block.qkv, block.qkv_bias)
        heads = fused.view(*x.shape[:-1], c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        rotated, v = heads[..., : -c.n_kv_heads, :], heads[..., -c.n_kv_heads :, :]
        if block.q_norm is not None:
            q, k = rotated[..., : c.n_heads, :], rotated[..., c.n_heads :, :]
            q = F.rms_norm(q, (c.head_dim,), block.q_norm, c.norm_eps)
            k = F.rms_norm(k, (c.head_dim,), block.k_norm, c.norm_eps)
            rotated = torch.cat((q, k), dim=-2)
        if c.positions == "rope":
            rotated = rotate(rotated, cos, sin)
        q, k = rotated[..., : c.n_heads, :], rotated[..., c.n_heads :, :]
        return q, k, v

    def apply_mlp(self, block: Block, x: Tensor) -> Tensor:
        """Return mlp(norm(x)) of x [..., d]."""
        h = linear(self.normalize(x, block.norm2, block.norm2_bias), block.up, block.up_bias)
        activation = F.silu if self.config.activation == "silu" else _gelu_new
        if self.config.gated:
            gate, up = h.chunk(2, dim=-1)
            h = activation(gate) * up
        else:
            h = activation(h)
        return linear(h, block.down, block.down_bias)

    def add_attention(
        self,
        block: Block,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend_fn: AttendFn,
        dropout: float = 0.0,
    ) -> Tensor:
        """Run the first half of a layer: x + attention(norm(x)).

        rotary     cos and sin of the positions of x
        attend_fn  q, k and v of x -> the mixed values [..., q_dim]
        """
        mixed = attend_fn(*self.project_qkv(block, x, *rotary))
        return x + drop_out(linear(mixed, block.out, block.out_bias), dropout)

    def add_mlp(self, block: Block, x: Tensor, dropout: float = 0.0) -> Tensor:
        """Run the second half of a layer: x + mlp(norm(x))."""
        return x + drop_out(self.apply_mlp(block, x), dropout)

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """Return the final norm of x [..., d], which the head reads."""
        return self.normalize(x, self.weights["norm.weight"], self.weights.get("norm.bias"))

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., V] of states x [..., d] before the final norm.

        They are float32, or float64 in a float64 model.
        """
        return self.apply_head(self.apply_final_norm(x))

    def apply_head(self, normed: Tensor) -> Tensor:
        """Return the logits [..., V] of states [..., d] after the final norm."""
        wide = torch.float64 if normed.dtype == torch.float64 else torch.float32
        logits = linear(normed, self.vocabulary).to(wide)
        return scatter_logits(logits, self.head_ids, self.config.vocab_size)

    # ------------------------------------------------------------------ dense text, with gradients

    def training_logits(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Run a dense causal pass with gradients: ids [B, T] -> logits [B, T, V].

        Dropout is applied to what is added to the residual stream.
        """
        return scatter_logits(self.head_logits(ids, dropout), self.head_ids, self.config.vocab_size)

    def head_logits(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Return `training_logits` of the ids in `head_ids` alone: [B, T, len(head_ids) or V]."""
        return linear(self.final_states(ids, dropout), self.vocabulary)

    def final_states(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the states that the head reads in a dense pass: [B, T, d]."""
        x, rotary = self._embed(ids, dropout)
        for block in self.layers:
            x = self._run_layer(block, x, rotary, dropout)
        return self.apply_final_norm(x)

    def layer_states(
        self,
        ids: Tensor,
        dropout: float = 0.0,
        dropped: Sequence[float] = (),
        depths: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the state [B, T, d] after each layer of a dense pass, which `compute_logits` takes.

        With `depths` or `skipped` this is the *masked stream*: a token that a layer does not update
        keeps its state, and the layer makes its keys and values from that state. So texts are
        trained whose tokens leave early, or skip layers.

        dropped  for each layer, the chance that a sample skips it (layer dropout)
        depths   [B, T] how many layers update each token; None: all. It is read as the pass goes
                 on: who lowers it between two layers lets tokens leave there
        skipped  [L, B, T] which tokens each layer does not update; None: none
        """
        x, rotary = self._embed(ids, dropout)
        chances = dropped or [0.0] * len(self.layers)
        for layer, (block, chance) in enumerate(zip(self.layers, chances, strict=True)):
            entered, kept = x, None
            if chance:
                kept = (torch.rand(len(x), device=x.device) >= chance).nonzero().flatten()
            if kept is None or len(kept) == len(x):
                x = self._run_layer(block, x, rotary, dropout)
            elif len(kept):  # the others are not computed at all
                ran = self._run_layer(block, x[kept], rotary, dropout)
                x = x.index_copy(0, kept, ran.to(x.dtype))
            if depths is not None:
                x = torch.where((depths > layer)[..., None], x, entered)
            if skipped is not None:
                x = torch.where(skipped[layer][..., None], entered, x)
            yield x

    def embed_text(self, ids: Tensor) -> Tensor:
        """Return the state [B, T, d] that enters the first layer of a dense pass."""
        return self._embed(ids, 0.0)[0]

    def stage_states(self, x: Tensor, layers: range) -> Iterator[Tensor]:
        """Yield the state [B, T, d] after each of some layers, from the state x that enters them.

        So the stages of a pipeline run, each with its own layers of a dense causal pass.
        """
        rotary = self.rotary_at(slice(x.shape[1]))
        for layer in layers:
            x = self._run_layer(self.layers[layer], x, rotary, 0.0)
            yield x

    def hidden_states(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Return the outputs of these layers in a dense pass: [B, len(layers), T, d].

        Layer 0 is the embedding. The last layer's output is the one after the final norm.
        """
        if not layers:
            return self.embed.new_empty(len(ids), 0, ids.shape[1], self.config.d_model)
        states = [self._embed(ids, 0.0)[0], *self.layer_states(ids)]
        states[-1] = self.apply_final_norm(states[-1])
        return torch.stack([states[layer] for layer in layers], dim=1)

    def _embed(self, ids: Tensor, dropout: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the input of the first layer, [B, T, d], and cos and sin of its positions."""
        x = F.embedding(ids, self.embed)
        if self.config.positions == "learned":
            x = x + self.weights["positions"][: ids.shape[1]]
        return drop_out(x, dropout), self.rotary_at(slice(ids.shape[1]))

    def _run_layer(
        self, block: Block, x: Tensor, rotary: tuple[Tensor, Tensor], dropout: float
    ) -> Tensor:
        """Return the state after one layer of a dense causal pass."""
        x = self.add_attention(block, x, rotary, attend_causal, dropout)
        return self.add_mlp(block, x, dropout)

    # ------------------------------------------------------------------ inference

    def embed_tokens(self, tokens: Sequence[int]) -> Tensor:
        """Return the embeddings [n, d], without positions."""
        return F.embedding(torch.tensor(tokens, device=self.device), self.embed)

    def initial_states(self, feed: ForwardBatch) -> Tensor:
        """Return the state [n, d] that each position starts from: its embedding, or its own."""
        x = self.embed_tokens(feed.tokens_to_embed)
        if feed.has_state is not None and feed.entry_states is not None:
            x[torch.tensor(feed.has_state, device=self.device)] = feed.entry_states.to(x.dtype)
        if self.config.positions == "learned" and not feed.has_position:
            at = torch.tensor(feed.positions, device=self.device)
            fresh = torch.tensor([s == 0 for s in feed.starts], device=self.device)[:, None]
            x = x + fresh * self.weights["positions"][at]
        return x

    def run_full_pass(self, feed: ForwardBatch) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return None: torch has no shortcut for a full pass."""
        return None

    def run_sublayers(
        self,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Run sublayers first..last-1 over the active rows x [n, d] of all feeds."""
        slots = [
            feed.slot_mapping(rows) if rows else slice(0)
            for feed, rows in zip(feeds, active, strict=True)
        ]
        rotary = self.rotary_at(
            [feed.positions[row] for feed, rows in zip(feeds, active, strict=True) for row in rows]
        )
        copying = [feed.copying for feed, rows in zip(feeds, active, strict=True) for _ in rows]
        for sublayer in range(first, last):
            layer = sublayer // 2
            block = self.layers[layer]
            if sublayer % 2:
                x = self.add_mlp(block, x)
                continue
            attend_fn = partial(self._attend_cached, layer, feeds, active, slots)
            new = self.add_attention(block, x, rotary, attend_fn)
            if any(copying):  # these rows only write keys and values
                new = torch.where(torch.tensor(copying, device=self.device)[:, None], x, new)
            x = new
        return x

    def _attend_cached(
        self,
        layer: int,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        slots: list[slice | Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Write keys and values, then attend, each feed over its own cache: [rows, q_dim]."""
        outs: list[Tensor] = []
        start = 0
        for feed, rows, where in zip(feeds, active, slots, strict=True):
            if not rows:
                continue
            own = slice(start, start + len(rows))
            start += len(rows)
            feed.cache.write(layer, where, k[own], v[own])
            if feed.copying:
                outs.append(q[own].flatten(1))
                continue
            groups = self.config.n_heads // self.config.n_kv_heads
            seen, mask = feed.attended_slots(layer, rows, groups)
            keys, values = feed.cache.read(layer, seen)
            if feed.prefix is not None:  # only probes attend to it; it stands before everything
                keys = torch.cat((feed.prefix[0][layer].to(keys.dtype), keys), dim=1)
                values = torch.cat((feed.prefix[1][layer].to(values.dtype), values), dim=1)
            outs.append(attend(q[own], keys, values, mask))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def drop_out(x: Tensor, p: float) -> Tensor:
    """Apply dropout with probability p; 0 leaves x as it is and draws nothing."""
    return F.dropout(x, p) if p else x


def _gelu_new(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
