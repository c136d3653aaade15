"""The draft trees that a verifier of the library's form is tried on: shapes, and how nodes come.

A shape says for each node where it hangs and where its token comes from. So one case has drawn
siblings beside point masses and probes, three and four siblings, and chains of four and more.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tinyspec.decoding.sampling import UNCHANGED, SamplingParams
from tinyspec.laws.checking.cases import (
    DEEP_DRAFTS,
    MOST_GAMMA,
    MOST_VOCABULARY,
    PRIMES,
    CheckCase,
    SmallModel,
    draw_near_pairs,
    draw_row,
    draw_row_pair,
    make_round_case,
    texts_up_to,
)
from tinyspec.laws.exact.joint import apply_warpers
from tinyspec.laws.exact.rational import without_token
from tinyspec.tree import ROOT, TokenTree

DRAWN, LEFT, HIDDEN = "drawn", "drawn without replacement", "drawn, not declared"
POINT, PROBE = "a point mass", "a probe"
FOLLOWS = "a point mass that follows its sibling"

OF_TOKEN = (POINT, FOLLOWS, PROBE)
"""The ways in which a node has a token that is not drawn."""

TREE_KINDS = {
    "chain": "a chain drawn from q, its distributions declared",
    "point masses": "a chain without distributions: each token is judged as a point mass",
    "siblings": "siblings drawn from q, independently",
    "without replacement": "siblings drawn from q without replacement",
    "mixed": "drawn siblings, point masses and probes side by side",
}
"""The kinds of trees, and what each is in words."""

MOST_NODES, MOST_SIBLINGS = 6, 4
"""How large a random tree may be."""

TREE_SAMPLINGS = (
    UNCHANGED,
    SamplingParams(0.5),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.37),
    SamplingParams(0.5, top_k=3, top_p=0.83),
    SamplingParams(0.0),
)
"""Sampling settings of the target. No threshold is met exactly by a prime denominator."""

PENALTIES = (SamplingParams(repetition_penalty=1.5), SamplingParams(0.0, repetition_penalty=1.5))
"""Settings that act on logits, and so have no exact form in Fractions."""


class ShapeNode(NamedTuple):
    """A node of a shape: its parent, and where its token comes from.

    token  of a point mass and of a probe; of one that follows its sibling, how far it is from it
    """

    parent: int
    how: str
    token: int = 0


Shape = tuple[ShapeNode, ...]


@dataclass(frozen=True)
class ShapedCase(CheckCase):
    """A case of one round with the shape of its tree, and the target's sampling settings.

    p is the target before the settings; `target` is what they make of it.
    """

    shape: Shape = ()
    sampling: SamplingParams = UNCHANGED

    @cached_property
    def target(self) -> SmallModel:
        """Return the model whose distribution the output must have."""
        if self.sampling == UNCHANGED:
            return self.p
        rows: Any = (apply_warpers(row, (), self.sampling) for row in self.p.probs)
        if self.sampling.repetition_penalty != 1:  # acts on logits, and differs from text to text
            with np.errstate(divide="ignore"):
                rows = [
                    apply_warpers(
                        np.log(np.array(self.p.next_probs(text), float)),
                        (*self.context, *text),
                        self.sampling,
                    )
                    for text in texts_up_to(self.vocabulary, self.gamma)
                ]
            return SmallModel(tuple(tuple(row) for row in rows), "text")
        return replace(self.p, probs=tuple(tuple(row) for row in rows))

    def smaller_cases(self) -> Iterator[CheckCase]:
        """Yield the case without its sampling settings, and without one of its leaves."""
        if self.sampling != UNCHANGED:
            yield replace(self, sampling=UNCHANGED)
        parents = {node.parent for node in self.shape}
        for leaf in range(len(self.shape)):
            if leaf not in parents and len(self.shape) > 1:
                rest = [node for number, node in enumerate(self.shape) if number != leaf]
                shape = tuple(x._replace(parent=x.parent - (x.parent > leaf)) for x in rest)
                depth = max(shape_depths(shape))
                yield replace(self, shape=shape, gamma=depth, tokens=depth + 1)


def plain_shape(kind: str, depth: int) -> Shape:
    """Return the simplest shape of a kind: a chain, or two siblings, each with a child if deep."""
    if kind in ("chain", "point masses"):
        how = DRAWN if kind == "chain" else HIDDEN
        return tuple(ShapeNode(node - 1, how) for node in range(depth))
    if kind == "mixed":
        first = (ShapeNode(ROOT, DRAWN), ShapeNode(ROOT, POINT, 1))
    else:
        first = (ShapeNode(ROOT, DRAWN if kind == "siblings" else LEFT),) * 2
    below = (ShapeNode(0, DRAWN), ShapeNode(1, DRAWN)) if depth > 1 else ()
    return (*first, *below)


def draw_shape_tokens(case: CheckCase, shape: Shape, rng: Any) -> TokenTree:
    """Return a tree of this shape whose tokens are drawn from q; rows in Fractions.

    A sibling is missing, and all below it, where nothing is left to be drawn without replacement.
    """
    tokens, parents, probs, probes = list[int](), list[int](), list[Any](), list[bool]()
    tree = TokenTree(tokens, parents, probs, probes)
    numbers: dict[int, int] = {ROOT: ROOT}  # nodes of the tree, by their numbers in the shape
    left: dict[int, Any] = {}  # what can still be drawn below a node
    for number, (shape_parent, how, token) in enumerate(shape):
        if shape_parent not in numbers:
            continue
        parent = numbers[shape_parent]
        row: Any = None
        if how in (DRAWN, LEFT, HIDDEN):
            row = case.q.next_probs(tree.tokens_on(tree.path(parent)))
            row = left.get(parent, row) if how == LEFT else row
            if row is None:
                continue
            token = rng.draw(row)
            if how == LEFT:
                left[parent] = without_token(row, token)
        if how == FOLLOWS:
            siblings = [x for x, above in zip(tokens, parents, strict=True) if above == parent]
            token += siblings[-1] if siblings else 0
        numbers[number] = len(tokens)
        tokens.append(token % case.vocabulary)
        parents.append(parent)
        probs.append(None if how == HIDDEN else row)
        probes.append(how == PROBE)
    return tree


def describe_shape(shape: Shape) -> str:
    """Return a shape in words: the parent of each node, and where its token comes from.

    >>> describe_shape(plain_shape("mixed", 1))
    'parents [-1, -1]; node 0 drawn, node 1 a point mass (token 1)'
    """
    if not shape:
        return "no draft"
    nodes = [
        f"node {number} {how}" + (f" ({_describe_token(how, token)})" if how in OF_TOKEN else "")
        for number, (_, how, token) in enumerate(shape)
    ]
    return f"parents {[node.parent for node in shape]}; {', '.join(nodes)}"


def _describe_token(how: str, token: int) -> str:
    return f"the sibling's token + {token}" if how == FOLLOWS else f"token {token}"


def shape_depths(shape: Shape) -> list[int]:
    """Return the depth of each node; a child of the root has depth 1."""
    depths: list[int] = []
    for node in shape:
        depths.append(1 if node.parent == ROOT else depths[node.parent] + 1)
    return depths


def most_siblings(shape: Shape) -> int:
    """Return the largest number of children of one node."""
    parents = [node.parent for node in shape]
    return max((parents.count(parent) for parent in parents), default=0)


def _parse_shape(words: str) -> Shape:
    """Return the shape of a line such as "-D -P1 0D": parent, kind, and token of each node.

    D is drawn, L drawn without replacement, P a point mass, F one that follows its sibling, X a
    probe.
    """
    hows = {"D": DRAWN, "L": LEFT, "P": POINT, "F": FOLLOWS, "X": PROBE}
    nodes = list[ShapeNode]()
    for word in words.split():
        at = next(place for place, letter in enumerate(word) if letter in hows)
        parent = ROOT if word[:at] == "-" else int(word[:at])
        nodes.append(ShapeNode(parent, hows[word[at]], int(word[at + 1 :] or 0)))
    return tuple(nodes)


DEEP_SHAPES: dict[str, tuple[Shape, ...]] = {
    "chain": tuple(plain_shape("chain", depth) for depth in (1, 3, 4, 5)),
    "point masses": tuple(plain_shape("point masses", depth) for depth in (1, 3, 4)),
    "siblings": tuple(
        map(_parse_shape, ("-D -D -D", "-D -D -D 1D 2D", "-D 0D -D 1D 1D 4D", "-D -D -D -D"))
    ),
    "without replacement": tuple(
        map(_parse_shape, ("-L -L -L", "-L -L -L 1L 2D", "-L 0L -L 1L 1L 4D", "-L -L -L -L"))
    ),
    "mixed": tuple(
        map(
            _parse_shape,
            (
                "-P1 -D",
                "-X1 -D",
                "-D -P1 -D",
                "-D -X0 -D",
                "-P0 -D -D -X1",
                "-L -P2 -L -X1",
                "-D 0P1 0D 0X0 2D 2P1",
                "-X2 -P1 1D 2X0 2D",
                "-D 0D 1P1 1D 3X1",
                "-D -F1",
                "-D 0D -F1 0F1 2D",
            ),
        )
    ),
}
"""The shapes that every verifier is tried on beside the plain ones."""


def draw_shaped_case(
    rng: random.Random, shape: Shape, vocabulary: int, whole: int, sampling: SamplingParams
) -> ShapedCase:
    """Return a case of this shape with few outcomes: rows by depth, with few tokens."""
    depths, by_depth, left = shape_depths(shape), list[int](), DEEP_DRAFTS
    for depth in range(1, max(depths) + 1):
        drawn = sum(
            at == depth and node.how not in OF_TOKEN for at, node in zip(depths, shape, strict=True)
        )
        most = max(n for n in range(1, vocabulary + 1) if n == 1 or n ** max(drawn, 1) <= left)
        by_depth.append(rng.randint(min(most, 2), most))
        left //= by_depth[-1] ** drawn
    pairs = [draw_row_pair(rng, vocabulary, whole, size) for size in (*by_depth, 2)]
    p, q = (SmallModel(tuple(pair[i] for pair in pairs)) for i in range(2))
    return ShapedCase(p, q, max(depths), max(depths) + 1, shape=shape, sampling=sampling)


def deep_tree_cases(kind: str) -> Iterator[ShapedCase]:
    """Yield the fixed cases of a kind that reach beyond the plain ones."""
    for number, shape in enumerate(DEEP_SHAPES[kind]):
        rng = random.Random(f"{kind} {number}")
        for turn, whole in enumerate((5, 7, 101)):
            for sampling in (UNCHANGED, TREE_SAMPLINGS[1 + (number + 2 * turn) % 6]):
                yield draw_shaped_case(rng, shape, 3 + turn % 2, whole, sampling)
    for number, shape in enumerate(DEEP_SHAPES[kind][:2]):
        rng, depth = random.Random(f"near {kind} {number}"), max(shape_depths(shape))
        near = make_round_case(draw_near_pairs(rng, 3 - number, 1009, depth + 1))
        yield ShapedCase(near.p, near.q, depth, depth + 1, (1, 0), shape)


def empty_tree_cases() -> Iterator[ShapedCase]:
    """Yield cases with an empty tree: a round of plain decoding."""
    model = SmallModel((draw_row(random.Random("empty"), range(3), 3, 7),))
    for sampling in TREE_SAMPLINGS:
        yield ShapedCase(model, model, 0, 1, sampling=sampling)


def penalty_cases(kind: str) -> Iterator[ShapedCase]:
    """Yield cases with a repetition penalty, which reads the text and the node's own path."""
    for number, shape in enumerate(DEEP_SHAPES[kind][:4]):
        rng = random.Random(f"penalty {kind} {number}")
        for sampling in PENALTIES:
            yield replace(draw_shaped_case(rng, shape, 3, 7, sampling), context=(1,))


