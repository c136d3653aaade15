"""EAGLE-3: its three states, its training-time test, its vocabulary and its file."""

from typing import Any

import pytest
import torch

from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import eagle3 as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import TOKEN_MAP, freeze_target, head_weights
from tinyspec.speculative.drafting import eagle3
from tinyspec.speculative.drafting.eagle3 import Eagle3Settings
from tinyspec.technique import TrainingBatch, find_technique

CARD = find_technique("eagle3")
assert CARD.trained is not None
TRAINED = CARD.trained


def test_trap_a_fitted_head_goes_on_from_its_own_outputs() -> None:
    assert traps.fitted_head_drafts_deep(CARD.make).cases == 36


def test_trap_a_draft_at_every_depth_is_what_training_says() -> None:
    assert traps.check_eagle3_drafts(CARD.make).branches > 300


def test_trap_three_layers_are_read() -> None:
    assert traps.three_layers_are_read(CARD.make).cases == 4


def test_trap_a_head_in_the_speculators_format_drafts_alike() -> None:
    assert traps.foreign_head_drafts_alike(CARD.make).cases == 12


def test_the_file_has_the_names_and_shapes_of_the_speculators_package() -> None:
    config = Config(99, 8, 12, 2, 1, 4, 12, 64)
    shapes = eagle3.eagle3_shapes(config, Eagle3Settings(draft_vocab=20))
    layer = "layers.0."
    assert shapes == {
        "fc.weight": (8, 24),
        "norm.weight": (8,),
        "lm_head.weight": (20, 8),
        f"{layer}input_layernorm.weight": (8,),
        f"{layer}hidden_norm.weight": (8,),
        f"{layer}post_attention_layernorm.weight": (8,),
        f"{layer}self_attn.q_proj.weight": (8, 16),
        f"{layer}self_attn.k_proj.weight": (4, 16),
        f"{layer}self_attn.v_proj.weight": (4, 16),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}mlp.gate_proj.weight": (12, 8),
        f"{layer}mlp.up_proj.weight": (12, 8),
        f"{layer}mlp.down_proj.weight": (8, 12),
    }


def test_the_output_matrix_begins_as_the_targets_rows() -> None:
    target = freeze_target(small_network(2), torch.tensor([0, 2, 3]))
    begun = eagle3.initialize_eagle3(target, Eagle3Settings(draft_vocab=3), 0)
    assert torch.equal(begun["lm_head.weight"], target.head)
    assert begun["lm_head.weight"] is not target.head


def random_batch(known: list[bool]) -> Any:
    """A text of eight tokens, with three known tokens of each distribution."""
    card = traps.card_with_gaps()
    model = add_random_head(small_network(3), card, 3)
    weights = head_weights(model, "eagle3")
    target = freeze_target(model, weights[TOKEN_MAP])._replace(settings=card.trained.small)  # type: ignore[union-attr]
    ids = torch.tensor([[0, 3, 1, 2, 2, 0, 1, 3]])
    states = model.torch_blocks().hidden_states(ids, (2, 1, 0))
    generator = torch.Generator().manual_seed(0)
    top_ids = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(8)])[None]
    top_probs = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64).expand(1, 8, 3)
    batch = TrainingBatch(ids, torch.tensor([known]), states, top_ids, top_probs)
    return weights, target, batch


def test_the_loss_is_the_weighted_cross_entropy_of_all_steps() -> None:
    """By hand: a place counts if its most probable token has a row; p is over those with rows."""
    known = [True] * 7 + [False]
    weights, target, batch = random_batch(known)
    expected = 0.0
    for step in range(3):
        logits = TRAINED.predict(weights, target, batch.ids, batch.states, step)[0]
        terms = []
        for t in range(7 - step):
            ids = batch.top_ids[0, t + 1 + step].tolist()
            if not known[t + 1 + step] or ids[0] == 1:  # token 1 has no row
                continue
            p = {token: x for token, x in zip(ids, (0.5, 0.3, 0.1), strict=True) if token != 1}
            log_q = dict(zip((0, 2, 3), logits[t].float().log_softmax(-1).tolist(), strict=True))
            terms.append(-sum(x / sum(p.values()) * log_q[token] for token, x in p.items()))
        expected += 0.8**step * sum(terms) / len(terms)
    assert float(TRAINED.loss(weights, target, batch)) == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_a_known_place_has_no_loss() -> None:
    weights, target, batch = random_batch([False] * 8)
    assert float(TRAINED.loss(weights, target, batch)) == 0
