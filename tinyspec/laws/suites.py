"""The laws that a registered technique must obey, chosen by its card. There is no way to opt out.

A case is a plain function with a name; `prove` runs them and adds up what they looked at. Where a
technique's own knobs make too large a tree to walk, its card names smaller values (`Knob.small`).

- Exact: the joint distribution of its tokens is plain decoding's, in Fractions, for every warper.
- Greedy: at temperature 0 its tokens are those of a dense forward pass for every token.
- Coupled on shared noise, which has no list of outcomes: on one seed the tokens are the same
  whatever is drafted, and a race alone has the distribution of its row.
- Drafts of point masses: on one seed the tokens are those that plain decoding samples.
- Policy: under random arrivals each request's text is the one that it has alone, and every row runs
  once.
- Lossy: on fixed texts, the further the knob is turned, the less a token costs.
- All of these: the laws of whole requests (card_laws.py).
"""

import importlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product, takewhile
from time import perf_counter
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Exhaustive, RandomSource, Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import card_laws, feature_laws, rewriting_laws, schedule_laws
from tinyspec.laws.checking.trees import TREE_KINDS
from tinyspec.laws.evidence import Evidence, accuse, expect_equal
from tinyspec.laws.exact.joint import JOINT, JointDistribution, Tokens
from tinyspec.laws.exact.models import (
    NETWORK_TOLERANCE,
    FunctionDrafter,
    add_random_head,
    likeliest_token,
    small_network,
)
from tinyspec.laws.stage import (
    DRAFTS,
    Stage,
    after_a_request,
    after_many_rounds,
    after_rewind,
    after_stop,
    format_sampling,
    small_knob,
)
from tinyspec.laws.verification_laws import hand_made_trees
from tinyspec.lm.model import Model
from tinyspec.technique import Card, Guarantee
from tinyspec.tree import TokenTree

GREEDY = "greedy equality"
GREEDY_TOKENS = 14
GREEDY_VOCABULARY = 5
GREEDY_EOS = GREEDY_VOCABULARY - 1
TRACES = 20  # random arrivals of a seed, for each value of a policy's knobs


@dataclass(frozen=True)
class SuiteCase:
    """One case: its law, what is special about it, and how it is run. Raises LawViolated."""

    law: str
    title: str
    run: Callable[[], Evidence]


