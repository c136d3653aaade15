"""LLMA (inference with reference): copy the next tokens from a text that the output repeats.

Paper: Yang et al. 2023, arXiv 2304.04487. Nothing is trained.

Idea. Answers often repeat what a reference says: a retrieved document, an earlier answer, the text
under revision. If the last n tokens also occur in a reference, the k tokens that follow there are
the draft. The target checks them in one forward pass, accepts those that agree, and adds one token.
After a mismatch a new match is looked for. Without a match the step is plain decoding. The prompt
is a reference too and, with `own`, so is the text as it grows.

    calls(N) = ceil(N / (k + 1))        target passes for N tokens that are copied whole

Every n-gram is indexed once; adding a token costs O(longest).

Guarantee: EXACT. The paper decodes greedily; a copied token is a point mass, so verification is
exact at any temperature.
Pitfall: searching the prompt alone (that is prompt lookup); building the index anew for each token.
Addition of ours: with `price` > 0 (off by default) a copied token is run only if its probability
to be accepted is at least `price` (speculative/lookup.py), so where copies lately failed the step
is plain decoding.
Tests: tests/speculative/test_llma.py (`copy_after_match` against the code that runs, on all short
texts; the calls of a text copied whole; a reference outside the prompt; the longest match; the
index).
Left out: nothing. The paper reports about 2x on LLaMA 7B to 30B with k about 15, our default; the
authors' scripts take n = 1 and k = 20. Which of several matches is copied (`which`) and how long a
match may be (`longest`) are ours, and so is the growing text as a reference (`own`).
"""

from collections.abc import Sequence

from tinyspec._core import NgramIndex
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.speculative.lookup import FIRST_PRIOR, PRICE_KNOB, AcceptanceTracker
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

OWN_TEXT = 0  # number of the request's own text in the index; references are 1, 2, ...


def copy_after_match(
    text: Sequence[int], references: Sequence[Sequence[int]], n: int, longest: int, k: int
) -> list[int]:
    """Return the k tokens that follow the longest match of the text's end (section 3).

    text        the prompt and the output so far; it is a reference too, the last of them
    references  texts to copy from
    n, longest  tokens of the shortest and of the longest match
    k           tokens to copy

    Of several matches of one length the last is taken. The decoder runs `LlmaDrafter`, which finds
    the same in an index. A test compares the two on all short texts.

    >>> copy_after_match([7, 1, 2], [[1, 2, 3, 4, 5]], n=1, longest=8, k=2)
    [3, 4]
    """
    for size in range(min(longest, len(text)), n - 1, -1):  # a long match is the better evidence
        match = list(text[len(text) - size :])
        for reference in reversed([*references, text]):
            for start in range(len(reference) - size - 1, -1, -1):
                if list(reference[start : start + size]) == match:
                    return list(reference[start + size : start + size + k])
    return []  # no match: a plain decoding step


class LlmaDrafter(BaseDrafter):
    """Propose what followed the longest match of the text's end in any text.

    n, longest  tokens of the shortest and of the longest match
    k           tokens copied in a round
    which       occurrence to copy from: "first", "last" or "frequent"
    own         whether the text as it grows is a reference too
    price       least probability to be accepted of a token that is run; 0: all are run
    """

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
        self.n, self.longest, self.k, self.which, self.own = n, longest, k, which, own
        self.trust = AcceptanceTracker(price)
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
        k = min(self.k, max_draft_depth)
        copied = self.index.lookup(suffix, k, self.longest, self.n, self.which)
        match = self._match_length(suffix) if copied else 1
        n = len(copied)
        return self.trust.select_tree(copied, range(-1, n - 1), [1.0] * n, [match] * n)

    def _match_length(self, suffix: Sequence[int]) -> int:
        """Return the length of the match, rounded down to a length whose acceptance is tracked."""
        if self.trust.price == 0:  # everything is run, whatever its chance
            return 1
        lengths = (n for n in FIRST_PRIOR if n <= self.longest)  # the longest first
        return next((n for n in lengths if self.index.lookup(suffix, 1, self.longest, n)), 1)

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)
        if self.own:
            self.index.append(OWN_TEXT, round.tokens)

    def rewind(self, length: int) -> None:
        if self.index.length(OWN_TEXT) > length:
            self.index.rewind(OWN_TEXT, length)

    def end(self) -> None:
        self.index.rewind(OWN_TEXT, 0)
        self.trust.reset()


@technique(
    title="LLMA: inference with reference",
    summary="copies spans of prompt and references",
    paper="Yang et al. 2023, arXiv 2304.04487",
    reported="about 2x, LLaMA (survey)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    copies=True,
    knobs=(
        Knob("n", 1, "shortest match that is copied from, in tokens", low=1, high=64),
        Knob("k", 15, "tokens copied in a round", low=1, high=1024),
        Knob("longest", 8, "longest match that is looked for, in tokens", low=1, high=64),
        Knob("which", "last", "occurrence to copy from", choices=("first", "last", "frequent")),
        Knob("own", True, "whether the text as it grows is a reference too", choices=(True, False)),
        PRICE_KNOB,
    ),
)
def llma(
    request: Request, *, n: int, k: int, longest: int, which: str, own: bool, price: float
) -> Decoder:
    """Return a decoder that copies from the prompt and the references."""
    return request.decoder(
        LlmaDrafter(request.references, n, max(n, longest), k, which, own, price), verify_tree
    )
