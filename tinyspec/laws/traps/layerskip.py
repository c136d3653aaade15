"""LayerSkip (Elhoushi et al. 2024): the model drafts with its own first layers.

They run once for drafting and verifying, and a training makes their drafts good.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Round
from tinyspec.decoding.rng import Seeded
from tinyspec.laws import exit_laws
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import EXIT_WEIGHTS, LAYER_DROPOUT, ONE_HEAD
from tinyspec.laws.traps import (
    SAMPLED,
    Build,
    Trap,
    begin_decoder,
    card,
    joint_distribution_of_self_drafting,
)
from tinyspec.lm.forward import Plan
from tinyspec.training.exit_losses import ExitLossSchedule

OWN = "a draft is what the model cut off after the exit predicts"
ONCE = "layers below the exit run once for a row"

SHAPES = [(3, 1, 1), (3, 1, 3), (3, 2, 2), (4, 3, 2), (5, 2, 3), (3, 3, 2)]
"""Layers, the exit, tokens drafted in a round."""


def _run_rounds(build: Build) -> Iterator[tuple[dict[str, Any], Round]]:
    """Yield rounds of some texts: the case, with the text before the round, and the round."""
    for (layers, exit, gamma), seed in product(SHAPES, range(4)):
        model = TableModel(seed, 4, layers, zeros=False)
        decoder = begin_decoder(build, [model], (0, 1, 2), SAMPLED, exit=exit, gamma=gamma)
        for _ in range(5):
            text = list(decoder.context)
            case = {"model": model, "layers": layers, "exit": exit, "gamma": gamma, "text": text}
            yield case, decoder.step(Seeded(seed).split("round", decoder.rounds))


@collect_evidence(OWN)
def drafts_are_the_exits(build: Build) -> Iterator[int]:
    """Check that each draft token was drawn from the row of the first E layers after the text.

    The first round and the fifth are alike.
    """
    for case, round in _run_rounds(build):
        for at, got in enumerate(round.tree.draft_probs):
            text = [*case["text"], *round.tree.tokens[:at]]
            expected = case["model"].row(text, Plan(last=case["exit"]))
            expect_equal(OWN, expected, got, **{**case, "text": text})
            yield 0


@collect_evidence(ONCE)
def runs_once(build: Build) -> Iterator[int]:
    """Check the work of a round of n draft tokens, in layers of a row.

    Drafting takes n E. Verifying takes E for the last draft token, and L - E for each of n + 1
    rows.
    """
    for case, round in _run_rounds(build):
        n, exit, layers = len(round.tree.tokens), case["exit"], case["layers"]
        expected = [n * exit, exit + (layers - exit) * (n + 1)]
        got = [sum(call.row_layers for call in calls) for calls in (round.draft_calls, round.calls)]
        expect_equal(ONCE, expected, got, **case)
        yield 0


TRAPS = [
    Trap(JOINT, partial(joint_distribution_of_self_drafting, exit=1, gamma=1), card("layerskip")),
    Trap(OWN, drafts_are_the_exits, card("layerskip")),
    Trap(ONCE, runs_once, card("layerskip")),
    Trap(LAYER_DROPOUT, exit_laws.layer_dropout, lambda: ExitLossSchedule),
    Trap(ONE_HEAD, exit_laws.one_head, lambda: ExitLossSchedule),
    Trap(EXIT_WEIGHTS, exit_laws.exit_loss_weights, lambda: ExitLossSchedule),
]
