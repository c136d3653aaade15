"""A decoder as the drafter of another: a cascade is a decoder inside a decoder.

The inner decoder is exact for its own model, so what it commits is distributed as that model's
rows, and these rows (`Round.laws`) are what its tokens declare: the middle's law, not that of the
smaller drafter inside. A round of the inner decoder may end at any token, for whether a token is
there depends on the tokens before it alone.

`write` is the whole of it: bring the inner text to the outer one, then step until so many tokens
stand.
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
    """How many tokens two texts begin with alike.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(at for at in range(n) if one[at] != other[at])


def external_round(tokens: Sequence[int]) -> Round:
    """The event by which an inner drafter hears of tokens that came from outside; it shows no
    rows.
    """
    return Round(TokenTree(), UNSEEN, Verdict((), None), tuple(tokens), ())


class NestedDrafter(BaseDrafter):
    """Lets a decoder make `gamma` tokens a round, and declares the laws it made them under.

    decoder    its target and drafter write to the outer request's forward log; its stop names the
               ends of a text, no more
    guest      its target is a view of the outer target's own session, whose text somebody else
               keeps
    positions  tokens its target's context holds (None: no limit); beyond, nothing is proposed
    truthful   whether its verifier is exact; if not, its tokens are proposed as point masses
    """

    def __init__(
        self,
        decoder: Decoder,
        gamma: int = 1,
        *,
        guest: bool = False,
        positions: int | None = None,
        truthful: bool = True,
    ):
        self.decoder, self.gamma, self.guest = decoder, gamma, guest
        self.positions, self.truthful, self.ends = positions, truthful, decoder.stop
        self.text: list[int] = []  # the outer one

    # ------------------------------ the inner text

    def follow(self, text: Sequence[int]) -> None:
        """Make this the inner decoder's text: what both begin with is kept, nothing is run yet."""
        if self.positions is not None and len(text) > self.positions:
            return
        inner = self.decoder
        kept = common_prefix_length(inner.context, text)
        fresh = list(text[kept:])
        if self.guest:
            inner.target.end()  # back to the text of the session it looks at
        else:
            inner.target.rewind(kept)
            inner.target.append(fresh)
        inner.drafter.rewind(kept)
        inner.drafter.observe(external_round(fresh))
        inner.context[kept:] = fresh
        inner.start, inner.finished, inner.stop = len(inner.context), None, self.ends

    def write(
        self, text: Sequence[int], n: int, sampling: SamplingParams, rng: RandomSource
    ) -> tuple[list[int], list[Probs | None]]:
        """At most n tokens that go on with this text, and the law of each; fewer at an end of text
        or of the context.
        """
        tokens, laws = list[int](), list[Probs | None]()
        n = n if self.positions is None else min(n, self.positions - len(text))
        if n < 1:
            return tokens, laws
        self.follow(text)
        inner = self.decoder
        # the chance is new each round, so its rounds are counted anew; the budget keeps drafts from
        # running over it
        inner.sampling, inner.rounds, inner.stop = sampling, 0, replace(self.ends, max_new_tokens=n)
        for round in inner.run(rng):
            tokens += round.tokens
            laws += round.output_probs if self.truthful else [None] * len(round.tokens)
        return tokens, laws

    # ------------------------------ the outer drafter

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        inner = self.decoder
        abreast = len(inner.context) == len(self.text)  # it was not left behind
        self.text.extend(tokens)
        if not abreast or (self.positions is not None and len(self.text) > self.positions):
            return
        shown = UNSEEN if self.guest else inner.target.extend(tokens, inner.drafter.hidden_layers)
        inner.drafter.extend(tokens, shown)
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
