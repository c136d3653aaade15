"""ReDrafter (Cheng et al. 2024): one recurrent head, a search over its texts, merged prefixes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.redrafter import (
    RedrafterDrafter,
    RedrafterSettings,
    unroll_logits,
)
from tinyspec.technique import Card, find_technique

PLANTED = medusa_traps.PLANTED
PLACED = feature_laws.DRAFT_OF_TRAINING
OF_TEXT = feature_laws.DRAFT_OF_TEXT
BEAMS = "the draft is the merged beams of the training forward"
SMALL = (
    RedrafterSettings(),
    RedrafterSettings(form="mlp"),
    RedrafterSettings(form="mlp", tied=False),
)


def card_of(settings: RedrafterSettings) -> Card:
    """Return the card, with the heads of these settings as those that the laws make."""
    redrafter = find_technique("redrafter")
    assert redrafter.trained is not None
    return replace(redrafter, trained=redrafter.trained._replace(small=settings))


def search_plainly(
    here: Card, model: Model, text: Sequence[int], beams: int, length: int, penalty: float
) -> list[tuple[int, ...]]:
    """Return the likeliest drafts, by the training forward on every text that the search keeps."""
    sampling = SamplingParams(repetition_penalty=penalty)
    kept: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for draft, value in kept.items():
            row = feature_laws.trained_forward(here, model, text, draft)
            assert row is not None
            q = sampling.probs(row.numpy(), [*text, *draft])
            longer |= {(*draft, x): value + log(q[x]) for x in range(len(q))}
        best = sorted(longer, key=lambda draft: -longer[draft])[:beams]
        kept = {draft: longer[draft] for draft in best}
    return list(kept)


@collect_evidence(BEAMS)
def draft_is_the_merged_beams(build: Build) -> Iterator[int]:
    """Check that the tree has each beginning of a beam once, and nothing else."""
    for seed, settings in enumerate(SMALL):
        here = card_of(settings)
        model = add_random_head(small_network(seed, 6), here, seed)
        for text in ((0, 1), (5, 2, 4), (1, 1, 3, 0)):
            for beams, length, penalty in ((2, 3, 1.0), (4, 4, 1.0), (9, 3, 1.0), (4, 3, 1.5)):
                kept = search_plainly(here, model, text, beams, length, penalty)
                expected = sorted({beam[:n] for beam in kept for n in range(1, length + 1)})
                sampling = SamplingParams(0.0, repetition_penalty=penalty)
                knobs: dict[str, Any] = {"beams": beams, "length": length}
                decoder = begin_decoder(build, [model], text, sampling, **knobs)
                tree = decoder.drafter.propose(decoder.context, length, sampling, Seeded(0))
                nodes = range(len(tree.tokens))
                got = sorted(tree.tokens_on(tree.path(node)) for node in nodes)
                expect_equal(BEAMS, expected, got, text=text, form=settings.form, **knobs)
                yield len(got)


def check_redrafter_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads of each form."""
    made = [partial(build, beams=1) for _ in SMALL]
    checks = zip(SMALL, made, strict=True)
    first, *rest = [feature_laws.check_random_heads(card_of(form), make) for form, make in checks]
    return sum(rest, first)


def check_redrafter_text(build: Build) -> Evidence:
    """Check law F1 on random heads, with several beams."""

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), card_of(SMALL[0]), seed)

    make = partial(build, beams=3)
    return feature_laws.draft_is_function_of_text(make, network)


def fitted_redrafter_drafts_the_text(build: Build) -> Evidence:
    """Check that a head that its loss has fitted to a text drafts it, after every part of it."""
    make = partial(build, beams=1)
    return medusa_traps.fitted_heads_draft_the_text(make, "redrafter")


TRAPS = [
    Trap(PLANTED, fitted_redrafter_drafts_the_text, card("redrafter")),
    Trap(PLACED, check_redrafter_drafts, card("redrafter")),
    Trap(OF_TEXT, check_redrafter_text, card("redrafter")),
    Trap(BEAMS, draft_is_the_merged_beams, card("redrafter")),
]

_redrafter = partial(Toy, technique="redrafter")

TOYS = [
    _redrafter(
        "a head trained on the token before",
        "shift_tokens(ids, k) for k in range(1, steps + 1)",
        "shift_tokens(ids, k) for k in range(steps)",
        unroll_logits,
        law=PLANTED,
    ),
    _redrafter(
        "a head that does not read its draft",
        "beam.tokens[-1] if depth else context[-1]",
        "context[-1]",
        RedrafterDrafter.search_beams,
        law=PLACED,
    ),
    _redrafter(
        "a state that goes on from the round before",
        "torch.stack(before) if before else None",
        "torch.stack(before) if before else getattr(self, 'last', None)",
        RedrafterDrafter.search_beams,
        law=OF_TEXT,
        also=(
            Patch(
                RedrafterDrafter.search_beams,
                "found = ended",
                "found, self.last = ended, s[:1]",
            ),
        ),
    ),
    _redrafter(
        "beams that stand side by side",
        "tokens, parents, _ = merge_drafts(chains)",
        "tokens = [t for text in texts for t in text]; "
        "parents = [i - 1 if i % length else -1 for i in range(len(tokens))]",
        RedrafterDrafter.propose,
        law=BEAMS,
    ),
    _redrafter(
        "a tree of all texts, without a search",
        "[: self.beams]",
        "",
        RedrafterDrafter.search_beams,
        law=BEAMS,
    ),
]
