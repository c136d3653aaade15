"""Speculative decoding (Leviathan et al., Chen et al. 2023): the residual, the warped q, the bonus,
and the analysis.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import theorems
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, enumerate_tokens, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.drafting import speculative_decoding as sps
from tinyspec.technique import Request

BONUS = "a draft that passes whole earns a token more"
PAIRED = "alpha is the mean overlap of paired rows (Leviathan et al. 2023, corollary 3.6)"

Build = Callable[..., Decoder]

FIVE: Table = ((1, 2, 0, 1, 4), (2, 1, 1, 0, 0), (1, 1, 1, 1, 1), (0, 3, 1, 0, 2), (1, 0, 0, 0, 1))
OTHER: Table = ((2, 1, 1, 1, 1), (1, 1, 1, 1, 2), (1, 2, 3, 1, 1), (1, 1, 1, 1, 1), (3, 1, 1, 1, 2))


def _chains() -> Iterator[tuple[Table, Table, int, SamplingParams]]:
    """p, q, gamma, warp: two tokens first, then Markov tables over five."""
    for (p, q), sampling in product(
        SMALL_TABLES, (SamplingParams(), SamplingParams(top_k=1), SamplingParams(temperature=0.5))
    ):
        yield p, q, 1, sampling
    for p, q in SMALL_TABLES[2:6]:
        yield p, q, 2, SamplingParams()
    for gamma, sampling in (
        (1, SamplingParams()),
        (2, SamplingParams(top_p=0.6)),
        (3, SamplingParams(top_k=2)),
    ):
        yield FIVE, OTHER, gamma, sampling


def joint_law_of_a_chain(build: Build) -> Evidence:
    """Two tokens over as many rounds as they take are distributed as the target's."""
    seen, branches = 0, 0
    for p, q, gamma, sampling in _chains():

        def make(
            p: Table = p, q: Table = q, gamma: int = gamma, sampling: SamplingParams = sampling
        ) -> Decoder:
            return build(
                Request(table_model(p).session(), [table_model(q).session()], sampling), gamma=gamma
            )

        got, walked = enumerate_tokens(make, 2)
        expected = Reference(lambda text, p=p: normalised(p[text[-1] % len(p)]), sampling).law(2)  # type: ignore[misc]
        seen, branches = seen + 1, branches + walked
        if got != expected:
            case = {
                "p": format_table(p),
                "q": format_table(q),
                "gamma": gamma,
                **({} if sampling == SamplingParams() else {"sampling": sampling}),
            }
            accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
    return Evidence(JOINT, seen, branches)


def earns_a_bonus(build: Build) -> Evidence:
    """Where the draft is the target, at temperature 0, a round makes gamma + 1 tokens."""
    for gamma in (1, 2, 3):
        target, draft = (TableModel(1, zeros=False).session() for _ in range(2))
        decoder = build(Request(target, [draft], SamplingParams(temperature=0.0)), gamma=gamma)
        decoder.extend((0,))
        got = len(decoder.step(Seeded(0)).tokens)
        if got != gamma + 1:
            accuse(BONUS, gamma + 1, got, draft="the target itself", temperature=0, gamma=gamma)
    return Evidence(BONUS, 3)


def alpha_of_paired_rows(acceptance: Callable[[Sequence[tuple[Any, Any]]], float]) -> Evidence:
    """The estimator against sum min(p, q), on pairs and on their mean."""
    seen = 0
    for p, q in distribution_pairs((2, 3), 6):
        for rows, expected in (
            ([(p, q)], overlap_mass(p, q)),
            ([(p, q), (p, p)], (overlap_mass(p, q) + 1) / Fraction(2)),
        ):
            got, seen = acceptance(rows), seen + 1
            if abs(got - expected) > 1e-12:
                accuse(PAIRED, expected, got, rows=rows)
    return Evidence(PAIRED, seen)


TRAPS = [
    Trap(JOINT, joint_law_of_a_chain, card("speculative_decoding")),
    Trap(BONUS, earns_a_bonus, card("speculative_decoding")),
    Trap(PAIRED, alpha_of_paired_rows, lambda: sps.acceptance_rate),
    Trap(theorems.PREDICTION, theorems.predicted_tokens, lambda: sps.expected_tokens),
    Trap(theorems.PLANNER, theorems.planner_is_optimal, lambda: sps.best_gamma),
    Trap(theorems.LENIENCE, theorems.lenience_cap, lambda: sps.lenient_verifier),
]
