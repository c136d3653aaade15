"""The twin of the compiled transformer: what src/*.c computes, in numpy, one row at a time.

The kernels are fast because many rows share a weight while it is in a register. Sharing changes no
bit: every sum runs in an order that depends on the row's own path and the shape of the model alone.
So a row has the same bits alone, in a tree, in a batch, and in a prompt that is split anywhere.

In float64 these lines are the oracle: a kernel may differ by rounding alone, n eps for a sum of n
terms. In float32, with `multiply_add` for a step, `product` has the bits of the kernels that
multiply and add in one instruction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Step = Callable[[Array, Array, Array], Array]
Biased = tuple[Array, Array | None]  # weight [out, in] or gain [d], and bias


def separate(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c, rounded twice."""
    return a * b + c


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Return a b + c in float32, rounded once, as a fused multiply-add rounds it.

    Products of float32 are exact in float64, and the error of a sum there is known (Knuth). If the
    last bit is set where the sum was not exact, it rounds to float32 as the exact sum does.
    """
    ab = np.multiply(a, b, dtype=np.float64)
    s = np.asarray(ab + c)
    back = s - ab
    lost = (ab - (s - back)) + (c - back)
    even = s.view(np.int64) & 1 == 0
    toward = np.where((lost > 0) == (s > 0), 1, -1)
    sticky = (s.view(np.int64) + np.where(even & (lost != 0), toward, 0)).view(np.float64)
    return sticky.astype(np.float32)


def product(weight: Array, row: Array, bias: Array | None = None, step: Step = separate) -> Array:
    """Return weight [out, in] row [in] + bias: each output sums the inputs in their order."""
    total = np.zeros(len(weight), row.dtype)
    for i in range(len(row)):
        total = step(weight[:, i], row[i], total)
    return total if bias is None else total + bias


def bfloat16(x: Array) -> Array:
    """Return x rounded to bfloat16 (8 significant bits), ties to even, in the type of x."""
    fraction, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8), x.dtype)


def turn(head: Array, cos: Array, sin: Array) -> Array:
    """Return a query or key rotated to its position; sin has the sign in it."""
    return np.asarray(head * cos + np.roll(head, len(head) // 2) * sin)


def attend(q: Array, sees: Array, scale: float, lead: int = 0, pairs: bool = False) -> Array:
    """Return the attention of one query [width] over keys and values [2, n, width] of its path.

    With `pairs`, those after the first `lead` are bfloat16 and multiplied as such: the query for
    them and their weights are rounded; the sum of the weights is not.
    """
    keys, values = sees
    near = bfloat16(q) if pairs else q
    scores = np.concatenate((keys[:lead] @ q, keys[lead:] @ near)) * scale
    weights = np.exp(scores - scores.max())
    shares = np.concatenate((weights[:lead], bfloat16(weights[lead:]))) if pairs else weights
    return np.asarray(shares @ values / weights.sum())


def activate(h: Array, silu: bool) -> Array:
    """Return silu(h), or GPT-2's gelu in its tanh form."""
    power = h if silu else np.sqrt(8 / np.pi) * (h + 0.044715 * h**3)
    return np.asarray(h / (1 + np.exp(-power)))


class Row(NamedTuple):
    """A row of a pass: where its keys and values go, and what it attends to."""

    cache: Array  # [layers, 2, shared, capacity, width]
    slot: int
    position: int
    seen: Sequence[
        Sequence[int]
    ]  # by key/value head, the slots it sees, itself included, in the order of its path
    lead: Array | None = (
        None  # keys and values [2, layers, shared, n, width] that stand before all others
    )
    mute: bool = False  # leave keys and values in every layer, made from the state as it is


@dataclass
class Engine:
    """All layers of a model, like `compute.Engine`, on plain matrices and float64 rows."""

    layers: Sequence[Sequence[Biased]]  # for each: norm1, qkv, out, norm2, up, down
    final: Biased
    vocabulary: Biased
    heads: int
    shared: int
    width: int
    rms: bool
    gated: bool
    silu: bool
    half: bool
    eps: float
    scale: float
    cos: Array | None = None  # [positions, width]; None: positions are not turned
    sin: Array | None = None
    head_norms: Sequence[tuple[Array, Array]] | None = None  # gains [width] of queries and of keys
    rounds: bool = False  # round rows, queries and weights of values to bfloat16, as avx512bf16

    def multiply(self, matrix: Biased, row: Array) -> Array:
        return product(matrix[0], bfloat16(row) if self.rounds else row, matrix[1])

    def norm(self, x: Array, norm: Biased) -> Array:
        """Return the LayerNorm or RMSNorm of x."""
        x = x if self.rms else x - x.mean()
        y: Array = x / np.sqrt((x * x).mean() + self.eps) * norm[0]
        return y if norm[1] is None else y + norm[1]

    def run(self, x: Array, first: int, last: int, row: Row) -> Array:
        """Run sublayers first..last-1 over a row in state x [d]; write its keys and values."""
        for sublayer in range(first, last):
            norm1, qkv, out, norm2, up, down = self.layers[sublayer // 2]
            if sublayer % 2 == 0:
                mixed = self.mix(self.multiply(qkv, self.norm(x, norm1)), sublayer // 2, row)
                x = x if row.mute else x + self.multiply(out, mixed)
            elif not row.mute:
                h = self.multiply(up, self.norm(x, norm2))
                gate, more = np.split(h, 2) if self.gated else (h, 1)
                x = x + self.multiply(down, activate(gate, self.silu) * more)
        return x

    def mix(self, qkv: Array, layer: int, row: Row) -> Array:
        """Return the attention of a row, all heads [heads * width]; write its keys and values."""
        parts = qkv.reshape(-1, self.width)
        turned, plain = parts[: -self.shared], parts[-self.shared :]
        if self.head_norms is not None:
            q_gain, k_gain = self.head_norms[layer]
            gains = [q_gain] * self.heads + [k_gain] * self.shared
            turned = np.stack([self.norm(h, (g, None)) for h, g in zip(turned, gains, strict=True)])
        if self.cos is not None and self.sin is not None:
            turned = np.stack(
                [turn(head, self.cos[row.position], self.sin[row.position]) for head in turned]
            )
        for kind, new in enumerate((turned[self.heads :], plain)):
            row.cache[layer, kind, :, row.slot] = bfloat16(new) if self.half else new
        mixed = []
        for head in range(self.heads):
            group = head // (self.heads // self.shared)
            sees = row.cache[layer, :, group][:, list(row.seen[group])]  # [2, n, width]
            lead = 0 if row.lead is None else row.lead.shape[3]
            if row.lead is not None:
                sees = np.concatenate((row.lead[:, layer, group], sees), axis=1)
            mixed.append(attend(turned[head], sees, self.scale, lead, self.half and self.rounds))
        return np.concatenate(mixed)

    def head(self, row: Array) -> Array:
        """Return the logits [V] of a row [d]: final norm, then the product with the vocabulary."""
        return self.multiply(self.vocabulary, self.norm(row, self.final))
