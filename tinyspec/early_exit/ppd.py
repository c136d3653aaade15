"""Predictive Pipelined Decoding: begin with the next token while the newest one is still on its way
through the model.

Yang, Lee, Chen, Papailiopoulos, Lee, TMLR 2024, arXiv 2307.05908. A model has d layers. In the
middle, behind layer dbar, the head is read once: its k likeliest tokens are guesses of what the
whole model will say. Each guess is a branch, which runs as the next position through the first d -
dbar layers, on a processor of its own, while the main process takes the newest token through the d
- dbar layers that are left. Then the whole model has spoken. If it said one of the guesses, that
branch is the next token, half run already; if not, all branches go, and the next token starts from
its embedding.

What makes it PPD: nothing is skipped and nothing is decided by a guess. Of every text the tokens
are those of the whole model, greedy or sampled; what is saved is time, by more processors, never
work. A branch in layer j needs the newest token's keys of layer j alone, and those are there, for
the main process is dbar layers ahead. The pipeline has two stages: below half of the layers a
branch would come to its own layer dbar, and would have to guess, before its own token was settled;
that is refused. Nothing is trained.

Guarantee: EXACT. With a share p of guesses that hold, l tokens take d l - (l - 1) p (d - dbar)
layer-steps on k + 1 processors and d l + (l - 1) (d - dbar) (k - p) layer evaluations. Tested in
tests/early_exit/test_ppd.py: the joint law; both formulas, round by round from the forward log, and
as expectations over all outcomes of a table model; guesses against the cut-off model; the cache. On
one processor the branches come on top, so it is slower: `tinyspec bench ppd` measures the threads
against that. Here all branches are rows of one pass, and `threads` runs that pass beside the main
process in a thread of its own.
Left out: a head of its own for layer dbar, which the paper may train; a checkpoint that was trained
with losses at its exits says more at that layer, with the shared head. The paper calls the layer
d-bar and gives no default: two thirds are ours.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree

NO_DRAFT = TokenTree()  # the newest token, and no draft


class PipelinedTarget:
    """A session that starts on guesses of the next token before it has finished the newest. What it
    scores is the session's.

    layer    behind which the head is read (dbar)
    k        branches
    coming   the text and the warp of the newest token, where another token is to follow it
    """

    def __init__(self, session: Any, layer: int, k: int, threads: bool = False):
        self.session, self.layer, self.k = session, layer, k
        self.depth: int = session.model.config.n_layers
        self.upcoming: tuple[Sequence[int], SamplingParams] | None = None
        self.branch_thread = ThreadPoolExecutor(1) if threads else None

    def __getattr__(
        self, name: str
    ) -> Any:  # text, extend, append, commit, rewind, end: the session's
        return getattr(self.session, name)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """The row of the newest token; on the way there, guesses of the next one are begun."""
        coming, self.upcoming = self.upcoming, None
        if coming is not None and self.layer < self.depth:
            branches = self.guess_next(
                self.session.advance(NO_DRAFT, self.layer, head=True), *coming
            )
            if self.branch_thread is not None:
                return self._threaded(branches, tree, hidden_layers)
            self.session.advance(branches, self.depth - self.layer)
        scores: Scores = self.session.score(tree, hidden_layers)
        return scores

    def guess_next(
        self, scores: Scores, text: Sequence[int], sampling: SamplingParams
    ) -> TokenTree:
        """What an exit here would say: the k likeliest tokens, side by side below the newest."""
        rows: Any = scores.logits
        if (
            sampling.repetition_penalty != 1.0
        ):  # the one setting that changes which tokens come first
            rows = [
                SamplingParams(repetition_penalty=sampling.repetition_penalty).probs(rows[0], text)
            ]
        tokens = top_k_rows(rows, [0], self.k)[0]
        return TokenTree(
            tokens, (ROOT,) * len(tokens), (None,) * len(tokens), (False,) * len(tokens)
        )

    def _threaded(
        self, branches: TokenTree, tree: TokenTree, hidden_layers: Sequence[int]
    ) -> Scores:
        """Main process and branches at the same time. They share the cache: each writes its own
        slots, and the branches read the newest token's keys of layers that it has left."""
        assert self.branch_thread is not None
        self.session.advance(branches, 0)  # gives them slots; from here on nothing moves or grows
        other = self.branch_thread.submit(self.session.advance, branches, self.depth - self.layer)
        try:
            scores: Scores = self.session.score(tree, hidden_layers)
        finally:
            other.result()  # nothing may be committed before; a failure there is one here
        return scores


class PpdDrafter(BaseDrafter):
    """Proposes nothing to verify. It tells the pipeline whether a token is to follow: behind the
    last one nothing is begun.
    """

    def __init__(self, pipeline: PipelinedTarget):
        self.pipeline = pipeline

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.pipeline.upcoming = (context, sampling) if max_draft_depth > 0 else None
        return NO_DRAFT


# ---------------------------------------------------------------------- the clock (section 4)


def count_layer_steps(calls: Sequence[ForwardRecord]) -> float:
    """Layer-steps of a round on k + 1 processors, from its forward log: the newest token up to
    layer dbar, then what is left of it beside the branches, each of which has a processor of its
    own."""
    alone, *beside = [call.row_layers / call.rows for call in calls]
    return alone + max(beside, default=0.0)


def expected_cost(depth: int, layer: int, k: int, match: Any, tokens: int) -> tuple[Any, Any]:
    """What the theorem says of so many tokens: (layer-steps on k + 1 processors, layer
    evaluations).

    >>> expected_cost(12, 8, 3, 0.5, 11)
    (112.0, 232.0)
    """
    saved, again = depth - layer, tokens - 1
    return depth * tokens - again * match * saved, depth * tokens + again * saved * (k - match)


def resolve_guess_layer(layer: int, depth: int, name: str = "the model") -> int:
    """The knob as a layer; 0 is two thirds of the depth. TinyspecError where the pipeline would
    need a third stage.

    >>> resolve_guess_layer(0, 12), resolve_guess_layer(6, 12)
    (8, 6)
    """
    least = (depth + 1) // 2
    if layer > depth:
        raise TinyspecError(
            f"layer {layer} is out of range: {name} has {depth}; ppd takes {least} to {depth}"
        )
    if 0 < layer < least:
        raise TinyspecError(
            f"layer {layer} is below half of the {depth} layers of {name}, where a branch would have to guess too: "
            f"ppd takes {least} to {depth}"
        )
    return layer or (2 * depth + 1) // 3


@technique(
    title="PPD: predictive pipelined decoding",
    summary="starts the next token mid-pass",
    paper="Yang et al. 2024, arXiv 2307.05908",
    family="early exit",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob(
            "layer",
            0,
            "behind which the next token is guessed; 0: two thirds of the depth",
            low=0,
            small=(0, 3),
        ),
        Knob("k", 3, "guesses that are begun with (the paper: 1, 3, 5)", low=1, small=(2, 1, 3)),
        Knob("threads", False, "run the guesses beside the newest token, in a thread of their own"),
    ),
)
def ppd(request: Request, *, layer: int, k: int, threads: bool) -> Decoder:
    """The target begins with its next token before the newest one is through."""
    session: Any = request.target
    model = session.model
    pipeline: Any = PipelinedTarget(
        session, resolve_guess_layer(layer, model.config.n_layers, model.name), k, threads
    )
    request.target = pipeline
    return request.decoder(PpdDrafter(pipeline), verify_tree)
