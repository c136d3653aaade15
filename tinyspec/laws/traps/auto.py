"""auto: a planner plans by time, which copying with a fixed size does not.

Time is a clock that only forward passes move.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import Reciter, add_random_head, small_network
from tinyspec.laws.exact.tables import TableSession
from tinyspec.laws.traps import GREEDY, Build, Trap, card, run_all_rounds
from tinyspec.lm.forward import Scores
from tinyspec.speculative.goodput import HEAD
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

DEAR = "rows that cost more than they earn are not drafted"
FREE = "where rows are free, long drafts are made"
STOPS = "drafting stops where copies no longer hold"
HEADED = "a head that rests now and then drafts as one that never rests"
OWN_KNOBS: dict[str, dict[str, Any]] = {
    "medusa": {"nodes": 5},
    "eagle": {"nodes": 4, "draw": "top_k"},
    "hydra": {"nodes": 5},
}
"""Heads on which HEADED is checked, and the settings of their own methods that auto uses."""
HEAD_WAYS = 8  # the last ways of a round: so many sizes of a head's draft
HEAD_PHASE, OTHER_PHASE = 3, 11  # rounds in turn: the head is chosen, other ways are

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


class Phases:
    """A policy: it chooses the head for some rounds, then other ways at random, and so on."""

    def __init__(self) -> None:
        self.rounds = 0

    def __call__(self, ways: int, rng: Any) -> int:
        at, others = self.rounds % (HEAD_PHASE + OTHER_PHASE), ways - HEAD_WAYS
        self.rounds += 1
        if at < HEAD_PHASE and others > 0:
            return ways - 1 - at  # the largest sizes
        return int(rng.draw([1 / max(others, 1)] * max(others, 1)))


@collect_evidence(HEADED)
def a_resting_head_misses_nothing(build: Build) -> Iterator[int]:
    """Check each draft of a head against that of its own method on the same text.

    In between, drafts are looked up or there are none, longer than the head's states are asked for.
    """
    for method, knobs in OWN_KNOBS.items():
        card = find_technique(method)
        for seed in range(3):
            model = add_random_head(small_network(seed), card, seed)
            sampling, stop = SamplingParams(), StoppingCriteria(max_new_tokens=55)
            session, references = model.session(), [[0, 1, 2, 3, 1, 0, 2, 2, 3, 0]]
            request = Request(session, (), sampling, stop, references, choose=Phases(), head=method)
            decoder: Any = build(request, remember=False)
            decoder.extend((0, 1, 2))
            drafted = 0
            while not decoder.finished:
                text, depth = tuple(decoder.context), decoder.max_draft_depth
                round = decoder.step(Seeded(decoder.rounds))
                source, size = decoder.drafter.option
                if source != HEAD or not size:
                    continue
                fresh = card.make(Request(model.session(), (), sampling), **knobs)
                fresh.extend(text)
                own = fresh.drafter.propose(text, depth, sampling, Seeded(0))
                expected = own.tokens[:size], own.parents[:size]
                got = round.tree.tokens, round.tree.parents
                expect_equal(HEADED, [*map(list, expected)], [*map(list, got)], head=method,
                             network=seed, text=text)  # fmt: skip
                drafted += 1
            if drafted < 2 * HEAD_PHASE:  # it has rested, and gone on
                accuse(HEADED, f"at least {2 * HEAD_PHASE} drafts", drafted, head=method)
            yield drafted


TRAPS = [
    Trap(DEAR, heeds_the_cost, card("auto")),
    Trap(FREE, drafts_long, card("auto")),
    Trap(STOPS, stops_when_copies_fail, card("auto")),
    Trap(HEADED, a_resting_head_misses_nothing, card("auto")),
]
