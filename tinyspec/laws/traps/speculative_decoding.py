"""Speculative decoding (Leviathan et al., Chen et al. 2023): the residual and the bonus token.

The sampling settings apply to q as well, and the paper's analysis belongs to the technique.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import theorems
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, format_table, table_reference
from tinyspec.laws.traps import GREEDY, SAMPLED, Build, Trap, begin_decoder, card, check_table_law
from tinyspec.speculative.drafting import speculative_decoding as sps

BONUS = "a draft that passes whole earns a token more"
PAIRED = "alpha is the mean overlap of paired rows (Leviathan et al. 2023, corollary 3.6)"

FIVE: Table = ((1, 2, 0, 1, 4), (2, 1, 1, 0, 0), (1, 1, 1, 1, 1), (0, 3, 1, 0, 2), (1, 0, 0, 0, 1))
OTHER: Table = ((2, 1, 1, 1, 1), (1, 1, 1, 1, 2), (1, 2, 3, 1, 1), (1, 1, 1, 1, 1), (3, 1, 1, 1, 2))


def _chain_cases() -> Iterator[tuple[Table, Table, int, SamplingParams]]:
    """Yield p, q, gamma, sampling settings: two tokens first, then Markov tables over five."""
    for (p, q), sampling in product(
        SMALL_TABLES, (SAMPLED, SamplingParams(top_k=1), SamplingParams(temperature=0.5))
    ):
        yield p, q, 1, sampling
    for p, q in SMALL_TABLES[2:6]:
        yield p, q, 2, SAMPLED
    yield FIVE, OTHER, 1, SAMPLED
    yield FIVE, OTHER, 2, SamplingParams(top_p=0.6)
    yield FIVE, OTHER, 3, SamplingParams(top_k=2)


@collect_evidence(JOINT)
def joint_distribution_of_a_chain(build: Build) -> Iterator[int]:
    """Check that two tokens, over all their rounds, are distributed as the target's."""
    for p, q, gamma, sampling in _chain_cases():
        case = {"p": format_table(p), "q": format_table(q), "gamma": gamma}
        if sampling != SAMPLED:
            case["sampling"] = sampling
        yield check_table_law(build, (p, q), table_reference(p, sampling), case, gamma=gamma)


@collect_evidence(BONUS)
def earns_a_bonus(build: Build) -> Iterator[int]:
    """Check that a round makes gamma + 1 tokens where the draft is the target.

    The temperature is 0.
    """
    for gamma in (1, 2, 3):
        models = [TableModel(1, zeros=False) for _ in range(2)]
        decoder = begin_decoder(build, models, (0,), GREEDY, gamma=gamma)
        got, case = len(decoder.step(Seeded(0)).tokens), {"draft": "the target itself"}
        expect_equal(BONUS, gamma + 1, got, **case, temperature=0, gamma=gamma)
        yield 0


@collect_evidence(PAIRED)
def alpha_of_paired_rows(acceptance: Callable[[Sequence[tuple[Any, Any]]], float]) -> Iterator[int]:
    """Check the estimator against sum min(p, q), on pairs and on their mean."""
    for p, q in distribution_pairs((2, 3), 6):
        for rows, expected in (
            ([(p, q)], overlap_mass(p, q)),
            ([(p, q), (p, p)], (overlap_mass(p, q) + 1) / Fraction(2)),
        ):
            got = acceptance(rows)
            if abs(got - expected) > 1e-12:
                accuse(PAIRED, expected, got, rows=rows)
            yield 0


TRAPS = [
    Trap(JOINT, joint_distribution_of_a_chain, card("speculative_decoding")),
    Trap(BONUS, earns_a_bonus, card("speculative_decoding")),
    Trap(PAIRED, alpha_of_paired_rows, lambda: sps.acceptance_rate),
    Trap(theorems.PREDICTION, theorems.predicted_tokens, lambda: sps.expected_tokens),
    Trap(theorems.PLANNER, theorems.planner_is_optimal, lambda: sps.best_gamma),
    Trap(theorems.LENIENCE, theorems.lenience_cap, lambda: sps.lenient_verifier),
]
