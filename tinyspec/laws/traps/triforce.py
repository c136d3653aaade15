"""TriForce (Sun et al. 2024): a middle level drafts with the retrieved part of the target's cache.

The residual of that level is its own. The small model reads its window at positions 0, 1, ...
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT, Reference, compare_distributions, exact_distribution
from tinyspec.laws.exact.models import (
    ANSWERS,
    NETWORK_TOLERANCE,
    QUESTION,
    make_haystack,
    needle_model,
    run_dense,
    small_network,
)
from tinyspec.laws.traps import GREEDY, SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.lm.model import Model
from tinyspec.technique import Request

NEEDLE = "what only a retrieved key knows is drafted right"
STREAMING = "a small model of 16 positions drafts from the first and the latest tokens of any text"

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
def joint_distribution_of_three_levels(build: Build) -> Iterator[int]:
    """Check the first two tokens of small transformers, of a plain round and a drafted one."""
    for seed in range(3):
        target, draft = small_network(seed, 2, 2), small_network(seed + 10, 2, 2)
        knobs: dict[str, Any] = {**KNOBS, "gamma2": 2, "budget": 1, "chunk": 1}

        def make(target: Any = target, draft: Any = draft, knobs: Any = knobs) -> Decoder:
            return build(Request(target.session(), [draft.session()]), **knobs)

        models = (target, draft)
        got = exact_distribution(
            make,
            2,
            (0, 1, 1),
            outside=lambda decoder, models=models: models,  # type: ignore[misc]
        )
        expected = Reference(
            lambda text, target=target: target.logits(text)[-1].numpy()  # type: ignore[misc]
        )
        law = expected.distribution(2, (0, 1, 1))
        compare_distributions(law, got, NETWORK_TOLERANCE, network=seed, draft=seed + 10)
        yield got.branches


@collect_evidence(STREAMING)
def drafts_beyond_its_context(build: Build) -> Iterator[int]:
    """Check what the small model declares, against dense passes over what it may see.

    It must draft at every length, with the distribution of a dense pass, at positions 0, 1, ...,
    over the first `sink` tokens and at least half of the `window` latest ones.
    """
    network, draft = small_network(1), small_network(2)
    small = Model(replace(draft.config, max_positions=16), draft.weights, name="a short context")
    sink, window = 3, 12
    text = [(7 * at * at + at) % 11 % 4 for at in range(50)]
    for length in (15, 16, 30, 49):
        request = Request(network.session(), [small.session()], draft_max_lengths=[16])
        decoder = build(request, **{**KNOBS, "sink": sink, "window": window})
        decoder.extend(text[:length])
        drafter: Any = decoder.drafter.decoder.drafter  # type: ignore[attr-defined]
        tree = drafter.propose(text[:length], 1, SAMPLED, Seeded(0))
        case = {"text": text[:length], "positions": 16, "sink": sink, "window": window}
        expect_equal(STREAMING, 1, len(tree.tokens), **case, counted="draft tokens")
        seen = [
            text[:sink] + text[max(length - recent, sink) : length]
            for recent in range(window // 2, window + 1)
        ]
        rows = [np.exp(run_dense(small, tokens).logits[-1]) for tokens in seen]
        declared = np.asarray(tree.draft_probs[0])
        if not any(
            np.allclose(declared, row / row.sum(), rtol=0, atol=NETWORK_TOLERANCE) for row in rows
        ):
            accuse(STREAMING, rows[-1] / rows[-1].sum(), declared, **case)
        yield 0


TRAPS = [
    Trap(STREAMING, drafts_beyond_its_context, card("triforce")),
    Trap(NEEDLE, finds_the_needle, card("triforce")),
    Trap(JOINT, joint_distribution_of_three_levels, card("triforce")),
]
