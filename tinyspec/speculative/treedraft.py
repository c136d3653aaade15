"""A small model as the drafter of a tree: several tokens side by side at every node, grown depth by
depth.

`shape` says which nodes there are before anything is drawn: `widths("4x2x1")` for a configuration
(every node of a depth has as many children), `shape((4, 2, 1))` for its nodes; any other list of
parents is a tree too. The tokens are then drawn, and each declares the law it was drawn from given
its earlier siblings, so that one walk judges them all.
"""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

from tinyspec.decoding.decode import Target, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import EXACT, SamplingParams, kernels_of, top_k_tokens
from tinyspec.decoding.verify import exclude_token
from tinyspec.errors import TinyspecError
from tinyspec.tree import ROOT, Probs, TokenTree

Shape: TypeAlias = tuple[int, ...]
"""[n] the parent of every node, ROOT for the first ones: a parent before its children, siblings in
the order of drawing.
"""

MOST = 1024  # nodes of a tree: beyond, a configuration was surely mistyped


def parse_branching(configuration: str | int) -> tuple[int, ...]:
    """The children of a node at each depth.

    >>> parse_branching("4x2x1"), parse_branching(3)
    ((4, 2, 1), (3,))
    """
    words = str(configuration).lower().split("x")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise TinyspecError(
            f"the configuration {configuration!r} is no tree: say how many children a node has at each depth, as in 4x2x1"
        )
    return tuple(int(word) for word in words)


def branching_parents(children: Sequence[int]) -> Shape:
    """The nodes of a configuration, depth by depth.

    >>> branching_parents((2, 1))
    (-1, -1, 0, 1)
    """
    parents: list[int] = []
    above = [ROOT]
    for k in children:
        begun = len(parents)
        if begun + k * len(above) > MOST:
            said = "x".join(map(str, children))
            raise TinyspecError(
                f"the tree {said} has more than {MOST} nodes: use fewer children at a node, or less depth"
            )
        parents += [node for node in above for _ in range(k)]
        above = list(range(begun, len(parents)))
    return tuple(parents)


class TreeDrafter(ModelDrafter):
    """Draws a tree of this shape from a model, with one call of the model a depth.

    replace  siblings are drawn independently of each other; else no two of them are equal
    cover    without replacement: where the draft's law has no token left, go on with any that was
             not drawn, all alike
    ends     tokens that nothing comes after
    positions  the tokens that the model's context holds (None: no limit), as in `ModelDrafter`

    At temperature 0 the draft's law is one token, so draws would all be the same: the likeliest
    tokens are proposed in their place, the best first, as point masses. `children` is what another
    way of drawing overrides. A node without children in the shape is never run; one whose token is
    drawn twice is run once.
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
        """From now on, trees of this shape."""
        below: dict[int, list[int]] = defaultdict(list)
        depth = {ROOT: 0}
        for node, parent in enumerate(shape):
            below[parent].append(node)
            depth[node] = depth[parent] + 1
        self.shape, self.below, self.gamma = (
            shape,
            dict(below),
            max(depth.values()),
        )  # below: node -> its children
        self.levels: list[list[int]] = [
            [] for _ in range(self.gamma)
        ]  # nodes with children, by depth
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
        inner = TokenTree(
            [], [], [], []
        )  # the part that the model runs: nodes that will have children
        at, ran = (
            {ROOT: ROOT},
            {ROOT: ROOT},
        )  # node of the shape -> its place in the tree, and in the part that is run
        deepest = min(
            max_draft_depth,
            len(self.levels),
            max_draft_depth if self.positions is None else self.positions - self.length,
        )
        for level in self.levels[: 0 if self.left_behind else max(deepest, 0)]:
            alive = [node for node in level if node in ran]
            if not alive:
                break  # the text ended, or the law did, on every path
            laws = TargetProbs(self.model.score(inner), sampling, context, inner)
            for node in alive:
                drawn = self.children(laws, ran[node], len(self.below[node]), rng)
                for child, (token, law) in zip(
                    self.below[node], drawn, strict=False
                ):  # fewer where the support ends
                    at[child] = len(tokens)
                    tokens.append(token)
                    parents.append(at[node])
                    rows.append(law)
                    if child in self.below and token not in self.ends:
                        ran[child] = len(inner.tokens)
                        _grow(inner, token, ran[node])
        return TokenTree(tokens, parents, rows, (False,) * len(tokens))

    def children(
        self, laws: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Probs | None]]:
        """At most k tokens below a node whose distribution is `laws[node]`, each with the law it
        was drawn from; in draw order.
        """
        if laws.sampling.temperature == 0:
            return [(token, None) for token in top_k_tokens(laws.ranking_scores(node), k)]
        q = laws[node]
        if self.replace:
            return [(rng.draw(q), q) for _ in range(k)]
        drawn = sample_siblings(q, k, rng)
        if self.cover and len(drawn) < min(k, len(q)):
            drawn += sample_siblings(
                uniform_over_unsampled(q, [token for token, _ in drawn]), k - len(drawn), rng
            )
        return drawn


def sample_siblings(q: Probs, k: int, rng: RandomSource) -> list[tuple[int, Probs | None]]:
    """k tokens drawn without replacement, each with q as its earlier siblings leave it; fewer where
    the support ends.
    """
    drawn: list[tuple[int, Probs | None]] = []
    for token in rng.sample_without_replacement(q, k):
        if drawn:
            q = exclude_token(q, drawn[-1][0])
        drawn.append((token, q))
    return drawn


def uniform_over_unsampled(q: Probs, seen: Sequence[int]) -> Probs:
    """All tokens but these, each as likely as the other."""
    kernels = kernels_of(q)
    if kernels is EXACT:
        each = Fraction(1, len(q) - len(seen))
        return [0 * each if token in seen else each for token in range(len(q))]
    row = kernels.as_vector(q) * 0 + 1 / (len(q) - len(seen))
    row[list(seen)] = 0
    return row


def _grow(tree: TokenTree, token: int, parent: int) -> None:
    """One node more, in the lists of a tree that is being made."""
    for column, entry in zip(tree, (token, parent, None, False), strict=True):
        column.append(entry)  # type: ignore[attr-defined]
