"""The curve on which speculation lives: what one forward over k new tokens costs, against one over
a single token.

A forward over few tokens waits for the weights to come from memory, one over many for arithmetic.
Under both stands a floor that no program goes below: max(weight bytes / bandwidth, operations /
peak). The two ceilings are measured in the same rounds as the curve, by whoever reads or multiplies
fastest: a slow meter would flatter. On a shared machine the memory is faster in some moments than
in others, so there are two floors: of the best moment of the run, which is strict, and of the best
meter's median, which is like against like.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from tinyspec import _core
from tinyspec.bench.arms import Clock, collect_garbage, make_synchronizer
from tinyspec.bench.harness import find_quartiles
from tinyspec.lm.config import Config
from tinyspec.lm.engine import pack
from tinyspec.lm.model import Model
from tinyspec.tree import TokenTree

SETTLE = 0.02
"""Seconds before each that is timed: threads of whoever ran before keep their cores for some
milliseconds.
"""
KS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CACHED = 256
MEBIBYTE = 2**20


class TimedForward(Protocol):
    """Somebody's forward over k tokens behind a cache. `weights`: bytes it reads for them; None: as
    many as ours.
    """

    label: str
    weights: int | None

    def prepare(self, k: int) -> None: ...
    def run(self, k: int) -> None: ...


class OwnForward:
    """Ours: a session with `cached` tokens behind it scores a chain, of which nothing is kept."""

    label = "tinyspec"

    def __init__(self, model: Model, cached: int):
        self.model, self.cached, self.wait = model, cached, make_synchronizer(model.device)
        self.weights: int | None = weight_bytes(model.config, model.dtype.itemsize)
        self.session = model.session()
        self.session.extend(self._some(cached + 1))

    def prepare(self, k: int) -> None:
        """Take the newest token back and give it again: it is the first of the k, and not yet
        run.
        """
        self.session.rewind(self.cached)
        self.session.extend(self._some(1))
        self.wait()

    def run(self, k: int) -> None:
        self.session.score(TokenTree.chain(self._some(k - 1)))
        self.wait()

    def _some(self, n: int) -> list[int]:
        return [7 * i % self.model.config.vocab_size for i in range(n)]


def weight_bytes(config: Config, itemsize: int) -> int:
    """Bytes of weights that a forward over few tokens reads: all of them, but of a table of rows
    only some rows.

    >>> weight_bytes(Config(vocab_size=8, d_model=4, n_layers=0, n_heads=1, n_kv_heads=1, head_dim=4, d_ff=4,
    ...                     max_positions=9, tied=False), 2)  # the head of 8 x 4 and the last norm's gain
    72
    """
    tables = ("positions",) if config.tied else ("positions", "embed")
    shapes = config.shapes()
    return itemsize * (
        config.parameters() - sum(shapes[n][0] * shapes[n][1] for n in tables if n in shapes)
    )


def count_operations(config: Config, k: int, cached: int) -> int:
    """Multiplications and additions of a forward over k tokens behind `cached` others: products and
    attention.
    """
    matrices = sum(
        s[0] * s[1]
        for n, s in config.shapes().items()
        if len(s) == 2 and n not in ("positions", "embed")
    )
    matrices += config.vocab_size * config.d_model if config.tied else 0
    looks = (
        k * cached + k * (k + 1) // 2
    )  # each token looks at the cache, and at itself and those before it
    return 2 * k * matrices + 4 * looks * config.n_layers * config.q_dim


class Meter(NamedTuple):
    """A piece of work that is nothing but reading, or nothing but arithmetic: `amount` bytes, or
    operations.
    """

    who: str
    kind: str
    amount: int
    work: Callable[[], object]


def make_meters(model: Model, mebibytes: int = 256, side: int = 1024) -> list[Meter]:
    """Weight reads: one row times a matrix of that many MiB, by us and by torch, and torch's sum
    over it. Products: a square of `side`, by us and by torch, in the model's type and in
    float32."""
    width, device, made = 2048, model.device, list[Meter]()
    for dtype in dict.fromkeys((model.dtype, torch.float32)):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            continue
        name = str(dtype).removeprefix("torch.")
        compiled = device.type == "cpu" and _core.compute is not None and dtype != torch.float16
        square = torch.randn(side, side).to(device, dtype)
        made.append(
            Meter(f"torch, {name}", "peak", 2 * side**3, _synchronized(lambda s: s @ s.t(), square))
        )
        if compiled:
            made.append(
                Meter(f"tinyspec, {name}", "peak", 2 * side**3, _compiled_product(square, square))
            )
        if dtype != model.dtype:
            continue
        weight = torch.randn(max(mebibytes * MEBIBYTE // (width * dtype.itemsize), 16), width).to(
            device, dtype
        )
        row, size = torch.randn(1, width).to(device, dtype), weight.numel() * weight.element_size()
        words = weight.view(torch.float32) if dtype != torch.float32 else weight
        made.append(
            Meter(
                f"torch, {name}",
                "bandwidth",
                size,
                _synchronized(torch.nn.functional.linear, row, weight),
            )
        )
        made.append(Meter("torch's sum", "bandwidth", size, _synchronized(torch.sum, words)))
        if compiled:
            made.append(
                Meter(f"tinyspec, {name}", "bandwidth", size, _compiled_product(weight, row))
            )
    return made


def _synchronized(work: Callable[..., torch.Tensor], *on: torch.Tensor) -> Callable[[], object]:
    """The work, until it is done."""
    wait = make_synchronizer(on[0].device)

    def run() -> None:
        work(*on)
        wait()

    return run


def _compiled_product(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """x times the weight's transpose by our kernel."""
    assert _core.compute is not None
    out, inputs = weight.shape
    packed = pack(weight)
    bits = packed.view(torch.uint16) if packed.dtype == torch.bfloat16 else packed
    matrix = _core.compute.Packed(bits.numpy(), out, inputs)
    rows, result = x.float().contiguous(), torch.empty(len(x), out)
    return lambda: matrix.product(rows.numpy(), result.numpy(), torch.get_num_threads())


