"""PaSS: look-aheads, their rounds, and the target's rows beside them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.speculative.probed import begin, expect_no_own_vocabulary, propose
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import pass_sampling as traps
from tinyspec.lm.heads import freeze_target
from tinyspec.lm.model import Model
from tinyspec.lm.probes import run_probe_groups
from tinyspec.speculative.drafting.pass_sampling import (
    AHEAD,
    PassSettings,
    initialize_ahead,
    pass_loss,
)
from tinyspec.speculative.probing import draw_anchors
from tinyspec.technique import TrainingBatch, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("pass_sampling")


def test_trap_a_draft_is_what_the_training_forward_says() -> None:
    assert traps.check_pass_drafts(CARD.make).branches > 150


def test_trap_a_look_ahead_is_trained_on_its_own_token() -> None:
    assert traps.loss_is_of_the_right_tokens(pass_loss).cases == 3


def test_trap_rounds_take_turns() -> None:
    assert traps.rounds_take_turns(CARD.make).cases == 4


def test_look_aheads_end_with_the_context() -> None:
    model = add_random_head(small_network(1), CARD, 0)
    decoder = begin(CARD, model, [0, 1] * 31 + [2])  # 63 of 64 positions
    assert len(decoder.step(Seeded(0)).tree.tokens) <= 1
    assert len(decoder.context) == 64


def test_a_penalty_is_applied_with_the_drafts_own_history() -> None:
    model = add_random_head(small_network(3), CARD, 0)
    sampling = SamplingParams(0.0, repetition_penalty=1.5)
    decoder = begin(CARD, model, (0, 1), sampling)
    decoder.step(Seeded(0))
    rows = list(decoder.drafter.logits)
    tree = propose(decoder, 4, sampling)
    history = list(decoder.context)
    for row, token in zip(rows, tree.tokens, strict=True):
        assert token == sampling.greedy_token(row, history)
        history.append(token)


def test_only_the_embeddings_are_trained() -> None:
    model = small_network(2)
    weights = initialize_ahead(freeze_target(model), PassSettings(tokens=3), 0)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {AHEAD: (3, 8)}
    assert not torch.equal(weights[AHEAD][0], weights[AHEAD][1])


def test_held_out_texts_have_the_same_positions_each_time() -> None:
    ids = torch.zeros(2, 60, dtype=torch.long)
    batch = TrainingBatch(ids, *[torch.empty(0)] * 4)
    drawn = {tuple(draw_anchors(batch, 3).tolist()) for _ in range(5)}
    with torch.no_grad():
        held = {tuple(draw_anchors(batch, 3).tolist()) for _ in range(5)}
    assert len(drawn) == 5 and len(held) == 1


def test_a_vocabulary_of_its_own_is_refused() -> None:
    expect_no_own_vocabulary(PassSettings)


# ---------------------------------------------------------------------- groups of probes


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("kv", [1, 2])
def test_a_group_of_probes_sees_its_text_alone(positions: Any, kv: int) -> None:
    """Each group gives what a dense pass gives with the probes as tokens after the text."""
    small = small_network(0).config
    config = replace(small, n_kv_heads=kv, positions=positions, vocab_size=6)
    model = Model.random(config, 1, torch.float64, scale=0.5)
    blocks, generator = model.torch_blocks(), torch.Generator().manual_seed(0)
    embeddings = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2, 3], [3, 3, 1, 0]])
    got = run_probe_groups(blocks, ids, torch.tensor([0, 2]), embeddings)
    wide = {**model.weights, "embed": torch.cat((model.weights["embed"], embeddings))}
    extended = Model(replace(config, vocab_size=8), wide).torch_blocks()
    for row, text in enumerate(ids.tolist()):
        for group, anchor in enumerate((0, 2)):
            dense = extended.final_states(torch.tensor([[*text[: anchor + 1], 6, 7]]))
            assert torch.allclose(got[row, group], dense[0, -2:], atol=1e-10)


def test_a_prefix_is_seen_by_probes_as_the_session_does() -> None:
    model = small_network(4)
    config, generator = model.config, torch.Generator().manual_seed(0)
    embeddings = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    shape = (2, config.n_layers, config.n_kv_heads, 3, config.head_dim)
    prefix = torch.randn(shape, generator=generator, dtype=torch.float64)
    ids = [0, 1, 2, 3]
    got = run_probe_groups(
        model.torch_blocks(), torch.tensor([ids]), torch.tensor([3]), embeddings, prefix
    )
    session = model.session()
    session.set_probe_embeddings(embeddings, (prefix[0], prefix[1]))
    session.extend(ids)
    probes = TokenTree((4, 5), (-1, 0), (None, None), (True, True))
    scored = session.score(probes, (config.n_layers,))
    assert torch.allclose(got[0, 0], scored.hidden[0, 1:], atol=1e-10)
    session.score(TokenTree())
    assert torch.allclose(scored.logits[0], model.logits(ids)[-1], atol=1e-10)
