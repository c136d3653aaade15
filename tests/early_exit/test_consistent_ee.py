"""ConsistentEE: a policy per layer, memorized layers, drawn exits, and one exit that is trained."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tinyspec
from tests.early_exit import decoders
from tests.lm.small import GPT2, LLAMA, PROMPT
from tests.lm.small import model as network
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.early_exit import consistent_ee
from tinyspec.early_exit.consistent_ee import (
    LEAD,
    ConsistentSettings,
    PolicySettings,
    PolicyTraining,
    choose_exit,
    consistent_loss,
    consistent_translator_batch_loss,
    find_memorized_layers,
    follow_decisions,
    make_text_training,
    make_translation_training,
    measure_policy,
    mix_with_coin,
    policy_logits,
    policy_phase_loss,
    policy_shapes,
    reinforce,
    reward_exits,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import consistent_ee as traps
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.heads import freeze_target, head_weights
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import (
    Guarantee,
    TrainingBatch,
    TranslatorTraining,
    Tuning,
    find_technique,
)
from tinyspec.tree import TokenTree

CARD = find_technique("consistent_ee")
make_decoder = partial(decoders.make_decoder, CARD)
L = LLAMA.n_layers


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the policy as it runs


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_printed_algorithm_is_what_runs(config: Any) -> None:
    """Layers and row of every new token, against its states in the masked stream."""
    seen = set[int]()
    for seed in range(4):
        model = add_random_head(network(config, seed), CARD, seed)
        blocks, weights = model.torch_blocks(), head_weights(model, "consistent_ee")
        decoder = make_decoder(model, SamplingParams())
        decoder.extend(PROMPT)
        depths = [L] * (len(PROMPT) - 1)
        while not decoder.finished:
            text = torch.tensor([list(decoder.context)])
            stream = blocks.layer_states(text, depths=torch.tensor([[*depths, L]]))
            states = [x[0, -1].detach() for x in stream]
            layer, state = choose_exit(
                lambda n, _, states=states: states[n - 1],
                None,
                lambda n, x, w=weights: float(policy_logits(w, n, x).sigmoid()),
                L,
            )
            scores = decoder.step(Seeded(seed).split("round", decoder.rounds)).scores
            assert scores.layers[0] == layer
            row = blocks.compute_logits(state).detach()
            np.testing.assert_allclose(np.asarray(scores.logits[0]), row, atol=1e-10)
            depths.append(layer)
        seen |= set(depths[len(PROMPT) - 1 :])
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_threshold_is_plain_greedy_decoding(dtype: torch.dtype) -> None:
    model = add_random_head(network(LLAMA, dtype=dtype), CARD, 0)
    plain = tinyspec.generate(model, PROMPT, max_new_tokens=9).tokens
    at_inf = tinyspec.generate(
        model, PROMPT, max_new_tokens=9, method="consistent_ee", threshold=math.inf
    )
    assert list(at_inf.tokens) == list(plain)


# ---------------------------------------------------------------------- labels and reward


def test_a_token_is_memorized_where_all_exits_above_are_right() -> None:
    rights = [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]]
    assert find_memorized_layers(torch.tensor(rights).bool()).tolist() == [1, 2, 3, 4, 4, 4]
    assert find_memorized_layers(torch.tensor([[False]])).tolist() == [1]


def test_more_right_exits_never_raise_the_memorized_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    some = torch.rand(200, 5, generator=generator) < 0.6
    more = some | (torch.rand(200, 5, generator=generator) < 0.3)
    assert (find_memorized_layers(more) <= find_memorized_layers(some)).all()


def test_depth_costs_easy_tokens_more_and_the_hardest_nothing() -> None:
    log_probs, layers = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([2, 2, 2])
    memorized = torch.tensor([1, 3, 4])
    rewards = reward_exits(log_probs, layers, memorized, 0.4, 4)
    assert rewards.tolist() == pytest.approx([-1 - 0.6, -1 - 0.2, -1.0])
    assert torch.equal(reward_exits(log_probs, layers, memorized, 0.0, 4), log_probs)


def test_without_the_hardness_reward_every_token_pays_alpha_for_a_layer() -> None:
    """The paper's ablation: R = log p - alpha l, whatever the original model is right about."""
    losses = dict[tuple[bool, int], float]()
    for hardness in (True, False):
        for seed in (3, 5):
            tuning = make_tuning(0.0, alpha=1.0, hardness=hardness)
            tuning = tuning._replace(original=small_network(seed, vocabulary=6, layers=4))
            blocks, original = tuning.blocks, tuning.original.torch_blocks()
            made = make_text_training(
                blocks, original, training_batch(), tuning.beside, tuning.settings
            )
            states, depths = made.leave_greedily()
            with torch.no_grad():
                losses[hardness, seed] = float(made.loss(0.0, torch.Generator()))
                flat = float((depths - made.log_probs(states)).mean())
            assert (losses[hardness, seed] == pytest.approx(flat)) is not hardness
    assert losses[True, 3] != losses[True, 5]
    assert losses[False, 3] == losses[False, 5]
    model = make_translator()
    found = [
        measure_policy(model, settings, SOURCE, TARGET, torch.Generator())
        for settings in (
            ConsistentSettings(width=4, alpha=0.4, hardness=False),
            ConsistentSettings(width=4, alpha=0.4),
        )
    ]
    more = found[0]["held_out"] - found[1]["held_out"]
    assert torch.allclose(more, 0.2 * found[0]["layers"].to(more), atol=1e-5)


