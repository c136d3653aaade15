"""Kangaroo (Liu et al. 2024): layers that are not run twice, and the right rows of the adapter."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tinyspec.early_exit.kangaroo import KangarooDrafter
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, run_all_rounds
from tinyspec.lm.model import Model
from tinyspec.technique import find_technique

CONTINUED = "the target goes on from the states that the draft has left"
OF_TEXT = feature_laws.DRAFT_OF_TEXT
PLACED = feature_laws.DRAFT_OF_TRAINING

EXIT, DEPTH = 1, 3  # layers that draft, of how many


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


TRAPS = [
    Trap(CONTINUED, runs_no_layer_twice, card("kangaroo")),
    Trap(OF_TEXT, drafts_of_the_past_leave_no_trace, card("kangaroo")),
    Trap(PLACED, check_kangaroo_drafts, card("kangaroo")),
]

_kangaroo = partial(Toy, technique="kangaroo")

TOYS = [
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
