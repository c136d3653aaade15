"""Layers of a head's own: their rows enter as vectors, and have their own keys and values.

A session embeds tokens. A head such as EAGLE's makes the input of its layers itself, from a token
and a state of the target. Its rows form a tree, as draft tokens do: a row attends to its ancestors
and to itself.

A layer has the form and the tensor names of LLaMA's. Its tensors say which parts it has:

    a = norm(x)              norm: input_layernorm, if there is one
    x = x + attention(a)
    x = x + mlp(norm(x))     post_attention_layernorm and mlp, if there are any

Heads, widths and rotation are the target's (`head_config`), also for a target with learned
positions. `Stack` runs the layers at inference, and `UnrolledLayer` runs one of them for training:
on whole texts, with gradients. Each has its own code for positions and masks.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.config import Config
from tinyspec.lm.forward import Cache, ForwardRecord, SeenSlots
from tinyspec.lm.heads import HeadMatrix
from tinyspec.lm.host import one_torch_thread
from tinyspec.lm.ops import attend, attend_causal, rotary_tables, rotate
from tinyspec.lm.session import PREFILL_CHUNK
from tinyspec.lm.transformer import Transformer
from tinyspec.tree import ROOT

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
INPUT_NORM = "input_layernorm"
MLP_NORM = "post_attention_layernorm"
FEW = 64  # rows of a draft; a prompt has more, and all threads attend for it


def head_config(config: Config, layers: int = 1) -> Config:
    """Return the config of LLaMA layers with the widths, heads and rotation of a target."""
    return replace(
        config,
        n_layers=layers,
        norm="rms",
        positions="rope",
        activation="silu",
        gated=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def layer_shapes(config: Config, lead: str = "layers.0.") -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a whole layer without input norm, named `lead` + ..."""
    d, q, kv, f = config.d_model, config.q_dim, config.kv_dim, config.d_ff
    shapes = {name: (out, d) for name, out in zip(QKV, (q, kv, kv), strict=True)}
    shapes |= {OUT: (d, q), UP[0]: (f, d), UP[1]: (f, d), DOWN: (d, f)}
    return {f"{lead}{name}.weight": shape for name, shape in ({**shapes, MLP_NORM: (d,)}).items()}


# ---------------------------------------------------------------------- inference


class HeadLayer:
    """The weights of one layer, as they are multiplied at inference.

    weights  tensors by name; those of this layer begin with `lead`
    """

    def __init__(self, target: Transformer, weights: Mapping[str, Tensor], lead: str = "layers.0."):
        def multiply(*names: str) -> HeadMatrix:
            return HeadMatrix(
                target, torch.cat([weights[f"{lead}{name}.weight"] for name in names])
            )

        def gain(name: str) -> Tensor | None:
            weight = weights.get(f"{lead}{name}.weight")
            return None if weight is None else weight.to(target.device, target.state_dtype)

        self.qkv, self.out = multiply(*QKV), multiply(OUT)
        self.input_norm, self.mlp_norm = gain(INPUT_NORM), gain(MLP_NORM)
        has_mlp = f"{lead}{DOWN}.weight" in weights
        self.up = multiply(*UP) if has_mlp else None
        self.down = multiply(DOWN) if has_mlp else None


