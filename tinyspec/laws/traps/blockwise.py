"""Blockwise decoding (Stern et al. 2018): the residual, one pass a step, and three relaxations."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, run_all_rounds
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import RANKED, RANKS, add_head, freeze_target
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.blockwise import (
    BlockLayer,
    BlockwiseDrafter,
    BlockwiseSettings,
    begin_block,
    predict_by_block,
    relaxed_verifier,
)
from tinyspec.technique import find_technique

PLANTED = medusa_traps.PLANTED
PLACED = feature_laws.DRAFT_OF_TRAINING
RESIDUAL = "an untrained predictor says what the target's own head says"
COUNTED = "m tokens take m / k + 1 passes if every guess is right"
RELAXED = "a rule accepts what it allows, and else as the exact rule does"
RULES = "top", "distance", "block"
DRAWS = 4  # random predictors of a step: both of two are among them


@collect_evidence(RESIDUAL)
def untrained_layer_repeats_the_head(build: Build) -> Iterator[int]:
    """Check that the layer begins as nothing: every guess is the token that the state predicts."""
    settings = BlockwiseSettings(heads=3)
    for seed in range(6):
        model = small_network(seed)
        weights = begin_block(freeze_target(model), settings, seed)
        begun = add_head(model, "blockwise", {**weights, RANKS: torch.zeros(3, RANKED)})
        for text in ((0, 1), (2, 0, 3), (1, 1, 2, 0)):
            decoder = begin_decoder(build, [begun], text)
            tree = decoder.drafter.propose(decoder.context, 3, decoder.sampling, Seeded(0))
            own = int(model.logits(text[:-1])[-1].argmax())
            expect_equal(RESIDUAL, (own,) * 3, tuple(tree.tokens), text=text)
            yield 1


def write_greedy_text(model: Model, n: int) -> list[int]:
    """Return a text of n tokens that the model goes on with, the likeliest token each time."""
    text = [0, 1]
    while len(text) < n:
        text.append(int(model.logits(text)[-1].argmax()))
    return text


def planted_target(seed: int) -> Model:
    """Return a network whose block layer is fitted to the text that it writes after 0, 1."""
    config = Config(
        vocab_size=6, d_model=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48,
        max_positions=64,
    )  # fmt: skip
    model = Model.random(config, seed, torch.float64, scale=0.5)
    text = write_greedy_text(model, 26)
    return feature_laws.fit_head(find_technique("blockwise"), model, text, draws=DRAWS)


@collect_evidence(COUNTED)
def right_guesses_save_passes(build: Build) -> Iterator[int]:
    """Check the paper's count where every guess is right, without the prompt's own pass."""
    for seed in (1, 2):
        model = planted_target(seed)
        for k in (3, 2, 1):
            decoder = begin_decoder(build, [model], (0, 1), max_new_tokens=18, k=k)
            rounds = run_all_rounds(decoder)
            expect_equal(COUNTED, write_greedy_text(model, 20)[2:], decoder.new, network=seed)
            passes = sum(len(round.calls) for round in rounds)
            if passes > 18 // k + 1:
                accuse(COUNTED, f"at most {18 // k + 1}", passes, network=seed, k=k)
            yield len(rounds)


def output_round(begin: Callable[[], Decoder], rng: Exhaustive) -> tuple[int, ...]:
    """Return what a new decoder outputs in its first round."""
    return begin().step(rng).tokens


def law_of_a_relaxed_round(
    model: Model, sampling: SamplingParams, text: Sequence[int], draft: Sequence[int], rule: str,
    slack: int,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """Return the probability of each output of a round after a text, by the rule's definition."""
    law, reached = defaultdict[tuple[int, ...], float](float), 1.0
    for place, x in enumerate(draft):
        before = tuple(draft[:place])
        logits = model.logits([*text, *before])[-1].numpy()
        p, ranked = sampling.probs(logits), sorted(range(len(logits)), key=lambda x: -logits[x])
        allowed = {
            "top": x in ranked[: slack + 1],
            "distance": abs(x - ranked[0]) <= slack,
            "block": place < slack,
        }[rule]
        accept = 1.0 if allowed else p[x]
        for y in range(len(p)):
            if y != x and accept < 1:
                law[(*before, y)] += reached * (1 - accept) * p[y] / (1 - p[x])
        reached *= accept
    for y, probability in enumerate(sampling.probs(model.logits([*text, *draft])[-1].numpy())):
        law[(*draft, y)] += reached * probability
    return law


