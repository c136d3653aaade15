"""Many translations at once, all of one length, a token a step: an encoder-decoder with a cache per
row.

A session (`Seq2Seq.given`) writes one translation and can take tokens back; these rows cannot, but
a thousand of them are one product. What they compute is the dense decoder under a causal mask (a
test).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.ops import linear
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, attend_dense


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
