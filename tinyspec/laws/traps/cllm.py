"""CLLM (Kou et al. 2024): trajectories to the greedy text, and a loss from every state of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive.cllm import (
    CllmSettings,
    cllm_loss,
    consistency_loss,
    draw_pair,
    trace_trajectory,
)
from tinyspec.technique import TrainingBatch, Tuning

FIXED = "a trajectory goes from tokens of the text to the original's greedy text"
EARLIER = "every state but the last is drawn, and the last one never"
LOSS = "the loss is the consistency loss and omega times the autoregressive one"
CONSTANT = "no gradient flows through the fixed point"

TEXT = (1, 2, 1, 2, 2)  # without the token 0
BLOCK = 3
GRADIENT_TOLERANCE = 1e-5  # absolute; the loss is float32

TuningLoss = Callable[[Tuning, TrainingBatch, torch.Generator], Tensor]


def sweep_by_hand(model: Model, text: Sequence[int], state: Sequence[int]) -> list[int]:
    """Return the model's greedy token at every position of a block, one text at a time."""
    texts = [[*text, *state[:at]] for at in range(len(state))]
    return [int(model.logits(one)[-1].argmax()) for one in texts]


def sweep_to_the_end(model: Model, text: Sequence[int], state: list[int]) -> list[list[int]]:
    """Return all states of a trajectory."""
    states = [state]
    while (after := sweep_by_hand(model, text, states[-1])) != states[-1]:
        states.append(after)
    return states


@collect_evidence(FIXED)
def trajectory_ends_at_greedy_text(trace: Any) -> Iterator[int]:
    """Check the first state, each sweep after it, and the end, from random starts."""
    for seed, n in product(range(8), (1, 2, 4)):
        model = small_network(seed)
        states = trace(model, TEXT, n, torch.Generator().manual_seed(seed))
        case = {"network": seed, "text": TEXT, "tokens": n}
        if len(states[0]) != n or not set(states[0]) <= set(TEXT):
            accuse(FIXED, f"{n} tokens of the text", states[0], **case, state=0)
        expect_equal(FIXED, sweep_to_the_end(model, TEXT, states[0]), states, **case)
        yield len(states)


@collect_evidence(EARLIER)
def earlier_states_are_drawn(draw: Any) -> Iterator[int]:
    """Check which states are drawn, over many trajectories of each length."""
    met: dict[int, list[int]] = defaultdict(list)  # number of earlier states -> those drawn
    for seed in range(120):
        model = small_network(seed % 4)
        pair = draw(model, TEXT, BLOCK, (), torch.Generator().manual_seed(seed))
        start = torch.randint(len(TEXT), (BLOCK,), generator=torch.Generator().manual_seed(seed))
        states = sweep_to_the_end(model, TEXT, [TEXT[i] for i in start.tolist()])
        expect_equal(EARLIER, states[-1], pair.fixed, network=seed % 4, draw=seed)
        met[len(states) - 1].append(states.index(pair.early))
    for n, drawn in met.items():
        if n and len(drawn) >= 20:
            expect_equal(EARLIER, list(range(n)), sorted(set(drawn)), sweeps=n)
            yield len(drawn)


def one_text(model: Model, **settings: float) -> tuple[Tuning, TrainingBatch]:
    """Return a model in training and a batch of one text, of which its second half was written."""
    ids = torch.tensor([[*TEXT, 0]])  # a last token, which the target wrote too
    is_answer = torch.tensor([[t in (3, 4) for t in range(len(TEXT) + 1)]])
    empty = torch.empty(1, len(TEXT) + 1, 0)
    weights = {name: w.clone().requires_grad_() for name, w in model.weights.items()}
    chosen = CllmSettings(block=BLOCK, **settings)
    tuning = Tuning(Blocks(model.config, weights), model, chosen, {}, 0.0)
    return tuning, TrainingBatch(ids, is_answer, empty, empty.long(), empty)


