"""MPEE: a classifier that leaves early in two directions: fewer layers, and fewer tokens per layer.

Paper: Kong, Wang, Yu, Zhang, COLING 2022, "Accelerating Inference for Pretrained Language Models by
Unified Multi-Perspective Early Exiting". There is no public code. We could read the abstract only:
it names the parts below in words. Every formula here is ours.

Idea. An encoder classifies a text. *Vertically*, each layer has a classifier, and the text leaves
at the first one that is sure. A classifier reads a memory that it hands on to the next one
(*recycled classifier memory*), and learns from the last one (*weighted self-distillation*).

*Horizontally*, tokens that tell little are fused into one after each layer (*truncation by weighted
fusion*). What a token tells is the attention that the class token paid to it, in this layer and in
those before (*recycled class-attention memory*). Fewer layers run, over fewer tokens.

    g_l = sigmoid(G [c_l; m_(l-1)])                 c_l: normed state of the class token
    m_l = g_l m_(l-1) + (1 - g_l) tanh(U [c_l; m_(l-1)]),    m_0 = 0
    p_l = softmax(C_l m_l)                          the text leaves if max p_l > tau
    a_l = beta a_(l-1) + (1 - beta) attention_l     of the class token, the mean of the heads
    fused token = sum of softmax(a_l) x_l           over all but the ceil(rho (n - 1)) greatest a_l

The class token and the others go on in their order; the fused token stands after them, and its a_l
is the sum of what it fuses.

Training, on labelled texts; rho is drawn anew in each step, and KL aims at the last classifier:

    loss = CE_L + sum over l < L of w_l ((1 - alpha) CE_l + alpha T^2 KL(p_L || p_l))
    w_l  = l / (1 + ... + (L - 1))                  KL: of the distributions at temperature T

Guarantee: NONE of the other methods' kind. It writes no text, so it is listed as an analysis, and
has an experiment of its own, `tinyspec bench mpee`. At rho = 1 and tau = 1 it is the whole encoder,
bit for bit.
Pitfall: one direction alone; tokens that are dropped instead of fused; the attention of the current
layer alone; a confidence of 1.0 that leaves at tau = 1.
Ablation: no memory, or no distillation: either has fewer right answers (tutorials/results/mpee.md).
In a test the memory joins what two layers tell of the class.
Tests: tests/early_exit/test_mpee.py (`classify_text` against the code that runs; the fusion; the
operations against torch's own count; the loss).
Left out: the paper's tasks and encoder, GLUE and BERT. The experiment asks who wrote a passage, and
trains an encoder of a few layers for that.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.technique import Guarantee, Request, technique

BETA = 0.5  # share of the class-attention memory that the layer before decides
ALPHA = 0.5  # weight of the distillation in the loss of an early classifier
TEMPERATURE = 2.0  # of the distributions that are distilled


def classify_text(
    states: Any,
    run_layer: Callable[[int, Any], tuple[Any, Any]],
    classify: Callable[[int, Any, Any], tuple[Any, Any]],
    depth: int,
    rho: float,
    tau: float,
    beta: float = BETA,
) -> tuple[Any, int]:
    """Return the distribution over the classes, and how many layers were run.

    states     [n, d] below the first layer; the class token is the first
    run_layer  (layer, states) -> states, and the class token's attention to each [n]
    classify   (layer, state of the class token, memory) -> distribution, and the new memory

    The code that runs is `MpeeClassifier`, on batches. A test compares the two.
    """
    attn, memory = np.zeros(len(states)), None
    for layer in range(depth):
        states, attention = run_layer(layer, states)
        probs, memory = classify(layer, states[0], memory)
        if max(probs) > tau:
            break
        attn = beta * attn + (1 - beta) * attention
        n = len(states)
        ranked = sorted(range(1, n), key=lambda at: -attn[at])
        n_kept = math.ceil(rho * (n - 1))
        kept, others = [0, *sorted(ranked[:n_kept])], ranked[n_kept:]
        if others:
            weights = np.exp(attn[others]) / np.exp(attn[others]).sum()
            states = np.stack([*states[kept], weights @ states[others]])
            attn = np.array([*attn[kept], attn[others].sum()])
    return probs, layer + 1


# ------------------------------ horizontally: fewer tokens


def fuse_tokens(
    x: Tensor, attn: Tensor, rho: float, is_fused: bool = True
) -> tuple[Tensor, Tensor]:
    """Return states and memory [B, n'] of the tokens that go on.

    x         [B, n, d] states; the class token is the first
    attn      [B, n] class-attention memory
    is_fused  whether the other tokens become one; if not, they are dropped
    """
    n = x.shape[1]
    n_kept = math.ceil(rho * (n - 1))
    if n_kept >= n - 1:
        return x, attn
    order = attn[:, 1:].argsort(dim=1, descending=True, stable=True) + 1
    first = torch.zeros_like(order[:, :1])
    kept = torch.cat((first, order[:, :n_kept].sort(dim=1).values), dim=1)
    goes_on, others = gather_tokens(x, kept), order[:, n_kept:]
    if not is_fused:
        return goes_on, attn.gather(1, kept)
    weights = attn.gather(1, others).softmax(dim=1)
    fused = (weights[..., None] * gather_tokens(x, others)).sum(dim=1, keepdim=True)
    total = attn.gather(1, others).sum(dim=1, keepdim=True)
    return torch.cat((goes_on, fused), dim=1), torch.cat((attn.gather(1, kept), total), dim=1)


def gather_tokens(x: Tensor, at: Tensor) -> Tensor:
    """Return the states of some tokens: x [B, n, d] at [B, k] -> [B, k, d]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def count_tokens(n: int, rho: float, depth: int) -> list[int]:
    """Return how many tokens each layer runs, of n with the class token.

    >>> count_tokens(9, 0.5, 4), count_tokens(9, 1.0, 2), count_tokens(2, 0.5, 3)
    ([9, 6, 5, 4], [9, 9], [2, 2, 2])
    """
    counts = [n]
    while len(counts) < depth:
        n_kept = math.ceil(rho * (counts[-1] - 1))
        counts.append(min(n_kept + 2, counts[-1]))
    return counts


def count_flops(config: Config, classes: int, tokens: Sequence[int]) -> int:
    """Return the FLOPs of all matrix products: multiplications and additions.

    tokens  of each layer that is run
    """
    d, q = config.d_model, config.q_dim
    mlp = (3 if config.gated else 2) * config.d_ff
    per_token = 2 * d * (q + 2 * config.kv_dim + q + mlp)
    per_classifier = 2 * (2 * (2 * d) * d + d * classes)
    return sum(n * per_token + 4 * n * n * q + per_classifier for n in tokens)


# ------------------------------ the encoder and its classifiers


class MpeeClassifier:
    """An encoder whose layers each have a classifier.

    config   of the layers, with learned positions; one of them is the class token's
    weights  of the layers, as `Config.shapes` names them, and of the classifiers
    beta     share of the memory in what a token tells; 0: the attention of the layer alone
    """

    def __init__(
        self,
        config: Config,
        weights: dict[str, Tensor],
        *,
        beta: float = BETA,
        is_fused: bool = True,
        is_recycled: bool = True,
    ):
        self.config, self.weights, self.beta = config, weights, beta
        self.is_fused, self.is_recycled = is_fused, is_recycled

    @classmethod
    def create(cls, config: Config, classes: int, seed: int, **more: Any) -> "MpeeClassifier":
        """Return a classifier with random weights."""
        generator, d = torch.Generator().manual_seed(seed), config.d_model
        weights = dict(Model.random(config, seed=seed).weights)
        shapes = {"class": (d,), "update.weight": (d, 2 * d), "gate.weight": (d, 2 * d)}
        shapes |= {f"{layer}.exit.weight": (classes, d) for layer in range(config.n_layers)}
        for name, shape in shapes.items():
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return cls(config, weights, **more)

    def layer_logits(self, ids: Tensor, rho: float = 1.0) -> Iterator[Tensor]:
        """Yield the logits [B, classes] after each layer of texts [B, n - 1].

        A layer runs only when its logits are asked for, so to stop the loop is an early exit.
        """
        w, blocks = self.weights, Blocks(self.config, self.weights)
        x = F.embedding(ids, w["embed"])
        x = torch.cat((w["class"].expand(len(x), 1, -1), x), dim=1)
        x = x + w["positions"][: x.shape[1]]
        attn, memory = torch.zeros_like(x[..., 0]), torch.zeros_like(x[:, 0])
        for layer, block in enumerate(blocks.layers):
            seen = list[Tensor]()  # by the class token

            def attend_all(q: Tensor, k: Tensor, v: Tensor, seen: list[Tensor] = seen) -> Tensor:
                groups = self.config.n_heads // self.config.n_kv_heads
                k, v = (part.repeat_interleave(groups, dim=2).transpose(1, 2) for part in (k, v))
                scores = q.transpose(1, 2) @ k.transpose(2, 3) / self.config.head_dim**0.5
                attention = scores.softmax(dim=-1)  # [B, H, n, n]
                seen.append(attention[:, :, 0].mean(dim=1))
                mixed: Tensor = attention @ v
                return mixed.transpose(1, 2).flatten(2)

            x = blocks.add_attention(block, x, blocks.rotary, attend_all)
            x = blocks.add_mlp(block, x)
            memory = self.update_memory(blocks.apply_final_norm(x[:, 0]), memory)
            yield F.linear(memory, w[f"{layer}.exit.weight"])
            attn = self.beta * attn + (1 - self.beta) * seen[0]
            x, attn = fuse_tokens(x, attn, rho, self.is_fused)

    def update_memory(self, state: Tensor, memory: Tensor) -> Tensor:
        """Return the new memory [B, d], which the classifier of this layer reads."""
        both = torch.cat((state, memory if self.is_recycled else 0 * memory), dim=1)
        gate = F.linear(both, self.weights["gate.weight"]).sigmoid()
        update = F.linear(both, self.weights["update.weight"]).tanh()
        return gate * both[:, self.config.d_model :] + (1 - gate) * update

    @torch.no_grad()
    def classify(self, ids: Tensor, rho: float, tau: float) -> tuple[Tensor, int]:
        """Return the distribution over the classes of one text [n - 1], and the layers run."""
        n_run = 0
        for logits in self.layer_logits(ids[None], rho):
            probs, n_run = logits[0].softmax(dim=0), n_run + 1
            if probs.max() > tau:
                break
        return probs, n_run


def mpee_loss(logits: Sequence[Tensor], labels: Tensor, alpha: float = ALPHA) -> Tensor:
    """Return the loss of all classifiers, a scalar.

    logits  [B, classes] after each layer
    labels  [B]
    """
    last = F.cross_entropy(logits[-1], labels)
    teacher = (logits[-1].detach() / TEMPERATURE).log_softmax(dim=1)
    total = sum(range(1, len(logits)))
    for layer, early in enumerate(logits[:-1], 1):
        student = (early / TEMPERATURE).log_softmax(dim=1)
        distance = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        own = (1 - alpha) * F.cross_entropy(early, labels) + alpha * TEMPERATURE**2 * distance
        last = last + layer / total * own
    return last


# ------------------------------ the card


@technique(
    title="MPEE: multi-perspective early exiting",
    summary="a classifier exits layers and fuses tokens",
    paper="Kong et al. 2022, COLING",
    family="early exit",
    guarantee=Guarantee.NONE,
    kind="analysis",
)
def mpee(request: Request) -> Decoder:
    """Raise TinyspecError: a classifier writes no text."""
    raise TinyspecError(
        "mpee decodes nothing: it classifies texts with fewer layers and tokens; run: "
        "tinyspec bench mpee"
    )
