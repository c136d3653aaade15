"""The laws that a registered technique must obey, chosen by its card. There is no way to opt out.

A case is a plain function with a name; `prove` runs them and adds up what they looked at. Where a
technique's own knobs make too large a tree to walk, its card names smaller values (`Knob.small`).

- Exact: the joint distribution of its tokens is plain decoding's, in Fractions, for every warper.
- Greedy: at temperature 0 its tokens are those of a dense forward pass for every token.
- Coupled on shared noise, which has no list of outcomes: on one seed the tokens are the same whatever
  is drafted, and a race alone has the distribution of its row.
- Lossy: on fixed texts, the further the knob is turned, the less a token costs.
"""

import importlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, RandomSource, Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws import rewriting_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, JointLaw, Tokens
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, likeliest_token
from tinyspec.laws.stage import DRAFTS, Stage, after_a_request, format_sampling, taken_back
from tinyspec.technique import Card, Guarantee, Knob
from tinyspec.tree import TokenTree

GREEDY = "greedy equality"
GREEDY_TOKENS = 14
GREEDY_VOCABULARY = 5
GREEDY_EOS = GREEDY_VOCABULARY - 1


class GuessDrafter(BaseDrafter):
    """Proposes a chain of three tokens, each declared with probability 1.

    token  the text so far -> the guess
    """

    def __init__(self, token: Callable[[Sequence[int]], int], vocabulary: int):
        self.token, self.vocabulary = token, vocabulary

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens: list[int] = []
        for _ in range(min(3, max_draft_depth)):
            tokens.append(self.token([*context, *tokens]))
        return TokenTree.chain(tokens, [np.eye(self.vocabulary)[token] for token in tokens])


def greedy_cases(card: Card, seed: int) -> Iterator[tuple[str, str, Callable[[], Evidence]]]:
    """Yield cases: the technique on every kind of draft, then its verifier under strange
    drafters."""
    base = Stage(
        card,
        seed=seed + 50,
        prompt=(0, 1, 2),
        vocabulary=GREEDY_VOCABULARY,
        deep=True,
        sampling=SamplingParams(0.0),
        largest=4,
    )
    for draft in DRAFTS if card.hosted or card.copies else DRAFTS[:1]:
        stage = replace(base, draft=draft)
        yield GREEDY, f"{draft} draft", lambda stage=stage: greedily_equal(stage)  # type: ignore[misc]
    for strange in ("right", "wrong", "end of text", "random"):
        yield (
            GREEDY,
            f"its verifier, guesses always {strange}",
            lambda strange=strange: greedily_equal(base, strange),  # type: ignore[misc]
        )


