"""PPD (Yang et al. 2023): the whole model decides every token, and a guess that holds has been
begun in good time.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.ppd import NO_DRAFT, PipelinedTarget, PpdDrafter
from tinyspec.laws import exit_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, exact_law
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import PIPELINE_CLOCK, PIPELINE_WORK
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.lm.forward import Scores
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

Build = Callable[..., Decoder]


def joint_law_of_two_tokens(build: Build) -> Evidence:
    """Against plain decoding, sampled and greedy."""
    branches, cases = 0, 0
    for seed in (1, 2, 3):
        for sampling in (SamplingParams(), SamplingParams(0.0)):
            model = TableModel(seed, zeros=False)
            expected = exact_law(
                lambda model=model, sampling=sampling: Decoder(
                    model.session(), BaseDrafter(), verify_tree, sampling=sampling
                ),  # type: ignore[misc]
                2,
            )
            got = exact_law(
                lambda model=model, sampling=sampling: build(  # type: ignore[misc]
                    Request(model.session(), sampling=sampling), layer=2, k=2
                ),
                2,
            )
            branches, cases = branches + got.branches, cases + 1
            if dict(got) != dict(expected):
                told = {"model": model, "temperature": sampling.temperature, "layer": 2, "k": 2}
                accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **told)
    return Evidence(JOINT, cases, branches)


# ------------------------------------------------------------------ toys


def _piped(request: Request, pipeline: Any) -> Decoder:
    request.target = pipeline
    return request.decoder(PpdDrafter(pipeline), verify_tree)


def exits_and_hopes(request: Request, layer: int, k: int) -> Decoder:
    """The likeliest guess is the token; the layers above are run when somebody needs their keys."""

    class Hopes(PipelinedTarget):
        def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
            scores: Scores = self.session.advance(NO_DRAFT, self.layer, head=True)
            return scores

    return _piped(request, Hopes(request.target, layer, k))


def begins_when_it_knows(request: Request, layer: int, k: int) -> Decoder:
    """All in turn: the branches are chosen by what the whole model said, so every guess holds."""

    class Knows(PipelinedTarget):
        def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
            upcoming, self.upcoming = self.upcoming, None
            if upcoming is not None and self.layer < self.depth:
                self.session.advance(NO_DRAFT, self.layer, head=True)
            scores: Scores = self.session.score(tree, hidden_layers)
            if upcoming is not None and self.layer < self.depth:
                self.session.advance(self.guess_next(scores, *upcoming), self.depth - self.layer)
            return scores

    return _piped(request, Knows(request.target, layer, k))


def begins_apart(request: Request, layer: int, k: int) -> Decoder:
    """Each branch is a copy of the text, with a cache of its own, and what it has done stays
    there.
    """

    class Apart(PipelinedTarget):
        def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
            if self.upcoming is not None and self.layer < self.depth:
                branches = self.guess_next(
                    self.session.advance(NO_DRAFT, self.layer, head=True), *self.upcoming
                )
                self.session.fork().advance(branches, self.depth - self.layer)
            self.upcoming = None
            return super().score(tree, hidden_layers)

    return _piped(request, Apart(request.target, layer, k))


def runs_them_through(request: Request, layer: int, k: int) -> Decoder:
    """Every branch goes through the whole model, as if its token were settled."""

    class Through(PipelinedTarget):
        def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
            upcoming = self.upcoming
            if upcoming is not None and self.layer < self.depth:
                branches = self.guess_next(
                    self.session.advance(NO_DRAFT, self.layer, head=True), *upcoming
                )
                self.session.advance(branches, self.depth)
            self.upcoming = None
            return super().score(tree, hidden_layers)

    return _piped(request, Through(request.target, layer, k))


TRAPS = [
    Trap(JOINT, joint_law_of_two_tokens, card("ppd")),
    Trap(PIPELINE_CLOCK, exit_laws.pipeline_clock, card("ppd")),
    Trap(PIPELINE_WORK, exit_laws.pipeline_work, card("ppd")),
]
TOYS = [
    Toy("exit early and hope", JOINT, exits_and_hopes),
    Toy("begun when the token is known", PIPELINE_CLOCK, begins_when_it_knows),
    Toy("branches with caches of their own", PIPELINE_CLOCK, begins_apart),
    Toy("branches run through the whole model", PIPELINE_WORK, runs_them_through),
]
