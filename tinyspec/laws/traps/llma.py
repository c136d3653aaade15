"""LLMA (Yang et al. 2023): it copies from references, which prompt lookup does not."""

from collections.abc import Iterator
from itertools import product

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import CountedText, recite_until
from tinyspec.laws.traps import Build, Trap, card

OUTSIDE = "a reference outside of the prompt is copied from"
BLOCKS = "a text copied whole takes ceil(N / (k + 1)) calls"
ONCE = "a reference is read once"
LONGEST = "the longest match is copied"


@collect_evidence(OUTSIDE)
def uses_what_is_not_in_the_prompt(build: Build) -> Iterator[int]:
    """Check that a text that only a reference holds takes fewer calls than tokens."""
    for n in (3, 6, 12):
        poem = list(range(1, n + 3))
        rounds = recite_until(build, poem, n, [poem], k=15).rounds
        if rounds == n:
            case = {"prompt": poem[:2], "reference": poem, "new_tokens": n}
            accuse(OUTSIDE, f"fewer than {n} calls", rounds, **case)
        yield 0


@collect_evidence(BLOCKS)
def copies_in_blocks(build: Build) -> Iterator[int]:
    """Check that every call but the last commits k + 1 tokens."""
    for n, k in product((4, 9, 30), (1, 3, 15)):
        poem = list(range(1, n + 3))
        rounds = recite_until(build, poem, n, [poem], k=k).rounds
        case = {"prompt": poem[:2], "reference": poem, "new_tokens": n, "k": k}
        expect_equal(BLOCKS, -(-n // (k + 1)), rounds, **case)
        yield 0


@collect_evidence(ONCE)
def reads_once(build: Build) -> Iterator[int]:
    """Check that a reference is read once, when the request is prepared."""
    for n in (2, 8):
        poem = list(range(1, n + 3))
        reference = CountedText(poem)
        recite_until(build, poem, n, [reference], k=1)
        case = {"reference": poem, "new_tokens": n, "k": 1, "counted": "times it was read"}
        expect_equal(ONCE, 1, reference.read, **case)
        yield 0


@collect_evidence(LONGEST)
def copies_the_longer_match(build: Build) -> Iterator[int]:
    """Check that of two matches with the end of the text the longer one is continued."""
    poem = [1, 2, 7, 8]
    for references in ([[1, 2, 7, 8], [9, 2, 5, 5]], [[9, 2, 5, 5], [1, 2, 7, 8]]):
        rounds = recite_until(build, poem, 2, references, k=15).rounds
        case = {"prompt": poem[:2], "text_to_come": poem[2:], "references": references}
        expect_equal(LONGEST, 1, rounds, **case, counted="calls")
        yield 0


TRAPS = [
    Trap(OUTSIDE, uses_what_is_not_in_the_prompt, card("llma")),
    Trap(BLOCKS, copies_in_blocks, card("llma")),
    Trap(ONCE, reads_once, card("llma")),
    Trap(LONGEST, copies_the_longer_match, card("llma")),
]
