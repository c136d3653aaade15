"""TriForce (Sun et al. 2024): what is retrieved, by whom, and the residual of the middle level."""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict
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
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.lm.forward import Plan
from tinyspec.speculative.drafting.speculative_decoding import speculative_decoding
from tinyspec.speculative.integrated.triforce import StreamingDrafter, TriforceDrafter, triforce
from tinyspec.speculative.nested import Nested
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

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


# ------------------------------------------------------------------ toys


class Windowed(TriforceDrafter):
    """Keeps the latest chunks."""

    def retrieve_chunks(self, states: Any, newest: int) -> Plan:
        drafter: Any = self.decoder.drafter
        return StreamingDrafter.streaming_plan(drafter, newest + 1)


def window_only(request: Request, **knobs: Any) -> Decoder:
    """The middle level sees what the small model sees: the first tokens and the latest."""
    decoder = triforce(request, **knobs)
    decoder.drafter = Windowed(
        decoder.drafter.decoder,  # type: ignore[attr-defined]
        knobs["gamma2"],
        knobs["budget"],
        knobs["chunk"],
        0,
    )
    return decoder


def two_levels(request: Request, **knobs: Any) -> Decoder:
    """The small model drafts for the target."""
    small: Any = request.drafts[0]
    drafter = StreamingDrafter(
        small, knobs["gamma2"], frozenset(), None, knobs["sink"], knobs["window"]
    )
    decoder = speculative_decoding(request, gamma=knobs["gamma2"], lenience=1.0)
    decoder.drafter = drafter
    return decoder


def middle_draws_again(request: Request, **knobs: Any) -> Decoder:
    """After a refusal the middle level draws from its own row, and declares that row."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
            row: Any = p[node - 1]
            if not rng.accept(row[x] / q[x]):  # type: ignore[index]
                return Verdict(tuple(range(node)), rng.draw(row), (node,))
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))

    decoder = triforce(request, **knobs)
    middle: Nested = decoder.drafter  # type: ignore[assignment]
    middle.decoder.verifier = verify
    return decoder


TRAPS = [
    Trap(NEEDLE, finds_the_needle, card("triforce")),
    Trap(JOINT, joint_law_of_three_levels, card("triforce")),
]
TOYS = [
    Toy("a window and no retrieval", NEEDLE, window_only),
    Toy("two levels", NEEDLE, two_levels),
    Toy("the middle draws again", JOINT, middle_draws_again),
]
