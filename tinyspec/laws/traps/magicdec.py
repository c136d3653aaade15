"""MagicDec (Sadhukhan et al. 2024): a draft reads a fixed number of keys, whatever the text."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.models import ANSWERS, make_haystack, needle_model
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import GREEDY, Build, Trap, begin_decoder, card
from tinyspec.speculative.integrated.magicdec import MagicDecDrafter

READS = "the draft reads the first tokens and the latest ones, and no others"


@collect_evidence(READS)
def reads_a_fixed_number_of_keys(build: Build) -> Iterator[int]:
    """Check texts in which one old token decides the next one, at every place.

    The draft knows the answer just where that token is among the first `sink` or the latest
    budget - sink ones, whatever the length of the text.
    """
    for length, (budget, sink) in product((6, 12, 40), ((6, 2), (5, 0), (9, 4))):
        knobs: dict[str, Any] = {"gamma": 1, "budget": budget, "sink": sink}
        seen, due = list[int](), list[int]()
        for at in range(length - 1):
            prompt = make_haystack(1, length, at)
            decoder = begin_decoder(build, [needle_model()], prompt, GREEDY, 4, **knobs)
            draft = decoder.step(Seeded(0)).tree.tokens
            seen += [at] if draft == (ANSWERS[1],) else []
            due += [at] if at < sink or at >= length - (budget - sink) else []
        expect_equal(READS, due, seen, length=length, **knobs)
        yield 0


TRAPS = [Trap(READS, reads_a_fixed_number_of_keys, card("magicdec"))]

_magicdec = partial(Toy, technique="magicdec", function=MagicDecDrafter.propose, law=READS)

TOYS = [
    _magicdec("the draft reads all keys", "since > self.sink", "False"),
    _magicdec("the window alone", "range(self.sink)", "()"),
    _magicdec("the window stands where it was", "len(context) - self.window", "6 - self.window"),
]
