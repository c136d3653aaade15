"""Decoding Speculative Decoding: what makes it a planner and not a formula. Time is a clock that
only calls move.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps.auto import Ticking, Watch
from tinyspec.speculative.drafting import planner
from tinyspec.speculative.drafting.planner import DraftProfile, NewRequests
from tinyspec.technique import Request

FASTEST = "the recommended draft and length are the fastest by the clock (Yan et al. 2024)"
FORECAST = "tokens a second of a round are TAR and the target's own token over its seconds (Yan et al. 2024)"
MEASURED = "a draft's step costs what the clock says (Yan et al. 2024)"

LONGEST = 4
P = (4, 3, 2, 1)  # the target's law, in tenths, after every context
Advise = Callable[[Mapping[str, NewRequests], int, Watch], tuple[str | None, int]]


class Draft(NamedTuple):
    """A candidate: its law in tenths, and the seconds of a step."""

    name: str
    law: Sequence[int]
    step: float

    @property
    def alpha(self) -> Fraction:
        """The chance that a guess passes: sum min(p, q)."""
        return Fraction(sum(map(min, P, self.law)), 10)


GOOD, FAIR, POOR = (4, 3, 2, 1), (3, 3, 3, 1), (0, 1, 4, 5)
SCENES = (  # candidates, and the slope of a target call of one second by its rows
    ((Draft("deep", GOOD, 0.6), Draft("wide", FAIR, 0.05)), 0.02),
    ((Draft("deep", GOOD, 0.1), Draft("wide", FAIR, 0.05)), 0.02),
    ((Draft("poor", POOR, 0.02), Draft("wide", FAIR, 0.1)), 0.02),
    ((Draft("dear", FAIR, 1.5), Draft("poor", POOR, 0.9)), 0.02),
    ((Draft("wide", FAIR, 0.02),), 0.6),
)


def requests(
    draft: Draft, slope: float, watch: Watch, texts: int = 8, tokens: int = 16
) -> NewRequests:
    """The same texts each time: a target whose calls take 1 + slope (rows - 1) seconds, and this
    draft.
    """

    def make() -> Iterator[tuple[Request, Sequence[int]]]:
        for text in range(texts):
            target = Ticking(always(P), watch, lambda rows: 1 + slope * (rows - 1))
            yield (
                Request(
                    target,
                    [Ticking(always(draft.law), watch, lambda _: draft.step)],
                    stop=StoppingCriteria(max_new_tokens=tokens),
                ),
                [text % 4],
            )

    return make


def always(law: Sequence[int]) -> TableModel:
    """A model that says the same after every context."""
    return TableModel(rows=lambda _: law, vocabulary=len(law), positions=256)


def exact(draft: Draft | None, n: int, slope: float) -> Fraction:
    """Tokens a second of rounds of n guesses: each passes with probability alpha if those before it
    did.
    """
    if draft is None or n == 0:
        return Fraction(1)
    tokens = sum(draft.alpha**i for i in range(n + 1))
    return tokens / (n * Fraction(str(draft.step)) + 1 + Fraction(str(slope)) * n)


def recommends_the_fastest(advise: Advise) -> Evidence:
    """Against the exact throughput of every draft at every length; 5% below the best is sampling
    error.
    """
    for drafts, slope in SCENES:
        watch = Watch()
        pairs: dict[tuple[str | None, int], Fraction] = {
            (draft.name, n): exact(draft, n, slope)
            for draft, n in product(drafts, range(1, LONGEST + 1))
        } | {(None, 0): Fraction(1)}
        got = advise(
            {draft.name: requests(draft, slope, watch) for draft in drafts}, LONGEST, watch
        )
        best = max(pairs, key=lambda pair: pairs[pair])
        if pairs.get(got, 0) < Fraction(95, 100) * pairs[best]:
            said = [f"{d.name}: alpha {d.alpha}, {d.step} s a step" for d in drafts]
            accuse(FASTEST, best, got, drafts=said, call=f"1 + {slope} n seconds")
    return Evidence(FASTEST, len(SCENES), len(SCENES) * LONGEST)


def forecasts_tokens_a_second(throughput: Callable[..., float]) -> Evidence:
    """throughput(TAR, n, step, verify) against the exact mean over rounds of independent
    guesses.
    """
    seen = 0
    for tenths, n, step, verify in product((0, 3, 7, 10), (0, 1, 4), (0.0, 0.25), (1.0, 1.5)):
        alpha = Fraction(tenths, 10)
        tar = sum(alpha**i for i in range(1, n + 1))
        expected = float((1 + tar) / (n * Fraction(str(step)) + Fraction(str(verify))))
        got, seen = throughput(float(tar), n, step, verify), seen + 1
        if abs(got - expected) > 1e-9:
            accuse(FORECAST, expected, got, alpha=alpha, n=n, step=step, call=verify)
    return Evidence(FORECAST, seen)


def measures_its_steps(profile: Callable[..., DraftProfile]) -> Evidence:
    """A profile's seconds a step against those that the draft took."""
    for step, law in product((0.05, 0.4), (GOOD, POOR)):
        watch, draft = Watch(), Draft("draft", law, step)
        got = profile("draft", requests(draft, 0.1, watch, texts=2), LONGEST, watch).step
        if abs(got - step) > 1e-9:
            accuse(MEASURED, step, got, q=law)
    return Evidence(MEASURED, 4)


def advise(asked: Mapping[str, NewRequests], longest: int, watch: Watch) -> tuple[str | None, int]:
    """The technique's own answer."""
    best = planner.plan_drafts(asked, longest, watch)[2][0]
    return best.draft, best.n


TRAPS = [
    Trap(FASTEST, recommends_the_fastest, lambda: advise),
    Trap(FORECAST, forecasts_tokens_a_second, lambda: planner.tokens_per_second),
    Trap(MEASURED, measures_its_steps, lambda: planner.profile_draft),
]
