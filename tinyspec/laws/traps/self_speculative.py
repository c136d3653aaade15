"""Draft & Verify (Zhang et al. 2023): one bit a sublayer, one cache, an exit that adapts, a search
that learns.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, exact_law
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap, card
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.speculative.drafting.self_speculative import (
    DraftExit,
    SkipSet,
    SkipSetSearch,
    parse_skip_set,
)
from tinyspec.technique import Request

BITS = "each sublayer has its own bit"
CACHE = "the draft's rows and cache are the target's own"
ENDS = "drafting ends behind the first unsure token"
ADAPTS = "the threshold follows the share that passed"
LEARNS = "the search learns from what it measured"

Build = Callable[..., Decoder]
LAYERS, BETA_1, BETA_2, EPSILON = 3, 0.5, 0.9, 0.01


def _models() -> Iterator[TableModel]:
    yield from (TableModel(seed, zeros=False) for seed in (1, 2, 3))


def joint_law_of_two_tokens(build: Build) -> Evidence:
    """Against plain decoding, at temperature 1: the draft samples from the law that it declares."""
    branches = 0
    for model in _models():
        expected = exact_law(
            lambda model=model: Decoder(model.session(), BaseDrafter(), verify_tree),  # type: ignore[misc]
            2,
        )
        got = exact_law(
            lambda model=model: build(Request(model.session()), skip="m1", gamma=1, threshold=0.0),  # type: ignore[misc]
            2,
        )
        branches += got.branches
        if dict(got) != dict(expected):
            accuse(
                JOINT,
                dict(sorted(expected.items())),
                dict(sorted(got.items())),
                model=model,
                skip="m1",
                gamma=1,
            )
    return Evidence(JOINT, 3, branches)


def skips_what_it_is_told(build: Build) -> Evidence:
    """The law of the first guess is that of the model without just these sublayers."""
    seen = 0
    for model, skip in product(_models(), ("a1", "m1", "a1+m1", "a0+m2", "none")):
        decoder = build(Request(model.session()), skip=skip, gamma=1, threshold=0.0)
        decoder.extend((0,))
        got = decoder.step(Seeded(0)).tree.draft_probs[0]
        plan = Plan(
            skip=frozenset(
                2 * int(word[1]) + (word[0] == "m") for word in skip.split("+") if word != "none"
            )
        )
        expected, seen = model.row((0,), plan), seen + 1
        if got != expected:
            accuse(BITS, expected, got, model=model, skip=skip, text=(0,))
    return Evidence(BITS, seen)


def runs_once_what_is_the_same(build: Build) -> Evidence:
    """Where the topmost sublayer alone is skipped, prompt, draft and verification cost what the
    text's rows cost.
    """
    for gamma in (1, 3):
        forward_log: list[ForwardRecord] = []
        session = TableModel(1, zeros=False).session(forward_log)
        decoder = build(
            Request(session, forward_log=forward_log),
            skip=f"m{LAYERS - 1}",
            gamma=gamma,
            threshold=0.0,
        )
        decoder.extend((0, 1, 2))
        decoder.step(Seeded(0))
        work = sum(call.row_layers for call in forward_log)
        due = LAYERS * (3 + gamma)  # the prompt and gamma guesses
        if work > due:
            accuse(
                CACHE,
                f"{due} layers of a row",
                f"{work}",
                prompt=(0, 1, 2),
                gamma=gamma,
                layers=LAYERS,
            )
    return Evidence(CACHE, 2)


def ends_where_it_is_unsure(build: Build) -> Evidence:
    """At temperature 0, against the skipping model's own rows: guesses until one is below the
    threshold, that one too.
    """
    seen = 0
    plan = Plan(skip=parse_skip_set("a1+m1", LAYERS))
    for model, threshold in product(_models(), (0.0, 0.4, 0.5, 0.6, 1.0)):
        text, expected = [0], list[int]()  # of a prompt of one token all rows are the draft's
        while len(expected) < 4:
            row = model.row(text, plan)
            expected.append(row.index(max(row)))
            text.append(expected[-1])
            if max(row) < threshold:
                break
        decoder = build(
            Request(model.session(), sampling=SamplingParams(0.0)),
            skip="a1+m1",
            gamma=4,
            threshold=threshold,
        )
        decoder.extend((0,))
        got, seen = list(decoder.step(Seeded(0)).tree.tokens), seen + 1
        if got != expected:
            accuse(ENDS, expected, got, model=model, threshold=threshold, gamma=4)
    return Evidence(ENDS, seen)


def threshold_follows(make: Callable[[float, float], Any]) -> Evidence:
    """The rule, round by round, on runs of good and bad rounds."""
    seen = 0
    for rounds in product(((0, 2), (2, 2), (4, 4)), repeat=5):
        exit, threshold, rate = make(0.8, 0.0), 0.8, 0.0
        for accepted, drafted in rounds:
            exit = exit.update(accepted, drafted, 0.9, 4)
            rate = BETA_1 * rate + (1 - BETA_1) * accepted / drafted
            new = threshold + EPSILON if rate < 0.9 else threshold - EPSILON * (drafted < 4)
            threshold, seen = BETA_2 * threshold + (1 - BETA_2) * new, seen + 1
            if abs(exit.threshold - threshold) > 1e-12:
                accuse(
                    ADAPTS,
                    threshold,
                    exit.threshold,
                    accepted_of_drafted=rounds,
                    start=0.8,
                    wanted=0.9,
                    gamma=4,
                )
    return Evidence(ADAPTS, seen)


def speed(skip: SkipSet) -> float:
    """A landscape over ten bits: each sublayer has its own worth, some only with another. None: 1;
    the best: 2.5.
    """
    worth = [0.3, -0.9, 0.2, -0.8, 0.4, -0.7, 0.25, -0.9, -0.6, 0.15]
    pairs = {(0, 2): 0.1, (4, 6): 0.1, (1, 3): 0.2}
    return (
        1
        + sum(worth[bit] for bit in skip)
        + sum(x for (a, b), x in pairs.items() if {a, b} <= skip)
    )


def search_learns(search: Callable[[int, int], Any]) -> Evidence:
    """Of a thousand sets one has the best speed; 24 suggestions come near it, and as many random
    sets hardly ever do.
    """
    made = search(5, 0)
    made.tell(frozenset(), speed(frozenset()))
    for _ in range(24):
        skip = made.suggest()
        made.tell(skip, speed(skip))
    if speed(made.best) < 2.2:
        accuse(LEARNS, "a speed of 2.5, or at least 2.2", speed(made.best), evaluations=24, bits=10)
    return Evidence(LEARNS, 24)


TRAPS = [
    Trap(JOINT, joint_law_of_two_tokens, card("self_speculative")),
    Trap(BITS, skips_what_it_is_told, card("self_speculative")),
    Trap(CACHE, runs_once_what_is_the_same, card("self_speculative")),
    Trap(ENDS, ends_where_it_is_unsure, card("self_speculative")),
    Trap(ADAPTS, threshold_follows, lambda: DraftExit),
    Trap(LEARNS, search_learns, lambda: SkipSetSearch),
]
