"""REST, retrieval-based speculative decoding: draft what followed similar text in a corpus.

Paper: He et al., NAACL 2024, arXiv 2311.08252. Nothing is trained.

Idea. A datastore holds the token ids of many texts and a suffix array over them. The last n tokens
of the text are looked up, n from `longest` down to `shortest`; the first n that occurs decides.
What followed at each of its places (the next `length` tokens, within the document) is counted into
a trie, and the `nodes` heaviest nodes are the draft.

    weight(path) = number of places after which the text goes on with this path

A parent weighs at least what its child does, so the heaviest nodes form a tree. The target verifies
all branches in one forward pass. Without a match the step is plain decoding.

Guarantee: EXACT. Draft tokens are point masses, so verification is exact at any temperature.
Pitfall: the released code samples once per path, and again after a mismatch. That is biased: for
p = (.5, .3, .2) with children 0 and 1 the output is (.675, .255, .07). A dictionary of n-grams with
one continuation each is not REST: a match may have any length, and continuations compete.
Tests: tests/speculative/test_rest.py (`retrieve_continuations` against the code that runs; the
longest match decides; the heaviest tree by brute force; the distribution with two competing
continuations; a datastore of another tokenizer is an error). tests/core/test_suffixes.py holds the
suffix array to a search through the text.
Additions of ours: with `price` > 0 (off by default) only the draft tokens that are expected to be
accepted with at least that probability are run (speculative/lookup.py), so the step is plain
decoding if matches lately failed. A lookup at a few places decides that. After eight lookups
without such a token only every fourth round looks up. `tinyspec data datastore STORE FILES...`
builds a file, which is mapped and not read: opening it takes the same time for 10^4 tokens and for
10^7. It names its tokenizer. References are indexed in memory. The store with the longer match
decides; in a tie the file.
Left out: the arbitrary token that the released code verifies if nothing matches. Of more than
`matches` places, evenly spaced ones are read, not the first.
"""

from collections import Counter
from collections.abc import Sequence

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.speculative.drafting.datastore import (
    HOW,
    Continuations,
    Datastore,
    index_texts,
    open_datastore,
)
from tinyspec.speculative.lookup import PRICE_KNOB, AcceptanceTracker
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

CHEAP_LOOKUP = 16  # places and nodes of the lookup that decides whether to make a full one


def retrieve_continuations(
    documents: Sequence[Sequence[int]],
    text: Sequence[int],
    shortest: int,
    longest: int,
    length: int,
    nodes: int,
) -> list[tuple[int, ...]]:
    """Return the paths of the draft tree, the heaviest first; of equals the shallower first.

    documents  token ids, searched from end to end; the decoder searches a suffix array instead
    shortest, longest  tokens of a match
    length     tokens read after a match

    A test holds `RestDrafter` to it.

    >>> retrieve_continuations([[5, 6, 1, 5, 6, 2, 5, 6, 1]], [9, 5, 6], 1, 16, 2, 3)
    [(1,), (2,), (1, 5)]
    """
    for n in range(min(longest, len(text)), shortest - 1, -1):
        weight: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            for end in range(n, len(document)):
                if tuple(document[end - n : end]) == tuple(text[-n:]):
                    following = tuple(document[end : end + length])
                    weight.update(following[:i] for i in range(1, len(following) + 1))
        if weight:  # the longest match decides
            return sorted(weight, key=lambda path: (-weight[path], len(path), path))[:nodes]
    return []


class RestDrafter(BaseDrafter):
    """Propose the heaviest continuations of the longest match in any of the stores."""

    def __init__(
        self,
        stores: Sequence[Datastore],
        shortest: int,
        longest: int,
        length: int,
        matches: int,
        nodes: int,
        price: float,
    ):
        self.stores, self.shortest, self.longest = stores, shortest, longest
        self.length, self.matches, self.nodes = length, matches, nodes
        self.trust = AcceptanceTracker(price)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.trust.should_skip_round(max_draft_depth):
            return TokenTree()
        if self.trust.price > 0:  # a cheap lookup tells whether a full one is worth its time
            found = self._longest(
                context, 1, min(self.matches, CHEAP_LOOKUP), min(self.nodes, CHEAP_LOOKUP)
            )
            if not found.match or not self.trust.is_worth_running(found.weights, found.match):
                return self.trust.remember_lookup(
                    found.tokens, found.parents, [found.match] * len(found.tokens)
                )
        found = self._longest(context, min(self.length, max_draft_depth), self.matches, self.nodes)
        return self.trust.select_tree(
            found.tokens, found.parents, found.weights, [found.match] * len(found.tokens)
        )

    def _longest(self, context: Sequence[int], *limits: int) -> Continuations:
        """Return what the store with the longest match found."""
        found = (
            store.search(context, self.shortest, self.longest, *limits) for store in self.stores
        )
        return max(found, key=lambda one: one.match)

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)

    def end(self) -> None:
        self.trust.reset()


@technique(
    title="REST: retrieval-based speculative decoding",
    summary="copies from a datastore of texts",
    paper="He et al. 2024, arXiv 2311.08252",
    reported="1.62x to 1.77x, Vicuna, MT-Bench (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    copies=True,
    knobs=(
        Knob("datastore", "", "a file that `tinyspec data datastore` built"),
        Knob("longest", 16, "longest match that is looked for, in tokens", low=1, high=31),
        Knob("shortest", 2, "shortest match that counts, in tokens", low=1, high=31, small=(1, 2)),
        Knob("nodes", 64, "nodes of the draft: the heaviest", low=1, high=1024, small=(3, 1)),
        Knob("length", 10, "tokens read after a match", low=1, high=31),
        Knob("matches", 5000, "places that are read", low=1, high=1_000_000, small=(9, 1)),
        PRICE_KNOB,
    ),
)
def rest(
    request: Request,
    *,
    datastore: str,
    longest: int,
    shortest: int,
    nodes: int,
    length: int,
    matches: int,
    price: float,
) -> Decoder:
    """Return a decoder that retrieves from a datastore's file, from the references, or both."""
    if shortest > longest:
        raise TinyspecError(
            f"no match is from {shortest} to {longest} tokens long: lower shortest, or raise "
            "longest"
        )
    stores = [open_datastore(str(datastore))] if datastore else []
    model = getattr(request.target, "model", None)  # vLLM's runs elsewhere
    for store in stores if model is not None else ():
        store.check(model)
    if request.references:
        stores.append(index_texts(request.references))
    if not stores:
        raise TinyspecError(
            f"rest has no datastore: {HOW} and pass --datastore STORE, or give texts by "
            "--reference FILE"
        )
    return request.decoder(
        RestDrafter(stores, shortest, longest, length, matches, nodes, price), verify_tree
    )
