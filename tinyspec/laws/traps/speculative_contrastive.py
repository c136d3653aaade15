"""Speculative contrastive decoding (Yuan et al. 2024): the contrast decides every token.

The amateur, which drafts, runs once.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.exact.joint import Reference
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, format_table
from tinyspec.laws.row_laws import normalize_weights
from tinyspec.laws.traps import (
    SAMPLED,
    Build,
    Trap,
    begin_decoder,
    card,
    check_table_law,
    run_all_rounds,
)

CONTRAST = "the joint distribution is the contrast's"
ONCE = "the amateur runs each token once"

EXPERT: Table = ((4, 2, 1), (1, 5, 0), (3, 3, 1))
AMATEUR: Table = ((1, 2, 2), (2, 0, 2), (1, 1, 3))
BETA = 1


def contrast_probs(
    p_e: Sequence[Fraction], p_a: Sequence[Fraction], beta: int, plausibility: Fraction
) -> list[Fraction]:
    """Return the contrast of an expert and an amateur.

    The formula is p_e^(1+beta) / p_a^beta over the tokens with p_e >= plausibility max p_e,
    normalised. Where the amateur gives such tokens no mass: those alone, by p_e^(1+beta).
    """
    plausible = [x for x, e in enumerate(p_e) if e and e >= plausibility * max(p_e)]
    impossible = [x for x in plausible if beta and not p_a[x]]
    weights = {
        x: p_e[x] ** (1 + beta) / (1 if impossible else p_a[x] ** beta)
        for x in impossible or plausible
    }
    return [weights.get(x, Fraction(0)) / sum(weights.values()) for x in range(len(p_e))]


def _contrast_cases() -> Iterator[tuple[Table, Table, int, float, SamplingParams]]:
    """Yield expert, amateur, beta, plausibility, sampling settings."""
    for p, q in SMALL_TABLES:
        yield p, q, BETA, 0.25, SAMPLED
    for (p, q), plausibility in product(SMALL_TABLES[3:6], (0.0, 1.0)):
        yield p, q, BETA, plausibility, SAMPLED
    for beta, plausibility, sampling in (
        (0, 0.0, SAMPLED),
        (1, 0.3, SamplingParams(0.5)),
        (2, 0.5, SAMPLED),
        (1, 0.1, SamplingParams(0.0)),
    ):
        yield EXPERT, AMATEUR, beta, plausibility, sampling


@collect_evidence(CONTRAST)
def joint_distribution_of_the_contrast(build: Build) -> Iterator[int]:
    """Check that two tokens, drafted by the amateur, are distributed as the formula says.

    The user's sampling settings apply to the contrast.
    """
    for p, q, beta, plausibility, sampling in _contrast_cases():

        def contrast(
            text: Any, p: Table = p, q: Table = q, beta: int = beta, least: float = plausibility
        ) -> list[Fraction]:
            expert, amateur = (normalize_weights(table[text[-1] % len(table)]) for table in (p, q))
            return contrast_probs(expert, amateur, beta, Fraction(str(least)))

        gamma = 2 if p is EXPERT else 1
        knobs: dict[str, Any] = {"gamma": gamma, "beta": float(beta), "plausibility": plausibility}
        case = {"expert": format_table(p), "amateur": format_table(q), **knobs}
        if sampling != SAMPLED:
            case["sampling"] = sampling
        expected = Reference(contrast, sampling)
        yield check_table_law(build, (p, q), expected, case, CONTRAST, **knobs)


@collect_evidence(ONCE)
def amateur_runs_once(build: Build) -> Iterator[int]:
    """Check the rows of the amateur: one for each round's newest token and for each draft token.

    The prompt's rows are not counted.
    """
    for gamma in (1, 3):
        models = [TableModel(1, zeros=False), TableModel(2, zeros=False, name="amateur")]
        knobs: dict[str, Any] = {"gamma": gamma, "beta": float(BETA)}
        decoder = begin_decoder(build, models, (0, 1), SAMPLED, 12, **knobs)
        decoder.forward_log.clear()
        rounds = run_all_rounds(decoder)
        due = sum(1 + len(one.tree.tokens) for one in rounds)
        ran = sum(call.rows for call in decoder.forward_log if call.model == "amateur")
        if ran > due:
            case = {"gamma": gamma, "rounds": len(rounds), "new_tokens": 12}
            accuse(ONCE, f"at most {due} rows", f"{ran} rows", **case)
        yield 0


TRAPS = [
    Trap(CONTRAST, joint_distribution_of_the_contrast, card("speculative_contrastive")),
    Trap(ONCE, amateur_runs_once, card("speculative_contrastive")),
]
