"""Measure the cost curve: the time of a forward pass over k new tokens, against one over 1 token.

Speculative decoding gains where this curve is flat. A forward pass over few tokens waits for the
weights to come from memory; one over many waits for arithmetic. No program takes less than

    floor = max(weight bytes / bandwidth, operations / peak)

Bandwidth and peak are measured in the same rounds as the curve, and the fastest meter counts: a
slow meter would make the curve look too good. The memory of a shared machine is not always equally
fast. So there are two floors: one from the best sample of the run, which is strict, and one from
the best median, which compares medians with medians.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from tinyspec import _core
from tinyspec.bench.arms import Clock, collect_garbage, make_synchronizer
from tinyspec.bench.harness import find_quartiles, name_dtype
from tinyspec.lm.config import Config
from tinyspec.lm.engine import pack_matrix
from tinyspec.lm.model import Model
from tinyspec.tree import TokenTree

SETTLE = 0.02  # seconds before each sample: the threads of the last one hold their cores for some
KS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # new tokens of a forward pass
CACHED = 256  # tokens in the cache before it
MEBIBYTE = 2**20


class TimedForward(Protocol):
    """A program's forward pass over k tokens after a cache.

    weights  bytes of weights that it reads; None: as many as ours
    """

    label: str
    weights: int | None

    def prepare(self, k: int) -> None: ...
    def run(self, k: int) -> None: ...


class OwnForward:
    """Our forward pass: a session with `cached` tokens scores a chain, and commits nothing."""

    label = "tinyspec"

    def __init__(self, model: Model, cached: int):
        self.model, self.cached, self.wait = model, cached, make_synchronizer(model.device)
        self.weights: int | None = count_read_bytes(model)
        self.session = model.session()
        self.session.extend(self._some(cached + 1))

    def prepare(self, k: int) -> None:
        """Rewind the newest token and add it again: it is the first of the k, and not yet run."""
        self.session.rewind(self.cached)
        self.session.extend(self._some(1))
        self.wait()

    def run(self, k: int) -> None:
        self.session.score(TokenTree.chain(self._some(k - 1)))
        self.wait()

    def _some(self, n: int) -> list[int]:
        return [7 * i % self.model.config.vocab_size for i in range(n)]


def count_weight_bytes(config: Config, itemsize: int) -> int:
    """Return the bytes of weights that a forward pass over few tokens reads.

    It reads all of them, except that it reads few rows of an embedding table.

    >>> tiny = Config(vocab_size=8, d_model=4, n_layers=0, n_heads=1, n_kv_heads=1, head_dim=4,
    ...               d_ff=4, max_positions=9, tied=False)
    >>> count_weight_bytes(tiny, 2)  # the head of 8 x 4, and the last norm's gain
    72
    """
    tables = ("positions",) if config.tied else ("positions", "embed")
    shapes = config.shapes()
    return itemsize * (
        config.parameters() - sum(shapes[n][0] * shapes[n][1] for n in tables if n in shapes)
    )


def count_read_bytes(model: Model) -> int:
    """Return `count_weight_bytes` of a model; a quantised matrix counts as it is stored."""
    shapes, size = model.config.shapes(), model.dtype.itemsize
    saved = sum(
        size * shapes[name][0] * shapes[name][1] - stored
        for name, stored in model.quantised_bytes.items()
    )
    return count_weight_bytes(model.config, size) - saved


def count_operations(config: Config, k: int, cached: int) -> int:
    """Return the operations of a forward pass over k tokens after `cached` others.

    They are the multiplications and additions of matrix products and attention.
    """
    matrices = sum(
        s[0] * s[1]
        for n, s in config.shapes().items()
        if len(s) == 2 and n not in ("positions", "embed")
    )
    matrices += config.vocab_size * config.d_model if config.tied else 0
    # Each token attends to the cache, to itself, and to the new tokens before it.
    pairs = k * cached + k * (k + 1) // 2
    return 2 * k * matrices + 4 * pairs * config.n_layers * config.q_dim


class Meter(NamedTuple):
    """Work that only reads `amount` bytes (a bandwidth), or only computes (a peak)."""

    who: str
    kind: str
    amount: int
    work: Callable[[], object]


def make_meters(model: Model, mebibytes: int = 256, side: int = 1024) -> list[Meter]:
    """Return the meters of bandwidth and peak.

    Bandwidth: one row times a matrix of so many MiB, by us and by torch, and torch's sum over it.
    Peak: a square matrix of `side` times itself, by us and by torch, in the model's dtype and in
    float32.
    """
    width, device, made = 2048, model.device, list[Meter]()
    for dtype in dict.fromkeys((model.dtype, torch.float32)):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            continue
        name = name_dtype(dtype)
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
    """Return a function that does the work and waits until it is done."""
    wait = make_synchronizer(on[0].device)

    def run() -> None:
        work(*on)
        wait()

    return run


def _compiled_product(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that computes x times the weight's transpose by our kernel."""
    assert _core.compute is not None
    out, inputs = weight.shape
    packed = pack_matrix(weight)
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
    """Time every forward pass and every meter in turn, `rounds` times after a round to warm up.

    settle  waits until the threads of the last program sleep. Then all threads sleep, so each runs
            twice and the second run is timed: in a text too, a pass comes right after another.
    Returns the raw seconds.
    """
    curves: dict[str, dict[str, list[float]]] = {
        f.label: {str(k): [] for k in ks} for f in forwards
    }
    meter_seconds: list[list[float]] = [[] for _ in meters]
    for round in range(-1, rounds):
        collect_garbage()
        for k in (ks[(i + round) % len(ks)] for i in range(len(ks))):  # another first every round
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
    """Return what each meter reached: {"bandwidth": {who: bytes/s}, "peak": {who: operations/s}}.

    of  which of its samples counts: the best, or the median
    A whole forward pass over one token reads all weights, so it is a meter of bandwidth too.
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
    """Return the greatest bandwidth and the greatest peak of all meters; 0 if there is no meter."""
    return max(tops["bandwidth"].values(), default=0.0), max(tops["peak"].values(), default=0.0)


def summarize_curve(
    raw: Mapping[str, Any], config: Config, itemsize: int, cached: int
) -> dict[str, Any]:
    """Return the curve of each program: milliseconds, quartiles, t(k)/t(1), and t(k)/floor.

    over     median time over the floor by the best samples; 1 is the machine's limit
    usually  median time over the floor by the best median
    falls    the k that cost less than a smaller k, by more than the quartiles of both explain
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
            read = raw["weights"][label] or count_weight_bytes(config, itemsize)
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
    """Return the k that cost less than some smaller one, beyond the quartiles of both.

    >>> find_cost_drops({1: [1.0, 1.0, 1.0], 2: [3.0, 3.1, 3.2], 4: [2.0, 2.0, 2.1]})
    [4]
    """
    ordered = sorted(times)
    return [
        k
        for i, k in enumerate(ordered)
        if any(find_quartiles(times[k])[1] < find_quartiles(times[j])[0] for j in ordered[:i])
    ]
