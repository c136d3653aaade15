"""Multi-candidate speculative decoding (Yang et al. 2024): a tree of draws, each judged as it was
drawn.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.loop_laws import (
    OWN_CHILDREN,
    TREE_DRAFTS,
    TREE_TARGET,
    Build,
    Table,
    format_table,
    table_model,
)
from tinyspec.laws.theorems import play_siblings, with_replacement
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.verification import multi_candidate as mcsd
from tinyspec.technique import Request

SURE = "all tokens without replacement: one is accepted surely"
CHANCE = "one of k passes with 1 - prod (1 - overlap with what is left of p)"


def joint_law(build: Build) -> Evidence:
    """The joint law of two tokens, in both modes."""
    wide, deep = (
        [{"configuration": c, "replacement": again} for again in (False, True)]
        for c in ("2", "1x2")
    )
    return loop_laws.tree_joint_law(build, wide, deep)


def accepts_surely(build: Build) -> Evidence:
    """V candidates of V different tokens hold every token that the target may say."""
    for q in TREE_DRAFTS:

        def refused(rng: Exhaustive, q: Table = q) -> bool:
            decoder = build(
                Request(table_model(TREE_TARGET).session(), [table_model(q).session()]),
                configuration="3",
                replacement=False,
            )
            decoder.extend((0,))
            return not decoder.step(rng).verdict.accepted

        mass = sum((x for nothing, x in Exhaustive.walk(refused) if nothing), Fraction(0))
        if mass:
            accuse(
                SURE,
                "refused with probability 0",
                mass,
                p=format_table(TREE_TARGET),
                q=format_table(q),
                configuration="3",
            )
    return Evidence(SURE, len(TREE_DRAFTS))


def has_its_own_candidates(build: Build) -> Evidence:
    """2x2 is two nodes with two each below them: six, from two calls of the draft model."""
    return loop_laws.own_children(build, lambda c: {"configuration": c, "replacement": False})


def chance_of_one(formula: Callable[[Any, Any, int], Any]) -> Evidence:
    """Against every outcome of drawing and walking."""
    seen = 0
    for p, q in distribution_pairs(largest=6):
        for k in (1, 2, 3):
            expected, _, _ = play_siblings(verify_tree, with_replacement, p, q, k)
            got, seen = formula(list(p), list(q), k), seen + 1
            if got != expected:
                accuse(CHANCE, expected, got, p=p, q=q, k=k)
    return Evidence(CHANCE, seen)


TRAPS = [
    Trap(JOINT, joint_law, card("multi_candidate")),
    Trap(SURE, accepts_surely, card("multi_candidate")),
    Trap(OWN_CHILDREN, has_its_own_candidates, card("multi_candidate")),
    Trap(CHANCE, chance_of_one, lambda: mcsd.sequential_acceptance),
]
