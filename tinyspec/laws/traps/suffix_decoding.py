"""Suffix decoding (Oliaro et al. 2024): what makes it more than copying behind the longest
match.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.traps import Trap, card
from tinyspec.laws.traps.lookahead_trie import said
from tinyspec.technique import Request

ADAPTS = "a draft has at most alpha guesses a token of its match"
FREQUENT = "of several continuations the most frequent is drafted"
SCORED = "the draft that can hope for most is checked, behind whatever match"
BOTH = "what was said in other requests is drafted, and what this one said"

Build = Callable[..., Decoder]
SPLIT = [1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2, 7, *[8, 2, 3] * 9, 1, 2]
"""Behind 1 2 came four tokens once each; behind 2, in all places, mostly 3."""


def draft(build: Build, prompt: Sequence[int], **knobs: Any) -> tuple[int, ...]:
    """The first draft behind a prompt."""
    decoder = build(
        Request(Reciter([*range(20)]).session(), (), SamplingParams(temperature=0.0)),
        price=0.0,
        **knobs,
    )
    decoder.extend(prompt)
    return tuple(decoder.step(Seeded(0)).tree.tokens)


def adapts(build: Build) -> Evidence:
    """Matches of 1 to 4 tokens in front of a long certain continuation."""
    beyond = list(range(6, 18))
    for alpha in (1.0, 2.0):
        for p in (1, 2, 3, 4):
            prompt = [*range(1, 6), *beyond, 0, *range(6 - p, 6)]
            guesses = draft(build, prompt, alpha=alpha)
            if guesses != tuple(beyond[: int(alpha * p)]):
                accuse(
                    ADAPTS, beyond[: int(alpha * p)], guesses, prompt=prompt, match=p, alpha=alpha
                )
    return Evidence(ADAPTS, 8)


def goes_by_frequency(build: Build) -> Evidence:
    """What came three times, not what came last."""
    for then in ([3, 3, 3, 4], [4, 3, 3, 3, 4]):
        prompt = [token for x in then for token in (1, x)] + [1]
        guesses = draft(build, prompt)
        if guesses[:1] != (3,):
            accuse(FREQUENT, (3,), guesses, prompt=prompt)
    return Evidence(FREQUENT, 2)


def scores(build: Build) -> Evidence:
    """A long match that leads four ways is left for a short one that leads mostly one way."""
    guesses = draft(build, SPLIT)
    if guesses != (3,):
        accuse(SCORED, (3,), guesses, prompt=SPLIT)
    return Evidence(SCORED, 1)


def uses_both(build: Build) -> Evidence:
    """The same question again takes fewer calls; so does a text that repeats itself."""
    for poem in ([*range(1, 15)], [1, 2, 3, 4] * 4):
        model, n = Reciter(poem), len(poem) - 2
        said(build, model, 2, n).end()
        rounds = said(build, model, 2, n).rounds
        if rounds > n // 2:
            accuse(
                BOTH,
                f"at most {n // 2} calls",
                rounds,
                prompt=poem[:2],
                new_tokens=n,
                request="the second",
            )
    return Evidence(BOTH, 2)


TRAPS = [
    Trap(ADAPTS, adapts, card("suffix_decoding")),
    Trap(FREQUENT, goes_by_frequency, card("suffix_decoding")),
    Trap(SCORED, scores, card("suffix_decoding")),
    Trap(BOTH, uses_both, card("suffix_decoding")),
]
