"""SPEED: begin the next token on an early guess, in layers that share their weights.

Paper: Hooper et al. 2023, arXiv 2310.12072. The model is trained with repeated layers, and here
with a loss after every repetition. We read the abstract and introductions to the method, not the
whole paper.

Idea. The decoder has one group of m layers and runs it r times (cyclic parameter sharing): it is as
deep as m r layers, and its weights are those of m. After repetition e the head guesses the next
token. The guess enters the group at once, while the token before it runs its other repetitions.
Tokens in different repetitions need the same weights, so one application of the group to all of
them (a tick) reads the weights once:

    tick        1     2     3     4     5           r = 3, e = 1
    token t     rep1  rep2  rep3
    guess t+1         rep1  rep2  rep3
    guess t+2               rep1  rep2  rep3

When a token leaves the last repetition, the model's own next token is known. If it is the guess,
the guess has already run r - e repetitions. If not, it and all later tokens are dropped.

    ticks(n) = r + sum over the n - 1 later tokens of (e if it was guessed, else r)

So a token costs e ticks where guesses are right, and r, as in plain decoding, where none is. Every
repetition has keys and values of its own. A guess reads those of the tokens before it, which are
at least e repetitions ahead.

Guarantee: EXACT, relative to the model with repeated layers, greedy or sampled: guesses decide only
what is begun.
Pitfall: pipelining layers with different weights, which reads as many weights as before; counting
ticks as if dropped tokens had cost none.
Tests: tests/speculative/test_speed.py (the formula for ticks against the code that runs; tokens in
one tick against the dense pass; a model with repeated layers in every path).
Ours, because we could not read the paper's: the formula, the default of `exit`, and the weights of
the losses. We have not found code of the authors.
Left out: a head of its own for the early guess: ours is the model's head; a further look at a guess
after later repetitions; encoder-decoders.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.pipeline import PipelineDrafter, Upcoming
from tinyspec.decoding.sampling import kernels_of
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.cyclic import run_repetition
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree


def decode_with_early_guesses(
    row_after: Callable[[list[int], int], Any],
    text: Sequence[int],
    n_tokens: int,
    repeat: int,
    exit: int,
    rng: Any,
) -> tuple[list[int], int]:
    """Return the text and its ticks, by the algorithm above.

    row_after  (text, repetitions) -> next-token distribution [V] read after so many repetitions
    n_tokens   how many tokens to add
    repeat     repetitions of the group (r)
    exit       repetition after which the next token is guessed (e)
    rng        a numpy.random.Generator

    The decoder runs `CyclicPipeline`. A test compares the two.
    """
    output, ticks = list(text), 0
    begun = 0  # repetitions that the newest token ran while it was a guess
    for left in reversed(range(n_tokens)):
        ticks += repeat - begun
        row = row_after(output, exit)
        guess = min(range(len(row)), key=lambda token: (-row[token], token))
        row = row_after(output, repeat)
        output.append(rng.choice(len(row), p=row))
        begun = repeat - exit if left and output[-1] == guess else 0
    return output, ticks


class CyclicPipeline:
    """A session of a model with repeated layers that begins tokens before they are known.

    exit      repetition after which the next token is guessed (e)
    ends      tokens that nothing follows
    guesses   tokens in flight after the newest one; each has run `exit` repetitions less than the
              one before it
    upcoming  set by the drafter if another token is to follow the newest one
    """

    def __init__(self, session: Any, exit: int, ends: frozenset[int]):
        self.session, self.exit, self.ends = session, exit, ends
        self.group: int = session.model.config.distinct_layers
        self.repeat: int = session.model.config.repeat
        self.guesses: list[int] = []
        self.upcoming: Upcoming | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what is the session's: text, append, end."""
        return getattr(self.session, name)

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Commit as the session does; guesses go on if the first of them is what was committed."""
        held = not path and self.guesses and self.guesses[0] == next
        self.guesses = self.guesses[1:] if held else []
        self.session.commit(path, next)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        self.guesses = []
        scores: Scores = self.session.extend(tokens, hidden_layers)
        return scores

    def rewind(self, length: int) -> None:
        self.guesses = []
        self.session.rewind(length)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the newest token's row; on the way there, begin with guesses of later tokens."""
        upcoming, self.upcoming = self.upcoming, None
        if upcoming is not None:
            while self._repetitions(0) < self.repeat:
                self.run_tick(upcoming)
        scores: Scores = self.session.score(tree, hidden_layers)
        return scores

    def run_tick(self, upcoming: Upcoming) -> None:
        """Apply the group once to the newest token and to all guesses; then guess one token more.

        Only the last token in flight may have run `exit` repetitions and have no guess after it.
        """
        self.session.run_to_layer(TokenTree.chain(self.guesses), 0)  # finds or makes their nodes
        last = len(self.guesses)
        is_asked = self._repetitions(last) + 1 == self.exit < self.repeat
        is_known = self._repetitions(0) + 1 == self.repeat
        logits = run_repetition(self.session, [0] * is_known + [last] * is_asked)
        if is_asked and last < upcoming.room:
            row, history = kernels_of(logits).as_rows(logits)[-1], [*upcoming.text, *self.guesses]
            guess = rank_tokens(upcoming.sampling, row, history, 1)[0]
            self.guesses += [] if guess in self.ends else [guess]

    def _repetitions(self, entry: int) -> int:
        """Return how many repetitions the newest token (0) or a guess has run."""
        nodes = [self.session.committed[-1], *self.session.scored]
        done: int = nodes[entry].sublayers_done
        return done // (2 * self.group)


# ------------------------------ the clock


def count_ticks(calls: Sequence[ForwardRecord], group: int) -> float:
    """Return how often the group of layers was applied, from a forward log.

    A pass in which every token ran all r repetitions counts as r ticks.
    """
    return sum(call.row_layers / (call.rows * group) for call in calls)


def expected_ticks(repeat: int, exit: int, match: Any, tokens: int) -> Any:
    """Return the formula's ticks of so many tokens.

    match  share of the tokens, the first excepted, that were guessed

    >>> expected_ticks(3, 1, 0.5, 11)
    23.0
    """
    return repeat + (tokens - 1) * (match * exit + (1 - match) * repeat)


# ------------------------------ the card


@technique(
    title="SPEED: speculative pipelined execution",
    summary="pipelines guesses through repeated layers",
    paper="Hooper et al. 2023, arXiv 2310.12072",
    reported="latency up to 3x lower (survey)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    cyclic=True,
    knobs=(
        Knob(
            "exit",
            1,
            "repetition after which the next token is guessed",
            low=1,
            high=64,
            small=(1, 2),
        ),
    ),
)
def speed(request: Request, *, exit: int) -> Decoder:
    """Return a decoder that begins tokens on early guesses, in a model with repeated layers."""
    session: Any = request.target
    config = session.model.config
    if config.repeat == 1:
        raise TinyspecError(
            f"speed needs a model whose layers repeat, and those of {session.model.name} do not: "
            "train one from a recipe with extra.repeat, as models/storyteller-speed/recipe.toml"
        )
    pipeline: Any = CyclicPipeline(session, min(exit, config.repeat), request.stop.eos)
    request.target = pipeline
    return request.decoder(PipelineDrafter(pipeline), verify_tree)
