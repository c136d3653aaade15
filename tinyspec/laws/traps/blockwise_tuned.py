"""Blockwise decoding, fine-tuned (Stern et al. 2018): all k predictors train the whole model."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps.medusa2 import TEXT, Loss
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.heads import RANKS, head_weights
from tinyspec.speculative.drafting.blockwise_tuned import BlockwiseTunedSettings, tuned_block_loss
from tinyspec.technique import TrainingBatch, Tuning, find_technique

DRAWN = "one of the k predictors is trained, the model's own as often as each other"
WHOLE = "the model is trained with its layer"
DRAWS = 60  # of the loss: each of three predictors is drawn about 20 times
LEAST = 8  # times that each is drawn, of the 20 that are expected


def make_block_tuning(seed: int) -> tuple[Tuning, TrainingBatch]:
    """Return a small model in training with a random layer, and a text that it wrote all of."""
    model = add_random_head(small_network(seed), find_technique("blockwise_tuned"), seed)
    leaves = {name: w.clone().requires_grad_() for name, w in model.weights.items()}
    beside = {
        name: w.clone().requires_grad_()
        for name, w in head_weights(model, "blockwise").items()
        if name != RANKS
    }
    settings = BlockwiseTunedSettings(heads=2)
    tuning = Tuning(Blocks(model.config, leaves), model, settings, beside, 0.0)
    ids, nothing = torch.tensor([TEXT]), torch.empty(0)
    is_answer = torch.ones_like(ids, dtype=torch.bool)
    is_answer[0, -1] = False
    return tuning, TrainingBatch(ids, is_answer, nothing, nothing, nothing)


def losses_by_hand(tuning: Tuning) -> list[torch.Tensor]:
    """Return the loss of each predictor on the text, token by token: p_1 first."""
    h, w = tuning.blocks.final_states(torch.tensor([TEXT]))[0], tuning.beside
    hidden = (h @ w["hidden.weight"].T + w["hidden.bias"]).clamp(min=0)
    parts = (hidden @ w["out.weight"].T + w["out.bias"]).view(len(h), 2, -1)
    states = [h, h + parts[:, 0], h + parts[:, 1]]
    found = []
    for i, z in enumerate(states, start=1):
        rows = (z @ tuning.blocks.vocabulary.T).log_softmax(-1)
        losses = [-rows[t, TEXT[t + i]] for t in range(len(TEXT) - i)]
        found.append(torch.stack(losses).mean())
    return found


@collect_evidence(DRAWN)
def every_predictor_is_drawn(loss: Loss) -> Iterator[int]:
    """Check the loss of a text against the k formulas, and how often each of them is drawn."""
    for seed in range(3):
        tuning, batch = make_block_tuning(seed)
        expected, drawn = [float(x.detach()) for x in losses_by_hand(tuning)], Counter[int]()
        for number in range(DRAWS):
            got = float(loss(tuning, batch, torch.Generator().manual_seed(number)).detach())
            near = [i for i, x in enumerate(expected) if math.isclose(got, x, rel_tol=1e-5)]
            if not near:  # the loss is float32
                accuse(DRAWN, expected, got, network=seed, text=TEXT)
            drawn[near[0]] += 1
        if min(drawn[i] for i in range(3)) < LEAST:
            accuse(DRAWN, f"each at least {LEAST} of {DRAWS} times", dict(drawn), network=seed)
        with torch.no_grad():
            mean = float(loss(tuning, batch, torch.Generator()))
        if not math.isclose(mean, sum(expected) / 3, rel_tol=1e-5):
            accuse(DRAWN, sum(expected) / 3, mean, network=seed, measured=True)
        yield DRAWS


@collect_evidence(WHOLE)
def the_whole_model_is_trained(loss: Loss) -> Iterator[int]:
    """Check that whatever is drawn, every weight of the model has the gradient of its formula.

    The output matrix has one too, by the guesses as by the next token.
    """
    for seed in range(3):
        for number in range(8):
            tuning, batch = make_block_tuning(seed)
            got = loss(tuning, batch, torch.Generator().manual_seed(number))
            drawn = min(losses_by_hand(tuning), key=lambda x: abs(float((x - got).detach())))
            weights = tuning.blocks.weights
            slopes, expected = (
                torch.autograd.grad(x, list(weights.values()), allow_unused=True)
                for x in (got, drawn)
            )
            wrong = [
                name
                for name, a, b in zip(weights, slopes, expected, strict=True)
                if a is None or b is None or not torch.allclose(a, b, rtol=1e-3, atol=1e-5)
            ]  # the loss is float32
            expect_equal(WHOLE, [], wrong, network=seed, draw=number)
            yield 1


TRAPS = [
    Trap(DRAWN, every_predictor_is_drawn, lambda: tuned_block_loss),
    Trap(WHOLE, the_whole_model_is_trained, lambda: tuned_block_loss),
]

_tuned = partial(Toy, technique="blockwise_tuned", function=tuned_block_loss)

TOYS = [
    _tuned(
        "guesses that are trained without the next token",
        "draw_predictors(1 + count_parts(tuning.beside), generator)",
        "[1 + i for i in draw_predictors(count_parts(tuning.beside), generator)]",
        law=DRAWN,
    ),
    _tuned(
        "a layer that is trained on a frozen model",
        "states[:, None])",
        "states[:, None].detach())",
        law=WHOLE,
    ),
    _tuned(
        "guesses that do not train the output matrix",
        "blocks.embed, blocks.vocabulary)",
        "blocks.embed, blocks.vocabulary.detach())",
        law=WHOLE,
    ),
]
