"""The decoder of an encoder-decoder that has read one source, as an ordinary model.

Its session is an ordinary session: trees, views, rewinds and the forward log are the common ones,
and so every technique that extends a text runs on it. What differs is one thing: after
self-attention a row also looks at the source.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.engine import Engine, packable
from tinyspec.lm.feed import ForwardBatch
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.lm.transformer import Model


class CrossAttentionBlocks(Blocks):
    """Decoder blocks that also look at a source: cross-attention is part of a layer's attention
    sublayer.
    """

    def __init__(self, host: Seq2Seq, memory: EncoderOutput):
        super().__init__(host.decoder.config, host.decoder.weights)
        self.host, self.memory = host, memory
        assert memory.heard is not None
        self.heard = memory.heard

    def enter(self, feed: ForwardBatch) -> Tensor:
        """The state each row starts from, [n, d]: embeddings are scaled by sqrt(d) here."""
        x = (
            self.embed[torch.tensor(_looked_up(feed), device=self.device)]
            * self.config.d_model**0.5
        )
        if feed.given is not None and feed.entering is not None:
            x[torch.tensor(feed.given, device=self.device)] = feed.entering.to(x.dtype)
        fresh = torch.tensor([s == 0 for s in feed.starts], device=self.device)[:, None]
        places = self.weights["positions"][torch.tensor(feed.positions, device=self.device)]
        return torch.addcmul(x, fresh.to(x.dtype), places)

    def span(
        self,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Sublayers first..last-1 over the active rows x [n, d] of all feeds: their new states."""
        copied = [feed.copying for feed, rows in zip(feeds, active, strict=True) for _ in rows]
        for sublayer in range(first, last):
            x = super().span(feeds, active, x, sublayer, sublayer + 1)
            if sublayer % 2 == 0:
                heard = self.host.cross(sublayer // 2, x[None], self.heard[sublayer // 2], None)[0]
                if any(copied):  # these rows only leave keys and values behind
                    heard = heard.masked_fill(torch.tensor(copied, device=self.device)[:, None], 0)
                x = x + heard
        return x

    def states(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """What the head reads in a dense causal pass: [B, T, d]."""
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        return self.host.decode(self.host.embed(ids), self.memory, causal, dropout)


def _looked_up(feed: ForwardBatch) -> list[int]:
    """The tokens whose embeddings are wanted; rows that bring a state of their own take any."""
    return (
        feed.tokens
        if feed.given is None
        else [0 if g else t for t, g in zip(feed.tokens, feed.given, strict=True)]
    )


class CompiledCrossAttention(Engine):
    """The same on the compiled path: a row of a pass gets the same bits whatever is computed beside
    it.

    To the kernels, cross-attention is the attention sublayer of a second stack, whose cache holds
    the source: rows see its slots alone, and leave their own keys and values, which nobody wants,
    in one slot behind them.
    """

    def __init__(self, host: Seq2Seq):
        super().__init__(host.decoder.config, dict(host.decoder.weights))
        self.cross = Engine(
            replace(self.config, vocab_size=2, d_ff=2, max_positions=1), _crossing(host)
        )
        self.source = torch.empty(0)

    def listening(self, memory: EncoderOutput) -> "CompiledCrossAttention":
        """The same weights, and this source."""
        assert memory.heard is not None
        pairs = [torch.cat((k, v)).transpose(1, 2) for k, v in memory.heard]  # each [2, H, S, hd]
        twin = copy(self)
        twin.source = F.pad(torch.stack(pairs), (0, 0, 0, 1)).contiguous()  # [L, 2, H, S + 1, hd]
        return twin

    def enter(self, feed: ForwardBatch) -> Tensor:
        """The state each row starts from, [n, d]: embeddings are scaled by sqrt(d) here."""
        assert self._positions is not None
        x = torch.empty(len(feed.tokens), self.config.d_model)
        self._lookup.rows(_looked_up(feed), x.numpy())
        x *= self.config.d_model**0.5
        if feed.given is not None and feed.entering is not None:
            x[torch.tensor(feed.given)] = feed.entering.float()
        fresh = torch.tensor([start == 0 for start in feed.starts])[:, None]
        return x + fresh * self._positions[torch.tensor(feed.positions)].float()

    def _run(
        self,
        x: Tensor,
        group: list[tuple[ForwardBatch, Sequence[int]]],
        first: int,
        last: int,
        copying: bool,
    ) -> None:
        n, slots = len(x), self.source.shape[3] - 1
        sight = 1, [(slots, ())] * n
        sources = [(self.source.data_ptr(), slots + 1, [slots] * n, [0] * n, sight, None)]
        marks = [
            first,
            *(mark for mark in range(first // 2 * 2 + 1, last, 2) if mark > first),
            last,
        ]
        for begin, end in pairwise(
            marks
        ):  # each ends behind an attention sublayer, or where the pass does
            super()._run(x, group, begin, end, copying)
            if end % 2 and not copying:  # rows that are copied up only leave keys and values behind
                self.cross._compiled.run(x.numpy(), end - 1, end, sources, torch.get_num_threads())


def _crossing(host: Seq2Seq) -> dict[str, Tensor]:
    """The weights of the second stack, whose MLPs and head are never run."""
    d, weights = (
        host.config.d_model,
        {
            "embed": torch.zeros(2, host.config.d_model),
            "norm.weight": torch.ones(host.config.d_model),
        },
    )
    weights |= {"positions": torch.zeros(1, d), "norm.bias": torch.zeros(d)}
    for i in range(host.config.decoder_layers):
        own = {
            part: host.weights[f"decoder.{i}.cross.{part}"]
            for part in ("norm.weight", "norm.bias", "q.weight", "kv.weight", "out.weight")
        }
        weights |= {f"{i}.norm1.{kind}": own[f"norm.{kind}"] for kind in ("weight", "bias")}
        weights[f"{i}.qkv.weight"] = torch.cat((own["q.weight"], own["kv.weight"]))
        weights |= {
            f"{i}.out.weight": own["out.weight"],
            f"{i}.norm2.weight": torch.ones(d),
            f"{i}.norm2.bias": torch.zeros(d),
        }
        weights |= {f"{i}.up.weight": torch.zeros(2, d), f"{i}.down.weight": torch.zeros(d, 2)}
    return weights


class Given(Model):
    """A model whose texts, each beginning with bos, are translations of one source."""

    def __init__(self, host: Seq2Seq, source: Sequence[int]):
        if host.config.positional:
            raise TinyspecError(
                f"{host.name} attends by position over a whole target, so it cannot write from left to right: "
                "use a method made for it, or an autoregressive model"
            )
        if not source:
            raise TinyspecError("the source is empty: give at least one token")
        self.source = list(source)
        self.pad = host.config.pad  # what stands where nothing is known yet
        with torch.inference_mode():
            memory = host.encode(torch.tensor([self.source], device=host.device))
        self._listening = CrossAttentionBlocks(host, memory)
        super().__init__(
            self._listening.config, self._listening.weights, host._tokenizer, host.name
        )
        packed = _packed(host)
        self._path = self._listening if packed is None else packed.listening(memory)

    def pack(self) -> "Given":
        """It was packed with the model that it is of, or cannot be."""
        return self

    def dense(self) -> Blocks:
        """The blocks in torch, which hear the source too."""
        return self._listening

    def save(self, folder: str | Path) -> None:
        raise TinyspecError(
            f"{self.name} that has read a source cannot be saved: save the encoder-decoder"
        )


def _packed(host: Seq2Seq) -> CompiledCrossAttention | None:
    """The compiled path of these weights, made once and made anew when they were written to; None:
    there is none for them.
    """
    if host.dtype != torch.float32 or not packable(host.decoder.config, host.weights):
        return None
    if any(
        w.is_inference() for w in host.weights.values()
    ):  # nobody counts how often they were written to
        return None
    state = tuple(w._version for w in host.weights.values())
    if host.compiled.get("state") != state:
        host.compiled.update(state=state, path=CompiledCrossAttention(host))
    path = host.compiled["path"]
    assert isinstance(path, CompiledCrossAttention)
    return path
