"""Gumbel coupling (Daliri et al. 2024): draft and target share one noise, named by the position.

The drafter does not change the text.
"""

from tinyspec.laws.traps import Trap, card
from tinyspec.laws.verification_laws import (
    COUPLING_AGREES,
    COUPLING_FORMULA,
    COUPLING_INVARIANT,
    agreement_formula,
    draft_kept_where_winners_agree,
    same_text_whoever_drafts,
)
from tinyspec.speculative.verification import gumbel_coupling as gumbel

TRAPS = [
    Trap(COUPLING_INVARIANT, same_text_whoever_drafts, card("gumbel_coupling")),
    Trap(COUPLING_AGREES, draft_kept_where_winners_agree, card("gumbel_coupling")),
    Trap(COUPLING_FORMULA, agreement_formula, lambda: gumbel.match_probability),
]
