"""One suite a guarantee: the cases that a registered technique is held to, found from its card.
There is no way to opt out.

A case is a plain function with a name; `prove` runs them and adds up what they looked at. Where a
technique's own knobs make too large a tree to walk, its card says smaller values (`Knob.small`).
"""

import importlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws import refine_laws
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.adversaries import greedy_equality
from tinyspec.laws.exact import JOINT, Law, Reference
from tinyspec.laws.knobs import ladder, monotone
from tinyspec.laws.network import WITHIN
from tinyspec.laws.pathwise import coupled
from tinyspec.laws.stage import DRAFTS, Stage, after_a_request, taken_back, told_warp
from tinyspec.technique import Card, Guarantee, Knob

FLOATS = 1e-12
ROUND = "the laws of a round"

SINGLE = [
    SamplingParams(),
    *(SamplingParams(t) for t in (0.0, 0.5, 1 / 3)),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.4),
]
PAIRS = [
    *(
        SamplingParams(t, k, p, m)
        for t in (0.5, 1 / 3, 0.0)
        for k, p, m in ((2, None, None), (None, 0.7, None), (None, None, 0.4))
    ),
    SamplingParams(top_k=2, top_p=0.6),
    SamplingParams(top_k=2, min_p=0.5),
    SamplingParams(top_p=0.8, min_p=0.3),
]
IRRATIONAL = [
    SamplingParams(0.7),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(0.7, 2, repetition_penalty=0.8),
]
DEEP = [SamplingParams(top_k=2), SamplingParams(0.7, top_p=0.6)]
HIDDEN = [
    *DEEP,
    SamplingParams(0.0),
    SamplingParams(min_p=0.5),
    SamplingParams(2.0, top_k=2, repetition_penalty=1.2),
]

Oracle = Callable[[Card], Evidence]
ORACLES: dict[str, Oracle] = {}
"""Techniques whose output law is nobody else's (APPROX), and those that rewrite a canvas: each
brings its own exact oracle.
"""


@dataclass(frozen=True)
class Case:
    """One thing to look at: the law it belongs to, what is special about it, and how it is done.
    Raises LawViolated.
    """

    law: str
    title: str
    run: Callable[[], Evidence]


def oracle(name: str) -> Callable[[Oracle], Oracle]:
    """Enter the oracle of a technique."""

    def enter(function: Oracle) -> Oracle:
        ORACLES[name] = function
        return function

    return enter


def cases(card: Card, seed: int = 0) -> list[Case]:
    """Everything that a technique is held to, the smallest first. Another seed: other tables,
    prompts and references.
    """
    if card.kind == "analysis":
        return []
    own = (
        [Case("its own oracle", card.name, lambda: ORACLES[card.name](card))]
        if card.name in ORACLES
        else []
    )
    if card.kind == "refine" or card.guarantee is Guarantee.APPROX:
        own = own or _traps(card.name)
        if not own:
            raise TinyspecError(
                f"{card.name} promises no other's law, so it must bring an oracle of its rule: laws.suites.oracle, or traps in "
                f"laws/traps/{card.name}.py"
            )
        return [*_rewriting(card, seed), *own] if card.kind == "refine" else own
    if card.coupled:
        return [*_by_paths(card, seed), *_greedy(card, seed), *_knobs(card, seed), *own]
    if card.guarantee is Guarantee.GREEDY:
        return [*_greedy(card, seed), *_knobs(card, seed), *own]
    return [*_exact(card, seed), *_greedy(card, seed), *_knobs(card, seed), *own]


def _traps(name: str) -> list[Case]:
    """What tells a technique from its look-alikes: where nobody else's law is kept, exact oracles
    of its own rule.
    """
    place = f"tinyspec.laws.traps.{name}"
    try:
        found = importlib.import_module(place)  # it stands above this module, and imports it
    except ModuleNotFoundError as missing:
        if missing.name != place:
            raise
        return []
    return [Case(trap.law, "its trap", partial(_trap, trap)) for trap in found.TRAPS]


def _trap(trap: Any) -> Evidence:
    begun = perf_counter()
    found: Evidence = trap.check(trap.real())
    return replace(found, seconds=found.seconds or perf_counter() - begun)


