"""REST, retrieval-based speculative decoding: where a corpus once said this, guess how it went on.

He et al., NAACL 2024, arXiv 2311.08252. A datastore holds the ids of many texts and a suffix array
over them. The last n tokens of the text are looked up, n from `longest` down to `shortest`, and the
first n that occurs decides. What followed at each of its places (the next `length` tokens, within
the document) is counted into a trie, in which a node weighs as many places as agree so far; the
`nodes` heaviest are the draft, and since a parent weighs at least what its child does, they are a
tree. One pass of the target verifies all branches. With no match the step is plain decoding.
Nothing is trained.

What makes it REST and not an n-gram table: a match may be of any length, and several continuations
compete by their weight. `tinyspec data datastore STORE FILES...` builds the file, which is mapped
and not read: opening it costs the same for 10^4 tokens and for 10^7, a look-up the logarithm. It
names its tokenizer, and a model with another one refuses it. Texts given as references are indexed
in memory; where there are both, the longer match decides, and the file's where they are equal.

Guarantee: EXACT. Continuations are point masses, so the walk is exact at any temperature. (The
released code draws once a path and draws anew after a miss, which is biased: p = (.5, .3, .2) with
both children 0 and 1 gives (.675, .255, .07).)
Tested in tests/speculative/test_rest.py: the longest match decides; the tree is the heaviest by
brute force and closed; the law with two competing continuations; a datastore of another tokenizer
is refused. tests/core/test_suffixes.py holds the array to a search through the text. Off by itself:
of the tree, the guesses are run that are expected to hold with at least `price`
(speculative/lookup.py), so where matches lately failed the step is plain decoding too, and a glance at
few places tells that; after glances in vain only every fourth round looks at all. `price` 0 is the
paper's rule: the whole tree is run.
Left out: the arbitrary token that the released code verifies where nothing matches. Of more than
`matches` places evenly spaced ones are read, not the first.
"""

from collections.abc import Sequence

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.speculative.drafting.datastore import HOW, Datastore, Found, indexed, opened
from tinyspec.speculative.lookup import NOTHING, AcceptanceTracker
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree

GLANCE = 16  # places and guesses of the look that decides whether a full one pays


class RestDrafter(BaseDrafter):
    """Proposes the heaviest continuations of the longest match in any of the stores."""

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
        self.length, self.matches, self.nodes, self.trust = (
            length,
            matches,
            nodes,
            AcceptanceTracker(price),
        )

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.trust.skip_this_round(max_draft_depth):
            return NOTHING
        if self.trust.price > 0:  # a glance: is a draft worth its while?
            found = self._longest(context, 1, min(self.matches, GLANCE), min(self.nodes, GLANCE))
            if not found.match or not self.trust.worth(found.weights, found.match):
                return self.trust.record_without_running(
                    found.tokens, found.parents, [found.match] * len(found.tokens)
                )
        found = self._longest(context, min(self.length, max_draft_depth), self.matches, self.nodes)
        return self.trust.tree(
            found.tokens, found.parents, found.weights, [found.match] * len(found.tokens)
        )

    def _longest(self, context: Sequence[int], *limits: int) -> Found:
        """What the store with the longest match found."""
        found = (
            store.search(context, self.shortest, self.longest, *limits) for store in self.stores
        )
        return max(found, key=lambda one: one.match)

    def observe(self, round: Round) -> None:
        self.trust.learn(round.tokens)

    def end(self) -> None:
        self.trust.forget()


@technique(
    title="REST: retrieval-based speculative decoding",
    summary="copies from a datastore of texts",
    paper="He et al. 2024, arXiv 2311.08252",
    family="drafting",
    guarantee=Guarantee.EXACT,
    copies=True,
    knobs=(
        Knob("datastore", "", "a file that `tinyspec data datastore` built"),
        Knob("longest", 16, "longest match that is looked for, in tokens", low=1, high=31),
        Knob("shortest", 2, "shortest match that counts, in tokens", low=1, high=31, small=(1, 2)),
        Knob("nodes", 64, "nodes of the draft: the heaviest", low=1, high=1024, small=(3, 1)),
        Knob("length", 10, "tokens read behind a match", low=1, high=31),
        Knob("matches", 5000, "places that are read", low=1, small=(9, 1)),
        Knob(
            "price",
            0.25,
            "least chance to hold of a guess that is run; 0: all",
            low=0.0,
            high=1.0,
            small=(0.0, 0.25),
        ),
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
    """Retrieve from a datastore's file, from the references, or from both."""
    if shortest > longest:
        raise TinyspecError(
            f"no match is from {shortest} to {longest} tokens long: lower shortest, or raise longest"
        )
    stores = [opened(str(datastore))] if datastore else []
    for store in stores:
        store.check(getattr(request.target, "model", None))
    if request.references:
        stores.append(indexed(request.references))
    if not stores:
        raise TinyspecError(
            f"rest has no datastore: {HOW} and pass --datastore STORE, or give texts by --reference FILE"
        )
    return request.decoder(
        RestDrafter(stores, shortest, longest, length, matches, nodes, price), verify_tree
    )
