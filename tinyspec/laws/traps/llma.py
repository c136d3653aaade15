"""LLMA (Yang et al. 2023): what makes it LLMA and not prompt lookup."""

from collections.abc import Callable
from functools import partial
from itertools import product

from tinyspec.decoding.decode import Decoder
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.models import CountedText, recite_until
from tinyspec.laws.traps import Trap, card

OUTSIDE = "a reference outside of the prompt is copied from"
BLOCKS = "a text copied whole takes ceil(N / (k + 1)) calls"
ONCE = "a reference is read once"
LONGEST = "the longest match is copied"

Build = Callable[..., Decoder]


def uses_what_is_not_in_the_prompt(build: Build) -> Evidence:
    """A text that only a reference holds takes fewer calls than tokens."""
    for n in (3, 6, 12):
        poem = list(range(1, n + 3))
        rounds = recite_until(build, poem, n, [poem], k=15).rounds
        if rounds == n:
            accuse(
                OUTSIDE,
                f"fewer than {n} calls",
                rounds,
                prompt=poem[:2],
                reference=poem,
                new_tokens=n,
            )
    return Evidence(OUTSIDE, 3)


def copies_in_blocks(build: Build) -> Evidence:
    """Every call but the last commits k + 1 tokens."""
    for n, k in product((4, 9, 30), (1, 3, 15)):
        poem = list(range(1, n + 3))
        rounds = recite_until(build, poem, n, [poem], k=k).rounds
        if rounds != -(-n // (k + 1)):
            accuse(
                BLOCKS, -(-n // (k + 1)), rounds, prompt=poem[:2], reference=poem, new_tokens=n, k=k
            )
    return Evidence(BLOCKS, 9)


def reads_once(build: Build) -> Evidence:
    """However many tokens are made, a reference is gone through once, when the request is
    prepared.
    """
    for n in (2, 8):
        poem = list(range(1, n + 3))
        reference = CountedText(poem)
        recite_until(build, poem, n, [reference], k=1)
        if reference.read != 1:
            accuse(
                ONCE, "read once", f"read {reference.read} times", reference=poem, new_tokens=n, k=1
            )
    return Evidence(ONCE, 2)


def copies_the_longest(build: Build) -> Evidence:
    """Of two places that agree with the end of the text, the one that agrees further back is
    continued.
    """
    poem = [1, 2, 7, 8]
    for references in ([[1, 2, 7, 8], [9, 2, 5, 5]], [[9, 2, 5, 5], [1, 2, 7, 8]]):
        rounds = recite_until(build, poem, 2, references, k=15).rounds
        if rounds != 1:
            accuse(
                LONGEST,
                "1 call",
                f"{rounds} calls",
                prompt=poem[:2],
                text_to_come=poem[2:],
                references=references,
            )
    return Evidence(LONGEST, 2)


def published() -> Build:
    """The technique by the paper's rule: whatever is found is run."""
    return partial(card("llma")(), price=0.0)


TRAPS = [
    Trap(OUTSIDE, uses_what_is_not_in_the_prompt, published),
    Trap(BLOCKS, copies_in_blocks, published),
    Trap(ONCE, reads_once, published),
    Trap(LONGEST, copies_the_longest, published),
]
