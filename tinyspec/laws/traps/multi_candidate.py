"""Multi-candidate speculative decoding (Yang et al. 2024): a tree of drawn tokens.

Each token is tested against the distribution that it was drawn from.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.loop_laws import (
    OWN_CHILDREN,
    TREE_DRAFTS,
    TREE_TARGET,
    Table,
    format_table,
    table_model,
)
from tinyspec.laws.theorems import play_siblings, with_replacement
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.speculative.verification import multi_candidate as mcsd

SURE = "all tokens without replacement: one is accepted surely"
CHANCE = "one of k passes with 1 - prod (1 - overlap with what is left of p)"


def joint_distribution_of_siblings(build: Build) -> Evidence:
    """Check the joint distribution of two tokens, with and without replacement."""
    wide, deep = (
        [{"configuration": c, "replacement": again} for again in (False, True)]
        for c in ("2", "1x2")
    )
    return loop_laws.tree_joint_distribution(build, wide, deep)


@collect_evidence(SURE)
def accepts_surely(build: Build) -> Iterator[int]:
    """Check that V different candidates always hold the token that the target chooses."""
    for q in TREE_DRAFTS:

        def rejects(rng: Exhaustive, q: Table = q) -> bool:
            models = [table_model(TREE_TARGET), table_model(q)]
            knobs: dict[str, Any] = {"configuration": "3", "replacement": False}
            decoder = begin_decoder(build, models, (0,), SAMPLED, **knobs)
            return not decoder.step(rng).verdict.accepted

        mass = sum((x for rejected, x in Exhaustive.walk(rejects) if rejected), Fraction(0))
        case = {"p": format_table(TREE_TARGET), "q": format_table(q), "configuration": "3"}
        expect_equal(SURE, 0, mass, **case, probability="of rejecting all candidates")
        yield 0


def has_its_own_candidates(build: Build) -> Evidence:
    """Check that 2x2 is six nodes, from two calls of the draft model."""
    return loop_laws.own_children(build, lambda c: {"configuration": c, "replacement": False})


@collect_evidence(CHANCE)
def chance_of_one(formula: Callable[[Any, Any, int], Any]) -> Iterator[int]:
    """Check a formula against every outcome of drawing and verifying."""
    for p, q in distribution_pairs(largest=6):
        for k in (1, 2, 3):
            expected, _, _ = play_siblings(verify_tree, with_replacement, p, q, k)
            expect_equal(CHANCE, expected, formula(list(p), list(q), k), p=p, q=q, k=k)
            yield 0


TRAPS = [
    Trap(JOINT, joint_distribution_of_siblings, card("multi_candidate")),
    Trap(SURE, accepts_surely, card("multi_candidate")),
    Trap(OWN_CHILDREN, has_its_own_candidates, card("multi_candidate")),
    Trap(CHANCE, chance_of_one, lambda: mcsd.sequential_acceptance),
]
