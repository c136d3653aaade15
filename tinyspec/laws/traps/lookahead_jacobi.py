"""Lookahead decoding (Fu et al. 2024): a window of Jacobi iterations finds n-grams to verify."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import likeliest_token
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import GREEDY, Build, Trap, begin_decoder, card, run_all_rounds

DIAGONALS = "a draft is the n-grams of the window's columns"
ONE = "both branches share one call"
AHEAD = "the window finds what the text does not hold yet"

Grams = list[tuple[int, ...]]
TOKENS = 14


def begin_window(build: Build, model: TableModel, w: int, n: int, g: int) -> Decoder:
    """Return a decoder with this window that has read its prompt."""
    knobs: dict[str, Any] = {"window": w, "n": n, "guesses": g, "from_prompt": False}
    decoder = begin_decoder(build, [model], (0, 1), GREEDY, TOKENS, **knobs)
    decoder.forward_log.clear()
    return decoder


def find_ngrams(
    model: TableModel, texts: Sequence[list[int]], w: int, n: int, g: int
) -> list[Grams]:
    """Return the n-grams verified in each round, every cell by a pass of its own.

    `texts` are the texts at the beginning of each round. window[i][p] is what iteration i, the
    oldest first, predicted for position p after the newest token.
    """
    found, pool = list[Grams](), dict[int, Grams]()
    first = texts[0]
    window = [{p: first[(p - 1) % len(first)] for p in range(1, w + n - 2)}]
    for text in texts:
        newest, room = text[-1], TOKENS + 2 - len(text) - 1
        window[0][0] = newest
        found.append([gram[: room + 1] for gram in reversed(pool.get(newest, []))] if room else [])
        iterations, predicted = len(window), dict[int, int]()
        most = max(window[-1]) - iterations + 1
        for column in range(most + 1):
            end = column + iterations - 1  # the position of the column's newest cell
            if end <= room:
                chain = [window[0][p] for p in range(1, column + 1)]
                cells = [window[i][column + i] for i in range(1, iterations)]
                predicted[end + 1] = likeliest_token(model.row((*text, *chain, *cells)))
                if iterations == n - 1:
                    gram = (newest, *chain, *cells, predicted[end + 1])[column:]
                    others = [x for x in pool.get(gram[0], []) if x != gram]
                    pool[gram[0]] = [*others, gram][-g:]
            elif predicted:
                predicted[end + 1] = window[-1][end]
        if predicted:  # everything is a position nearer now; what the text has overtaken goes
            window = [*window[iterations == n - 1 :], predicted]
            window = [{p - 1: x for p, x in row.items() if p > i} for i, row in enumerate(window)]
    return found


@collect_evidence(DIAGONALS)
def drafts_its_diagonals(build: Build) -> Iterator[int]:
    """Check the drafts against a window and a pool that are simulated cell by cell."""
    for (w, n, g), seed in product(
        ((1, 2, 1), (2, 2, 2), (2, 3, 2), (3, 3, 2), (3, 4, 3)), range(4)
    ):
        model = TableModel(seed, 4, zeros=False)
        decoder = begin_window(build, model, w, n, g)
        texts, rounds = list[list[int]](), list[Round]()
        while not decoder.finished:
            texts.append(list(decoder.context))
            rounds.append(decoder.step(Seeded(decoder.rounds)))
        ngrams = find_ngrams(model, texts, w, n, g)
        for text, round, grams in zip(texts, rounds, ngrams, strict=True):
            tree = round.tree
            drafted = [node for node, probe in enumerate(tree.probe) if not probe]
            got = [(text[-1], *tree.tokens_on(tree.path(node))) for node in drafted]
            expected = list(
                dict.fromkeys(gram[:end] for gram in grams for end in range(2, len(gram) + 1))
            )
            expect_equal(DIAGONALS, expected, got, table=seed, text=text, W=w, N=n, G=g)
            yield 0


@collect_evidence(ONE)
def shares_one_call(build: Build) -> Iterator[int]:
    """Check that every round is one call of the target, window and drafts together."""
    for seed in range(3):
        decoder = begin_window(build, TableModel(seed, 3), 3, 3, 2)
        rounds, calls = len(run_all_rounds(decoder)), len(decoder.forward_log)
        expect_equal(ONE, rounds, calls, table=seed, rounds=rounds, counted="calls")
        yield 0


@collect_evidence(AHEAD)
def looks_ahead(build: Build) -> Iterator[int]:
    """Check that n-grams are found that the text does not hold.

    The target numbers the positions, so no n-gram occurs twice.
    """
    model = TableModel(vocabulary=64, rows=lambda text: [int(x == len(text)) for x in range(64)])
    rounds = len(run_all_rounds(begin_window(build, model, 4, 3, 4)))
    if rounds >= TOKENS:
        case = {"prompt": (0, 1), "target": "numbers the positions"}
        accuse(AHEAD, f"fewer than {TOKENS} calls", rounds, **case)
    yield 0


TRAPS = [
    Trap(DIAGONALS, drafts_its_diagonals, card("lookahead_jacobi")),
    Trap(ONE, shares_one_call, card("lookahead_jacobi")),
    Trap(AHEAD, looks_ahead, card("lookahead_jacobi")),
]