def _greedy_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield cases of greedy equality: every kind of draft, then its verifier on strange drafts."""
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
        yield SuiteCase(GREEDY, f"{draft} draft", partial(greedily_equal, stage))
    for strange in ("right", "wrong", "end of text", "random"):
        title = f"its verifier, drafts always {strange}"
        yield SuiteCase(GREEDY, title, partial(greedily_equal, base, strange))
    if card.guarantee is Guarantee.GREEDY:  # others have it among their joint distributions
        stage = _seeded_stage(card, seed, 60)
        cold = replace(stage, floats=True, sampling=COLD_PENALTY)
        yield _joint_case(cold, 3, f"{format_sampling(COLD_PENALTY)}, in floats")


def greedily_equal(stage: Stage, strange: str | None = None) -> Evidence:
    """Check for equal tokens with and without an end of text, over two prompts."""
    begun, rounds = perf_counter(), 0
    for stop, prompt in product(
        (
            StoppingCriteria(max_new_tokens=GREEDY_TOKENS),
            StoppingCriteria(eos=frozenset({GREEDY_EOS}), max_new_tokens=GREEDY_TOKENS),
        ),
        (stage.prompt, (3,)),
    ):
        here = replace(stage, prompt=prompt, stop=stop)
        decoder = here.decoder()
        if strange is not None:
            decoder.drafter = FunctionDrafter(partial(certain_chain, draft_rule(here, strange)))
        got, expected = run_request(decoder, prompt), greedy_by_dense_passes(here)
        rounds += decoder.rounds
        if got != expected:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False))
            at = len(list(same))
            case = {"prompt": prompt, "draft": strange or here.draft}
            case["logits"] = here.row((*prompt, *expected[:at]))
            accuse(GREEDY, expected[: at + 1], got[: at + 1], **here.describe(), **case)
    return Evidence(GREEDY, 4, rounds, perf_counter() - begun)


def certain_chain(
    rule: Callable[[Sequence[int]], int], context: Sequence[int], depth: int
) -> TokenTree:
    """Return a chain of up to three tokens, each declared with probability 1.

    rule  the text so far -> the next token
    """
    tokens: list[int] = []
    for _ in range(min(3, depth)):
        tokens.append(rule([*context, *tokens]))
    return TokenTree.chain(tokens, [np.eye(GREEDY_VOCABULARY)[token] for token in tokens])


def draft_rule(stage: Stage, strange: str) -> Callable[[Sequence[int]], int]:
    """Return a rule that is always right, always wrong, the end of text, or nearly random."""
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


def cost_of_token(stage: Stage) -> tuple[Any, int]:
    """Return the expected target layers per committed token in one round, and the outcomes
    walked."""
    work: Any = Fraction(0)
    tokens: Any = Fraction(0)
    outcomes = 0

    def play(rng: Exhaustive) -> tuple[float, int]:
        decoder = stage.decoder()
        decoder.extend(stage.prompt)
        round = decoder.step(rng)
        return sum(call.row_layers for call in round.calls), len(round.tokens)

    for (layers, committed), probability in Exhaustive.walk(play):
        work += probability * layers
        tokens += probability * committed
        outcomes += 1
    return work / tokens, outcomes


def cost_is_monotone(stage: Stage, values: Sequence[Any]) -> Evidence:
    """Check that a token costs less on every fixed text along the ladder."""
    begun, branches = perf_counter(), 0
    assert stage.card.lossy is not None
    name = stage.card.lossy[0]
    for prefix in PREFIXES:
        before: Any = None
        for value in values:
            here = replace(stage, prompt=prefix, knobs={name: value})
            now, outcomes = cost_of_token(here)
            branches += outcomes
            if before is not None and now > before + 1e-9:
                case = here.describe() | {"prefix": prefix, name: value}
                accuse(KNOB_COST, f"at most {float(before):.6g}", float(now), **case)
            before = now
    return Evidence(KNOB_COST, len(PREFIXES) * len(values), branches, perf_counter() - begun)


SAME_TOKENS = "same noise, same tokens"
RACE_LAW = "a race has the distribution of its row"
PATH_TOKENS, PATH_SEEDS = 8, 12
PATH_SAMPLINGS = (
    SamplingParams(),
    SamplingParams(0.0),
    SamplingParams(0.7, top_p=0.9),
    SamplingParams(0.7, repetition_penalty=1.5),
)


def _path_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield the cases of a technique whose text is a function of the seed: every kind of draft.

    Where a draft model would declare distributions, the technique gets none.
    """
    if card.point_masses:
        card = replace(card, optional_draft=False, several=False)
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
            title = f"{format_sampling(sampling)}, {draft} draft"
            yield SuiteCase(SAME_TOKENS, title, partial(same_tokens, replace(stage, draft=draft)))


def same_tokens(stage: Stage, seeds: int = PATH_SEEDS) -> Evidence:
    """Check that the tokens are those that the target's rows give on the same seed.

    With coupled noise they win the races; else they are sampled with their positions' uniforms.
    """
    begun, reference = perf_counter(), stage.reference()
    for seed in range(seeds):
        decoder, rng, plain = stage.decoder(), Seeded(seed), Seeded(seed)
        choose = plain.exponential_race if stage.card.coupled else plain.draw_at
        decoder.extend(stage.prompt)
        while not decoder.finished:
            decoder.step(rng)
        text: Tokens = stage.prompt
        while len(text) < len(stage.prompt) + PATH_TOKENS:
            text = (*text, choose(reference.next(text), len(text)))
        expected, got = text[len(stage.prompt) :], tuple(decoder.new)
        case = {"prompt": stage.prompt, "draft": stage.draft, "seed": seed}
        expect_equal(SAME_TOKENS, expected, got, **stage.describe(), **case)
    return Evidence(SAME_TOKENS, seeds, seeds, perf_counter() - begun)


