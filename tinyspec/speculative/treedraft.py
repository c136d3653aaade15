"""Draft a tree with a small model: several tokens at each position, one depth after the other.

The shape of the tree is fixed before anything is drawn. `branching_parents((4, 2, 1))` is the shape
in which the root has 4 children, each of them 2, and each of those 1. Any other list of parents is
a shape too. Then the tokens are drawn. Each declares the distribution it was drawn from, given its
earlier siblings, so that `verify_tree` can verify the whole tree.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from heapq import heappop, heappush
from typing import Any, TypeAlias

from tinyspec.decoding.decode import Target, TargetProbs
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import EXACT, SamplingParams, kernels_of, top_k_tokens
from tinyspec.decoding.verify import exclude_token
from tinyspec.errors import TinyspecError
from tinyspec.tree import ROOT, Probs, TokenTree

Shape: TypeAlias = tuple[int, ...]
"""[n] the parent of every node, ROOT for the first ones. A parent comes before its children, and
siblings come in draw order."""

StaticTree: TypeAlias = tuple[tuple[int, int], ...]
"""For every node, parents first: (index of the parent or ROOT, rank among the parent's
candidates)."""

MAX_NODES = 1024  # of a tree; a configuration with more was surely mistyped


def parse_branching(configuration: str | int) -> tuple[int, ...]:
    """Return how many children a node has at each depth.

    >>> parse_branching("4x2x1"), parse_branching(3)
    ((4, 2, 1), (3,))
    """
    words = str(configuration).lower().split("x")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise TinyspecError(
            f"the configuration {configuration!r} is no tree: say how many children a node has at "
            "each depth, as in 4x2x1"
        )
    return tuple(int(word) for word in words)


def branching_parents(children: Sequence[int]) -> Shape:
    """Return the nodes of a configuration, depth by depth.

    >>> branching_parents((2, 1))
    (-1, -1, 0, 1)
    """
    parents: list[int] = []
    above = [ROOT]
    for k in children:
        first = len(parents)
        if first + k * len(above) > MAX_NODES:
            configuration = "x".join(map(str, children))
            raise TinyspecError(
                f"the tree {configuration} has more than {MAX_NODES} nodes: use fewer children at "
                "a node, or less depth"
            )
        parents += [node for node in above for _ in range(k)]
        above = list(range(first, len(parents)))
    return tuple(parents)


@cache
def build_static_tree(nodes: int, chances: tuple[tuple[float, ...], ...]) -> StaticTree:
    """Return the paths of ranks with the greatest products of chances; of equals the shallower.

    nodes    how many paths, at most
    chances  for each depth, the chance of a candidate by its rank, in falling order; a candidate
             without a chance is in no tree

    Best-first search is optimal: a child's product is at most its parent's.

    >>> build_static_tree(5, ((0.3, 0.1, 0.0), (0.3, 0.1, 0.0)))
    ((-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0))
    """
    tree: list[tuple[int, int]] = []
    waiting: list[tuple[float, int, int, int]] = []  # minus the product, depth, parent, rank

    def add_children(parent: int, depth: int, worth: float) -> None:
        for rank, chance in enumerate(chances[depth] if depth < len(chances) else ()):
            if chance > 0:
                heappush(waiting, (-worth * chance, depth, parent, rank))

    add_children(ROOT, 0, 1.0)
    while waiting and len(tree) < nodes:
        worth, depth, parent, rank = heappop(waiting)
        tree.append((parent, rank))
        add_children(len(tree) - 1, depth + 1, -worth)
    return tuple(tree)


def rank_widths(tree: StaticTree) -> list[int]:
    """Return how many candidates of each depth a tree of ranks uses.

    >>> rank_widths(((-1, 0), (-1, 1), (0, 0)))
    [2, 1]
    """
    depths, widths = {ROOT: 0}, list[int]()
    for place, (parent, rank) in enumerate(tree):
        depth = depths[parent]
        widths += [0] * (depth + 1 - len(widths))
        widths[depth] = max(widths[depth], rank + 1)
        depths[place] = depth + 1
    return widths


def fill_static_tree(
    tree: StaticTree,
    rows: Sequence[Any],
    widths: Sequence[int],
    context: Sequence[int],
    sampling: SamplingParams,
    ends: frozenset[int],
) -> tuple[list[int], list[int], dict[int, int]]:
    """Return the tokens and parents of a draft along a tree of ranks, and the node of each place.

    rows    logits [V] of each depth: its candidates are the same below every node
    widths  how many candidates of each depth are ranked
    ends    tokens that nothing follows

    With a repetition penalty the candidates depend on the path to a node. A place below the last
    row, or of a rank that the vocabulary does not have, gets no node.
    """
    ranked = dict[int, list[int]]()  # candidates of each depth; with a penalty, of the last parent
    tokens, parents, node_of = list[int](), list[int](), dict[int, int]()
    below = {ROOT: (ROOT, 0, list[int]())}  # place -> node, depth, its path
    last = None
    for place, (up, rank) in enumerate(tree):
        if up not in below or below[up][1] >= len(rows):
            continue
        parent, depth, path = below[up]
        if depth not in ranked or (sampling.repetition_penalty != 1.0 and last != parent):
            history = [*context, *path]
            ranked[depth] = rank_tokens(sampling, rows[depth], history, widths[depth])
        last = parent
        if rank >= len(ranked[depth]):
            continue
        token, node_of[place] = ranked[depth][rank], len(tokens)
        if token not in ends:
            below[place] = (len(tokens), depth + 1, [*path, token])
        tokens.append(token)
        parents.append(parent)
    return tokens, parents, node_of


class TreeDrafter(ModelDrafter):
    """Draw a tree of a given shape from a model, with one forward pass for each depth.

    ends       tokens that nothing follows
    positions  tokens that the model's context holds (None: no limit), as in `ModelDrafter`
    replace    whether siblings are drawn independently of each other; else no two of them are equal
    cover      whether siblings without replacement go on after the draft's distribution has no
               token left: the others are then drawn uniformly from all that were not drawn

    At temperature 0 all draws would be the same token. So the most likely tokens are proposed, the
    best first, as point masses. The model runs only nodes that have children in the shape. Siblings
    with equal tokens are run once.
    """

    def __init__(
        self,
        model: Target,
        shape: Shape,
        ends: frozenset[int] = frozenset(),
        positions: int | None = None,
        *,
        replace: bool = True,
        cover: bool = False,
    ):
        super().__init__(model, 0, ends, positions)
        self.replace, self.cover = replace, cover
        self.reshape(shape)

    def reshape(self, shape: Shape) -> None:
        """Draw trees of this shape from now on."""
        below: dict[int, list[int]] = defaultdict(list)
        depth = {ROOT: 0}
        for node, parent in enumerate(shape):
            below[parent].append(node)
            depth[node] = depth[parent] + 1
        self.shape, self.gamma = shape, max(depth.values())
        self.below = dict(below)  # node -> its children
        self.levels = [list[int]() for _ in range(self.gamma)]  # nodes with children, by depth
        for node in below:
            self.levels[depth[node]].append(node)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, parents, rows = list[int](), list[int](), list[Probs | None]()
        inner = TokenTree([], [], [], [])  # what the model runs: the nodes that have children
        at, ran = {ROOT: ROOT}, {ROOT: ROOT}  # node of the shape -> node of the draft, and of inner
        deepest = max_draft_depth
        if self.positions is not None:
            deepest = min(deepest, self.positions - self.length)
        for level in self.levels[: 0 if self.left_behind else max(deepest, 0)]:
            alive = [node for node in level if node in ran]
            if not alive:
                break  # on every path the text has ended, or no token is left to draw
            probs = TargetProbs(self.model.score(inner), sampling, context, inner)
            for node in alive:
                drawn = self.draw_children(probs, ran[node], len(self.below[node]), rng)
                # Fewer tokens than children are drawn if the distribution has no more.
                for child, (token, q) in zip(self.below[node], drawn, strict=False):
                    at[child] = len(tokens)
                    tokens.append(token)
                    parents.append(at[node])
                    rows.append(q)
                    if child in self.below and token not in self.ends:
                        ran[child] = append_node(inner, token, ran[node])
        return TokenTree(tokens, parents, rows, (False,) * len(tokens))

    def draw_children(
        self, probs: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Probs | None]]:
        """Return at most k tokens after a node, in draw order, each with its distribution.

        The distribution of the first one is `probs[node]`.
        """
        if probs.sampling.temperature == 0:
            return [(token, None) for token in top_k_tokens(probs.ranking_scores(node), k)]
        q = probs[node]
        if self.replace:
            return [(rng.draw(q), q) for _ in range(k)]
        drawn = sample_siblings(q, k, rng)
        if self.cover and len(drawn) < min(k, len(q)):
            drawn += sample_siblings(
                uniform_over_unsampled(q, [token for token, _ in drawn]), k - len(drawn), rng
            )
        return drawn


def sample_siblings(q: Probs, k: int, rng: RandomSource) -> list[tuple[int, Probs | None]]:
    """Draw k tokens without replacement; fewer if q has fewer.

    Each comes with its distribution: q without its earlier siblings.
    """
    drawn: list[tuple[int, Probs | None]] = []
    for token in rng.sample_without_replacement(q, k):
        if drawn:
            q = exclude_token(q, drawn[-1][0])
        drawn.append((token, q))
    return drawn


def uniform_over_unsampled(q: Probs, seen: Sequence[int]) -> Probs:
    """Return the uniform distribution over all tokens but `seen`."""
    kernels = kernels_of(q)
    if kernels is EXACT:
        each = Fraction(1, len(q) - len(seen))
        return [0 * each if token in seen else each for token in range(len(q))]
    row = kernels.as_vector(q) * 0 + 1 / (len(q) - len(seen))
    row[list(seen)] = 0
    return row


def append_node(tree: TokenTree, token: int, parent: int, q: Probs | None = None) -> int:
    """Append a node to a tree whose columns are lists, and return its number."""
    for column, entry in zip(tree, (token, parent, q, False), strict=True):
        column.append(entry)  # type: ignore[attr-defined]
    return len(tree.tokens) - 1
