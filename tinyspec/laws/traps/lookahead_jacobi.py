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
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.speculative.drafting.lookahead_jacobi import LookaheadJacobiDrafter
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

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


# ------------------------------------------------------------------ toys


class Jacobi(LookaheadJacobiDrafter):
    """Jacobi iteration alone: the newest iteration is the draft."""

    row: Sequence[int] = ()

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        guess = self.row or [context[at % len(context)] for at in range(self.width)]
        return TokenTree.chain(guess[:max_draft_depth])

    def observe(self, round: Round) -> None:
        said = [max(range(len(row)), key=lambda x: row[x]) for row in round.scores.logits]
        self.row = said[len(round.tokens) :] + said[-1:] * len(round.tokens)


class OfTheText(LookaheadJacobiDrafter):
    """N-grams of what was said, and no window."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        self.end()
        for at in range(len(context) - self.n + 1):
            self.pool.add(context[at : at + self.n])
        tokens, parents = list[int](), list[int]()
        self._add_ngrams(context[-1], max_draft_depth, tokens, parents)
        return TokenTree(tokens, parents, (None,) * len(tokens), (False,) * len(tokens))

    def observe(self, round: Round) -> None:
        return None


class Twice(LookaheadJacobiDrafter):
    """Window first, guesses in a second call."""

    def __init__(self, target: Any, **knobs: Any):
        super().__init__(**knobs)
        self.target = target

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.target.score(tree)
        return tree


def _toy(kind: type[LookaheadJacobiDrafter]) -> Build:
    def build(request: Request, *, window: int, **knobs: Any) -> Decoder:
        given = {"width": window, "ends": request.stop.eos, **knobs}
        return request.decoder(
            Twice(request.target, **given) if kind is Twice else kind(**given), verify_tree
        )

    return build


TRAPS = [
    Trap(DIAGONALS, drafts_its_diagonals, card("lookahead_jacobi")),
    Trap(ONE, shares_one_call, card("lookahead_jacobi")),
    Trap(AHEAD, looks_ahead, card("lookahead_jacobi")),
]
TOYS = [
    Toy("Jacobi iteration alone", DIAGONALS, _toy(Jacobi)),
    Toy("n-grams of the text alone", AHEAD, _toy(OfTheText)),
    Toy("a call for each branch", ONE, _toy(Twice)),
]
