"""Suffix decoding (Oliaro et al. 2024): it is more than copying after the longest match."""

from collections.abc import Iterator

from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.traps import Build, Trap, card
from tinyspec.laws.traps.lookahead_trie import draft_first, expect_few_calls

ADAPTS = "a draft has at most alpha tokens for each token of its match"
FREQUENT = "of several continuations the most frequent is drafted"
SCORED = "the draft with the highest score is checked, whatever its match"
BOTH = "what other requests generated is drafted, and what this one generated"

SPLIT = [1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2, 7, *[8, 2, 3] * 9, 1, 2]
"""After 1 2 came four tokens once each; after 2, in all places, mostly 3."""

ANY_TARGET = Reciter(range(20))


@collect_evidence(ADAPTS)
def adapts(build: Build) -> Iterator[int]:
    """Check matches of 1 to 4 tokens before a long certain continuation."""
    beyond = tuple(range(6, 18))
    for alpha in (1.0, 2.0):
        for p in (1, 2, 3, 4):
            prompt = [*range(1, 6), *beyond, 0, *range(6 - p, 6)]
            draft = draft_first(build, ANY_TARGET, prompt, alpha=alpha)
            expected = beyond[: int(alpha * p)]
            expect_equal(ADAPTS, expected, draft, prompt=prompt, match=p, alpha=alpha)
            yield 0


@collect_evidence(FREQUENT)
def goes_by_frequency(build: Build) -> Iterator[int]:
    """Check that the most frequent continuation is drafted, not the last."""
    for then in ([3, 3, 3, 4], [4, 3, 3, 3, 4]):
        prompt = [token for x in then for token in (1, x)] + [1]
        draft = draft_first(build, ANY_TARGET, prompt)
        expect_equal(FREQUENT, (3,), draft[:1], prompt=prompt)
        yield 0


@collect_evidence(SCORED)
def scores(build: Build) -> Iterator[int]:
    """Check that a short match that leads mostly one way beats a long one that leads four ways."""
    expect_equal(SCORED, (3,), draft_first(build, ANY_TARGET, SPLIT), prompt=SPLIT)
    yield 0


@collect_evidence(BOTH)
def uses_both(build: Build) -> Iterator[int]:
    """Check that a repeated request takes fewer calls; so does a text that repeats itself."""
    for poem in ([*range(1, 15)], [1, 2, 3, 4] * 4):
        n = len(poem) - 2
        expect_few_calls(BOTH, build, Reciter(poem), n, n // 2)
        yield 0


TRAPS = [
    Trap(ADAPTS, adapts, card("suffix_decoding")),
    Trap(FREQUENT, goes_by_frequency, card("suffix_decoding")),
    Trap(SCORED, scores, card("suffix_decoding")),
    Trap(BOTH, uses_both, card("suffix_decoding")),
]
