"""LLMA, inference with reference: where the text repeats something it has seen, copy on.

Yang et al. 2023, arXiv 2304.04487. If the last n tokens occur in a reference text, the k tokens
that follow there are the draft; the target checks them in one pass, keeps what agrees and adds a
token of its own; after a mismatch a new match is sought. With no match the step is plain decoding.
What makes it LLMA and not prompt lookup: references are *texts beside the prompt* (retrieved
documents, earlier answers, the draft under revision); the prompt, and with `own` the text as it
grows, count as further references. All their n-grams are indexed once; a token costs O(n) to add.
Nothing is trained.

Guarantee: EXACT. The paper decodes greedily; a copied token is a point mass, so the walk is exact
at any temperature.
Tested in tests/speculative/test_llma.py: a text copied whole takes ceil(N / (k + 1)) calls; a
reference outside the prompt is used; longest match first; the index is never rebuilt. Off by
itself: of the copy, the tokens are run that are expected to hold with at least `price`
(speculative/lookup.py), so where copies lately failed the step is plain decoding. `price` 0 is the
paper's rule: all k are run.
Left out: nothing. The paper reports about 2x on LLaMA 7B-30B with k about 15 (retrieval, cache and
multi-turn settings).
"""

from collections.abc import Sequence

from tinyspec._core import NgramIndex
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.feed import Scores
from tinyspec.speculative.lookup import FIRST, AcceptanceTracker
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

OWN_TEXT = 0  # the text of the request in the index; references are 1, 2, ...


class LlmaDrafter(BaseDrafter):
    """Proposes what followed the longest recent suffix in any of the texts."""

    def __init__(
        self,
        references: Sequence[Sequence[int]],
        n: int,
        longest: int,
        k: int,
        which: str,
        own: bool,
        price: float = 0.0,
    ):
        self.n, self.longest, self.k, self.which, self.own, self.trust = (
            n,
            longest,
            k,
            which,
            own,
            AcceptanceTracker(price),
        )
        self.index = NgramIndex(longest)
        for text, tokens in enumerate(references, start=OWN_TEXT + 1):
            self.index.append(text, tokens)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.index.append(OWN_TEXT, tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        suffix = context[-self.longest :]
        found = self.index.lookup(
            suffix, min(self.k, max_draft_depth), self.longest, self.n, self.which
        )
        match = (
            next(
                (n for n in self._match_lengths if self.index.lookup(suffix, 1, self.longest, n)), 1
            )
            if found
            else 1
        )
        n = len(found)
        return self.trust.tree(found, range(-1, n - 1), [1.0] * n, [match] * n)

    @property
    def _match_lengths(self) -> list[int]:
        """Lengths of a match that are told apart, the longest first."""
        return [n for n in FIRST if n <= self.longest] if self.trust.price > 0 else []

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)
        if self.own:
            self.index.append(OWN_TEXT, round.tokens)

    def rewind(self, length: int) -> None:
        if self.index.length(OWN_TEXT) > length:
            self.index.rewind(OWN_TEXT, length)

    def end(self) -> None:
        self.index.rewind(OWN_TEXT, 0)
        self.trust.forget()


@technique(
    title="LLMA: inference with reference",
    summary="copies spans of prompt and references",
    paper="Yang et al. 2023, arXiv 2304.04487",
    family="integrated",
    guarantee=Guarantee.EXACT,
    copies=True,
    knobs=(
        Knob("n", 1, "shortest match that is copied from, in tokens", low=1),
        Knob("k", 15, "tokens copied in a round", low=1),
        Knob("longest", 8, "longest match that is looked for, in tokens", low=1),
        Knob("which", "last", "occurrence to copy from", choices=("first", "last", "frequent")),
        Knob("own", True, "whether the text as it grows is a reference too", choices=(True, False)),
        Knob(
            "price",
            0.25,
            "least chance to hold of a token that is run; 0: all",
            low=0.0,
            high=1.0,
            small=(0.0, 0.25),
        ),
    ),
)
def llma(
    request: Request, *, n: int, k: int, longest: int, which: str, own: bool, price: float
) -> Decoder:
    """Copy from the prompt and the references."""
    return request.decoder(
        LlmaDrafter(request.references, n, max(n, longest), k, which, own, price), verify_tree
    )
