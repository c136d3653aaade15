"""PPD (predictive pipelined decoding): start on the next token before the newest one is finished.

Paper: Yang, Lee, Chen, Papailiopoulos, Lee, TMLR 2024, arXiv 2307.05908. Nothing is trained.

Idea. A model has d layers. After layer dbar the head is read once: the k likeliest tokens are
guesses of what the whole model will say. Each guess is a branch. It runs as the next position
through the first d - dbar layers, on a processor of its own, while the main process takes the
newest token through its last d - dbar layers. If the whole model chooses one of the guesses, that
branch is the next token, partly computed already; if not, all branches are dropped. No token
depends on a guess. More processors save time; no work is saved.

    steps(l)       = d l - (l - 1) match (d - dbar)                 layer-steps on k + 1 processors
    evaluations(l) = d l + (l - 1) (d - dbar) (k - match)           layer evaluations of l tokens

where `match` is the share of positions whose token was among the guesses. When a branch runs layer
j, it needs the newest token's keys of layer j, and the main process has made them dbar layers
before. dbar may not be less than half of d: a branch would have to guess the next token before its
own token is known.

Guarantee: EXACT, greedy or sampled.
Pitfall: leaving early without finishing the token, which changes the text; counting time as if the
branches were free on one processor.
Ablation: layer = d. Nothing is begun early then, and each token takes d steps; if all tokens are
guesses, every token after the first takes d - dbar fewer (two tests). On the storyteller the clock
says 1.15 times as fast at layer 8 of 12 and k = 1, but in wall time no gain is shown
(tutorials/results/ppd.md).
Tests: tests/early_exit/test_ppd.py (`decode_pipelined` against the code that runs: text, steps and
evaluations on every outcome; both formulas round by round; guesses against the cut-off model).
Left out: a head of its own for layer dbar, which the paper may train; with the shared head, a
checkpoint with trained exits guesses better there. The paper gives no default for dbar: two thirds
are ours. All branches are rows of one pass; `threads` runs that pass beside the main process in a
thread of its own, and `tinyspec bench ppd` measures it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.pipeline import NO_DRAFT, PipelineDrafter, Upcoming
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


def decode_pipelined(
    row_after: Callable[[list[int], int], Any],
    text: Sequence[int],
    n_tokens: int,
    depth: int,
    layer: int,
    k: int,
    rng: Any,
) -> tuple[list[int], int, int]:
    """Return the text, its layer-steps on k + 1 processors, and its layer evaluations (section 3).

    row_after  (text, layers) -> next-token distribution [V] read after so many layers
    n_tokens   how many tokens to add
    layer      after which the next token is guessed (dbar)
    k          guesses
    rng        a numpy.random.Generator

    The decoder runs `PipelinedTarget`. A test compares the two on every outcome.
    """
    output, steps, evaluations = list(text), 0, 0
    begun = 0  # layers of the newest token that a branch has run
    for left in reversed(range(n_tokens)):
        row = row_after(output, layer)  # the main process is at layer dbar
        guesses = sorted(range(len(row)), key=lambda x: (-row[x], x))[:k] if left else []
        # Side by side: the newest token runs its last layers, each guess its first ones.
        steps += depth - begun
        evaluations += depth - begun + len(guesses) * (depth - layer)
        row = row_after(output, depth)
        output.append(rng.choice(len(row), p=row))
        begun = depth - layer if output[-1] in guesses else 0
    return output, steps, evaluations


class PipelinedTarget:
    """A session that starts on guesses of the next token before it has finished the newest.

    layer     after which the head is read (dbar)
    k         branches
    upcoming  set by the drafter if another token is to follow the newest one
    """

    def __init__(self, session: Any, layer: int, k: int, threads: bool = False):
        self.session, self.layer, self.k = session, layer, k
        self.depth: int = session.model.config.n_layers
        self.upcoming: Upcoming | None = None
        self.branch_thread = ThreadPoolExecutor(1) if threads else None

    def __getattr__(self, name: str) -> Any:
        """Return what is the session's: text, extend, append, commit, rewind, end."""
        return getattr(self.session, name)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the newest token's row; on the way there, begin with guesses of the next token."""
        upcoming, self.upcoming = self.upcoming, None
        if upcoming is not None and self.layer < self.depth:
            branches = self.guess_next(
                self.session.run_to_layer(NO_DRAFT, self.layer, head=True), upcoming
            )
            if self.branch_thread is not None:
                return self._threaded(branches, tree, hidden_layers)
            self.session.run_to_layer(branches, self.depth - self.layer)
        scores: Scores = self.session.score(tree, hidden_layers)
        return scores

    def guess_next(self, scores: Scores, upcoming: Upcoming) -> TokenTree:
        """Return the k likeliest tokens after layer dbar, as children of the newest token."""
        rows: Any = scores.logits
        penalty = upcoming.sampling.repetition_penalty
        if penalty != 1.0:  # the one setting that changes which tokens come first
            rows = [SamplingParams(repetition_penalty=penalty).probs(rows[0], upcoming.text)]
        tokens = top_k_rows(rows, [0], self.k)[0]
        return TokenTree.point_masses(tokens, (ROOT,) * len(tokens))

    def _threaded(
        self, branches: TokenTree, tree: TokenTree, hidden_layers: Sequence[int]
    ) -> Scores:
        """Run the main process and the branches at the same time.

        They share the cache. Each writes its own slots, and the branches read the newest token's
        keys only in layers that it has left.
        """
        assert self.branch_thread is not None
        # Give them slots: from here on nothing moves or grows.
        self.session.run_to_layer(branches, 0)
        other = self.branch_thread.submit(
            self.session.run_to_layer, branches, self.depth - self.layer
        )
        try:
            scores: Scores = self.session.score(tree, hidden_layers)
        finally:
            other.result()  # nothing may be committed before; a failure there is one here
        return scores


