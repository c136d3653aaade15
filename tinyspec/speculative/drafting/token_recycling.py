"""Token Recycling: draft from the candidates that the target ranked highest in earlier passes.

Paper: Luo et al., ACL 2025, arXiv 2408.08696. Nothing is trained.

Idea. Every forward pass gives a distribution for every node of the tree it verified, and all but
one path is usually thrown away. Here an adjacency matrix keeps, for each token, the k candidates
that the target last ranked highest after it. After each pass the candidates of *all* nodes are
written into it, those of rejected nodes too. The next draft is read off the matrix, breadth first
from the newest token, along a static tree of ranks. The tree is imbalanced, because the first
candidate of a first candidate is worth more than the eighth of an eighth.

    M[t]      = the k most likely tokens after t, in the last pass in which t was scored    [V, k]
    draft(v)  = M[draft(parent of v)][rank of v]

The static tree is the authors' of 80 nodes (`AUTHORS_TREE`). If a token stands at several nodes of
one pass, the last one written counts; the positions of the accepted text are written last.

Guarantee: EXACT. A candidate is a point mass, so verification is exact at any temperature, whatever
the matrix holds.
Pitfall: updating the matrix from the accepted path only.
State: the matrix outlives the request (`persistent`), one per model and k, while the model lives.
In a batch, where requests run side by side, each has its own.
Tests: tests/speculative/test_token_recycling.py (`draft_from_matrix` and `update_matrix` against
the code that runs; the matrix holds the candidates last seen, those of rejected nodes too; a second
request is faster than the first; the tree is the best of its size; the rows of a prompt).
Additions of ours: with `tree` "ranks" the tree has the `nodes` paths of ranks with the greatest
products of `RANK_CHANCES`. With `learn_prompt` the matrix also learns the rows of the prompt. That
takes a product with the output matrix for every token of the prompt. The authors' code reads the
prompt and drops its logits, so its matrix learns from the first round on; so does ours by default.
Left out: a token never scored has no candidates here; the paper's zeros propose id 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.speculative.treedraft import StaticTree, build_static_tree
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, TokenTree

NO_CANDIDATE = -1  # in the matrix: no candidate of this rank is known
RANK_CHANCES = (0.28, 0.11, 0.03, 0.025, 0.02, 0.015, 0.012, 0.01)
"""Chance of a candidate by its rank; further ranks share the last. They shape our static tree and
never change the output."""
AUTHORS_TREE = (
    "8",
    "84321111",
    "832111112100100101100",
    "5211100010010000001001100",
    "311001000010100",
    "20010000",
)
"""The authors' static tree, template 2.2.2 of their code: how many children each node has, by
depth. A node with n children has those of rank 0 to n - 1. There are 80 nodes, up to depth 6."""
PROMPT_CHUNK = 64  # tokens of a prompt whose rows are computed in one pass


def draft_from_matrix(matrix: Any, newest: int, tree: StaticTree) -> list[int]:
    """Return the draft token of every node of the static tree.

    matrix  [V, k] candidates after each token, the most likely first

    The drafter does the same, and leaves out what it does not know or what is too deep.

    >>> draft_from_matrix([[1, 2], [2, 0], [0, 1]], 0, ((ROOT, 0), (ROOT, 1), (0, 0)))
    [1, 2, 2]
    """
    draft: list[int] = []
    for parent, rank in tree:
        above = newest if parent == ROOT else draft[parent]
        draft.append(int(matrix[above][rank]))
    return draft


def update_matrix(matrix: Any, tokens: Sequence[int], logits: Any) -> None:
    """Write the k most likely tokens after each of these tokens into the matrix, in place.

    tokens  [n] the newest token and every node that was scored; a later one overwrites an earlier
    logits  [n, V]
    """
    for token, row in zip(tokens, logits, strict=True):
        matrix[token] = sorted(range(len(row)), key=lambda x: (-row[x], x))[: len(matrix[token])]


def build_rank_tree(nodes: int, depth: int, k: int) -> StaticTree:
    """Return the best tree of `nodes` nodes if the candidates of every depth have RANK_CHANCES.

    >>> build_rank_tree(5, 2, 3)
    ((-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0))
    """
    last = RANK_CHANCES[-1:] * (k - len(RANK_CHANCES))
    return build_static_tree(nodes, ((*RANK_CHANCES[:k], *last),) * depth)


@cache
def read_static_tree(levels: Sequence[str]) -> StaticTree:
    """Return the tree in which each node has as many children as its digit says, by depth.

    >>> read_static_tree(("2", "10"))
    ((-1, 0), (-1, 1), (0, 0))
    """
    shape: list[tuple[int, int]] = []
    above = [ROOT]
    for digits in levels:
        first = len(shape)
        for parent, n in zip(above, map(int, digits), strict=True):
            shape += [(parent, rank) for rank in range(n)]
        above = list(range(first, len(shape)))
    return tuple(shape)


class AdjacencyMatrix:
    """The k candidates after each token, the most likely first.

    rows  [V, k] int32, made when V is known
    """

    def __init__(self, k: int):
        self.k = k
        self.rows = np.full((0, k), NO_CANDIDATE, np.int32)

    def learn(self, tokens: Sequence[int], found: Sequence[Sequence[int]], vocabulary: int) -> None:
        """Write the candidates found after these tokens; a token written twice keeps the last."""
        if len(self.rows) < vocabulary:
            self.rows = np.full((vocabulary, self.k), NO_CANDIDATE, np.int32)
        for token, row in zip(tokens, found, strict=True):
            self.rows[token, : len(row)] = row

    @property
    def bytes(self) -> int:
        """Return its size in memory."""
        return self.rows.nbytes

    def candidates_of(self, token: int) -> list[int]:
        """Return the candidates after a token; NO_CANDIDATE if none is known."""
        row: list[int] = self.rows[token].tolist() if token < len(self.rows) else []
        return row


class TokenRecyclingDrafter(BaseDrafter):
    """Read the draft off the matrix, and write the candidates of every pass back into it.

    nodes, depth  size of our static tree
    ends          tokens that end a text
    tree          "ranks": our static tree; "paper": the authors'
    """

    def __init__(
        self,
        matrix: AdjacencyMatrix,
        nodes: int,
        depth: int,
        ends: frozenset[int],
        tree: str = "ranks",
    ):
        self.matrix, self.ends = matrix, ends
        self.shape = build_rank_tree(nodes, depth, matrix.k)
        if tree == "paper":
            self.shape = read_static_tree(AUTHORS_TREE)
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
        # place in the static tree -> (node of the draft, its depth, candidates after it)
        below = {ROOT: (ROOT, 0, self.matrix.candidates_of(self.newest))}
        for place, (up, rank) in enumerate(self.shape):
            parent, level, known = below.get(up, (ROOT, max_draft_depth, []))
            token = known[rank] if rank < len(known) and level < max_draft_depth else NO_CANDIDATE
            if token == NO_CANDIDATE:
                continue
            ended = token in self.ends  # nothing follows the end of a text
            below[place] = (
                len(tokens),
                level + 1,
                [] if ended else self.matrix.candidates_of(token),
            )
            tokens.append(token)
            parents.append(parent)
        return TokenTree.point_masses(tokens, parents)

    def observe(self, round: Round) -> None:
        n, text = len(round.tree.tokens), set(round.verdict.accepted)
        found = top_k_rows(round.scores.logits, range(n + 1), self.matrix.k)
        rejected = [node for node in range(n) if node not in text]
        order = [*rejected, ROOT, *round.verdict.accepted]  # the text's own positions come last
        tokens = [self.newest if node == ROOT else round.tree.tokens[node] for node in order]
        self.matrix.learn(tokens, [found[node + 1] for node in order], len(round.scores.logits[0]))


class PromptLearner:
    """A target that also computes the rows of the prompt, and writes them into a matrix.

    text  the committed tokens
    """

    def __init__(self, target: Any, matrix: AdjacencyMatrix):
        self.target, self.matrix = target, matrix
        self.text: list[int] = []
        self.tree = TokenTree()  # the last one scored

    @property
    def model(self) -> Any:
        """Return the target's model."""
        return self.target.model

    @property
    def cache_exact(self) -> bool:
        """Return whether the keys and values are those of a fresh pass."""
        return bool(self.target.cache_exact)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Commit forced tokens, and learn the row of each but the last."""
        left = list(tokens)
        if not self.text:
            self.append(left[:1])
            del left[:1]
        for at in range(0, len(left), PROMPT_CHUNK):
            *block, last = left[at : at + PROMPT_CHUNK]
            read = [self.text[-1], *block]
            logits = self.score(TokenTree.chain(block)).logits
            found = top_k_rows(logits, range(len(read)), self.matrix.k)
            self.matrix.learn(read, found, len(logits[0]))
            self.commit(range(len(block)), last)
        scores: Scores = self.target.extend((), hidden_layers)
        return scores

    def append(self, tokens: Sequence[int]) -> None:
        """Commit forced tokens and run nothing yet."""
        self.target.append(tokens)
        self.text += tokens

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the rows of the newest token and the tree."""
        self.tree = tree
        scores: Scores = self.target.score(tree, hidden_layers)
        return scores

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Commit the accepted path and the next token."""
        self.target.commit(path, next)
        self.text += [*self.tree.tokens_on(path), *(() if next is None else (next,))]

    def rewind(self, length: int) -> None:
        """Forget the text after `length` tokens."""
        self.target.rewind(length)
        del self.text[length:]

    def end(self) -> None:
        """End the request."""
        self.target.end()
        self.text = []


@technique(
    title="Token Recycling",
    summary="reuses earlier top-k candidates",
    paper="Luo et al. 2025, arXiv 2408.08696",
    reported="about 2x (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    persistent=True,
    knobs=(
        Knob("k", 8, "candidates kept for a token", low=1, high=1024, small=(2, 1)),
        Knob(
            "tree",
            "paper",
            "the static tree: the authors' of 80 nodes, or the best one by rank",
            choices=("paper", "ranks"),
            small=("ranks",),
            ours="ranks",
        ),
        Knob("nodes", 80, "nodes of the tree by rank", low=1, high=1024, small=(3, 1)),
        Knob("depth", 6, "depth of the tree by rank", low=1, high=64),
        Knob(
            "learn_prompt",
            False,
            "whether the rows of the prompt are learnt too; the authors' code drops them",
            choices=(True, False),
        ),
    ),
)
def token_recycling(
    request: Request, *, k: int, tree: str, nodes: int, depth: int, learn_prompt: bool
) -> Decoder:
    """Return a decoder that drafts from the matrix.

    A request that runs alone keeps the matrix for later ones.
    """
    matrix = AdjacencyMatrix(k)
    if request.clock is not None:  # the request runs alone
        matrix = per_model_state(request.target, ("token_recycling", k), lambda: matrix)
    if learn_prompt:
        request = replace(request, target=PromptLearner(request.target, matrix))
    return request.decoder(
        TokenRecyclingDrafter(matrix, nodes, depth, request.stop.eos, tree), verify_tree
    )
