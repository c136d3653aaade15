"""One small encoder-decoder made of the layers of `blocks.py`: chapter 3 runs on it.

It is the transformer of Vaswani et al. 2017, arXiv 1706.03762, with the norm before each sublayer,
sinusoidal positions, and one matrix for the embeddings of both languages and the head. The decoder
takes any input and any self-attention mask: a technique chooses them, a loss and a loop.

`encode` computes the keys and values of the source once; all candidates and iterations share them.
`condition_on(source)` returns the decoder as an ordinary model whose texts are translations of that
source. So the autoregressive teacher runs in the common loop. If it has a block layer, that model
has it as its head for blockwise decoding. `fill_masks(source)` returns a
session whose masks one pass fills in: it drafts for the teacher.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks, drop_out
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.engine import Engine, can_pack
from tinyspec.lm.forward import ForwardBatch, ForwardRecord, Scores
from tinyspec.lm.model import Model
from tinyspec.lm.ops import attend_dense, linear
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.tree import TokenTree

BLOCK = "block."  # leads the names of a block layer's weights
BLOCK_METHOD = "blockwise"  # the method whose head that layer is

__all__ = ["EncoderOutput", "Seq2Seq", "Seq2SeqConfig", "attend_dense", "sinusoidal_positions"]


class EncoderOutput(NamedTuple):
    """What the decoder reads of B sources. All candidates and iterations share it.

    states    [B, S, d]
    mask      [B, S], True at tokens, False at padding
    summary   [B, d], the state of the LENGTH token; None: the model has none
    cross_kv  keys and values [B, S, H, hd] of each decoder layer's cross-attention, then of the
              layers of further stacks; None: computed when they are needed
    source    [B, S], the tokens that were encoded; None: not known
    """

    states: Tensor
    mask: Tensor
    summary: Tensor | None = None
    cross_kv: tuple[tuple[Tensor, Tensor], ...] | None = None
    source: Tensor | None = None

    def select_rows(self, which: Sequence[int] | Tensor) -> "EncoderOutput":
        """Return the memory of these sources, in this order. One may be named several times."""
        chosen = torch.as_tensor(which, device=self.states.device)
        summary = None if self.summary is None else self.summary[chosen]
        cross_kv = (
            None
            if self.cross_kv is None
            else tuple((k[chosen], v[chosen]) for k, v in self.cross_kv)
        )
        source = None if self.source is None else self.source[chosen]
        return EncoderOutput(self.states[chosen], self.mask[chosen], summary, cross_kv, source)


class Seq2Seq:
    """Weights that translate. `weights` is flat, with the names of `Seq2SeqConfig.shapes()`.

    forward_log  gets a record of each pass of the encoder (named `name` + "/encoder") and of the
                 decoder; None: no log
    """

    def __init__(
        self,
        config: Seq2SeqConfig,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer | None = None,
        name: str = "translator",
        forward_log: list[ForwardRecord] | None = None,
    ):
        self.config, self.weights = config, dict(weights)
        self._tokenizer, self.name, self.forward_log = tokenizer, name, forward_log
        self.embedding = self.weights["embed"]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.positions = sinusoidal_positions(config.max_positions, config.d_model).to(
            self.device, self.dtype
        )
        self.compiled: dict[str, Any] = {}  # the packed weights; shared with copies
        self.encoder = self._make_blocks("encoder", config.encoder_layers)
        self.stacks = {
            name: self._make_blocks(name, layers) for name, layers in config.decoder_stacks.items()
        }
        self.decoder = self.stacks["decoder"]

    def _make_blocks(self, part: str, layers: int) -> Blocks:
        own = {
            name.removeprefix(f"{part}."): w
            for name, w in self.weights.items()
            if name.startswith(f"{part}.")
        }
        return Blocks(
            self.config.stack_config(layers),
            {"embed": self.embedding, "positions": self.positions, **own},
        )

    @classmethod
    def create(
        cls,
        config: Seq2SeqConfig,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        tokenizer: Tokenizer | None = None,
    ) -> "Seq2Seq":
        """Return a model with fresh weights.

        Embeddings are drawn from N(0, 1/d), matrices are Xavier-normal, and those whose output is
        added to the residual stream are scaled by 1/sqrt(sublayers). A block layer adds nothing.
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
            elif name == f"{BLOCK}out.weight":
                std = 0.0
            elif name.endswith(("out.weight", "down.weight")):
                layers = config.decoder_stacks.get(name.partition(".")[0])
                std /= math.sqrt(2 * config.encoder_layers if layers is None else 3 * layers)
            weights[name] = (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(
                dtype
            )
        return cls(config, weights, tokenizer)

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype | None = torch.float32) -> "Seq2Seq":
        """Read a checkpoint folder; `dtype` None keeps the stored one."""
        from tinyspec.lm import seq2seq_file

        return cls(*seq2seq_file.read_seq2seq(folder, dtype))

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the folder that `load` reads; the weights are stored as `dtype`."""
        from tinyspec.lm import seq2seq_file

        stored = {
            name: w.detach().to("cpu", dtype).contiguous() for name, w in self.weights.items()
        }
        seq2seq_file.write_seq2seq(folder, self.config, stored, self._tokenizer)

    def __repr__(self) -> str:
        c = self.config
        layers = f"{c.encoder_layers} + {c.decoder_layers} layers of {c.d_model}"
        size = f"vocabulary {c.vocab_size}, {c.parameters() / 1e6:.1f}M weights"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Seq2Seq({self.name!r}, {layers}, {size}, {dtype} on {self.device})"

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TinyspecError(
                f"{self.name} has no tokenizer.json: "
                "pass token ids, or put the file into its folder"
            )
        return self._tokenizer

    def to(self, device: torch.device) -> "Seq2Seq":
        """Return this model on a device: itself, if it is there."""
        if device == self.device:
            return self
        weights = {name: w.to(device) for name, w in self.weights.items()}
        return Seq2Seq(self.config, weights, self._tokenizer, self.name)

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    @property
    def decoder_extras(self) -> dict[str, Tensor]:
        """Return the weights of heads that read the decoder, as "method/name"."""
        layer = {
            f"{BLOCK_METHOD}/{name.removeprefix(BLOCK)}": w
            for name, w in self.weights.items()
            if name.startswith(BLOCK)
        }
        return layer | {name: self.weights[name] for name in self.config.heads if "/" in name}

    def with_log(self, forward_log: list[ForwardRecord], name: str | None = None) -> "Seq2Seq":
        """Return the same weights with a forward log, and perhaps a name, of their own."""
        twin = copy(self)
        twin.forward_log, twin.name = forward_log, name or self.name
        return twin

    # ------------------------------------------------------------------ the passes

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the decoder input of tokens [B, T] at positions 0..T-1: [B, T, d].

        It is the embedding times sqrt(d), plus the sinusoids of the positions.
        """
        return self.place(self.embed_words(tokens))

    def embed_words(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        """Return the embeddings [..., d] of tokens, times sqrt(d), without positions.

        table  [V', d] of ids that are no words; None: the words' own
        """
        table = self.embedding if table is None else table
        return F.embedding(tokens, table) * math.sqrt(self.config.d_model)

    def place(self, vectors: Tensor) -> Tensor:
        """Return the decoder input of vectors [B, T, d] in place of embeddings, at 0..T-1."""
        self.check_length(vectors.shape[-2])
        return vectors + self.positions[: vectors.shape[-2]]

    def check_length(self, length: int, what: str = "source") -> None:
        """Raise TinyspecError if there are more tokens than positions."""
        if length > self.config.max_positions:
            raise TinyspecError(
                f"the {what} has {length} tokens, {self.name} has {self.config.max_positions} "
                "positions: shorten it"
            )

    def encode(self, source: Tensor, dropout: float = 0.0) -> EncoderOutput:
        """Run the encoder over sources [B, S], padded at the end.

        The LENGTH token stands before the source and has no position.
        """
        mask = source != self.config.pad  # [B, S]
        x, seen = self.embed(source), mask
        if self.config.lengths:
            x = torch.cat((self.weights["lengths"][:1].expand(len(x), 1, -1), x), dim=1)
            seen = F.pad(mask, (1, 0), value=True)
        x = drop_out(x, dropout)
        attend_fn = partial(attend_dense, mask=seen[:, None])
        for block in self.encoder.layers:
            x = self.encoder.add_attention(block, x, self.encoder.rotary, attend_fn, dropout)
            x = self.encoder.add_mlp(block, x, dropout)
        x = self.encoder.apply_final_norm(x)
        self._log_pass("/encoder", x, self.config.encoder_layers)
        states, summary = (x[:, 1:], x[:, 0]) if self.config.lengths else (x, None)
        return self.add_cross_kv(EncoderOutput(states, mask, summary, source=source))

    def add_cross_kv(self, memory: EncoderOutput) -> EncoderOutput:
        """Return the memory with the cross-attention keys and values of every decoder layer."""
        cross_kv = []
        for stack, layers in self.config.decoder_stacks.items():
            for i in range(layers):
                both = linear(memory.states, self.weights[f"{stack}.{i}.cross.kv.weight"])
                k, v = both.chunk(2, dim=-1)
                cross_kv.append((self._split_heads(k), self._split_heads(v)))
        return memory._replace(cross_kv=tuple(cross_kv))

    def decode(
        self,
        inputs: Tensor,
        memory: EncoderOutput,
        self_mask: Tensor | None = None,
        dropout: float = 0.0,
        slots: Tensor | None = None,
        stack: str = "decoder",
        is_pass: bool = True,
    ) -> Tensor:
        """Run the decoder over inputs [B, T, d] of `embed`; return the normed states [B, T, d].

        The other parameters are those of `layer_states`.

        is_pass  whether the forward log gets a record of it; False: it is a part of another pass,
                 whose record gets its layers by `count_layers`
        """
        x, blocks = inputs, self.stacks[stack]
        for state in self.layer_states(inputs, memory, self_mask, dropout, slots, stack):
            x = state
        if is_pass:
            self._log_pass("", x, len(blocks.layers))
        return blocks.apply_final_norm(x)

    def layer_states(
        self,
        inputs: Tensor,
        memory: EncoderOutput,
        self_mask: Tensor | None = None,
        dropout: float = 0.0,
        slots: Tensor | None = None,
        stack: str = "decoder",
        depths: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the state [B, T, d] after each decoder layer, before the final norm.

        With `depths` this is the masked stream, as in `Blocks.layer_states`.

        memory     of B sources, or of one that all inputs share
        self_mask  [T, T] or [B, T, T], True where a position may attend; None: everywhere. A
                   position that may attend nowhere gets zeros.
        slots      [B, T], False at padding, which nobody attends to; None: no padding
        stack      the stack that is run, if it is a further one
        depths     [B, T] how many layers update each token; None: all
        """
        blocks = self.stacks[stack]
        cross_kv = self._cross_kv_of(memory, stack)
        mask = None if self_mask is None else self_mask if self_mask.ndim == 3 else self_mask[None]
        visible = None if slots is None else slots[:, None]
        if visible is not None:
            mask = visible if mask is None else mask & visible
        attend_fn = partial(attend_dense, mask=mask)
        x = drop_out(inputs, dropout)
        for i, block in enumerate(blocks.layers):
            entered = x
            x = blocks.add_attention(block, x, blocks.rotary, attend_fn, dropout)
            if self.config.positional:
                x = x + drop_out(self._attend_by_position(i, x, visible, stack), dropout)
            read = self.attend_source(i, x, cross_kv[i], memory.mask[:, None], stack)
            x = blocks.add_mlp(block, x + drop_out(read, dropout), dropout)
            if depths is not None:
                x = torch.where((depths > i)[..., None], x, entered)
            yield x

    def _cross_kv_of(self, memory: EncoderOutput, stack: str) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the keys and values that the layers of a stack read from the source."""
        cross_kv = memory.cross_kv or self.add_cross_kv(memory).cross_kv
        assert cross_kv is not None
        layers, first = self.config.decoder_stacks, 0
        for name in layers:
            if name == stack:
                break
            first += layers[name]
        return cross_kv[first : first + layers[stack]]

    def causal_inputs(
        self, source: Tensor, target: Tensor, dropout: float = 0.0
    ) -> tuple[Tensor, EncoderOutput, Tensor]:
        """Return what `decode` and `layer_states` need for a causal pass: inputs, memory, mask.

        target  [B, T], read after bos. Padding stands at the end, so no other position sees it
        """
        inputs = F.pad(target, (1, 0), value=self.config.bos)
        length = inputs.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        return self.embed(inputs), self.encode(source, dropout), causal

    def causal_states(self, source: Tensor, target: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the decoder's states [B, T + 1, d] in a causal pass over bos and targets."""
        return self.decode(*self.causal_inputs(source, target, dropout), dropout)

    def logits(self, states: Tensor, table: Tensor | None = None) -> Tensor:
        """Return the logits [..., V] of states [..., d] that `decode` returned, or of some of them.

        table  [V', d] of ids that are no words; None: the words' own

        They are added to the head rows of the last pass in the forward log.
        """
        if self.forward_log:
            rows = states.shape[:-1].numel()
            self.forward_log[-1] = self.forward_log[-1]._replace(
                head_rows=self.forward_log[-1].head_rows + rows
            )
        return _linear_logits(states, self.embedding if table is None else table)

    def count_layers(self, row_layers: float) -> None:
        """Add layers that ran beside a decoder pass to the last pass in the forward log."""
        if self.forward_log:
            last = self.forward_log[-1]
            self.forward_log[-1] = last._replace(row_layers=last.row_layers + row_layers)

    def length_logits(self, memory: EncoderOutput) -> Tensor:
        """Return the logits of the target's length: [B, lengths]. 0 is impossible."""
        if memory.summary is None:
            raise TinyspecError(
                f"{self.name} was made without a LENGTH token: it cannot tell a length"
            )
        logits = _linear_logits(memory.summary, self.weights["lengths"])
        return torch.cat((torch.full_like(logits[:, :1], -torch.inf), logits[:, 1:]), dim=-1)

    def fertility_logits(self, memory: EncoderOutput) -> Tensor:
        """Return the logits of each source token's fertility: [B, S, fertilities]."""
        if not self.config.fertilities:
            raise TinyspecError(
                f"{self.name} was made without a fertility head: it cannot tell fertilities"
            )
        return _linear_logits(
            memory.states, self.weights["fertility.weight"], self.weights["fertility.bias"]
        )

    def condition_on(self, source: Sequence[int]) -> "ConditionedDecoder":
        """Return the decoder as a model whose texts are translations of this source.

        A text begins with bos.
        """
        return ConditionedDecoder(self, source)

    def fill_masks(self, source: Sequence[int]) -> "MaskFiller":
        """Return a session that drafts translations of this source: the decoder fills its masks."""
        return MaskFiller(self, source)

    # ------------------------------------------------------------------ inside

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.config.n_heads, -1)

    def _normalize(self, name: str, x: Tensor) -> Tensor:
        return self.decoder.normalize(
            x, self.weights[f"{name}.norm.weight"], self.weights[f"{name}.norm.bias"]
        )

    def attend_source(
        self,
        layer: int,
        x: Tensor,
        cross_kv: tuple[Tensor, Tensor],
        mask: Tensor | None,
        stack: str = "decoder",
    ) -> Tensor:
        """Return the cross-attention of x [B, T, d] over keys and values [B or 1, S, H, hd]."""
        name = f"{stack}.{layer}.cross"
        q = self._split_heads(linear(self._normalize(name, x), self.weights[f"{name}.q.weight"]))
        return linear(attend_dense(q, *cross_kv, mask), self.weights[f"{name}.out.weight"])

    def _attend_by_position(self, layer: int, x: Tensor, mask: Tensor | None, stack: str) -> Tensor:
        """Return NAT's positional attention of x [B, T, d].

        Queries and keys come from the positions alone, values from the states.
        """
        name = f"{stack}.{layer}.positional"
        q, k = linear(self.positions[: x.shape[1]], self.weights[f"{name}.qk.weight"]).chunk(
            2, dim=-1
        )
        v = self._split_heads(linear(self._normalize(name, x), self.weights[f"{name}.v.weight"]))
        mixed = attend_dense(
            self._split_heads(q)[None].expand_as(v), self._split_heads(k)[None], v, mask
        )
        return linear(mixed, self.weights[f"{name}.out.weight"])

    def _log_pass(self, part: str, x: Tensor, layers: int) -> None:
        if self.forward_log is not None:
            rows = x.shape[:-1].numel()
            self.forward_log.append(
                ForwardRecord(
                    self.name + part, rows, float(rows * layers), 0, prefill=part == "/encoder"
                )
            )


def _linear_logits(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits, in float32 where products are in bfloat16: a loss needs more digits."""
    logits = linear(states, weight, bias)
    return logits.float() if logits.dtype is torch.bfloat16 else logits


def sinusoidal_positions(positions: int, width: int) -> Tensor:
    """Return [positions, width]: sine and cosine in turn, wavelengths from 2 pi to 20000 pi."""
    slower = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * slower
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]


def add_ends(config: Seq2SeqConfig, target: Tensor) -> Tensor:
    """Return translations [B, T], padded, with their ends: [B, T + 1].

    It is what each state of a causal pass over bos and the translations must predict.
    """
    lengths = (target != config.pad).sum(dim=1, keepdim=True)
    return F.pad(target, (0, 1), value=config.pad).scatter(1, lengths, config.eos)


def has_same_vocabulary(one: Model | Seq2Seq, other: Model | Seq2Seq) -> bool:
    """Return whether every id is the same token in both. A model without a tokenizer fits any."""
    known = one.has_tokenizer and other.has_tokenizer
    same = not known or one.tokenizer.same_vocabulary(other.tokenizer)
    return same and one.config.vocab_size == other.config.vocab_size


class CrossAttentionBlocks(Blocks):
    """Decoder layers that also attend to a source.

    Cross-attention is part of a layer's attention sublayer.
    """

    def __init__(self, host: Seq2Seq, memory: EncoderOutput):
        super().__init__(host.decoder.config, host.decoder.weights)
        self.host, self.memory = host, memory
        assert memory.cross_kv is not None
        self.cross_kv = memory.cross_kv

    def initial_states(self, feed: ForwardBatch) -> Tensor:
        """Return the state [n, d] that each row starts from. Embeddings are scaled by sqrt(d)."""
        ids = torch.tensor(feed.tokens_to_embed, device=self.device)
        x = self.embed[ids] * self.config.d_model**0.5
        if feed.has_state is not None and feed.entry_states is not None:
            x[torch.tensor(feed.has_state, device=self.device)] = feed.entry_states.to(x.dtype)
        fresh = torch.tensor([s == 0 for s in feed.starts], device=self.device)[:, None]
        places = self.weights["positions"][torch.tensor(feed.positions, device=self.device)]
        return torch.addcmul(x, fresh.to(x.dtype), places)

    def run_sublayers(
        self,
        feeds: Sequence[ForwardBatch],
        active: list[Sequence[int]],
        x: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Run sublayers first..last-1 over the active rows x [n, d] of all feeds."""
        copied = [feed.copying for feed, rows in zip(feeds, active, strict=True) for _ in rows]
        for sublayer in range(first, last):
            x = super().run_sublayers(feeds, active, x, sublayer, sublayer + 1)
            layer = sublayer // 2
            if sublayer % 2 == 0:
                mixed = self.host.attend_source(layer, x[None], self.cross_kv[layer], None)[0]
                if any(copied):  # these rows only write keys and values
                    mixed = mixed.masked_fill(torch.tensor(copied, device=self.device)[:, None], 0)
                x = x + mixed
        return x

    def final_states(self, ids: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the states that the head reads in a dense causal pass: [B, T, d]."""
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        return self.host.decode(self.host.embed(ids), self.memory, causal, dropout)


class CompiledCrossAttention(Engine):
    """The same on the compiled path, where no bit of a row depends on what is computed beside it.

    To the kernels, cross-attention is the attention sublayer of a second stack whose cache holds
    the source. Rows attend to the source's slots alone. Their own keys and values, which nobody
    reads, are written into one slot after them.
    """

    def __init__(self, host: Seq2Seq):
        super().__init__(host.decoder.config, dict(host.decoder.weights))
        self.cross = Engine(
            replace(self.config, vocab_size=2, d_ff=2, max_positions=1),
            _cross_attention_weights(host),
        )
        self.source = torch.empty(0)

    def with_source(self, memory: EncoderOutput) -> "CompiledCrossAttention":
        """Return the same weights with this source."""
        assert memory.cross_kv is not None
        pairs = [
            torch.cat((k, v)).transpose(1, 2) for k, v in memory.cross_kv[: self.config.n_layers]
        ]  # each [2, H, S, hd]
        twin = copy(self)
        twin.source = F.pad(torch.stack(pairs), (0, 0, 0, 1)).contiguous()  # [L, 2, H, S + 1, hd]
        return twin

    def initial_states(self, feed: ForwardBatch) -> Tensor:
        """Return the state [n, d] that each row starts from. Embeddings are scaled by sqrt(d)."""
        assert self._positions is not None
        x = torch.empty(len(feed.tokens), self.config.d_model)
        self._lookup.rows(feed.tokens_to_embed, x.numpy())
        x *= self.config.d_model**0.5
        if feed.has_state is not None and feed.entry_states is not None:
            x[torch.tensor(feed.has_state)] = feed.entry_states.float()
        fresh = torch.tensor([start == 0 for start in feed.starts])[:, None]
        return x + fresh * self._positions[torch.tensor(feed.positions)].float()

    def _run_compiled(
        self,
        x: Tensor,
        group: list[tuple[ForwardBatch, Sequence[int]]],
        first: int,
        last: int,
        copying: bool,
    ) -> None:
        n, slots = len(x), self.source.shape[3] - 1
        seen = 1, [(slots, ())] * n
        sources = [(self.source.data_ptr(), slots + 1, [slots] * n, [0] * n, seen, None)]
        marks = [
            first,
            *(mark for mark in range(first // 2 * 2 + 1, last, 2) if mark > first),
            last,
        ]
        for begin, end in pairwise(marks):  # each ends after an attention sublayer, or at `last`
            super()._run_compiled(x, group, begin, end, copying)
            if end % 2 and not copying:  # rows that are copied up only write keys and values
                self.cross._compiled.run(x.numpy(), end - 1, end, sources, torch.get_num_threads())


def _cross_attention_weights(host: Seq2Seq) -> dict[str, Tensor]:
    """Return the weights of the second stack. Its MLPs and its head are never run."""
    d = host.config.d_model
    weights = {
        "embed": torch.zeros(2, d),
        "positions": torch.zeros(1, d),
        "norm.weight": torch.ones(d),
        "norm.bias": torch.zeros(d),
    }
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


class ConditionedDecoder(Model):
    """A model whose texts are translations of one source. Each text begins with bos."""

    def __init__(self, host: Seq2Seq, source: Sequence[int]):
        if host.config.positional:
            raise TinyspecError(
                f"{host.name} attends by position over a whole target, so it cannot write from "
                "left to right: use a method made for it, or an autoregressive model"
            )
        if not source:
            raise TinyspecError("the source is empty: give at least one token")
        self.source = list(source)
        self.pad = host.config.pad  # the token at positions that are not known yet
        self.state_owner = host.decoder  # all copies of a translator share it
        with torch.inference_mode():
            memory = host.encode(torch.tensor([self.source], device=host.device))
        self._torch_path = CrossAttentionBlocks(host, memory)
        blocks = self._torch_path
        super().__init__(
            blocks.config, blocks.weights, host._tokenizer, host.name, host.decoder_extras
        )
        packed = _compiled_path(host)
        if packed is not None:  # all sources share what is made of the heads' weights
            self._prepared = host.compiled.setdefault("prepared", {})
        self._path = self._torch_path if packed is None else packed.with_source(memory)

    def pack_weights(self) -> "ConditionedDecoder":
        """Return self: the weights were packed with the encoder-decoder's, or cannot be."""
        return self

    @property
    def source_states(self) -> Tensor:
        """Return the encoder's states of the source: [S, d]."""
        return self._torch_path.memory.states[0]

    def torch_blocks(self) -> Blocks:
        """Return the layers in torch, which attend to the source too."""
        return self._torch_path

    def save(self, folder: str | Path) -> None:
        raise TinyspecError(
            f"{self.name} that has read a source cannot be saved: save the encoder-decoder"
        )


class MaskFiller:
    """A translation of one source, whose masks the decoder fills in: the session of a draft model.

    It has the methods of a session. In a pass every position attends to all others, so the logits
    of a mask are those of the token in its place, and nothing of a pass is kept for the next one. A
    text begins with bos.
    """

    cache_exact = True  # there is no cache

    def __init__(self, model: Seq2Seq, source: Sequence[int]):
        self.model, self.text, self.tree = model, list[int](), TokenTree()
        with torch.inference_mode():
            self.memory = model.encode(torch.tensor([list(source)], device=model.device))

    def append(self, tokens: Sequence[int]) -> None:
        """Commit forced tokens."""
        self.text += tokens

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens; nothing is run for them."""
        self.append(tokens)
        return Scores(torch.empty(0, 0), torch.empty(0, 0, 0), ())

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the logits at the newest token and at each node of a chain, in one pass."""
        self.tree = tree
        ids = torch.tensor([[*self.text, *tree.tokens]], device=self.model.device)
        with torch.inference_mode():
            states = self.model.decode(self.model.embed(ids), self.memory)
            logits = self.model.logits(states[0, len(self.text) - 1 :])  # [n + 1, V]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        layers = [self.model.config.decoder_layers] * len(logits)
        return Scores(logits, torch.empty(0, 0, 0), layers)

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Commit the first tokens of the last chain, then `next`."""
        self.text += [*self.tree.tokens_on(path), *(() if next is None else (next,))]

    def rewind(self, length: int) -> None:
        """Forget the text after its first `length` tokens."""
        del self.text[length:]

    def end(self) -> None:
        """Forget the text."""
        self.text = []


def _compiled_path(host: Seq2Seq) -> CompiledCrossAttention | None:
    """Return the compiled path of these weights, or None if they have none.

    It is built once, and again when the weights were written to.
    """
    if host.dtype != torch.float32 or not can_pack(host.decoder.config, host.weights):
        return None
    if any(w.is_inference() for w in host.weights.values()):  # they have no _version
        return None
    state = tuple(w._version for w in host.weights.values())
    if host.compiled.get("state") != state:
        host.compiled.clear()
        host.compiled.update(state=state, path=CompiledCrossAttention(host))
    path = host.compiled["path"]
    assert isinstance(path, CompiledCrossAttention)
    return path


class Lockstep:
    """Decode several sources at once, with a cache; at most `room` tokens of each.

    stack  the decoder stack that is run
    table  [V', d] of the ids that it reads and writes; None: words
    """

    def __init__(
        self,
        model: Seq2Seq,
        memory: EncoderOutput,
        room: int,
        stack: str = "decoder",
        table: Tensor | None = None,
    ):
        c = model.config
        model.check_length(room, "target")
        self.model, self.memory, self.length, self.room = model, memory, 0, room
        self.stack, self.table = stack, table
        layers, heads = c.decoder_stacks[stack], c.n_heads
        shape = (2, layers, len(memory.mask), room, heads, c.d_model // heads)
        self.cache = torch.empty(shape, dtype=model.dtype, device=model.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens [N]; return the logits of the next ones [N, V]."""
        return self.append(tokens[:, None])[:, 0]

    @torch.inference_mode()
    def append(self, tokens: Tensor) -> Tensor:
        """Append tokens [N, K] in one pass; return the logits after each of them [N, K, V].

        Each of the K tokens attends to all tokens before them and to all K.
        """
        model, at, count = self.model, self.length, tokens.shape[1]
        if at + count > self.room:
            raise TinyspecError(
                f"there was room for {self.room} tokens, and they have been written"
            )
        cross_kv = model._cross_kv_of(self.memory, self.stack)
        words = model.embed_words(tokens.to(model.device), self.table)
        x = words + model.positions[at : at + count]
        blocks = model.stacks[self.stack]
        for i, block in enumerate(blocks.layers):
            x = blocks.add_attention(block, x, blocks.rotary, partial(self._attend, i))
            mask = self.memory.mask[:, None]
            x = x + model.attend_source(i, x, cross_kv[i], mask, self.stack)
            x = blocks.add_mlp(block, x)
        self.length += count
        model._log_pass("", x, len(blocks.layers))
        return model.logits(blocks.apply_final_norm(x), self.table)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write keys and values of the newest positions, then attend over all positions so far."""
        end = self.length + q.shape[1]
        keys, values = self.cache[:, layer, :, :end]
        keys[:, self.length :], values[:, self.length :] = k, v
        return attend_dense(q, keys, values, None)

    @torch.inference_mode()
    def select(self, rows: Tensor) -> None:
        """Make row i continue what was row rows[i]. Rows that are not named end."""
        self.memory = self.memory.select_rows(rows)
        shape = self.cache.shape
        kept = self.cache.new_empty((*shape[:2], len(rows), *shape[3:]))
        kept[:, :, :, : self.length] = self.cache[:, :, rows.to(self.cache.device), : self.length]
        self.cache = kept
