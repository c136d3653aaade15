"""What a checkpoint says of its shape. GPT-2 and LLaMA are two configurations of one
transformer.
"""

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
    tied: bool = True  # the head is the embedding
    bos: int | None = None
    eos: tuple[int, ...] = ()
    add_bos: bool = False  # generate() puts bos before a text prompt; encode() never does
    family: Literal["gpt2", "llama", "qwen2"] = "llama"
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