def measure_curve(
    forwards: Sequence[TimedForward],
    meters: Sequence[Meter],
    rounds: int,
    clock: Clock,
    tick: Callable[[], None] = lambda: None,
    ks: Sequence[int] = KS,
    settle: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Raw seconds of every forward and every meter, all in turn, `rounds` times; a first round is
    run and not kept.

    settle(seconds) waits until the threads of whoever ran before sleep. By then everybody's do:
    each runs twice and the second is timed, as in a text, where a call comes right behind another.
    """
    curves: dict[str, dict[str, list[float]]] = {
        f.label: {str(k): [] for k in ks} for f in forwards
    }
    meter_seconds: list[list[float]] = [[] for _ in meters]
    for round in range(-1, rounds):
        order = [
            ks[(i + round) % len(ks)] for i in range(len(ks))
        ]  # who goes first changes with every round
        collect_garbage()
        for k in order:
            for forward in forwards:
                settle(SETTLE)
                for _ in range(2):
                    forward.prepare(k)
                    begun = clock()
                    forward.run(k)
                if round >= 0:
                    curves[forward.label][str(k)].append(clock() - begun)
                tick()
        for meter, seconds in zip(meters, meter_seconds, strict=True):
            settle(SETTLE)
            for _ in range(2):
                begun = clock()
                meter.work()
            if round >= 0:
                seconds.append(clock() - begun)
            tick()
    return {
        "curves": curves,
        "weights": {f.label: f.weights for f in forwards},
        "meters": [
            {"who": m.who, "kind": m.kind, "amount": m.amount, "seconds": s}
            for m, s in zip(meters, meter_seconds, strict=True)
        ],
    }


def find_ceilings(
    raw: Mapping[str, Any], of: Callable[[Sequence[float]], float] = min
) -> dict[str, dict[str, float]]:
    """What each meter reached at its best (or `of` its samples): {"bandwidth": {who: bytes/s},
    "peak": {who: operations/s}}.

    A whole forward over one token reads all weights: it is a meter of bandwidth too.
    """
    best: dict[str, dict[str, float]] = {"bandwidth": {}, "peak": {}}
    for meter in raw["meters"]:
        best[meter["kind"]][meter["who"]] = meter["amount"] / of(meter["seconds"])
    ours = raw["weights"].get("tinyspec")
    for label, curve in raw["curves"].items():
        read = raw["weights"][label] or ours
        if read and "1" in curve:
            best["bandwidth"][f"{label}, whole forward"] = read / of(curve["1"])
    return best


def find_highest_ceilings(tops: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """Bandwidth and peak: whoever reads, and whoever multiplies fastest. 0: there was no such
    meter.
    """
    return max(tops["bandwidth"].values(), default=0.0), max(tops["peak"].values(), default=0.0)


def summarize_curve(
    raw: Mapping[str, Any], config: Config, itemsize: int, cached: int
) -> dict[str, Any]:
    """The curve of each program in figures: milliseconds, quartiles, t(k)/t(1), and how near our
    own comes to the floor.

    `over` is the median time over the floor of the run's best moment; `usually`, over that of the
    best meter's median: 1 is the machine's limit. `falls` lists the k whose cost is below that of a
    smaller k by more than the quartiles of both explain.
    """
    tops = find_ceilings(raw)
    bandwidth, peak = find_highest_ceilings(tops)
    usual = find_highest_ceilings(find_ceilings(raw, median))
    made: dict[str, Any] = {
        "cached": cached,
        "bandwidth": bandwidth,
        "peak": peak,
        "ceilings": tops,
        "curves": {},
    }
    for label, curve in raw["curves"].items():
        times = {int(k): seconds for k, seconds in curve.items()}
        one = median(times[min(times)])
        rows = {
            str(k): {
                "milliseconds": 1e3 * median(seconds),
                "quartiles": [1e3 * q for q in find_quartiles(seconds)],
                "against_one": median(seconds) / one,
            }
            for k, seconds in sorted(times.items())
        }
        if bandwidth and peak:
            read = raw["weights"][label] or weight_bytes(config, itemsize)
            for k, row in ((int(k), row) for k, row in rows.items()):
                row["floor"], often = (
                    1e3 * max(read / reading, count_operations(config, k, cached) / summing)
                    for reading, summing in ((bandwidth, peak), usual)
                )
                row["over"], row["usually"] = (
                    row["milliseconds"] / row["floor"],
                    row["milliseconds"] / often,
                )
        made["curves"][label] = {"rows": rows, "falls": find_cost_drops(times)}
    return made


def find_cost_drops(times: Mapping[int, Sequence[float]]) -> list[int]:
    """The k that cost less than some smaller one, beyond the quartiles of both.

    >>> find_cost_drops({1: [1.0, 1.0, 1.0], 2: [3.0, 3.1, 3.2], 4: [2.0, 2.0, 2.1]})
    [4]
    """
    ordered = sorted(times)
    return [
        k
        for i, k in enumerate(ordered)
        if any(find_quartiles(times[k])[1] < find_quartiles(times[j])[0] for j in ordered[:i])
    ]
