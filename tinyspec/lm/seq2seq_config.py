"""What a checkpoint says of an encoder-decoder's shape."""

from dataclasses import dataclass, field
from typing import Any

from tinyspec.lm.config import Config


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
