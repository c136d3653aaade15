"""Techniques that draw by a race on shared noise: proved path by path, since continuous noise has
no list of outcomes.

Two statements make the law. On one seed, whatever is drafted, the tokens are the same, those of
racing the target's law at every position: so drafting changes nothing. And a race alone has the
law: the token that wins is distributed as the row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter

from tinyspec.decoding.rng import RandomSource, Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.exact import Tokens
from tinyspec.laws.stage import DRAFTS, Stage, format_sampling
from tinyspec.technique import Card

SAME_TOKENS = "same noise, same tokens"
RACE_LAW = "a race has the law of its row"
PATH_TOKENS, PATH_SEEDS = 8, 12
PATH_SAMPLINGS = (SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, top_p=0.9))


def coupled_cases(card: Card, seed: int) -> Iterator[tuple[str, str, Callable[[], Evidence]]]:
    """Every kind of draft, then the race itself."""
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
    """The decoder's tokens are those that win the races of the target's rows, position by position,
    on the same seed.
    """
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
    """Over two tokens the winner changes where theory says: with u0 given, token 1 wins until u1 =
    1 - (1 - u0)^(p1/p0).

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
