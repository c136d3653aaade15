"""One decoder-only transformer. GPT-2, LLaMA, Mistral and Qwen are configurations of it.

`Transformer.forward` is the only place that computes at inference. Every session passes a
`ForwardBatch`: its tokens, their positions, and the cache slots that they attend to. A batch of
requests is a list of them. The layers themselves are `blocks.py` in torch (any device, gradients)
and `engine.py` compiled (CPU, float32 and bfloat16); both give the same results up to rounding.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.engine import Engine, NextTokenFn, can_pack, can_pack_quantised
from tinyspec.lm.forward import Cache, ForwardBatch, ForwardRecord, Scores
from tinyspec.lm.quantised import QuantisedWeights
from tinyspec.lm.static import CudaGraphRunner

_NOTHING = torch.empty(0, 0, 0)


class Transformer:
    """A model's weights and its forward pass. `weights` has the names of `Config.shapes()`.

    extras     tensors that were trained on the frozen model, and are stored beside its weights
    n_weights  how many weights its config has
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
        self._path: Blocks | Engine
        if isinstance(weights, QuantisedWeights) and can_pack_quantised(config):
            self._path = Engine(config, weights.plain, weights.matrices)
        else:
            self._path = Blocks(config, dict(weights))
        self.dtype, self.device = self._path.dtype, self._path.device
        self._static: CudaGraphRunner | None = None  # steps of fixed shape, on a CUDA device
        self._packing = threading.Lock()
        self.n_weights = config.parameters()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name; the compiled path unpacks each one when it is read."""
        with self._packing:
            return self._path.weights

    @property
    def quantised_bytes(self) -> Mapping[str, int]:
        """Bytes of each matrix that is multiplied as a .gguf file has it, by its name."""
        return self._path.quantised_bytes if isinstance(self._path, Engine) else {}

    @property
    def state_dtype(self) -> torch.dtype:
        """The type of the states between layers, and so of hidden states."""
        return self.dtype if self.engine is None else torch.float32

    @property
    def engine(self) -> Engine | None:
        """The compiled path, or None if these weights have none."""
        path = self.pack_weights()._path
        return path if isinstance(path, Engine) else None

    def pack_weights(self) -> Self:
        """Pack the weights for the compiled path, if these weights have one.

        The first forward pass does this, or `load` before it. Threads of a batch may come here
        together: the first one packs and the others wait. If packing fails, the error is raised
        and the model keeps its weights unpacked.
        """
        if isinstance(self._path, Engine):
            return self
        with self._packing:
            path = self._path
            if isinstance(path, Blocks) and can_pack(self.config, path.weights):
                # The engine empties `weights` as it packs: two copies may not fit into memory.
                path.release_weights()
                try:
                    self._path = Engine(self.config, path.weights)
                except BaseException:  # the engine has put every weight back
                    path.bind_weights()
                    raise
            elif isinstance(path, Blocks) and path.device.type == "cuda" and self._static is None:
                self._static = CudaGraphRunner(path)
        return self

    def __repr__(self) -> str:
        c = self.config
        kind = f"{type(self).__name__}({self.name!r}, {c.family}"
        size = f"{c.n_layers} layers of {c.d_model}, vocabulary {c.vocab_size}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{kind}, {size}, {c.parameters() / 1e6:.1f}M weights, {dtype} on {self.device})"

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def training_logits(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Run a dense causal pass with gradients: ids [B, T] -> logits [B, T, V].

        Dropout is applied to what is added to the residual stream.
        """
        return self.torch_blocks().training_logits(ids, dropout)

    def torch_blocks(self) -> Blocks:
        """Return the layers in torch, whichever path inference takes."""
        if isinstance(self._path, Blocks):
            return self._path
        return Blocks(self.config, dict(self.weights))

    # ------------------------------------------------------------------ inference

    def forward(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        """Run the rows of every ForwardBatch through the layers of its plan, and write the log.

        The rows of all batches form one matrix, so each weight is read once for all of them; only
        attention is done batch by batch. A row that was partly computed before (`starts` > 0) keeps
        its state until its sublayer comes.
        """
        if isinstance(self.pack_weights()._path, Engine):
            return self._forward(feeds)
        with torch.inference_mode():
            return self._forward(feeds)

    def run_chain(
        self,
        cache: Cache,
        token: int,
        slot: int,
        most: int,
        choose: NextTokenFn,
        forward_log: list[ForwardRecord],
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Run one position after another, as a draft model does: see `Engine.run_chain`."""
        assert self.engine is not None
        ran = self.engine.run_chain(cache, token, slot, most, choose)
        forward_log += [ForwardRecord(self.name, 1, float(self.config.n_layers), 1)] * len(ran)
        return ran

    def _forward(self, feeds: Sequence[ForwardBatch]) -> list[Scores]:
        path = self._path
        if len(feeds) == 1 and feeds[0].is_full_pass(self.config.n_layers):
            quick = self._static if self._static is not None else path
            if (done := quick.run_full_pass(feeds[0])) is not None:
                return [self._score_full_pass(feeds[0], *done)]
        n_layers, sizes = self.config.n_layers, [len(feed.tokens) for feed in feeds]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        entered = [path.initial_states(feed) for feed in feeds]
        x = torch.cat(entered) if len(feeds) > 1 else entered[0]  # [n, d]
        hidden: list[dict[int, Tensor]] = [{} for _ in feeds]  # layer -> states, of each feed
        work = [0] * len(feeds)  # (row, sublayer) evaluations of each feed
        # Between two boundaries, the same rows are computed in every sublayer.
        boundaries = sorted(
            {0, 2 * n_layers}.union(*(feed.sublayer_boundaries() for feed in feeds))
        )
        for first, last in zip(boundaries, [*boundaries[1:], boundaries[-1]], strict=True):
            for feed, states, start, size in zip(feeds, hidden, offsets, sizes, strict=True):
                if first in feed.saved_sublayers:
                    feed.saved_states[first] = x[start : start + size]
                if first % 2 == 0 and first // 2 in feed.hidden_layers:
                    states[first // 2] = x[start : start + size]
            active = [feed.active_rows(first) for feed in feeds]
            counts = [len(rows) for rows in active]
            if not any(counts) or first == last:
                continue
            work = [done + n * (last - first) for done, n in zip(work, counts, strict=True)]
            chosen = None
            if counts != sizes:
                flat = [
                    start + row for start, rows in zip(offsets, active, strict=True) for row in rows
                ]
                chosen = torch.tensor(flat, device=self.device)
            h = x if chosen is None else x[chosen]
            h = path.run_sublayers(feeds, active, h, first, last)
            x = h if chosen is None else x.index_copy(0, chosen, h)
        return self._finish_pass(feeds, x, hidden, work)

    def _score_full_pass(
        self, feed: ForwardBatch, x: Tensor, hidden: Tensor, logits: Tensor
    ) -> Scores:
        """Return the scores of a full pass of one session, and write the forward log."""
        for at in feed.saved_sublayers:
            feed.saved_states[at] = x
        n = len(feed.tokens)
        if feed.forward_log is not None:
            ran = float(n * self.config.n_layers)
            feed.forward_log.append(
                ForwardRecord(self.name, n, ran, len(feed.heads), 0, feed.prefill, feed.shared)
            )
        return Scores(logits, hidden, [feed.stop // 2] * n)

    def _finish_pass(
        self,
        feeds: Sequence[ForwardBatch],
        x: Tensor,
        hidden: list[dict[int, Tensor]],
        work: list[int],
    ) -> list[Scores]:
        """Compute the logits of all feeds in one product, and write the forward log."""
        top, offset, wanted = self.config.n_layers, 0, list[int]()
        for feed, states in zip(feeds, hidden, strict=True):
            if top in feed.hidden_layers:
                own = x[offset : offset + len(feed.tokens)]
                states[top] = self._path.apply_final_norm(own)
            wanted += [offset + row for row in feed.heads]
            offset += len(feed.tokens)
        if len(wanted) < offset:
            x = x[torch.tensor(wanted, dtype=torch.long, device=self.device)]
        logits = self._path.compute_logits(x)
        scores, at = list[Scores](), 0
        for feed, states, done in zip(feeds, hidden, work, strict=True):
            layers = [states[layer] for layer in feed.hidden_layers]
            shown = torch.stack(layers) if layers else _NOTHING
            n, n_heads = len(feed.tokens), len(feed.heads)
            if feed.forward_log is not None:
                fills, ran = (done, 0.0) if feed.copying else (0, done / 2)
                feed.forward_log.append(
                    ForwardRecord(self.name, n, ran, n_heads, fills, feed.prefill, feed.shared)
                )
            own = logits if len(feeds) == 1 else logits[at : at + n_heads]
            scores.append(Scores(own, shown, [feed.stop // 2] * n))
            at += n_heads
        return scores
