"""EESD: the exit layer, how long a draft is, and what is learned from each round."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tinyspec
from tests.early_exit.test_kangaroo import propose
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.early_exit.eesd import (
    ThompsonControl,
    choose_draft_length,
    draft_by_thompson,
    eesd_loss,
    exit_layer_shapes,
    initialize_eesd,
)
from tinyspec.early_exit.kangaroo import KangarooSettings, predict_by_adapter
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import eesd as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import freeze_target
from tinyspec.speculative.drafting.speculative_decoding import best_gamma
from tinyspec.technique import Request, TrainingBatch, find_technique

CARD = find_technique("eesd")
assert CARD.trained is not None
TRAINED = CARD.trained


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


def begin(model: Any, text: Any, sampling: SamplingParams, **knobs: Any) -> Decoder:
    log: list[Any] = []
    eos, clock = frozenset(knobs.pop("eos", ())), knobs.pop("clock", None)
    stop = StoppingCriteria(eos=eos)
    request = Request(
        model.session(log), sampling=sampling, stop=stop, forward_log=log, clock=clock
    )
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder


def control_of(decoder: Decoder) -> ThompsonControl:
    drafter: Any = decoder.drafter
    control: ThompsonControl = drafter.control
    return control


@pytest.mark.parametrize("seed", [0, 3])
def test_printed_algorithm_is_what_runs(seed: int) -> None:
    """Every draft of up to three tokens, at two rates that may be drawn."""
    model, text, sampling, cost = traps.exit_network(seed), [0, 1, 2], SamplingParams(top_k=2), 0.4

    def draw_rate(rng: Exhaustive) -> float:
        return (0.5, 0.95)[rng.draw([0.25, 0.75])]

    def by_the_paper(rng: Exhaustive) -> tuple[int, ...]:
        def next_probs(draft: list[int]) -> Any:
            return sampling.probs(feature_laws.trained_forward(CARD, model, text, draft), text)

        generator = EnumeratedGenerator(rng)
        return tuple(draft_by_thompson(next_probs, lambda: draw_rate(rng), cost, 3, generator))

    def by_the_decoder(rng: Exhaustive) -> tuple[int, ...]:
        decoder = begin(model, text, sampling, gamma=3, cost=cost)
        control_of(decoder).draw_rate = draw_rate  # type: ignore[assignment, method-assign]
        tree = decoder.drafter.propose(decoder.context, 9, sampling, rng)
        return tuple(tree.tokens)

    paper, decoder = map(Exhaustive.distribution, (by_the_paper, by_the_decoder))
    assert paper == pytest.approx(decoder, abs=1e-9)
    assert {len(tokens) for tokens in paper} == {1, 3}


# ---------------------------------------------------------------------- the control


@pytest.mark.parametrize("c", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("theta", [0.1, 0.4, 0.75, 0.9])
def test_the_length_is_that_of_leviathan_et_al(theta: float, c: float) -> None:
    """Except that one token is drafted where none would be better."""
    assert choose_draft_length(theta, c, 40) == max(best_gamma(theta, c, 40), 1)


def test_lengths_vary_at_first_and_settle_as_rounds_are_counted() -> None:
    lengths = []
    for accepted, rejected in ((0, 0), (30, 10), (30_000, 10_000)):
        control = ThompsonControl()
        control.accepted, control.rejected = accepted, rejected
        rates = [control.draw_rate(Seeded(seed)) for seed in range(60)]
        lengths.append({choose_draft_length(rate, 0.2, 12) for rate in rates})
    assert len(lengths[0]) > len(lengths[1]) > len(lengths[2]) == 1
    assert lengths[2] == {best_gamma(0.75, 0.2, 12)}


def test_sampled_lengths_are_about_as_fast_as_the_best_one() -> None:
    """The paper's idea, and its ablation: `control` fixed. Simulated rounds, c = 0.2.

    Tokens per time at an acceptance rate of 0.3, 0.7 and 0.95, sampled: 1.07, 1.53 and 2.83. Always
    one token: 1.08, 1.41 and 1.65; always eight: 0.54, 1.21 and 2.84.
    """

    def run(rate: float, fixed: int = 0) -> float:
        control, random, tokens, time = ThompsonControl(), np.random.default_rng(0), 0, 0.0
        for number in range(300):
            n = fixed or choose_draft_length(control.draw_rate(Seeded(number)), 0.2, 8)
            is_wrong = np.append(random.random(8) >= rate, True)
            accepted = min(int(is_wrong.argmax()), n)
            verdict, tree = (
                SimpleNamespace(accepted=[0] * accepted),
                SimpleNamespace(tokens=[0] * n),
            )
            round: Any = SimpleNamespace(verdict=verdict, tree=tree, truncated=0)
            control.learn(round)
            tokens, time = tokens + accepted + 1, time + 1 + n * 0.2
        return tokens / time

    for rate in (0.3, 0.7, 0.95):
        assert run(rate) >= 0.97 * max(run(rate, fixed) for fixed in range(1, 9))
    assert run(0.3, 8) < 0.6 * run(0.3) and run(0.95, 1) < 0.6 * run(0.95)


def test_where_no_rate_can_be_drawn_it_is_the_mean() -> None:
    control = ThompsonControl()
    control.accepted = 2
    rates = {outcome for outcome, _ in Exhaustive.walk(control.draw_rate)}
    assert rates == {0.75}


def test_a_layer_that_was_fitted_to_the_targets_text_teaches_long_drafts() -> None:
    """An untrained one does not: its drafts of the same text are rejected."""
    plain, prompt = small_network(1), [0, 1, 2]
    text = [*prompt, *tinyspec.generate(plain, prompt, max_new_tokens=20).tokens]
    rates = []
    for model in (feature_laws.fit_head(CARD, plain, text), traps.exit_network(1)):
        decoder = begin(model, prompt, SamplingParams(0.0), gamma=4, cost=0.2)
        while len(decoder.new) < 16:
            decoder.step(Seeded(decoder.rounds))
        control = control_of(decoder)
        rates.append(control.accepted / (control.accepted + control.rejected))
    assert rates[0] > 0.9 and rates[1] < 0.7


def test_what_is_known_outlives_a_request_except_in_a_batch() -> None:
    """A batch gives its requests no clock. The cost is part of what is asked."""
    model = traps.exit_network(2)
    knobs: dict[str, Any] = {"gamma": 3, "clock": lambda: 0.0}
    first = begin(model, [0, 1, 2], SamplingParams(), **knobs)
    first.step(Seeded(0))
    again = begin(model, [2, 1], SamplingParams(), **knobs)
    assert control_of(again) is control_of(first)
    known = control_of(first)
    assert known.accepted + known.rejected > 0
    for other in ({"gamma": 2}, {"cost": 0.5}, {"clock": None}):
        assert control_of(begin(model, [0, 1], SamplingParams(), **{**knobs, **other})) is not known
    fixed = begin(model, [0, 1], SamplingParams(), control="fixed", **knobs)
    assert control_of(fixed) is None
    assert len(propose(fixed).tokens) == 3


def test_a_round_that_a_stop_has_cut_teaches_nothing() -> None:
    model = traps.exit_network(2)
    decoder = begin(model, [0, 1, 2], SamplingParams(0.0), gamma=3)
    round = decoder.step(Seeded(0))
    control = control_of(decoder)
    before = control.accepted, control.rejected
    control.learn(round._replace(truncated=1))
    assert (control.accepted, control.rejected) == before


# ---------------------------------------------------------------------- the layer


def test_nothing_follows_the_end_of_a_text() -> None:
    decoder = begin(
        traps.exit_network(1), [0, 1], SamplingParams(0.0), control="fixed", eos=range(4)
    )
    assert len(propose(decoder).tokens) == 1


def test_a_text_of_one_token_has_no_draft() -> None:
    assert not propose(begin(traps.exit_network(1), [0], SamplingParams(0.0))).tokens


def test_an_untrained_layer_is_an_early_exit_with_its_own_norm() -> None:
    model, ids = small_network(2), torch.tensor([[0, 1, 2, 3]])
    settings, target = KangarooSettings(exit=1), freeze_target(small_network(2))
    weights = initialize_eesd(target, settings, 0)
    states = model.torch_blocks().hidden_states(ids, (1,))
    normed = torch.nn.functional.rms_norm(states[:, 0], (8,), eps=model.config.norm_eps)
    got = predict_by_adapter(weights, target, ids, states, 0)
    assert torch.allclose(got[:, :-1], (normed @ target.head.T)[:, 1:])


def test_a_layer_has_every_part_and_is_trained_on_what_was_written() -> None:
    config = Config(99, 8, 3, 2, 1, 4, 12, 64)
    shapes = exit_layer_shapes(config, KangarooSettings(exit=1))
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert {f"layers.0.{part}.weight" for part in (*parts, "input_layernorm")} < shapes.keys()
    model = traps.exit_network(3)
    target, ids = freeze_target(model), torch.tensor([[0, 1, 2, 3, 1, 0]])
    weights = {
        name: model.extras[f"eesd/{name}"]
        for name in exit_layer_shapes(model.config, KangarooSettings(exit=1))
    }
    states = model.torch_blocks().hidden_states(ids, TRAINED.layers(model.config, TRAINED.small))
    is_answer = torch.tensor([[False, False, True, True, True, False]])
    batch = TrainingBatch(ids, is_answer, states, *[torch.empty(0)] * 2)
    nats = [
        -float(row.log_softmax(-1)[ids[0, at]])
        for at in range(3, 6)
        if (row := feature_laws.trained_forward(CARD, model, ids[0, :at].tolist(), [])) is not None
    ]
    got = float(eesd_loss(weights, target, batch))
    assert got == pytest.approx(sum(nats) / 3, abs=1e-5)


def test_an_exit_at_the_last_layer_is_refused() -> None:
    with pytest.raises(TinyspecError, match="exit is 3: the model has 3 layers"):
        TRAINED.layers(small_network(0).config, KangarooSettings(exit=3))
