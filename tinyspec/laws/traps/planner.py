"""Decoding Speculative Decoding: a planner measures, which a formula does not.

Time is a clock that only forward passes move.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import NamedTuple

from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps.auto import Ticking, Watch, rise_by_rows
from tinyspec.speculative.drafting import planner
from tinyspec.speculative.drafting.planner import DraftProfile, NewRequests
from tinyspec.technique import Request

FASTEST = "the recommended draft and length are the fastest by the clock (Yan et al. 2024)"
FORECAST = (
    "tokens a second of a round are TAR and the target's own token over its seconds "
    "(Yan et al. 2024)"
)
MEASURED = "a draft's step costs what the clock says (Yan et al. 2024)"

LONGEST = 4
P = (4, 3, 2, 1)  # the target's distribution, in tenths, after every context
Advise = Callable[[Mapping[str, NewRequests], int, Watch], tuple[str | None, int]]


class Draft(NamedTuple):
    """A candidate: its distribution in tenths, and the seconds of a step."""

    name: str
    tenths: Sequence[int]
    step: float

    @property
    def alpha(self) -> Fraction:
        """Return the probability that a draft token passes: sum min(p, q)."""
        return Fraction(sum(map(min, P, self.tenths)), 10)


GOOD, FAIR, POOR = (4, 3, 2, 1), (3, 3, 3, 1), (0, 1, 4, 5)
SCENES = (  # candidates, and the slope of a target call of one second by its rows
    ((Draft("deep", GOOD, 0.6), Draft("wide", FAIR, 0.05)), 0.02),
    ((Draft("deep", GOOD, 0.1), Draft("wide", FAIR, 0.05)), 0.02),
    ((Draft("poor", POOR, 0.02), Draft("wide", FAIR, 0.1)), 0.02),
    ((Draft("dear", FAIR, 1.5), Draft("poor", POOR, 0.9)), 0.02),
    ((Draft("wide", FAIR, 0.02),), 0.6),
)


def repeat_requests(
    draft: Draft, slope: float, watch: Watch, texts: int = 8, tokens: int = 16
) -> NewRequests:
    """Return a function that makes the same requests each time.

    The target's calls take 1 + slope (rows - 1) seconds.
    """
    stop = StoppingCriteria(max_new_tokens=tokens)

    def make() -> Iterator[tuple[Request, Sequence[int]]]:
        for text in range(texts):
            target = Ticking(constant_model(P), watch, partial(rise_by_rows, slope))
            small = Ticking(constant_model(draft.tenths), watch, lambda _: draft.step)
            yield Request(target, [small], stop=stop), [text % 4]

    return make


def constant_model(weights: Sequence[int]) -> TableModel:
    """Return a model with the same distribution after every context."""
    return TableModel(rows=lambda _: weights, vocabulary=len(weights), positions=256)


def exact_throughput(draft: Draft, n: int, slope: float) -> Fraction:
    """Return the tokens a second of rounds of n draft tokens.

    Each passes with probability alpha if those before it did.
    """
    tokens = sum(draft.alpha**i for i in range(n + 1))
    return tokens / (n * Fraction(str(draft.step)) + 1 + Fraction(str(slope)) * n)


@collect_evidence(FASTEST)
def recommends_the_fastest(advise: Advise) -> Iterator[int]:
    """Check the advice against the exact throughput of every draft at every length.

    5% below the best is sampling error.
    """
    for drafts, slope in SCENES:
        watch = Watch()
        pairs: dict[tuple[str | None, int], Fraction] = {(None, 0): Fraction(1)}
        for draft, n in product(drafts, range(1, LONGEST + 1)):
            pairs[draft.name, n] = exact_throughput(draft, n, slope)
        requests = {draft.name: repeat_requests(draft, slope, watch) for draft in drafts}
        got = advise(requests, LONGEST, watch)
        best = max(pairs, key=lambda pair: pairs[pair])
        if pairs.get(got, 0) < Fraction(95, 100) * pairs[best]:
            shown = [f"{d.name}: alpha {d.alpha}, {d.step} s a step" for d in drafts]
            accuse(FASTEST, best, got, drafts=shown, call=f"1 + {slope} n seconds")
        yield LONGEST


@collect_evidence(FORECAST)
def forecasts_tokens_a_second(throughput: Callable[..., float]) -> Iterator[int]:
    """Check throughput(TAR, n, step, verify) against the exact mean over rounds.

    Draft tokens pass independently of each other.
    """
    for tenths, n, step, verify in product((0, 3, 7, 10), (0, 1, 4), (0.0, 0.25), (1.0, 1.5)):
        alpha = Fraction(tenths, 10)
        tar = sum(alpha**i for i in range(1, n + 1))
        expected = float((1 + tar) / (n * Fraction(str(step)) + Fraction(str(verify))))
        got = throughput(float(tar), n, step, verify)
        if abs(got - expected) > 1e-9:
            accuse(FORECAST, expected, got, alpha=alpha, n=n, step=step, call=verify)
        yield 0


@collect_evidence(MEASURED)
def measures_its_steps(profile: Callable[..., DraftProfile]) -> Iterator[int]:
    """Check a profile's seconds a step against those that the draft took."""
    for step, tenths in product((0.05, 0.4), (GOOD, POOR)):
        watch, draft = Watch(), Draft("draft", tenths, step)
        requests = repeat_requests(draft, 0.1, watch, texts=2)
        got = profile("draft", requests, LONGEST, watch).step
        if abs(got - step) > 1e-9:
            accuse(MEASURED, step, got, q=tenths)
        yield 0


def advise(
    requests: Mapping[str, NewRequests], longest: int, watch: Watch
) -> tuple[str | None, int]:
    """Return the technique's own advice."""
    best = planner.plan_drafts(requests, longest, watch)[2][0]
    return best.draft, best.n


TRAPS = [
    Trap(FASTEST, recommends_the_fastest, lambda: advise),
    Trap(FORECAST, forecasts_tokens_a_second, lambda: planner.tokens_per_second),
    Trap(MEASURED, measures_its_steps, lambda: planner.profile_draft),
]
