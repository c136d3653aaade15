"""LayerSkip (Elhoushi et al. 2024): drafts of the model's own exit, computed once, and a training
that makes them good.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import exit_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, exact_law
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import EXIT_WEIGHTS, LAYER_DROPOUT, ONE_HEAD
from tinyspec.laws.traps import Trap, card
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.technique import Request
from tinyspec.training.exit_losses import ExitLossSchedule

OWN = "a draft is what the model cut off behind the exit says of the text"
ONCE = "layers below the exit run once for a row"

Build = Callable[..., Decoder]
SHAPES = [(3, 1, 1), (3, 1, 3), (3, 2, 2), (4, 3, 2), (5, 2, 3), (3, 3, 2)]
"""Layers, the exit, tokens drafted in a round."""


def joint_law_of_two_tokens(build: Build) -> Evidence:
    """Against plain decoding, sampled and greedy."""
    branches, cases = 0, 0
    for seed, sampling in product((1, 2, 3), (SamplingParams(), SamplingParams(0.0))):
        model = TableModel(seed, zeros=False)
        expected = exact_law(
            lambda model=model, sampling=sampling: Decoder(
                model.session(), BaseDrafter(), verify_tree, sampling=sampling
            ),  # type: ignore[misc]
            2,
        )
        got = exact_law(
            lambda model=model, sampling=sampling: build(  # type: ignore[misc]
                Request(model.session(), sampling=sampling), exit=1, gamma=1
            ),
            2,
        )
        branches, cases = branches + got.branches, cases + 1
        if dict(got) != dict(expected):
            told = {"model": model, "temperature": sampling.temperature, "exit": 1, "gamma": 1}
            accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **told)
    return Evidence(JOINT, cases, branches)


def _runs(build: Build) -> Iterator[tuple[dict[str, Any], list[int], Round]]:
    """Rounds of some texts: the case, the text before the round, the round."""
    for (layers, exit, gamma), seed in product(SHAPES, range(4)):
        model, forward_log = TableModel(seed, 4, layers, zeros=False), list[ForwardRecord]()
        decoder = build(
            Request(model.session(forward_log), forward_log=forward_log), exit=exit, gamma=gamma
        )
        decoder.extend((0, 1, 2))
        for _ in range(5):
            text = list(decoder.context)
            case = {"model": model, "layers": layers, "exit": exit, "gamma": gamma, "text": text}
            yield case, text, decoder.step(Seeded(seed).split("round", decoder.rounds))


def drafts_are_the_exits(build: Build) -> Evidence:
    """Each guess was drawn from the row of the first E layers after the text so far: in the first
    round and in the fifth.
    """
    seen = 0
    for case, text, round in _runs(build):
        for at, got in enumerate(round.tree.draft_probs):
            before = [*text, *round.tree.tokens[:at]]
            expected, seen = case["model"].row(before, Plan(last=case["exit"])), seen + 1
            if got != expected:
                accuse(OWN, expected, got, **{**case, "text": before})
    return Evidence(OWN, seen)


def runs_once(build: Build) -> Evidence:
    """n guesses: n E layers of a row to draft; E for the last guess and L - E for each of n + 1
    rows to verify.
    """
    seen = 0
    for case, _, round in _runs(build):
        n, exit, layers = len(round.tree.tokens), case["exit"], case["layers"]
        expected, seen = [n * exit, exit + (layers - exit) * (n + 1)], seen + 1
        got = [sum(call.row_layers for call in calls) for calls in (round.draft_calls, round.calls)]
        if got != expected:
            accuse(ONCE, expected, got, **case)
    return Evidence(ONCE, seen)


TRAPS = [
    Trap(JOINT, joint_law_of_two_tokens, card("layerskip")),
    Trap(OWN, drafts_are_the_exits, card("layerskip")),
    Trap(ONCE, runs_once, card("layerskip")),
    Trap(LAYER_DROPOUT, exit_laws.layer_dropout, lambda: ExitLossSchedule),
    Trap(ONE_HEAD, exit_laws.one_head, lambda: ExitLossSchedule),
    Trap(EXIT_WEIGHTS, exit_laws.exit_loss_weights, lambda: ExitLossSchedule),
]
