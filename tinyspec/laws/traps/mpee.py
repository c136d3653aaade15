"""MPEE (Kong et al. 2022): fewer layers and fewer tokens, and the others' states are not lost."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyspec.early_exit import mpee
from tinyspec.early_exit.mpee import MpeeClassifier, classify_text
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.lm.config import Config

BOTH = "a text leaves by layers and by tokens, as it is written down"
WHOLE = "at rho = 1 and tau = 1 every layer runs over every token"
FUSED = "fusing equal states returns them, and the memory's sum stays"
OPERATIONS = "the operations are those of torch's count"

CLASSES, DEPTH, WITHIN = 3, 4, 1e-9


def small_classifier(seed: int, scale: float = 1.0, **more: Any) -> MpeeClassifier:
    """Return a random classifier in float64, with classifiers of this scale."""
    config = Config(9, 8, DEPTH, 2, 1, 4, 12, 16, positions="learned")
    made = MpeeClassifier.create(config, CLASSES, seed, **more)
    for name, weight in made.weights.items():
        made.weights[name] = weight.double() * (scale if "exit" in name else 1.0)
        if "norm" not in name and name != "class":
            made.weights[name] *= 3.0  # of every layer and of every position something must show
    return made


def plain_parts(model: MpeeClassifier) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a layer and a classifier of the model in numpy, as `classify_text` takes them."""
    c, w = model.config, {name: weight.numpy() for name, weight in model.weights.items()}

    def normalize(x: Any, name: str) -> Any:
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + c.norm_eps)
        return x / size * w[f"{name}.weight"]

    def run_layer(layer: int, x: Any) -> tuple[Any, Any]:
        fused = normalize(x, f"{layer}.norm1") @ w[f"{layer}.qkv.weight"].T
        heads = fused.reshape(len(x), -1, c.head_dim)
        mixed, seen = [], []
        for head in range(c.n_heads):
            shared = c.n_heads + head // (c.n_heads // c.n_kv_heads)
            scores = heads[:, head] @ heads[:, shared].T / np.sqrt(c.head_dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            mixed.append(weights @ heads[:, shared + c.n_kv_heads])
            seen.append(weights[0])
        x = x + np.concatenate(mixed, axis=1) @ w[f"{layer}.out.weight"].T
        gate, up = np.split(normalize(x, f"{layer}.norm2") @ w[f"{layer}.up.weight"].T, 2, axis=1)
        return x + gate / (1 + np.exp(-gate)) * up @ w[f"{layer}.down.weight"].T, np.mean(seen, 0)

    def classify(layer: int, state: Any, memory: Any) -> tuple[Any, Any]:
        memory = np.zeros(c.d_model) if memory is None else memory
        both = np.concatenate((normalize(state, "norm"), memory))
        gate = 1 / (1 + np.exp(-w["gate.weight"] @ both))
        memory = gate * memory + (1 - gate) * np.tanh(w["update.weight"] @ both)
        logits = w[f"{layer}.exit.weight"] @ memory
        return np.exp(logits) / np.exp(logits).sum(), memory

    return run_layer, classify


@collect_evidence(BOTH)
def exits_as_written(make: Callable[..., MpeeClassifier]) -> Iterator[int]:
    """Check classes and layers against `classify_text` on lists, by parts of their own."""
    for seed, rho, tau in product(range(4), (0.3, 0.6, 1.0), (0.4, 0.6, 1.0)):
        model, ids = (
            make(seed),
            torch.randint(9, (10,), generator=torch.Generator().manual_seed(seed)),
        )
        rows = torch.cat((model.weights["class"][None], model.weights["embed"][ids]))
        states = (rows + model.weights["positions"][:11]).numpy()
        expected, layers = classify_text(states, *plain_parts(model), DEPTH, rho, tau, model.beta)
        got, n_run = model.classify(ids, rho, tau)
        case = {"network": seed, "rho": rho, "tau": tau}
        expect_equal(BOTH, layers, n_run, **case, counted="layers")
        if np.abs(got.numpy() - expected).max() > WITHIN:
            accuse(BOTH, expected.tolist(), got.tolist(), **case)
        yield 1


@collect_evidence(WHOLE)
def neutral_runs_everything(make: Callable[..., MpeeClassifier]) -> Iterator[int]:
    """Check with classifiers that are so sure that their greatest probability is 1.0."""
    for seed, scale in product(range(3), (1.0, 1e6)):
        model, ids = make(seed, scale), torch.arange(8)
        *_, last = model.layer_logits(ids[None])
        got, n_run = model.classify(ids, 1.0, 1.0)
        expect_equal(WHOLE, DEPTH, n_run, network=seed, scale=scale, counted="layers")
        expect_equal(WHOLE, last[0].softmax(dim=0).tolist(), got.tolist(), network=seed)
        yield 1


@collect_evidence(FUSED)
def fusion_loses_nothing(fuse: Callable[..., Any]) -> Iterator[int]:
    """Check equal states, the memory's sum, and order and number of those that go on."""
    generator = torch.Generator().manual_seed(0)
    for n, rho in product((1, 2, 3, 9), (0.0, 0.25, 0.5, 0.9, 1.0)):
        attn = torch.rand((2, n), generator=generator, dtype=torch.float64)
        places = torch.arange(n, dtype=torch.float64).expand(2, n)
        case: dict[str, Any] = {"tokens": n, "rho": rho}
        same, total = fuse(torch.ones(2, n, 3, dtype=torch.float64), attn, rho)
        if (same - 1).abs().max() > WITHIN:
            accuse(FUSED, 1.0, same.tolist(), **case, compared="equal states")
        if (total.sum(1) - attn.sum(1)).abs().max() > WITHIN:
            accuse(FUSED, attn.sum(1).tolist(), total.sum(1).tolist(), **case, compared="memory")
        kept, _ = fuse(places[..., None], attn, rho)
        expect_equal(
            FUSED, mpee.count_tokens(n, rho, 2)[1], kept.shape[1], **case, counted="tokens"
        )
        for row, memory in zip(kept[..., 0], attn, strict=True):
            n_best = int(np.ceil(rho * (n - 1)))
            best = sorted(sorted(range(1, n), key=lambda at: -float(memory[at]))[:n_best])
            expect_equal(FUSED, [0, *best], [int(place) for place in row[: n_best + 1]], **case)
        yield 1


@collect_evidence(OPERATIONS)
def operations_are_counted(count: Callable[..., int]) -> Iterator[int]:
    """Check the formula against the products that torch carries out."""
    for rho, tau in product((0.4, 0.75, 1.0), (0.5, 1.0)):
        model, ids = small_classifier(1), torch.arange(8)
        with FlopCounterMode(display=False) as counter:
            _, n_run = model.classify(ids, rho, tau)
        tokens = mpee.count_tokens(9, rho, DEPTH)[:n_run]
        got = count(model.config, CLASSES, tokens)
        expect_equal(OPERATIONS, counter.get_total_flops(), got, rho=rho, tau=tau, tokens=tokens)
        yield 1


TRAPS = [
    Trap(BOTH, exits_as_written, lambda: small_classifier),
    Trap(WHOLE, neutral_runs_everything, lambda: small_classifier),
    Trap(FUSED, fusion_loses_nothing, lambda: mpee.fuse_tokens),
    Trap(OPERATIONS, operations_are_counted, lambda: mpee.count_flops),
]

_mpee = partial(Toy, technique="mpee")
MEMORY = "attn = self.beta * attn + (1 - self.beta) * seen[0]"
LEAVES = "if probs.max() > tau:"

TOYS = [
    _mpee("every layer runs", LEAVES, "if False:", MpeeClassifier.classify, law=BOTH),
    _mpee("every token runs", "if n_kept >= n - 1:", "if True:", mpee.fuse_tokens, law=BOTH),
    _mpee(
        "the attention of the layer alone",
        MEMORY,
        "attn = seen[0]",
        MpeeClassifier.layer_logits,
        law=BOTH,
    ),
    _mpee(
        "a classifier that reads its own layer alone",
        "memory if self.is_recycled else 0 * memory",
        "0 * memory",
        MpeeClassifier.update_memory,
        law=BOTH,
    ),
    _mpee(
        "a sure text leaves at tau = 1",
        LEAVES,
        LEAVES.replace(">", ">="),
        MpeeClassifier.classify,
        law=WHOLE,
    ),
    _mpee("tokens that are dropped", "if not is_fused:", "if True:", mpee.fuse_tokens, law=FUSED),
    _mpee(
        "attention that costs as little as a token does",
        "4 * n * n * q",
        "4 * n * q",
        mpee.count_flops,
        law=OPERATIONS,
    ),
]
