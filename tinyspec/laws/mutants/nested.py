"""Cascades with one defect each: a decoder that drafts for another and says something untrue of its
tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinyspec.decoding.decode import Decoder, Round, TargetProbs
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.nested_laws import LEVELS, drafted
from tinyspec.laws.parts import PARTS
from tinyspec.speculative.nested import Nested
from tinyspec.tree import TokenTree


class SmallestLaw(Nested):
    """A token declares the law of the model that first proposed it."""

    def write(self, *args: Any) -> Any:
        proposed: list[Any] = []
        draft: Any = self.decoder.drafter
        propose = draft.propose

        def noted(*inner: Any) -> Any:
            tree = propose(*inner)
            proposed.extend(tree.draft_probs)
            return tree

        draft.propose = noted
        tokens, laws = super().write(*args)
        del draft.propose
        first = proposed[0] if proposed else None
        return tokens, [
            first if first and first[x] else law for x, law in zip(tokens, laws, strict=True)
        ]


class DrawsAgain(Nested):
    """The middle draws from its own row after a refusal, and declares that row."""

    def __init__(self, decoder: Decoder, *args: Any, **how: Any):
        super().__init__(decoder, *args, **how)
        decoder.verifier = self.verify

    @staticmethod
    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
            row: Any = p[node - 1]
            if not rng.accept(row[x] / q[x]):  # type: ignore[index]
                return Verdict(
                    tuple(range(node)), rng.draw(row), (node,)
                )  # right: residual(row, q)
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))


class OneAhead(Nested):
    """Each token declares the row behind it."""

    def write(self, *args: Any) -> Any:
        tokens, laws = super().write(*args)
        return tokens, [*laws[1:], *laws[-1:]]  # right: laws


class SureOnly(Nested):
    """Drops the draft's end from the first token on that the middle held for unlikely."""

    def write(self, *args: Any) -> Any:
        tokens, laws = super().write(*args)
        rows: list[Any] = list(laws)
        sure = [bool(2 * row[x] >= 1) for x, row in zip(tokens, rows, strict=True)]
        kept = [*sure, False].index(False)  # right: ask before the draw, or declare None
        return tokens[:kept], laws[:kept]


class AlwaysAccepted(Nested):
    """The middle takes whatever the small model says, for its law is declared anyway."""

    def __init__(self, decoder: Decoder, *args: Any, **how: Any):
        super().__init__(decoder, *args, **how)
        decoder.verifier = self.verify

    @staticmethod
    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        return Verdict(
            tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1])
        )  # right: walk


class Deaf(Nested):
    """Its text goes on as it drafted, whatever the target made of that."""

    def follow(self, text: Sequence[int]) -> None:
        mine = self.decoder.context
        kept = [*mine, *text[len(mine) :]][: len(text)]
        super().follow(kept)  # right: text


class Apart(Nested):
    """Forgets its text after every round, and reads it all again."""

    def observe(self, round: Round) -> None:
        text = [*self.text, *round.tokens]
        self.rewind(0)
        self.text.extend(text)
        self.follow(text)


def _mutant(name: str, bug: str, nested: Any) -> Mutant:
    return Mutant(name, bug, LEVELS, replace(PARTS, nested=nested), drafted)


MUTANTS = [
    _mutant("a cascade declares the smallest model's law", "slip", SmallestLaw),
    _mutant("the middle draws again after a refusal", "S12", DrawsAgain),
    _mutant("a cascade declares the row behind a token", "B16", OneAhead),
    _mutant("a cascade drops what its middle was unsure of", "slip", SureOnly),
    _mutant("the middle of a cascade refuses nothing", "slip", AlwaysAccepted),
]
EQUIVALENT = [
    Equivalent(
        "the middle's text does not follow the target's",
        "B19",
        "The middle is exact for its own law after whatever text it holds, and declares that law; the target's walk is exact "
        "for every declared law. Only the acceptance falls.",
        (LEVELS,),
        replace(PARTS, nested=Deaf),
    ),
    Equivalent(
        "the middle reads its text anew every round",
        "B17",
        "What a model says of a text does not depend on how often it has read it; only the cost does.",
        (LEVELS,),
        replace(PARTS, nested=Apart),
    ),
]