def race_law(rng: Callable[[list[float]], RandomSource], grid: int = 40) -> Evidence:
    """Check where the winner of a race over two tokens changes.

    With u0 given, token 1 wins until u1 = 1 - (1 - u0)^(p1/p0).

    The exponential noise of a uniform is -log(1 - u), and the integral over u0 of 1 less those
    thresholds is p0. They are found by bisection, so this is the distribution itself and no sample
    of it.
    """
    begun, seen = perf_counter(), 0
    for p in (0.5, 0.2, 0.9):
        for i in range(grid):
            u0 = (i + 0.5) / grid
            low, high = 0.0, 1.0
            for _ in range(50):
                middle = (low + high) / 2
                if rng([u0, middle]).exponential_race([p, 1 - p], 0) == 1:
                    low = middle  # token 1 wins while its own noise is small
                else:
                    high = middle
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
COLD_PENALTY = SamplingParams(0.0, repetition_penalty=3.0)  # strong: it changes the likeliest token
IRRATIONAL_SAMPLINGS = [
    COLD_PENALTY,
    SamplingParams(0.7),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(0.7, 2, repetition_penalty=0.8),
]
DEEP_SAMPLINGS = [SamplingParams(top_k=2), SamplingParams(0.7, top_p=0.6)]
HIDDEN_SAMPLINGS = [
    *DEEP_SAMPLINGS,
    SamplingParams(0.0),
    COLD_PENALTY,
    SamplingParams(min_p=0.5),
    SamplingParams(2.0, top_k=2, repetition_penalty=1.2),
]

Oracle = Callable[[Card], Evidence]
ORACLES: dict[str, Oracle] = {}
"""Techniques whose distribution is nobody else's (APPROX), and those that rewrite a canvas: each
brings its own exact oracle.
"""


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
    if card.kind == "policy":
        return list(_schedule_cases(card, seed))
    own = []
    if card.name in ORACLES:
        own = [SuiteCase("its own oracle", card.name, lambda: ORACLES[card.name](card))]
    if card.kind in ("refine", "streams") or card.guarantee is Guarantee.APPROX:
        own = own or _traps(card.name)
        if not own:
            raise TinyspecError(
                f"{card.name} promises no other's law, so it must bring an oracle of its rule: "
                f"laws.suites.register_oracle, or traps in laws/traps/{card.name}.py"
            )
        return [*_rewriting(card, seed), *own] if card.kind == "refine" else own
    first: Iterable[SuiteCase] = ()
    if card.coupled:
        race = SuiteCase(RACE_LAW, "two tokens", partial(race_law, Replay))
        first = [*_path_cases(card, seed), race]
    elif card.guarantee is not Guarantee.GREEDY:
        first = [*_exact_cases(card, seed), *(_path_cases(card, seed) if card.point_masses else ())]
    own = [*_feature_cases(card), *own]
    if seed == 0:  # these laws have seeds of their own
        whole = card_laws.REQUEST_LAWS.items()
        own += [SuiteCase(law, "whole requests", partial(check, card)) for law, check in whole]
    return [*first, *_greedy_cases(card, seed), *_knob_cases(card, seed), *own]


