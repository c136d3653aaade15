"""Drafters with one defect each: what they declare is not what they drew from, or what they drew
decides what is shown.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from tinyspec._core import NgramIndex
from tinyspec.decoding.decode import Round, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import theorems
from tinyspec.laws.contracts import EXAMINED, PRESENCE, TRUTHFUL
from tinyspec.laws.exact import JOINT
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS, Siblings
from tinyspec.tree import TokenTree


class Chain(ModelDrafter):
    """A chain from a model, as ModelDrafter draws it, with the draw and the declaration left
    open.
    """

    def law(self, laws: TargetProbs, node: int, sampling: SamplingParams) -> Any:
        """What the next token is drawn from."""
        return laws[node]

    def drawn(self, row: Any, rng: Any) -> int:
        """The next token."""
        return int(rng.draw(row))

    def declared(self, laws: TargetProbs, node: int, row: Any) -> Any:
        """What is said of it."""
        return row

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = TokenTree()
        for _ in range(min(self.gamma, max_draft_depth)):
            laws, node = (
                TargetProbs(self.model.score(tree), sampling, context, tree),
                len(tree.tokens) - 1,
            )
            row = self.law(laws, node, sampling)
            token = self.drawn(row, rng)
            tree = TokenTree.chain(
                (*tree.tokens, token), (*tree.draft_probs, self.declared(laws, node, row))
            )
        return tree


class ArgmaxSoft(Chain):
    def drawn(self, row: Any, rng: Any) -> int:
        return list(row).index(max(row))  # right: chance.draw(row), or declare None


class FilteredDrawRawLaw(Chain):
    def declared(self, laws: TargetProbs, node: int, row: Any) -> Any:
        return laws.probs_under(node, SamplingParams())  # right: row, warped as the draw was


class Rounded(Chain):
    def declared(self, laws: TargetProbs, node: int, row: Any) -> Any:
        coarse = [
            Fraction(round(8 * x) or 1, 8) for x in row
        ]  # a narrow dtype: three bits  # right: row
        return [x / sum(coarse) for x in coarse]


class LikelyOnly(Chain):
    """Keeps a guess only if the draft was sure of it, and declares the law it was drawn from."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        sure = [
            bool(q[x] > Fraction(1, 3))  # type: ignore[index]
            for x, q in zip(tree.tokens, tree.draft_probs, strict=True)
        ]
        n = [*sure, False].index(False)  # right: ask before the draw, or declare None
        return TokenTree.chain(tree.tokens[:n], tree.draft_probs[:n])


class Stubborn(ModelDrafter):
    """Proposes the guess that was refused once more, with the law it had."""

    refused: tuple[int, Any] | None = None

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        again, self.refused = self.refused, None
        if again is None or max_draft_depth < 1:
            return super().propose(context, max_draft_depth, sampling, rng)
        return TokenTree.chain(
            [again[0]], [again[1]]
        )  # right: [None], for the verifier has looked at it

    def observe(self, round: Round) -> None:
        super().observe(round)
        for node in round.verdict.rejected:
            self.refused = (round.tree.tokens[node], round.tree.draft_probs[node])


class Unconditional(Siblings):
    """Without replacement; each sibling declares q, as if it had been the first."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        return tree._replace(
            draft_probs=[tree.draft_probs[0]] * len(tree.draft_probs)
        )  # right: q without the earlier siblings


class Sorted(Siblings):
    """The most probable sibling first, each with the law it was drawn from."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        order = sorted(range(len(tree.tokens)), key=lambda i: -tree.draft_probs[0][tree.tokens[i]])  # type: ignore[index]
        return tree._replace(
            tokens=tree.tokens_on(order), draft_probs=[tree.draft_probs[i] for i in order]
        )  # right: in draw order


class Behind(ModelDrafter):
    """The draft's own text lacks the token that came last."""

    def observe(self, round: Round) -> None:
        self.model.append(round.tokens[:-1] or round.tokens)  # right: round.tokens


class Softer(Chain):
    """Draws without the user's warp, and says so."""

    def law(self, laws: TargetProbs, node: int, sampling: SamplingParams) -> Any:
        return laws.probs_under(node, SamplingParams())


class SixteenBits:
    """An n-gram index that stores ids in 16 bits."""

    def __init__(self, max_n: int):
        self.index = NgramIndex(max_n)

    def append(self, text: int, tokens: Sequence[int]) -> None:
        self.index.append(text, [token & 0xFFFF for token in tokens])  # right: token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)


def _chain(name: str, bug: str, drafter: Any, law: str, witness: Any = see.trees_drafted) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, drafter=drafter), witness)


def _siblings(name: str, bug: str, siblings: Any, law: str) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, siblings=siblings), see.trees_drafted)


MUTANTS = [
    _chain("argmax drafted, softmax declared", "B3, S4", ArgmaxSoft, TRUTHFUL),
    _chain("drawn filtered, declared raw", "B4", FilteredDrawRawLaw, TRUTHFUL),
    _chain("declared in a narrower dtype", "B5", Rounded, TRUTHFUL),
    _chain("only likely guesses kept", "slip", LikelyOnly, PRESENCE),
    _chain("refused guess proposed again", "slip", Stubborn, EXAMINED, see.chains),
    _siblings("without replacement, each declared as the first", "slip", Unconditional, JOINT),
    _siblings("siblings sorted after the draw", "slip", Sorted, theorems.ORDER),
    Mutant(
        "index stores 16 bits",
        "B35",
        "lookup is a search",
        replace(PARTS, index=SixteenBits),
        see.rows,
    ),
]
EQUIVALENT = [
    Equivalent(
        "the draft does without the user's warp",
        "B6",
        "The walk is exact for every declared law that is positive where it proposes: the ratio and the residual are made "
        "of the law the guess was drawn from, whichever it is. Only the acceptance falls.",
        (JOINT,),
        replace(PARTS, drafter=Softer),
    ),
    Equivalent(
        "the draft's text lacks the newest token",
        "B19",
        "As above: the guesses come from a law that is conditioned on the wrong text, and that law is the one declared.",
        (JOINT,),
        replace(PARTS, drafter=Behind),
    ),
]
