"""Kangaroo (Liu et al. 2024): layers that are not run twice, and the right rows of the adapter."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.early_exit.kangaroo import KangarooDrafter, kangaroo_loss
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, run_all_rounds
from tinyspec.laws.traps.eagle import CYCLE, TOKENS, reciting_target
from tinyspec.lm.model import Model
from tinyspec.technique import find_technique

CONTINUED = "the target goes on from the states that the draft has left"
OF_TEXT = feature_laws.DRAFT_OF_TEXT
PLACED = feature_laws.DRAFT_OF_TRAINING
PLANTED = "an early exit that is fitted to a text drafts all of it"

EXIT, DEPTH = 1, 3  # layers that draft, of how many
DRAFTED = 4


def adapted_network(seed: int, vocabulary: int = 4) -> Model:
    """Return a small network with a random adapter."""
    return add_random_head(small_network(seed, vocabulary), find_technique("kangaroo"), seed)


@collect_evidence(CONTINUED)
def runs_no_layer_twice(build: Build) -> Iterator[int]:
    """Check the layer evaluations of every round, drafting and verifying, against the formula."""
    yield from count_layers_of_rounds(build, adapted_network, threshold=0.0)


def count_layers_of_rounds(
    build: Build, network: Callable[[int], Model], **knobs: Any
) -> Iterator[int]:
    """Yield 1 for every round whose layer evaluations are those of the formula."""
    for seed in range(4):
        model = network(seed)
        decoder = begin_decoder(build, [model], (0, 1, 2), max_new_tokens=14, gamma=3, **knobs)
        for round in run_all_rounds(decoder):
            n = len(round.tree.tokens)
            drafting = sum(c.row_layers for c in round.draft_calls if c.model == model.name)
            verifying = sum(c.row_layers for c in round.calls)
            formula = (n * EXIT, EXIT + (DEPTH - EXIT) * (n + 1)) if n else (0, DEPTH)
            expect_equal(CONTINUED, formula, (drafting, verifying), network=seed, drafted=n)
            yield 1


@collect_evidence(OF_TEXT)
def drafts_of_the_past_leave_no_trace(build: Build) -> Iterator[int]:
    """Check law F1 on random adapters."""
    make = partial(build, gamma=3, threshold=0.3)
    yield feature_laws.draft_is_function_of_text(make, adapted_network).branches


def check_kangaroo_drafts(build: Build) -> Evidence:
    """Check law F2 on random adapters."""
    make = partial(build, gamma=3, threshold=0.3)
    return feature_laws.check_random_heads(find_technique("kangaroo"), make)


def reciting_deeper_target() -> tuple[Model, tuple[int, ...]]:
    """Return a network that writes a cyclic text, below it a layer that adds nothing, and the text.

    The exit is after that layer. So nothing but the fitted weights can tell what follows.
    """
    model, text = reciting_target(2)
    only = {name: w for name, w in model.weights.items() if name.startswith("0.")}
    weights = {**model.weights} | {name.replace("0.", "1.", 1): w for name, w in only.items()}
    weights |= {name: torch.zeros_like(w) for name, w in only.items()}
    return Model(replace(model.config, n_layers=2), weights), text


@collect_evidence(PLANTED)
def fitted_exit_drafts_the_text(
    build: Build, method: str = "kangaroo", **knobs: Any
) -> Iterator[int]:
    """Check that an exit that its loss has fitted to its target's text drafts it."""
    target, text = reciting_deeper_target()
    model = feature_laws.fit_head(find_technique(method), target, text, steps=60)
    for n in range(len(CYCLE), TOKENS - DRAFTED, len(CYCLE) + 5):  # the draft begins anywhere
        decoder = begin_decoder(build, [model], text[:n], gamma=DRAFTED, **knobs)
        tree = decoder.drafter.propose(decoder.context, DRAFTED, decoder.sampling, Seeded(0))
        expected = text[n : n + DRAFTED]
        expect_equal(PLANTED, expected, tuple(tree.tokens), cycle=CYCLE, tokens=n)
        yield DRAFTED


TRAPS = [
    Trap(PLANTED, fitted_exit_drafts_the_text, card("kangaroo")),
    Trap(CONTINUED, runs_no_layer_twice, card("kangaroo")),
    Trap(OF_TEXT, drafts_of_the_past_leave_no_trace, card("kangaroo")),
    Trap(PLACED, check_kangaroo_drafts, card("kangaroo")),
]

_kangaroo = partial(Toy, technique="kangaroo")

TOYS = [
    _kangaroo(
        "an adapter trained on the distribution of one position before",
        "p = F.linear(batch.states[:, 1][known], target.head)",
        "p = F.linear(batch.states[:, 1].roll(1, dims=1)[known], target.head)",
        kangaroo_loss,
        law=PLANTED,
    ),
    _kangaroo(
        "verification that runs all layers again",
        "ran = self.target.run_to_layer(tree, self.head.exit, hidden_layers=(self.head.exit,))",
        """ran = self.target.run_to_layer(tree, self.head.exit, hidden_layers=(self.head.exit,))
for node in (self.target.committed[-1], *self.target.committed[-1].descendants()):
    node.reset()""",
        KangarooDrafter.propose,
        law=CONTINUED,
    ),
    _kangaroo(
        "adapter rows of rejected tokens",
        "self.adapter.cut(len(self.states))  # not the rows of draft tokens that were rejected",
        "pass",
        KangarooDrafter.propose,
        law=OF_TEXT,
    ),
    _kangaroo(
        "an adapter without the row of the newest token",
        "self._adapt(ran.hidden[0, -1:], head_rows=1)",
        "self._adapt(self.states[-1][:1], head_rows=1)",
        KangarooDrafter.propose,
        law=PLACED,
    ),
]
