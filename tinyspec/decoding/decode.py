"""The loop that all methods share when they extend a text: draft, score, verify, commit.

Three parts can be exchanged. A `Drafter` proposes draft tokens. A `Target` scores them, and may run
less than the whole model. A `Verifier` decides which of them are accepted.

A `Decoder` can be rewound, so it can be the drafter of another decoder. If the verifier of the
inner decoder is exact, its tokens declare the distributions they were committed under.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tinyspec.decoding.device import apply_sampling_to_rows
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import DEVICE, UNCHANGED, SamplingParams, kernels_of
from tinyspec.decoding.stopping import Reason, StoppingCriteria
from tinyspec.decoding.verify import Verdict
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.tree import ROOT, Probs, TokenTree


class Target(Protocol):
    """The model whose distribution the output follows: a `Session`, a view, or a table.

    `extend` commits forced tokens and runs all but the last of them. `append` commits them and runs
    nothing yet.
    """

    @property
    def cache_exact(self) -> bool: ...
    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores: ...
    def append(self, tokens: Sequence[int]) -> None: ...
    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores: ...
    def commit(self, path: Sequence[int], next: int | None) -> None: ...
    def rewind(self, length: int) -> None: ...
    def end(self) -> None: ...


class TargetProbs:
    """Next-token distribution of the target at each node, computed lazily and cached.

    `target_probs[ROOT]` follows the newest committed token, `target_probs[node]` follows that node.
    Sampling settings see the node's own path as history, which repetition penalties need.
    """

    def __init__(
        self, scores: Scores, sampling: SamplingParams, context: Sequence[int], tree: TokenTree
    ):
        self.scores, self.sampling, self.context, self.tree = scores, sampling, context, tree
        self.kernels = kernels_of(scores.logits)
        self._probs: dict[int, Probs] = {}
        self._logits: Any = None
        self._block: tuple[Any, Any] | None = None

    def __getitem__(self, node: int) -> Probs:
        if node not in self._probs:
            block = self.block
            self._probs[node] = (
                self.probs_under(node, self.sampling) if block is None else block[0][node + 1]
            )
        return self._probs[node]

    @property
    def block(self) -> tuple[Any, Any] | None:
        """All distributions [n + 1, V] and the highest logits [n + 1] on a device; None on the CPU.

        A device computes all of them in the time of one, and the verifier waits for it only once.
        """
        if self._block is None and self.kernels is DEVICE:
            self._block = apply_sampling_to_rows(
                self.scores.logits, self.histories(), *self.sampling.as_floats()
            )
        return self._block

    def histories(self) -> list[Sequence[int]]:
        """Return the text up to each node, root first; without a penalty only the root's."""
        nodes = range(len(self.tree.tokens)) if self.sampling.repetition_penalty != 1.0 else ()
        return [self._history(node, self.sampling) for node in (ROOT, *nodes)]

    def greedy_token(self, node: int) -> int | None:
        """Return the greedy token after a node; None above temperature 0, and of Fractions."""
        return self.sampling.greedy_token(self.logits_at(node), self._history(node, self.sampling))

    def probs_under(self, node: int, sampling: SamplingParams) -> Probs:
        """Return the distribution after a node under other sampling settings."""
        return sampling.probs(self.logits_at(node), self._history(node, sampling))

    def _history(self, node: int, sampling: SamplingParams) -> Sequence[int]:
        if sampling.repetition_penalty == 1.0:
            return self.context
        return [*self.context, *self.tree.tokens_on(self.tree.path(node))]

    def logits_at(self, node: int) -> Any:
        """Return the logits [V] after a node as the model gave them."""
        if self._logits is None:
            self._logits = self.kernels.as_rows(self.scores.logits)
        return self._logits[node + 1]

    def ranking_scores(self, node: int) -> Any:
        """Return the logits [V] after a node, after the penalty: the order at temperature 0."""
        penalty = self.sampling.repetition_penalty
        if penalty == 1.0:
            return self.logits_at(node)
        return self.probs_under(node, SamplingParams(repetition_penalty=penalty))


class LazyProbs(Sequence[Probs]):
    """Distributions at some nodes, computed when they are read: greedy decoding needs none."""

    def __init__(self, target_probs: TargetProbs, nodes: Sequence[int]):
        self.target_probs, self.nodes = target_probs, nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self.target_probs[node] for node in self.nodes[at])
        return self.target_probs[self.nodes[at]]


class Round(NamedTuple):
    """What one round did, after the cut at a stop: for statistics, streaming, replay and drafters.

    tokens        [k] tokens committed in this round
    output_probs  [k] the distribution each of them follows
    calls         forward passes of the target in this round; draft_calls: those of the drafter
    truncated     how many tokens the verdict allowed and a stop cut off
    is_shared     its forward pass also served a round that was counted before: another stream's
    """

    tree: TokenTree
    scores: Scores
    verdict: Verdict
    tokens: tuple[int, ...]
    output_probs: Sequence[Probs]
    calls: tuple[ForwardRecord, ...] = ()
    draft_calls: tuple[ForwardRecord, ...] = ()
    truncated: int = 0
    is_shared: bool = False


