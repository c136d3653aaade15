"""BiTA: the group behind the last accepted token, one pass a round, and the tree of candidates."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyspec import _core
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import bita as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import freeze_target
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated.bita import MASKS, PREFIX, BitaSettings, begin_bita
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("bita")
GREEDY = SamplingParams(0.0)


def test_trap_a_draft_is_what_the_training_forward_says() -> None:
    assert traps.check_bita_drafts(CARD.make).branches > 150


def test_trap_every_round_but_the_first_drafts() -> None:
    assert traps.every_round_drafts(CARD.make).cases == 4


def test_trap_the_targets_rows_stay_as_they_are() -> None:
    assert traps.rows_stay_as_they_are(CARD.make).cases > 20


def begin(model: Model, text: Any, ends: frozenset[int] = frozenset(), **knobs: Any) -> Any:
    stop = StoppingCriteria(eos=ends, max_new_tokens=30)
    request = Request(model.session(), sampling=GREEDY, stop=stop)
    request.positions = model.config.max_positions
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder


def masked_network(masks: int, seed: int = 0) -> Model:
    """A network of ten tokens, so that all candidates of a slot exist."""
    small = CARD.trained._replace(small=BitaSettings(masks=masks, prefix=3))  # type: ignore[union-attr]
    return add_random_head(small_network(seed, 10), replace(CARD, trained=small), seed)


def test_the_tree_is_the_authors() -> None:
    """5 + 4 + 3 candidates; only the first of a slot has children; masks behind each of them."""
    decoder = begin(masked_network(3), (0, 1))
    decoder.step(Seeded(0))
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    parents = [up for up, probe in zip(tree.parents, tree.probe, strict=True) if not probe]
    assert parents == [ROOT] * 5 + [0] * 4 + [5] * 3
    assert sum(tree.probe) == 13 * 3


def test_masks_behind_a_token_are_a_chain_of_their_own() -> None:
    decoder = begin(masked_network(2), (0, 1), candidates=2)
    decoder.step(Seeded(0))
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    for node, group in decoder.drafter.group_of.items():
        assert [tree.parents[mask] for mask in group] == [node, *group[:-1]]
        assert [tree.tokens[mask] for mask in group] == [10, 11]


def test_nothing_follows_the_end_of_a_text() -> None:
    decoder = begin(masked_network(3), (0, 1), frozenset(range(10)))
    decoder.step(Seeded(0))
    decoder.finished = None
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    assert {up for up, probe in zip(tree.parents, tree.probe, strict=True) if not probe} == {ROOT}


def test_masks_end_with_the_context() -> None:
    model = masked_network(3)
    decoder = begin(model, [0, 1] * 29 + [2])  # 59 of 64 positions
    while not decoder.finished:
        tree = decoder.step(Seeded(decoder.rounds)).tree
        assert isinstance(tree, TokenTree)
    assert len(decoder.context) == 64


@pytest.mark.skipif(_core.compute is None, reason="torch's rows depend on how many there are")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_rows_do_not_change_to_the_bit(dtype: torch.dtype) -> None:
    config = Config(40, 16, 2, 2, 1, 8, 24, 64)
    model = add_random_head(Model.random(config, dtype=dtype, scale=0.3), CARD, 0)
    decoder, plain = begin(model, (1, 2, 3), candidates=2), model.session()
    plain.extend((1, 2, 3))
    for number in range(6):
        round = decoder.step(Seeded(number))
        assert torch.equal(round.scores.logits[0], plain.score(TokenTree()).logits[0])
        for token in round.tokens:
            plain.commit((), token)


def test_masks_and_prefix_are_all_that_is_trained() -> None:
    model = small_network(2)
    weights = begin_bita(freeze_target(model), BitaSettings(masks=3, prefix=5), 0)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        MASKS: (3, 8), PREFIX: (2, 3, 1, 5, 4)
    }  # fmt: skip


def test_a_vocabulary_of_its_own_is_refused() -> None:
    with pytest.raises(TinyspecError, match="draft_vocab"):
        BitaSettings(draft_vocab=20)
