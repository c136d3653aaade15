"""Parallel decoding: greedy decoding as a system of equations, solved by Jacobi iteration.

Santilli et al., ACL 2023, arXiv 2305.10427. Greedy decoding of m tokens is the system y_i = argmax
p(. | x, y_<i). It is triangular, so it has one solution, and Jacobi iteration reaches it: guess all
m tokens, and in one causal pass replace each by what the model says in its place, given the guesses
before it; again, until nothing changes. What makes it *this* technique: the model is an unchanged
autoregressive one, no draft stands beside it, and the guesses of a sweep are the answers of the
sweep before. PJ sweeps over all m tokens, PGJ over blocks of b from left to right (Gauss-Seidel
between blocks, Jacobi inside; b = 1 is autoregression), HGJ over the blocks of a prefix, looking
for the end of text behind each, and goes on autoregressively, so that no length need be known.
Nothing is trained.

Theorem: after k sweeps the first k tokens are final, so m sweeps are enough, and greedy text is the
only fixed point. Tested in tests/nonautoregressive/test_jacobi.py, with the laws of
tinyspec/laws/sweeps.py: every start of small blocks, the only fixed point by trying all texts, and
targets on which each sweep fixes one token and no more; on language models, and on the
autoregressive translator (`Seq2Seq.given`), for which the paper made it.

In the frame a sweep is a draft: what is left of the block hangs below the newest token as a chain.
The walk accepts the tokens that came true and adds the next, so whatever has a final input is
committed in the sweep that computed it, its keys and values are kept, and no pass confirms what is
known. `solve` is the algorithm as published: it stops at y = y', which may take a pass more (m +
1), and is the frame's oracle in the tests.

Guarantee: EXACT. At temperature 0 it is Jacobi iteration; above, the same guesses are judged as
point masses. What to expect: the paper reports up to 38 % more speed on translation, nearly twice
the speed on more cores; Kou et al. (arXiv 2403.00835) report 1.05x for large language models.
`tinyspec bench sweeps` measures it here.
Left out: the authors' dependency visualiser, of which `Sweep` is the data; their code keeps one key
a sweep, here all final ones are kept.
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

# ---------------------------------------------------------------------- the algorithm as published (section 3)

PredictBlock = Callable[[Sequence[int], Sequence[int]], list[int]]
"""(text, block) -> what the model says in every place of the block, given the text and the block's
tokens before it: a pass.
"""

InitBlock = Callable[[int, Sequence[int]], list[int]]
"""(n, text) -> the first guess of the next n tokens."""


def iterate_block(says: PredictBlock, text: Sequence[int], block: Sequence[int]) -> list[list[int]]:
    """PJ: the block and every sweep's answer, until one is equal to its guess. At most m + 1 sweeps
    for m tokens.
    """
    states = [list(block)]
    while len(states) == 1 or states[-1] != states[-2]:
        states.append(says(text, states[-1]))
    return states


class JacobiSolution(NamedTuple):
    """tokens: the text that was made. blocks: of each block its states, the first guess in
    front.
    """

    tokens: list[int]
    blocks: list[list[list[int]]]

    @property
    def passes(self) -> int:
        """Passes of the model."""
        return sum(len(states) - 1 for states in self.blocks)


def solve_blocks(
    says: PredictBlock,
    prompt: Sequence[int],
    length: int,
    block: int,
    start: InitBlock,
    ends: frozenset[int] = frozenset(),
    prefix: int | None = None,
) -> JacobiSolution:
    """PGJ; with block >= length PJ, with a prefix HGJ.

    length  the most tokens to make
    prefix  tokens that are solved in blocks; what comes behind them is made one by one (None: all
            are solved in blocks)
    ends    ids that end a text: looked for behind each block
    """
    made, blocks = list[int](), list[list[list[int]]]()
    parallel = length if prefix is None else min(prefix, length)
    while len(made) < length:
        text, n = [*prompt, *made], min(block, parallel - len(made))
        if n > 0:
            blocks.append(iterate_block(says, text, start(n, text)))
        else:  # autoregressive: of one token no guess is read, and no pass need confirm it
            guess = start(1, text)
            blocks.append([guess, says(text, guess)])
        fresh = blocks[-1][-1]
        at = next((at for at, token in enumerate(fresh) if token in ends), None)
        made += fresh if at is None else fresh[: at + 1]
        if at is not None:
            break
    return JacobiSolution(made, blocks)


def predict_with_target(target: Target) -> PredictBlock:
    """A target as the algorithm sees it, at temperature 0. Its session runs only what it has not
    run below the same text.
    """
    held = list[int]()

    def says(text: Sequence[int], block: Sequence[int]) -> list[int]:
        target.append(text[len(held) :])
        held[:] = text
        scores = target.score(TokenTree.chain(block[:-1]))
        return [token for (token,) in top_k_rows(scores.logits, range(len(block)), 1)]

    return says


# ---------------------------------------------------------------------- the same through the common loop


class Sweep(NamedTuple):
    """A sweep over what is left of a block of which n + 1 tokens are not final.

    guess  [n] what stood there: all but the block's last token, which nothing reads
    said   [n + 1] what the model says in their places
    fixed  how many of `said` are final now; in sampling the last of these is drawn, and may be
           another token
    """

    block: tuple[int, ...]
    predicted: tuple[int, ...]
    n_final: int


class JacobiDrafter(BaseDrafter):
    """Proposes what the last sweep said of the rest of the block.

    size      tokens of a block; None: all that are wanted (PJ)
    parallel  tokens behind the prompt that are made in blocks; then plain decoding (HGJ); None: all
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
        """The first guess of n tokens: the padding, random tokens, random tokens of the text, or
        the newest one again.
        """
        if self.init in ("random", "prompt"):
            choices = range(self.vocabulary) if self.init == "random" else text
            uniforms = rng.uniforms(n)
            if uniforms is None:  # every outcome is walked
                law = [Fraction(1, len(choices))] * len(choices)
                return [choices[rng.draw(law)] for _ in range(n)]
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
        """What the model held for likeliest in every place of this round, [n + 1]: after the
        penalty, which reorders.
        """
        scores, tree = round.scores, round.tree
        if not len(scores.logits):  # tokens from outside
            return []
        if not self.history:
            return [token for (token,) in top_k_rows(scores.logits, range(len(scores.logits)), 1)]
        laws = TargetProbs(scores, replace(self.sampling, temperature=0.0), self.history, tree)
        return [int(laws[node].argmax()) for node in range(-1, len(tree.tokens))]

    def observe(self, round: Round) -> None:
        self.length += len(round.tokens)
        if len(round.tokens) >= len(self.block):  # it stands
            self.block = []
            return
        said = self.predicted_tokens(round)
        self.block = [*said, *self.block[len(said) :]][len(round.tokens) :]


def trace_sweeps(decoder: Decoder, rng: RandomSource) -> Iterator[Sweep]:
    """Decode to the end, and tell every sweep as plain data."""
    drafter: Any = decoder.drafter
    for round in decoder.run(rng):
        yield Sweep(
            tuple(round.tree.tokens), tuple(drafter.predicted_tokens(round)), len(round.tokens)
        )


@technique(
    title="Parallel decoding by Jacobi iteration",
    summary="rewrites all positions until none changes",
    paper="Santilli et al. 2023, arXiv 2305.10427",
    family="parallel",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob("form", "pgj", "pj: all tokens at once; pgj: in blocks; hgj: a prefix in blocks", choices=("pgj", "pj", "hgj")),
        Knob("block", 3, "b: tokens of a block (pgj, hgj)", low=1, small=(3, 1)),
        Knob("prefix", 64, "tokens made in blocks before plain decoding (hgj)", low=0, small=(2,)),
        Knob("init", "pad", "first guess of a block: padding, random, from the text, the newest token",
             choices=("pad", "random", "prompt", "last")),
    ),
)  # fmt: skip
def jacobi(request: Request, *, form: str, block: int, prefix: int, init: str) -> Decoder:
    """Sweep over each block until it stands."""
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
