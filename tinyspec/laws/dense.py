"""The transformer once more, as plainly as it can be said: a whole text in numpy float64, no cache,
no tree, no rows.

The judge of sessions. It shares with the code under test nothing but the weights, the frequencies
of the rotations and the names of things.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tinyspec.lm.forward import Plan
from tinyspec.lm.ops import frequencies
from tinyspec.lm.transformer import Model

Array = NDArray[np.float64]


class DensePass(NamedTuple):
    """What one pass over n tokens leaves: logits [n, V]; by layer, keys and values [n, KV, hd]
    (rotated, where that is done), None where the plan does not run the layer's attention."""

    logits: Array
    keys: list[Array | None]
    values: list[Array | None]


Leaves = Callable[[int, Array, Array], NDArray[np.bool_]]
"""(layers done, the states after them [n, d], the states before the last [n, d]) -> [n] which
tokens leave here.
"""


def run_dense(
    model: Model, text: Sequence[int], plan: Plan | None = None, leaves: Leaves | None = None
) -> DensePass:
    """One causal pass of the model over a text. `plan` may stop early or skip sublayers; what is
    visible is everything.

    A token that leaves keeps its state from there on: keys and values of the layers above are made
    from it.
    """
    c, w, plan = model.config, _dense_weights(model), plan or Plan()
    if plan.visible is not None:
        raise ValueError(
            "the dense pass sees everything: it cannot judge a plan that hides positions"
        )
    n, last = len(text), c.n_layers if plan.last is None else plan.last
    x = w["embed"][list(text)]
    if c.positions == "learned":
        x = x + w["positions"][:n]
    keys: list[Array | None] = [None] * c.n_layers
    values: list[Array | None] = [None] * c.n_layers
    left = np.zeros(n, dtype=np.bool_)
    for layer in range(last):
        entered = x
        if 2 * layer not in plan.skip:
            fused = _dense_linear(
                w, f"{layer}.qkv", _dense_norm(model, w, f"{layer}.norm1", x)
            ).reshape(n, -1, c.head_dim)
            q, k, v = np.split(
                fused, [c.n_heads, c.n_heads + c.n_kv_heads], axis=1
            )  # each [n, heads, hd]
            if c.positions == "rope":
                q, k = _rotate(model, q), _rotate(model, k)
            keys[layer], values[layer] = k, v
            x = x + _dense_linear(w, f"{layer}.out", _dense_attention(q, k, v))
        if 2 * layer + 1 not in plan.skip:
            h = _dense_linear(w, f"{layer}.up", _dense_norm(model, w, f"{layer}.norm2", x))
            act = _dense_silu if c.activation == "silu" else _dense_gelu
            h = act(h[:, : c.d_ff]) * h[:, c.d_ff :] if c.gated else act(h)
            x = x + _dense_linear(w, f"{layer}.down", h)
        x = np.where(left[:, None], entered, x)
        if leaves is not None:
            left = left | leaves(layer + 1, x, entered)
    return DensePass(logits_of_states(model, x), keys, values)


def logits_of_states(model: Model, x: Array) -> Array:
    """The logits [n, V] of states [n, d]."""
    w = _dense_weights(model)
    return _dense_norm(model, w, "norm", x) @ w["embed" if model.config.tied else "head"].T


_weight_cache: WeakKeyDictionary[Model, dict[str, Array]] = WeakKeyDictionary()


def _dense_weights(model: Model) -> dict[str, Array]:
    """The weights in float64, converted once for as long as the model lives."""
    if model not in _weight_cache:
        _weight_cache[model] = {
            name: weight.detach().double().cpu().numpy() for name, weight in model.weights.items()
        }
    return _weight_cache[model]


def _dense_linear(w: dict[str, Array], name: str, x: Array) -> Array:
    y: Array = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _dense_norm(model: Model, w: dict[str, Array], name: str, x: Array) -> Array:
    layered = model.config.norm == "layer"
    if layered:
        x = x - x.mean(axis=1, keepdims=True)
    y: Array = (
        x
        / np.sqrt((x * x).mean(axis=1, keepdims=True) + model.config.norm_eps)
        * w[f"{name}.weight"]
    )
    return y + w[f"{name}.bias"] if layered else y


def _rotate(model: Model, x: Array) -> Array:
    """x [n, heads, hd], row m turned by m times the frequencies: the pair (i, i + hd/2) as one
    complex number.
    """
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None, None] * frequencies(model.config).double().numpy()
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag), axis=2)


def _dense_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of every head: [n, H hd]."""
    n, heads, width = q.shape
    group = heads // k.shape[1]
    mixed = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(width)
        scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group])
    return np.concatenate(mixed, axis=1)


def _dense_silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def _dense_gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y
