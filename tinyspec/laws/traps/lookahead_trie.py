"""Lookahead with a trie (Zhao et al. 2023): what makes it more than a table of the prompt's
n-grams.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.lookup import OUTPUTS
from tinyspec.technique import Request

REMEMBERED = "what one request said shortens the next"
BRANCHES = "several branches are checked in one call"
ELIMINATED = "a prompt's branches end with its request"
STAGES = "a shorter match fills a draft that the longest leaves short"
PRUNED = "the nodes of the trie are bounded"

Build = Callable[..., Decoder]
FORKS = [1, 2, 3, 9, 1, 4, 5, 9, 1]  # after a 1 came 2 3 and 4 5
STAGED = [1, 2, 3, 9, 5, 2, 4, 9, 1, 2]  # 1 2 was followed by 3; 2 alone by 4 as well


def said(build: Build, model: Reciter, prompt: int, wanted: int, **knobs: Any) -> Decoder:
    """A whole request: the model's text from its first `prompt` tokens on."""
    stop = StoppingCriteria(max_new_tokens=wanted)
    request = Request(model.session(), (), SamplingParams(temperature=0.0), stop, clock=lambda: 0.0)
    decoder = build(request, price=0.0, **knobs)
    decoder.extend(model.poem[:prompt])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder


def remembers(build: Build) -> Evidence:
    """The same question again takes fewer calls, though nothing of the answer stands in the
    prompt.
    """
    for n in (4, 12):
        model = Reciter(range(1, n + 3))
        said(build, model, 2, n).end()
        rounds = said(build, model, 2, n).rounds
        if rounds >= n:
            accuse(
                REMEMBERED,
                f"fewer than {n} calls",
                rounds,
                prompt=model.poem[:2],
                new_tokens=n,
                request="the second",
            )
    return Evidence(REMEMBERED, 2)


def checks_branches(build: Build) -> Evidence:
    """Whichever of two known continuations comes, it is in the draft."""
    for then in ([2, 3], [4, 5]):
        rounds = said(build, Reciter([*FORKS, *then]), len(FORKS), 2).rounds
        if rounds != 1:
            accuse(BRANCHES, "1 call", f"{rounds} calls", prompt=FORKS, text_to_come=then)
    return Evidence(BRANCHES, 2)


def eliminates(build: Build) -> Evidence:
    """A request sees its own prompt and what was said, not what others asked."""
    model = Reciter([1, 2, 3, 0, 0, 0, 9])
    said(build, model, 3, 2).end()
    drafted = shown(build, model, [5, 1])
    if 2 in drafted:
        accuse(ELIMINATED, [], drafted, prompts=[[1, 2, 3], [5, 1]], request="the second")
    if 0 not in shown(build, model, [0]):
        accuse(ELIMINATED, "a draft of what was said", [], said=[0, 0], prompt=[0])
    return Evidence(ELIMINATED, 2)


def shown(build: Build, model: Reciter, prompt: Sequence[int]) -> list[int]:
    """The first draft behind a prompt."""
    decoder = build(
        Request(model.session(), (), SamplingParams(temperature=0.0), clock=lambda: 0.0), price=0.0
    )
    decoder.extend(prompt)
    return list(decoder.step(Seeded(0)).tree.tokens)


def falls_back(build: Build) -> Evidence:
    """The longest match has one continuation, and the text takes that of a shorter one."""
    for then in ([3, 9], [4, 9]):
        rounds = said(build, Reciter([*STAGED, *then]), len(STAGED), 2).rounds
        if rounds != 1:
            accuse(STAGES, "1 call", f"{rounds} calls", prompt=STAGED, text_to_come=then)
    return Evidence(STAGES, 2)


def is_bounded(build: Build) -> Evidence:
    """Thirty requests, each with an answer of its own, on a trie of 200 nodes."""
    model = Reciter(range(1, 42))
    for number in range(30):
        model.poem = [*(1 + (i * i * (number + 1) + number) % 40 for i in range(42)), 41]
        decoder = said(build, model, 2, 40, bound=200)
        nodes = decoder.drafter.forest.size(OUTPUTS)  # type: ignore[attr-defined]
        if nodes > 200:
            accuse(PRUNED, "at most 200 nodes", nodes, bound=200, requests=number + 1, tokens=40)
        decoder.end()
    return Evidence(PRUNED, 30)


TRAPS = [
    Trap(REMEMBERED, remembers, card("lookahead_trie")),
    Trap(BRANCHES, checks_branches, card("lookahead_trie")),
    Trap(ELIMINATED, eliminates, card("lookahead_trie")),
    Trap(STAGES, falls_back, card("lookahead_trie")),
    Trap(PRUNED, is_bounded, card("lookahead_trie")),
]
