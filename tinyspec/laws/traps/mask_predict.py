"""Mask-Predict (Ghazvininejad et al. 2019): training hides any number of words.

A word that is not rewritten keeps its old probability, and several lengths are tried.
"""

from tinyspec.laws.nonautoregressive_laws import (
    LENGTH_CHOICE,
    MASK_RULE,
    MASKS_HIDDEN,
    chooses_best_length,
    follows_mask_predict,
    hides_uniformly,
)
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.nonautoregressive.mask_predict import hide_tokens

TRAPS = [
    Trap(MASK_RULE, follows_mask_predict, refine_card("mask_predict")),
    Trap(LENGTH_CHOICE, chooses_best_length, refine_card("mask_predict")),
    Trap(MASKS_HIDDEN, hides_uniformly, lambda: hide_tokens),
]
