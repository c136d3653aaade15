"""Lookahead with a trie (Zhao et al. 2023): it is more than a table of the prompt's n-grams."""

from collections.abc import Iterator, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.traps import GREEDY, Build, Trap, card, run_all_rounds
from tinyspec.speculative.lookup import OUTPUTS
from tinyspec.technique import Request

REMEMBERED = "what one request generated shortens the next"
BRANCHES = "several branches are checked in one call"
ELIMINATED = "a prompt's branches end with its request"
STAGES = "a shorter match fills a draft that the longest leaves short"
PRUNED = "the nodes of the trie are bounded"

FORKS = [1, 2, 3, 9, 1, 4, 5, 9, 1]  # after a 1 came 2 3 and 4 5
STAGED = [1, 2, 3, 9, 5, 2, 4, 9, 1, 2]  # 1 2 was followed by 3; 2 alone by 4 as well


def begin_lookup(
    build: Build, model: Reciter, prompt: Sequence[int], most: int | None = None, **knobs: Any
) -> Decoder:
    """Return a decoder that has read a prompt, under a clock that stands still."""
    stop = StoppingCriteria(max_new_tokens=most)
    request = Request(model.session(), (), GREEDY, stop, clock=lambda: 0.0)
    decoder = build(request, **knobs)
    decoder.extend(prompt)
    return decoder


def recite(build: Build, model: Reciter, prompt: int, wanted: int, **knobs: Any) -> Decoder:
    """Return the decoder after a whole request: the model's text after its first tokens."""
    decoder = begin_lookup(build, model, model.poem[:prompt], wanted, **knobs)
    run_all_rounds(decoder)
    return decoder


def draft_first(
    build: Build, model: Reciter, prompt: Sequence[int], **knobs: Any
) -> tuple[int, ...]:
    """Return the first draft after a prompt."""
    return tuple(begin_lookup(build, model, prompt, **knobs).step(Seeded(0)).tree.tokens)


def expect_few_calls(law: str, build: Build, model: Reciter, n: int, most: int) -> None:
    """Raise LawViolated if the second of two equal requests takes more calls."""
    recite(build, model, 2, n).end()
    rounds = recite(build, model, 2, n).rounds
    if rounds > most:
        case = {"prompt": model.poem[:2], "new_tokens": n, "request": "the second"}
        accuse(law, f"at most {most} calls", rounds, **case)


def expect_one_call(law: str, build: Build, prompt: list[int], then: list[int]) -> None:
    """Raise LawViolated unless the two tokens that come after a prompt take one call."""
    rounds = recite(build, Reciter([*prompt, *then]), len(prompt), 2).rounds
    expect_equal(law, 1, rounds, prompt=prompt, text_to_come=then, counted="calls")


@collect_evidence(REMEMBERED)
def remembers(build: Build) -> Iterator[int]:
    """Check that a repeated request takes fewer calls, though the prompt holds no answer."""
    for n in (4, 12):
        expect_few_calls(REMEMBERED, build, Reciter(range(1, n + 3)), n, n - 1)
        yield 0


@collect_evidence(BRANCHES)
def checks_branches(build: Build) -> Iterator[int]:
    """Check that the draft holds both of two known continuations."""
    for then in ([2, 3], [4, 5]):
        expect_one_call(BRANCHES, build, FORKS, then)
        yield 0


@collect_evidence(ELIMINATED)
def eliminates(build: Build) -> Iterator[int]:
    """Check that a request sees its own prompt and all outputs, but no other prompt."""
    model = Reciter([1, 2, 3, 0, 0, 0, 9])
    recite(build, model, 3, 2).end()
    drafted = draft_first(build, model, [5, 1])
    if 2 in drafted:
        case = {"prompts": [[1, 2, 3], [5, 1]], "request": "the second"}
        accuse(ELIMINATED, [], drafted, **case)
    yield 0
    if 0 not in draft_first(build, model, [0]):
        accuse(ELIMINATED, "a draft of the output", [], output=[0, 0], prompt=[0])
    yield 0


@collect_evidence(STAGES)
def falls_back(build: Build) -> Iterator[int]:
    """Check that a shorter match is used too, where the longest has one continuation."""
    for then in ([3, 9], [4, 9]):
        expect_one_call(STAGES, build, STAGED, then)
        yield 0


@collect_evidence(PRUNED)
def is_bounded(build: Build) -> Iterator[int]:
    """Check a trie of 200 nodes over thirty requests, each with an answer of its own."""
    model = Reciter(range(1, 42))
    for number in range(30):
        model.poem = [*(1 + (i * i * (number + 1) + number) % 40 for i in range(42)), 41]
        decoder = recite(build, model, 2, 40, bound=200)
        nodes = decoder.drafter.forest.size(OUTPUTS)  # type: ignore[attr-defined]
        if nodes > 200:
            accuse(PRUNED, "at most 200 nodes", nodes, bound=200, requests=number + 1, tokens=40)
        decoder.end()
        yield 0


TRAPS = [
    Trap(REMEMBERED, remembers, card("lookahead_trie")),
    Trap(BRANCHES, checks_branches, card("lookahead_trie")),
    Trap(ELIMINATED, eliminates, card("lookahead_trie")),
    Trap(STAGES, falls_back, card("lookahead_trie")),
    Trap(PRUNED, is_bounded, card("lookahead_trie")),
]
