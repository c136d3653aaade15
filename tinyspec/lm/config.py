"""The shape of a model, as config.json gives it: decoder-only, or encoder-decoder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tinyspec.errors import TinyspecError

TUNED = "tuned"  # key of `Config.extra`: the method that a model was tuned for, and how


@dataclass(frozen=True)
class Config:
    """The shape of a decoder-only transformer (pre-norm, residual).

    Attention has `n_heads` query heads sharing `n_kv_heads` keys and values (n_heads == n_kv_heads
    is plain multi-head attention), each `head_dim` wide. `rope_scaling` is Hugging Face's
    dictionary with `rope_type` linear or llama3, or None.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_positions: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    activation: Literal["silu", "gelu_new"] = "silu"
    gated: bool = True  # SwiGLU: down(act(gate x) * up x); else down(act(up x))
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMSNorm on each head of queries and keys, before rotation
    tied: bool = True  # the head is the embedding
    bos: int | None = None
    eos: tuple[int, ...] = ()
    add_bos: bool = False  # generate() puts bos before a text prompt; encode() never does
    family: Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"] = "llama"
    head_ids: tuple[int, ...] = ()  # the ids of the head's rows; others have logit -inf; (): all
    extra: dict[str, Any] = field(default_factory=dict)  # config.json's "tinyspec": draft, licence

    @property
    def repeat(self) -> int:
        """Return how often the layers with weights run, one group after another; 1: once.

        With m layers that have weights, layer l has those of layer l % m (cyclic parameter
        sharing). Each of the n_layers layers has keys and values of its own.
        """
        repeat: int = self.extra.get("repeat", 1)
        return repeat

    @property
    def distinct_layers(self) -> int:
        """Return how many layers have weights of their own: the group that is repeated."""
        return self.n_layers // self.repeat

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by its name here. Linear weights are [out, in].

        Queries, keys and values are one matrix, and so are gate and up: that makes one product of
        three, or of two.
        """
        d, f = self.d_model, self.d_ff
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, d)}
        if self.positions == "learned":
            shapes["positions"] = (self.max_positions, d)
        for i in range(self.distinct_layers):
            shapes[f"{i}.norm1.weight"] = shapes[f"{i}.norm2.weight"] = (d,)
            if self.norm == "layer":
                shapes[f"{i}.norm1.bias"] = shapes[f"{i}.norm2.bias"] = (d,)
            if self.qk_norm:
                shapes[f"{i}.q_norm.weight"] = shapes[f"{i}.k_norm.weight"] = (self.head_dim,)
            fused = self.q_dim + 2 * self.kv_dim
            up = 2 * f if self.gated else f
            for name, (out, inp), bias in (
                ("qkv", (fused, d), self.qkv_bias),
                ("out", (d, self.q_dim), self.out_bias),
                ("up", (up, d), self.mlp_bias),
                ("down", (d, f), self.mlp_bias),
            ):
                shapes[f"{i}.{name}.weight"] = (out, inp)
                if bias:
                    shapes[f"{i}.{name}.bias"] = (out,)
        shapes["norm.weight"] = (d,)
        if self.norm == "layer":
            shapes["norm.bias"] = (d,)
        if not self.tied:
            shapes["head"] = (len(self.head_ids) or self.vocab_size, d)
        return shapes

    def parameters(self) -> int:
        """Return the number of weights.

        >>> Config(vocab_size=8, d_model=4, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=2, d_ff=6,
        ...        max_positions=16).parameters()
        164
        """
        return sum(math.prod(shape) for shape in self.shapes().values())


@dataclass(frozen=True)
class Seq2SeqConfig:
    """The shape of an encoder-decoder: LayerNorm, a plain MLP, no biases in products.

    positional   every decoder layer also attends by position alone (NAT's extra sublayer)
    lengths      how many target lengths the LENGTH token predicts; 0: there is no such token
    fertilities  how many fertilities (target tokens of a source token) are predicted, from 0 on;
                 0: there is no such head
    block        how many tokens after the next one a layer on the decoder's last state guesses
                 (blockwise decoding); 0: there is no such layer
    heads        shapes of further weights, by name: those that a technique reads. Each has one or
                 two dimensions. A name of a matrix with a dot is trained as a matrix inside the
                 network, one without as an embedding. "method/name" is the weight of a head that
                 reads the decoder from left to right
    stacks       layers of further decoder stacks, by name; their weights are named as the
                 decoder's are
    extra        config.json's "tinyspec" section: method, teacher, licence, recipe
    """

    vocab_size: int
    d_model: int
    n_heads: int
    d_ff: int
    encoder_layers: int
    decoder_layers: int
    max_positions: int = 256  # of a source, and of a target
    pad: int = 0
    bos: int = 1
    eos: int = 2
    mask: int = 3
    positional: bool = False
    lengths: int = 0
    fertilities: int = 0
    block: int = 0
    heads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stacks: Mapping[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def decoder_stacks(self) -> dict[str, int]:
        """Return the layers of every stack that attends to the source, by its name."""
        return {"decoder": self.decoder_layers, **self.stacks}

    def stack_config(self, layers: int) -> Config:
        """Return the config of one of its stacks, as a decoder-only transformer."""
        return Config(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            n_layers=layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            head_dim=self.d_model // self.n_heads,
            d_ff=self.d_ff,
            max_positions=self.max_positions,
            norm="layer",
            positions="learned",  # a table that is added: here the sinusoidal_positions
            activation="gelu_new",
            gated=False,
            bos=self.bos,
            eos=(self.eos,),
            extra=self.extra,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by its name. Linear weights are [out, in].

        The head is the embedding.
        """
        d = self.d_model
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, d)}
        for part, layers in {"encoder": self.encoder_layers, **self.decoder_stacks}.items():
            own = self.stack_config(layers).shapes()
            shapes |= {
                f"{part}.{name}": own[name] for name in own if name not in ("embed", "positions")
            }
        blocks = [f"{stack}.{i}" for stack, n in self.decoder_stacks.items() for i in range(n)]
        for block in blocks:
            for kind in ("cross", "positional") if self.positional else ("cross",):
                name = f"{block}.{kind}"
                shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (d,)
                joint = {"cross": ("q", "kv"), "positional": ("v", "qk")}[kind]
                shapes[f"{name}.{joint[0]}.weight"] = (d, d)
                shapes[f"{name}.{joint[1]}.weight"] = (2 * d, d)
                shapes[f"{name}.out.weight"] = (d, d)
        if self.lengths:
            shapes["lengths"] = (self.lengths, d)
        if self.fertilities:
            shapes["fertility.weight"] = (self.fertilities, d)
            shapes["fertility.bias"] = (self.fertilities,)
        if self.block:
            inner = self.block * self.d_ff
            shapes["block.hidden.weight"], shapes["block.hidden.bias"] = (inner, d), (inner,)
            shapes["block.out.weight"] = (self.block * d, inner)
            shapes["block.out.bias"] = (self.block * d,)
        for name in self.heads:
            if name in shapes:
                raise TinyspecError(
                    f"heads: {name} is a weight of the architecture: rename the head"
                )
        return {**shapes, **self.heads}

    def parameters(self) -> int:
        """Return the number of weights.

        >>> sizes = dict(d_model=4, n_heads=2, d_ff=6, encoder_layers=1, decoder_layers=1)
        >>> Seq2SeqConfig(8, **sizes).parameters()
        376
        """
        return sum(math.prod(shape) for shape in self.shapes().values())
