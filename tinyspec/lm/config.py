"""What config.json says of a checkpoint's shape: decoder-only, or encoder-decoder."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
    qk_norm: bool = False  # each head of queries and keys has an RMSNorm before it is rotated
    tied: bool = True  # the head is the embedding
    bos: int | None = None
    eos: tuple[int, ...] = ()
    add_bos: bool = False  # generate() puts bos before a text prompt; encode() never does
    family: Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"] = "llama"
    says: tuple[
        int, ...
    ] = ()  # ids that the head has rows for, in their order; none: all, the others have logit -inf
    extra: dict[str, Any] = field(
        default_factory=dict
    )  # config.json's "tinyspec" section: draft, licence, recipe

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight the transformer has, by its name here, with its shape. Linear weights are
        [out, in].

        Queries, keys and values are one matrix, and so are gate and up: one product instead of
        three or two.
        """
        d, f = self.d_model, self.d_ff
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, d)}
        if self.positions == "learned":
            shapes["positions"] = (self.max_positions, d)
        for i in range(self.n_layers):
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
            shapes["head"] = (len(self.says) or self.vocab_size, d)
        return shapes

    def parameters(self) -> int:
        """Number of weights.

        >>> Config(vocab_size=8, d_model=4, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=2, d_ff=6,
        ...        max_positions=16).parameters()
        164
        """
        total = 0
        for shape in self.shapes().values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return total


@dataclass(frozen=True)
class Seq2SeqConfig:
    """The shape of an encoder-decoder: the blocks of `blocks.py` with LayerNorm, a plain MLP and no
    biases in products.

    positional   every decoder layer also attends by position alone (NAT's extra block)
    lengths      classes of target lengths that the LENGTH token tells, 0 being none of them; 0:
                 there is no such token
    fertilities  classes of how many target tokens a source token gives, from 0 on; 0: there is no
                 such head
    extra        config.json's "tinyspec" section: the method it was trained for, its teacher,
                 licence, recipe
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
    extra: dict[str, Any] = field(default_factory=dict)

    def stack(self, layers: int) -> Config:
        """One of its two stacks as the decoder-only transformer with the same blocks."""
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
            positions="learned",  # a table that is added: here the sinusoids
            activation="gelu_new",
            gated=False,
            bos=self.bos,
            eos=(self.eos,),
            extra=self.extra,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its name, with its shape. Linear weights are [out, in]; the embeddings
        are the head.
        """
        d = self.d_model
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, d)}
        for part, layers in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            own = self.stack(layers).shapes()
            shapes |= {
                f"{part}.{name}": own[name] for name in own if name not in ("embed", "positions")
            }
        for i in range(self.decoder_layers):
            for kind in ("cross", "positional") if self.positional else ("cross",):
                name = f"decoder.{i}.{kind}"
                shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (d,)
                joint = {"cross": ("q", "kv"), "positional": ("v", "qk")}[kind]
                shapes[f"{name}.{joint[0]}.weight"] = (d, d)
                shapes[f"{name}.{joint[1]}.weight"] = (2 * d, d)
                shapes[f"{name}.out.weight"] = (d, d)
        if self.lengths:
            shapes["lengths"] = (self.lengths, d)
        if self.fertilities:
            shapes["fertility.weight"], shapes["fertility.bias"] = (
                (self.fertilities, d),
                (self.fertilities,),
            )
        return shapes

    def parameters(self) -> int:
        """Number of weights.

        >>> Seq2SeqConfig(8, d_model=4, n_heads=2, d_ff=6, encoder_layers=1, decoder_layers=1).parameters()
        376
        """
        total = 0
        for shape in self.shapes().values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return total
