"""Every verification rule skips probes, and no probe changes a row of the target.

A rule for chains names the branch that it cannot judge.
"""

from collections.abc import Callable
from fractions import Fraction as F
from typing import Any

import pytest
import torch

from tinyspec import _core
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head
from tinyspec.laws.traps import GREEDY, begin_decoder
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.cascade import lenient_review
from tinyspec.speculative.drafting.speculative_decoding import lenient_verifier
from tinyspec.speculative.verification.bild import rollback_verifier
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.specinfer import verify_tree_multi_step
from tinyspec.speculative.verification.spectr import verify_tree_k_seq
from tinyspec.speculative.verification.typical_acceptance import typical_verifier
from tinyspec.technique import find_technique
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
    return Exhaustive.distribution(lambda rng: rule(tree, Probs(tree), rng).output_tokens(tree))


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


@pytest.mark.skipif(_core.compute is None, reason="torch's rows depend on how many there are")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "knobs"),
    [
        ("bita", {"candidates": 2}),
        ("parallel_prompt", {"nodes": 9}),
        ("pass_sampling", {}),
        ("space", {}),
    ],
)
def test_the_targets_row_does_not_change_to_the_bit(
    method: str, knobs: dict[str, Any], dtype: torch.dtype
) -> None:
    """With probes in the pass, the newest token's row is that of a pass without them."""
    card, text = find_technique(method), (1, 2, 3)
    model = Model.random(Config(40, 16, 2, 2, 1, 8, 24, 64), dtype=dtype, scale=0.3)
    if card.trained is not None:
        model = add_random_head(model, card, 0)
    decoder = begin_decoder(card.make, [model], text, GREEDY, 30, **knobs)
    plain, n_probes = model.session(), 0
    plain.extend(text)
    for number in range(6):
        round = decoder.step(Seeded(number))
        assert torch.equal(round.scores.logits[0], plain.score(TokenTree()).logits[0])
        n_probes += sum(round.tree.probe)
        for token in round.tokens:
            plain.commit((), token)
    assert n_probes > 0
