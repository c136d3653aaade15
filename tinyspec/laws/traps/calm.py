"""CALM (Schuster et al. 2022): three confidence measures, states copied up, a calibrated threshold.

The softmax measure is the gap of the two likeliest tokens.
"""

from tinyspec.early_exit.calibrate import calibrate
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    EXIT_MEASURES,
    EXIT_RULE,
    controls_its_risk,
    each_measure,
    follows_exit_rule,
)
from tinyspec.laws.traps import Trap, card

TRAPS = [
    Trap(EXIT_RULE, follows_exit_rule, card("calm")),
    Trap(EXIT_MEASURES, each_measure, card("calm")),
    Trap(CALIBRATED, controls_its_risk, lambda: calibrate),
]