# ---------------------------------------------------------------------- the phases


def training_batch() -> TrainingBatch:
    """Texts that the small model wrote greedily, so that its last exit is right; one has none."""
    model, rows = small_network(3, vocabulary=6, layers=4), list[list[int]]()
    for text in ([1, 2, 0], [5, 3, 4, 1, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1, 2]):
        while len(text) < 9:
            text.append(int(model.logits(text)[-1].argmax()))
        rows.append(text)
    is_answer = torch.zeros(3, 9, dtype=torch.bool)
    is_answer[0, 2:], is_answer[1, 5:] = True, True
    return TrainingBatch(torch.tensor(rows), is_answer, *[torch.empty(0)] * 3)


def make_tuning(progress: float, **values: Any) -> Tuning:
    """Return a model of four layers in training, with a random policy; all have gradients."""
    model = small_network(3, vocabulary=6, layers=4)
    settings = ConsistentSettings(**{"width": 5, "rounds": 1, **values})
    generator = torch.Generator().manual_seed(1)
    beside = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in policy_shapes(model.config, settings).items()
    }
    blocks = freeze_target(model).blocks
    assert blocks is not None
    for w in blocks.weights.values():
        w.requires_grad_()
    return Tuning(blocks, model, settings, beside, progress)


def has_gradient(weights: Any) -> set[str]:
    return {name for name, w in weights.items() if w.grad is not None and w.grad.any()}


def test_each_phase_moves_its_own_weights_alone() -> None:
    """None is not zero: the optimizer would still move a weight by its momentum."""
    for progress, of_policy in ((0.0, True), (0.4, True), (0.5, False), (0.9, False)):
        tuning = make_tuning(progress)
        loss = consistent_loss(tuning, training_batch(), torch.Generator().manual_seed(0))
        loss.backward()  # type: ignore[no-untyped-call]
        assert bool(has_gradient(tuning.beside)) is of_policy
        assert bool(has_gradient(tuning.blocks.weights)) is not of_policy
        rests = tuning.blocks.weights if of_policy else tuning.beside
        assert all(w.grad is None for w in rests.values())


def test_memorized_layers_are_those_of_the_model_before_both_phases() -> None:
    """Another original, other prices: the loss of the policy changes, that of the model does not."""
    other = small_network(5, vocabulary=6, layers=4)
    losses = {}
    for progress in (0.0, 0.5):
        for name, original in (("own", None), ("other", other)):
            tuning = make_tuning(progress, alpha=1.0)
            tuning = tuning if original is None else tuning._replace(original=original)
            generator = torch.Generator().manual_seed(0)
            loss = consistent_loss(tuning, training_batch(), generator)
            losses[progress, name] = float(loss.detach())
    assert losses[0.0, "own"] != losses[0.0, "other"]
    assert losses[0.5, "own"] == losses[0.5, "other"]


