"""SpecInfer (Miao et al. 2024): proposals of several models, each tested against its own law;
models made for each other.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

from tinyspec.decoding.decode import Verifier
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass, positive_part
from tinyspec.laws.loop_laws import OWN_CHILDREN, TREE_DRAFTS, TREE_TARGET, Build, table_model
from tinyspec.laws.theorems import play_siblings, with_replacement
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.verification import specinfer as sif
from tinyspec.technique import Request

TESTS = "k drafts are refused with the product of the distances: one test each"
MERGED = "a prefix that several models say is run once"
LEFT = "each draft is tuned on the prompts that no draft before it covers"


def joint_law(build: Build) -> Evidence:
    """Two models whose laws differ and whose tokens collide."""
    return loop_laws.tree_joint_law(build, [{"expansion": "1"}], [{"expansion": "2+1"}], drafts=2)


def expands_every_leaf(build: Build) -> Evidence:
    """k tokens below every leaf, one call a depth."""
    return loop_laws.own_children(build, lambda shape: {"expansion": shape})


def tests_each(verifier: Verifier) -> Evidence:
    """Of k i.i.d. drafts one passes as often as one test a draft allows; sampling once and looking
    passes less.
    """
    seen = 0
    for p, q in distribution_pairs(largest=5):
        left: Any = p
        refused: Any = 1
        for k in (1, 2):
            refused *= 1 - overlap_mass(left, q)
            left = positive_part(left, q) or left
            got, _, _ = play_siblings(verifier, with_replacement, p, q, k)
            seen += 1
            if got != 1 - refused:
                accuse(TESTS, 1 - refused, got, p=p, q=q, k=k)
    return Evidence(TESTS, seen)


def runs_a_prefix_once(build: Build) -> Evidence:
    """Two models that are the same, at temperature 0: the target runs the newest token and one
    path.
    """
    for depth in (1, 2, 4):
        forward_log: list[Any] = []
        drafts = [table_model(TREE_DRAFTS[0]).session() for _ in range(2)]
        request = Request(
            table_model(TREE_TARGET).session(forward_log),
            drafts,
            SamplingParams(temperature=0.0),
            forward_log=forward_log,
        )
        decoder = build(request, expansion="x".join("1" * depth))
        decoder.extend((0,))
        tree = decoder.drafter.propose([0], 9, request.sampling, Seeded(0))
        del forward_log[:]
        decoder.target.score(tree)
        rows = sum(call.rows for call in forward_log)
        if rows != depth + 1:
            accuse(MERGED, depth + 1, rows, depth=depth, models=2)
    return Evidence(MERGED, 3)


def tunes_on_what_is_left(collectively: Callable[..., Any]) -> Evidence:
    """Drafts that can learn two prompts each cover what those before them do not."""
    for order in permutations(range(5)):
        known: list[set[int]] = []

        def tune(draft: int, prompts: Sequence[int], known: list[set[int]] = known) -> int:
            known.append(set(prompts[:2]))
            return draft

        collectively(
            range(3), list(order), tune, lambda draft, prompt, known=known: prompt in known[draft]
        )
        if set().union(*known) != set(range(5)):
            expected = [set(order[at : at + 2]) for at in (0, 2, 4)]
            accuse(LEFT, expected, known, prompts=order, drafts=3, each_learns=2)
    return Evidence(LEFT, 120)


TRAPS = [
    Trap(JOINT, joint_law, card("specinfer")),
    Trap(OWN_CHILDREN, expands_every_leaf, card("specinfer")),
    Trap(MERGED, runs_a_prefix_once, card("specinfer")),
    Trap(TESTS, tests_each, lambda: sif.verify_tree_multi_step),
    Trap(LEFT, tunes_on_what_is_left, lambda: sif.tune_collectively),
]
