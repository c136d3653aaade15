"""auto: what makes it a planner and not copying with a fixed size. Time is a clock that only a call
moves.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.exact.tables import TableSession
from tinyspec.laws.traps import Trap, card
from tinyspec.lm.forward import Scores
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

DEAR = "rows that cost more than they earn are not drafted"
FREE = "where rows are free, long drafts are made"
STOPS = "drafting stops where copies no longer hold"

Build = Callable[..., Decoder]
Seconds = Callable[[int], float]
"""Rows of a call -> what it takes."""


class Watch:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(TableSession):
    """A target whose calls take time by the number of their rows."""

    def __init__(self, model: Any, watch: Watch, seconds: Seconds):
        super().__init__(model)
        self.watch, self.seconds = watch, seconds

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        self.watch.now += self.seconds(1 + len(tree.tokens))
        return super().score(tree, hidden_layers)


def took(
    build: Build, poem: list[int], references: Sequence[Sequence[int]], seconds: Seconds
) -> tuple[float, Any]:
    """How long a text of the target took, and the decoder after it. The first two tokens are the
    prompt.
    """
    watch = Watch()
    target = Ticking(Reciter(poem), watch, seconds)
    stop, sampling = StoppingCriteria(max_new_tokens=len(poem) - 2), SamplingParams(temperature=0.0)
    decoder = build(Request(target, (), sampling, stop, references=references, clock=watch))
    decoder.extend(poem[:2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return watch.now, decoder


POEM = list(range(1, 99))


def astray(begin: int) -> list[list[int]]:
    """References that say POEM up to there; and then, after any eight of its tokens, something
    else.
    """
    return [POEM[:begin], *(POEM[i : i + 8] + [0] * 16 for i in range(begin - 8, len(POEM) - 8))]


def heeds_the_cost(build: Build) -> Evidence:
    """Every copy holds, but a row takes longer than a token: not much more time than plain decoding
    may be spent.
    """
    for slope in (1.2, 1.5, 2.0):
        plain = len(POEM) - 2
        time, _ = took(build, POEM, [POEM], lambda rows, slope=slope: 1 + slope * (rows - 1))  # type: ignore[misc]
        if time > 1.05 * plain:
            accuse(
                DEAR,
                f"at most {1.05 * plain:.1f}",
                round(time, 1),
                seconds_a_row=slope,
                plain=plain,
                reference=POEM,
            )
    return Evidence(DEAR, 3)


def drafts_long(build: Build) -> Evidence:
    """A whole text that a reference holds is had in a sixth of the calls."""
    calls = took(build, POEM, [POEM], lambda rows: 1.0)[1].rounds
    if 6 * calls > len(POEM) - 2:
        accuse(FREE, f"at most {(len(POEM) - 2) // 6} calls", calls, reference=POEM)
    return Evidence(FREE, 1)


def stops_when_copies_fail(build: Build) -> Evidence:
    """Copies hold for a while, then never again: what failed is not tried for long. A further row
    takes a tenth.
    """
    for begin in (24, 48):
        seconds: Seconds = lambda rows: 0.9 + 0.1 * rows  # noqa: E731
        good, _ = took(build, POEM[:begin], astray(begin), seconds)
        whole, _ = took(build, POEM, astray(begin), seconds)
        most = 1.25 * (len(POEM) - begin)
        if whole - good > most:
            accuse(
                STOPS,
                f"at most {most:.1f}",
                round(whole - good, 1),
                plain=len(POEM) - begin,
                copies_hold_until=begin,
            )
    return Evidence(STOPS, 2)


TRAPS = [
    Trap(DEAR, heeds_the_cost, card("auto")),
    Trap(FREE, drafts_long, card("auto")),
    Trap(STOPS, stops_when_copies_fail, card("auto")),
]
