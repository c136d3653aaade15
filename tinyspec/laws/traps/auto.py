"""auto: a planner plans by time, which copying with a fixed size does not.

Time is a clock that only forward passes move.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.exact.tables import TableSession
from tinyspec.laws.traps import GREEDY, Build, Trap, card, run_all_rounds
from tinyspec.lm.forward import Scores
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

DEAR = "rows that cost more than they earn are not drafted"
FREE = "where rows are free, long drafts are made"
STOPS = "drafting stops where copies no longer hold"

PassSeconds = Callable[[int], float]
"""The rows of a forward pass -> its seconds."""


class Watch:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(TableSession):
    """A target whose forward passes take time by the number of their rows."""

    def __init__(self, model: Any, watch: Watch, seconds: PassSeconds):
        super().__init__(model)
        self.watch, self.seconds = watch, seconds

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        self.watch.now += self.seconds(1 + len(tree.tokens))
        return super().score(tree, hidden_layers)


def rise_by_rows(slope: float, rows: int) -> float:
    """Return the seconds of a forward pass that takes 1, and `slope` for each further row."""
    return 1 + slope * (rows - 1)


def time_request(
    build: Build, poem: list[int], references: Sequence[Sequence[int]], seconds: PassSeconds
) -> tuple[float, Any]:
    """Return how long a text of the target took, and the decoder after it.

    The first two tokens are the prompt.
    """
    watch = Watch()
    stop = StoppingCriteria(max_new_tokens=len(poem) - 2)
    target = Ticking(Reciter(poem), watch, seconds)
    decoder = build(Request(target, (), GREEDY, stop, references=references, clock=watch))
    decoder.extend(poem[:2])
    run_all_rounds(decoder)
    return watch.now, decoder


POEM = list(range(1, 99))


def lead_astray(begin: int) -> list[list[int]]:
    """Return references that hold POEM up to `begin`.

    After any eight of its later tokens they hold something else.
    """
    return [POEM[:begin], *(POEM[i : i + 8] + [0] * 16 for i in range(begin - 8, len(POEM) - 8))]


@collect_evidence(DEAR)
def heeds_the_cost(build: Build) -> Iterator[int]:
    """Check that not much more time than plain decoding's is spent where a row is dear.

    Every copy holds, but a row takes longer than a token.
    """
    plain = len(POEM) - 2
    for slope in (1.2, 1.5, 2.0):
        time, _ = time_request(build, POEM, [POEM], partial(rise_by_rows, slope))
        if time > 1.05 * plain:
            case = {"seconds_a_row": slope, "plain": plain, "reference": POEM}
            accuse(DEAR, f"at most {1.05 * plain:.1f}", round(time, 1), **case)
        yield 0


@collect_evidence(FREE)
def drafts_long(build: Build) -> Iterator[int]:
    """Check that a text that a reference holds takes a sixth of the forward passes."""
    calls, most = time_request(build, POEM, [POEM], lambda rows: 1.0)[1].rounds, len(POEM) - 2
    if 6 * calls > most:
        accuse(FREE, f"at most {most // 6} calls", calls, reference=POEM)
    yield 0


@collect_evidence(STOPS)
def stops_when_copies_fail(build: Build) -> Iterator[int]:
    """Check that failing copies are not tried for long.

    Copies hold for a while, then never again. A further row takes a tenth.
    """
    for begin in (24, 48):
        seconds = partial(rise_by_rows, 0.1)
        good, _ = time_request(build, POEM[:begin], lead_astray(begin), seconds)
        whole, _ = time_request(build, POEM, lead_astray(begin), seconds)
        plain = len(POEM) - begin
        if whole - good > 1.25 * plain:
            case = {"plain": plain, "copies_hold_until": begin}
            accuse(STOPS, f"at most {1.25 * plain:.1f}", round(whole - good, 1), **case)
        yield 0


TRAPS = [
    Trap(DEAR, heeds_the_cost, card("auto")),
    Trap(FREE, drafts_long, card("auto")),
    Trap(STOPS, stops_when_copies_fail, card("auto")),
]
