"""What SpecTr promises of K-SEQ (Sun et al., NeurIPS 2023, arXiv 2310.15141), as laws of a verifier
of independent drafts.

That it reaches its share of the optimal transport, and never more than all, is in `theorems`; here
are its two other halves: the law is kept, over drafts of several tokens whose texts meet and part,
and no smaller factor would have kept it.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from time import perf_counter

import numpy as np

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.blocks import BlockCase, expect_target_law, play_rounds
from tinyspec.laws.small import Exact, distribution_pairs
from tinyspec.laws.theorems import TreeVerifier
from tinyspec.laws.transport import kseq_acceptance
from tinyspec.tree import ROOT, TokenTree

SELECTED = "what is selected among k drafts, or drawn behind them, has the target's law (SpecTr, arXiv 2310.15141)"
FACTOR = "K-SEQ accepts what it does at the least lawful rho (SpecTr, arXiv 2310.15141)"
FACTOR_TOLERANCE = 1e-8


def selection_cases(largest: int) -> Iterator[BlockCase]:
    """One position first, then two: two drafts of two tokens, and three of one."""
    for p, q in distribution_pairs(largest=largest):
        yield BlockCase(p, q, False, 1, 2)
    for p, q in distribution_pairs((2,), largest):
        yield BlockCase(p, q, False, 1, 3)
        yield BlockCase(p, q, True, 2, 2)
    p, q = (tuple(Fraction(x, 6) for x in row) for row in ((3, 2, 1), (1, 2, 3)))
    yield BlockCase(
        p, q, True, 2, 2
    )  # three tokens: behind a draft that parted, a residual of more than one


def selection_keeps_law(verifier: TreeVerifier, largest: int = 5) -> Evidence:
    """Behind any text that a round has emitted so far, the next token has the law p. In fractions,
    every outcome walked.
    """
    began, cases, branches = perf_counter(), 0, 0
    for case in selection_cases(largest):
        round = play_rounds(verifier, case)
        cases, branches = cases + 1, branches + round.branches
        expect_target_law(SELECTED, case, round)
    return Evidence(SELECTED, cases, branches, perf_counter() - began)


def least_factor(
    verifier: TreeVerifier, largest: int = 5, ks: Sequence[int] = (1, 2, 3)
) -> Evidence:
    """On float rows: one of k drafts of q is taken as often as theory says, with the least rho."""
    began, cases, branches = perf_counter(), 0, 0
    for p, q in distribution_pairs(largest=largest):
        for k in ks:
            got, walked = _taken(verifier, p, q, k)
            cases, branches = cases + 1, branches + walked
            expected = kseq_acceptance(p, q, k)
            if abs(got - expected) > FACTOR_TOLERANCE:
                accuse(FACTOR, expected, got, p=p, q=q, k=k)
    return Evidence(FACTOR, cases, branches, perf_counter() - began)


def _taken(verifier: TreeVerifier, p: Exact, q: Exact, k: int) -> tuple[float, int]:
    rows, law = dict.fromkeys(range(ROOT, k), np.array(p, float)), np.array(q, float)

    def play(rng: Exhaustive) -> bool:
        tokens = [rng.draw(law) for _ in range(k)]
        return bool(
            verifier(TokenTree(tokens, (ROOT,) * k, (law,) * k, (False,) * k), rows, rng).accepted
        )

    outcomes = list(Exhaustive.walk(play))
    return float(sum(probability for passed, probability in outcomes if passed)), len(outcomes)
