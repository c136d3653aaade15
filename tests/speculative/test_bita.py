"""BiTA: the group after the last accepted token, one pass a round, and the tree of candidates."""

from dataclasses import replace
from functools import partial

from tests.speculative.probed import (
    begin,
    expect_chains_after_each_node,
    expect_no_own_vocabulary,
    expect_nothing_after_an_end,
    expect_probes_to_end_with_the_context,
    list_drafted,
    propose,
    propose_after_a_round,
)
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import bita as traps
from tinyspec.lm.heads import freeze_target
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated.bita import (
    MASKS,
    PREFIX,
    BitaSettings,
    bita_loss,
    initialize_bita,
)
from tinyspec.technique import find_technique
from tinyspec.tree import ROOT

CARD = find_technique("bita")


def test_trap_a_draft_is_what_the_training_forward_says() -> None:
    assert traps.check_bita_drafts(CARD.make).branches > 150


def test_trap_every_round_but_the_first_drafts() -> None:
    assert traps.every_round_drafts(CARD.make).cases == 4


def test_trap_the_targets_rows_stay_as_they_are() -> None:
    assert traps.rows_stay_as_they_are(partial(CARD.make, candidates=2)).cases > 20


def test_trap_a_mask_with_its_prefix_is_trained_on_its_own_token() -> None:
    assert traps.masks_are_trained_with_the_prefix(bita_loss).cases == 3


def masked_network(masks: int, seed: int = 0) -> Model:
    """A network of ten tokens, so that all candidates of a slot exist."""
    small = CARD.trained._replace(small=BitaSettings(masks=masks, prefix=3))  # type: ignore[union-attr]
    return add_random_head(small_network(seed, 10), replace(CARD, trained=small), seed)


def test_the_tree_is_the_authors() -> None:
    """5 + 4 + 3 candidates; only the first of a slot has children; masks after each of them."""
    _, tree = propose_after_a_round(CARD, masked_network(3))
    parents = [tree.parents[node] for node in list_drafted(tree)]
    assert parents == [ROOT] * 5 + [0] * 4 + [5] * 3
    assert sum(tree.probe) == 13 * 3


def test_masks_after_a_token_are_a_chain_of_their_own() -> None:
    decoder, tree = propose_after_a_round(CARD, masked_network(2), candidates=2)
    expect_chains_after_each_node(decoder, tree)
    for group in decoder.drafter.group_of.values():
        assert [tree.tokens[mask] for mask in group] == [10, 11]


def test_nothing_follows_the_end_of_a_text() -> None:
    expect_nothing_after_an_end(CARD, masked_network(3))


def test_a_penalty_is_applied_with_the_drafts_own_history() -> None:
    """Each slot ranks its tokens after the text and the likeliest candidates before it."""
    sampling = SamplingParams(0.0, repetition_penalty=1.5)
    for seed in range(5):
        decoder = begin(CARD, masked_network(3, seed), (0, 1))
        decoder.step(Seeded(0))
        tree = propose(decoder, 9, sampling)
        history = list(decoder.context)
        for row, first in zip(decoder.drafter.logits, (0, 5, 9), strict=True):
            assert tree.tokens[first] == sampling.greedy_token(row, history)
            history.append(tree.tokens[first])


def test_masks_end_with_the_context() -> None:
    expect_probes_to_end_with_the_context(CARD, masked_network(3))


def test_masks_and_prefix_are_all_that_is_trained() -> None:
    model = small_network(2)
    weights = initialize_bita(freeze_target(model), BitaSettings(masks=3, prefix=5), 0)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        MASKS: (3, 8), PREFIX: (2, 3, 1, 5, 4)
    }  # fmt: skip


def test_a_vocabulary_of_its_own_is_refused() -> None:
    expect_no_own_vocabulary(BitaSettings)