def greedily_equal(stage: Stage, strange: str | None = None) -> Evidence:
    """Check for equal tokens with and without an end of text, over two prompts."""
    begun, rounds = perf_counter(), 0
    for stop in (
        StoppingCriteria(max_new_tokens=GREEDY_TOKENS),
        StoppingCriteria(eos=frozenset({GREEDY_EOS}), max_new_tokens=GREEDY_TOKENS),
    ):
        for prompt in (stage.prompt, (3,)):
            here = replace(stage, prompt=prompt, stop=stop)
            decoder = here.decoder()
            if strange is not None:
                decoder.drafter = GuessDrafter(make_guesser(here, strange), GREEDY_VOCABULARY)
            got, expected = run_request(decoder, prompt), greedy_by_dense_passes(here)
            rounds += decoder.rounds
            if got != expected:
                at = next(
                    (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
                    min(len(got), len(expected)),
                )
                accuse(
                    GREEDY, expected[: at + 1], got[: at + 1], **here.words(), prompt=prompt,
                    draft=strange or here.draft, logits=here.row((*prompt, *expected[:at])),
                )  # fmt: skip
    return Evidence(GREEDY, 4, rounds, perf_counter() - begun)


def make_guesser(stage: Stage, strange: str) -> Callable[[Sequence[int]], int]:
    """Return a function that guesses always right, always wrong, the end of text, or at random."""
    if strange == "end of text":
        return lambda text: GREEDY_EOS
    if strange == "random":
        return lambda text: (7 * len(text) + 3 * sum(text) + 1) % GREEDY_VOCABULARY
    off = 0 if strange == "right" else 1
    return lambda text: (likeliest_token(stage.row(tuple(text)).tolist()) + off) % GREEDY_VOCABULARY


def run_request(decoder: Decoder, prompt: Sequence[int]) -> list[int]:
    """Return the new tokens of a whole request."""
    decoder.extend(prompt)
    rng = Seeded(0)
    while not decoder.finished:
        decoder.step(rng)
    return decoder.new


def greedy_by_dense_passes(stage: Stage) -> list[int]:
    """Return the text of plain greedy decoding, by a dense pass for each token."""
    new: list[int] = []
    while len(new) < GREEDY_TOKENS and not (new and new[-1] in stage.stop.eos):
        new.append(likeliest_token(stage.row((*stage.prompt, *new)).tolist()))
    return new


KNOB_COST = "cost falls as the knob is turned"
PREFIXES = ((0,), (1, 0), (0, 1, 1), (1, 1, 0, 1))
STEPS = 4


def knob_ladder(card: Card) -> list[Any]:
    """Return values of the lossy knob, from its neutral one outward."""
    assert card.lossy is not None
    name, neutral = card.lossy
    knob = next(knob for knob in card.knobs if knob.name == name)
    if knob.choices:
        order = list(knob.choices)
        return order if order[0] == neutral else order[::-1]
    low = knob.low if knob.low is not None else min(0.0, float(neutral))
    high = knob.high if knob.high is not None else max(1.0, 2 * float(neutral))
    if neutral == knob.beyond:  # beyond one end: from there to the other
        steps = [high + (low - high) * i / STEPS for i in range(STEPS + 1)]
        return [neutral, *(steps if neutral > high else steps[::-1])]
    far = low if abs(float(neutral) - low) >= abs(high - float(neutral)) else high
    steps = [neutral + (far - neutral) * i / STEPS for i in range(STEPS + 1)]
    return list(
        dict.fromkeys(
            knob.check(round(step) if isinstance(knob.default, int) else step) for step in steps
        )
    )


def cost_of_token(stage: Stage, name: str, value: Any) -> tuple[Any, int]:
    """Return the expected target layers per committed token in one round, and the outcomes
    walked."""
    work: Any = Fraction(0)
    tokens: Any = Fraction(0)
    outcomes = 0
    here = Stage(**{**_fields(stage), "knobs": {name: value}})

    def play(rng: Exhaustive) -> tuple[float, int]:
        decoder = here.decoder()
        decoder.extend(here.prompt)
        round = decoder.step(rng)
        return sum(call.row_layers for call in round.calls), len(round.tokens)

    for (layers, committed), probability in Exhaustive.walk(play):
        work, tokens, outcomes = (
            work + probability * layers,
            tokens + probability * committed,
            outcomes + 1,
        )
    return work / tokens, outcomes


def cost_is_monotone(stage: Stage, values: Sequence[Any]) -> Evidence:
    """Check that a token costs less on every fixed text along the ladder."""
    begun, branches = perf_counter(), 0
    assert stage.card.lossy is not None
    name = stage.card.lossy[0]
    for prefix in PREFIXES:
        here = Stage(**{**_fields(stage), "prompt": prefix})
        before: Any = None
        for value in values:
            now, outcomes = cost_of_token(here, name, value)
            branches += outcomes
            if before is not None and now > before + 1e-9:
                accuse(
                    KNOB_COST,
                    f"at most {float(before):.6g}",
                    float(now),
                    **here.words(),
                    prefix=prefix,
                    **{name: value},
                )
            before = now
    return Evidence(KNOB_COST, len(PREFIXES) * len(values), branches, perf_counter() - begun)


def _fields(stage: Stage) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in Stage.__dataclass_fields__}


SAME_TOKENS = "same noise, same tokens"
RACE_LAW = "a race has the law of its row"
PATH_TOKENS, PATH_SEEDS = 8, 12
PATH_SAMPLINGS = (SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, top_p=0.9))


def coupled_cases(card: Card, seed: int) -> Iterator[tuple[str, str, Callable[[], Evidence]]]:
    """Yield the cases of a technique on shared noise: every kind of draft, then the race."""
    for sampling in PATH_SAMPLINGS:
        stage = Stage(
            card,
            seed=seed,
            prompt=(0, 1),
            sampling=sampling,
            floats=True,
            stop=StoppingCriteria(max_new_tokens=PATH_TOKENS),
            deep=card.hidden,
        )
        for draft in DRAFTS if card.hosted or card.copies else DRAFTS[:1]:
            here = replace(stage, draft=draft)
            yield (
                SAME_TOKENS,
                f"{format_sampling(sampling)}, {draft} draft",
                lambda here=here: same_tokens(here),  # type: ignore[misc]
            )
    yield RACE_LAW, "two tokens", lambda: race_law(lambda uniforms: Replay(uniforms))


