"""One decoder-only transformer, of which GPT-2, LLaMA and their like are configurations.

Pre-norm residual blocks: x += attention(norm(x)); x += mlp(norm(x)). What differs between the
families is a setting each: LayerNorm or RMSNorm, learned positions or rotations, one key per query
head or per group, a plain or a gated MLP, biases.

`Transformer.forward(feeds)` is the only place that computes at inference. It is ragged: every session
passes its own rows, and a batch is nothing but several feeds. `Transformer.training_logits(ids)` is the
same blocks over dense text with gradients.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.engine import Engine, NextTokenFn, packable
from tinyspec.lm.forward import Cache, ForwardBatch, ForwardRecord, Scores
from tinyspec.lm.static import Static

_NOTHING = torch.empty(0, 0, 0)


class Transformer:
    """Weights that compute. `weights` is flat, with the names of `Config.shapes()`.

    extras  what was trained on the frozen model and is stored beside its weights
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Tensor],
        name: str = "model",
        extras: Mapping[str, Tensor] | None = None,
    ):
        self.config, self.name = config, name
        self.extras = dict(extras or {})
        self._path: Blocks | Engine = Blocks(config, dict(weights))
        self.dtype, self.device = self._path.embed.dtype, self._path.embed.device
        self._static: Static | None = None  # steps of fixed shape, on a CUDA device
        self._packing = threading.Lock()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights by name; the compiled path unpacks each one when it is asked for."""
        with self._packing:
            return self._path.weights

    @property
    def stream(self) -> torch.dtype:
        """The type of the states between layers: what a tap shows."""
        return self.dtype if self.engine is None else torch.float32

    @property
    def engine(self) -> Engine | None:
        """The compiled path, where these weights have one."""
        path = self.pack()._path
        return path if isinstance(path, Engine) else None

    def pack(self) -> Self:
        """Pack the weights for the compiled path, where these weights have one.

        The first forward pass does this, or `load` before it. Threads of a batch may come here
        together: the first one packs and the others wait. If packing fails, the error is raised
        and the model keeps its weights unpacked.
        """
        if isinstance(self._path, Engine):
            return self
        with self._packing:
            path = self._path
            if isinstance(path, Blocks) and packable(self.config, path.weights):
                path.release()  # the engine empties `weights` as it packs: two copies may not fit
                try:
                    self._path = Engine(self.config, path.weights)
                except BaseException:  # the engine has put every weight back
                    path.bind()
                    raise
            elif isinstance(path, Blocks) and path.device.type == "cuda" and self._static is None:
                self._static = Static(path)
        return self

    def __repr__(self) -> str:
        c = self.config
        return (
            f"{type(self).__name__}({self.name!r}, {c.family}, {c.n_layers} layers of {c.d_model}, vocabulary {c.vocab_size}, "
            f"{c.parameters() / 1e6:.1f}M weights, {str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def training_logits(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Dense causal pass with gradients: ids [B, T] -> logits [B, T, V]. Dropout falls on what
        joins the stream.
        """
        return self.dense().training_logits(ids, dropout)

    def dense(self) -> Blocks:
        """The blocks in torch, whichever path inference takes: dense text with gradients, any
        exit.
        """
        return (
            self._path
            if isinstance(self._path, Blocks)
            else Blocks(self.config, dict(self.weights))
        )

    # ------------------------------------------------------------------ inference

    def forward(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        """Run every feed's rows through the layers its plan names. The only place that computes;
        writes the forward log.

        Rows of all feeds stand in one matrix, so each weight is read once for all of them; only
        attention is per feed. A row that enters late (`starts` > 0) waits with its state unchanged
        until its sublayer comes.
        """
        if isinstance(self.pack()._path, Engine):
            return self._forward(feeds)
        with torch.inference_mode():
            return self._forward(feeds)

    def chain(
        self,
        cache: Cache,
        token: int,
        slot: int,
        most: int,
        choose: NextTokenFn,
        forward_log: list[ForwardRecord],
    ) -> list[tuple[int, Tensor, Tensor]]:
        """`forward` of one row after the other, each of which chooses the next, as a draft model
        does: see `Engine.chain`.
        """
        assert self.engine is not None
        ran = self.engine.chain(cache, token, slot, most, choose)
        forward_log += [ForwardRecord(self.name, 1, float(self.config.n_layers), 1)] * len(ran)
        return ran

    def _forward(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        path = self._path
        if len(feeds) == 1 and feeds[0].is_full_pass(self.config.n_layers):
            quick = self._static if self._static is not None else path
            if (done := quick.run(feeds[0])) is not None:
                return [self._whole(feeds[0], *done)]
        n_layers, sizes = self.config.n_layers, [len(feed.tokens) for feed in feeds]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        entered = [path.enter(feed) for feed in feeds]
        x = torch.cat(entered) if len(feeds) > 1 else entered[0]  # [n, d]
        hidden_layers: list[dict[int, Tensor]] = [{} for _ in feeds]
        works = [0] * len(feeds)  # (row, sublayer) evaluations
        marks = sorted(
            {0, 2 * n_layers}.union(*(feed.sublayer_boundaries() for feed in feeds))
        )  # between these, the rows stay the same
        for first, last in zip(marks, [*marks[1:], marks[-1]], strict=True):
            for feed, seen, start, size in zip(feeds, hidden_layers, offsets, sizes, strict=True):
                if first in feed.snapshot:
                    feed.kept[first] = x[start : start + size]
                if first % 2 == 0 and first // 2 in feed.hidden_layers:
                    seen[first // 2] = x[start : start + size]
            active = [feed.active_rows(first) for feed in feeds]
            counts = [len(rows) for rows in active]
            if not any(counts) or first == last:
                continue
            works = [
                work + count * (last - first) for work, count in zip(works, counts, strict=True)
            ]
            chosen = None
            if counts != sizes:
                flat = [
                    start + row for start, rows in zip(offsets, active, strict=True) for row in rows
                ]
                chosen = torch.tensor(flat, device=self.device)
            h = x if chosen is None else x[chosen]
            h = path.span(feeds, active, h, first, last)
            x = h if chosen is None else x.index_copy(0, chosen, h)
        return self._leave(feeds, x, hidden_layers, works)

    def _whole(self, feed: ForwardBatch, x: Tensor, hidden: Tensor, logits: Tensor) -> Scores:
        """A pass of one session's rows from their embeddings through all layers: what `_forward`
        says of it.
        """
        for at in feed.snapshot:
            feed.kept[at] = x
        n = len(feed.tokens)
        if feed.forward_log is not None:
            ran = float(n * self.config.n_layers)
            feed.forward_log.append(
                ForwardRecord(self.name, n, ran, len(feed.heads), 0, feed.prefill)
            )
        return Scores(logits, hidden, [feed.stop // 2] * n)

    def _leave(
        self,
        feeds: Sequence[ForwardBatch],
        x: Tensor,
        hidden_layers: list[dict[int, Tensor]],
        works: list[int],
    ) -> list[Scores]:
        """Head, hidden layers and entries of the forward log: one product with the vocabulary
        matrix for all feeds.
        """
        offset, wanted = 0, list[int]()
        for feed, seen in zip(feeds, hidden_layers, strict=True):
            if self.config.n_layers in feed.hidden_layers:
                seen[self.config.n_layers] = self._path.final(x[offset : offset + len(feed.tokens)])
            wanted += [offset + row for row in feed.heads]
            offset += len(feed.tokens)
        rows = (
            x
            if len(wanted) == offset
            else x[torch.tensor(wanted, dtype=torch.long, device=self.device)]
        )
        logits = self._path.head(rows)
        scores, at = list[Scores](), 0
        for feed, seen, work in zip(feeds, hidden_layers, works, strict=True):
            hidden = (
                torch.stack([seen[t] for t in feed.hidden_layers])
                if feed.hidden_layers
                else _NOTHING
            )
            if feed.forward_log is not None:
                fills, ran = (work, 0.0) if feed.copying else (0, work / 2)
                feed.forward_log.append(
                    ForwardRecord(
                        self.name, len(feed.tokens), ran, len(feed.heads), fills, feed.prefill
                    )
                )
            own = logits if len(feeds) == 1 else logits[at : at + len(feed.heads)]
            scores.append(Scores(own, hidden, [feed.stop // 2] * len(feed.tokens)))
            at += len(feed.heads)
        return scores
