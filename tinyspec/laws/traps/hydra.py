"""Hydra (Ankner et al. 2024): heads that read the draft, and a layer that stands before them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tinyspec.decoding.rng import Seeded
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.hydra import HydraDrafter, HydraSettings, head_logits
from tinyspec.technique import Card, find_technique

PLANTED = medusa_traps.PLANTED
PLACED = feature_laws.DRAFT_OF_TRAINING
OF_TEXT = feature_laws.DRAFT_OF_TEXT
DEPENDENT = "candidates depend on the draft tokens before them"
PLAIN = HydraSettings(heads=3)
PLUS = HydraSettings(heads=3, layers=2, prefix=True)


def hydra_of(settings: HydraSettings) -> Card:
    """Return the card, with the heads of these settings as those that the laws make."""
    hydra = find_technique("hydra")
    assert hydra.trained is not None
    return replace(hydra, trained=hydra.trained._replace(small=settings))


def random_hydra(settings: HydraSettings, seed: int, vocabulary: int) -> Model:
    """Return a small network with random heads."""
    return add_random_head(small_network(seed, vocabulary), hydra_of(settings), seed)


def fitted_hydra_drafts_the_text(build: Build) -> Evidence:
    """Check that heads that their loss has fitted to a text draft it, after every part of it."""
    return medusa_traps.fitted_heads_draft_the_text(build, "hydra")


def check_hydra_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads, with and without a layer before them."""
    make = partial(build, nodes=9)
    plain = feature_laws.check_random_heads(hydra_of(PLAIN), make)
    return plain + feature_laws.check_random_heads(hydra_of(PLUS), make)


def check_hydra_text(build: Build) -> Evidence:
    """Check law F1 on random heads with a layer before them: rows of the past leave no trace."""
    make = partial(build, nodes=9)
    return feature_laws.draft_is_function_of_text(make, partial(random_hydra, PLUS))


@collect_evidence(DEPENDENT)
def children_depend_on_their_parents(build: Build) -> Iterator[int]:
    """Check that somewhere two siblings have children of other tokens, for both kinds of heads."""
    for settings in (PLAIN, PLUS):
        differing, seen = 0, 0
        for seed in range(8):
            decoder = begin_decoder(build, [random_hydra(settings, seed, 6)], (0, 1, 2), nodes=12)
            tree = decoder.drafter.propose(decoder.context, 2, decoder.sampling, Seeded(0))
            first = {  # the likeliest child comes first
                parent: tree.tokens[tree.parents.index(parent)] for parent in {*tree.parents}
            }
            below = {token for parent, token in first.items() if parent >= 0}
            differing, seen = differing + (len(below) > 1), seen + len(first)
        if not differing:
            accuse(DEPENDENT, "children of other tokens", "the same ones", prefix=settings.prefix)
        yield seen


TRAPS = [
    Trap(PLANTED, fitted_hydra_drafts_the_text, card("hydra")),
    Trap(PLACED, check_hydra_drafts, card("hydra")),
    Trap(OF_TEXT, check_hydra_text, card("hydra")),
    Trap(DEPENDENT, children_depend_on_their_parents, card("hydra")),
]

_hydra = partial(Toy, technique="hydra")

TOYS = [
    _hydra(
        "heads trained on the embeddings one place early",
        "shift_tokens(ids, k) for k in range(1, depth + 2)",
        "shift_tokens(ids, k) for k in range(depth + 1)",
        head_logits,
        law=PLANTED,
    ),
    _hydra(
        "heads that read the draft in another order",
        "torch.cat((read[tree.parents[node]], e))",
        "torch.cat((read[tree.parents[node]][: -len(e)], e, read[tree.parents[node]][-len(e) :]))",
        HydraDrafter.propose,
        law=PLACED,
    ),
    _hydra(
        "a layer whose rows outlive a request",
        "self._cut_prefix(len(self.states))",
        "pass",
        HydraDrafter.rewind,
        law=OF_TEXT,
        also=(Patch(HydraDrafter.end, "self._cut_prefix(0)", "pass"),),
    ),
    _hydra(
        "heads that do not see each other, as Medusa's",
        "[tree.tokens[node] for node in lower]",
        "[context[-1]] * len(lower)",
        HydraDrafter.propose,
        law=DEPENDENT,
    ),
]
