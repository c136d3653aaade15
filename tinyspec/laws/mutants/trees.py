"""Drafted trees with one defect each: whose law a child is drawn from, what is dropped, and in
which order siblings stand.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinyspec.decoding.decode import TargetProbs
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.contracts import PRESENCE, TRUTHFUL
from tinyspec.laws.exact import JOINT
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS
from tinyspec.speculative.treedraft import TreeDrafter
from tinyspec.tree import ROOT, TokenTree


class Cousin(TreeDrafter):
    """A child is drawn behind the newest token, not behind its parent."""

    def children(
        self, laws: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Any]]:
        drawn = super().children(laws, ROOT, k, rng)  # right: node
        q = laws[node]
        return [(token, None if law is None or not q[token] > 0 else q) for token, law in drawn]


class Reranked(TreeDrafter):
    """Keeps the guesses that the draft held for likely along their path, and the laws they were
    drawn from.
    """

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        reach: dict[int, Any] = {ROOT: 1}
        for node, (token, up, q) in enumerate(
            zip(tree.tokens, tree.parents, tree.draft_probs, strict=True)
        ):
            reach[node] = reach[up] * (1 if q is None else q[token])
        at = {ROOT: ROOT}
        for node, up in enumerate(tree.parents):
            if reach[node] * 3 > 1 and up in at:  # right: decided before the draw, or law None
                at[node] = len(at) - 1
        kept = [node for node in at if node != ROOT]
        parents, laws = (
            [at[tree.parents[node]] for node in kept],
            [tree.draft_probs[node] for node in kept],
        )
        return TokenTree(tree.tokens_on(kept), parents, laws, (False,) * len(kept))


class Unequal(TreeDrafter):
    """Drawn with replacement; a token that stands there already is left out."""

    def children(
        self, laws: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Any]]:
        return list(
            dict(super().children(laws, node, k, rng)).items()
        )  # right: equal siblings stay


class WithoutAcross(TreeDrafter):
    """A child is not drawn again where its parent's sibling is that token, and declares its
    parent's law.
    """

    def children(
        self, laws: TargetProbs, node: int, k: int, rng: RandomSource
    ) -> list[tuple[int, Any]]:
        if node == ROOT:
            return super().children(laws, node, k, rng)
        q = laws[node]
        left = [
            0 * x if token == laws.tree.tokens[node] else x for token, x in enumerate(q)
        ]  # right: q
        return [(rng.draw(left if sum(left) > 0 else q), q) for _ in range(k)]


def _entry(name: str, bug: str, trees: Any, law: str) -> Mutant:
    def build(model: Any, shape: Any, replace: bool) -> TreeDrafter:
        made: TreeDrafter = trees(model, shape, replace=replace)
        return made

    return Mutant(name, bug, law, replace(PARTS, trees=build), see.trees_drafted)


MUTANTS = [
    _entry(
        "child drawn behind the newest token, declared behind its parent", "slip", Cousin, JOINT
    ),
    _entry("unlikely paths cut, laws kept", "slip", Reranked, PRESENCE),
    _entry("equal guesses of one parent merged", "slip", Unequal, PRESENCE),
    _entry("parent's token avoided, its law declared", "slip", WithoutAcross, TRUTHFUL),
]
