"""ConsistentEE (Zeng et al. 2024): a policy that draws, hard tokens that may go deep, one loss."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tinyspec.early_exit import consistent_ee
from tinyspec.early_exit.consistent_ee import (
    ConsistentSettings,
    PolicyRule,
    PolicyTraining,
    find_memorized_layers,
    make_text_training,
    policy_shapes,
)
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import logits_of_states, run_dense, small_network
from tinyspec.laws.exit_laws import (
    AS_DECIDED,
    decided_leaves,
    follows_the_policy,
    states_by_layer,
)
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap, card
from tinyspec.lm.heads import add_head
from tinyspec.technique import TrainingBatch

EXACT_GRADIENT = "the mean gradient of all draws is that of the expected reward"
MEMORIZED = "the memorized layer is the lowest from which on all exits are right"
ONE_EXIT = "the model's phase counts the exit that was chosen, and no other"

LAYERS, EPS, ALPHA, DRAWS = 4, 0.3, 0.4, 2
TEXT = (1, 2, 0, 3, 1, 2)
GRADIENT_SEEDS = (0, 1)  # of networks


def policy_case(seed: int, first: int) -> tuple[Any, dict[str, torch.Tensor], PolicyTraining]:
    """Return a small model, a random policy, and a text that the model wrote from `first` on."""
    model = small_network(seed, layers=LAYERS)
    generator = torch.Generator().manual_seed(seed)
    settings = ConsistentSettings(width=3, alpha=ALPHA, samples=DRAWS, rounds=1)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in policy_shapes(model.config, settings).items()
    }
    ids = torch.tensor([TEXT])
    is_answer = torch.arange(ids.shape[1])[None] >= first
    batch = TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)
    return (
        model,
        weights,
        make_text_training(model.torch_blocks(), model.torch_blocks(), batch, weights, settings),
    )


def score_exits(model: Any, at: int) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    """Return a token's states, log-probabilities of the next token, and whether it is likeliest."""
    states = [torch.tensor(x[at]) for x in states_by_layer(model, TEXT[:-1])]
    rows = [torch.tensor(logits_of_states(model, x[None].numpy())[0]) for x in states]
    right = TEXT[at + 1]
    log_probs = [float(row.log_softmax(-1)[right]) for row in rows]
    return states, log_probs, [int(row.argmax()) == right for row in rows]


def memorize(is_right: list[bool]) -> int:
    """Return the memorized layer, by its definition."""
    depth = len(is_right)
    return next((n for n in range(1, depth + 1) if all(is_right[n - 1 :])), depth)


