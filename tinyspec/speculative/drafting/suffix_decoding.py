"""Suffix decoding: the longer the text agrees with what was said before, the further it is believed
to go on like it.

Oliaro et al., NeurIPS 2025, arXiv 2411.04975. Two suffix trees are kept: one over the prompt and
the output of the request, one over the outputs of all requests; every node knows how often it was
met. For every suffix of the text, p tokens long, that a tree knows, a draft tree is grown behind it
greedily: the frequency of a node among its siblings, multiplied along its path, is its D(N), the
chance that the text gets there; the leaf with the greatest is added next, up to MAX_SPEC(p) = alpha
p nodes. Of all these drafts, over both trees and all p, the one with the greatest sum of D(N), the
tokens it can hope for, is checked. So short or doubtful matches draft little and long certain ones
a lot, and nothing is trained.

What makes it that: the length of a draft adapts to its match, frequencies decide, and the best
draft need not be behind the longest match. LLMA copies k tokens behind the longest match, REST and
lookahead take a fixed number of guesses.

Guarantee: EXACT. A guess is a point mass, so the walk is exact at any temperature, whatever the
trees hold.
Tested in tests/speculative/test_suffix_decoding.py: the draft is the best of all by brute force;
its size is at most alpha p; both trees serve; a second request is faster than the first.
State: outputs outlive the request (`persistent`), one tree a model, for as long as the model lives;
in a batch, where a row must equal the row run alone, each request has its own. Above temperature 0
the text of a seed depends on what is known. Off by itself: of the draft, the guesses are run that
are expected to hold with at least `price` (speculative/lookup.py), so with no match, or where matches
lately failed, the step is plain decoding. `price` 0 is the paper's rule: the whole draft is run.
Left out: the hybrid with a draft model, used where the best sum is small. The trees are bounded:
`depth` tokens for match and draft together, `bound` nodes for outputs (then counts are halved); the
paper lets them grow, its code bounds the depth too.
"""

from collections.abc import Sequence
from itertools import count

from tinyspec._core import Forest
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.speculative.lookup import (
    NOTHING,
    OUTPUTS,
    AcceptanceTracker,
    LookupDraft,
    Remembered,
    memory,
)
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree


class SuffixDecodingDrafter(Remembered):
    """Proposes the best draft behind any suffix of the text, from either tree.

    The request's own tree holds its whole text, prompt and output in one: `text` is its number
    there.
    """

    def __init__(
        self,
        forest: Forest,
        numbers: "count[int]",
        alpha: float,
        most: int,
        floor: float,
        price: float,
    ):
        super().__init__(forest, numbers)
        self.alpha, self.most, self.floor, self.trust = alpha, most, floor, AcceptanceTracker(price)
        self.text = forest.open(self.own)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.settle()
        self.forest.append(self.text, tokens)
        self.length += len(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return (
            NOTHING
            if self.trust.skip_this_round(max_draft_depth)
            else self.trust.tree(*self.look(context, max_draft_depth))
        )

    def look(self, context: Sequence[int], max_draft_depth: int) -> LookupDraft:
        """The best draft: its tokens, parents, D(N), and of each node how long the match is that it
        stands behind.
        """
        self.settle()
        suffix, most = context[-self.forest.depth :], self.most
        found: LookupDraft = self.forest.best(
            (self.own, OUTPUTS), suffix, self.alpha, most, max_draft_depth, self.floor
        )
        return found

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)
        self.fresh += round.tokens

    def settle(self) -> None:
        self.forest.append(self.text, self.fresh)
        super().settle()

    def rewind(self, length: int) -> None:
        self.settle()
        self.forest.rewind(self.text, min(length, self.forest.length(self.text)))
        super().rewind(length)

    def end(self) -> None:
        super().end()
        self.trust.forget()
        self.text = self.forest.open(self.own)


@technique(
    title="Suffix decoding",
    summary="copies what followed the same suffix",
    paper="Oliaro et al. 2024, arXiv 2411.04975",
    family="drafting",
    guarantee=Guarantee.EXACT,
    persistent=True,
    knobs=(
        Knob(
            "alpha",
            1.0,
            "guesses a token of the match: MAX_SPEC = alpha p",
            low=0.0,
            small=(1.0, 2.0),
        ),
        Knob("most", 32, "guesses checked in a round", low=1, high=1024, small=(3, 1)),
        Knob("floor", 0.1, "least D(N) of a guess", low=0.0, high=1.0, small=(0.0, 0.5)),
        Knob(
            "depth",
            32,
            "tokens of the trees' windows: match and draft together",
            low=2,
            high=1024,
            small=(5, 2),
        ),
        Knob("bound", 1 << 20, "nodes of the tree of outputs", low=1, small=(64, 2)),
        Knob(
            "price",
            0.25,
            "least chance to hold of a guess that is run; 0: all",
            low=0.0,
            high=1.0,
            small=(0.0, 0.25),
        ),
        Knob(
            "remember", True, "whether outputs are kept for later requests", choices=(True, False)
        ),
    ),
)
def suffix_decoding(
    request: Request,
    *,
    alpha: float,
    most: int,
    floor: float,
    depth: int,
    bound: int,
    price: float,
    remember: bool,
) -> Decoder:
    """Draft as far as the frequencies of earlier texts carry."""
    forest, numbers = memory(
        request.target, request.clock, "suffix_decoding", depth, bound, remember
    )
    return request.decoder(
        SuffixDecodingDrafter(forest, numbers, alpha, most, floor, price), verify_tree
    )
