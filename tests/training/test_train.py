"""The trainer learns, continues bit for bit, keeps the best weights, and leaves no half file."""

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training.schedule import TrainSettings, learning_rate
from tinyspec.training.train import train

SHAPE = Config(
    vocab_size=16,
    d_model=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=32,
    max_positions=16,
    eos=(0,),
)
SETTINGS = TrainSettings(steps=12, lr=1e-2, warmup=2, ema=0.9, log_every=2, valid_every=4, pieces=2)


def batches(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts that count upwards: easy to learn."""
    rows = (torch.randint(16, (4, 1), generator=generator) + torch.arange(9)) % 16
    return rows[:, :-1], rows[:, 1:]


def run(
    folder: Path, settings: TrainSettings = SETTINGS, stop_at: int = 0, validate: Any = None
) -> tuple[Model, Any]:
    """Train a tiny model with dropout; `stop_at`: a Ctrl-C arrives during that batch."""
    model = Model.random(SHAPE, seed=1)
    drawn = 0

    def interrupted(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        nonlocal drawn
        drawn += 1
        if drawn == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return batches(generator)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.training_logits(inputs, 0.1).flatten(0, 1), targets.flatten())

    def figures() -> dict[str, float]:
        with torch.no_grad():
            inputs, targets = batches(torch.Generator().manual_seed(99))
            return {
                "valid": float(
                    F.cross_entropy(model.training_logits(inputs).flatten(0, 1), targets.flatten())
                )
            }

    return model, train(
        model.weights, interrupted, loss, settings, folder, validate=validate or figures
    )


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_log_says_so(tmp_path: Path) -> None:
    _, ended = run(
        tmp_path, TrainSettings(steps=40, lr=2e-2, warmup=5, log_every=10, valid_every=20)
    )
    assert ended.finished
    losses = [e["loss"] for e in entries(tmp_path) if "loss" in e]
    assert losses[-1] < 0.5 * losses[0]
    assert ended.log == entries(tmp_path)
    assert [e["step"] for e in ended.log if "valid" in e] == [20, 40]
    assert ended.tokens == 40 * 32
    assert {"step", "tokens", "loss", "lr", "tokens_per_second", "seconds"} == set(ended.log[0])


@pytest.mark.parametrize(("optimizer", "stop_at"), [("adamw", 1), ("adamw", 5), ("muon", 11)])
def test_interrupted_and_gone_on_is_never_interrupted_bit_for_bit(
    tmp_path: Path, optimizer: Literal["adamw", "muon"], stop_at: int
) -> None:
    settings = replace(SETTINGS, optimizer=optimizer)
    whole, ended = run(tmp_path / "whole", settings)
    _, stopped = run(tmp_path / "parts", settings, stop_at=stop_at)
    assert not stopped.finished
    assert stopped.step == stop_at, "the step in hand is completed"
    resumed, again = run(tmp_path / "parts", settings)
    assert again.finished
    assert (again.best, again.tokens) == (ended.best, ended.tokens)
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    logs = [
        [{**e, "seconds": 0, "tokens_per_second": 0} for e in entries(tmp_path / part)]
        for part in ("whole", "parts")
    ]
    assert logs[0] == logs[1]
    assert [p.name for p in (tmp_path / "parts").glob("*.part")] == []


def test_a_log_that_ran_ahead_of_the_state_is_taken_back(tmp_path: Path) -> None:
    run(tmp_path, stop_at=5)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(
            '{"step": 6, "tokens": 1, "loss": 9.0, "seconds": 1.0}\n{"step": 8, "tok'
        )  # killed while writing
    _, ended = run(tmp_path)
    assert ended.log == entries(tmp_path)
    assert [e["loss"] for e in ended.log if "loss" in e and e["loss"] == 9.0] == []


def test_the_best_weights_by_validation_are_the_result(tmp_path: Path) -> None:
    figures = iter([3.0, 1.0, 2.0])
    kept: list[dict[str, Tensor]] = []
    model = Model.random(SHAPE, seed=1)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.training_logits(inputs).flatten(0, 1), targets.flatten())

    def validate() -> dict[str, float]:
        kept.append({name: w.detach().clone() for name, w in model.weights.items()})
        return {"valid": next(figures)}

    ended = train(model.weights, batches, loss, SETTINGS, tmp_path, validate=validate)
    assert ended.best == 1.0
    for name, weight in model.weights.items():
        assert torch.equal(weight, kept[1][name])
        assert not torch.equal(weight, kept[2][name])


def test_weight_decay_spares_norms(tmp_path: Path) -> None:
    weights = {"matrix": torch.ones(2, 2), "norm": torch.ones(2)}

    def nothing(x: Tensor) -> Tensor:
        return 0.0 * (weights["matrix"].sum() + weights["norm"].sum()) + x.sum() * 0

    train(
        weights,
        lambda g: (torch.zeros(2, 1),),
        nothing,
        TrainSettings(steps=3, weight_decay=0.5, lr=0.1),
        tmp_path,
    )
    assert (weights["norm"] == 1).all()
    assert (weights["matrix"] < 1).all()


def test_pieces_give_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    results = []
    for pieces in (1, 3):  # 4 rows in pieces of 2 and 2
        model = Model.random(SHAPE, seed=1, dtype=torch.float64)

        def loss(inputs: Tensor, targets: Tensor, model: Model = model) -> Tensor:
            return F.cross_entropy(model.training_logits(inputs).flatten(0, 1), targets.flatten())

        train(
            model.weights,
            batches,
            loss,
            TrainSettings(steps=2, pieces=pieces),
            tmp_path / str(pieces),
        )
        results.append(model.weights)
    for name, weight in results[0].items():
        assert torch.allclose(weight, results[1][name], atol=1e-10)


def test_pieces_count_by_what_the_loss_is_the_mean_of(tmp_path: Path) -> None:
    """A mean over tokens, of texts of 8 tokens and of 1: the pieces have 16 tokens and 2."""
    is_text = torch.tensor([[True] * 8, [True] * 8, [True, *[False] * 7], [True, *[False] * 7]])
    results = []
    for pieces in (1, 2):
        model = Model.random(SHAPE, seed=1, dtype=torch.float64)

        def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
            return *batches(generator), is_text

        def loss(inputs: Tensor, targets: Tensor, known: Tensor, model: Model = model) -> Tensor:
            return F.cross_entropy(model.training_logits(inputs)[known], targets[known])

        ended = train(
            model.weights,
            draw,
            loss,
            TrainSettings(steps=2, pieces=pieces, log_every=1),
            tmp_path / str(pieces),
            weigh=lambda batch: batch[2].sum(),
        )
        results.append((model.weights, [entry["loss"] for entry in ended.log]))
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-6)
    for name, weight in results[0][0].items():
        assert torch.allclose(weight, results[1][0][name], atol=1e-10)


def test_a_clock_budget_ends_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of its own thread count: here they pass, and the clock on the wall stands still."""
    seconds = itertools.count()  # every look at the clock takes a second
    clock = SimpleNamespace(monotonic=lambda: 0.0, thread_time=lambda: float(next(seconds)))
    monkeypatch.setattr("tinyspec.training.train.time", clock)
    settings = TrainSettings(
        steps=1000, minutes=2, lr=1e-2, warmup=1, log_every=1, valid_every=10**9
    )
    _, ended = run(tmp_path, settings)
    assert ended.finished
    assert 120 <= ended.seconds < 130
    assert "valid" in ended.log[-1], "the end is validated whenever it comes"
    assert [e["lr"] for e in ended.log if "lr" in e][-1] < 0.1 * settings.lr


def test_schedules_warm_up_and_end_at_the_floor() -> None:
    for schedule in ("cosine", "wsd"):
        given: Any = {"schedule": schedule}
        s = TrainSettings(steps=100, lr=1.0, warmup=10, floor=0.1, **given)
        rates = [learning_rate(s, i) for i in range(101)]
        assert rates[0] == pytest.approx(0.1, rel=0.01)
        assert rates[-1] == pytest.approx(0.1)
        assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[79] == 1.0, "wsd is flat until its last fifth"
    flat = replace(s, decay=0.0)
    assert [learning_rate(flat, i) for i in (10, 99, 100)] == [1.0] * 3


@pytest.mark.parametrize("name", ["clip", "minutes"])
def test_a_setting_of_zero_that_would_train_nothing_is_refused(name: str) -> None:
    wrong: Any = {name: 0.0}
    with pytest.raises(TinyspecError, match=rf"\[train\] {name} is 0.0: it must be above 0"):
        TrainSettings(steps=1, **wrong)


def test_a_loss_that_is_not_finite_stops_with_advice(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    with pytest.raises(TinyspecError, match="the loss is nan at step 2: lower"):
        train(
            weights,
            lambda g: (torch.zeros(1),),
            lambda x: weights["w"].sum() * torch.nan,
            SETTINGS,
            tmp_path,
        )
    assert not (tmp_path / "state.pt").exists()


def test_a_state_of_other_weights_is_rejected(tmp_path: Path) -> None:
    run(tmp_path, stop_at=3)
    with pytest.raises(
        TinyspecError, match=r"state.pt is of a training with other weights: --restart"
    ):
        train({"w": torch.ones(2)}, batches, lambda *b: torch.zeros(()), SETTINGS, tmp_path)


def test_global_chance_is_left_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(tmp_path, TrainSettings(steps=2, log_every=1))
    assert torch.equal(before, torch.get_rng_state())