def draw_random_shape(rng: random.Random, kind: str) -> Shape:
    """Return a random shape of a kind."""
    if kind in ("chain", "point masses"):
        return plain_shape(kind, rng.randint(1, MOST_GAMMA))
    hows = {"siblings": (DRAWN,), "without replacement": (LEFT,)}.get(
        kind, (DRAWN, DRAWN, LEFT, POINT, FOLLOWS, PROBE)
    )
    shape: list[ShapeNode] = []
    for _ in range(rng.randint(2, MOST_NODES)):
        parents = [ROOT, *(node for node, known in enumerate(shape) if known.how != PROBE)]
        parent = rng.choice(parents)
        if sum(node.parent == parent for node in shape) < MOST_SIBLINGS:
            shape.append(ShapeNode(parent, rng.choice(hows), rng.randrange(MOST_VOCABULARY)))
    return tuple(shape)


def random_tree_cases(kind: str, seed: int) -> Iterator[ShapedCase]:
    """Yield random cases of a kind without end."""
    rng = random.Random(f"{kind} {seed}")
    while True:
        shape, vocabulary = draw_random_shape(rng, kind), rng.randint(2, MOST_VOCABULARY)
        sampling = rng.choice(TREE_SAMPLINGS)
        yield draw_shaped_case(rng, shape, vocabulary, rng.choice(PRIMES), sampling)
