"""EAGLE-3 (Li et al. 2025): three states, rows that are not ids, and training as it drafts.

And the format of the speculators package, in which a head has offsets for ids.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.laws.traps.eagle import CYCLE, TOKENS, reciting_target
from tinyspec.lm import head_formats
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.head_formats import convert_head, restore_head
from tinyspec.lm.heads import RANKS, TOKEN_MAP, HeadFile, add_head, head_weights
from tinyspec.lm.stack import UnrolledLayer
from tinyspec.speculative.drafting.eagle import EagleDrafter
from tinyspec.speculative.drafting.eagle3 import Eagle3Settings, eagle3_loss, feature_layers
from tinyspec.technique import Card, find_technique

PLANTED = "a head that is trained on its own outputs goes on from them"
PLACED = feature_laws.DRAFT_OF_TRAINING
THREE = "a low, a middle and a high layer are read"
FOREIGN = "a head in the speculators format drafts as it does in ours"

DRAFTED = 3  # as deep as the small settings train
SPARSE = (1, 3, 5, 7)  # tokens of a head, of 8: their offsets 1, 2, 3, 4 are tokens too


@collect_evidence(PLANTED)
def fitted_head_drafts_deep(build: Build) -> Iterator[int]:
    """Check that a head that its loss has fitted to its target's text drafts it, three deep."""
    for seed in (2, 3):
        target, text = reciting_target(seed)
        model = feature_laws.fit_head(find_technique("eagle3"), target, text, steps=120)
        for n in range(len(CYCLE), TOKENS - DRAFTED, 5):
            decoder = begin_decoder(build, [model], text[:n], width=1, depth=DRAFTED)
            sampling = decoder.sampling
            tree = decoder.drafter.propose(decoder.context, DRAFTED, sampling, Seeded(0))
            expected = text[n : n + DRAFTED]
            expect_equal(PLANTED, expected, tuple(tree.tokens), cycle=CYCLE, tokens=n)
            yield DRAFTED


def card_with_gaps(draft_vocab: int = 3) -> Card:
    """Return the card with small heads that cannot propose token 1, so that rows are not ids."""
    eagle3 = find_technique("eagle3")
    assert eagle3.trained is not None
    small = Eagle3Settings(draft_vocab=draft_vocab, steps=3)
    return replace(eagle3, trained=eagle3.trained._replace(small=small))


def check_eagle3_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads whose vocabulary has a gap, down to the fourth token."""
    make = partial(build, nodes=8, depth=4, width=2)
    return feature_laws.check_random_heads(card_with_gaps(), make)


@collect_evidence(THREE)
def three_layers_are_read(build: Build) -> Iterator[int]:
    """Check which layers a drafter asks for, by the depth of its target."""
    for n, expected in ((3, (2, 1, 0)), (8, (2, 4, 5)), (12, (2, 6, 9)), (30, (2, 15, 27))):
        network = add_random_head(small_network(1, layers=n), find_technique("eagle3"), 1)
        decoder = begin_decoder(build, [network], (0, 1))
        expect_equal(THREE, expected, tuple(decoder.drafter.hidden_layers), layers=n)
        yield 1


@collect_evidence(FOREIGN)
def foreign_head_drafts_alike(build: Build) -> Iterator[int]:
    """Check heads with gaps in their vocabulary, written to and read from the speculators format.

    The offsets are made here, by their definition: id minus row.
    """
    offsets = torch.tensor([token - row for row, token in enumerate(SPARSE)])
    settings = Eagle3Settings(draft_vocab=len(SPARSE), steps=3)
    for seed in (1, 2):
        network = small_network(seed, 8, layers=7)
        random = add_random_head(network, card_with_gaps(len(SPARSE)), seed)
        weights = {**head_weights(random, "eagle3"), TOKEN_MAP: torch.tensor(SPARSE)}
        check = embedding_checksum(network.weights["embed"])
        head = HeadFile("eagle3", network.name, check, vars(settings), {}, weights)
        layers = feature_layers(network.config, settings)
        values, written = convert_head("speculators", head, network, layers)
        expect_equal(FOREIGN, offsets.tolist(), written["d2t"].tolist(), tokens=SPARSE)
        theirs = {name: w for name, w in weights.items() if name not in (RANKS, TOKEN_MAP)}
        theirs["d2t"] = offsets
        read = restore_head("speculators", values, theirs, network, layers).weights
        ours, foreign = (add_head(network, "eagle3", w, vars(settings)) for w in (weights, read))
        for n in range(2, 8):
            text, drafts = tuple(7 * i % 8 for i in range(n)), list[tuple[int, ...]]()
            for model in (ours, foreign):
                decoder = begin_decoder(build, [model], text, nodes=6, depth=DRAFTED, width=2)
                sampling = decoder.sampling
                tree = decoder.drafter.propose(decoder.context, DRAFTED, sampling, Seeded(0))
                drafts.append(tuple(tree.tokens))
            expect_equal(FOREIGN, *drafts, text=text, tokens=SPARSE)
            yield len(drafts[0])


TRAPS = [
    Trap(PLANTED, fitted_head_drafts_deep, card("eagle3")),
    Trap(PLACED, check_eagle3_drafts, card("eagle3")),
    Trap(THREE, three_layers_are_read, card("eagle3")),
    Trap(FOREIGN, foreign_head_drafts_alike, card("eagle3")),
]

_eagle3 = partial(Toy, technique="eagle3")

TOYS = [
    _eagle3(
        "training at the first step alone",
        "steps = batch.states.new_zeros(()), target.settings.steps",
        "steps = batch.states.new_zeros(()), 1",
        eagle3_loss,
        law=PLANTED,
    ),
    _eagle3(
        "rows of the draft vocabulary taken for ids",
        "self.head.token_map, self.head.vocabulary",
        "None, self.head.vocabulary",
        EagleDrafter.run_nodes,
        law=PLACED,
    ),
    _eagle3(
        "offsets of another program's head taken for ids",
        "rows = torch.arange(words)",
        "rows = 0",
        head_formats.read_eagle3,
        law=FOREIGN,
    ),
    _eagle3(
        "ids written for another program where it adds its rows",
        "ids - torch.arange(len(ids))",
        "ids",
        head_formats.write_eagle3,
        law=FOREIGN,
    ),
    _eagle3(
        "later steps trained at the positions of the first",
        "cos[step:], sin[step:]), rotate(k, cos[step:], sin[step:])",
        "cos[:n], sin[:n]), rotate(k, cos[:n], sin[:n])",
        UnrolledLayer.run,
        law=PLACED,
    ),
    _eagle3(
        "the top layer alone",
        "min(2, n), n // 2, max(n - 3, 0)",
        "n, n, n",
        feature_layers,
        law=THREE,
    ),
]