def same_tokens(stage: Stage, seeds: int = PATH_SEEDS) -> Evidence:
    """Check that the tokens are those that win the races of the target's rows, on the same seed."""
    begun, reference = perf_counter(), stage.reference()
    for seed in range(seeds):
        decoder, rng, races = stage.decoder(), Seeded(seed), Seeded(seed)
        decoder.extend(stage.prompt)
        while not decoder.finished:
            decoder.step(rng)
        text: Tokens = stage.prompt
        while len(text) < len(stage.prompt) + PATH_TOKENS:
            text = (*text, races.exponential_race(reference.next(text), len(text)))
        expected, got = text[len(stage.prompt) :], tuple(decoder.new)
        if got != expected:
            accuse(
                SAME_TOKENS,
                expected,
                got,
                **stage.words(),
                prompt=stage.prompt,
                draft=stage.draft,
                seed=seed,
            )
    return Evidence(SAME_TOKENS, seeds, seeds, perf_counter() - begun)


def race_law(rng: Callable[[list[float]], RandomSource], grid: int = 40) -> Evidence:
    """Check where the winner of a race over two tokens changes.

    With u0 given, token 1 wins until u1 = 1 - (1 - u0)^(p1/p0).

    The exponential noise of a uniform is -log(1 - u), and the integral over u0 of 1 less those
    thresholds is p0. They are found by bisection, so this is the law of the race itself and no
    sample of it.
    """
    begun, seen = perf_counter(), 0
    for p in (0.5, 0.2, 0.9):
        for i in range(grid):
            u0 = (i + 0.5) / grid
            low, high = 0.0, 1.0
            for _ in range(50):
                middle = (low + high) / 2
                # token 1 wins while its own noise is small
                low, high = (
                    (middle, high)
                    if rng([u0, middle]).exponential_race([p, 1 - p], 0) == 1
                    else (low, middle)
                )
            expected, seen = 1 - (1 - u0) ** ((1 - p) / p), seen + 1
            if not math.isclose(low, expected, abs_tol=1e-9):
                accuse(RACE_LAW, expected, low, p=[p, 1 - p], u0=u0)
    return Evidence(RACE_LAW, seen, 0, perf_counter() - begun)


FLOAT_TOLERANCE = 1e-12
ROUND_LAWS = "the laws of a round"

