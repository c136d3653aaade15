"""Gumbel coupling (Daliri et al. 2024): one noise for draft and target, named by the position; the
drafter leaves no trace.
"""

from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.laws.verification_laws import (
    COUPLING_AGREES,
    COUPLING_FORMULA,
    COUPLING_INVARIANT,
    agreement_formula,
    draft_kept_where_winners_agree,
    same_text_whoever_drafts,
)
from tinyspec.speculative.verification import gumbel_coupling as gumbel
from tinyspec.technique import Request
from tinyspec.tree import TokenTree


def ratio_test(request: Request, gamma: int) -> Decoder:
    """Speculative decoding: exact, and another text with every drafter."""
    drafter = ModelDrafter(request.drafts[0], gamma) if request.drafts else BaseDrafter()
    return request.decoder(drafter, verify_tree)


class _InTheRound:
    """Positions counted from the beginning of the round, whose noise is its stream's own."""

    def __init__(self, rng: Any, begun: int):
        self.rng, self.begun = rng, begun

    def exponential_race(self, row: Any, position: int) -> int:
        return int(self.rng.exponential_race(row, position - self.begun))


def noise_by_round(request: Request, gamma: int) -> Decoder:
    """Draft and target share a noise, numbered from the beginning of the round."""

    class Draft(gumbel.GumbelCouplingDrafter):
        def propose(
            self, context: Sequence[int], max_draft_depth: int, sampling: Any, rng: Any
        ) -> TokenTree:
            return super().propose(
                context, max_draft_depth, sampling, _InTheRound(rng, len(context))
            )

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        return gumbel.verify_tree_by_race(tree, p, _InTheRound(rng, len(p.context)))  # type: ignore[arg-type]

    return request.decoder(
        Draft(request.drafts[0], gamma) if request.drafts else BaseDrafter(), verify
    )


def noise_of_its_own(request: Request, gamma: int) -> Decoder:
    """The draft samples as ever; its guess is kept if the target's race has the same winner."""
    drafter = ModelDrafter(request.drafts[0], gamma) if request.drafts else BaseDrafter()
    return request.decoder(drafter, gumbel.verify_tree_by_race)


def by_agreement_of_samples(p: Sequence[Any], q: Sequence[Any]) -> Any:
    """As if the noises were independent."""
    return sum(a * b for a, b in zip(p, q, strict=True))


def by_total_variation(p: Sequence[Any], q: Sequence[Any]) -> Any:
    """As if the draft's law were known."""
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


TRAPS = [
    Trap(COUPLING_INVARIANT, same_text_whoever_drafts, card("gumbel_coupling")),
    Trap(COUPLING_AGREES, draft_kept_where_winners_agree, card("gumbel_coupling")),
    Trap(COUPLING_FORMULA, agreement_formula, lambda: gumbel.match_probability),
]
TOYS = [
    Toy("a ratio test", COUPLING_INVARIANT, ratio_test),
    Toy("noise numbered by the round", COUPLING_INVARIANT, noise_by_round),
    Toy("a noise of the draft's own", COUPLING_AGREES, noise_of_its_own),
    Toy("P(same) as agreement of samples", COUPLING_FORMULA, by_agreement_of_samples),
    Toy("P(same) as 1 - TV", COUPLING_FORMULA, by_total_variation),
]
