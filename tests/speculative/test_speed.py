"""SPEED: guesses in flight share a pass, their ticks follow from a formula, and no text changes."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyspec
from tests.lm.small import GPT2, LLAMA
from tests.lm.small import model as network
from tests.zoo import tiny_zoo
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import likeliest_token, repeat_layers, run_dense
from tinyspec.laws.traps import Trap, begin_decoder
from tinyspec.laws.traps import speed as traps
from tinyspec.laws.traps.speed import cyclic_network
from tinyspec.lm.checkpoint import read_checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.families import from_hf, to_hf
from tinyspec.lm.forward import Plan
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated.speed import (
    count_ticks,
    decode_with_early_guesses,
    expected_ticks,
)
from tinyspec.technique import Request, find_technique
from tinyspec.training.exit_losses import ExitLosses

CARD = find_technique("speed")


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_every_trap_is_passed(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 2


# ---------------------------------------------------------------------- the algorithm


class Greedy:
    """A generator that chooses the likeliest token."""

    def choice(self, n: int, p: Any) -> int:
        return likeliest_token(p)


@pytest.mark.parametrize(("layers", "repeat", "exit"), [(3, 3, 1), (6, 3, 2), (8, 4, 1)])
def test_text_and_ticks_are_those_of_the_algorithm_without_a_cache(
    layers: int, repeat: int, exit: int
) -> None:
    model, prompt = cyclic_network(3, layers, repeat), (0, 1)

    def row_after(text: list[int], repetitions: int) -> Any:
        plan = Plan(last=repetitions * model.config.distinct_layers)
        logits = run_dense(model, text, plan).logits[-1]
        return np.exp(logits) / np.exp(logits).sum()

    expected, ticks = decode_with_early_guesses(row_after, prompt, 14, repeat, exit, Greedy())
    decoder = begin_decoder(CARD.make, [model], prompt, max_new_tokens=14, exit=exit)
    calls = [call for round in decoder.run(Seeded(0)) for call in round.calls]
    assert decoder.context == expected
    assert count_ticks(calls, model.config.distinct_layers) == ticks


def test_a_token_costs_one_tick_where_every_guess_is_right_and_all_where_none_is() -> None:
    assert expected_ticks(3, 1, 1, 10) == 3 + 9
    assert expected_ticks(3, 1, 0, 10) == 30
    assert expected_ticks(4, 2, Fraction(1, 2), 5) == 4 + 4 * 3


def test_a_model_without_layers_that_differ_is_guessed_at_once() -> None:
    """Where the layers add nothing, every early guess is right: one tick for each further token."""
    model = cyclic_network(1, 6, 3)
    still = {
        name: torch.zeros_like(w) if name.endswith(("out.weight", "down.weight")) else w
        for name, w in model.weights.items()
    }
    decoder = begin_decoder(CARD.make, [Model(model.config, still)], (0, 1), max_new_tokens=9)
    calls = [call for round in decoder.run(Seeded(0)) for call in round.calls]
    assert count_ticks(calls, 2) == expected_ticks(3, 1, 1, 9)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_nothing_is_begun_beyond_the_wanted_tokens(tokens: int) -> None:
    model = cyclic_network(1, 6, 3)
    decoder = begin_decoder(CARD.make, [model], (0, 1), max_new_tokens=tokens)
    calls = [call for round in decoder.run(Seeded(0)) for call in round.calls]
    assert len(decoder.new) == tokens
    assert max((call.rows for call in calls), default=0) <= max(tokens, 1)


def test_nothing_is_begun_after_a_guess_that_ends_the_text() -> None:
    model = cyclic_network(1, 6, 3)
    every = frozenset(range(model.config.vocab_size))
    decoder = begin_decoder(CARD.make, [model], (0, 1), max_new_tokens=9, eos=every)
    calls = [call for round in decoder.run(Seeded(0)) for call in round.calls]
    assert all(call.rows == 1 for call in calls)


def test_a_text_may_reach_the_end_of_the_context() -> None:
    model = cyclic_network(1, 6, 3)
    short = Model(replace(model.config, max_positions=8), model.weights)
    request = Request(short.session(), sampling=SamplingParams(0.0), positions=8)
    decoder = CARD.make(request)
    decoder.extend((0, 1))
    while not decoder.finished:
        decoder.step(Seeded(0))
    assert len(decoder.context) == 8


def test_a_rewound_text_goes_on_as_if_it_were_new() -> None:
    model = cyclic_network(2, 6, 3)

    def run(*texts: tuple[int, ...]) -> list[int]:
        decoder = begin_decoder(CARD.make, [model], texts[0], max_new_tokens=4)
        list(decoder.run(Seeded(0)))
        for text in texts[1:]:
            decoder.rewind(2)
            decoder.extend(text)
            list(decoder.run(Seeded(0)))
        return decoder.context

    assert run((0, 1), (3, 2)) == run((0, 1, 3, 2))


# ---------------------------------------------------------------------- models with repeated layers


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["LLaMA", "GPT-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_repeated_layers_are_the_layers_written_out(config: Config, dtype: torch.dtype) -> None:
    cyclic = repeat_layers(network(replace(config, n_layers=4)), 2)
    weights = dict(cyclic.weights)
    for name, weight in cyclic.weights.items():
        layer, dot, rest = name.partition(".")
        if dot and layer.isdigit():
            weights[f"{int(layer) + 2}.{rest}"] = weight
    whole = Model(replace(cyclic.config, extra={}), weights)
    text = [1, 2, 3, 4, 5]
    got, expected = (model.to(dtype=dtype).logits(text) for model in (cyclic, whole))
    assert torch.equal(got, expected)
    assert cyclic.config.parameters() < whole.config.parameters()


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["LLaMA", "GPT-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ticks_give_the_text_of_plain_decoding(config: Config, dtype: torch.dtype) -> None:
    model = repeat_layers(network(replace(config, n_layers=4)), 2).to(dtype=dtype)
    plain, fast = (
        begin_decoder(find_technique(name).make, [model], (1, 2), max_new_tokens=10)
        for name in ("autoregressive", "speed")
    )
    rows = [[round.scores.logits[0] for round in one.run(Seeded(0))] for one in (plain, fast)]
    assert plain.context == fast.context
    within = 1e-12 if dtype == torch.float64 else 0.0 if model.engine is not None else 1e-1
    for one, other in zip(*rows, strict=True):
        assert float((one - other).abs().max()) <= within


def test_a_checkpoint_holds_the_repeated_layers_once(tmp_path: Path) -> None:
    cyclic = repeat_layers(network(replace(LLAMA, n_layers=4)), 2)
    cyclic.save(tmp_path / "cyclic")
    again = Model(*read_checkpoint(tmp_path / "cyclic"))
    assert again.config.repeat == 2 and again.config.distinct_layers == 2
    assert set(again.weights) == set(cyclic.weights) == set(cyclic.config.shapes())
    assert torch.equal(again.logits([1, 2, 3]), cyclic.logits([1, 2, 3]))


@pytest.mark.parametrize("repeat", [0, -1, 3, "2", 1.0, True, [2], 10**30])
def test_a_repeat_that_does_not_divide_the_layers_is_named(repeat: Any) -> None:
    values = to_hf(replace(LLAMA, n_layers=4), "float32") | {"tinyspec": {"repeat": repeat}}
    with pytest.raises(TinyspecError, match=r"^config.json: tinyspec: repeat is ") as error:
        from_hf(values)
    assert "\n" not in str(error.value)


def test_a_model_without_repeated_layers_is_named(tmp_path: Path) -> None:
    target = tinyspec.load(tiny_zoo(tmp_path).big)
    with pytest.raises(TinyspecError, match="speed needs a model whose layers repeat"):
        tinyspec.generate(target, [1, 2], method="speed")


def test_a_penalty_is_applied_to_guesses_with_their_own_history() -> None:
    model = cyclic_network(1, 6, 3)
    sampling = SamplingParams(0.0, repetition_penalty=1.7)
    stop = StoppingCriteria(max_new_tokens=12)
    plain, fast = (
        find_technique(name).make(Request(model.session(), sampling=sampling, stop=stop))
        for name in ("autoregressive", "speed")
    )
    for decoder in (plain, fast):
        decoder.extend((0, 1, 2))
        list(decoder.run(Seeded(0)))
    assert plain.context == fast.context


# ---------------------------------------------------------------------- losses at repetitions


def test_losses_at_repetitions_leave_out_the_layers_between() -> None:
    shares = ExitLosses("linear", every=4).normalized_weights(12, 0, 0.0)
    assert [layer + 1 for layer, share in enumerate(shares) if share] == [4, 8, 12]
    assert shares[3::4] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    with pytest.raises(TinyspecError, match="every >= 1"):
        ExitLosses(every=0)
