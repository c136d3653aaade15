"""Token Recycling (Luo et al. 2025): rows that were thrown away are the next draft."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.speculative.drafting.token_recycling import RANK_CHANCES, build_rank_tree
from tinyspec.tree import ROOT

RECYCLED = "a token's children are the candidates last seen after it, wherever it stood"
KEPT = "a second request starts with what the first one left"
BEST = "no tree of its size is worth more than the static tree"

ROWS = ((1, 4, 3, 0), (3, 0, 1, 5), (2, 4, 0, 1), (5, 1, 3, 1))
"""A Markov target: the row depends on the newest token alone, so that one row of the matrix is
right wherever it stands.
"""


def _begin_markov(build: Build) -> Decoder:
    model = TableModel(vocabulary=4, rows=lambda text: ROWS[text[-1]])
    return begin_decoder(build, [model], (0,), SAMPLED, 12, k=2, tree="ranks", nodes=6, depth=2)


@collect_evidence(RECYCLED)
def writes_every_row_back(build: Build) -> Iterator[int]:
    """Check that the first nodes of a draft are the candidates of the rows seen last.

    The judge notes the candidates of all rows after every round.
    """
    for seed in range(6):
        decoder = _begin_markov(build)
        known: dict[int, list[int]] = {}
        while not decoder.finished:
            newest, room = decoder.context[-1], decoder.max_draft_depth
            round = decoder.step(Seeded(seed).split("step", decoder.rounds))
            expected = known.get(newest, []) if room else []
            tree = round.tree
            got = [x for x, up in zip(tree.tokens, tree.parents, strict=True) if up == ROOT]
            case = {"rows": ROWS, "text": decoder.context, "newest": newest, "seed": seed}
            expect_equal(RECYCLED, expected, got, **case)
            for token in (newest, *tree.tokens):
                known[token] = [x for _, x in sorted((-p, x) for x, p in enumerate(ROWS[token]))][
                    :2
                ]
            yield 0


@collect_evidence(KEPT)
def starts_warm(build: Build) -> Iterator[int]:
    """Check that a second request on the same decoder has a draft in its first round.

    The first request is closed before.
    """
    decoder, drafted = _begin_markov(build), 0
    for _ in range(2):
        drafted = len(decoder.step(Seeded(7).split("first", decoder.rounds)).tree.tokens)
        decoder.end()
        decoder.rewind(0)
        decoder.extend((0,))
        yield 0
    if not drafted:
        accuse(KEPT, "a draft in the first round", "none", rows=ROWS, prompt=(0,), request="second")


@cache
def _worth(path: tuple[int, ...]) -> float:
    return RANK_CHANCES[path[0]] * (_worth(path[1:]) if path[1:] else 1.0)


def _best(nodes: int, depth: int, k: int) -> float:
    """Return the greatest worth of a prefix-closed set of paths, by trying them all."""
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


@collect_evidence(BEST)
def is_the_best_tree(make: Callable[[int, int, int], Sequence[tuple[int, int]]]) -> Iterator[int]:
    """Check the expected tokens of the static tree against every tree of its size.

    Candidates pass with RANK_CHANCES.
    """
    for nodes, (depth, k) in product(range(1, 6), ((1, 2), (3, 1), (2, 2), (2, 3), (3, 2))):
        paths: list[tuple[int, ...]] = []
        for up, rank in make(nodes, depth, k):
            paths.append((*(() if up == ROOT else paths[up]), rank))
        got, best = sum(map(_worth, paths)), _best(nodes, depth, k)
        if len(set(paths)) != len(paths) or abs(got - best) > 1e-12:
            case = {"nodes": nodes, "depth": depth, "k": k, "paths": paths}
            accuse(BEST, f"worth {best:.4f}", f"worth {got:.4f}", **case)
        yield 0


TRAPS = [
    Trap(RECYCLED, writes_every_row_back, card("token_recycling")),
    Trap(KEPT, starts_warm, card("token_recycling")),
    Trap(BEST, is_the_best_tree, lambda: build_rank_tree),
]
