"""Parallel decoding: solve greedy decoding as a system of equations, by Jacobi iteration.

Paper: Santilli et al., ACL 2023, arXiv 2305.10427. Nothing is trained.

Idea. Greedy decoding of m tokens is a system of m equations. It is triangular, so it has exactly
one solution, and Jacobi iteration reaches it: guess all m tokens, and in one causal forward pass
replace each by the model's prediction given the guesses before it; repeat until nothing changes.
The model is an unchanged autoregressive one, and there is no draft model.

    y_i        = argmax over v of p(v | x, y_1 .. y_(i-1))              i = 1 .. m
    y_i(k + 1) = argmax over v of p(v | x, y_1(k) .. y_(i-1)(k))        sweep k + 1

    pj    sweeps over all m tokens (Jacobi)
    pgj   sweeps over blocks of b tokens from left to right (Gauss-Seidel between blocks); b = 1 is
          plain decoding
    hgj   blocks for a prefix, looking for the end of text after each, then plain decoding: the
          length need not be known

After k sweeps the first k tokens are final, so m sweeps are enough, and the greedy text is the only
fixed point. In the common loop (decoding/decode.py) a sweep is a draft: the rest of the block is a
chain after the newest token. Verification accepts the tokens that came true and adds the next one.
So a token is committed in the sweep that computes it from final inputs, and needs no second pass to
confirm it. `solve_blocks` is the published algorithm: it stops at y(k + 1) = y(k), which may take
one more pass.

Guarantee: EXACT. At temperature 0 it is Jacobi iteration; above, the same guesses are verified as
point masses.
Pitfall: testing convergence against the known greedy text; leaving out the confirming pass from the
count of passes; keeping keys and values that were computed from guesses that changed.
Ablation: block = 1, which is plain decoding, pass by pass (a test). Where no token depends on
another, six take two sweeps (a test). On the storyteller a sweep over 16 fixes 1.04 tokens and
nothing is gained (tutorials/results/sweeps.md); a translation takes 14.3 passes in place of 15.7
(tutorials/results/translation.md).
Tests: tests/nonautoregressive/test_jacobi.py with laws/sweeps.py (`solve_blocks` against the code
that runs; every start of small blocks; the only fixed point by trying all texts; targets on which
each sweep fixes one token; the translator for which the paper made it).
Left out: the authors' dependency visualiser, of which `Sweep` is the data. Their code keeps one
key a sweep, here all final ones are kept. The paper reports up to 38 % more speed on translation;
Kou et al. (arXiv 2403.00835) report 1.05x for large language models (`tinyspec bench sweeps`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round, Target, TargetProbs
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams, top_k_rows
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

# ------------------------------ the algorithm as published (section 3)

PredictBlock = Callable[[Sequence[int], Sequence[int]], list[int]]
"""(text, block) -> the greedy token at every position of the block, given the text and the block's
tokens before it: one forward pass.
"""

InitBlock = Callable[[int, Sequence[int]], list[int]]
"""(n, text) -> the first guess of the next n tokens."""


def iterate_block(
    predict: PredictBlock, text: Sequence[int], block: Sequence[int]
) -> list[list[int]]:
    """Return the block and the result of every sweep, until a sweep changes nothing (PJ).

    A block of m tokens takes at most m + 1 sweeps.
    """
    states = [list(block)]
    while len(states) == 1 or states[-1] != states[-2]:
        states.append(predict(text, states[-1]))
    return states


class JacobiSolution(NamedTuple):
    """The solution and how it was reached.

    tokens  the tokens that were generated
    blocks  the states of each block; the first state is the first guess
    """

    tokens: list[int]
    blocks: list[list[list[int]]]

    @property
    def passes(self) -> int:
        """Return the number of forward passes."""
        return sum(len(states) - 1 for states in self.blocks)


def solve_blocks(
    predict: PredictBlock,
    prompt: Sequence[int],
    length: int,
    block: int,
    start: InitBlock,
    ends: frozenset[int] = frozenset(),
    prefix: int | None = None,
) -> JacobiSolution:
    """Return the greedy text, solved block by block.

    This is PGJ. It is PJ if block >= length, and HGJ with a prefix.

    length  the most tokens to generate
    block   tokens of a block (b)
    start   makes the first guess of a block
    ends    ids that end a text; looked for after each block
    prefix  tokens that are solved in blocks; the rest is decoded one by one (None: all in blocks)
    """
    made, blocks = list[int](), list[list[list[int]]]()
    parallel = length if prefix is None else min(prefix, length)
    while len(made) < length:
        text, n = [*prompt, *made], min(block, parallel - len(made))
        if n > 0:
            blocks.append(iterate_block(predict, text, start(n, text)))
        else:  # autoregressive: one pass gives one token, and none has to confirm it
            guess = start(1, text)
            blocks.append([guess, predict(text, guess)])
        fresh = blocks[-1][-1]
        at = next((at for at, token in enumerate(fresh) if token in ends), None)
        made += fresh if at is None else fresh[: at + 1]
        if at is not None:
            break
    return JacobiSolution(made, blocks)


def predict_with_target(target: Target) -> PredictBlock:
    """Return a target as the algorithm reads it, at temperature 0.

    Its session runs only positions that it has not run after the same text.
    """
    held = list[int]()

    def predict(text: Sequence[int], block: Sequence[int]) -> list[int]:
        target.append(text[len(held) :])
        held[:] = text
        scores = target.score(TokenTree.chain(block[:-1]))
        return [token for (token,) in top_k_rows(scores.logits, range(len(block)), 1)]

    return predict


# ------------------------------ the same through the common loop


class Sweep(NamedTuple):
    """A sweep over the n + 1 tokens of a block that are not final.

    block      [n] the guesses that were read: all but the last, which no position attends to
    predicted  [n + 1] the model's greedy tokens
    n_final    how many of `predicted` are final now; in sampling the last of these is drawn, and
               may be another token
    """

    block: tuple[int, ...]
    predicted: tuple[int, ...]
    n_final: int


class JacobiDrafter(BaseDrafter):
    """Propose the last sweep's predictions for the rest of the block.

    size      tokens of a block; None: all that are wanted (PJ)
    parallel  tokens after the prompt that are solved in blocks, before plain decoding (HGJ); None:
              all of them
    """

    def __init__(
        self,
        size: int | None,
        parallel: int | None = None,
        init: str = "pad",
        vocabulary: int = 1,
        pad: int = 0,
    ):
        self.size, self.parallel = size, parallel
        self.init, self.vocabulary, self.pad = init, vocabulary, pad
        self.end()

    def end(self) -> None:
        self.block = list[int]()  # guesses of its tokens that are not final, the last one's too
        self.begun: int | None = None  # where the tokens begin that are made in blocks
        self.length = 0  # of the text
        self.sampling, self.history = UNCHANGED, list[int]()

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.block, self.begun = [], None
        self.length += len(tokens)

    def rewind(self, length: int) -> None:
        if length < self.length:
            self.block, self.length = [], length
        self.begun = None if self.begun is None else min(self.begun, length)

    def start(self, n: int, text: Sequence[int], rng: RandomSource) -> list[int]:
        """Return the first guess of n tokens: padding, random tokens, tokens of the text, or the
        newest token again.
        """
        if self.init in ("random", "prompt"):
            choices = range(self.vocabulary) if self.init == "random" else text
            uniforms = rng.uniforms(n)
            if uniforms is None:  # every outcome is walked
                uniform = [Fraction(1, len(choices))] * len(choices)
                return [choices[rng.draw(uniform)] for _ in range(n)]
            return [choices[int(u * len(choices))] for u in uniforms]
        return [text[-1] if self.init == "last" else self.pad] * n

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.begun = len(context) if self.begun is None else self.begun
        if not self.block:
            wanted = (
                [max_draft_depth + 1] if self.size is None else [max_draft_depth + 1, self.size]
            )
            if self.parallel is not None:
                wanted.append(self.begun + self.parallel - len(context))
            n = min(wanted)
            self.block = self.start(n, context, rng) if n > 0 else []
        self.sampling = sampling
        self.history = list(context) if sampling.repetition_penalty != 1.0 else []
        return TokenTree.chain(self.block[:-1][:max_draft_depth])

    def predicted_tokens(self, round: Round) -> list[int]:
        """Return the greedy token at every position of this round, [n + 1].

        A repetition penalty is applied first, because it changes the order of the tokens.
        """
        scores, tree = round.scores, round.tree
        if not len(scores.logits):  # tokens from outside
            return []
        if not self.history:
            return [token for (token,) in top_k_rows(scores.logits, range(len(scores.logits)), 1)]
        probs = TargetProbs(scores, replace(self.sampling, temperature=0.0), self.history, tree)
        return [int(probs[node].argmax()) for node in range(-1, len(tree.tokens))]

    def observe(self, round: Round) -> None:
        self.length += len(round.tokens)
        if len(round.tokens) >= len(self.block):  # it stands
            self.block = []
            return
        predicted = self.predicted_tokens(round)
        self.block = [*predicted, *self.block[len(predicted) :]][len(round.tokens) :]


def trace_sweeps(decoder: Decoder, rng: RandomSource) -> Iterator[Sweep]:
    """Decode to the end, and yield every sweep as plain data."""
    drafter: Any = decoder.drafter
    for round in decoder.run(rng):
        yield Sweep(
            tuple(round.tree.tokens), tuple(drafter.predicted_tokens(round)), len(round.tokens)
        )


# ------------------------------ the card


@technique(
    title="Parallel decoding by Jacobi iteration",
    summary="rewrites all positions until none changes",
    paper="Santilli et al. 2023, arXiv 2305.10427",
    reported="up to 38% faster (survey)",
    family="parallel",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    knobs=(
        Knob(
            "form",
            "pgj",
            "pj: all tokens at once; pgj: in blocks; hgj: a prefix in blocks",
            choices=("pgj", "pj", "hgj"),
        ),
        Knob("block", 3, "b: tokens of a block (pgj, hgj)", low=1, high=1024, small=(3, 1)),
        Knob(
            "prefix",
            64,
            "tokens solved in blocks before plain decoding (hgj)",
            low=0,
            high=1 << 20,
            small=(2,),
        ),
        Knob(
            "init",
            "pad",
            "first guess; pad: padding; random: any ids; prompt: ids of the text; last: the newest "
            "token",
            choices=("pad", "random", "prompt", "last"),
        ),
    ),
)
def jacobi(request: Request, *, form: str, block: int, prefix: int, init: str) -> Decoder:
    """Return a decoder that sweeps over each block until all its tokens are final."""
    if form == "pj" and request.stop.max_new_tokens is None and request.positions is None:
        raise TinyspecError(
            "form pj solves for all tokens at once: say how many (max_new_tokens), or take form pgj"
        )
    target: Any = request.target
    config = target.model.config
    pad = getattr(
        target.model, "pad", next(iter(config.eos), 0)
    )  # a language model has none: its end of text
    drafter = JacobiDrafter(
        None if form == "pj" else block,
        prefix if form == "hgj" else None,
        init,
        config.vocab_size,
        pad,
    )
    return request.decoder(drafter, verify_tree)
