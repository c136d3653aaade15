"""The cost curve and its floor, with a clock that is wound by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.bench.fakes import Hand
from tests.lm.small import GPT2, LLAMA, model
from tinyspec.bench import curve
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model


class Slow:
    """A pass that takes 2 + k / 4 seconds, and one more unless it comes right after another."""

    def __init__(self, hand: Hand, label: str = "tinyspec", weights: int | None = 100):
        self.hand, self.label, self.weights, self.ready, self.awake = hand, label, weights, 0, False

    def prepare(self, k: int) -> None:
        self.hand.wind(99.0)
        self.ready = k

    def run(self, k: int) -> None:
        assert self.ready == k
        self.ready = 0
        self.hand.wind(2 + k / 4 + (not self.awake))
        self.awake = not self.awake


def meter(hand: Hand, who: str, kind: str, amount: int, seconds: Sequence[float]) -> curve.Meter:
    taken = iter(seconds)
    return curve.Meter(who, kind, amount, lambda: hand.wind(next(taken)))


def measured(rounds: int = 2) -> dict[str, object]:
    hand = Hand()
    meters = [
        meter(hand, "slow", "bandwidth", 400, [9.0, 9.0, 7.0, 4.0, 7.0, 5.0]),
        meter(hand, "fast", "bandwidth", 400, [0.1, 0.1, 7.0, 2.0, 7.0, 1.0]),
        meter(hand, "square", "peak", 1000, [0.1, 0.1, 7.0, 4.0, 7.0, 2.0]),
    ]
    return curve.measure_curve(
        [Slow(hand), Slow(hand, "peer", None)], meters, rounds, hand, ks=(1, 4, 8), settle=hand.wind
    )


def test_the_second_run_is_timed_and_the_first_round_is_dropped() -> None:
    raw = measured()
    assert raw["curves"] == {
        who: {"1": [2.25] * 2, "4": [3.0] * 2, "8": [4.0] * 2} for who in ("tinyspec", "peer")
    }
    assert [m["seconds"] for m in raw["meters"]] == [[4.0, 5.0], [2.0, 1.0], [4.0, 2.0]]  # type: ignore[attr-defined]


def test_the_threads_of_other_work_get_time_to_sleep_before_each_timed_pass() -> None:
    hand, told = Hand(), list[str]()

    class Telling(Slow):
        def run(self, k: int) -> None:
            super().run(k)
            told.append(self.label)

    meters = [curve.Meter("sum", "bandwidth", 1, lambda: told.append("sum"))]
    forwards = [Telling(hand), Telling(hand, "peer", None)]
    curve.measure_curve(
        forwards,
        meters,
        1,
        hand,
        ks=(1, 4),
        settle=lambda seconds: told.append("rest" * (seconds >= 0.005)),
    )
    a_round = ["rest", "tinyspec", "tinyspec", "rest", "peer", "peer"] * 2 + ["rest", "sum", "sum"]
    assert told == a_round + a_round  # the first of them is not kept


def test_a_ceiling_is_the_best_that_anybody_reached() -> None:
    tops = curve.find_ceilings(measured())
    assert tops["bandwidth"]["slow"] == 100
    assert tops["bandwidth"]["fast"] == 400
    assert tops["peak"] == {"square": 500}
    assert (
        tops["bandwidth"]["tinyspec, whole forward"]
        == tops["bandwidth"]["peer, whole forward"]
        == 100 / 2.25
    )


def test_the_floor_is_the_larger_of_reading_and_arithmetic() -> None:
    config = replace(LLAMA, n_layers=1)
    found = curve.summarize_curve(measured(), config, 4, cached=5)
    assert (found["bandwidth"], found["peak"]) == (400, 500)
    rows = found["curves"]["tinyspec"]["rows"]
    for k, row in rows.items():
        floor = max(100 / 400, curve.count_operations(config, int(k), 5) / 500)
        assert row["floor"] == pytest.approx(1e3 * floor)
        assert row["over"] == pytest.approx(row["milliseconds"] / (1e3 * floor))
        often = max(
            100 / (400 / 1.5), curve.count_operations(config, int(k), 5) / (1000 / 3)
        )  # each meter at its median
        assert row["usually"] == pytest.approx(row["milliseconds"] / (1e3 * often))
    assert rows["8"]["against_one"] == pytest.approx(4.0 / 2.25)
    assert found["curves"]["tinyspec"]["falls"] == []


def test_a_falling_cost_is_listed_unless_the_spread_explains_it() -> None:
    assert curve.find_cost_drops({1: [1.0, 1.0], 2: [4.0, 4.0], 3: [3.0, 3.0], 4: [4.5, 4.5]}) == [
        3
    ]
    assert curve.find_cost_drops({1: [1.0, 5.0, 9.0], 2: [0.9, 4.0, 8.0]}) == []


@pytest.mark.parametrize("config", [LLAMA, GPT2, replace(LLAMA, tied=False)])
def test_what_a_forward_reads_and_computes(config: Config) -> None:
    """Count weight by weight: each matrix is read once, tables of rows are looked up."""
    tables = {"positions"} | (set() if config.tied else {"embed"})
    used = {name: w for name, w in Model.random(config).weights.items() if name not in tables}
    assert curve.count_weight_bytes(config, 4) == sum(
        w.numel() * w.element_size() for w in used.values()
    )
    products = sum(w.numel() for w in used.values() if w.ndim == 2)
    attention = (
        2 * 2 * config.q_dim * config.n_layers * (3 * 10 + 1 + 2 + 3)
    )  # scores and sums, over what 3 tokens see
    assert curve.count_operations(config, 3, 10) == 2 * 3 * products + attention


@pytest.mark.parametrize("k", [1, 2, 7])
def test_our_forward_pass_runs_exactly_k_positions(k: int) -> None:
    forward = curve.OwnForward(model(LLAMA, dtype=torch.float32), cached=9)
    forward_log: list[ForwardRecord] = forward.session.forward_log
    for _ in range(3):
        forward.prepare(k)
        mark = len(forward_log)
        forward.run(k)
        assert [(call.rows, call.head_rows) for call in forward_log[mark:]] == [(k, k)]
        assert len(forward.session) == 10


def test_the_meters_do_what_they_say() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        meters = curve.make_meters(Model.random(LLAMA, dtype=dtype), mebibytes=1, side=32)
        assert {m.kind for m in meters} == {"bandwidth", "peak"}
        assert len({(m.who, m.kind) for m in meters}) == len(meters)
        assert all(m.amount == 2**20 for m in meters if m.kind == "bandwidth")
        assert all(m.amount == 2 * 32**3 for m in meters if m.kind == "peak")
        for m in meters:
            m.work()
