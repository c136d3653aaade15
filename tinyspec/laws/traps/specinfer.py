"""SpecInfer (Miao et al. 2024): several models propose, and each token has a test of its own.

Each draft model is tuned on what the others do not cover.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Any

from tinyspec.decoding.decode import Verifier
from tinyspec.decoding.rng import Seeded
from tinyspec.laws import loop_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.loop_laws import OWN_CHILDREN, TREE_DRAFTS, TREE_TARGET, table_model
from tinyspec.laws.theorems import play_siblings, rejection_probability, with_replacement
from tinyspec.laws.traps import GREEDY, Build, Trap, begin_decoder, card
from tinyspec.speculative.verification import specinfer as sif

TESTS = "k drafts are rejected with the product of the distances: one test each"
MERGED = "a prefix that several models propose is run once"
LEFT = "each draft is tuned on the prompts that no draft before it covers"


def joint_distribution_of_two_models(build: Build) -> Evidence:
    """Check two models whose distributions differ and whose tokens collide."""
    return loop_laws.tree_joint_distribution(
        build, [{"expansion": "1"}], [{"expansion": "2+1"}], drafts=2
    )


def expands_every_leaf(build: Build) -> Evidence:
    """Check k tokens below every leaf, and one draft pass for each depth."""
    return loop_laws.own_children(build, lambda shape: {"expansion": shape})


@collect_evidence(TESTS)
def tests_each(verifier: Verifier) -> Iterator[int]:
    """Check how often one of k i.i.d. draft tokens passes, if each has a test of its own.

    Drawing one target token and looking for it among the drafts passes less.
    """
    for (p, q), k in product(distribution_pairs(largest=5), (1, 2)):
        got, _, _ = play_siblings(verifier, with_replacement, p, q, k)
        expected = 1 - rejection_probability(p, q, k, replace=True)
        expect_equal(TESTS, expected, got, p=p, q=q, k=k)
        yield 0


@collect_evidence(MERGED)
def runs_a_prefix_once(build: Build) -> Iterator[int]:
    """Check that the target runs the newest token and one path, at temperature 0.

    The two draft models are the same.
    """
    for depth in (1, 2, 4):
        models = [table_model(table) for table in (TREE_TARGET, TREE_DRAFTS[0], TREE_DRAFTS[0])]
        decoder = begin_decoder(build, models, (0,), expansion="x".join("1" * depth))
        tree = decoder.drafter.propose([0], 9, GREEDY, Seeded(0))
        decoder.forward_log.clear()
        decoder.target.score(tree)
        rows = sum(call.rows for call in decoder.forward_log)
        expect_equal(MERGED, depth + 1, rows, depth=depth, models=2)
        yield 0


@collect_evidence(LEFT)
def tunes_on_what_is_left(tune_together: Callable[..., Any]) -> Iterator[int]:
    """Check that drafts that learn two prompts each cover what those before them do not."""
    for order in permutations(range(5)):
        known: list[set[int]] = []

        def tune(draft: int, prompts: Sequence[int], known: list[set[int]] = known) -> int:
            known.append(set(prompts[:2]))
            return draft

        covers = lambda draft, prompt, known=known: prompt in known[draft]  # noqa: E731
        tune_together(range(3), list(order), tune, covers)
        if set().union(*known) != set(range(5)):
            expected = [set(order[at : at + 2]) for at in (0, 2, 4)]
            accuse(LEFT, expected, known, prompts=order, drafts=3, each_learns=2)
        yield 0


TRAPS = [
    Trap(JOINT, joint_distribution_of_two_models, card("specinfer")),
    Trap(OWN_CHILDREN, expands_every_leaf, card("specinfer")),
    Trap(MERGED, runs_a_prefix_once, card("specinfer")),
    Trap(TESTS, tests_each, lambda: sif.verify_tree_multi_step),
    Trap(LEFT, tunes_on_what_is_left, lambda: sif.tune_collectively),
]