@collect_evidence(RELAXED)
def rules_accept_what_they_allow(build: Build) -> Iterator[int]:
    """Check the distribution of a round's output under each rule, greedy and sampled."""
    blockwise = find_technique("blockwise")
    for number, (rule, slack) in enumerate(product(RULES, (1, 2))):
        for sampling in (SamplingParams(0.0), SamplingParams(), SamplingParams(0.7, top_k=3)):
            for text in ((0, 1), (2, 0, 3)):
                model = add_random_head(small_network(number, 6), blockwise, number)
                knobs: dict[str, Any] = {"rule": rule, "slack": slack, "k": 3}
                begin = partial(begin_decoder, build, [model], text, sampling, **knobs)
                draft = begin().drafter.propose(list(text), 2, sampling, Seeded(0)).tokens
                expected = law_of_a_relaxed_round(model, sampling, text, draft, rule, slack)
                got = defaultdict[tuple[int, ...], float](float)
                for tokens, probability in Exhaustive.walk(partial(output_round, begin)):
                    got[tokens] += float(probability)
                for tokens in expected.keys() | got.keys():
                    if abs(expected[tokens] - got[tokens]) > NETWORK_TOLERANCE:
                        case = {**knobs, "text": text, "draft": tuple(draft), "output": tokens}
                        accuse(RELAXED, expected[tokens], got[tokens], **case)
                yield len(got)


def fitted_layer_drafts_the_text(build: Build) -> Evidence:
    """Check that a layer that its loss has fitted to a text drafts it, after every part of it."""
    return medusa_traps.fitted_heads_draft_the_text(build, "blockwise", draws=DRAWS)


def check_blockwise_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads."""
    return feature_laws.check_random_heads(find_technique("blockwise"), build)


TRAPS = [
    Trap(PLANTED, fitted_layer_drafts_the_text, card("blockwise")),
    Trap(PLACED, check_blockwise_drafts, card("blockwise")),
    Trap(RESIDUAL, untrained_layer_repeats_the_head, card("blockwise")),
    Trap(COUNTED, right_guesses_save_passes, card("blockwise")),
    Trap(RELAXED, rules_accept_what_they_allow, card("blockwise")),
]

_blockwise = partial(Toy, technique="blockwise")

TOYS = [
    _blockwise(
        "one predictor at every depth",
        "slice(depth * h.shape[-1], (depth + 1) * h.shape[-1])",
        "slice(h.shape[-1])",
        predict_by_block,
        law=PLANTED,
    ),
    _blockwise(
        "a layer that reads one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        BlockwiseDrafter.propose,
        law=PLACED,
    ),
    _blockwise(
        "a layer without the residual",
        "self.rows(h + parts[:n])",
        "self.rows(parts[:n])",
        BlockLayer.logits,
        law=RESIDUAL,
    ),
    _blockwise(
        "a pass to predict and another to verify",
        "if not self.states or n <= 0:",
        "if setattr(self, 'odd', not getattr(self, 'odd', False)) or self.odd or n <= 0:",
        BlockwiseDrafter.propose,
        law=COUNTED,
    ),
    _blockwise(
        "a rejected guess that may be drawn again",
        "rng.draw(exclude_token(p[at], token))",
        "rng.draw(p[at])",
        relaxed_verifier,
        law=RELAXED,
    ),
]