def _rewriting(card: Card, seed: int) -> Iterator[Case]:
    """What every technique owes that rewrites a canvas."""
    for knobs in refine_laws.settings(card):
        said = ", ".join(f"{name} {value}" for name, value in knobs.items())
        for law in refine_laws.LAWS:
            yield Case(law, said or card.name, partial(refine_laws.held, law, card, knobs, seed))


# ---------------------------------------------------------------------- EXACT


def _exact(card: Card, seed: int) -> Iterator[Case]:
    """The joint law is the reference's: under every warper, stop, draft and past."""
    base = Stage(
        card, seed=seed, prompt=_prompt(seed), deep=card.hidden, vocabulary=4 if card.hidden else 3
    )
    if card.hidden:
        for number, sampling in enumerate(HIDDEN):
            yield _joint(
                replace(base, sampling=sampling, seed=seed + 100 * number),
                2 + (number == 0),
                told_warp(sampling),
            )
        base = replace(base, sampling=DEEP[0])
    else:
        tiny = replace(base, vocabulary=2)
        yield _joint(tiny, 1, "V = 2, one token")
        yield _joint(tiny, 2, "V = 2, two tokens")
        for number, sampling in enumerate(
            [*SINGLE, *PAIRS, *SINGLE]
        ):  # the single ones on two pairs of tables
            stage = replace(
                base,
                sampling=sampling,
                seed=seed + 100 * number,
                stop=StoppingCriteria(max_new_tokens=3),
            )
            again = number >= len(SINGLE) + len(PAIRS)
            yield _joint(stage, 3, told_warp(sampling) + (", again" if again else ""))
        yield _joint(replace(base, seed=seed + 7), 2, "no end in sight")
        for number, sampling in enumerate(IRRATIONAL):
            stage = replace(
                base,
                sampling=sampling,
                floats=True,
                seed=seed + 100 * number,
                stop=StoppingCriteria(max_new_tokens=3),
            )
            yield _joint(stage, 3, f"{told_warp(sampling)}, in floats")
        four = replace(base, largest=3, seed=seed + 8, stop=StoppingCriteria(max_new_tokens=4))
        yield _joint(four, 4, "four tokens, whole numbers to 3")
        yield _single(replace(base, vocabulary=5, seed=seed + 9), "V = 5, one round")
        for number, sampling in enumerate(DEEP[:1]):
            wanted = 3 if card.hosted < 2 else 2
            end = StoppingCriteria(max_new_tokens=wanted)
            deep = replace(
                base, deep=True, vocabulary=4, sampling=sampling, seed=seed + number, stop=end
            )
            yield _joint(deep, wanted, f"a transformer, {told_warp(sampling)}")
    for number, draft in enumerate(DRAFTS[1:]):
        if card.hosted or card.copies:
            yield _joint(replace(base, draft=draft, seed=seed + 20 + number), 2, f"{draft} draft")
    ends = StoppingCriteria(eos=frozenset({base.vocabulary - 1}), max_new_tokens=3)
    for draft in ("another", "stubborn"):
        yield _joint(
            replace(base, stop=ends, draft=draft, seed=seed + 30), 3, f"end of text, {draft} draft"
        )
    stops = StoppingCriteria(sequences=((0, 1), (1, 1, 0)), max_new_tokens=3)
    yield _joint(replace(base, stop=stops, seed=seed + 31), 3, "stop sequences")
    yield _joint(
        replace(base, positions=len(base.prompt) + 2, seed=seed + 32), 3, "the context's limit"
    )
    yield _joint(replace(base, before=after_a_request, seed=seed + 33), 2, "after another request")
    yield _joint(
        replace(base, before=taken_back, seed=seed + 34),
        2,
        "taken back and corrected",
        correction=(1,),
    )
    yield Case(ROUND, "as drafts of another level", lambda: rounds(replace(base, seed=seed + 35)))


def _prompt(seed: int) -> tuple[int, ...]:
    return (
        (0, 1)
        if seed == 0
        else tuple(random.Random(seed).randrange(2) for _ in range(1 + seed % 3))
    )


