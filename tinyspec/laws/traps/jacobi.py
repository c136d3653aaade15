"""Parallel decoding (Santilli et al. 2023): a pass predicts all positions at once.

What it predicts is the next draft, and the end of the text is not known beforehand.
"""

from tinyspec.laws import sweeps
from tinyspec.laws.sweeps import SOLVE_PUBLISHED, SWEEP_COST, SWEEP_FIXES, SWEEP_IS_JACOBI
from tinyspec.laws.traps import Trap, card
from tinyspec.nonautoregressive.jacobi import solve_blocks

TRAPS = [
    Trap(SWEEP_IS_JACOBI, sweeps.sweeps_by_hand, card("jacobi")),
    Trap(SWEEP_FIXES, sweeps.fixes_one_at_least, card("jacobi")),
    Trap(SWEEP_COST, sweeps.costs_what_is_left, card("jacobi")),
    Trap(SOLVE_PUBLISHED, sweeps.solve_ends_at_greedy, lambda: solve_blocks),
]