def _schedule_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield the laws of a policy, with every small value of its knobs, on random arrivals."""
    traces = range(TRACES * seed, TRACES * (seed + 1))
    values = [knob.small or (knob.default,) for knob in card.knobs]
    for chosen in product(*values):
        knobs = {knob.name: value for knob, value in zip(card.knobs, chosen, strict=True)}
        title = ", ".join(f"{name} {value}" for name, value in knobs.items())
        law = partial(schedule_laws.scheduled_request_is_alone, partial(card.policy, **knobs))
        yield SuiteCase(schedule_laws.SCHEDULED_ALONE, title or "no knobs", partial(law, traces))


def _feature_cases(card: Card) -> Iterator[SuiteCase]:
    """Yield the feature laws of a technique that drafts by something trained, on random weights."""
    drafts = card.trained is not None and card.trained.predict is not None
    if not drafts and (card.tuned is None or card.tuned.predict is None):
        return
    knobs = {knob.name: small_knob(knob, 4) for knob in card.knobs}
    make = partial(card.make, **knobs)

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), card, seed)

    of_text = partial(feature_laws.draft_is_function_of_text, make, network)
    of_training = partial(feature_laws.check_random_heads, card, make)
    yield SuiteCase(feature_laws.DRAFT_OF_TEXT, "random heads", of_text)
    yield SuiteCase(feature_laws.DRAFT_OF_TRAINING, "random heads", of_training)


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
        title = ", ".join(f"{name} {value}" for name, value in knobs.items()) or card.name
        for law in rewriting_laws.REFINE_LAWS:
            run = partial(rewriting_laws.hold_on_sources, law, card, knobs, seed)
            yield SuiteCase(law, title, run)


# ---------------------------------------------------------------------- its verifier alone


def _verifier_case(stage: Stage, is_shared: bool) -> SuiteCase:
    """Return the case of a technique's verifier on trees that its small drafts do not make.

    is_shared  whether it judges the shared walk or a technique's own verifier; it judges nothing
               where the technique has the other one
    """

    def run() -> Evidence:
        verifier, found = stage.decoder().verifier, Evidence(JOINT)
        if (verifier is verify_tree) == is_shared:
            for kind in _tree_kinds(stage, verifier):
                found += hand_made_trees(verifier, kind)
        return found

    title = "the shared walk" if is_shared else "its own"
    return SuiteCase(JOINT, f"its verifier alone, if it is {title}", run)


def _tree_kinds(stage: Stage, verifier: Any) -> Sequence[str]:
    """Return the kinds of trees that a verifier is held to.

    The shared one judges all. One of a technique's own need not judge more than its drafts: chains,
    point masses, and siblings that are drawn independently, where it drafts them.
    """
    if verifier is verify_tree:
        return tuple(TREE_KINDS)
    kinds = set[str]()
    small = [{knob.name: value} for knob in stage.card.knobs for value in knob.small]
    for knobs in ({}, *small):
        decoder = replace(stage, knobs=knobs).decoder()
        decoder.extend(stage.prompt)
        tree = decoder.drafter.propose(decoder.context, 4, decoder.sampling, Seeded(0))
        for parent, q in zip(tree.parents, tree.draft_probs, strict=True):
            is_alone = list(tree.parents).count(parent) == 1
            kinds.add("point masses" if q is None else "chain" if is_alone else "siblings")
    return [kind for kind in TREE_KINDS if kind in kinds]


# ---------------------------------------------------------------------- EXACT


def _exact_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield cases of the joint distribution: of its verifier, and under every warper, stop, draft
    and past.

    The shared walk down a tree is judged before any decoder: where it takes a probe for a draft
    token, the whole decoder fails. A verifier of its own comes last, for a decoder's counterexample
    says more about a technique.
    """
    base = _seeded_stage(card, seed)
    yield _verifier_case(base, is_shared=True)
    yield from _decoder_cases(card, seed)
    yield _verifier_case(base, is_shared=False)


