"""Lookahead decoding: Jacobi iteration, and n-grams collected from its path.

Fu et al., ICML 2024, arXiv 2402.02057 (not the trie of the same name: lookahead_trie). Guess a row
of coming tokens, replace each by what the model says there, and again: that Jacobi iteration
reaches the greedy text, but rarely faster than a token a pass. Its path, though, passes n-grams
that come true elsewhere. A window of W columns keeps the last N - 1 iterations; cell (i, j) is the
guess of iteration i for position i + j behind the newest token, made as the continuation of the
cells above it in its column. One pass runs two branches: the *lookahead* branch computes the whole
window and makes the next iteration, and each column becomes an N-gram in a pool; the *verification*
branch checks up to G n-grams of the pool that begin with the newest token. The oldest iteration is
dropped, and the window moves on by a position, however many tokens the pass commits. Nothing is
trained.

In the frame the window is probe rows: computed, shown to `observe`, never verified nor committed.
Row 0 is a chain that begins with the newest token itself, and cell (i, j) hangs from cell (i - 1,
j): so a cell sees just what the paper's mask shows it. N-grams of one pass that agree at first
share their nodes.

Guarantee: EXACT. The window takes argmaxes whatever the temperature; a pooled n-gram is point
masses, which the walk checks.
Tested in tests/speculative/test_lookahead_jacobi.py: the draft of every round equals a hand
simulation of window and pool; both branches share one call; where the text is periodic, a round
commits N tokens; more columns and longer n-grams save calls.
State: window and pool end with the request.
Left out: several devices, which share out the columns. Where the paper fills the first row at
random, here the prompt's tokens stand in turn: the same text for the same seed.
"""

from collections.abc import Sequence
from sys import getsizeof

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


class NgramPool:
    """For each first token the `most` n-grams collected last, as what follows it."""

    def __init__(self, most: int):
        self.most = most
        self.after: dict[int, list[tuple[int, ...]]] = {}  # the newest last

    @property
    def bytes(self) -> int:
        """What its n-grams take."""
        return sum(getsizeof(rest) for known in self.after.values() for rest in known)

    def add(self, gram: Sequence[int]) -> None:
        """Collect an n-gram; one that is known becomes the newest, and the oldest makes room."""
        known = self.after.setdefault(gram[0], [])
        rest = tuple(gram[1:])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self.most]


class JacobiWindow:
    """The last iterations: rows[i][j] is the guess for position i + j behind the newest token,
    which is rows[0][0].

    Of N - 1 = `depth` rows at first only one stands; each pass adds one, and the columns that the
    text overtakes meanwhile go, so the first row begins longer by as many. Once all stand, a new
    row pushes the oldest out.
    """

    def __init__(self, width: int, depth: int, text: Sequence[int]):
        self.width, self.depth = width, depth
        length = width + depth - 1
        self.rows = [[text[-1], *(text[at % len(text)] for at in range(length - 1))]]

    def columns(self, max_draft_depth: int) -> int:
        """How many columns fit where a draft may be `max_draft_depth` deep."""
        return max(min(len(self.rows[-1]), max_draft_depth - len(self.rows) + 2), 0)

    def move_on(self, row: Sequence[int]) -> list[list[int]]:
        """Enter what the model said below the newest row, for the columns that were run; returns
        the n-grams completed.
        """
        row = [*row, *self.rows[-1][len(row) :]]
        if len(self.rows) < self.depth:
            self.rows = [cells[1:] for cells in (*self.rows, row)]
            return []
        columns = [list(column) for column in zip(*self.rows, row, strict=True)]
        self.rows = [*self.rows[1:], row]
        return columns


class LookaheadJacobiDrafter(BaseDrafter):
    """Proposes the pool's n-grams, and runs the window beside them."""

    def __init__(self, width: int, n: int, guesses: int, from_prompt: bool, ends: frozenset[int]):
        self.width, self.n, self.guesses, self.from_prompt, self.ends = (
            width,
            n,
            guesses,
            from_prompt,
            ends,
        )
        self.end()

    def end(self) -> None:
        self.pool = NgramPool(self.guesses)
        self.window: JacobiWindow | None = None
        self.newest_row: list[
            int
        ] = []  # nodes of the window's newest row in the tree that is out, ROOT among them

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        for at in range(len(tokens) - self.n + 1 if self.from_prompt else 0):
            self.pool.add(tokens[at : at + self.n])

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.window is None:
            self.window = JacobiWindow(self.width, self.n - 1, context)
        self.window.rows[0][0] = context[-1]
        tokens, parents = list[int](), list[int]()
        self._verification(context[-1], max_draft_depth, tokens, parents)
        guessed = len(tokens)
        self._lookahead(self.window, max_draft_depth, tokens, parents)
        probe = [False] * guessed + [True] * (len(tokens) - guessed)
        return TokenTree(tokens, parents, (None,) * len(tokens), probe)

    def _verification(
        self, newest: int, max_draft_depth: int, tokens: list[int], parents: list[int]
    ) -> None:
        """The n-grams that begin with the newest token, the last collected first, as one tree."""
        nodes: dict[tuple[int, int], int] = {}
        for gram in reversed(self.pool.after.get(newest, [])):
            up = ROOT
            for token in gram[:max_draft_depth]:
                if (up, token) not in nodes:
                    nodes[up, token] = len(tokens)
                    tokens.append(token)
                    parents.append(up)
                up = nodes[up, token]
                if token in self.ends:
                    break  # nothing comes after the end of a text

    def _lookahead(
        self, window: JacobiWindow, max_draft_depth: int, tokens: list[int], parents: list[int]
    ) -> None:
        """The window's cells: row 0 is a chain from the newest token, every other cell hangs below
        its column's.
        """
        columns = window.columns(max_draft_depth)
        above = [ROOT] * columns
        for i, row in enumerate(window.rows if columns else ()):
            for j in range(i == 0, columns):  # cell (0, 0) is the root
                parents.append(above[j] if i else above[j - 1])
                above[j] = len(tokens)
                tokens.append(row[j])
        self.newest_row = above

    def observe(self, round: Round) -> None:
        assert self.window is not None  # a round was proposed
        if not self.newest_row:
            return
        said = top_k_rows(round.scores.logits, [node + 1 for node in self.newest_row], 1)
        for gram in self.window.move_on([token for (token,) in said])[: len(said)]:
            self.pool.add(gram)


@technique(
    title="Lookahead decoding: Jacobi iteration with a pool of n-grams",
    summary="Jacobi iterations fill an n-gram pool",
    paper="Fu et al. 2024, arXiv 2402.02057",
    family="drafting",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob("window", 15, "W: columns of the lookahead branch", low=1, small=(2, 1)),
        Knob(
            "n", 5, "N: tokens of an n-gram; the window keeps N - 1 iterations", low=2, small=(3, 2)
        ),
        Knob(
            "guesses",
            15,
            "G: n-grams kept for a first token, and verified at once",
            low=1,
            small=(2, 1),
        ),
        Knob(
            "from_prompt",
            True,
            "whether the prompt's n-grams are in the pool from the start",
            choices=(True, False),
        ),
    ),
)
def lookahead_jacobi(
    request: Request, *, window: int, n: int, guesses: int, from_prompt: bool
) -> Decoder:
    """Verify what the window once said behind the newest token, and let it say more."""
    return request.decoder(
        LookaheadJacobiDrafter(window, n, guesses, from_prompt, request.stop.eos), verify_tree
    )
