"""Every verification rule skips probes.

A rule for chains names the branch that it cannot judge.
"""

from collections.abc import Callable
from fractions import Fraction as F
from typing import Any

import pytest

from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.speculative.drafting.cascade import lenient_review
from tinyspec.speculative.drafting.speculative_decoding import lenient_verifier
from tinyspec.speculative.verification.bild import rollback_verifier
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.specinfer import verify_tree_multi_step
from tinyspec.speculative.verification.spectr import verify_tree_k_seq
from tinyspec.speculative.verification.typical_acceptance import typical_verifier
from tinyspec.tree import ROOT, TokenTree

Rule = Callable[[TokenTree, Any, Any], Verdict]

CHAINS: dict[str, Rule] = {
    "block": verify_tree_by_block,
    "lenient": lenient_verifier(F(1, 2)),  # type: ignore[arg-type]
    "lenient review": lenient_review(F(2)),  # type: ignore[arg-type]
    "bild": rollback_verifier(0.6, "paper"),
    "bild, safe": rollback_verifier(0.6, "safe"),
}
TREES: dict[str, Rule] = {
    "verify_tree": verify_tree,
    "multi-step": verify_tree_multi_step,
    "k-seq": verify_tree_k_seq,
    "typical": typical_verifier(0.09, 0.3, "typical"),
}
P, Q = [F(1, 5), F(4, 5)], [F(1, 2), F(1, 2)]
PROBE = 9  # a token that no distribution knows


class Probs(dict[int, Any]):
    """Return P after every node, and fail after a probe: no rule may ask for that."""

    sampling = SamplingParams()

    def __init__(self, tree: TokenTree):
        super().__init__(
            {n: P for n in range(ROOT, len(tree.tokens)) if n < 0 or not tree.probe[n]}
        )

    def probs_under(self, node: int, sampling: SamplingParams) -> Any:
        return self[node]


def outcomes(rule: Rule, tree: TokenTree) -> dict[Any, Any]:
    """Return the exact probability of every output."""
    return Exhaustive.law(lambda rng: rule(tree, Probs(tree), rng).output_tokens(tree))


@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_probes_change_no_verdict(name: str) -> None:
    rule = {**CHAINS, **TREES}[name]
    for first in (0, 1):
        chain = TokenTree.chain([first, 1], [Q, Q])
        probed = TokenTree(
            [PROBE, first, PROBE, 1, PROBE],
            [ROOT, ROOT, 1, 1, 2],
            [None, Q, None, Q, None],
            [True, False, True, False, True],
        )
        expected = outcomes(rule, chain)
        assert len(expected) > 1
        assert outcomes(rule, probed) == expected


@pytest.mark.parametrize("name", CHAINS)
def test_a_rule_for_chains_names_the_branch_that_it_cannot_judge(name: str) -> None:
    for tokens, parents in (([0, 1], [ROOT, ROOT]), ([0, 1, 0], [ROOT, 0, 0])):
        n = len(tokens)
        tree = TokenTree(tokens, parents, [Q] * n, [False] * n)
        with pytest.raises(TinyspecError, match="judges one chain of draft tokens"):
            CHAINS[name](tree, Probs(tree), Seeded(0))
