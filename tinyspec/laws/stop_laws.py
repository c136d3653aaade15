"""Laws for where a text ends: one rule at every alignment of blocks and stops, and nothing of what
was cut stays.

Each takes a `Parts`, searches its cases smallest first, and raises `LawViolated` with the first
that breaks it. The target recites a given text, so that what must come out is plain to see.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.laws.tables import TableModel
from tinyspec.tree import TokenTree

STOP_LETTERS = "abc"
DEAF = (0, 0, 0, 0)  # guesses of one who does not ask how much room there is
STOP_RULES: list[dict[str, Any]] = [
    {},
    {"eos": {1}},
    {"eos": {1, 2}},
    {"sequences": ((1, 1),)},
    {"sequences": ((1, 0, 0), (0, 2))},
    {"strings": ("b",)},
    {"strings": ("ab",)},
    {"eos": {2}, "strings": ("ba",), "sequences": ((1, 1),)},
]


def end_of_text(
    poem: Sequence[int], rule: dict[str, Any], most: int, limit: int | None
) -> tuple[list[int], str]:
    """Token by token, by the definition: where this text ends, and why. The text completes a stop
    before it runs out.
    """
    new: list[int] = []
    while True:
        if limit is not None and len(new) >= limit and limit < most:
            return new, "context"
        if len(new) >= most:
            return new, "length"
        new.append(poem[len(new)])
        if new[-1] in rule.get("eos", ()):
            return new, "eos"
        if any(tuple(new[len(new) - len(s) :]) == s for s in rule.get("sequences", ())):
            return new, "stop"
        if any(s in "".join(STOP_LETTERS[x] for x in new) for s in rule.get("strings", ())):
            return new, "stop"


class RecitingDrafter(BaseDrafter):
    """Proposes the next tokens of the text to come, and others after them. `deaf`: however little
    room there is.
    """

    def __init__(
        self, poem: Sequence[int], gamma: int, then: Sequence[int] = (), deaf: bool = False
    ):
        self.poem, self.gamma, self.then, self.deaf = poem, gamma, then, deaf

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        at = len(context) - 1
        chain = [*self.poem[at : at + self.gamma], *self.then]
        return TokenTree.chain(chain if self.deaf else chain[:max_draft_depth])


def stop_cases() -> Iterator[
    tuple[tuple[int, ...], dict[str, Any], int, int | None, int, tuple[int, ...]]
]:
    """(the text to come, stop rule, most new tokens, context left, right guesses, guesses after
    them), small first.
    """
    for most in range(5):
        yield (0,) * 4, {}, most, None, 4, DEAF
        for poem in product(range(3 if most < 3 else 2), repeat=max(most, 1)):
            for rule in STOP_RULES:
                for gamma, then in ((0, ()), (0, (1,)), (1, ()), (2, ()), (3, ()), (1, (2, 1))):
                    yield poem, rule, most, None, gamma, then
    for limit in range(4):
        yield (0, 2, 0, 0), {"eos": {1}}, 4, limit, 2, ()


def recite_poem(
    parts: Parts, poem: Any, rule: Any, most: int, limit: int | None, gamma: int, then: Any
) -> Decoder:
    target = TableModel(
        vocabulary=3,
        rows=lambda text: [int(x == (*poem, 0)[min(len(text) - 1, len(poem))]) for x in range(3)],
    )
    ends = {"eos": frozenset(rule.get("eos", ())), **{k: v for k, v in rule.items() if k != "eos"}}
    stop: StoppingCriteria = parts.stop(
        **ends, max_new_tokens=most, decode=lambda ids: "".join(STOP_LETTERS[x] for x in ids)
    )
    positions = None if limit is None else 1 + limit
    decoder = parts.decoder(
        target.session(),
        RecitingDrafter(poem, gamma, then, then is DEAF),
        parts.walk,
        stop=stop,
        positions=positions,
    )
    decoder.extend((0,))
    return decoder


def stop_law(parts: Parts) -> Evidence:
    """A text ends at the first end token, stop sequence or stop string, or at the budget, at every
    alignment of blocks and stops and whatever was drafted; nothing comes after, and the reason is
    the one plain decoding gives."""
    name, seen = "stop", 0
    for poem, rule, most, limit, gamma, then in stop_cases():
        decoder, seen = recite_poem(parts, poem, rule, most, limit, gamma, then), seen + 1
        drafts = []
        while not decoder.finished and len(decoder.new) <= most:
            drafts.append(decoder.step(parts.seeded(decoder.rounds)).tree.tokens)
        got, expected = (decoder.new, decoder.finished), end_of_text(poem, rule, most, limit)
        if got != expected:
            budget = {"max_new_tokens": most, **({} if limit is None else {"context left": limit})}
            accuse(name, expected, got, text_to_come=poem, stop=rule, **budget, drafts=drafts)
    return Evidence(name, seen)


def room_law(parts: Parts) -> Evidence:
    """A draft is never deeper than one less than the tokens that are still wanted or that the
    context still holds.
    """
    name, seen = "room", 0
    for most, limit in product(range(1, 5), (None, 1, 2, 3)):
        decoder, seen = recite_poem(parts, (0,) * 9, {}, most, limit, 3, ()), seen + 1
        while not decoder.finished:
            left = min(most, most if limit is None else limit) - len(decoder.new)
            depth = len(decoder.step(parts.seeded(decoder.rounds)).tree.tokens)
            if depth > left - 1:
                accuse(
                    name,
                    f"at most {left - 1} guesses",
                    depth,
                    max_new_tokens=most,
                    context_left=limit,
                    made=most - left,
                )
    return Evidence(name, seen)


def committed_text(parts: Parts) -> Evidence:
    """After every round the target's text is the prompt and what was made: nothing that a stop cut
    off, nothing less.
    """
    name, seen = "committed text", 0
    for poem, rule, most, limit, gamma, then in stop_cases():
        if not (gamma or then):
            continue  # nothing to cut in a round of one token
        decoder, made, seen = (
            recite_poem(parts, poem, rule, most, limit, gamma, then),
            [0],
            seen + 1,
        )
        while not decoder.finished and len(made) <= most:
            made += decoder.step(parts.seeded(decoder.rounds)).tokens
            text = list(decoder.target.text)  # type: ignore[attr-defined]
            if not text == made == decoder.context:
                accuse(
                    name,
                    made,
                    text,
                    text_to_come=poem,
                    stop=rule,
                    max_new_tokens=most,
                    guesses=gamma,
                )
    return Evidence(name, seen)


STOP_LAWS = {"stop": stop_law, "room": room_law, "committed text": committed_text}
