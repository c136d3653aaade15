"""One small encoder-decoder, from the blocks of `blocks.py`: what every technique of chapter 3 runs
on.

Vaswani et al. 2017, arXiv 1706.03762, with the norm before each block, sinusoidal positions, and
one matrix for the embeddings of both languages and the head. The decoder takes any inputs and any
mask and decides neither: a technique is a choice of decoder input, self-attention mask, loss and
loop.

Keys and values of the source are made once, by `encode`; candidates and iterations share them.
`given(source)` is the decoder as an ordinary model whose texts are translations of that source: the
autoregressive teacher, in the common loop.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.engine import Engine, packable
from tinyspec.lm.forward import ForwardBatch, ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.ops import attend_dense, linear
from tinyspec.lm.tokenizer import Tokenizer

__all__ = ["EncoderOutput", "Seq2Seq", "Seq2SeqConfig", "attend_dense", "sinusoids"]


class EncoderOutput(NamedTuple):
    """What the decoder knows of B sources: made once a sentence, shared by all candidates and
    iterations.

    states [B, S, d], mask [B, S] (True: a token), summary [B, d]: the state of the LENGTH token,
    where there is one
    heard  keys and values [B, S, H, hd] of every decoder layer's cross-attention; None: made when
           they are needed
    """

    states: Tensor
    mask: Tensor
    summary: Tensor | None = None
    heard: tuple[tuple[Tensor, Tensor], ...] | None = None

    def rows(self, which: Sequence[int] | Tensor) -> "EncoderOutput":
        """The memory of chosen sources, in that order; one may be chosen several times."""
        chosen = torch.as_tensor(which, device=self.states.device)
        summary = None if self.summary is None else self.summary[chosen]
        heard = None if self.heard is None else tuple((k[chosen], v[chosen]) for k, v in self.heard)
        return EncoderOutput(self.states[chosen], self.mask[chosen], summary, heard)


class Seq2Seq:
    """Weights that translate. `weights` is flat, with the names of `Seq2SeqConfig.shapes()`.

    forward_log  where every pass of the encoder (as `name` + "/encoder") and of the decoder is
                 entered; None: nowhere
    """

    def __init__(
        self,
        config: Seq2SeqConfig,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer | None = None,
        name: str = "translator",
        forward_log: list[ForwardRecord] | None = None,
    ):
        self.config, self.weights, self._tokenizer, self.name, self.forward_log = (
            config,
            dict(weights),
            tokenizer,
            name,
            forward_log,
        )
        self.embedding = self.weights["embed"]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.positions = sinusoids(config.max_positions, config.d_model).to(self.device, self.dtype)
        self.compiled: dict[str, Any] = {}  # what given.py packed of the weights; shared with twins
        self.encoder = self._blocks("encoder", config.encoder_layers)
        self.decoder = self._blocks("decoder", config.decoder_layers)

    def _blocks(self, part: str, layers: int) -> Blocks:
        own = {
            name.removeprefix(f"{part}."): w
            for name, w in self.weights.items()
            if name.startswith(f"{part}.")
        }
        return Blocks(
            self.config.stack(layers), {"embed": self.embedding, "positions": self.positions, **own}
        )

    @classmethod
    def create(
        cls,
        config: Seq2SeqConfig,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        tokenizer: Tokenizer | None = None,
    ) -> "Seq2Seq":
        """Fresh weights: embeddings N(0, 1/d), matrices Xavier-normal, what joins the stream scaled
        by 1/sqrt(sublayers).
        """
        weights: dict[str, Tensor] = {}
        for name, shape in config.shapes().items():
            if len(shape) == 1:
                weights[name] = (
                    torch.ones if "norm" in name and name.endswith("weight") else torch.zeros
                )(shape, dtype=dtype)
                continue
            std = math.sqrt(2 / (shape[0] + shape[1]))
            if name in ("embed", "lengths"):
                std = config.d_model**-0.5
            elif name.endswith(("out.weight", "down.weight")):
                std /= math.sqrt(
                    3 * config.decoder_layers
                    if name.startswith("decoder")
                    else 2 * config.encoder_layers
                )
            weights[name] = (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(
                dtype
            )
        return cls(config, weights, tokenizer)

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype | None = torch.float32) -> "Seq2Seq":
        """Read a checkpoint folder; `dtype` None keeps the stored one."""
        from tinyspec.lm import seq2seq_file

        return cls(*seq2seq_file.read(folder, dtype))

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json, model.safetensors in `dtype` and tokenizer.json, which `load`
        reads.
        """
        from tinyspec.lm import seq2seq_file

        stored = {
            name: w.detach().to("cpu", dtype).contiguous() for name, w in self.weights.items()
        }
        seq2seq_file.write(folder, self.config, stored, self._tokenizer)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Seq2Seq({self.name!r}, {c.encoder_layers} + {c.decoder_layers} layers of {c.d_model}, vocabulary "
            f"{c.vocab_size}, {c.parameters() / 1e6:.1f}M weights, {str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TinyspecError(
                f"{self.name} has no tokenizer.json: pass token ids, or put the file into its folder"
            )
        return self._tokenizer

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def counting(self, forward_log: list[ForwardRecord], name: str | None = None) -> "Seq2Seq":
        """The same weights, their passes entered in this forward log (under another name): one for
        each request.
        """
        twin = copy(self)
        twin.forward_log, twin.name = forward_log, name or self.name
        return twin

    # ------------------------------------------------------------------ the passes

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] at positions 0..T-1 -> [B, T, d]: embeddings times sqrt(d), plus the
        sinusoids.
        """
        self.fits(tokens.shape[-1])
        x = F.embedding(tokens, self.embedding) * math.sqrt(self.config.d_model)
        return x + self.positions[: tokens.shape[-1]]

    def fits(self, length: int, what: str = "source") -> None:
        """Raise TinyspecError if so many tokens are more than the positions."""
        if length > self.config.max_positions:
            raise TinyspecError(
                f"the {what} has {length} tokens, {self.name} has {self.config.max_positions} positions: shorten it"
            )

    def encode(self, source: Tensor, dropout: float = 0.0) -> EncoderOutput:
        """source [B, S], padded at the end -> Memory. The LENGTH token stands before the source and
        has no position.
        """
        mask = source != self.config.pad  # [B, S]
        x, seen = self.embed(source), mask
        if self.config.lengths:
            x = torch.cat((self.weights["lengths"][:1].expand(len(x), 1, -1), x), dim=1)
            seen = F.pad(mask, (1, 0), value=True)
        x = _drop(x, dropout)
        for block in self.encoder.layers:
            q, k, v = self.encoder._qkv(block, x, self.encoder.cos, self.encoder.sin)
            x = x + _drop(
                linear(attend_dense(q, k, v, seen[:, None]), block.out, block.out_bias), dropout
            )
            x = x + _drop(self.encoder._mlp(block, x), dropout)
        x = self.encoder.final(x)
        self._enter("/encoder", x, self.config.encoder_layers)
        states, summary = (x[:, 1:], x[:, 0]) if self.config.lengths else (x, None)
        return self.hear(EncoderOutput(states, mask, summary))

    def hear(self, memory: EncoderOutput) -> EncoderOutput:
        """The memory with every decoder layer's cross-attention keys and values."""
        heard = []
        for i in range(self.config.decoder_layers):
            both = linear(memory.states, self.weights[f"decoder.{i}.cross.kv.weight"])
            k, v = both.chunk(2, dim=-1)
            heard.append((self._heads(k), self._heads(v)))
        return memory._replace(heard=tuple(heard))

    def decode(
        self,
        inputs: Tensor,
        memory: EncoderOutput,
        self_mask: Tensor | None = None,
        dropout: float = 0.0,
        slots: Tensor | None = None,
    ) -> Tensor:
        """One decoder pass: inputs [B, T, d] (with their positions, as `embed` gives) -> normed
        states [B, T, d].

        memory     of B sources, or of one that all rows share
        self_mask  [T, T] or [B, T, T], True where a row may look; None: everywhere. A row that may
                   look nowhere gets nothing.
        slots      [B, T], False at padding: nobody looks there; None: there is none
        """
        heard = memory.heard or self.hear(memory).heard
        assert heard is not None
        looks = None if self_mask is None else self_mask if self_mask.ndim == 3 else self_mask[None]
        if slots is not None:
            looks = slots[:, None] if looks is None else looks & slots[:, None]
        there = None if slots is None else slots[:, None]
        x = _drop(inputs, dropout)
        for i, block in enumerate(self.decoder.layers):
            q, k, v = self.decoder._qkv(block, x, self.decoder.cos, self.decoder.sin)
            x = x + _drop(linear(attend_dense(q, k, v, looks), block.out, block.out_bias), dropout)
            if self.config.positional:
                x = x + _drop(self._by_position(i, x, there), dropout)
            x = x + _drop(self.cross(i, x, heard[i], memory.mask[:, None]), dropout)
            x = x + _drop(self.decoder._mlp(block, x), dropout)
        self._enter("", x, self.config.decoder_layers)
        return self.decoder.final(x)

    def logits(self, states: Tensor) -> Tensor:
        """What `decode` returned, or some rows of it, [..., d] -> logits [..., V]. Its head rows
        belong to the last pass.
        """
        if self.forward_log:
            rows = states.shape[:-1].numel()
            self.forward_log[-1] = self.forward_log[-1]._replace(
                head_rows=self.forward_log[-1].head_rows + rows
            )
        return linear(states, self.embedding)

    def length_logits(self, memory: EncoderOutput) -> Tensor:
        """What the LENGTH token says of the target's length: [B, lengths], class 0 impossible."""
        if memory.summary is None:
            raise TinyspecError(
                f"{self.name} was made without a LENGTH token: it cannot tell a length"
            )
        logits = linear(memory.summary, self.weights["lengths"])
        return torch.cat((torch.full_like(logits[:, :1], -torch.inf), logits[:, 1:]), dim=-1)

    def fertility_logits(self, memory: EncoderOutput) -> Tensor:
        """How many target tokens each source token gives: [B, S, fertilities]."""
        if not self.config.fertilities:
            raise TinyspecError(
                f"{self.name} was made without a fertility head: it cannot tell fertilities"
            )
        return linear(
            memory.states, self.weights["fertility.weight"], self.weights["fertility.bias"]
        )

    def given(self, source: Sequence[int]) -> "Given":
        """The decoder as a model of its own, all of whose texts are translations of this source.
        Texts begin with bos.
        """
        return Given(self, source)

    # ------------------------------------------------------------------ inside

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.config.n_heads, -1)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        return self.decoder._norm(
            x, self.weights[f"{name}.norm.weight"], self.weights[f"{name}.norm.bias"]
        )

    def cross(
        self, layer: int, x: Tensor, heard: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """What rows x [B, T, d] take from the source, whose keys and values [B or 1, S, H, hd] were
        made before.
        """
        name = f"decoder.{layer}.cross"
        q = self._heads(linear(self._normed(name, x), self.weights[f"{name}.q.weight"]))
        return linear(attend_dense(q, *heard, mask), self.weights[f"{name}.out.weight"])

    def _by_position(self, layer: int, x: Tensor, mask: Tensor | None) -> Tensor:
        """NAT's positional attention: queries and keys from the positions alone, values from the
        states x [B, T, d].
        """
        name = f"decoder.{layer}.positional"
        q, k = linear(self.positions[: x.shape[1]], self.weights[f"{name}.qk.weight"]).chunk(
            2, dim=-1
        )
        v = self._heads(linear(self._normed(name, x), self.weights[f"{name}.v.weight"]))
        mixed = attend_dense(self._heads(q)[None].expand_as(v), self._heads(k)[None], v, mask)
        return linear(mixed, self.weights[f"{name}.out.weight"])

    def _enter(self, part: str, x: Tensor, layers: int) -> None:
        if self.forward_log is not None:
            rows = x.shape[:-1].numel()
            self.forward_log.append(
                ForwardRecord(
                    self.name + part, rows, float(rows * layers), 0, prefill=part == "/encoder"
                )
            )


def sinusoids(positions: int, width: int) -> Tensor:
    """[positions, width]: sine and cosine in turn, wavelengths from 2 pi to 20000 pi."""
    slower = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * slower
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]