# ------------------------------ the clock (section 4)


def count_layer_steps(calls: Sequence[ForwardRecord]) -> float:
    """Return the layer-steps of a round on k + 1 processors, from its forward log.

    The newest token runs alone up to layer dbar. Then the rest of it and all branches run at the
    same time, each on a processor of its own.
    """
    alone, *beside = [call.row_layers / call.rows for call in calls]
    return alone + max(beside, default=0.0)


def expected_cost(depth: int, layer: int, k: int, match: Any, tokens: int) -> tuple[Any, Any]:
    """Return the theorem's (layer-steps on k + 1 processors, layer evaluations) of so many tokens.

    match  share of the tokens, the first excepted, that were among the guesses

    >>> expected_cost(12, 8, 3, 0.5, 11)
    (112.0, 232.0)
    """
    saved, again = depth - layer, tokens - 1
    return depth * tokens - again * match * saved, depth * tokens + again * saved * (k - match)


def resolve_guess_layer(layer: int, depth: int, name: str = "the model") -> int:
    """Return the layer after which the next token is guessed; 0 is two thirds of the depth.

    Raises TinyspecError if the layer is below half of the depth, or above the depth.

    >>> resolve_guess_layer(0, 12), resolve_guess_layer(6, 12)
    (8, 6)
    """
    least = (depth + 1) // 2
    if layer > depth:
        raise TinyspecError(
            f"layer is {layer}: {name} has {depth} layers: set layer to 0, or from {least} to "
            f"{depth}"
        )
    if 0 < layer < least:
        raise TinyspecError(
            f"layer {layer} is below half of the {depth} layers of {name}, where a branch would "
            f"have to guess too: ppd takes {least} to {depth}"
        )
    return layer or (2 * depth + 1) // 3


# ------------------------------ the card


@technique(
    title="PPD: predictive pipelined decoding",
    summary="starts the next token mid-pass",
    paper="Yang et al. 2024, arXiv 2307.05908",
    reported="10% to 37% lower latency (survey)",
    family="early exit",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    knobs=(
        Knob(
            "layer",
            0,
            "layer after which the next token is guessed; 0: two thirds of the depth",
            low=0,
            high=1024,
            small=(0, 3),
        ),
        Knob(
            "k",
            3,
            "guesses that are begun with (the paper: 1, 3, 5)",
            low=1,
            high=1024,
            small=(2, 1, 3),
        ),
        Knob(
            "threads",
            False,
            "run the guesses beside the newest token, in a thread of their own",
            small=(False,),  # a law cannot copy a thread; tests compare both
        ),
    ),
)
def ppd(request: Request, *, layer: int, k: int, threads: bool) -> Decoder:
    """Return a decoder that starts on the next token before the newest one is finished."""
    session: Any = request.target
    model = session.model
    pipeline: Any = PipelinedTarget(
        session, resolve_guess_layer(layer, model.config.n_layers, model.name), k, threads
    )
    request.target = pipeline
    return request.decoder(PipelineDrafter(pipeline), verify_tree)
