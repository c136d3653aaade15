"""Use a decoder as the drafter of another: a cascade is a decoder inside a decoder.

The inner decoder is exact for its own model. So its tokens follow that model's distributions
(`Round.output_probs`), and these are what the tokens declare as q: the distributions of the middle
model, not those of the smaller model that drafts for it. A draft may end at any token of an inner
round, because whether a token is there depends only on the tokens before it.

`NestedDrafter.write` does it in two steps: give the inner decoder the outer text, then let it run
until there are enough tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict
from tinyspec.lm.forward import Scores
from tinyspec.tree import Probs, TokenTree

UNSEEN = Scores(torch.empty(0, 0), torch.empty(0, 0, 0), ())


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens the two texts have in common at the beginning.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(at for at in range(n) if one[at] != other[at])


def external_round(tokens: Sequence[int]) -> Round:
    """Return a round without scores, which tells a drafter of tokens that came from outside."""
    return Round(TokenTree(), UNSEEN, Verdict((), None), tuple(tokens), ())


class NestedDrafter(BaseDrafter):
    """Let a decoder write `gamma` tokens in each round, and declare their distributions.

    decoder    the inner decoder. Its forward log is the outer request's. Its stopping criteria name
               the tokens that end a text, and nothing else.
    is_view    whether its target is a view of the outer target's session, so that the outer decoder
               commits the text
    positions  tokens that its target's context holds (None: no limit); a longer text gets no draft
    is_exact   whether its verifier is exact; if not, its tokens are proposed as point masses
    """

    def __init__(
        self,
        decoder: Decoder,
        gamma: int = 1,
        *,
        is_view: bool = False,
        positions: int | None = None,
        is_exact: bool = True,
    ):
        self.decoder, self.gamma, self.is_view = decoder, gamma, is_view
        self.positions, self.is_exact, self.ends = positions, is_exact, decoder.stop
        self.text: list[int] = []  # of the outer decoder

    # ------------------------------ the inner text

    def follow(self, text: Sequence[int]) -> None:
        """Set the inner decoder's text. The common beginning is kept, and nothing is run yet.

        A text longer than the context of the inner model is ignored.
        """
        if self.positions is not None and len(text) > self.positions:
            return
        inner = self.decoder
        shared = common_prefix_length(inner.context, text)
        new = list(text[shared:])
        if self.is_view:
            inner.target.end()  # back to the text of the outer session
        else:
            inner.target.rewind(shared)
            inner.target.append(new)
        inner.drafter.rewind(shared)
        inner.drafter.observe(external_round(new))
        inner.context[shared:] = new
        inner.start, inner.finished, inner.stop = len(inner.context), None, self.ends

    def write(
        self, text: Sequence[int], n: int, sampling: SamplingParams, rng: RandomSource
    ) -> tuple[list[int], list[Probs | None]]:
        """Return at most n tokens to continue the text, each with its distribution.

        There are fewer than n if the text ends, or the context.
        """
        tokens, dists = list[int](), list[Probs | None]()
        n = n if self.positions is None else min(n, self.positions - len(text))
        if n < 1:
            return tokens, dists
        self.follow(text)
        inner = self.decoder
        # `rng` is new in each round, so the inner rounds count from 0 again. The limit of n tokens
        # keeps inner drafts from being longer than what is wanted.
        inner.sampling, inner.rounds, inner.stop = sampling, 0, replace(self.ends, max_new_tokens=n)
        for round in inner.run(rng):
            tokens += round.tokens
            dists += round.output_probs if self.is_exact else [None] * len(round.tokens)
        return tokens, dists

    # ------------------------------ the outer drafter

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        inner = self.decoder
        is_current = len(inner.context) == len(self.text)  # the text did not outgrow its context
        self.text.extend(tokens)
        if not is_current or (self.positions is not None and len(self.text) > self.positions):
            return
        seen = UNSEEN if self.is_view else inner.target.extend(tokens, inner.drafter.hidden_layers)
        inner.drafter.extend(tokens, seen)
        inner.context.extend(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return TokenTree.chain(
            *self.write(self.text, min(self.gamma, max_draft_depth), sampling, rng)
        )

    def observe(self, round: Round) -> None:
        self.text.extend(round.tokens)
        self.follow(self.text)

    def rewind(self, length: int) -> None:
        del self.text[length:]
        self.follow(self.text)

    def end(self) -> None:
        self.decoder.end()
        self.decoder.context.clear()
        self.text.clear()
