"""One decoder-only transformer, of which GPT-2 and LLaMA are configurations.

Pre-norm residual blocks: x += attention(norm(x)); x += mlp(norm(x)). What differs between the families is a setting
each: LayerNorm or RMSNorm, learned positions or rotations, one key per query head or per group, a plain or a gated MLP,
biases.

`Model.forward(feeds)` is the only place that computes at inference. It is ragged: every session passes its own rows,
and a batch is nothing but several feeds. `Model.teach(ids)` is the same blocks over dense text with gradients.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.feed import Call, Feed, Scores
from tinyspec.lm.ops import attend, attend_causal, linear
from tinyspec.lm.rope import rotate, rotations
from tinyspec.lm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyspec.lm.gate import Gate
    from tinyspec.lm.session import Session


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


class Model:
    """Weights that compute. `weights` is flat, with the names of `Config.shapes()`."""

    def __init__(
        self, config: Config, weights: Mapping[str, Tensor], tokenizer: Tokenizer | None = None, name: str = "model"
    ):
        self.config, self.weights, self._tokenizer, self.name = config, dict(weights), tokenizer, name
        w = self.weights
        self.blocks = [
            Block(
                *(
                    w.get(f"{i}.{part}.{kind}")  # type: ignore[arg-type]
                    for part in ("norm1", "qkv", "out", "norm2", "up", "down")
                    for kind in ("weight", "bias")
                )
            )
            for i in range(config.n_layers)
        ]
        self.head = w["embed"] if config.tied else w["head"]
        self.dtype, self.device = self.head.dtype, self.head.device
        self.cos, self.sin = rotations(config, self.dtype, self.device)

    @classmethod
    def random(cls, config: Config, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 0.02) -> "Model":
        """Fresh weights as GPT-2 draws them: N(0, scale), what enters the residual stream scaled by 1/sqrt(2 L)."""
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, Tensor] = {}
        for name, shape in config.shapes().items():
            if name.endswith(".bias"):
                weights[name] = torch.zeros(shape, dtype=dtype)
            elif "norm" in name:
                weights[name] = torch.ones(shape, dtype=dtype)
            else:
                residual = name.endswith(("out.weight", "down.weight"))
                std = scale / math.sqrt(2 * config.n_layers) if residual else scale
                weights[name] = (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)
        return cls(config, weights)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Model({self.name!r}, {c.family}, {c.n_layers} layers of {c.d_model}, vocabulary {c.vocab_size}, "
            f"{c.parameters() / 1e6:.1f}M weights, {str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TinyspecError(f"{self.name} has no tokenizer.json: pass token ids, or put the file into its folder")
        return self._tokenizer

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> "Model":
        """The same model elsewhere or in another precision."""
        moved = {name: w.detach().to(device=device, dtype=dtype) for name, w in self.weights.items()}
        return Model(self.config, moved, self._tokenizer, self.name)

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder that `load` and transformers read."""
        weights = {name: w.detach().cpu() for name, w in self.weights.items()}
        checkpoint.write(Path(folder), self.config, weights, self._tokenizer)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def session(self, ledger: "list[Call] | None" = None, gate: "Gate | None" = None) -> "Session":
        """A new text to extend; `gate` stands in front of `forward` (a batch waits there for company)."""
        from tinyspec.lm.session import Session  # the session stands on the model; this is its front door

        return Session(self, ledger=ledger, gate=gate.through(self) if gate else None)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Next-token logits after every prefix of `ids`: [len, V], float32 (float64 for a float64 model)."""
        with torch.no_grad():
            rows = self.teach(torch.tensor([list(ids)], device=self.device))[0]
        return rows if rows.dtype == torch.float64 else rows.float()

    # ------------------------------------------------------------------ the blocks, for any leading shape [..., d]

    def _norm(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if self.config.norm == "rms":
            return F.rms_norm(x, (x.shape[-1],), gain, self.config.norm_eps)
        return F.layer_norm(x, (x.shape[-1],), gain, bias, self.config.norm_eps)

    def _final_norm(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weights["norm.weight"], self.weights.get("norm.bias"))

    def _qkv(self, block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, hd], keys and values [..., KV, hd], rotated to their positions."""
        c = self.config
        fused = linear(self._norm(x, block.norm1, block.norm1_bias), block.qkv, block.qkv_bias)
        heads = fused.view(*x.shape[:-1], c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        turned, v = heads[..., : -c.n_kv_heads, :], heads[..., -c.n_kv_heads :, :]
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

    def teach(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Dense causal pass with gradients: ids [B, T] -> logits [B, T, V]. Dropout falls on what joins the stream."""
        x = F.embedding(ids, self.weights["embed"])
        if self.config.positions == "learned":
            x = x + self.weights["positions"][: ids.shape[1]]
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.dropout(x, dropout) if dropout else x
        for block in self.blocks:
            h = linear(attend_causal(*self._qkv(block, x, cos, sin)), block.out, block.out_bias)
            x = x + (F.dropout(h, dropout) if dropout else h)
            h = self._mlp(block, x)
            x = x + (F.dropout(h, dropout) if dropout else h)
        return linear(self._final_norm(x), self.head)

    # ------------------------------------------------------------------ inference

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> list[Scores]:
        """Run every feed's rows through the layers its plan names. The only place that computes; writes the ledger.

        Rows of all feeds stand in one matrix, so each weight is read once for all of them; only attention is per feed.
        A row that enters late (`starts` > 0) waits with its state unchanged until its sublayer comes.
        """
        sizes = [len(feed.tokens) for feed in feeds]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        x = torch.cat([self._enter(feed) for feed in feeds]) if len(feeds) > 1 else self._enter(feeds[0])  # [n, d]
        cos, sin = self.cos, self.sin
        if self.config.positions == "rope":
            where = [p for feed in feeds for p in feed.positions]
            span = slice(where[0], where[0] + 1) if len(where) == 1 else torch.tensor(where, device=self.device)
            cos, sin = cos[span], sin[span]
        taps: list[dict[int, Tensor]] = [{} for _ in feeds]
        works = [0] * len(feeds)  # (row, sublayer) evaluations
        events = {0}.union(*(feed.events() for feed in feeds))  # between these, the same rows are computed
        counts, chosen, active, places = sizes, None, list[Sequence[int]](), list[slice | Tensor]()
        for sublayer in range(2 * self.config.n_layers + 1):
            if sublayer in events:
                for feed, seen, start, size in zip(feeds, taps, offsets, sizes, strict=True):
                    if sublayer in feed.snapshot:
                        feed.kept[sublayer] = x[start : start + size]
                    if sublayer % 2 == 0 and sublayer // 2 in feed.taps:
                        seen[sublayer // 2] = x[start : start + size]
                active = [feed.active(sublayer) for feed in feeds]  # rows of each feed that are computed from here
                places = [feed.places(rows) if rows else slice(0) for feed, rows in zip(feeds, active, strict=True)]
                counts, chosen = [len(rows) for rows in active], None
                if counts != sizes:
                    flat = [start + row for start, rows in zip(offsets, active, strict=True) for row in rows]
                    chosen = torch.tensor(flat, device=self.device)
            if not any(counts):
                continue
            works = [work + count for work, count in zip(works, counts, strict=True)]
            h = x if chosen is None else x[chosen]
            block = self.blocks[sublayer // 2]
            if sublayer % 2:
                h = h + self._mlp(block, h)
            else:
                turn = (cos, sin) if chosen is None or not cos.shape[0] else (cos[chosen], sin[chosen])
                mixed = linear(
                    self._mix(block, sublayer // 2, feeds, active, places, h, turn), block.out, block.out_bias
                )
                copied = [feed.copying for feed, rows in zip(feeds, active, strict=True) for _ in rows]
                if any(copied):  # these rows only leave keys and values behind
                    mixed = mixed.masked_fill(torch.tensor(copied, device=self.device)[:, None], 0)
                h = h + mixed
            x = h if chosen is None else x.index_copy(0, chosen, h)
        return [
            self._leave(feed, x[start : start + size], seen, work)
            for feed, seen, start, size, work in zip(feeds, taps, offsets, sizes, works, strict=True)
        ]

    def _enter(self, feed: Feed) -> Tensor:
        """The state each row starts from, [n, d]: its embedding, or what it had when it was left."""
        ids = (
            feed.tokens if feed.given is None else [0 if g else t for t, g in zip(feed.tokens, feed.given, strict=True)]
        )
        x = F.embedding(torch.tensor(ids, device=self.device), self.weights["embed"])
        if feed.given is not None and feed.entering is not None:
            x[torch.tensor(feed.given, device=self.device)] = feed.entering.to(x.dtype)
        if self.config.positions == "learned":
            fresh = torch.tensor([s == 0 for s in feed.starts], device=self.device)[:, None]
            x = x + fresh * self.weights["positions"][torch.tensor(feed.positions, device=self.device)]
        return x

    def _mix(
        self,
        block: Block,
        layer: int,
        feeds: Sequence[Feed],
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
            keys, values = feed.cache.keys[layer][:, : feed.high], feed.cache.values[layer][:, : feed.high]
            mask = feed.looks(layer, rows, self.config.n_heads // self.config.n_kv_heads)
            if feed.prefix is not None:  # only probes look at it; it stands before everything
                keys = torch.cat((feed.prefix[0][layer].to(keys.dtype), keys), dim=1)
                values = torch.cat((feed.prefix[1][layer].to(values.dtype), values), dim=1)
            outs.append(attend(q[mine], keys, values, mask))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _leave(self, feed: Feed, x: Tensor, seen: dict[int, Tensor], work: int) -> Scores:
        """Head, taps and the ledger entry of one feed."""
        final = None
        if feed.heads or self.config.n_layers in feed.taps:
            final = self._final_norm(x)
        if self.config.n_layers in feed.taps and final is not None:
            seen[self.config.n_layers] = final
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        if feed.heads and final is not None:
            rows = final if len(feed.heads) == x.shape[0] else final[torch.tensor(feed.heads, device=self.device)]
            logits = linear(rows, self.head).to(wide)
        else:
            logits = x.new_empty((0, self.config.vocab_size), dtype=wide)
        hidden = torch.stack([seen[t] for t in feed.taps]) if feed.taps else x.new_empty((0, len(x), x.shape[1]))
        if feed.ledger is not None:
            fills = work if feed.copying else 0
            ran = 0.0 if feed.copying else work / 2
            feed.ledger.append(Call(self.name, len(x), ran, len(feed.heads), fills, feed.prefill))
        return Scores(logits, hidden, [feed.stop // 2] * len(x))


def _gelu_new(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