class Drafter(Protocol):
    """Where draft tokens come from.

    hidden_layers  layers of the target whose output the drafter reads from `Round.scores.hidden`
    """

    hidden_layers: Sequence[int] = ()

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        """Take note of forced text; `scores.hidden` has the states of the positions run for it."""
        return None

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        """Return a tree of at most `max_draft_depth` levels. The empty tree is plain decoding."""
        return TokenTree()

    def observe(self, round: Round) -> None:
        """Take note of a finished round."""
        return None

    def rewind(self, length: int) -> None:
        """Forget the text after its first `length` tokens."""
        return None

    def end(self) -> None:
        """Forget the request."""
        return None


class Verifier(Protocol):
    def __call__(self, tree: TokenTree, p: TargetProbs, rng: RandomSource, /) -> Verdict: ...


class BaseDrafter(Drafter):
    """A drafter that proposes nothing: the base class of the others."""


class Decoder:
    """One request: a target, a drafter, a verifier, and the text they extend.

    positions    how many tokens the target's context holds; None: no limit
    forward_log  the list that the models of target and drafter write their forward passes to
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        *,
        sampling: SamplingParams | None = None,
        stop: StoppingCriteria | None = None,
        positions: int | None = None,
        forward_log: list[ForwardRecord] | None = None,
    ):
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.sampling = sampling or UNCHANGED
        self.stop = stop or StoppingCriteria()
        self.positions = positions
        self.forward_log: list[ForwardRecord] = [] if forward_log is None else forward_log
        self.context: list[int] = []
        self.start = 0  # where the new tokens begin
        self.rounds = 0  # counts steps and is never rewound: it keys the random streams
        self.finished: Reason | None = None

    @property
    def new(self) -> list[int]:
        """The tokens generated so far, without the prompt."""
        return self.context[self.start :]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append forced text: the prompt, or a correction. Stops and limits count from here on."""
        scores = self.target.extend(tokens, self.drafter.hidden_layers)
        self.drafter.extend(tokens, scores)
        self.begin([*self.context, *tokens])

    def begin(self, text: Sequence[int]) -> None:
        """Go on after a text that the target has. Stops and limits count from here on."""
        self.context = list(text)
        self.start = len(self.context)
        if not self.context:
            raise TinyspecError("the prompt is empty: give at least one token")
        left = self.stop.tokens_left(0, self._limit)
        self.finished = left[1] if left is not None and left[0] <= 0 else None

    @property
    def _limit(self) -> int | None:
        """How many new tokens fit into the context; None: no limit."""
        return None if self.positions is None else self.positions - self.start

    @property
    def max_draft_depth(self) -> int:
        """How deep a draft may be: one less than the tokens still wanted, as a round adds one."""
        left = self.stop.tokens_left(len(self.context) - self.start, self._limit)
        return 1 << 30 if left is None else max(left[0] - 1, 0)

    def step(self, rng: RandomSource) -> Round:
        """Run one round. Raises ValueError if the text is finished."""
        if self.finished:
            raise ValueError(f"the text is finished ({self.finished}): extend or rewind it first")
        passes_before = len(self.forward_log)

        # 1. Draft: propose a tree of candidate tokens. An empty tree is plain decoding.
        tree = self.drafter.propose(
            self.context, self.max_draft_depth, self.sampling, rng.split("draft", self.rounds)
        )
        passes_drafted = len(self.forward_log)

        # 2. Score: one forward pass of the target over the whole tree.
        scores = self.target.score(tree, self.drafter.hidden_layers)
        passes_scored = len(self.forward_log)
        # The distributions are computed when they are read, with the text as it is now: a penalty
        # needs a copy.
        history = self.context if self.sampling.repetition_penalty == 1.0 else tuple(self.context)
        target_probs = TargetProbs(scores, self.sampling, history, tree)

        # 3. Verify: accept a path, then add one recovered or bonus token.
        verdict = self.verifier(tree, target_probs, rng.split("verify", self.rounds))
        output_tokens = verdict.output_tokens(tree)
        if not output_tokens:
            raise RuntimeError("the verifier committed nothing: a round must add a token")

        # 4. Commit: cut at the first stop, roll back the cache, tell the drafter what happened.
        n_kept, self.finished = self.stop.cut(self.new, output_tokens, self._limit)
        verdict = verdict.cut(n_kept)
        self.target.commit(verdict.accepted, verdict.next)
        self.context.extend(output_tokens[:n_kept])
        self.rounds += 1
        round = Round(
            tree=tree,
            scores=scores,
            verdict=verdict,
            tokens=output_tokens[:n_kept],
            output_probs=LazyProbs(target_probs, (ROOT, *verdict.accepted)[:n_kept]),
            calls=tuple(self.forward_log[passes_drafted:passes_scored]),
            draft_calls=tuple(self.forward_log[passes_before:passes_drafted]),
            truncated=len(output_tokens) - n_kept,
        )
        self.drafter.observe(round)
        return round

    def run(self, rng: RandomSource) -> Iterator[Round]:
        """Run rounds until the text is finished, and yield each as it ends."""
        while not self.finished:
            yield self.step(rng)

    def rewind(self, length: int) -> None:
        """Forget the text after its first `length` tokens: a cascade's outer level rejected it."""
        self.target.rewind(length)
        self.drafter.rewind(length)
        del self.context[length:]
        self.start = min(self.start, length)
        self.finished = None

    def end(self) -> None:
        """End the request: target and drafter forget it."""
        self.target.end()
        self.drafter.end()