def expected_gradient(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradient of less the expected reward of the last token, over all its exits."""
    states, log_probs, is_right = score_exits(model, len(TEXT) - 2)
    memorized, total = memorize(is_right), torch.zeros((), dtype=torch.float64)
    own = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    stays = torch.ones((), dtype=torch.float64)
    for layer, state in enumerate(states, start=1):
        price = ALPHA * (1 - memorized / LAYERS) * layer
        chance = torch.ones((), dtype=torch.float64)
        if layer < LAYERS:
            hidden = own["hidden.weight"].view(LAYERS - 1, 3, -1)[layer - 1] @ state
            hidden = hidden + own["hidden.bias"].view(LAYERS - 1, 3)[layer - 1]
            out = F.gelu(hidden, approximate="tanh") @ own["out.weight"][layer - 1]
            chance = (1 - EPS) * torch.sigmoid(out + own["out.bias"][layer - 1]) + EPS / 2
        total = total - stays * chance * (log_probs[layer - 1] - price)
        stays = stays * (1 - chance)
    total.backward()  # type: ignore[no-untyped-call]
    return {name: w.grad for name, w in own.items() if w.grad is not None}


@collect_evidence(EXACT_GRADIENT)
def gradient_is_exact(loss: Any) -> Iterator[int]:
    """Check the gradient of every outcome of the draws, weighted by its chance.

    The text has one token that may leave, at LAYERS - 1 layers, and DRAWS draws. A draw decides by
    numbers of 0 (leave) and 1 (stay). The baseline of a token has its own reward in it, so the mean
    is (K - 1) / K of the exact gradient.
    """
    for seed in GRADIENT_SEEDS:
        model, weights, training = policy_case(seed, len(TEXT) - 2)
        for w in weights.values():
            w.requires_grad_()
        total = {name: torch.zeros_like(w) for name, w in weights.items()}
        chances = chances_of_last(model, weights)
        for outcome in product((0.0, 1.0), repeat=DRAWS * (LAYERS - 1)):
            script, mass = iter(outcome), 1.0
            for site, drawn in enumerate(outcome):
                chance = chances[site % (LAYERS - 1)]
                mass *= 1 - chance if drawn else chance

            def draw(shape: Any, script: Any = script) -> torch.Tensor:
                return torch.full(shape, next(script))

            value = loss(training, EPS, draw)
            for name, grad in zip(
                weights, torch.autograd.grad(value, list(weights.values())), strict=True
            ):
                total[name] += mass * grad
            yield 1
        for name, exact in expected_gradient(model, weights).items():
            expected = exact * (DRAWS - 1) / DRAWS
            if not torch.allclose(expected, total[name], atol=1e-5):
                accuse(
                    EXACT_GRADIENT, expected.tolist(), total[name].tolist(), seed=seed, weight=name
                )


def chances_of_last(model: Any, weights: dict[str, torch.Tensor]) -> list[float]:
    """Return the last token's chance to be drawn to leave at each layer."""
    states, _, _ = score_exits(model, len(TEXT) - 2)
    found = []
    for layer, state in enumerate(states[:-1], start=1):
        rows = slice(3 * (layer - 1), 3 * layer)
        x = weights["hidden.weight"][rows] @ state + weights["hidden.bias"][rows]
        out = F.gelu(x, approximate="tanh") @ weights["out.weight"][layer - 1]
        pi = torch.sigmoid(out + weights["out.bias"][layer - 1])
        found.append((1 - EPS) * float(pi.detach()) + EPS / 2)
    return found


@collect_evidence(MEMORIZED)
def labels_are_memorized_layers(find: Any) -> Iterator[int]:
    """Check the label of every pattern of right and wrong exits."""
    for depth in range(1, 6):
        for pattern in product((False, True), repeat=depth):
            got = int(find(torch.tensor([pattern]))[0])
            expect_equal(MEMORIZED, memorize(list(pattern)), got, is_right=pattern)
            yield 1


@collect_evidence(ONE_EXIT)
def one_exit_is_trained(loss: Any) -> Iterator[int]:
    """Check the loss of the model's phase against exits that a policy chooses, token by token."""
    for seed in range(6):
        model, weights, training = policy_case(seed, 2)
        headed = add_head(model, "consistent_ee", weights)
        decide, may = decided_leaves(headed, 0.5), np.arange(len(TEXT) - 1) >= 2
        rows = run_dense(
            model, TEXT[:-1], leaves=lambda *given, may=may, decide=decide: may & decide(*given)
        ).logits
        log_probs = [
            float(torch.tensor(rows[at]).log_softmax(-1)[TEXT[at + 1]])
            for at in range(2, len(TEXT) - 1)
        ]
        expected = -sum(log_probs) / len(log_probs)
        got = float(loss(training, 0.5, torch.Generator()))  # in the second half: the model's phase
        if not abs(expected - got) <= 1e-4 * expected:
            accuse(ONE_EXIT, expected, got, seed=seed, text=TEXT)
        yield 1


TRAPS = [
    Trap(AS_DECIDED, follows_the_policy, card("consistent_ee")),
    Trap(EXACT_GRADIENT, gradient_is_exact, lambda: PolicyTraining.policy_loss),
    Trap(MEMORIZED, labels_are_memorized_layers, lambda: find_memorized_layers),
    Trap(ONE_EXIT, one_exit_is_trained, lambda: PolicyTraining.loss),
]

_consistent = partial(Toy, technique="consistent_ee")

TOYS = [
    _consistent(
        "one price of depth for all tokens",
        "(1 - memorized / depth)",
        "1",
        consistent_ee.reward_exits,
        law=EXACT_GRADIENT,
    ),
    _consistent(
        "a supervised classifier called a policy",
        "-(advantage * log_chances).mean()",
        "-log_chances.mean()",
        consistent_ee.reinforce,
        law=EXACT_GRADIENT,
    ),
    _consistent(
        "exits that are not drawn from the policy",
        "draw(chance.shape).to(chance.device) < chance",
        "chance > 0.5",
        PolicyTraining.policy_loss,
        law=EXACT_GRADIENT,
    ),
    _consistent(
        "the first exit that is right",
        "(n * ~is_right).amax(dim=-1)",
        "(~is_right).long().cumprod(-1).sum(-1)",
        consistent_ee.find_memorized_layers,
        law=MEMORIZED,
    ),
    _consistent(
        "the model's phase trains all exits",
        "-self.log_probs(self.leave_greedily()[0]).mean()",
        "-torch.stack([self.log_probs(x[self.known]) for x in "
        "self.run(torch.full_like(self.targets, self.depth))]).mean()",
        PolicyTraining.loss,
        law=ONE_EXIT,
    ),
    _consistent(
        "the policy of the first layer everywhere",
        "(layer - 1) * self.width, layer * self.width",
        "0, self.width",
        PolicyRule.chance_to_leave,
        law=AS_DECIDED,
    ),
    _consistent(
        "skipped layers are run after all",
        '"copy"',
        '"recompute"',
        consistent_ee.consistent_ee,
        law=AS_DECIDED,
    ),
]
