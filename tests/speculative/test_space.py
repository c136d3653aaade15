"""SPACE: groups of masks behind every candidate, the settings of a tuned model, and its loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import likeliest_token, small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import joint_distribution_of_self_drafting
from tinyspec.laws.traps import space as traps
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated.space import (
    SpaceSettings,
    decode_by_groups,
    find_cuts,
    find_mask_token,
    sar_loss,
)
from tinyspec.technique import TUNED, Request, TrainingBatch, Tuning, find_technique
from tinyspec.tree import ROOT

CARD = find_technique("space")
GREEDY = SamplingParams(0.0)


def test_trap_a_draft_is_what_the_training_forward_says() -> None:
    assert traps.check_space_drafts(CARD.make).branches > 150


def test_trap_every_round_but_the_first_drafts() -> None:
    assert traps.every_round_drafts(CARD.make).cases == 4


def test_trap_the_loss_has_the_texts_own_labels() -> None:
    assert traps.loss_is_of_the_texts_tokens(sar_loss).cases == 8


def test_trap_a_rejected_candidate_is_not_drawn_again() -> None:
    assert joint_distribution_of_self_drafting(CARD.make, masks=2).branches > 50


# ---------------------------------------------------------------------- the algorithm


def begin(
    model: Any, text: Any, sampling: SamplingParams = GREEDY, n: int = 30, **knobs: Any
) -> Any:
    stop = StoppingCriteria(max_new_tokens=n)
    request = Request(model.session(), sampling=sampling, stop=stop)
    request.positions = model.config.max_positions
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder


@pytest.mark.parametrize("k", [1, 3])
def test_what_runs_is_the_published_algorithm_step_by_step(k: int) -> None:
    accepted = 0
    for seed in range(6):
        model = TableModel(seed, 3, zeros=False)
        decoder = begin(model, (0, 1), n=12, masks=k)
        steps = [list(round.tokens) for round in decoder.run(Seeded(0))]
        expected = decode_by_groups(
            lambda text, model=model: likeliest_token(model.row(text)), (0, 1), 12, k, mask=2
        )
        assert steps == expected
        accepted += sum(len(step) > 1 for step in steps)
    assert accepted > 0


def test_the_tree_is_a_chain_with_masks_behind_each_candidate() -> None:
    decoder = begin(small_network(0), (0, 1), masks=2)
    decoder.step(Seeded(0))
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    assert list(tree.parents[:2]) == [ROOT, 0]
    assert list(tree.probe) == [False] * 2 + [True] * 6
    assert {tree.tokens[mask] for mask in range(2, 8)} == {3}  # the last token of the vocabulary
    for node, group in decoder.drafter.group_of.items():
        assert [tree.parents[mask] for mask in group] == [node, *group[:-1]]


def test_candidates_above_temperature_0_declare_the_distribution_of_their_mask() -> None:
    sampling = SamplingParams(0.8)
    decoder = begin(small_network(0), (0, 1), sampling, masks=2)
    decoder.step(Seeded(0))
    rows = [sampling.probs(row) for row in decoder.drafter.logits]
    tree = decoder.drafter.propose(decoder.context, 9, sampling, Seeded(0))
    assert [list(q) for q in tree.draft_probs[:2]] == [list(row) for row in rows]
    assert all(q is None for q in tree.draft_probs[2:])


def test_masks_end_with_the_context() -> None:
    decoder = begin(small_network(1), [0, 1] * 29 + [2])  # 59 of 64 positions
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert len(decoder.context) == 64


def test_a_text_of_one_new_token_has_no_masks() -> None:
    decoder = begin(small_network(1), (0, 1), n=1)
    assert decoder.step(Seeded(0)).tree.tokens == []
    assert decoder.finished == "length"


# ---------------------------------------------------------------------- settings


def make_tuned(extra: Any) -> Model:
    """Return a small network whose config.json says this of its tuning."""
    model = small_network(2, 10)
    return Model(replace(model.config, extra={TUNED: extra}), model.weights)


def test_masks_and_their_token_are_those_that_the_model_was_tuned_with() -> None:
    model = make_tuned({"method": "space", "settings": {"masks": 3, "mask_id": 7}})
    assert begin(model, (0, 1)).drafter.ids == (7, 7, 7)
    assert begin(model, (0, 1), masks=2).drafter.ids == (7, 7)


def test_a_model_that_was_not_tuned_has_the_defaults() -> None:
    assert begin(make_tuned({"method": "cllm", "settings": {}}), (0, 1)).drafter.ids == (9,) * 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"masks": 0}, "[head] masks is 0"),
        ({"masks": True}, "[head] masks is True"),
        ({"masks": "3"}, "[head] masks is '3'"),
        ({"mask_id": -2}, "[head] mask_id is -2"),
        ({"mask_id": 10}, "[head] mask_id is 10, but the vocabulary has 10 tokens"),
        ({"mask_prob": 1.5}, "[head] mask_prob is 1.5"),
        ({"mask_prob": float("nan")}, "[head] mask_prob is nan"),
        ({"nodes": 3}, "the settings are not those of space"),
        (3, "the settings are not those of space"),
        (None, "the settings are not those of space"),
    ],
)
def test_settings_without_a_meaning_are_named_in_one_line(settings: Any, said: str) -> None:
    with pytest.raises(TinyspecError) as error:
        begin(make_tuned({"method": "space", "settings": settings}), (0, 1))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_mask_is_by_default_the_last_token() -> None:
    config = small_network(0).config
    assert find_mask_token(SpaceSettings(), config) == 3
    assert find_mask_token(SpaceSettings(mask_id=0), config) == 0


# ---------------------------------------------------------------------- the loss


def test_a_cut_leaves_a_label_to_every_mask() -> None:
    is_answer = torch.tensor([False, True, True, True, False, True, True, True, True, False])
    assert find_cuts(is_answer, 2).tolist() == [1, 5, 6]
    assert find_cuts(is_answer, 4).tolist() == []
    assert find_cuts(is_answer[:2], 4).tolist() == []


def tune(ids: Any, is_answer: Any, **settings: Any) -> float:
    model = small_network(0)
    empty = torch.empty(*ids.shape, 0)
    batch = TrainingBatch(ids, is_answer, empty, empty.long(), empty)
    tuning = Tuning(model.torch_blocks(), model, SpaceSettings(**settings), {}, 0.0)
    return float(sar_loss(tuning, batch, torch.Generator().manual_seed(0)))


def test_a_text_too_short_for_masks_is_trained_as_it_is() -> None:
    ids, is_answer = torch.tensor([[0, 1, 2]]), torch.tensor([[True, True, False]])
    assert tune(ids, is_answer, mask_prob=1.0) == tune(ids, is_answer, mask_prob=0.0) > 0


def test_a_batch_without_a_known_token_has_no_loss() -> None:
    ids = torch.tensor([[0, 1, 2, 1, 0, 2, 1, 0]])
    assert tune(ids, torch.zeros_like(ids, dtype=torch.bool), mask_prob=1.0) == 0


def test_about_half_of_the_texts_are_cut() -> None:
    """The mean over many texts lies between that of uncut texts and that of cut ones."""
    ids = torch.tensor([[0, 1, 2, 1, 0, 2, 1, 0, 1, 2]]).repeat(40, 1)
    is_answer = torch.ones_like(ids, dtype=torch.bool)
    is_answer[:, -1] = False
    none, half, all_of_them = (tune(ids, is_answer, masks=2, mask_prob=p) for p in (0, 0.5, 1))
    assert min(none, all_of_them) < half < max(none, all_of_them)
