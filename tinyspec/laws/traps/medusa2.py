"""Medusa-2 (Cai et al. 2024): the model's own loss beside the heads', and the heads first."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.heads import RANKS, head_weights
from tinyspec.speculative.drafting.medusa2 import Medusa2Settings, medusa2_loss
from tinyspec.technique import TrainingBatch, Tuning, find_technique

JOINED = "the loss is L_0 + 0.2 c sum_i 0.8^i CE_i"
ALONE = "the model has no gradient while the heads are trained alone, and one afterwards"

TEXT = (0, 3, 1, 2, 2, 0, 1, 3)

Loss = Any
"""(tuning, batch, generator) -> scalar: what a technique minimises."""


def make_tuning_case(seed: int, progress: float, **settings: Any) -> tuple[Tuning, TrainingBatch]:
    """Return a small model in training with random heads, and a text that it wrote all of.

    Two tokens of each distribution of the original are known.
    """
    model = add_random_head(small_network(seed), find_technique("medusa2"), seed)
    leaves = {name: w.clone().requires_grad_() for name, w in model.weights.items()}
    beside = {
        name: w.clone().requires_grad_()
        for name, w in head_weights(model, "medusa").items()
        if name != RANKS
    }
    made = Medusa2Settings(heads=2, **settings)
    tuning = Tuning(Blocks(model.config, leaves), model, made, beside, progress)
    ids, n = torch.tensor([TEXT]), len(TEXT)
    top_ids = torch.tensor([[[(i + seed) % 4, (i + seed + 1) % 4] for i in range(n)]])
    top_probs = torch.tensor([[[0.3 + i / 20, 0.2] for i in range(n)]], dtype=torch.float64)
    is_answer = torch.ones_like(ids, dtype=torch.bool)
    is_answer[0, -1] = False
    return tuning, TrainingBatch(ids, is_answer, torch.empty(1, 0, n, 8), top_ids, top_probs)


def rows_of_head(tuning: Tuning, head: int) -> Tensor:
    """Return log q [T, V] of a head after every part of the text: W2 (h + SiLU(W1 h + b))."""
    h = tuning.blocks.final_states(torch.tensor([TEXT]))[0]
    w, b = (tuning.beside[f"blocks.{head}.layers.0.{part}"] for part in ("weight", "bias"))
    x = h @ w.T + b
    z = h + x / (1 + torch.exp(-x))
    return (z @ tuning.beside[f"lm_heads.{head}.weight"].T).log_softmax(-1)


def loss_by_hand(tuning: Tuning, batch: TrainingBatch, c: float) -> float:
    """Return the loss of a text by its formula, token by token."""
    settings, n = tuning.settings, len(TEXT)
    of_model = tuning.blocks.training_logits(torch.tensor([TEXT]))[0].log_softmax(-1)
    own = []
    for t in range(n - 1):
        if settings.self_distill:
            pairs = [
                (float(p), float(of_model[t, token].exp()))
                for token, p in zip(batch.top_ids[0, t], batch.top_probs[0, t], strict=True)
            ]
            pairs.append((1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs)))
            own.append(sum(p * math.log(p / q) for p, q in pairs))
        else:
            own.append(-float(of_model[t, TEXT[t + 1]]))
    of_heads = 0.0
    for i in (1, 2):
        rows = rows_of_head(tuning, i - 1)
        losses = [-float(rows[t, TEXT[t + 1 + i]]) for t in range(n - 1 - i)]
        of_heads += 0.8**i * sum(losses) / len(losses)
    weight: float = settings.heads_weight * c
    return sum(own) / len(own) + weight * of_heads


@collect_evidence(JOINED)
def loss_is_the_joint_loss(loss: Loss) -> Iterator[int]:
    """Check the loss of a text against its formula, for both L_0 and all schedules."""
    schedules = {"constant": 1.0, "linear": 0.4, "sine": math.sin(0.2 * math.pi)}
    for seed, (schedule, c), distill in product(range(2), schedules.items(), (True, False)):
        settings: dict[str, Any] = {
            "schedule": schedule,
            "self_distill": distill,
            "heads_first": 0.3,
        }
        tuning, batch = make_tuning_case(seed, 0.4, **settings)
        with torch.no_grad():
            expected = loss_by_hand(tuning, batch, c)
            got = float(loss(tuning, batch, torch.Generator()))
        if not math.isclose(got, expected, rel_tol=1e-3):  # the loss is float32
            accuse(JOINED, expected, got, network=seed, text=TEXT, **settings)
        yield 1


@collect_evidence(ALONE)
def heads_come_first(loss: Loss) -> Iterator[int]:
    """Check which tensors have a gradient before and after the heads' share of the training."""
    for seed, progress in product(range(2), (0.0, 0.29, 0.3, 1.0)):
        tuning, batch = make_tuning_case(seed, progress, heads_first=0.3)
        loss(tuning, batch, torch.Generator()).backward()
        moved = {
            "model": any(w.grad is not None for w in tuning.blocks.weights.values()),
            "heads": all(w.grad is not None for w in tuning.beside.values()),
        }
        expected = {"model": progress >= 0.3, "heads": True}
        expect_equal(ALONE, expected, moved, network=seed, progress=progress)
        yield 1


TRAPS = [
    Trap(JOINED, loss_is_the_joint_loss, lambda: medusa2_loss),
    Trap(ALONE, heads_come_first, lambda: medusa2_loss),
]

_medusa2 = partial(Toy, technique="medusa2")

TOYS = [
    _medusa2(
        "the heads' losses with their full weight",
        "settings.heads_weight * schedule_weight(settings, tuning.progress) * of_heads",
        "of_heads",
        medusa2_loss,
        law=JOINED,
    ),
    _medusa2(
        "the heads' losses alone",
        "return own + settings",
        "return settings",
        medusa2_loss,
        law=JOINED,
    ),
    _medusa2(
        "a model that is trained from the first step on",
        "torch.is_grad_enabled() and not are_heads_first",
        "torch.is_grad_enabled()",
        medusa2_loss,
        law=ALONE,
    ),
]
