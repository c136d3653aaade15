"""The decoder of an encoder-decoder that has read one source, as an ordinary model.

Its session is an ordinary session: trees, views, rewinds and the ledger are the common ones, and so every technique that
extends a text runs on it. What differs is one thing: after self-attention a row also looks at the source.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.feed import Feed
from tinyspec.lm.seq2seq import Memory, Seq2Seq
from tinyspec.lm.transformer import Model


class Listening(Blocks):
    """Decoder blocks that also look at a source: cross-attention is part of a layer's attention sublayer."""

    def __init__(self, host: Seq2Seq, memory: Memory):
        super().__init__(host.decoder.config, host.decoder.weights)
        self.host, self.memory = host, memory
        assert memory.heard is not None
        self.heard = memory.heard

    def enter(self, feed: Feed) -> Tensor:
        """The state each row starts from, [n, d]: embeddings are scaled by sqrt(d) here."""
        rows, given = feed.tokens, feed.given or [False] * len(feed.tokens)
        tokens = [0 if g else token for token, g in zip(rows, given, strict=True)]
        x = self.embed[torch.tensor(tokens, device=self.device)] * self.config.d_model**0.5
        if feed.given is not None and feed.entering is not None:
            x[torch.tensor(given, device=self.device)] = feed.entering.to(x.dtype)
        fresh = torch.tensor([s == 0 for s in feed.starts], device=self.device)[:, None]
        places = self.weights["positions"][torch.tensor(feed.positions, device=self.device)]
        return torch.addcmul(x, fresh.to(x.dtype), places)

    def span(self, feeds: Sequence[Feed], active: list[Sequence[int]], x: Tensor, first: int, last: int) -> Tensor:
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
        with torch.inference_mode():
            memory = host.encode(torch.tensor([self.source], device=host.device))
        path = Listening(host, memory)
        super().__init__(path.config, path.weights, host._tokenizer, host.name)
        self._path = path

    def pack(self) -> "Given":
        """It runs in torch."""
        return self

    def save(self, folder: str | Path) -> None:
        raise TinyspecError(f"{self.name} that has read a source cannot be saved: save the encoder-decoder")
