"""A small model as the drafter: it samples a chain of tokens under the same settings as the
target.
"""

from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Round, Target, TargetProbs
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, is_exact
from tinyspec.lm.chain import draft_chain
from tinyspec.lm.feed import Scores
from tinyspec.lm.session import Session
from tinyspec.tree import Probs, TokenTree


class IncrementalProbs(TargetProbs):
    """The laws along a chain whose rows come one by one, in memory. Only the newest is asked
    for.
    """

    def __init__(self, sampling: SamplingParams, context: Sequence[int]):
        super().__init__(Scores((), (), ()), sampling, context, TokenTree())  # type: ignore[arg-type]  # nothing on a device
        self._logits: list[Any] = []
        self.past = list(context)

    def extend(self, row: Any, tokens: Sequence[int]) -> None:
        """One more row, behind one more token (the first: behind the text)."""
        self._logits.append(row)
        self.past += tokens

    def _history(self, node: int, sampling: SamplingParams) -> Sequence[int]:
        return self.past


class ModelDrafter(BaseDrafter):
    """Draws `gamma` tokens one after the other from a model and declares each law; at temperature 0
    it is a point mass, None.

    The text so far is kept in the draft's own session, so each proposed token costs one row, and
    tokens that the target accepted are not run again. Behind a fully accepted draft the last
    token's row is missing: it is run with the next proposal. Where the text outgrows the draft's
    own context of `positions` tokens (None: no limit), it proposes nothing and the target goes on
    alone.
    """

    def __init__(
        self,
        model: Target,
        gamma: int,
        ends: frozenset[int] = frozenset(),
        positions: int | None = None,
    ):
        self.model, self.gamma, self.ends, self.positions = model, gamma, ends, positions
        self.length = 0  # of the draft's own text
        self.left_behind = False  # the text went on beyond its context

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Whether the draft's text can go on with these tokens."""
        fits = self.positions is None or self.length + len(tokens) <= self.positions
        self.left_behind = self.left_behind or not fits
        self.length += 0 if self.left_behind else len(tokens)
        return not self.left_behind

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        if self._follow(tokens):
            self.model.extend(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, drawn = list[int](), list[Probs | None]()
        most = min(
            self.gamma if self.positions is None else min(self.gamma, self.positions - self.length),
            max_draft_depth,
        )

        def choose(laws: TargetProbs) -> int | None:
            """Draw behind the last token; the new one, while there is another to be drawn."""
            tip = len(tokens) - 1
            if not self.should_draft(laws, tip):
                return None
            law, token = None, laws.greedy_token(tip)
            if token is None:
                law = laws[tip]
                token = rng.draw(law)
            tokens.append(token)
            drawn.append(law)
            return None if self.should_stop(laws, tip, token) or len(tokens) == most else token

        along = IncrementalProbs(sampling, context)

        def behind(row: Any) -> int | None:
            along.extend(row, tokens[-1:])
            return choose(along)

        if self.left_behind or most <= 0:
            return TokenTree()
        if not (isinstance(self.model, Session) and draft_chain(self.model, most, behind)):
            tree = TokenTree()
            while choose(TargetProbs(self.model.score(tree), sampling, context, tree)) is not None:
                tree = TokenTree.chain(tokens, drawn)
        return TokenTree.chain(tokens, drawn)

    def should_draft(self, laws: TargetProbs, tip: int) -> bool:
        """Asked before a token is drawn behind the node `tip`: whether to draw one."""
        return True

    def should_stop(self, laws: TargetProbs, tip: int, token: int) -> bool:
        """Asked after a token was drawn behind `tip`: whether it is the draft's last. It stays in
        the draft either way, for a node whose presence depends on the token drawn at it would not
        have its declared law."""
        return token in self.ends  # nothing comes after the end of a text

    def observe(self, round: Round) -> None:
        if self._follow(round.tokens):
            self.model.append(round.tokens)

    def rewind(self, length: int) -> None:
        if length <= self.length:  # back inside its own text
            self.model.rewind(length)
            self.length, self.left_behind = length, False

    def end(self) -> None:
        self.model.end()
        self.length, self.left_behind = 0, False


class SharedSessionDrafter(ModelDrafter):
    """Drafts on a session whose text somebody else keeps: a view of the target's own, or a member
    of a joint target.
    """

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        return None

    def observe(self, round: Round) -> None:
        return None

    def rewind(self, length: int) -> None:
        return None

    def end(self) -> None:
        return None


def confidence(laws: TargetProbs, tip: int) -> Any:
    """The greatest probability of a draft's row, before the user's settings sharpen or cut it: how
    sure the model is.
    """
    row = laws.probs_under(tip, SamplingParams())
    return max(row) if is_exact(row) else row.max()
