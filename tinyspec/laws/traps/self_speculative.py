"""Draft & Verify (Zhang et al. 2023): each sublayer has its own bit.

Draft and target share one cache. The threshold that ends a draft adapts, and a search learns which
sublayers to skip.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import likeliest_token
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import (
    GREEDY,
    SAMPLED,
    Build,
    Trap,
    begin_decoder,
    card,
    joint_distribution_of_self_drafting,
)
from tinyspec.lm.forward import Plan
from tinyspec.speculative.drafting.self_speculative import (
    DraftExit,
    SkipSet,
    SkipSetSearch,
    parse_skip_set,
)

BITS = "each sublayer has its own bit"
CACHE = "the draft's rows and cache are the target's own"
ENDS = "drafting ends after the first unsure token"
ADAPTS = "the threshold follows the share that passed"
LEARNS = "the search learns from what it measured"

LAYERS, BETA_1, BETA_2, EPSILON = 3, 0.5, 0.9, 0.01


def _table_models() -> Iterator[TableModel]:
    yield from (TableModel(seed, zeros=False) for seed in (1, 2, 3))


@collect_evidence(BITS)
def skips_what_is_named(build: Build) -> Iterator[int]:
    """Check the distribution of the first draft token: just the named sublayers are skipped."""
    for model, skip in product(_table_models(), ("a1", "m1", "a1+m1", "a0+m2", "none")):
        decoder = begin_decoder(build, [model], (0,), SAMPLED, skip=skip, gamma=1, threshold=0.0)
        got = decoder.step(Seeded(0)).tree.draft_probs[0]
        named = [word for word in skip.split("+") if word != "none"]
        plan = Plan(skip=frozenset(2 * int(word[1]) + (word[0] == "m") for word in named))
        expect_equal(BITS, model.row((0,), plan), got, model=model, skip=skip, text=(0,))
        yield 0


@collect_evidence(CACHE)
def runs_once_what_is_the_same(build: Build) -> Iterator[int]:
    """Check that draft and verification cost what the rows of the text cost.

    The topmost sublayer alone is skipped.
    """
    for gamma in (1, 3):
        knobs: dict[str, Any] = {"skip": f"m{LAYERS - 1}", "gamma": gamma, "threshold": 0.0}
        decoder = begin_decoder(build, [TableModel(1, zeros=False)], (0, 1, 2), SAMPLED, **knobs)
        decoder.step(Seeded(0))
        work = sum(call.row_layers for call in decoder.forward_log)
        due = LAYERS * (3 + gamma)  # the prompt and gamma draft tokens
        if work > due:
            case = {"prompt": (0, 1, 2), "gamma": gamma, "layers": LAYERS}
            accuse(CACHE, f"{due} layers of a row", f"{work}", **case)
        yield 0


@collect_evidence(ENDS)
def ends_where_it_is_unsure(build: Build) -> Iterator[int]:
    """Check that a draft ends with the first token below the threshold, at temperature 0."""
    plan = Plan(skip=parse_skip_set("a1+m1", LAYERS))
    for model, threshold in product(_table_models(), (0.0, 0.4, 0.5, 0.6, 1.0)):
        text, expected = [0], list[int]()  # of a prompt of one token all rows are the draft's
        while len(expected) < 4:
            row = model.row(text, plan)
            expected.append(likeliest_token(row))
            text.append(expected[-1])
            if max(row) < threshold:
                break
        knobs: dict[str, Any] = {"skip": "a1+m1", "gamma": 4, "threshold": threshold}
        decoder = begin_decoder(build, [model], (0,), GREEDY, **knobs)
        got = list(decoder.step(Seeded(0)).tree.tokens)
        expect_equal(ENDS, expected, got, model=model, threshold=threshold, gamma=4)
        yield 0


@collect_evidence(ADAPTS)
def threshold_follows(make: Callable[[float, float], Any]) -> Iterator[int]:
    """Check the rule, round by round, on runs of good and bad rounds."""
    for rounds in product(((0, 2), (2, 2), (4, 4)), repeat=5):
        exit, threshold, rate = make(0.8, 0.0), 0.8, 0.0
        for accepted, drafted in rounds:
            exit = exit.update(accepted, drafted, 0.9, 4)
            rate = BETA_1 * rate + (1 - BETA_1) * accepted / drafted
            new = threshold + EPSILON if rate < 0.9 else threshold - EPSILON * (drafted < 4)
            threshold = BETA_2 * threshold + (1 - BETA_2) * new
            if abs(exit.threshold - threshold) > 1e-12:
                case = {"accepted_of_drafted": rounds, "start": 0.8, "wanted": 0.9, "gamma": 4}
                accuse(ADAPTS, threshold, exit.threshold, **case)
            yield 0


def speed_without(skip: SkipSet) -> float:
    """Return the speed of a skip set in a landscape over ten bits.

    Each sublayer has its own worth, some only with another. The empty set has 1, the best 2.5.
    """
    worth = [0.3, -0.9, 0.2, -0.8, 0.4, -0.7, 0.25, -0.9, -0.6, 0.15]
    pairs = {(0, 2): 0.1, (4, 6): 0.1, (1, 3): 0.2}
    together = sum(x for pair, x in pairs.items() if {*pair} <= skip)
    return 1 + sum(worth[bit] for bit in skip) + together


@collect_evidence(LEARNS)
def search_learns(make: Callable[[int, int], Any]) -> Iterator[int]:
    """Check that 24 suggestions come near the best of a thousand sets.

    As many random sets hardly ever do.
    """
    search = make(5, 0)
    search.tell(frozenset(), speed_without(frozenset()))
    for _ in range(24):
        skip = search.suggest()
        search.tell(skip, speed_without(skip))
        yield 0
    best = speed_without(search.best)
    if best < 2.2:
        accuse(LEARNS, "a speed of 2.5, or at least 2.2", best, evaluations=24, bits=10)


TRAPS = [
    Trap(
        JOINT,
        partial(
            joint_distribution_of_self_drafting,
            samplings=(SAMPLED,),
            skip="m1",
            gamma=1,
            threshold=0.0,
        ),
        card("self_speculative"),
    ),
    Trap(BITS, skips_what_is_named, card("self_speculative")),
    Trap(CACHE, runs_once_what_is_the_same, card("self_speculative")),
    Trap(ENDS, ends_where_it_is_unsure, card("self_speculative")),
    Trap(ADAPTS, threshold_follows, lambda: DraftExit),
    Trap(LEARNS, search_learns, lambda: SkipSetSearch),
]
