"""A small model as the drafter: it samples a chain under the same settings as the target."""

from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Round, Target, TargetProbs
from tinyspec.decoding.device import apply_sampling_to_rows
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import DEVICE, UNCHANGED, SamplingParams, kernels_of
from tinyspec.lm.forward import Scores
from tinyspec.lm.session import Session
from tinyspec.tree import Probs, TokenTree


class IncrementalProbs(TargetProbs):
    """Distributions along a chain whose logits arrive one by one; only the newest is read."""

    def __init__(self, sampling: SamplingParams, context: Sequence[int]):
        no_scores: Any = Scores((), (), ())  # type: ignore[arg-type]
        super().__init__(no_scores, sampling, context, TokenTree())
        self._logits: list[Any] = []
        self.past = list(context)

    def extend(self, logits: Any, tokens: Sequence[int]) -> None:
        """Append the logits after one more token. The first ones follow the text."""
        self._logits.append(logits)
        self.past += tokens

    def __getitem__(self, node: int) -> Probs:
        logits = self.logits_at(node)
        if kernels_of(logits) is not DEVICE:
            return super().__getitem__(node)
        # Logits that define no distribution are found when a token is drawn: one wait, not two.
        return apply_sampling_to_rows(logits[None], [self.past], *self.sampling.as_floats())[0][0]

    def _history(self, node: int, sampling: SamplingParams) -> Sequence[int]:
        return self.past


class ModelDrafter(BaseDrafter):
    """Sample `gamma` tokens one by one from a model, and declare each distribution.

    At temperature 0 the declared distribution is None, a point mass. The draft model has its own
    session, so each draft token costs one position, and accepted tokens are not run again. After a
    fully accepted draft the last token has not been run: it is run with the next proposal. If the
    text outgrows the draft's context of `positions` tokens (None: no limit), nothing is proposed.
    """

    def __init__(
        self,
        model: Target,
        gamma: int,
        ends: frozenset[int] = frozenset(),
        positions: int | None = None,
    ):
        self.model, self.gamma, self.ends, self.positions = model, gamma, ends, positions
        self.length = 0  # tokens of the draft's own text
        self.left_behind = False  # the text no longer fits into its context

    def _count(self, tokens: Sequence[int]) -> bool:
        """Count these tokens, and return whether they still fit into the draft's context."""
        fits = self.positions is None or self.length + len(tokens) <= self.positions
        self.left_behind = self.left_behind or not fits
        self.length += 0 if self.left_behind else len(tokens)
        return not self.left_behind

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        if self._count(tokens):
            self.model.extend(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, draft_probs = list[int](), list[Probs | None]()
        most = min(self.gamma, max_draft_depth)
        if self.positions is not None:
            most = min(most, self.positions - self.length)

        def choose(probs: TargetProbs) -> int | None:
            """Sample a token after the last one. Return it if another may follow, else None."""
            tip = len(tokens) - 1
            if not self.should_draft(probs, tip):
                return None
            q, token = None, probs.greedy_token(tip)
            if token is None:
                q = probs[tip]
                token = rng.draw(q)
            tokens.append(token)
            draft_probs.append(q)
            return None if self.should_stop(probs, tip, token) or len(tokens) == most else token

        along = IncrementalProbs(sampling, context)

        def choose_next(logits: Any) -> int | None:
            along.extend(logits, tokens[-1:])
            return choose(along)

        if self.left_behind or most <= 0:
            return TokenTree()
        if not (isinstance(self.model, Session) and self.model.draft_chain(most, choose_next)):
            tree = TokenTree()
            while choose(TargetProbs(self.model.score(tree), sampling, context, tree)) is not None:
                tree = TokenTree.chain(tokens, draft_probs)
        return TokenTree.chain(tokens, draft_probs)

    def should_draft(self, probs: TargetProbs, tip: int) -> bool:
        """Return whether to sample a token after the node `tip`. Asked before it is sampled."""
        return True

    def should_stop(self, probs: TargetProbs, tip: int, token: int) -> bool:
        """Return whether the token just sampled after `tip` is the draft's last.

        The token stays in the draft in either case: if its presence depended on its value, it would
        not follow its declared distribution.
        """
        return token in self.ends  # nothing comes after the end of a text

    def observe(self, round: Round) -> None:
        if self._count(round.tokens):
            self.model.append(round.tokens)

    def rewind(self, length: int) -> None:
        if length <= self.length:  # back inside its own text
            self.model.rewind(length)
            self.length, self.left_behind = length, False

    def end(self) -> None:
        self.model.end()
        self.length, self.left_behind = 0, False


class SharedSessionDrafter(ModelDrafter):
    """Draft on a session that another owner extends: a view, or a member of a `JointTarget`."""

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        return None

    observe, rewind, end = BaseDrafter.observe, BaseDrafter.rewind, BaseDrafter.end


def highest_probability(probs: TargetProbs, tip: int) -> Any:
    """Return the draft's highest probability before sampling settings: its confidence."""
    q = probs.probs_under(tip, UNCHANGED)
    return kernels_of(q).as_vector(q).max()
