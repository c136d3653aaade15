"""TriForce (Sun et al. 2024): a middle level drafts with the retrieved part of the target's cache.

The residual of that level is its own.
"""

from collections.abc import Iterator
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.law import JOINT, Reference, compare_laws, exact_law
from tinyspec.laws.exact.models import (
    ANSWERS,
    NETWORK_TOLERANCE,
    QUESTION,
    make_haystack,
    needle_model,
    small_network,
)
from tinyspec.laws.traps import GREEDY, Build, Trap, begin_decoder, card
from tinyspec.technique import Request

NEEDLE = "what only a retrieved key knows is drafted right"

KNOBS: dict[str, Any] = {
    "gamma1": 1,
    "gamma2": 4,
    "budget": 8,
    "chunk": 4,
    "rebuild": 0,
    "sink": 2,
    "window": 4,
}


@collect_evidence(NEEDLE)
def finds_the_needle(build: Build) -> Iterator[int]:
    """Check texts in which an old token decides every second token.

    The window does not hold it, so each round without retrieval ends there. With retrieval a round
    of the target makes gamma2 + 1 tokens.
    """
    for which, length, at in ((0, 20, 5), (1, 20, 13), (2, 61, 30), (3, 64, 7)):
        models = [needle_model(), needle_model("small")]
        prompt = make_haystack(which, length, at)
        decoder = begin_decoder(build, models, prompt, GREEDY, 21, **KNOBS)
        rounds = [len(decoder.step(Seeded(number)).tokens) for number in range(3)]
        answers = ([ANSWERS[which], QUESTION] * 11)[: len(decoder.new)]
        case = {"prompt": prompt, **KNOBS}
        expect_equal(NEEDLE, answers, decoder.new, **case)
        expect_equal(NEEDLE, [1, 5, 5], rounds, **case, counted="tokens of the first rounds")
        yield 0


@collect_evidence(JOINT)
def joint_law_of_three_levels(build: Build) -> Iterator[int]:
    """Check the first two tokens of small transformers, of a plain round and a drafted one."""
    for seed in range(3):
        target, draft = small_network(seed, 2, 2), small_network(seed + 10, 2, 2)
        knobs: dict[str, Any] = {**KNOBS, "gamma2": 2, "budget": 1, "chunk": 1}

        def make(target: Any = target, draft: Any = draft, knobs: Any = knobs) -> Decoder:
            return build(Request(target.session(), [draft.session()]), **knobs)

        models = (target, draft)
        got = exact_law(
            make,
            2,
            (0, 1, 1),
            outside=lambda decoder, models=models: models,  # type: ignore[misc]
        )
        expected = Reference(
            lambda text, target=target: target.logits(text)[-1].numpy()  # type: ignore[misc]
        )
        law = expected.law(2, (0, 1, 1))
        compare_laws(law, got, NETWORK_TOLERANCE, network=seed, draft=seed + 10)
        yield got.branches


TRAPS = [
    Trap(NEEDLE, finds_the_needle, card("triforce")),
    Trap(JOINT, joint_law_of_three_levels, card("triforce")),
]
