"""Token Recycling: what the target nearly said is the next draft.

Luo et al., ACL 2025, arXiv 2408.08696. Every pass gives a row for every node of the tree it
verified, and all but one path is thrown away. Here nothing is: an adjacency matrix keeps, for each
token, the k candidates that the target last held for likeliest behind it. After each pass the rows
of *all* nodes are written into it, those of refused nodes too. The next draft is read off the
matrix, breadth first from the newest token: a static tree says which ranks are followed, and it is
imbalanced, since the first candidate of a first candidate is worth more than the eighth of an
eighth. One pass verifies it. Nothing is trained, and no text is searched: a matrix of V x k ids is
all there is.

The static tree here: of all paths of ranks the `nodes` with the greatest product of chances,
CHANCES falling with the rank. Where a token stands at several nodes of one pass, the last one
written wins; the rows of the text that was kept are written last, for they are the newest and the
text's own.

Guarantee: EXACT. A candidate is a point mass, so the walk is exact at any temperature, whatever the
matrix holds.
Tested in tests/speculative/test_token_recycling.py: the matrix equals the candidates last seen,
refused nodes included; a second request is faster than the first; the tree is the best of its size.
State: the matrix outlives the request (`persistent`): one a model and k, as long as the model
lives. In a batch, where requests run side by side, each keeps its own; so do the laws, and then
`end` keeps it too.
Left out: the prompt's rows. Reading a prompt here runs no head, so the matrix learns from the first
round on; and a token never scored has no candidates, where the paper's zeros propose the token of
id 0.
"""

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush

import numpy as np

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.verify import verify_tree
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, TokenTree

NO_CANDIDATE = -1  # no candidate of this rank
RANK_CHANCES = (0.28, 0.11, 0.03, 0.025, 0.02, 0.015, 0.012, 0.01)
"""Worth of a candidate by its rank; further ranks share the last. Ours: the paper fixes its own
tree. They decide what is guessed first, never what is said; `tinyspec bench` shows what a tree of
them is worth."""

StaticTree = tuple[tuple[int, int], ...]
"""The static tree: (parent's index or ROOT, rank among the parent's candidates) of every node, a
parent before its children.
"""


@cache
def build_static_tree(nodes: int, depth: int, k: int) -> StaticTree:
    """The `nodes` paths of at most `depth` ranks below k with the greatest product of chances; of
    equals the shallower.

    Best first: a child's product is at most its parent's, so what is taken next is the best of all
    that is left.

    >>> build_static_tree(5, 2, 3)
    ((-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0))
    """
    shape: list[tuple[int, int]] = []
    waiting: list[tuple[float, int, int, int]] = []  # minus the product, depth, parent, rank

    def offer(parent: int, level: int, worth: float) -> None:
        for rank in range(k if level <= depth else 0):
            heappush(
                waiting,
                (-worth * RANK_CHANCES[min(rank, len(RANK_CHANCES) - 1)], level, parent, rank),
            )

    offer(ROOT, 1, 1.0)
    while waiting and len(shape) < nodes:
        worth, level, parent, rank = heappop(waiting)
        shape.append((parent, rank))
        offer(len(shape) - 1, level + 1, -worth)
    return tuple(shape)


class AdjacencyMatrix:
    """The adjacency matrix: for each token its k candidates, likeliest first. [V, k] int32, made
    when V is known.
    """

    def __init__(self, k: int):
        self.k = k
        self.rows = np.full((0, k), NO_CANDIDATE, np.int32)

    def learn(self, tokens: Sequence[int], found: Sequence[Sequence[int]], vocabulary: int) -> None:
        """Write the candidates found behind these tokens; a token written twice keeps the last."""
        if len(self.rows) < vocabulary:
            self.rows = np.full((vocabulary, self.k), NO_CANDIDATE, np.int32)
        for token, row in zip(tokens, found, strict=True):
            self.rows[token, : len(row)] = row

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self.rows.nbytes

    def after(self, token: int) -> list[int]:
        """The candidates behind a token; NOTHING where none is known."""
        row: list[int] = self.rows[token].tolist() if token < len(self.rows) else []
        return row


class TokenRecyclingDrafter(BaseDrafter):
    """Reads the static tree off the matrix, and writes every row of every pass back."""

    def __init__(self, matrix: AdjacencyMatrix, nodes: int, depth: int, ends: frozenset[int]):
        self.matrix, self.depth, self.ends = matrix, depth, ends
        self.shape = build_static_tree(nodes, depth, matrix.k)
        self.newest = NO_CANDIDATE  # the token that the tree hangs from

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.newest = context[-1]
        tokens, parents = list[int](), list[int]()
        below = {
            ROOT: (ROOT, 0, self.matrix.after(self.newest))
        }  # place in the shape -> (node, its depth, candidates)
        for place, (up, rank) in enumerate(self.shape):
            parent, level, known = below.get(up, (ROOT, max_draft_depth, []))
            token = known[rank] if rank < len(known) and level < max_draft_depth else NO_CANDIDATE
            if token == NO_CANDIDATE:
                continue
            ended = token in self.ends  # nothing comes after the end of a text
            below[place] = (len(tokens), level + 1, [] if ended else self.matrix.after(token))
            tokens.append(token)
            parents.append(parent)
        return TokenTree(tokens, parents, (None,) * len(tokens), (False,) * len(tokens))

    def observe(self, round: Round) -> None:
        n, text = len(round.tree.tokens), set(round.verdict.accepted)
        found = top_k_rows(round.scores.logits, range(n + 1), self.matrix.k)
        refused = [node for node in range(n) if node not in text]
        order = [*refused, ROOT, *round.verdict.accepted]  # the text's own rows are written last
        tokens = [self.newest if node == ROOT else round.tree.tokens[node] for node in order]
        self.matrix.learn(tokens, [found[node + 1] for node in order], len(round.scores.logits[0]))


@technique(
    title="Token Recycling",
    summary="reuses earlier top-k candidates",
    paper="Luo et al. 2025, arXiv 2408.08696",
    family="drafting",
    guarantee=Guarantee.EXACT,
    persistent=True,
    knobs=(
        Knob("k", 8, "candidates kept for a token", low=1, small=(2, 1)),
        Knob("nodes", 80, "nodes of the static tree", low=1, high=1024, small=(3, 1)),
        Knob("depth", 6, "depth of the static tree", low=1),
    ),
)
def token_recycling(request: Request, *, k: int, nodes: int, depth: int) -> Decoder:
    """Draft from what was nearly said; a request that runs alone finds what earlier ones left."""
    alone = request.clock is not None
    matrix = (
        per_model_state(request.target, ("token_recycling", k), lambda: AdjacencyMatrix(k))
        if alone
        else AdjacencyMatrix(k)
    )
    return request.decoder(
        TokenRecyclingDrafter(matrix, nodes, depth, request.stop.eos), verify_tree
    )