def _decoder_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield cases of the joint distribution of a decoder's tokens."""
    base = _seeded_stage(card, seed)
    three = StoppingCriteria(max_new_tokens=3)
    if card.hidden:
        for number, sampling in enumerate(HIDDEN_SAMPLINGS):
            stage = replace(base, sampling=sampling, seed=seed + 100 * number)
            yield _joint_case(stage, 2 + (number == 0), format_sampling(sampling))
        base = replace(base, sampling=DEEP_SAMPLINGS[0])
    else:
        tiny = replace(base, vocabulary=2)
        yield _joint_case(tiny, 1, "V = 2, one token")
        yield _joint_case(tiny, 2, "V = 2, two tokens")
        # The single ones on two pairs of tables.
        samplings = [*SINGLE_SAMPLINGS, *SAMPLING_PAIRS, *SINGLE_SAMPLINGS]
        for number, sampling in enumerate(samplings):
            stage = replace(base, sampling=sampling, seed=seed + 100 * number, stop=three)
            again = number >= len(SINGLE_SAMPLINGS) + len(SAMPLING_PAIRS)
            yield _joint_case(stage, 3, format_sampling(sampling) + (", again" if again else ""))
        yield _joint_case(replace(base, seed=seed + 7), 2, "without a stop")
        floats = replace(base, floats=True, stop=three)
        for number, sampling in enumerate(IRRATIONAL_SAMPLINGS):
            stage = replace(floats, sampling=sampling, seed=seed + 100 * number)
            yield _joint_case(stage, 3, f"{format_sampling(sampling)}, in floats")
        penalty = SamplingParams(repetition_penalty=1.3)
        long = replace(floats, prompt=(2, *(0, 1) * 20), sampling=penalty)
        yield _joint_case(long, 2, "a long prompt")
        wide = replace(base, vocabulary=4, sampling=SamplingParams(0.5, 3, 0.9, 0.3))
        yield _joint_case(wide, 2, "V = 4, three filters at once")
        one = StoppingCriteria(max_new_tokens=1)
        many = replace(base, vocabulary=300, draft="stubborn", stop=one)
        yield _joint_case(many, 1, "V = 300, one token")  # ids that a byte does not hold
        four = replace(base, largest=3, seed=seed + 8, stop=StoppingCriteria(max_new_tokens=4))
        yield _joint_case(four, 4, "four tokens, whole numbers to 3")
        yield _single_round_case(replace(base, vocabulary=5, seed=seed + 9), "V = 5, one round")
        wanted, sampling = 3 if card.hosted < 2 else 2, DEEP_SAMPLINGS[0]
        end = StoppingCriteria(max_new_tokens=wanted)
        deep = replace(base, deep=True, vocabulary=4, sampling=sampling, stop=end)
        yield _joint_case(deep, wanted, f"a transformer, {format_sampling(sampling)}")
    if card.hosted or card.copies:
        for number, draft in enumerate(DRAFTS[1:]):
            stage = replace(base, draft=draft, seed=seed + 20 + number)
            yield _joint_case(stage, 2, f"{draft} draft")
    ends = replace(three, eos=frozenset({base.vocabulary - 1}))
    for draft in ("another", "stubborn"):
        stage = replace(base, stop=ends, draft=draft, seed=seed + 30)
        yield _joint_case(stage, 3, f"end of text, {draft} draft")
    stops = replace(three, sequences=((0, 1), (1, 1, 0)))
    yield _joint_case(replace(base, stop=stops, seed=seed + 31), 3, "stop sequences")
    limited = replace(base, positions=len(base.prompt) + 2, seed=seed + 32)
    yield _joint_case(limited, 3, "the context's limit")
    # A target of the technique's own may hold no more than its drafts do.
    for room in (3, 4) if card.hosted and not card.has_own_target else ():
        stage = replace(base, stop=three, draft_positions=room, seed=seed + 41)
        yield _joint_case(stage, 3, f"a draft with a context of {room}")
    second = replace(base, before=after_a_request, seed=seed + 33)
    yield _joint_case(second, 2, "after another request")
    rewound = replace(base, before=after_rewind, seed=seed + 34)
    yield _joint_case(rewound, 2, "taken back and corrected", correction=(1,))
    penalty = replace(base.sampling, repetition_penalty=3.0)
    penalized = replace(rewound, floats=True, sampling=penalty)
    yield _joint_case(penalized, 2, "taken back and corrected, with a penalty", correction=(1,))
    stopped = replace(ends, max_new_tokens=2)
    for before, stop, title in (
        (after_many_rounds, base.stop, "after twelve rounds"),
        (after_stop, stopped, "after a stop"),
    ):
        stage = replace(base, before=before, stop=stop, seed=seed + 70)
        yield _joint_case(stage, 2, title, prompt_of=lambda stage: stage.decoder().context)
    warped = base.sampling if card.hidden else SamplingParams(0.5, top_k=2)
    inner = replace(base, sampling=warped, seed=seed + 35)
    yield SuiteCase(ROUND_LAWS, "rows that a cascade reads", partial(round_laws, inner))


