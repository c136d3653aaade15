"""CALM (Schuster et al. 2022): the gap of the top two, three measures, states copied up, a
threshold that was calibrated.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.calibrate import calibrate
from tinyspec.early_exit.calm import ConfidenceMeasure, ConfidenceRule, decay_threshold
from tinyspec.early_exit.exits import ExitPoint, ExitTarget
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    EXIT_MEASURES,
    EXIT_RULE,
    controls_its_risk,
    each_measure,
    follows_exit_rule,
)
from tinyspec.laws.traps import Trap, card
from tinyspec.technique import Request


def on_target(
    request: Request, of: Callable[[ExitPoint], Any], make: Any = ExitTarget, **knobs: Any
) -> Decoder:
    """CALM with a confidence that reads the row, or with another target."""
    layers = range(knobs["min_exit"], request.target.model.config.n_layers, knobs["interval"])  # type: ignore[attr-defined]

    def due(step: int) -> float:
        return decay_threshold(
            knobs["decay"], knobs["threshold"], knobs["tau"], step, request.stop.max_new_tokens or 1
        )

    target = make(request.target, ConfidenceRule(ConfidenceMeasure(of, row=True), due, layers))
    return replace(request, target=target).decoder(BaseDrafter(), verify_tree)


TRAPS = [
    Trap(EXIT_RULE, follows_exit_rule, card("calm")),
    Trap(EXIT_MEASURES, each_measure, card("calm")),
    Trap(CALIBRATED, controls_its_risk, lambda: calibrate),
]