SINGLE_SAMPLINGS = [
    SamplingParams(),
    *(SamplingParams(t) for t in (0.0, 0.5, 1 / 3)),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.4),
]
SAMPLING_PAIRS = [
    *(
        SamplingParams(t, k, p, m)
        for t in (0.5, 1 / 3, 0.0)
        for k, p, m in ((2, None, None), (None, 0.7, None), (None, None, 0.4))
    ),
    SamplingParams(top_k=2, top_p=0.6),
    SamplingParams(top_k=2, min_p=0.5),
    SamplingParams(top_p=0.8, min_p=0.3),
]
IRRATIONAL_SAMPLINGS = [
    SamplingParams(0.7),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(0.7, 2, repetition_penalty=0.8),
]
DEEP_SAMPLINGS = [SamplingParams(top_k=2), SamplingParams(0.7, top_p=0.6)]
HIDDEN_SAMPLINGS = [
    *DEEP_SAMPLINGS,
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
class SuiteCase:
    """One case: its law, what is special about it, and how it is run. Raises LawViolated."""

    law: str
    title: str
    run: Callable[[], Evidence]


def register_oracle(name: str) -> Callable[[Oracle], Oracle]:
    """Register the oracle of a technique."""

    def enter(function: Oracle) -> Oracle:
        ORACLES[name] = function
        return function

    return enter


def technique_cases(card: Card, seed: int = 0) -> list[SuiteCase]:
    """Return every case of a technique, the smallest first.

    Another seed means other tables, prompts and references.
    """
    if card.kind == "analysis":
        return []
    own = (
        [SuiteCase("its own oracle", card.name, lambda: ORACLES[card.name](card))]
        if card.name in ORACLES
        else []
    )
    if card.kind == "refine" or card.guarantee is Guarantee.APPROX:
        own = own or _traps(card.name)
        if not own:
            raise TinyspecError(
                f"{card.name} promises no other's law, so it must bring an oracle of its rule: "
                "laws.suites.register_oracle, or traps in "
                f"laws/traps/{card.name}.py"
            )
        return [*_rewriting(card, seed), *own] if card.kind == "refine" else own
    if card.coupled:
        return [*_by_paths(card, seed), *_greedy_cases(card, seed), *_knob_cases(card, seed), *own]
    if card.guarantee is Guarantee.GREEDY:
        return [*_greedy_cases(card, seed), *_knob_cases(card, seed), *own]
    return [*_exact_cases(card, seed), *_greedy_cases(card, seed), *_knob_cases(card, seed), *own]


def _traps(name: str) -> list[SuiteCase]:
    """Return the oracles of a technique that keeps nobody else's distribution."""
    place = f"tinyspec.laws.traps.{name}"
    try:
        found = importlib.import_module(place)  # it stands above this module, and imports it
    except ModuleNotFoundError as missing:
        if missing.name != place:
            raise
        return []
    return [SuiteCase(trap.law, "its trap", partial(_trap, trap)) for trap in found.TRAPS]


def _trap(trap: Any) -> Evidence:
    begun = perf_counter()
    found: Evidence = trap.check(trap.real())
    return replace(found, seconds=found.seconds or perf_counter() - begun)


def _rewriting(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield the cases of every technique that rewrites a canvas."""
    for knobs in rewriting_laws.knob_settings(card):
        said = ", ".join(f"{name} {value}" for name, value in knobs.items())
        for law in rewriting_laws.REFINE_LAWS:
            yield SuiteCase(
                law,
                said or card.name,
                partial(rewriting_laws.hold_on_sources, law, card, knobs, seed),
            )


# ---------------------------------------------------------------------- EXACT


def _exact_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield cases of the joint distribution: under every warper, stop, draft and past."""
    base = Stage(
        card,
        seed=seed,
        prompt=_seeded_prompt(seed),
        deep=card.hidden,
        vocabulary=4 if card.hidden else 3,
    )
    if card.hidden:
        for number, sampling in enumerate(HIDDEN_SAMPLINGS):
            yield _joint_case(
                replace(base, sampling=sampling, seed=seed + 100 * number),
                2 + (number == 0),
                format_sampling(sampling),
            )
        base = replace(base, sampling=DEEP_SAMPLINGS[0])
    else:
        tiny = replace(base, vocabulary=2)
        yield _joint_case(tiny, 1, "V = 2, one token")
        yield _joint_case(tiny, 2, "V = 2, two tokens")
        for number, sampling in enumerate(
            [*SINGLE_SAMPLINGS, *SAMPLING_PAIRS, *SINGLE_SAMPLINGS]
        ):  # the single ones on two pairs of tables
            stage = replace(
                base,
                sampling=sampling,
                seed=seed + 100 * number,
                stop=StoppingCriteria(max_new_tokens=3),
            )
            again = number >= len(SINGLE_SAMPLINGS) + len(SAMPLING_PAIRS)
            yield _joint_case(stage, 3, format_sampling(sampling) + (", again" if again else ""))
        yield _joint_case(replace(base, seed=seed + 7), 2, "no end in sight")
        for number, sampling in enumerate(IRRATIONAL_SAMPLINGS):
            stage = replace(
                base,
                sampling=sampling,
                floats=True,
                seed=seed + 100 * number,
                stop=StoppingCriteria(max_new_tokens=3),
            )
            yield _joint_case(stage, 3, f"{format_sampling(sampling)}, in floats")
        four = replace(base, largest=3, seed=seed + 8, stop=StoppingCriteria(max_new_tokens=4))
        yield _joint_case(four, 4, "four tokens, whole numbers to 3")
        yield _single_round_case(replace(base, vocabulary=5, seed=seed + 9), "V = 5, one round")
        for number, sampling in enumerate(DEEP_SAMPLINGS[:1]):
            wanted = 3 if card.hosted < 2 else 2
            end = StoppingCriteria(max_new_tokens=wanted)
            deep = replace(
                base, deep=True, vocabulary=4, sampling=sampling, seed=seed + number, stop=end
            )
            yield _joint_case(deep, wanted, f"a transformer, {format_sampling(sampling)}")
    for number, draft in enumerate(DRAFTS[1:]):
        if card.hosted or card.copies:
            yield _joint_case(
                replace(base, draft=draft, seed=seed + 20 + number), 2, f"{draft} draft"
            )
    ends = StoppingCriteria(eos=frozenset({base.vocabulary - 1}), max_new_tokens=3)
    for draft in ("another", "stubborn"):
        yield _joint_case(
            replace(base, stop=ends, draft=draft, seed=seed + 30), 3, f"end of text, {draft} draft"
        )
    stops = StoppingCriteria(sequences=((0, 1), (1, 1, 0)), max_new_tokens=3)
    yield _joint_case(replace(base, stop=stops, seed=seed + 31), 3, "stop sequences")
    yield _joint_case(
        replace(base, positions=len(base.prompt) + 2, seed=seed + 32), 3, "the context's limit"
    )
    yield _joint_case(
        replace(base, before=after_a_request, seed=seed + 33), 2, "after another request"
    )
    yield _joint_case(
        replace(base, before=taken_back, seed=seed + 34),
        2,
        "taken back and corrected",
        correction=(1,),
    )
    yield SuiteCase(
        ROUND_LAWS, "as drafts of another level", lambda: round_laws(replace(base, seed=seed + 35))
    )


def _seeded_prompt(seed: int) -> tuple[int, ...]:
    return (
        (0, 1)
        if seed == 0
        else tuple(random.Random(seed).randrange(2) for _ in range(1 + seed % 3))
    )


def _joint_case(
    stage: Stage, tokens: int, title: str, correction: tuple[int, ...] = ()
) -> SuiteCase:
    """Return the case that compares the joint distribution of so many tokens."""

    def run() -> Evidence:
        begun = perf_counter()
        prompt = (*stage.prompt, *correction)
        expected, got = stage.reference().law(tokens, prompt), stage.law(tokens)
        stage.judge(expected, got, prompt, _within(stage))
        return Evidence(JOINT, 1, got.branches, perf_counter() - begun)

    return SuiteCase(JOINT, title, run)


def _within(stage: Stage) -> float:
    return (
        NETWORK_TOLERANCE
        if stage.deep
        else FLOAT_TOLERANCE
        if stage.floats or _float_knobs(stage)
        else 0.0
    )


def _float_knobs(stage: Stage) -> bool:
    return any(
        isinstance(value, float) and math.isfinite(value) and value % 1
        for value in stage.settings.values()
    )


def _single_round_case(stage: Stage, title: str) -> SuiteCase:
    """Return a case of one round over a larger vocabulary, continued as the reference continues."""

    def run() -> Evidence:
        begun = perf_counter()
        got = stage.law(9, rounds=1)
        longest, reference = max(map(len, got)), stage.reference()
        whole = JointLaw()
        for text, probability in got.items():
            for rest, more in reference.law(longest - len(text), (*stage.prompt, *text)).items():
                whole[(*text, *rest)] = whole.get((*text, *rest), 0) + probability * more
        stage.judge(reference.law(longest, stage.prompt), whole, stage.prompt, _within(stage))
        return Evidence(JOINT, 1, got.branches, perf_counter() - begun)

    return SuiteCase(JOINT, title, run)


def round_laws(stage: Stage, tokens: int = 12) -> Evidence:
    """Check that `Round.output_probs` are the warped rows that its tokens are distributed as.

    A decoder that drafts for another one declares them.
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
                    accuse(ROUND_LAWS, expected, got, **stage.words(), context=text, token=token)
                text = (*text, token)
    return Evidence(ROUND_LAWS, seen, 0, perf_counter() - begun)


# ---------------------------------------------------------------------- the others


def _greedy_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield cases of greedy equality: plain greedy tokens, whatever is drafted."""
    yield from (SuiteCase(law, title, run) for law, title, run in greedy_cases(card, seed))


def _by_paths(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield cases of a technique on shared noise, which cannot be enumerated."""
    yield from (SuiteCase(law, title, run) for law, title, run in coupled_cases(card, seed))


def _knob_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield each choice and each further small value of a knob once, and the cost of a lossy
    one."""
    base = Stage(
        card,
        seed=seed + 40,
        prompt=_seeded_prompt(seed),
        deep=card.hidden,
        vocabulary=4 if card.hidden else 3,
    )
    sampling = (
        SamplingParams(0.0)
        if card.guarantee is Guarantee.GREEDY
        else DEEP_SAMPLINGS[0]
        if card.hidden
        else SamplingParams(0.5)
    )
    for knob in card.knobs:
        for value in _other_values(knob):
            stage = replace(
                base,
                knobs={knob.name: value},
                sampling=sampling,
                stop=StoppingCriteria(max_new_tokens=3),
            )
            if not card.coupled and not (card.lossy and card.lossy[0] == knob.name):
                yield _joint_case(stage, 3, f"{knob.name} {value}")
    if card.lossy is not None:
        yield SuiteCase(
            "cost falls as the knob is turned",
            card.lossy[0],
            lambda: cost_is_monotone(base, knob_ladder(card)),
        )


def _other_values(knob: Knob) -> list[Any]:
    return [
        value for value in (knob.choices or knob.small[1:]) if value != knob.default or knob.small
    ]