def _joint(stage: Stage, tokens: int, title: str, correction: tuple[int, ...] = ()) -> Case:
    """The joint law of so many tokens."""

    def run() -> Evidence:
        begun = perf_counter()
        prompt = (*stage.prompt, *correction)
        expected, got = stage.reference().law(tokens, prompt), stage.law(tokens)
        stage.judge(expected, got, prompt, _within(stage))
        return Evidence(JOINT, 1, got.branches, perf_counter() - begun)

    return Case(JOINT, title, run)


def _within(stage: Stage) -> float:
    return WITHIN if stage.deep else FLOATS if stage.floats or _float_knobs(stage) else 0.0


def _float_knobs(stage: Stage) -> bool:
    return any(
        isinstance(value, float) and math.isfinite(value) and value % 1
        for value in stage.settings.values()
    )


def _single(stage: Stage, title: str) -> Case:
    """One round, continued as the reference continues: everything that a round may emit is judged,
    in a larger vocabulary.
    """

    def run() -> Evidence:
        begun = perf_counter()
        got = stage.law(9, rounds=1)
        longest, reference = max(map(len, got)), stage.reference()
        whole = Law()
        for text, probability in got.items():
            for rest, more in reference.law(longest - len(text), (*stage.prompt, *text)).items():
                whole[(*text, *rest)] = whole.get((*text, *rest), 0) + probability * more
        stage.judge(reference.law(longest, stage.prompt), whole, stage.prompt, _within(stage))
        return Evidence(JOINT, 1, got.branches, perf_counter() - begun)

    return Case(JOINT, title, run)


def rounds(stage: Stage, tokens: int = 12) -> Evidence:
    """`Round.laws` is what its tokens are distributed as, so that a decoder can draft for another:
    the warped rows.
    """
    begun = perf_counter()
    reference, seen = stage.reference(), 0
    for seed in range(3):
        decoder, rng, text = stage.decoder(), Seeded(seed), stage.prompt
        decoder.extend(text)
        while len(decoder.new) < tokens:
            round = decoder.step(rng)
            for token, law in zip(round.tokens, round.output_probs, strict=True):
                expected, got, seen = reference.next(text), list(law), seen + 1
                if any(abs(a - b) > _within(stage) for a, b in zip(expected, got, strict=True)):
                    accuse(ROUND, expected, got, **stage.words(), context=text, token=token)
                text = (*text, token)
    return Evidence(ROUND, seen, 0, perf_counter() - begun)


# ---------------------------------------------------------------------- the others


def _greedy(card: Card, seed: int) -> Iterator[Case]:
    """At temperature 0 the tokens are those of plain greedy decoding, whatever is drafted."""
    yield from (Case(law, title, run) for law, title, run in greedy_equality(card, seed))


def _by_paths(card: Card, seed: int) -> Iterator[Case]:
    """Shared noise cannot be enumerated: same seed, any drafter, same tokens; and the race alone
    has the law.
    """
    yield from (Case(law, title, run) for law, title, run in coupled(card, seed))


def _knobs(card: Card, seed: int) -> Iterator[Case]:
    """Each choice and each further small value of a knob once; and a lossy knob costs less the
    further it is turned.
    """
    base = Stage(
        card,
        seed=seed + 40,
        prompt=_prompt(seed),
        deep=card.hidden,
        vocabulary=4 if card.hidden else 3,
    )
    sampling = (
        SamplingParams(0.0)
        if card.guarantee is Guarantee.GREEDY
        else DEEP[0]
        if card.hidden
        else SamplingParams(0.5)
    )
    for knob in card.knobs:
        for value in _others(knob):
            stage = replace(
                base,
                knobs={knob.name: value},
                sampling=sampling,
                stop=StoppingCriteria(max_new_tokens=3),
            )
            if not card.coupled and not (card.lossy and card.lossy[0] == knob.name):
                yield _joint(stage, 3, f"{knob.name} {value}")
    if card.lossy is not None:
        yield Case(
            "cost falls as the knob is turned", card.lossy[0], lambda: monotone(base, ladder(card))
        )


def _others(knob: Knob) -> list[Any]:
    return [
        value for value in (knob.choices or knob.small[1:]) if value != knob.default or knob.small
    ]


__all__ = ["ORACLES", "Case", "Reference", "cases", "oracle", "rounds"]
