"""PaSS (Monea et al. 2023): look-aheads that are trained and read for the right position."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, run_all_rounds
from tinyspec.lm.heads import freeze_target, head_weights
from tinyspec.speculative.drafting.pass_sampling import PassDrafter, pass_loss
from tinyspec.technique import TrainingBatch, find_technique

PLACED = feature_laws.DRAFT_OF_TRAINING
AIMED = "look-ahead j is trained on the token j + 2 places after the newest position"
CYCLE = "passes with look-aheads and passes with their drafts take turns"

Loss = Any
"""(weights, target, batch) -> scalar: what a technique minimises."""


def check_probe_loss(name: str, law: str, loss: Loss) -> Iterator[int]:
    """Check the loss of short texts, of which every position is trained.

    The judge runs the text up to each position with the probes after it, one at a time.
    """
    technique = find_technique(name)
    assert technique.trained is not None
    for seed in range(3):
        model = add_random_head(small_network(seed), technique, seed)
        weights, target = head_weights(model, name), freeze_target(model)
        ids = torch.tensor([[0, 3, 1, 2, 2, 0, 1, 3]])
        known, empty = torch.ones_like(ids, dtype=torch.bool), torch.empty(1, 8, 0)
        got = float(loss(weights, target, TrainingBatch(ids, known, empty, empty.long(), empty)))
        depths, expected = technique.trained.depths(weights), 0.0
        for depth in range(depths):
            of_depth = []
            for t in range(8 - 1 - depths):
                row = feature_laws.trained_forward(
                    technique, model, ids[0, : t + 2].tolist(), [0] * depth
                )
                assert row is not None
                of_depth.append(-float(row.log_softmax(-1)[ids[0, t + 2 + depth]]))
            expected += sum(of_depth) / len(of_depth) / depths
        if not math.isclose(got, expected, rel_tol=1e-6):  # the loss is float32
            accuse(law, expected, got, network=seed, text=ids[0].tolist())
        yield 1


@collect_evidence(AIMED)
def loss_is_of_the_right_tokens(loss: Loss) -> Iterator[int]:
    """Check the loss of look-aheads against the rows of one at a time."""
    yield from check_probe_loss("pass_sampling", AIMED, loss)


@collect_evidence(CYCLE)
def rounds_take_turns(build: Build) -> Iterator[int]:
    """Check what each round of a request runs: look-aheads, then their drafts, and so on."""
    technique = find_technique("pass_sampling")
    for seed in range(4):
        model = add_random_head(small_network(seed), technique, seed)
        decoder = begin_decoder(build, [model], (0, 1, 2), max_new_tokens=9)
        kinds = [
            "look-aheads" if all(round.tree.probe) else "drafts"
            for round in run_all_rounds(decoder)
            if round.tree.tokens
        ]
        turns = [("look-aheads", "drafts")[i % 2] for i in range(len(kinds))]
        expect_equal(CYCLE, turns, kinds, network=seed)
        yield len(kinds)


def check_pass_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads."""
    return feature_laws.check_random_heads(find_technique("pass_sampling"), build)


TRAPS = [
    Trap(PLACED, check_pass_drafts, card("pass_sampling")),
    Trap(AIMED, loss_is_of_the_right_tokens, lambda: pass_loss),
    Trap(CYCLE, rounds_take_turns, card("pass_sampling")),
]

_pass = partial(Toy, technique="pass_sampling")

TOYS = [
    _pass(
        "rows that are read one look-ahead late",
        "rows[node + 1]",
        "rows[node]",
        PassDrafter.observe,
        law=PLACED,
    ),
    _pass(
        "look-aheads trained on the next token",
        "self.ids[:, first:]",
        "self.ids[:, first - 1 : -1]",
        TrainingBatch.known_tokens,
        law=AIMED,
    ),
    _pass(
        "rows that serve two drafts",
        "rows, self.logits = self.logits, ()",
        "rows = self.logits",
        PassDrafter.propose,
        law=CYCLE,
    ),
]
