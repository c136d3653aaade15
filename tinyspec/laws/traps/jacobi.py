"""Parallel decoding (Santilli et al. 2023): all places at once, the answers are the next guesses,
and nobody knows the end.
"""

from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import sweeps
from tinyspec.laws.exact.models import likeliest_token
from tinyspec.laws.sweeps import SOLVE_PUBLISHED, SWEEP_COST, SWEEP_FIXES, SWEEP_IS_JACOBI, Build
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.nonautoregressive.jacobi import JacobiDrafter, JacobiSolution, solve_blocks
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

# ------------------------------------------------------------------ toys


def plain(request: Request, **knobs: Any) -> Decoder:
    """Autoregression under another name: no sweep says anything of the places behind the first."""
    return request.decoder(BaseDrafter(), verify_tree)


def fixed_number(
    says: Any, prompt: Any, length: int, block: int, start: Any, ends: Any, prefix: Any
) -> JacobiSolution:
    """Two iterations, then it is taken for solved."""
    states = [start(length, prompt)]
    for _ in range(2):
        states.append(says(prompt, states[-1]))
    return JacobiSolution(states[-1], [states])


class Anew(JacobiDrafter):
    """Guesses anew in every sweep."""

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.block = self.start(len(self.block), (), Seeded(0))


class Slides(JacobiDrafter):
    """No blocks: the last answer is repeated, so that as many places are guessed as ever."""

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.block += [self.predicted_tokens(round)[-1]] * len(round.tokens)


class Impatient(JacobiDrafter):
    """Two sweeps have to be enough."""

    sweeps = 0

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.sweeps += 1

    def verify(self, tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
        return (
            verify_tree(tree, p, rng)
            if self.sweeps < 2
            else Verdict(tuple(range(len(tree.tokens))), rng.draw(p[-1]))
        )


class Known(JacobiDrafter):
    """Knows when it has converged, for it has decoded the text before, token by token."""

    target: Any = None

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree, twin = super().propose(context, max_draft_depth, sampling, rng), self.target.fork()
        for _ in tree.tokens:
            twin.commit((), likeliest_token(twin.score(TokenTree()).logits[0]))
        return tree


class Forgetful(JacobiDrafter):
    """Runs the whole text again in every sweep."""

    target: Any = None

    def observe(self, round: Round) -> None:
        super().observe(round)
        text = list(self.target.text)
        self.target.end()
        self.target.append(text)


def _toy(kind: type[JacobiDrafter]) -> Build:
    def build(request: Request, *, form: str, block: int, prefix: int) -> Decoder:
        drafter = kind(None if form == "pj" else block, prefix if form == "hgj" else None)
        if isinstance(drafter, (Known, Forgetful)):
            drafter.target = request.target
        return request.decoder(
            drafter, drafter.verify if isinstance(drafter, Impatient) else verify_tree
        )

    return build


TRAPS = [
    Trap(SWEEP_IS_JACOBI, sweeps.sweeps_by_hand, card("jacobi")),
    Trap(SWEEP_FIXES, sweeps.fixes_one_at_least, card("jacobi")),
    Trap(SWEEP_COST, sweeps.costs_what_is_left, card("jacobi")),
    Trap(SOLVE_PUBLISHED, sweeps.solve_ends_at_greedy, lambda: solve_blocks),
]
TOYS = [
    Toy("autoregression under another name", SWEEP_IS_JACOBI, plain),
    Toy("guesses anew in every sweep", SWEEP_IS_JACOBI, _toy(Anew)),
    Toy("a window that slides, without blocks", SWEEP_IS_JACOBI, _toy(Slides)),
    Toy("two sweeps have to be enough", SWEEP_FIXES, _toy(Impatient)),
    Toy("convergence tested against the known text", SWEEP_COST, _toy(Known)),
    Toy("no cache", SWEEP_COST, _toy(Forgetful)),
    Toy("a fixed number of iterations", SOLVE_PUBLISHED, fixed_number),
]
