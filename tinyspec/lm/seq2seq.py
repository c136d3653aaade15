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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.feed import ForwardRecord
from tinyspec.lm.ops import attend_dense, linear
from tinyspec.lm.seq2seq_config import Seq2SeqConfig
from tinyspec.lm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyspec.lm.given import Given

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
        from tinyspec.lm.given import Given  # it stands on this model; this is its front door

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