def test_phases_take_turns() -> None:
    settings = ConsistentSettings(rounds=2)
    phases = [settings.phase_at(p / 8)[0] for p in range(9)]
    assert phases == [False, False, True, True, False, False, True, True, True]
    assert ConsistentSettings(rounds=1).phase_at(0.25) == (False, 0.5)


def test_exits_that_are_not_chosen_have_no_gradient() -> None:
    """Of the model's phase: by each token's state at each exit, before the head reads it."""
    tuning = make_tuning(0.5)
    kept = list[torch.Tensor]()
    real = tuning.blocks.compute_logits

    def read(states: torch.Tensor) -> torch.Tensor:
        states.retain_grad()
        kept.append(states)
        return real(states)

    tuning.blocks.compute_logits = read  # type: ignore[method-assign]
    batch = training_batch()
    loss = consistent_loss(tuning, batch, torch.Generator())
    loss.backward()  # type: ignore[no-untyped-call]
    assert len(kept) == 1  # the head reads one state of each token
    assert kept[0].shape[0] == int(batch.is_answer[:, :-1].sum())
    assert kept[0].grad is not None and (kept[0].grad.abs().sum(1) > 0).all()


def test_prompts_run_all_layers() -> None:
    """A policy that always leaves: the tokens before the answer do not."""
    tuning = make_tuning(0.5)
    with torch.no_grad():
        tuning.beside["out.weight"].zero_()
        tuning.beside["out.bias"].fill_(9.0)
    batch = training_batch()
    expected = 0.0
    for row, first in ((0, 2), (1, 5)):
        ids = batch.ids[row : row + 1, :-1]
        depths = torch.where(torch.arange(8)[None] >= first, 1, 4)
        *_, x = tuning.blocks.layer_states(ids, depths=depths)
        rows = tuning.blocks.compute_logits(x[0, first:])
        lost = F.cross_entropy(rows, batch.ids[row, first + 1 :], reduction="sum")
        expected += float(lost.detach())
    n = int(batch.is_answer[:, :-1].sum())
    got = float(consistent_loss(tuning, batch, torch.Generator()).detach())
    assert got == pytest.approx(expected / n, rel=1e-5)


def test_where_no_gradient_is_wanted_the_loss_is_less_the_reward() -> None:
    """Of any phase, so that a validation compares weights by one figure."""
    with torch.no_grad():
        losses = [
            float(consistent_loss(make_tuning(p), training_batch(), torch.Generator()))
            for p in (0.0, 0.5, 1.0)
        ]
        free = float(
            consistent_loss(make_tuning(1.0, alpha=0.0), training_batch(), torch.Generator())
        )
    assert losses[0] == losses[1] == losses[2] > free
    in_phase = float(consistent_loss(make_tuning(0.5), training_batch(), torch.Generator()))
    assert free == pytest.approx(in_phase)  # without a price it is the cross-entropy


def test_a_batch_without_an_answer_has_no_loss() -> None:
    nothing = training_batch()._replace(is_answer=torch.zeros(3, 9, dtype=torch.bool))
    for progress in (0.0, 0.5):
        loss = consistent_loss(make_tuning(progress), nothing, torch.Generator())
        assert float(loss) == 0
        loss.backward()  # type: ignore[no-untyped-call]


def test_equal_rewards_move_nothing() -> None:
    log_chances = torch.randn(4, 3, requires_grad=True)
    rewards = torch.tensor([1.0, -2.0, 0.5]).expand(4, 3)
    loss = reinforce(rewards, log_chances)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(-float(rewards.mean()))
    assert log_chances.grad is not None and not log_chances.grad.any()


def test_exploration_mixes_the_policy_with_a_fair_coin() -> None:
    chance = torch.tensor([0.0, 0.5, 1.0])
    assert mix_with_coin(chance, 0.4).tolist() == pytest.approx([0.2, 0.5, 0.8])
    assert 0 < float(mix_with_coin(chance, 0.0)[0]) < 1e-5


def test_as_many_exits_are_drawn_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = list[torch.Size]()

    def record(rewards: torch.Tensor, log_chances: torch.Tensor) -> torch.Tensor:
        shapes.append(rewards.shape)
        return reinforce(rewards, log_chances)

    monkeypatch.setattr(consistent_ee, "reinforce", record)
    consistent_loss(make_tuning(0.0, samples=5), training_batch(), torch.Generator())
    assert shapes == [(5, int(training_batch().is_answer[:, :-1].sum()))]


