"""Speculative contrastive decoding (Yuan et al. 2024): the contrast is the law everywhere, and the
amateur runs once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import Reference
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, enumerate_tokens, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.traps import Trap, card
from tinyspec.technique import Request

CONTRAST = "the joint law is the contrast's"
ONCE = "the amateur runs each token once"

Build = Callable[..., Decoder]

EXPERT: Table = ((4, 2, 1), (1, 5, 0), (3, 3, 1))
AMATEUR: Table = ((1, 2, 2), (2, 0, 2), (1, 1, 3))
BETA = 1


def contrasted(
    p_e: Sequence[Fraction], p_a: Sequence[Fraction], beta: int, plausibility: Fraction
) -> list[Fraction]:
    """The formula: p_e^(1+beta) / p_a^beta over the tokens with p_e >= plausibility max p_e,
    normalised; where the amateur gives such tokens no mass, those alone, by p_e^(1+beta)."""
    said = [x for x, e in enumerate(p_e) if e and e >= plausibility * max(p_e)]
    unheard = [x for x in said if beta and not p_a[x]]
    weights = {
        x: p_e[x] ** (1 + beta) / (1 if unheard else p_a[x] ** beta) for x in unheard or said
    }
    return [weights.get(x, Fraction(0)) / sum(weights.values()) for x in range(len(p_e))]


def _cases() -> Iterator[tuple[Table, Table, int, float, SamplingParams]]:
    """Expert, amateur, beta, plausibility, warp."""
    for p, q in SMALL_TABLES:
        yield p, q, BETA, 0.25, SamplingParams()
    for (p, q), plausibility in product(SMALL_TABLES[3:6], (0.0, 1.0)):
        yield p, q, BETA, plausibility, SamplingParams()
    for beta, plausibility, sampling in (
        (0, 0.0, SamplingParams()),
        (1, 0.3, SamplingParams(0.5)),
        (2, 0.5, SamplingParams()),
        (1, 0.1, SamplingParams(0.0)),
    ):
        yield EXPERT, AMATEUR, beta, plausibility, sampling


def joint_law_of_the_contrast(build: Build) -> Evidence:
    """Two tokens, drafted by the amateur, are distributed as the formula says, warped as the user
    asked.
    """
    seen, branches = 0, 0
    for p, q, beta, plausibility, sampling in _cases():

        def make(
            p: Table = p, q: Table = q, sampling: SamplingParams = sampling, **knobs: Any
        ) -> Decoder:
            return build(
                Request(table_model(p).session(), [table_model(q).session()], sampling), **knobs
            )

        def row(
            text: Any, p: Table = p, q: Table = q, beta: int = beta, least: float = plausibility
        ) -> list[Fraction]:
            expert, amateur = (normalised(table[text[-1] % len(table)]) for table in (p, q))
            return contrasted(expert, amateur, beta, Fraction(str(least)))

        expected = Reference(row, sampling).law(2)
        knobs = {
            "gamma": 2 if p is EXPERT else 1,
            "beta": float(beta),
            "plausibility": plausibility,
        }
        got, walked = enumerate_tokens(lambda make=make, knobs=knobs: make(**knobs), 2)  # type: ignore[misc]
        seen, branches = seen + 1, branches + walked
        if got != expected:
            case = {
                "expert": format_table(p),
                "amateur": format_table(q),
                **knobs,
                **({} if sampling == SamplingParams() else {"sampling": sampling}),
            }
            accuse(CONTRAST, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
    return Evidence(CONTRAST, seen, branches)


def amateur_runs_once(build: Build) -> Evidence:
    """Rows of the amateur, the prompt's not counted: one for the newest token of each round and one
    a guess.
    """
    for gamma in (1, 3):
        forward_log: list[Any] = []
        amateur = TableModel(2, zeros=False, name="amateur")
        request = Request(
            TableModel(1, zeros=False).session(forward_log),
            [amateur.session(forward_log)],
            forward_log=forward_log,
        )
        decoder = build(
            replace(request, stop=StoppingCriteria(max_new_tokens=12)),
            gamma=gamma,
            beta=float(BETA),
        )
        decoder.extend((0, 1))
        forward_log.clear()
        due = 0
        while not decoder.finished:
            due += 1 + len(decoder.step(Seeded(decoder.rounds)).tree.tokens)
        ran = sum(call.rows for call in forward_log if call.model == "amateur")
        if ran > due:
            accuse(
                ONCE,
                f"at most {due} rows",
                f"{ran} rows",
                gamma=gamma,
                rounds=decoder.rounds,
                new_tokens=12,
            )
    return Evidence(ONCE, 2)


TRAPS = [
    Trap(CONTRAST, joint_law_of_the_contrast, card("speculative_contrastive")),
    Trap(ONCE, amateur_runs_once, card("speculative_contrastive")),
]
