"""PPD (Yang et al. 2023): the whole model decides every token.

A draft token that holds was begun in good time.
"""

from functools import partial

from tinyspec.laws import exit_laws
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exit_laws import PIPELINE_CLOCK, PIPELINE_WORK
from tinyspec.laws.traps import Trap, card, joint_distribution_of_self_drafting

TRAPS = [
    Trap(JOINT, partial(joint_distribution_of_self_drafting, layer=2, k=2), card("ppd")),
    Trap(PIPELINE_CLOCK, exit_laws.pipeline_clock, card("ppd")),
    Trap(PIPELINE_WORK, exit_laws.pipeline_work, card("ppd")),
]
