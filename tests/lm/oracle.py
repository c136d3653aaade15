"""A transformer written a second time, one token, layer and head at a time, in numpy float64.

It shares nothing with the code under test but the weights and the frequencies of the rotations, so
that it can be the judge of caches, trees, views and batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tinyspec.lm.forward import Plan
from tinyspec.lm.model import Model
from tinyspec.lm.ops import rotary_frequencies


@dataclass
class Token:
    """A token that was run: its position, its keys and values by layer, and what it showed."""

    position: int
    keys: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> [KV, hd]
    values: dict[int, np.ndarray] = field(default_factory=dict)
    states: list[np.ndarray] = field(default_factory=list)  # after 0, 1, ... layers
    top: np.ndarray | None = None  # what the head reads
    logits: np.ndarray | None = None


class Oracle:
    """Runs tokens of one model, each after the list of tokens it may look at."""

    def __init__(self, model: Model):
        self.c = model.config
        self.w = {name: w.double().numpy() for name, w in model.weights.items()}
        self.freq = rotary_frequencies(model.config).double().numpy()

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if self.c.norm == "layer":
            x = x - x.mean()
        y = x / math.sqrt((x * x).mean() + self.c.norm_eps) * self.w[f"{name}.weight"]
        return y + self.w[f"{name}.bias"] if self.c.norm == "layer" else y

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def act(self, x: np.ndarray) -> np.ndarray:
        if self.c.activation == "silu":
            return x / (1 + np.exp(-x))
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        if self.c.positions != "rope":
            return x
        half, angle = len(x) // 2, position * self.freq
        low, high = x[:half], x[half:]
        return np.concatenate(
            (low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle))
        )

    def run(
        self,
        token: int | np.ndarray,
        past: Sequence[Token],
        plan: Plan = Plan(),  # noqa: B008  (frozen)
        prefix: tuple[np.ndarray, np.ndarray] | None = None,
        copy_from: int | None = None,
    ) -> Token:
        """One token (or an embedding of its own) after `past`. With `copy_from`, it leaves after so
        many layers and its state there makes the keys and values of the layers above.
        """
        c = self.c
        position = past[-1].position + 1 if past else 0
        x = self.w["embed"][token].copy() if isinstance(token, int) else token.copy()
        if c.positions == "learned":
            x = x + self.w["positions"][position]
        me = Token(position)
        me.states.append(x)
        last = c.n_layers if plan.last is None else plan.last
        for layer in range(c.n_layers if copy_from is not None else last):
            left = copy_from is not None and layer >= copy_from
            if 2 * layer not in plan.skip:
                fused = self.linear(self.norm(x, f"{layer}.norm1"), f"{layer}.qkv")
                heads = fused.reshape(-1, c.head_dim)
                if c.qk_norm:
                    names = ["q"] * c.n_heads + ["k"] * c.n_kv_heads
                    normed = [
                        h
                        / math.sqrt((h * h).mean() + c.norm_eps)
                        * self.w[f"{layer}.{n}_norm.weight"]
                        for h, n in zip(heads, names, strict=False)
                    ]
                    heads = np.array([*normed, *heads[-c.n_kv_heads :]])
                q = [self.rotate(h, position) for h in heads[: c.n_heads]]
                me.keys[layer] = np.array(
                    [self.rotate(h, position) for h in heads[c.n_heads : -c.n_kv_heads]]
                )
                me.values[layer] = heads[-c.n_kv_heads :]
                if not left:
                    mixed = [
                        self.attend(h, q[h], layer, [*past, me], plan, prefix)
                        for h in range(c.n_heads)
                    ]
                    x = x + self.linear(np.concatenate(mixed), f"{layer}.out")
            if 2 * layer + 1 not in plan.skip and not left:
                h = self.linear(self.norm(x, f"{layer}.norm2"), f"{layer}.up")
                h = self.act(h[: c.d_ff]) * h[c.d_ff :] if c.gated else self.act(h)
                x = x + self.linear(h, f"{layer}.down")
            me.states.append(x)
        me.top = self.norm(x, "norm")
        me.logits = self.w["embed" if c.tied else "head"] @ me.top
        return me

    def attend(
        self,
        head: int,
        q: np.ndarray,
        layer: int,
        seen: Sequence[Token],
        plan: Plan,
        prefix: tuple[np.ndarray, np.ndarray] | None,
    ) -> np.ndarray:
        group = head // (self.c.n_heads // self.c.n_kv_heads)
        keys, values = [], []
        if prefix is not None:
            keys += list(prefix[0][layer, group])
            values += list(prefix[1][layer, group])
        for token in seen:
            if (
                plan.visible is not None
                and token is not seen[-1]
                and token.position < plan.visible.since
            ):
                heads = plan.visible.layers[layer]
                chosen = None if heads is None else heads[group]
                if chosen is not None and token.position not in chosen:
                    continue
            keys.append(token.keys[layer][group])
            values.append(token.values[layer][group])
        scores = np.array([k @ q for k in keys]) / math.sqrt(self.c.head_dim)
        weights = np.exp(scores - scores.max())
        return (weights / weights.sum()) @ np.array(values)

    def text(
        self,
        tokens: Sequence[int],
        plan: Plan = Plan(),  # noqa: B008
        past: Sequence[Token] = (),
    ) -> list[Token]:
        """Tokens one after the other; returns all that were run, `past` included."""
        done = list(past)
        for token in tokens:
            done.append(self.run(token, done, plan))
        return done