def draw_by_hand(model: Model, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Return the text up to its place, an early state and the fixed point that a seed gives."""
    generator = torch.Generator().manual_seed(seed)
    place = (3, 4)[int(torch.randint(2, (), generator=generator))]
    text = list(TEXT[: place + 1])
    start = torch.randint(len(text), (BLOCK,), generator=generator).tolist()
    states = sweep_to_the_end(model, text, [text[i] for i in start])
    chosen = int(torch.randint(max(len(states) - 1, 1), (), generator=generator))
    return text, states[chosen], states[-1]


def open_places(early: Sequence[int], fixed: Sequence[int]) -> range:
    """Return the positions of a block from the first difference on."""
    differs = [at for at in range(len(fixed)) if early[at] != fixed[at]]
    return range(differs[0], len(fixed)) if differs else range(0)


@collect_evidence(LOSS)
def loss_has_both_terms(loss: TuningLoss) -> Iterator[int]:
    """Check the loss of one text, with and without its autoregressive term, row by row."""
    for seed, weight in product(range(8), (0.0, 10.0)):
        model = small_network(seed)

        def row(text: Sequence[int], model: Model = model) -> Tensor:
            return model.logits(text)[-1].log_softmax(-1)

        tuning, batch = one_text(model, ar_weight=weight)
        text, early, fixed = draw_by_hand(model, seed)
        consistency = [
            -float(row([*text, *fixed[:at]]).exp() @ row([*text, *early[:at]]))
            for at in open_places(early, fixed)
        ]
        whole = [*text, *fixed]
        rows = [(row(whole[:at]), whole[at]) for at in range(4, len(whole))]
        smooth = [-0.9 * float(r[token]) - 0.1 * float(r.mean()) for r, token in rows]
        expected = sum(consistency) / max(len(consistency), 1) + weight * sum(smooth) / len(smooth)
        got = loss(tuning, batch, torch.Generator().manual_seed(seed)).item()
        if not math.isclose(got, expected, rel_tol=1e-5, abs_tol=1e-6):
            accuse(LOSS, expected, got, network=seed, text=text, early=early, fixed=fixed)
        yield len(consistency)


@collect_evidence(CONSTANT)
def fixed_point_is_constant(loss: TuningLoss) -> Iterator[int]:
    """Check the gradient of the consistency loss against one whose labels are plain numbers."""
    for seed in range(8):
        model = small_network(seed)
        text, early, fixed = draw_by_hand(model, seed)
        if not (places := open_places(early, fixed)):
            continue
        gradients = list[Tensor]()
        for is_judge in (True, False):
            tuning, batch = one_text(model, ar_weight=0.0)
            if is_judge:
                labels = [model.logits([*text, *fixed[:at]])[-1].softmax(-1) for at in places]
                read = tuning.blocks.training_logits(torch.tensor([[*text, *early]]))[0]
                rows = read[[len(text) - 1 + at for at in places]].log_softmax(-1)
                value = -(torch.stack(labels) * rows).sum(-1).mean()
            else:
                value = loss(tuning, batch, torch.Generator().manual_seed(seed))
            (gradient,) = torch.autograd.grad(value, [tuning.blocks.embed])
            gradients.append(gradient)
        gap = float((gradients[0] - gradients[1]).abs().max())
        if not gap <= GRADIENT_TOLERANCE:
            accuse(CONSTANT, "an equal gradient", f"a difference of {gap}", network=seed, text=text)
        yield len(places)


TRAPS = [
    Trap(FIXED, trajectory_ends_at_greedy_text, lambda: trace_trajectory),
    Trap(EARLIER, earlier_states_are_drawn, lambda: draw_pair),
    Trap(LOSS, loss_has_both_terms, lambda: cllm_loss),
    Trap(CONSTANT, fixed_point_is_constant, lambda: cllm_loss),
]

_cllm = partial(Toy, technique="cllm")

TOYS = [
    _cllm(
        "trajectories from padding",
        "[text[i] for i in drawn]",
        "[0] * n",
        trace_trajectory,
        law=FIXED,
    ),
    _cllm(
        "training from the first state alone",
        "chosen = int(torch.randint(max(len(states) - 1, 1), (), generator=generator))",
        "chosen = 0",
        draw_pair,
        law=EARLIER,
    ),
    _cllm(
        "consistency alone, without the autoregressive loss",
        "after_early[is_open]) + settings.ar_weight * ar_loss",
        "after_early[is_open])",
        cllm_loss,
        law=LOSS,
    ),
    _cllm(
        "a gradient through the fixed point",
        "fixed.detach().float()",
        "fixed.float()",
        consistency_loss,
        law=CONSTANT,
    ),
]
