"""TETRIS (Wu et al. 2025): the likeliest draft tokens of a batch, chosen before they are drawn."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from operator import mul
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.joint import Reference, exact_distribution
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import expect_distribution
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, card
from tinyspec.speculative.integrated.tetris import TetrisDrafter, share_capacity
from tinyspec.technique import Request

SHARED = "no other choice of the batch's draft tokens is likelier to be accepted"
PRESENT = "whether a token is verified is known before it is drawn"


@collect_evidence(SHARED)
def likeliest_are_verified(share: Callable[..., dict[int, int]]) -> Iterator[int]:
    """Check the choice against all choices, by the expected number of accepted tokens."""
    rows: tuple[list[float], ...] = ([0.9, 0.8, 0.1], [0.5, 0.5], [0.99], [0.3, 0.9, 0.9], [])
    for size in (1, 2, 3):
        for chosen in product(rows, repeat=size):
            chances = dict(enumerate(chosen))
            for capacity in range(8):
                got = share(chances, capacity)
                case = {"chances": chances, "capacity": capacity, "verified": got}
                drafted = sum(map(len, chosen))
                expect_equal(SHARED, min(capacity, drafted), sum(got.values()), **case)
                best = max(
                    expected_accepted(chances, lengths)
                    for lengths in product(*(range(len(row) + 1) for row in chosen))
                    if sum(lengths) <= capacity
                )
                mine = expected_accepted(chances, [got[n] for n in range(size)])
                expect_equal(SHARED, round(best, 12), round(mine, 12), **case)
        yield 0


def expected_accepted(chances: Mapping[int, Sequence[float]], lengths: Sequence[int]) -> float:
    """Return how many draft tokens are expected to be accepted."""
    return sum(sum(accumulate(chances[n][:length], mul)) for n, length in enumerate(lengths))


class Neighbour:
    """A scheduler with another request, whose draft tokens have these chances."""

    def __init__(self, chances: Sequence[float]):
        self.chances = chances

    def consult(self, name: Hashable, make: Callable[[], Any], question: Any) -> int:
        """Return the answer of a rule that both requests ask."""
        answer: int = make().decide({0: question, 1: self.chances}, 2)[0]
        return answer


def same_row(row: Any, text: Any) -> Any:
    """Return the row, whatever the text is."""
    return row


@collect_evidence(PRESENT)
def kept_before_it_is_drawn(build: Build) -> Iterator[int]:
    """Check the distribution of a request's text beside another request, with room for one each."""
    by_hand = [TableModel(vocabulary=2, rows=partial(same_row, row)) for row in ([1, 1], [9, 1])]
    pairs = [by_hand, *([TableModel(n, 2), TableModel(n + 9, 2)] for n in range(3))]
    for (target, draft), chances in product(pairs, ([0.5], [0.7, 0.6], [0.2, 0.1])):

        def make(target: Any = target, draft: Any = draft, chances: Any = chances) -> Decoder:
            other: Any = Neighbour(chances)
            request = Request(target.session(), [draft.session()], SAMPLED, scheduler=other)
            return build(request, gamma=2, verified=1)

        got = exact_distribution(make, 2, outside=partial(same_row, (target, draft)))
        expected = Reference(target.row, SAMPLED).distribution(2, (0,))
        expect_distribution(PRESENT, expected, got, target=target, draft=draft, other=chances)
        yield got.branches


TRAPS = [
    Trap(SHARED, likeliest_are_verified, lambda: share_capacity),
    Trap(PRESENT, kept_before_it_is_drawn, card("tetris")),
]

_tetris = partial(Toy, technique="tetris")

TOYS = [
    _tetris(
        "the score of a token is its own draft probability (the released code)",
        "kept = self.ask(self.chances[: len(tree.tokens)])",
        "kept = self.ask([float(q[t]) for t, q in zip(tree.tokens, tree.draft_probs)])",
        TetrisDrafter.propose,
        law=PRESENT,
    ),
    _tetris(
        "an equal share for each request",
        "ranked[:capacity]",
        "sorted(ranked, key=lambda one: one[1:])[:capacity]",
        share_capacity,
        law=SHARED,
    ),
    _tetris(
        "tokens are ranked without those before them",
        "enumerate(accumulate(row, mul))",
        "enumerate(row)",
        share_capacity,
        law=SHARED,
    ),
]
