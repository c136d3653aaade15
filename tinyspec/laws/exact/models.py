"""Small models that laws run on, and the plain forward pass that judges them.

`small_network` is a random float64 transformer, so small that all outcomes of a decoder on it can
be walked. `run_dense` is the transformer once more, as plainly as it can be written: a whole text
in numpy float64, without cache, tree or rows. It shares with the code under test only the weights,
the frequencies of the rotations and the names of things. `needle_model` answers from one distant
position, and `Reciter` recites a given text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.exact.tables import TableModel
from tinyspec.lm.config import Config
from tinyspec.lm.forward import Plan
from tinyspec.lm.heads import RANKS, TOKEN_MAP, add_head
from tinyspec.lm.model import Model
from tinyspec.lm.ops import rotary_frequencies
from tinyspec.lm.transformer import Transformer
from tinyspec.technique import Card, Request
from tinyspec.tree import TokenTree

NETWORK_TOLERANCE = 1e-10


@lru_cache(maxsize=64)
def small_network(seed: int, vocabulary: int = 4, layers: int = 3) -> Model:
    """Return a random transformer of width 8 in which every layer and position matters.

    Its gains are random and its weights large.
    """
    config = Config(
        vocab_size=vocabulary, d_model=8, n_layers=layers, n_heads=2, n_kv_heads=1, head_dim=4,
        d_ff=12, max_positions=64,
    )  # fmt: skip
    model = Model.random(config, seed=seed, dtype=torch.float64, scale=0.6)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.weights.items():
        if "norm" in name:
            weight += 0.4 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    model.name = f"network {seed}"
    return model


def add_random_head(model: Model, card: Card, seed: int) -> Model:
    """Return the model as a technique needs it: with a random head, or with repeated layers.

    The matrices of a head are so large that every input shows. Its ranks fall as measured ones do.
    """
    if card.cyclic:
        return repeat_layers(model, model.config.n_layers)
    if card.tuned is not None and card.tuned.tokens:
        return card.tuned.add_tokens(model)
    if card.trained is None:
        return model
    settings = card.trained.small
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, torch.Tensor]()
    for name, shape in card.trained.all_shapes(model.config, settings).items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = 0.6 * drawn * min(1.0, 8 / model.config.d_model) ** 0.5  # 8: small networks
        if name == RANKS:
            weights[name] = (0.5 ** torch.arange(1, 1 + shape[1])).double().expand(shape)
        elif name == TOKEN_MAP:
            others = [t for t in range(model.config.vocab_size) if t != 1]  # rows are not ids
            weights[name] = torch.tensor(others[: settings.draft_vocab])
    return add_head(model, card.head_method, weights, vars(settings))


def repeat_layers(model: Model, repeat: int) -> Model:
    """Return a model that runs its first layers `repeat` times, with as many layers as before."""
    extra = {**model.config.extra, "repeat": repeat}
    config = replace(model.config, extra=extra)
    weights = {name: model.weights[name] for name in config.shapes()}
    return Model(config, weights, model._tokenizer, name=f"{model.name}, cyclic")


def likeliest_token(row: Sequence[Any]) -> int:
    """Return the likeliest token; among equals the lowest id."""
    return max(range(len(row)), key=lambda token: (row[token], -token))


Array = NDArray[np.float64]


class DensePass(NamedTuple):
    """The results of one pass over n tokens: logits [n, V], keys and values [n, KV, hd] by layer.

    Keys are rotated where the model rotates them, and None where the plan skips the attention.
    """

    logits: Array
    keys: list[Array | None]
    values: list[Array | None]


Leaves = Callable[[int, Array, Array], NDArray[np.bool_]]
"""(layers done, the states after them [n, d], the states before the last [n, d]) -> [n] which
tokens leave here.
"""


def run_dense(
    model: Transformer,
    text: Sequence[int],
    plan: Plan | None = None,
    leaves: Leaves | None = None,
    runs: NDArray[np.bool_] | None = None,
) -> DensePass:
    """Run one causal pass of the model over a text.

    `plan` may stop early or skip sublayers; every earlier position is visible.

    A token that leaves keeps its state from there on: keys and values of the layers above are made
    from it. With `runs` [L, n] a token keeps its state in each layer that it does not run.
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
        entered, own = x, layer % (c.n_layers // c.repeat)  # the layer that has its weights
        if 2 * layer not in plan.skip:
            normed = _dense_norm(model, w, f"{own}.norm1", x)
            fused = _dense_linear(w, f"{own}.qkv", normed).reshape(n, -1, c.head_dim)
            heads = [c.n_heads, c.n_heads + c.n_kv_heads]
            q, k, v = np.split(fused, heads, axis=1)  # each [n, heads, hd]
            if c.qk_norm:
                q = _dense_norm(model, w, f"{own}.q_norm", q)
                k = _dense_norm(model, w, f"{own}.k_norm", k)
            if c.positions == "rope":
                q, k = _rotate(model, q), _rotate(model, k)
            keys[layer], values[layer] = k, v
            x = x + _dense_linear(w, f"{own}.out", _dense_attention(q, k, v))
        if 2 * layer + 1 not in plan.skip:
            h = _dense_linear(w, f"{own}.up", _dense_norm(model, w, f"{own}.norm2", x))
            act = _dense_silu if c.activation == "silu" else _dense_gelu
            h = act(h[:, : c.d_ff]) * h[:, c.d_ff :] if c.gated else act(h)
            x = x + _dense_linear(w, f"{own}.down", h)
        x = np.where(left[:, None], entered, x)
        x = x if runs is None else np.where(runs[layer][:, None], x, entered)
        if leaves is not None:
            left = left | leaves(layer + 1, x, entered)
    return DensePass(logits_of_states(model, x), keys, values)


def logits_of_states(model: Transformer, x: Array) -> Array:
    """Return the logits [n, V] of states [n, d]."""
    w = _dense_weights(model)
    return _dense_norm(model, w, "norm", x) @ w["embed" if model.config.tied else "head"].T


_weight_cache: WeakKeyDictionary[Transformer, dict[str, Array]] = WeakKeyDictionary()


def _dense_weights(model: Transformer) -> dict[str, Array]:
    """Return the weights in float64, converted once for as long as the model lives."""
    if model not in _weight_cache:
        _weight_cache[model] = {
            name: weight.detach().double().cpu().numpy() for name, weight in model.weights.items()
        }
    return _weight_cache[model]


def _dense_linear(w: dict[str, Array], name: str, x: Array) -> Array:
    y: Array = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _dense_norm(model: Transformer, w: dict[str, Array], name: str, x: Array) -> Array:
    layered = model.config.norm == "layer"
    if layered:
        x = x - x.mean(axis=1, keepdims=True)
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + model.config.norm_eps)
    y: Array = x / scale * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if layered else y


