"""Lookahead decoding: collect n-grams from Jacobi iterations, and verify them as drafts.

Paper: Fu et al., ICML 2024, arXiv 2402.02057 (not the trie of the same name: lookahead_trie).
Nothing is trained.

Idea. Jacobi iteration fills the coming positions with arbitrary tokens, replaces each by the
model's argmax there, and repeats. It reaches the greedy text, but rarely faster than one token per
pass. But its iterations contain n-grams that later occur in the text. A window of W columns keeps
the last N - 1 iterations. Cell (i, j) is iteration i's token for position i + j after the newest
token; it was predicted after the cells above it in its column.

    new row: c(N-1, j) = argmax of p(. | text, c(0, 1), ..., c(0, j), c(1, j), ..., c(N-2, j))
    n-gram:  (c(0, j), c(1, j), ..., c(N-1, j)), for every column j

One forward pass runs two branches. The *lookahead* branch computes the window and makes the next
iteration, and each column becomes an n-gram in a pool. The *verification* branch checks up to G
n-grams of the pool that begin with the newest token. The oldest iteration is dropped, and the
window moves on by one position, however many tokens the pass commits.

In the decoding loop, the window is made of probes: computed, shown to `observe`, never verified nor
committed. Row 0 is a chain that begins with the newest token, and cell (i, j) is a child of cell
(i - 1, j), so that a cell attends to just what the paper's mask shows it. N-grams of one pass that
begin alike share their nodes.

Guarantee: EXACT. The window takes the argmax at every temperature; the tokens of an n-gram are
point masses.
Pitfall: Jacobi iteration alone, or n-grams of the text alone; both are other methods.
State: window and pool end with the request.
Tests: tests/speculative/test_lookahead_jacobi.py (`advance_window` is the code that runs; the draft
of every round equals a simulation of window and pool by hand; both branches share one pass; if the
text is periodic, a round commits N tokens; more columns and longer n-grams save passes).
Left out: several devices, which share out the columns. The paper fills the first row at random;
here the prompt's tokens fill it in turn, so that a seed always gives the same text. In the authors'
code the pool also gets n-grams of the text that is written, if it gets those of the prompt (an
option there, the default here); and nothing is verified before the window is full. W, N and G are,
from memory, those that the paper names for 7B models; the code's examples have 20, 7 and 20.
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


def advance_window(
    rows: Sequence[Sequence[int]], row: Sequence[int], depth: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Enter a new iteration; return the next window and the n-grams that were completed.

    rows   the window, oldest iteration first; all N - 1 rows have W cells, except while it fills
    row    [W] the model's argmax after each column
    depth  N - 1: the iterations that are kept

    While the window has fewer than N - 1 rows, no row is dropped. Instead every row loses its first
    cell, because the text has reached that position. There are no n-grams yet.

    >>> advance_window([[4, 5], [2, 3]], [6, 7], depth=2)
    ([[2, 3], [6, 7]], [[4, 2, 6], [5, 3, 7]])
    """
    window = [list(cells) for cells in (*rows, row)]
    if len(rows) < depth:
        return [cells[1:] for cells in window], []
    return window[1:], [list(column) for column in zip(*window, strict=True)]


class NgramPool:
    """The n-grams collected last, by their first token.

    most   n-grams kept for a first token
    after  first token -> what follows it in each of its n-grams, the newest last
    """

    def __init__(self, most: int):
        self.most = most
        self.after: dict[int, list[tuple[int, ...]]] = {}

    @property
    def bytes(self) -> int:
        """Return the size of its n-grams in memory."""
        return sum(getsizeof(rest) for known in self.after.values() for rest in known)

    def add(self, gram: Sequence[int]) -> None:
        """Collect an n-gram; a known one becomes the newest, and the oldest one is dropped."""
        known = self.after.setdefault(gram[0], [])
        rest = tuple(gram[1:])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self.most]


class JacobiWindow:
    """The last N - 1 = `depth` Jacobi iterations.

    rows  rows[i][j] is the token for position i + j after the newest token, which is rows[0][0]

    At first there is one row, of W + N - 2 cells. Each pass adds a row, and every row loses its
    first cell, because the text has reached that position. So N - 1 rows have W cells each. From
    then on a new row replaces the oldest one.
    """

    def __init__(self, width: int, depth: int, text: Sequence[int]):
        self.width, self.depth = width, depth
        length = width + depth - 1
        self.rows = [[text[-1], *(text[at % len(text)] for at in range(length - 1))]]

    def count_columns(self, max_draft_depth: int) -> int:
        """Return how many columns fit if a draft may be `max_draft_depth` deep."""
        return max(min(len(self.rows[-1]), max_draft_depth - len(self.rows) + 2), 0)

    def advance(self, row: Sequence[int]) -> list[list[int]]:
        """Enter the model's tokens for the columns that were run; return the n-grams completed.

        Columns that did not fit keep their newest token.
        """
        row = [*row, *self.rows[-1][len(row) :]]
        self.rows, ngrams = advance_window(self.rows, row, self.depth)
        return ngrams


class LookaheadJacobiDrafter(BaseDrafter):
    """Propose the pool's n-grams, and run the window beside them."""

    def __init__(self, width: int, n: int, guesses: int, from_prompt: bool, ends: frozenset[int]):
        self.width, self.n, self.guesses = width, n, guesses
        self.from_prompt, self.ends = from_prompt, ends
        self.end()

    def end(self) -> None:
        self.pool = NgramPool(self.guesses)
        self.window: JacobiWindow | None = None
        self.newest_row: list[int] = []  # nodes of the window's newest row, ROOT among them

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
        self._add_ngrams(context[-1], max_draft_depth, tokens, parents)
        drafted = len(tokens)
        self._add_window(self.window, max_draft_depth, tokens, parents)
        probe = [False] * drafted + [True] * (len(tokens) - drafted)
        return TokenTree(tokens, parents, (None,) * len(tokens), probe)

    def _add_ngrams(
        self, newest: int, max_draft_depth: int, tokens: list[int], parents: list[int]
    ) -> None:
        """Add the verification branch: n-grams that begin with the newest token, newest first."""
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
                    break  # nothing follows the end of a text

    def _add_window(
        self, window: JacobiWindow, max_draft_depth: int, tokens: list[int], parents: list[int]
    ) -> None:
        """Add the lookahead branch: row 0 as a chain, every other cell below the one above it."""
        columns = window.count_columns(max_draft_depth)
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
        best = top_k_rows(round.scores.logits, [node + 1 for node in self.newest_row], 1)
        for ngram in self.window.advance([token for (token,) in best])[: len(best)]:
            self.pool.add(ngram)


@technique(
    title="Lookahead decoding: Jacobi iteration with a pool of n-grams",
    summary="Jacobi iterations fill an n-gram pool",
    paper="Fu et al. 2024, arXiv 2402.02057",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    knobs=(
        Knob("window", 15, "W: columns of the lookahead branch", low=1, high=256, small=(2, 1)),
        Knob(
            "n",
            5,
            "N: tokens of an n-gram; the window keeps N - 1 iterations",
            low=2,
            high=32,
            small=(3, 2),
        ),
        Knob(
            "guesses",
            15,
            "G: n-grams kept for a first token, and verified at once",
            low=1,
            high=256,
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
    """Return a decoder that verifies n-grams of the pool beside running the window."""
    return request.decoder(
        LookaheadJacobiDrafter(window, n, guesses, from_prompt, request.stop.eos), verify_tree
    )
