"""Jacobi iteration with one defect each: the wrong tokens are guessed next, or it ends too early or
not at the end.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinyspec.decoding.decode import Round
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.laws.sweeps import PUBLISHED, SWEEPS, begun, counting, say, tables, through
from tinyspec.nonautoregressive.jacobi import JacobiDrafter, JacobiSolution, solve_blocks
from tinyspec.tree import TokenTree

# ---------------------------------------------------------------------- in the frame


class OneLate(JacobiDrafter):
    """The rest of the block is not moved on by the token that the sweep added."""

    def observe(self, round: Round) -> None:
        said = self.predicted_tokens(round)
        self.block = [*said, *self.block[len(said) :]][
            len(round.tokens) - 1 : -1
        ]  # right: [len(round.tokens) :]


class Stubborn(JacobiDrafter):
    """Places behind the first wrong one keep what they held."""

    def observe(self, round: Round) -> None:
        self.block = self.block[len(round.tokens) :]  # right: what the model said


class HalfOfIt(JacobiDrafter):
    """Only the first place that is not final is replaced."""

    def observe(self, round: Round) -> None:
        held, fixed = self.block, len(round.tokens)
        super().observe(round)
        self.block = [*self.block[:1], *held[fixed + 1 :]]  # right: all places


class OneBeyond(JacobiDrafter):
    """A block reads one guess more than it has tokens to make."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        super().propose(context, max_draft_depth, sampling, rng)
        return TokenTree.chain(self.block[:max_draft_depth])  # right: self.block[:-1][:room]


class CountsThePrompt(JacobiDrafter):
    """The prompt's tokens count as made in blocks."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.begun = 0  # right: len(context)
        return super().propose(context, max_draft_depth, sampling, rng)


# ---------------------------------------------------------------------- as published


def _until(done: Any) -> Any:
    """`solve` in one block, with another rule when to stop: (guess, said, how often) -> bool."""

    def solved(
        says: Any,
        prompt: Any,
        length: int,
        block: int,
        start: Any,
        ends: Any = (),
        prefix: Any = None,
    ) -> JacobiSolution:
        made, blocks = list[int](), list[list[list[int]]]()
        while len(made) < length:
            text = [*prompt, *made]
            states = [start(min(block, length - len(made)), text)]
            while len(states) == 1 or not done(states[-2], states[-1], len(states) - 1):
                states.append(says(text, states[-1]))
            blocks.append(states)
            for token in states[-1]:
                made.append(token)
                if token in ends:
                    return JacobiSolution(made, blocks)
        return JacobiSolution(made, blocks)

    return solved


def no_end(
    says: Any, prompt: Any, length: int, block: int, start: Any, ends: Any = (), prefix: Any = None
) -> JacobiSolution:
    return solve_blocks(says, prompt, length, block, start, frozenset(), prefix)  # right: ends


def whole_blocks(
    says: Any, prompt: Any, length: int, block: int, start: Any, ends: Any = (), prefix: Any = None
) -> JacobiSolution:
    found = solve_blocks(says, prompt, length, block, start, ends, prefix)
    return JacobiSolution(
        [token for states in found.blocks for token in states[-1]], found.blocks
    )  # right: up to the end


def own_token(
    says: Any, prompt: Any, length: int, block: int, start: Any, ends: Any = (), prefix: Any = None
) -> JacobiSolution:
    def shifted(text: Any, guess: Any) -> Any:
        return [
            says([*text, guess[0]], guess[1:] + guess[-1:])[0],
            *says(text, guess)[1:],
        ]  # right: says(text, guess)

    found: JacobiSolution = _until(lambda guess, said, n: n > length)(
        shifted, prompt, length, block, start, ends, prefix
    )
    return found


# ---------------------------------------------------------------------- what can be seen


def drafted(parts: Parts) -> Any:
    """Trees and tokens of the sweeps over some blocks."""
    made = []
    for model in (*tables(1), counting()):
        for form, block, prefix in (("pj", 1, 0), ("pgj", 3, 0), ("hgj", 3, 3)):
            decoder = begun(through(parts.jacobi), model, (0, 1, 1, 0, 1), form, block, prefix, 6)
            while not decoder.finished:
                round = decoder.step(Seeded(decoder.rounds))
                made.append((tuple(round.tree.tokens), round.tokens))
    return made


def solved(parts: Parts) -> Any:
    """What the algorithm makes of some blocks."""
    made = []
    for model in (*tables(2), counting()):
        says = lambda text, block, model=model: say(model, text, block)  # noqa: E731
        for block in (2, 4):
            made.append(
                parts.solve(says, (0, 1), 4, block, lambda n, text: [0] * n, frozenset({1}), None)
            )
            made.append(
                parts.solve(says, (0, 1), 4, block, lambda n, text: [1] * n, frozenset(), None)
            )
    return made


def _mutant(name: str, bug: str, jacobi: Any) -> Mutant:
    return Mutant(name, bug, SWEEPS, replace(PARTS, jacobi=jacobi), drafted)


def _early(name: str, bug: str, function: Any) -> Mutant:
    return Mutant(name, bug, PUBLISHED, replace(PARTS, solve=function), solved)


MUTANTS = [
    _mutant("a block is not moved on by the sweep's own token", "B19", OneLate),
    _mutant("a sweep's answers behind the first wrong place are not used", "slip", Stubborn),
    _mutant("a sweep replaces one place", "slip", HalfOfIt),
    _mutant("a block reads a guess that answers for another block", "B30", OneBeyond),
    _mutant("a hybrid's prefix counts the prompt", "slip", CountsThePrompt),
    _early(
        "iteration stops when the first place stands",
        "slip",
        _until(lambda guess, said, n: guess[0] == said[0]),
    ),
    _early(
        "iteration stops after half as many sweeps as tokens",
        "slip",
        _until(lambda g, said, n: 2 * n >= len(said)),
    ),
    _early("iteration goes on behind the end of the text", "B26", no_end),
    _early("a block is kept whole behind the end of the text", "B26", whole_blocks),
    _early("a place reads its own token", "B16", own_token),
]
EQUIVALENT = [
    Equivalent(
        "the last place of a block need not stand",
        "slip",
        "No place of the block reads its last token. Where all others are as they were, the sweep read what the next sweep "
        "would read, so its answers are the fixed point already; a confirming pass is saved.",
        (PUBLISHED,),
        replace(PARTS, solve=_until(lambda guess, said, n: guess[:-1] == said[:-1])),
    ),
    Equivalent(
        "iteration stops after as many sweeps as tokens",
        "slip",
        "After k sweeps the first k tokens are final: the induction of the theorem. With m sweeps all m are, equal or not.",
        (PUBLISHED,),
        replace(PARTS, solve=_until(lambda guess, said, n: guess == said or n >= len(said))),
    ),
]
