"""Lookahead decoding (Fu et al. 2024): a window of Jacobi iterations, and the n-grams of its
path.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap, card
from tinyspec.technique import Request

DIAGONALS = "a draft is the n-grams that the window's columns spelled"
ONE = "both branches share one call"
AHEAD = "the window finds what the text has not said yet"

Build = Callable[..., Decoder]
Grams = list[tuple[int, ...]]
TOKENS = 14


def _begun(build: Build, model: TableModel, w: int, n: int, g: int) -> tuple[Decoder, list[Any]]:
    forward_log: list[Any] = []
    request = Request(
        model.session(forward_log),
        (),
        SamplingParams(0.0),
        StoppingCriteria(max_new_tokens=TOKENS),
        forward_log=forward_log,
    )
    decoder = build(request, window=w, n=n, guesses=g, from_prompt=False)
    decoder.extend((0, 1))
    del forward_log[:]
    return decoder, forward_log


def _by_hand(model: TableModel, texts: Sequence[list[int]], w: int, n: int, g: int) -> list[Grams]:
    """The n-grams verified in each round, where `texts` are the texts at its beginning: every cell
    by a pass of its own.

    guess[i][p] is what iteration i, the oldest first, said for position p behind the newest token.
    """
    found, pool = list[Grams](), dict[int, Grams]()
    first = texts[0]
    guess = [{p: first[(p - 1) % len(first)] for p in range(1, w + n - 2)}]
    for text in texts:
        newest, room = text[-1], TOKENS + 2 - len(text) - 1
        guess[0][0] = newest
        found.append([gram[: room + 1] for gram in reversed(pool.get(newest, []))] if room else [])
        iterations, said = len(guess), dict[int, int]()
        most = max(guess[-1]) - iterations + 1
        for column in range(most + 1):
            end = column + iterations - 1  # the position of the column's newest cell
            if end <= room:
                chain = [guess[0][p] for p in range(1, column + 1)]
                cells = [guess[i][column + i] for i in range(1, iterations)]
                row = model.row((*text, *chain, *cells))
                said[end + 1] = max(range(len(row)), key=lambda x: (row[x], -x))
            elif said:
                said[end + 1] = guess[-1][end]
            ran = end <= room
            if iterations == n - 1 and ran:
                gram = (*(guess[i][column + i] for i in range(n - 1)), said[end + 1])
                kept = [x for x in pool.get(gram[0], []) if x != gram]
                pool[gram[0]] = [*kept, gram][-g:]
        if said:  # everything is a position nearer now; what the text has overtaken goes
            guess = [*guess[iterations == n - 1 :], said]
            guess = [{p - 1: x for p, x in row.items() if p > i} for i, row in enumerate(guess)]
    return found


def drafts_its_diagonals(build: Build) -> Evidence:
    """Window and pool simulated cell by cell, each from its own context; the drafts must be those
    n-grams.
    """
    seen = 0
    for (w, n, g), seed in product(
        ((1, 2, 1), (2, 2, 2), (2, 3, 2), (3, 3, 2), (3, 4, 3)), range(4)
    ):
        model = TableModel(seed, 4, zeros=False)
        decoder, _ = _begun(build, model, w, n, g)
        texts, rounds = list[list[int]](), list[Round]()
        while not decoder.finished:
            texts.append(list(decoder.context))
            rounds.append(decoder.step(Seeded(decoder.rounds)))
        for text, round, grams in zip(texts, rounds, _by_hand(model, texts, w, n, g), strict=True):
            tree = round.tree
            guesses = [node for node, probe in enumerate(tree.probe) if not probe]
            got = [(text[-1], *tree.tokens_on(tree.path(node))) for node in guesses]
            expected = list(
                dict.fromkeys(gram[:end] for gram in grams for end in range(2, len(gram) + 1))
            )
            if got != expected:
                accuse(DIAGONALS, expected, got, table=seed, text=text, W=w, N=n, G=g)
            seen += 1
    return Evidence(DIAGONALS, seen)


def shares_one_call(build: Build) -> Evidence:
    """Every round is one call of the target, window and guesses together."""
    for seed in range(3):
        decoder, forward_log = _begun(build, TableModel(seed, 3), 3, 3, 2)
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        if len(forward_log) != decoder.rounds:
            accuse(
                ONE,
                f"{decoder.rounds} calls",
                f"{len(forward_log)} calls",
                table=seed,
                rounds=decoder.rounds,
            )
    return Evidence(ONE, 3)


def looks_ahead(build: Build) -> Evidence:
    """A target that numbers the positions says no n-gram twice: only a window that looks ahead of
    the text can guess it.
    """
    model = TableModel(vocabulary=64, rows=lambda text: [int(x == len(text)) for x in range(64)])
    decoder, _ = _begun(build, model, 4, 3, 4)
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    if decoder.rounds >= TOKENS:
        accuse(
            AHEAD,
            f"fewer than {TOKENS} calls",
            decoder.rounds,
            prompt=(0, 1),
            target="says the position",
        )
    return Evidence(AHEAD, 1)


TRAPS = [
    Trap(DIAGONALS, drafts_its_diagonals, card("lookahead_jacobi")),
    Trap(ONE, shares_one_call, card("lookahead_jacobi")),
    Trap(AHEAD, looks_ahead, card("lookahead_jacobi")),
]
