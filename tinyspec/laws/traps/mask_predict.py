"""Mask-Predict (Ghazvininejad et al. 2019): any number of words hidden, stale probabilities,
several lengths.
"""

from tinyspec.laws.nonautoregressive_laws import (
    LENGTH_CHOICE,
    MASK_RULE,
    MASKS_HIDDEN,
    chooses_best_length,
    follows_mask_predict,
    hides_uniformly,
)
from tinyspec.laws.traps import Trap
from tinyspec.nonautoregressive.mask_predict import (
    hide_tokens,
)
from tinyspec.technique import find_technique

TRAPS = [
    Trap(MASK_RULE, follows_mask_predict, lambda: find_technique("mask_predict").refiner),
    Trap(LENGTH_CHOICE, chooses_best_length, lambda: find_technique("mask_predict").refiner),
    Trap(MASKS_HIDDEN, hides_uniformly, lambda: hide_tokens),
]
