"""Pipelines with one defect each: they guess, begin or forget at the wrong place, and cost what a
pipeline does not cost.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.early_exit.ppd import NO_DRAFT, PipelinedTarget
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.parts import PARTS
from tinyspec.laws.pipeline_laws import CLOCK, WORK, ran
from tinyspec.lm.feed import Scores
from tinyspec.tree import TokenTree


class TooFar(PipelinedTarget):
    """Branches run as many layers as the newest token has behind it, and not as many as it has
    before it.
    """

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        if self.upcoming is not None and self.layer < self.depth:
            branches = self.guess_next(
                self.session.advance(NO_DRAFT, self.layer, head=True), *self.upcoming
            )
            self.session.advance(branches, self.layer)  # right: self.depth - self.layer
        self.upcoming = None
        return super().score(tree, hidden_layers)


class FromTheTop(PipelinedTarget):
    """Guesses what the whole model says: it always holds, and is known when the time is over."""

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        coming, self.upcoming = self.upcoming, None
        scores = super().score(tree, hidden_layers)
        if coming is not None and self.layer < self.depth:
            self.session.advance(self.guess_next(scores, *coming), self.depth - self.layer)
        return scores


class Unlikely(PipelinedTarget):
    """Begins with the k least likely tokens."""

    def guess_next(
        self, scores: Scores, text: Sequence[int], sampling: SamplingParams
    ) -> TokenTree:
        rows: Any = [[-x for x in scores.logits[0]]]  # right: scores.logits
        return super().guess_next(scores._replace(logits=rows), text, sampling)


class Forgets(PipelinedTarget):
    """The token that was decided starts from its embedding, begun or not."""

    def commit(self, path: Sequence[int], next: int | None) -> None:
        self.session.commit(path, next)
        if next is not None:  # right: the branch that spells it is kept
            self.session.rewind(len(self.session) - 1)
            self.session.append((next,))


class BehindTheLast(PipelinedTarget):
    """Begins with a token that nobody wants."""

    heard: Any = None

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        self.heard = self.upcoming or self.heard
        self.upcoming = self.heard  # right: nothing behind the last token
        return super().score(tree, hidden_layers)


class OneMore(PipelinedTarget):
    """Takes the token behind the k-th along."""

    def __init__(self, session: Any, layer: int, k: int, threads: bool = False):
        super().__init__(session, layer, k + 1, threads)


class OneByOne(PipelinedTarget):
    """A pass for each branch: the same rows and layers, in more calls."""

    def guess_next(
        self, scores: Scores, text: Sequence[int], sampling: SamplingParams
    ) -> TokenTree:
        tree = super().guess_next(scores, text, sampling)
        for token in tree.tokens:
            self.session.advance(
                TokenTree((token,), (-1,), (None,), (False,)), self.depth - self.layer
            )
        return tree


def _mutant(name: str, law: str, pipeline: Any) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, pipeline=pipeline), ran)


MUTANTS = [
    _mutant("branches overtake the newest token", CLOCK, TooFar),
    _mutant("a branch is begun when its token is known", CLOCK, FromTheTop),
    _mutant("the least likely tokens are begun", CLOCK, Unlikely),
    _mutant("a token that was begun starts anew", CLOCK, Forgets),
    _mutant("a token behind the last one is begun", WORK, BehindTheLast),
    _mutant("one branch too many", WORK, OneMore),
]
EQUIVALENT = [
    Equivalent(
        "a pass for each branch",
        "slip",
        "Branches are siblings and do not see each other; whether they share a pass changes neither a row's layers nor the "
        "clock, on which each has a processor of its own.",
        (CLOCK, WORK),
        replace(PARTS, pipeline=OneByOne),
    ),
]