def test_exploration_falls_to_a_hundredth_in_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[float]()

    def record(training: Any, eps: float, draw: Any) -> torch.Tensor:
        found.append(eps)
        return torch.zeros(())

    monkeypatch.setattr(PolicyTraining, "policy_loss", record)
    for progress in (0.0, 0.125, 0.25 - 1e-9, 0.5):
        tuning = make_tuning(progress, rounds=2, explore=0.4)
        consistent_loss(tuning, training_batch(), torch.Generator())
    assert found == pytest.approx([0.4, 0.04, 0.004, 0.4])


def test_a_policy_learns_to_leave_where_depth_pays_nothing() -> None:
    """A high price sends easy tokens to the first layer; without one the best layer is sought."""
    batch = training_batch()
    for alpha, is_shallow in ((50.0, True), (0.0, False)):
        tuning = make_tuning(0.0, alpha=alpha, samples=4)
        optimizer = torch.optim.Adam(tuning.beside.values(), lr=0.05)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            before = float(consistent_loss(tuning, batch, generator))
        for _ in range(30):
            loss = consistent_loss(tuning, batch, generator)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            after = float(consistent_loss(tuning, batch, generator))
        assert after < before, is_shallow


def test_decisions_are_followed_in_one_pass() -> None:
    """A token that left keeps its state, and is not asked again."""
    model = network(LLAMA)
    ids = torch.tensor([PROMPT])
    depths, asked = torch.full_like(ids, L), list[int]()
    wanted = torch.tensor([[1, 2, 3, 1, 2, 3]])

    def decide(layer: int, x: torch.Tensor) -> torch.Tensor:
        asked.append(layer)
        return wanted <= layer

    may = torch.tensor([[False, True, True, True, True, True]])
    blocks = model.torch_blocks()
    got = follow_decisions(blocks.layer_states(ids, depths=depths), depths, may, decide)
    expected = torch.tensor([[3, 2, 3, 1, 2, 3]])
    assert torch.equal(depths, expected) and asked == [1, 2]
    *_, states = blocks.layer_states(ids, depths=expected)
    assert torch.equal(got, states)


def test_the_policy_alone_can_be_trained_on_a_model_that_stays() -> None:
    model = small_network(3, vocabulary=6, layers=4)
    settings = PolicySettings(width=5)
    assert CARD.trained is not None
    weights = CARD.trained.initialize(freeze_target(model), settings, 0)
    for w in weights.values():
        w.requires_grad_()
    loss = policy_phase_loss(weights, freeze_target(model), training_batch())
    loss.backward()  # type: ignore[no-untyped-call]
    assert has_gradient(weights) >= {"out.weight", "out.bias"}


# ---------------------------------------------------------------------- a translator

CONFIG = Seq2SeqConfig(
    20, d_model=8, n_heads=2, d_ff=12, encoder_layers=1, decoder_layers=3, max_positions=32,
    pad=0, bos=1, eos=2, mask=3,
)  # fmt: skip


def make_translator(seed: int = 0) -> Seq2Seq:
    assert CARD.translator is not None
    config = replace(CONFIG, extra={"trained_for": "consistent_ee"})
    config = CARD.translator.equip(config, ConsistentSettings(width=4))
    model = Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, w in model.weights.items():
        if name.startswith(LEAD):
            w.copy_(2 * torch.randn(w.shape, generator=generator, dtype=torch.float64))
        w.requires_grad_()
    return model


SOURCE, TARGET = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[4, 5], [6, 0]])


def test_on_translations_each_phase_moves_its_own_weights_alone() -> None:
    settings = ConsistentSettings(width=4, rounds=1)
    for progress, of_policy in ((0.0, True), (0.5, False)):
        model = make_translator()
        training = TranslatorTraining(model, model, settings, 0.0, 0.1, progress)
        generator = torch.Generator().manual_seed(0)
        loss = consistent_translator_batch_loss(training, (SOURCE, TARGET), generator)
        loss.backward()  # type: ignore[no-untyped-call]
        moved = has_gradient(model.weights)
        assert moved and all(name.startswith(LEAD) is of_policy for name in moved)
        assert of_policy or any(name.startswith("encoder") for name in moved)