class Stack:
    """Layers with the keys and values of one text: a slot for each row.

    target       decides device, types and the layers' config
    name         of the head in the forward log
    forward_log  where each `run` is recorded
    """

    def __init__(
        self,
        target: Transformer,
        layers: Sequence[HeadLayer],
        name: str,
        forward_log: list[ForwardRecord],
    ):
        self.layers, self.name, self.forward_log = layers, name, forward_log
        self.config = head_config(target.config, len(layers))
        self.cache = Cache(self.config, target.state_dtype, target.device)
        self.seen: list[SeenSlots] = []  # what each row attends to, itself included
        self.rotary = self._make_rotary(0)  # grown by doubling

    def __len__(self) -> int:
        return len(self.seen)

    def cut(self, n: int) -> None:
        """Drop all rows but the first n."""
        del self.seen[n:]

    def run(
        self,
        x: Tensor,
        parents: Sequence[int],
        *,
        first_input: Tensor | None = None,
        head_rows: int = 0,
        prefill: bool = False,
    ) -> Tensor:
        """Run new rows x [n, d] through all layers, and return their outputs [n, d].

        parents      [n] the row that each of them follows; ROOT: it stands at position 0
        first_input  [n, wide] what the attention of the first layer reads, if that is not x
        head_rows    rows whose logits will be computed, for the forward log; prefill: likewise

        A long prompt runs in pieces, which bound the attention mask.
        """
        first, n = len(self.seen), len(parents)
        if n > PREFILL_CHUNK:
            pieces = list[Tensor]()
            for at in range(0, n, PREFILL_CHUNK):
                piece = slice(at, at + PREFILL_CHUNK)
                read = None if first_input is None else first_input[piece]
                rows = head_rows if at + PREFILL_CHUNK >= n else 0
                output = self.run(
                    x[piece], parents[piece], first_input=read, head_rows=rows, prefill=prefill
                )
                pieces.append(output)
            return torch.cat(pieces)
        positions = [self._add_row(parent) for parent in parents]
        slots = slice(first, first + n)
        self.cache.reserve(first + n)
        cos, sin = self._rotary_at(positions)
        mask, c = self._attention_mask(first), self.config
        x = x.to(self.cache.store.dtype)
        for number, layer in enumerate(self.layers):
            a = x if number or first_input is None else first_input
            fused = layer.qkv(self._normalize(a, layer.input_norm))
            heads = fused.view(n, c.n_heads + 2 * c.n_kv_heads, c.head_dim)
            rotated = rotate(heads[:, : -c.n_kv_heads], cos, sin)
            q, k, v = rotated[:, : c.n_heads], rotated[:, c.n_heads :], heads[:, -c.n_kv_heads :]
            self.cache.write(number, slots, k, v)
            keys = self.cache.keys[number][:, : first + n]
            values = self.cache.values[number][:, : first + n]
            with one_torch_thread() if n < FEW else nullcontext():
                mixed = attend(q, keys, values, mask)
            x = x + layer.out(mixed)
            if layer.up is not None and layer.down is not None:
                gate, up = layer.up(self._normalize(x, layer.mlp_norm)).chunk(2, dim=-1)
                x = x + layer.down(F.silu(gate) * up)
        depth = sum(0.5 if layer.up is None else 1.0 for layer in self.layers)
        self.forward_log.append(ForwardRecord(self.name, n, n * depth, head_rows, 0, prefill))
        return x

    def _add_row(self, parent: int) -> int:
        """Add a row below another one, and return its position."""
        slot = len(self.seen)
        prefix, others = (0, ()) if parent == ROOT else self.seen[parent]
        goes_on = not others and prefix == slot  # a chain from the first row on: no list of slots
        self.seen.append((slot + 1, ()) if goes_on else (prefix, (*others, slot)))
        return prefix + len(others)

    def _attention_mask(self, first: int) -> Tensor | None:
        """Return where the rows from `first` on may attend, bool [n, slots]; None: everywhere."""
        slots, new = len(self.seen), self.seen[first:]
        if all(seen == (slots, ()) for seen in new):
            return None
        mask = np.zeros((len(new), slots), dtype=bool)
        for row, (prefix, others) in zip(mask, new, strict=True):
            row[:prefix] = True
            row[list(others)] = True
        return torch.from_numpy(mask).to(self.cache.store.device)

    def _make_rotary(self, positions: int) -> tuple[Tensor, Tensor]:
        store = self.cache.store
        return rotary_tables(self.config, store.dtype, store.device, positions)

    def _rotary_at(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of these positions, after the tables were grown to hold them."""
        last = max(positions) + 1
        if len(self.rotary[0]) < last:
            self.rotary = self._make_rotary(max(last, 2 * len(self.rotary[0])))
        cos, sin = self.rotary
        return cos[positions], sin[positions]

    def _normalize(self, x: Tensor, gain: Tensor | None) -> Tensor:
        return x if gain is None else F.rms_norm(x, (x.shape[-1],), gain, self.config.norm_eps)


# ---------------------------------------------------------------------- training


class UnrolledLayer:
    """One layer over whole texts, with gradients, continued on its own outputs.

    The first `run` is a dense causal pass: row t stands at position t. In run j, row t goes on from
    row t of the run before, at position t + j. It attends to the rows 0 .. t of the first run, and
    to the rows t of the runs 1 .. j: this is what a draft of j tokens after position t sees. All
    positions are continued at the same time.
    """

    def __init__(self, config: Config, weights: Mapping[str, Tensor], lead: str = "layers.0."):
        self.config, self.weights, self.lead = head_config(config), weights, lead
        self.keys: list[Tensor] = []  # of each run, [B, T, KV, hd]
        self.values: list[Tensor] = []

    def run(self, x: Tensor, first_input: Tensor | None = None) -> Tensor:
        """Return the outputs [B, T, d] of the rows x [B, T, d].

        first_input  [B, T, wide] what attention reads, if that is not x
        """
        a = self._normalize(x if first_input is None else first_input, INPUT_NORM)
        step, n, width = len(self.keys), x.shape[1], self.config.head_dim
        q, k, v = (self._multiply(a, name).view(len(x), n, -1, width) for name in QKV)
        cos, sin = rotary_tables(self.config, x.dtype, x.device, step + n)
        q, k = rotate(q, cos[step:], sin[step:]), rotate(k, cos[step:], sin[step:])
        self.keys.append(k)
        self.values.append(v)
        mixed = self._attend_own(q) if step else attend_causal(q, k, v)
        x = x + self._multiply(mixed, OUT)
        if f"{self.lead}{DOWN}.weight" in self.weights:
            h = self._normalize(x, MLP_NORM)
            gate, up = (self._multiply(h, name) for name in UP)
            x = x + self._multiply(F.silu(gate) * up, DOWN)
        return x

    def _attend_own(self, q: Tensor) -> Tensor:
        """Return the attention over the first run, and over the own rows of later runs."""
        batch, n, _, width = q.shape
        q = q.reshape(batch, n, self.config.n_kv_heads, -1, width) / width**0.5
        scores = torch.einsum("btkgd,bskd->btkgs", q, self.keys[0])
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later[:, None, None], -torch.inf)
        own_keys, own_values = torch.stack(self.keys[1:], -2), torch.stack(self.values[1:], -2)
        own = torch.einsum("btkgd,btkjd->btkgj", q, own_keys)
        weights = torch.cat((scores, own), -1).softmax(-1).to(own_values.dtype)
        mixed = torch.einsum("btkgs,bskd->btkgd", weights[..., :n], self.values[0])
        return (mixed + torch.einsum("btkgj,btkjd->btkgd", weights[..., n:], own_values)).flatten(2)

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{self.lead}{name}.weight"])

    def _normalize(self, x: Tensor, name: str) -> Tensor:
        gain = self.weights.get(f"{self.lead}{name}.weight")
        return x if gain is None else F.rms_norm(x, (x.shape[-1],), gain, self.config.norm_eps)