def _drop(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p) if p else x


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


class Lockstep:
    """The decoder of `model` over the sources of `memory`, one row each; `room` tokens at most."""

    def __init__(self, model: Seq2Seq, memory: EncoderOutput, room: int):
        c = model.config
        model.fits(room, "target")
        self.model, self.memory, self.length, self.room = model, memory, 0, room
        shape = (2, c.decoder_layers, len(memory.mask), room, c.n_heads, c.d_model // c.n_heads)
        self.cache = torch.empty(shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens [N]; returns the logits of the next ones [N, V]."""
        model, at = self.model, self.length
        if at == self.room:
            raise TinyspecError(
                f"there was room for {self.room} tokens, and they have been written"
            )
        heard = self.memory.heard or model.hear(self.memory).heard
        assert heard is not None
        tokens = tokens.to(model.device)
        x = (
            F.embedding(tokens[:, None], model.embedding) * math.sqrt(model.config.d_model)
            + model.positions[at]
        )
        decoder = model.decoder
        for i, block in enumerate(decoder.layers):
            q, self.cache[0, i, :, at : at + 1], self.cache[1, i, :, at : at + 1] = decoder._qkv(
                block, x, decoder.cos[at : at + 1], decoder.sin[at : at + 1]
            )
            keys, values = self.cache[:, i, :, : at + 1]
            x = x + linear(attend_dense(q, keys, values, None), block.out, block.out_bias)
            x = x + model.cross(i, x, heard[i], self.memory.mask[:, None])
            x = x + decoder._mlp(block, x)
        self.length += 1
        model._enter("", x, model.config.decoder_layers)
        return model.logits(decoder.final(x)[:, 0])

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """From now on row i goes on from what was row rows[i]; rows that are not named end."""
        self.memory = self.memory.rows(rows)
        shape = self.cache.shape
        kept = self.cache.new_empty((*shape[:2], len(rows), *shape[3:]))
        kept[:, :, :, : self.length] = self.cache[:, :, rows.to(self.cache.device), : self.length]
        self.cache = kept