def _rotate(model: Transformer, x: Array) -> Array:
    """Rotate row m of x [n, heads, hd] by m times the frequencies.

    The pair (i, i + hd/2) is one complex number.
    """
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None, None] * rotary_frequencies(model.config).double().numpy()
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate((turned.real, turned.imag), axis=2)


def _dense_attention(q: Array, k: Array, v: Array) -> Array:
    """Return the causal attention of every head: [n, H hd]."""
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


FILLER, QUESTION = 0, 1
NEEDLES = (2, 3, 4, 5)
ANSWERS = (6, 7, 8, 9)
WHICH, ATTENDED = 4, 8  # first of the four coordinates: which needle it was, what attention brought


def needle_model(name: str = "needle") -> Model:
    """Return a model by hand whose answer depends on one distant token.

    One layer, one head, V = 10, d = 16, float64; positions do not matter. A needle names one of
    four answers; a question attends to the needle, wherever it stands, and answers; after an answer
    the question comes again. A decoder that does not see the needle does not know the answer.
    """
    config = Config(
        vocab_size=10, d_model=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4, d_ff=2,
        max_positions=256, positions="learned", tied=False,
    )  # fmt: skip
    weights = {
        key: torch.zeros(shape, dtype=torch.float64) for key, shape in config.shapes().items()
    }
    for key, weight in weights.items():
        if "norm" in key:
            weight.fill_(1.0)
    embed, qkv, head = weights["embed"], weights["0.qkv.weight"], weights["head"]
    embed[FILLER, 0] = embed[QUESTION, 1] = 1.0
    qkv[0, 1] = 20.0  # a question asks ...
    qkv[4, 2] = 1.0  # ... for a needle ...
    for i, (needle, answer) in enumerate(zip(NEEDLES, ANSWERS, strict=True)):
        embed[needle, [2, WHICH + i]] = 1.0
        embed[answer, 3] = 1.0
        qkv[8 + i, WHICH + i] = 1.0  # ... and reads which it was
        weights["0.out.weight"][ATTENDED + i, i] = 4.0
        head[answer, ATTENDED + i] = 4.0
    head[FILLER, 0] = head[QUESTION, 3] = 40.0  # more than a little of everything that is seen
    return Model(config, weights, name=name)


def make_haystack(which: int, length: int, at: int) -> list[int]:
    """Return a prompt of `length` tokens with a needle at one position and the question at its
    end."""
    text = [FILLER] * (length - 1) + [QUESTION]
    text[at] = NEEDLES[which]
    return text


class Reciter(TableModel):
    """A target that recites one text: the certain next token after each prefix."""

    def __init__(self, poem: Sequence[int], vocabulary: int | None = None):
        vocabulary = max(poem) + 1 if vocabulary is None else vocabulary
        super().__init__(vocabulary=vocabulary, rows=self._next, positions=max(64, len(poem)))
        self.poem = poem

    def _next(self, text: Sequence[int]) -> list[int]:
        token = self.poem[len(text)] if len(text) < len(self.poem) else 0
        return [int(x == token) for x in range(self.vocabulary)]


def recite_until(
    build: Callable[..., Decoder],
    poem: list[int],
    wanted: int,
    references: Sequence[Any],
    **knobs: Any,
) -> Decoder:
    """Run a decoder until it has made `wanted` tokens of a text that begins with the prompt."""
    stop, sampling = StoppingCriteria(max_new_tokens=wanted), SamplingParams(temperature=0.0)
    request = Request(Reciter(poem).session(), (), sampling, stop, references=references)
    decoder = build(request, **knobs)
    decoder.extend(poem[:2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder


class FunctionDrafter(BaseDrafter):
    """Proposes the tree that a function makes of the text and the depth allowed."""

    def __init__(self, draft: Callable[[Sequence[int], int], TokenTree]):
        self.draft = draft

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return self.draft(context, max_draft_depth)


class CountedText(list[int]):
    """A text that counts how often it is read from the beginning."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += 1
        return super().__iter__()
