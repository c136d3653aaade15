"""Greedy equality: in float64, at temperature 0, the tokens are those of plain greedy decoding,
whatever is drafted.

The judge is a dense pass for every token: it knows no cache, no tree and no loop of ours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.network import likeliest_token
from tinyspec.laws.stage import DRAFTS, Stage
from tinyspec.technique import Card
from tinyspec.tree import TokenTree

GREEDY = "greedy equality"
GREEDY_TOKENS = 14
GREEDY_VOCABULARY = 5
GREEDY_EOS = GREEDY_VOCABULARY - 1


class GuessDrafter(BaseDrafter):
    """Proposes a chain of three tokens, each of which it would stake everything on; its law says
    so.

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
    """The technique with its own drafter on every kind of draft model, then its verifier under four
    strange drafters.
    """
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
    """The same tokens with and without an end of text, over two prompts."""
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
    """Whoever guesses always right, always wrong, always the end of text, or at random."""
    if strange == "end of text":
        return lambda text: GREEDY_EOS
    if strange == "random":
        return lambda text: (7 * len(text) + 3 * sum(text) + 1) % GREEDY_VOCABULARY
    off = 0 if strange == "right" else 1
    return lambda text: (likeliest_token(stage.row(tuple(text)).tolist()) + off) % GREEDY_VOCABULARY


def run_request(decoder: Decoder, prompt: Sequence[int]) -> list[int]:
    """The new tokens of a whole request."""
    decoder.extend(prompt)
    rng = Seeded(0)
    while not decoder.finished:
        decoder.step(rng)
    return decoder.new


def greedy_by_dense_passes(stage: Stage) -> list[int]:
    """What plain greedy decoding says, by a dense pass a token."""
    new: list[int] = []
    while len(new) < GREEDY_TOKENS and not (new and new[-1] in stage.stop.eos):
        new.append(likeliest_token(stage.row((*stage.prompt, *new)).tolist()))
    return new


__all__: list[Any] = ["GREEDY", "GuessDrafter", "greedily_equal", "greedy_cases"]