def test_on_translations_the_models_phase_alone_drops_out_and_reads_no_original() -> None:
    """The policy's phase has memorized layers, which are those of the model as it was at first."""
    settings = ConsistentSettings(width=4, rounds=1, alpha=1.0)
    model, other = make_translator(), make_translator(1)
    with torch.no_grad():  # the other one is right about its own translations
        written = tinyspec.translate(other, [5, 6, 7], max_new_tokens=6).tokens
    pair = torch.tensor([[5, 6, 7]]), torch.tensor([list(written)])
    for progress, is_dropped, reads_original in ((0.0, False, True), (0.5, True, False)):
        losses = list[float]()
        for original, dropout in ((model, 0.0), (model, 0.5), (other, 0.0)):
            torch.manual_seed(0)
            training = TranslatorTraining(model, original, settings, dropout, 0.0, progress)
            generator = torch.Generator().manual_seed(0)
            loss = consistent_translator_batch_loss(training, pair, generator)
            losses.append(float(loss.detach()))
        assert (losses[1] != losses[0]) is is_dropped
        assert (losses[2] != losses[0]) is reads_original


def test_a_translators_loss_is_that_of_the_exits_with_which_it_decodes() -> None:
    """The model's phase on a batch, and the decoder on each source, with forced targets."""
    model = make_translator(2)
    for w in model.weights.values():
        w.requires_grad_(False)
    settings = ConsistentSettings(width=4, rounds=1)
    made = make_translation_training(model, model, settings, SOURCE, TARGET)
    states, depths = made.leave_greedily()
    log_probs, layers, n = made.log_probs(states).tolist(), depths.tolist(), 0
    for source, target in (([5, 6, 7], [4, 5, 2]), ([8, 9], [6, 2])):
        decoder = make_decoder(model.condition_on(source))
        decoder.extend([1])
        for token in target:
            scores = decoder.target.score(TokenTree())  # type: ignore[attr-defined]
            row = torch.as_tensor(np.asarray(scores.logits[0])).log_softmax(-1)
            assert scores.layers[0] == layers[n]
            assert float(row[token]) == pytest.approx(log_probs[n], abs=1e-5)
            decoder.target.commit((), token)
            n += 1
    assert n == len(log_probs)
    found = measure_policy(model, made.settings, SOURCE, TARGET, torch.Generator())
    assert float(found["layers"][0]) == pytest.approx(sum(layers) / n)
    cost = (settings.alpha / 2 * sum(layers) - sum(log_probs)) / n  # a token of middle hardness
    assert float(found["held_out"][0]) == pytest.approx(cost)


def test_a_translator_decodes_with_its_policy() -> None:
    model = make_translator(1)
    with torch.no_grad():
        plain = tinyspec.translate(model, [5, 6, 7], method="autoregressive").tokens
        at_inf = tinyspec.translate(model, [5, 6, 7], method="consistent_ee", threshold=math.inf)
        own = tinyspec.translate(model, [5, 6, 7], method="consistent_ee")
    assert list(at_inf.tokens) == list(plain)
    assert len(own.tokens) > 0


# ---------------------------------------------------------------------- the card


def test_the_card_promises_and_rejects() -> None:
    assert CARD.promise(threshold=math.inf) is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    with pytest.raises(TinyspecError, match="has no head for consistent_ee"):
        make_decoder(network(LLAMA))
    with pytest.raises(TinyspecError, match="tune this: tinyspec train head --for"):
        tinyspec.generate(network(LLAMA), PROMPT, method="consistent_ee")
    for values in (
        {"samples": 1},
        {"explore": 1.5},
        {"alpha": -0.1},
        {"rounds": 0},
        {"width": 0},
        {"draft_vocab": 9},
        {"hardness": 1},
    ):
        with pytest.raises(TinyspecError, match=r"^\[head\] "):
            ConsistentSettings(**values)  # type: ignore[arg-type]
    with pytest.raises(TinyspecError, match="one layer"):
        policy_shapes(replace(LLAMA, n_layers=1), PolicySettings())