def _seeded_stage(card: Card, seed: int, shift: int = 0) -> Stage:
    """Return the stage of a seed; its prompt depends on the seed, its models also on a shift."""
    rng = random.Random(seed)
    prompt: Tokens = (0, 1)
    if seed:
        prompt = tuple(rng.randrange(2) for _ in range(1 + seed % 3))
    vocabulary = 4 if card.hidden else 3
    return Stage(card, seed=seed + shift, prompt=prompt, deep=card.hidden, vocabulary=vocabulary)


def _joint_case(
    stage: Stage,
    tokens: int,
    title: str,
    correction: tuple[int, ...] = (),
    prompt_of: Callable[[Stage], Sequence[int]] | None = None,
) -> SuiteCase:
    """Return the case that compares the joint distribution of so many tokens.

    correction  tokens after the prompt, that the stage's past has put there
    prompt_of   text before these tokens, where the stage's past decides about all of it
    """

    def run() -> Evidence:
        begun = perf_counter()
        prompt = (*stage.prompt, *correction) if prompt_of is None else tuple(prompt_of(stage))
        expected, got = stage.reference().distribution(tokens, prompt), stage.distribution(tokens)
        stage.judge(expected, got, prompt, _within(stage))
        return Evidence(JOINT, 1, got.branches, perf_counter() - begun)

    return SuiteCase(JOINT, title, run)


def _within(stage: Stage) -> float:
    """Return how far probabilities may be apart."""
    if stage.deep:
        return NETWORK_TOLERANCE
    numbers = [value for value in stage.settings.values() if isinstance(value, float)]
    has_float_knob = any(math.isfinite(x) and x % 1 for x in numbers)
    return FLOAT_TOLERANCE if stage.floats or has_float_knob else 0.0


def _single_round_case(stage: Stage, title: str) -> SuiteCase:
    """Return a case of one round over a larger vocabulary, continued as the reference continues."""

    def run() -> Evidence:
        begun = perf_counter()
        got = stage.distribution(9, rounds=1)
        longest, reference = max(map(len, got)), stage.reference()
        whole = JointDistribution()
        for text, probability in got.items():
            for rest, more in reference.distribution(
                longest - len(text), (*stage.prompt, *text)
            ).items():
                whole[(*text, *rest)] = whole.get((*text, *rest), 0) + probability * more
        stage.judge(
            reference.distribution(longest, stage.prompt), whole, stage.prompt, _within(stage)
        )
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
            for token, probs in zip(round.tokens, round.output_probs, strict=True):
                expected, got, seen = reference.next(text), list(probs), seen + 1
                if any(abs(a - b) > _within(stage) for a, b in zip(expected, got, strict=True)):
                    accuse(ROUND_LAWS, expected, got, **stage.describe(), context=text, token=token)
                text = (*text, token)
    return Evidence(ROUND_LAWS, seen, 0, perf_counter() - begun)


# ---------------------------------------------------------------------- the knobs


def _knob_cases(card: Card, seed: int) -> Iterator[SuiteCase]:
    """Yield each choice and each further small value of a knob once, and the cost of a lossy
    one."""
    base = _seeded_stage(card, seed, 40)
    if card.guarantee is Guarantee.GREEDY:
        sampling = SamplingParams(0.0)
    else:
        sampling = DEEP_SAMPLINGS[0] if card.hidden else SamplingParams(0.5)
    stage = replace(base, sampling=sampling, stop=StoppingCriteria(max_new_tokens=3))
    for knob in card.knobs:
        if card.coupled or (card.lossy and card.lossy[0] == knob.name):
            continue
        both = (True, False) if isinstance(knob.default, bool) and not knob.small else ()
        for value in knob.choices or both or knob.small[1:]:
            if value != knob.default or knob.small:
                here = replace(stage, knobs={knob.name: value})
                yield _joint_case(here, 3, f"{knob.name} {value}")
    if card.lossy is not None:
        ladder = partial(cost_is_monotone, base, knob_ladder(card))
        yield SuiteCase(KNOB_COST, card.lossy[0], ladder)
