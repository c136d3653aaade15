"""TriForce (Sun et al. 2024): what is retrieved, by whom, and the residual of the middle level."""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference, exact_law
from tinyspec.laws.exact.models import (
    ANSWERS,
    NETWORK_TOLERANCE,
    QUESTION,
    make_haystack,
    needle_model,
    small_network,
)
from tinyspec.laws.traps import Trap, card
from tinyspec.technique import Request

NEEDLE = "what only a retrieved key knows is drafted right"

Build = Callable[..., Decoder]
KNOBS = {"gamma1": 1, "gamma2": 4, "budget": 8, "chunk": 4, "rebuild": 0, "sink": 2, "window": 4}


def finds_the_needle(build: Build) -> Evidence:
    """An old token decides every second token. The window has left it behind, so each round without
    retrieval is cut short there; with it, a round of the target makes gamma2 + 1 tokens."""
    seen = 0
    for which, length, at in ((0, 20, 5), (1, 20, 13), (2, 61, 30), (3, 64, 7)):
        models = [needle_model(), needle_model("small")]
        request = Request(
            models[0].session(),
            [models[1].session()],
            SamplingParams(0.0),
            StoppingCriteria(max_new_tokens=21),
        )
        decoder = build(request, **KNOBS)
        decoder.extend(make_haystack(which, length, at))
        rounds = [len(decoder.step(Seeded(number)).tokens) for number in range(3)]
        expected, seen = [1, 5, 5], seen + 1
        answers = ([ANSWERS[which], QUESTION] * 11)[: len(decoder.new)]
        case = {"prompt": make_haystack(which, length, at), **KNOBS}
        if decoder.new != answers:
            accuse(NEEDLE, answers, decoder.new, **case)
        if rounds != expected:
            accuse(NEEDLE, expected, rounds, **case, counted="tokens of the first rounds")
    return Evidence(NEEDLE, seen)


def joint_law_of_three_levels(build: Build) -> Evidence:
    """Small transformers: the first two tokens, of a plain round and a drafted one."""
    branches = 0
    for seed in range(3):
        target, draft = small_network(seed, 2, 2), small_network(seed + 10, 2, 2)

        def make(target: Any = target, draft: Any = draft) -> Decoder:
            return build(
                Request(target.session(), [draft.session()]),
                **{**KNOBS, "gamma2": 2, "budget": 1, "chunk": 1},
            )

        got = exact_law(
            make,
            2,
            (0, 1, 1),
            outside=lambda decoder, target=target, draft=draft: (target, draft),  # type: ignore[misc]
        )
        expected = Reference(
            lambda text, target=target: target.logits(text)[-1].numpy(),  # type: ignore[misc]
            SamplingParams(),
        ).law(2, (0, 1, 1))
        branches += got.branches
        if any(
            abs(got.get(text, 0) - probability) > NETWORK_TOLERANCE
            for text, probability in expected.items()
        ):
            accuse(
                JOINT,
                dict(sorted(expected.items())),
                dict(sorted(got.items())),
                network=seed,
                draft=seed + 10,
            )
    return Evidence(JOINT, 3, branches)


TRAPS = [
    Trap(NEEDLE, finds_the_needle, card("triforce")),
    Trap(JOINT, joint_law_of_three_levels, card("triforce")),
]
