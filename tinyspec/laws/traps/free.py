"""FREE (Bae et al. 2023): two depths, one block for all that wait, a threshold that is fitted."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit import free
from tinyspec.early_exit.free import ThresholdEstimator, TwoDepthRule
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import likeliest_token, small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import (
    TWO_DEPTHS,
    follows_two_depths,
    gap_after_layers,
    row_after_layers,
)
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.lm.session import Session
from tinyspec.technique import Request

ONE_BLOCK = "all that wait run the other layers in one pass, each layer of a token once"
FITTED = "the threshold is fitted to the tokens that the whole model has judged"

PROMPT, TOKENS, TEXTS = (0, 1, 2), 12, 5


@collect_evidence(ONE_BLOCK)
def waiting_tokens_share_a_pass(build: Build) -> Iterator[int]:
    """Check the rows and layers of every pass.

    A round runs one token through L_S layers. If it stays, a second pass runs the other layers of
    the token and of all that wait.
    """
    for seed in range(4):
        for model, layers, threshold in (
            (TableModel(seed, 4, 4, zeros=False), 1, 0.2),
            (small_network(seed, layers=4), 2, 0.2),
        ):
            knobs: dict[str, Any] = {
                "shallow": layers,
                "threshold": threshold,
                "adaptive": False,
            }
            decoder = begin_decoder(build, [model], PROMPT, SAMPLED, TOKENS, **knobs)
            waiting = 0
            while not decoder.finished:
                text = list(decoder.context)
                calls = decoder.step(Seeded(seed).split("round", decoder.rounds)).calls
                waiting, expected = waiting + 1, [(1, layers)]
                if gap_after_layers(model, text, layers) <= threshold:
                    expected.append((waiting, waiting * (4 - layers)))
                    waiting = 0
                got = [(call.rows, int(call.row_layers)) for call in calls]
                case = {"model": repr(model), "text": text, **knobs, "counted": "rows, layers"}
                expect_equal(ONE_BLOCK, expected, got, **case)
                yield 1


def fit_by_hand(pairs: list[tuple[float, bool]], zeta: float, before: float) -> float:
    """Return the threshold for these pairs of confidence and match, by densities without logs."""
    fits = []
    for wanted in (False, True):
        x = np.clip([c for c, is_match in pairs if is_match is wanted], 1e-4, 1 - 1e-4)
        if len(x) < 2 or x.std() == 0:
            return before
        common = x.mean() * (1 - x.mean()) / x.var() - 1
        fits.append((x.mean() * common, (1 - x.mean()) * common))
    grid, trusted = np.linspace(0.3, 0.9, 10), 0
    for c in grid[::-1]:
        other, match = (
            math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
            * c ** (a - 1)
            * (1 - c) ** (b - 1)
            for a, b in fits
        )
        if not match > zeta * (match + other):
            break
        trusted += 1
    return float(grid[min(10 - trusted, 9)])


@collect_evidence(FITTED)
def threshold_follows_the_pairs(build: Build) -> Iterator[int]:
    """Check the threshold of each of some texts in a row on one model.

    A pair is known when its token has run all layers: those that wait at the end never are.
    """
    for seed in range(3):
        model, layers, zeta = TableModel(seed, 4, 3, zeros=False), 1, 0.4
        pairs, threshold = list[tuple[float, bool]](), 0.2
        for number in range(TEXTS):
            knobs: dict[str, Any] = {"shallow": layers, "threshold": 0.2, "zeta": zeta}
            log: list[Any] = []
            stop = StoppingCriteria(max_new_tokens=TOKENS)
            request = Request(
                model.session(log), sampling=SAMPLED, stop=stop, forward_log=log, clock=lambda: 0.0
            )  # with a clock: it runs alone
            decoder = build(request, **knobs)
            decoder.extend(PROMPT)
            threshold = fit_by_hand(pairs, zeta, threshold)
            rule: Any = decoder.target.rule  # type: ignore[attr-defined]
            case = {"model": repr(model), "text number": number, "pairs": len(pairs), **knobs}
            if abs(rule.threshold - threshold) > 1e-9:
                accuse(FITTED, threshold, rule.threshold, **case)
            waiting = list[tuple[float, bool]]()
            while not decoder.finished:
                text = list(decoder.context)
                gap = gap_after_layers(model, text, layers)
                early, full = (row_after_layers(model, text, n) for n in (layers, 3))
                is_match = likeliest_token(early) == likeliest_token(full)
                waiting.append((float(gap), is_match))
                if gap <= threshold:
                    pairs, waiting = [*pairs, *waiting], []
                decoder.step(Seeded(seed).split("round", 100 * number + decoder.rounds))
            yield 1


TRAPS = [
    Trap(TWO_DEPTHS, follows_two_depths, card("free")),
    Trap(ONE_BLOCK, waiting_tokens_share_a_pass, card("free")),
    Trap(FITTED, threshold_follows_the_pairs, card("free")),
]

_free = partial(Toy, technique="free")
BLOCK = "n_slots, seen = find_seen_slots(nodes)"

TOYS = [
    _free("states that are copied up", '"postpone"', '"copy"', free.free, law=TWO_DEPTHS),
    _free("what waits is run at once", '"postpone"', '"recompute"', free.free, law=ONE_BLOCK),
    _free(
        "a block whose tokens see each other",
        BLOCK,
        f"{BLOCK}\nseen = seen if prefill else [(n_slots, ())] * len(nodes)",
        Session.run_nodes,
        law=TWO_DEPTHS,
    ),
    _free(
        "it leaves at the threshold",
        "softmax_response(at.logits) > self.threshold",
        "softmax_response(at.logits) >= self.threshold",
        TwoDepthRule.should_exit,
        law=TWO_DEPTHS,
    ),
    _free(
        "a threshold chosen before",
        "self.threshold if fitted is None else fitted",
        "self.threshold",
        ThresholdEstimator.refit,
        law=FITTED,
    ),
    _free(
        "only the token in doubt is judged",
        "for point, row in pairs:",
        "for point, row in pairs[-1:]:",
        TwoDepthRule.learn_from_pairs,
        law=FITTED,
    ),
]
