"""Token Recycling (Luo et al. 2025): rows that were thrown away are the next draft."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.drafting.token_recycling import (
    RANK_CHANCES,
    build_static_tree,
)
from tinyspec.technique import Request
from tinyspec.tree import ROOT

RECYCLED = "a token's children are the candidates last seen behind it, wherever it stood"
KEPT = "a second request starts with what the first one left"
BEST = "no tree of its size is worth more than the static tree"

Build = Callable[..., Decoder]
ROWS = ((1, 4, 3, 0), (3, 0, 1, 5), (2, 4, 0, 1), (5, 1, 3, 1))
"""A Markov target: the row depends on the newest token alone, so that one row of the matrix is
right wherever it stands.
"""


def _markov(tokens: int) -> Request:
    model = TableModel(vocabulary=4, rows=lambda text: ROWS[text[-1]])
    return Request(model.session(), stop=StoppingCriteria(max_new_tokens=tokens))


def writes_every_row_back(build: Build) -> Evidence:
    """After every round the judge notes the candidates of all rows; the next draft's first nodes
    must be those.
    """
    seen = 0
    for seed in range(6):
        decoder = build(_markov(12), k=2, nodes=6, depth=2)
        decoder.extend((0,))
        known: dict[int, list[int]] = {}
        while not decoder.finished:
            newest, room = decoder.context[-1], decoder.max_draft_depth
            round = decoder.step(Seeded(seed).split("step", decoder.rounds))
            expected = known.get(newest, []) if room else []
            got = [
                x for x, up in zip(round.tree.tokens, round.tree.parents, strict=True) if up == ROOT
            ]
            if got != expected:
                accuse(
                    RECYCLED,
                    expected,
                    got,
                    rows=ROWS,
                    text=decoder.context,
                    newest=newest,
                    seed=seed,
                )
            for token in (newest, *round.tree.tokens):
                known[token] = sorted(range(4), key=lambda x, row=ROWS[token]: (-row[x], x))[:2]  # type: ignore[misc]
            seen += 1
    return Evidence(RECYCLED, seen)


def starts_warm(build: Build) -> Evidence:
    """The same request on the same decoder, closed in between."""
    decoder, rounds = build(_markov(12), k=2, nodes=6, depth=2), list[int]()
    for _ in range(2):
        decoder.extend((0,))
        begun = decoder.rounds
        first = decoder.step(Seeded(7).split("first", begun))
        rounds.append(len(first.tree.tokens))
        decoder.end()
        decoder.rewind(0)
    if not rounds[1]:
        accuse(KEPT, "a draft in the first round", "none", rows=ROWS, prompt=(0,), request="second")
    return Evidence(KEPT, 2)


@cache
def _worth(path: tuple[int, ...]) -> float:
    return RANK_CHANCES[path[0]] * (_worth(path[1:]) if path[1:] else 1.0)


def _best(nodes: int, depth: int, k: int) -> float:
    """The greatest worth of a prefix-closed set of paths, by trying them all."""
    paths = [p for d in range(1, depth + 1) for p in product(range(k), repeat=d)]

    def most(at: int, taken: frozenset[tuple[int, ...]]) -> float:
        if len(taken) == nodes or at == len(paths):
            return 0.0
        path = paths[at]
        rest = most(at + 1, taken)
        if len(path) == 1 or path[:-1] in taken:
            rest = max(rest, _worth(path) + most(at + 1, taken | {path}))
        return rest

    return most(0, frozenset())


def is_the_best_tree(make: Callable[[int, int, int], Sequence[tuple[int, int]]]) -> Evidence:
    """Expected tokens of the tree, if candidates come as CHANCES say, against brute force."""
    seen = 0
    for nodes, (depth, k) in product(range(1, 6), ((1, 2), (3, 1), (2, 2), (2, 3), (3, 2))):
        paths: list[tuple[int, ...]] = []
        for up, rank in make(nodes, depth, k):
            paths.append((*(() if up == ROOT else paths[up]), rank))
        got, best, seen = sum(map(_worth, paths)), _best(nodes, depth, k), seen + 1
        if len(set(paths)) != len(paths) or abs(got - best) > 1e-12:
            accuse(
                BEST,
                f"worth {best:.4f}",
                f"worth {got:.4f}",
                nodes=nodes,
                depth=depth,
                k=k,
                paths=paths,
            )
    return Evidence(BEST, seen)


TRAPS = [
    Trap(RECYCLED, writes_every_row_back, card("token_recycling")),
    Trap(KEPT, starts_warm, card("token_recycling")),
    Trap(BEST, is_the_best_tree, lambda: build_static_tree),
]
