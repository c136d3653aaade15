"""What passes and rounds take: the model of time by which drafts are chosen.

`CostModel` tells the seconds of a round, for a number of requests and of draft tokens. All that
choose how much to draft ask it: auto, sequoia, synergy, smartspec and the forecast of magicdec. It
has three sources. auto and sequoia learn it while they decode (`goodput.LearntCosts`). synergy and
smartspec measure it before their first round (`MeasuredRounds`). And it follows from the seconds of
forward passes (`ForecastRounds`): so a choice can be made for a machine that is not at hand.

A pass over few rows waits for the weights to come from memory. So further rows cost little, until
arithmetic takes longer than the weights. The seconds of a pass depend on

    R  rows, of all requests together      S  sessions that take part
    H  rows whose logits are wanted        A  keys that the rows read, each its own and all before

Two kinds of `PassCosts` say how. `FittedCosts` are measured on a machine:

    seconds = pass + session * S + read * A + curve(R) + [H > 0] * (head_pass + head * H)

where curve is piecewise linear and never falls. Rows of a prompt need no logits, so H is less than
R. All coefficients are at least 0, and are chosen to make the relative errors small.
`RooflineCosts` are computed from the data sheet of a device, and nothing runs as fast as that:

    seconds = max(bytes / bandwidth, operations / peak)

A simulated clock adds up these seconds over the pass log of a scheduler. In a batch auto reads
passes by their rows alone (`RowCosts`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.scheduler import SharedPass

Floats = NDArray[np.float64]
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512)  # rows at which the slope may change
TOLERANCE = 1e-10  # a gradient below it, where all columns have length 1, counts as 0


class PassCosts(ABC):
    """The seconds of shared forward passes of one model.

    model  its name
    """

    model: str

    @abstractmethod
    def seconds_of(self, rows: Sequence[int], cached: Sequence[int], heads: Sequence[int]) -> float:
        """Return the seconds of a pass.

        rows    [n] rows of each session
        cached  [n] slots of the cache that its rows may read, their own among them
        heads   [n] rows whose logits are wanted
        """

    def seconds(self, entry: SharedPass) -> float:
        """Return the seconds of an entry of the pass log."""
        return self.seconds_of(entry.rows, entry.cached, entry.heads)


@dataclass(frozen=True)
class RowCosts(PassCosts):
    """Costs by the rows alone, read off a few that were measured: see `interpolate_seconds`."""

    model: str
    measured: Mapping[int, float]

    def seconds_of(self, rows: Sequence[int], cached: Sequence[int], heads: Sequence[int]) -> float:
        return interpolate_seconds(self.measured, sum(rows))


def count_reads(rows: Sequence[int], cached: Sequence[int]) -> int:
    """Return how many keys all rows read: each its own, and those before it.

    >>> count_reads([1, 3], [10, 3])  # 10, and 1 + 2 + 3
    16
    """
    return sum(n * slots - n * (n - 1) // 2 for n, slots in zip(rows, cached, strict=True))


def interpolate_seconds(seconds: Mapping[int, float], rows: float) -> float:
    """Return the seconds of a pass over `rows` rows, read off some that were measured.

    seconds  by rows, in rising order, at least two; beyond them the last slope goes on

    >>> interpolate_seconds({1: 1.0, 3: 2.0, 5: 2.0}, 2), interpolate_seconds({1: 1.0, 3: 2.0}, 7)
    (1.5, 4.0)
    """
    last = max(seconds)
    below, above = next(pair for pair in pairwise(seconds) if rows <= pair[1] or pair[1] == last)
    slope = (seconds[above] - seconds[below]) / (above - below)
    return seconds[below] + slope * (rows - below)


# ---------------------------------------------------------------------- rounds


class CostModel(ABC):
    """The seconds of a round: requests draft, and the target verifies all drafts in one pass."""

    @abstractmethod
    def verify_seconds(self, n_requests: int, n_drafted: int) -> float:
        """Return the seconds of a round without its draft steps.

        n_drafted  draft tokens of all requests together
        """

    @abstractmethod
    def step_seconds(self, n_requests: int) -> float:
        """Return the seconds in which the draft model writes one more token for each request."""


@dataclass(frozen=True)
class MeasuredRounds(CostModel):
    """Rounds that were measured. Of the numbers of requests the nearest counts.

    verify  [longest + 1] seconds of a round over 0, 1, ... draft tokens of each request, without
            its draft steps, by the number of requests
    step    seconds of a draft step, by the number of requests
    """

    verify: Mapping[int, Sequence[float]]
    step: Mapping[int, float]

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of requests that were measured."""
        return sorted(self.verify)

    def nearest(self, n_requests: int) -> int:
        """Return the measured number that is nearest; of two, the smaller one."""
        return min(self.sizes, key=lambda size: (abs(size - n_requests), size))

    def verify_seconds(self, n_requests: int, n_drafted: int) -> float:
        """Return the seconds of a round in which all drafts have their mean length.

        Longer drafts than were measured take as long as the longest.
        """
        verify, mean = self.verify[self.nearest(n_requests)], n_drafted / n_requests
        below = min(int(mean), len(verify) - 1)
        above = min(below + 1, len(verify) - 1)
        return verify[below] + (mean - below) * (verify[above] - verify[below])

    def step_seconds(self, n_requests: int) -> float:
        return self.step[self.nearest(n_requests)]


@dataclass(frozen=True)
class ForecastRounds(CostModel):
    """Rounds that take what their passes take; sampling and the like take no time.

    target         costs of a target pass
    draft          costs of a pass of the draft model; a number: the seconds of any draft step
    context        slots that each request has cached
    draft_context  slots that a draft step reads; None: as many
    """

    target: PassCosts
    draft: PassCosts | float = 0.0
    context: int = 0
    draft_context: int | None = None

    def verify_seconds(self, n_requests: int, n_drafted: int) -> float:
        """Return the seconds of a pass. The drafts are as equally long as they can be."""
        each, longer = divmod(n_drafted, n_requests)
        rows = [1 + each + (at < longer) for at in range(n_requests)]
        return self.target.seconds_of(rows, [self.context + n for n in rows], rows)

    def step_seconds(self, n_requests: int) -> float:
        if not isinstance(self.draft, PassCosts):
            return self.draft
        ones = [1] * n_requests
        read = self.context if self.draft_context is None else self.draft_context
        return self.draft.seconds_of(ones, [read + 1] * n_requests, ones)


# ---------------------------------------------------------------------- measured passes


class PassSample(NamedTuple):
    """A pass and the seconds that it took: see `PassCosts.seconds_of`.

    seconds  the median, if it ran several times
    spread   seconds of each time over the median
    """

    rows: tuple[int, ...]
    cached: tuple[int, ...]
    heads: tuple[int, ...]
    seconds: float
    spread: tuple[float, ...] = ()


@dataclass(frozen=True)
class FittedCosts(PassCosts):
    """Costs that were fitted to measured passes. All but model, dtype and threads are seconds.

    per_pass       of any pass
    per_session    of each session that takes part
    per_read       of each key that a row reads
    per_head_pass  of a pass in which logits are wanted: the head's weights are read
    per_head       of each row whose logits are wanted
    knots, slopes  a further row costs slopes[i] where there are knots[i] rows or more
    """

    model: str
    dtype: str
    threads: int
    per_pass: float
    per_session: float
    per_read: float
    per_head_pass: float
    per_head: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]

    def seconds_of(self, rows: Sequence[int], cached: Sequence[int], heads: Sequence[int]) -> float:
        return self.seconds_of_sums(list_features(rows, cached, heads, self.knots))

    def seconds_of_sums(self, features: Sequence[float]) -> float:
        """Return the seconds of one pass, or of several whose `list_features` are added up."""
        coefficients = (
            self.per_pass,
            self.per_session,
            self.per_read,
            self.per_head_pass,
            self.per_head,
            *self.slopes,
        )
        return float(np.dot(coefficients, features))

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and texts."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the costs that `to_json` wrote. Raises TinyspecError if they are none."""
        try:
            lists = {name: tuple(found[name]) for name in ("knots", "slopes")}
            costs = cls(**{**found, **lists})
            if not len(costs.knots) == len(costs.slopes) > 0:
                raise ValueError("knots and slopes differ in length")
            float(np.sum(costs.slopes) + costs.per_pass)
        except (KeyError, TypeError, ValueError) as error:
            raise TinyspecError(
                f"these are no costs of passes ({error}): measure them with `tinyspec bench serve`"
            ) from None
        return costs


def list_features(
    rows: Sequence[int], cached: Sequence[int], heads: Sequence[int], knots: Sequence[int]
) -> list[float]:
    """Return what the coefficients of `FittedCosts` are multiplied by, in the order of its fields.

    >>> list_features([1, 4], [10, 4], [1, 0], knots=[1, 4])  # 5 rows: 3 past knot 1, 1 past 4
    [1, 2, 20, 1, 1, 3, 1]
    """
    n, n_heads = sum(rows), sum(heads)
    ends = [*knots[1:], max(n, knots[-1])]
    beyond = [max(min(n, end) - knot, 0) for knot, end in zip(knots, ends, strict=True)]
    return [1, len(rows), count_reads(rows, cached), int(n_heads > 0), n_heads, *beyond]


def fit_costs(
    samples: Sequence[PassSample], model: str = "", dtype: str = "", threads: int = 1
) -> FittedCosts:
    """Return the costs that are closest to measured passes, by the squares of relative errors.

    Raises TinyspecError if there are fewer passes than coefficients.
    """
    knots = choose_knots([sum(sample.rows) for sample in samples])
    features = [list_features(s.rows, s.cached, s.heads, knots) for s in samples]
    if len(samples) < 5 + len(knots):
        raise TinyspecError(
            f"{len(samples)} passes do not tell {5 + len(knots)} coefficients: measure more"
        )
    seconds = np.array([sample.seconds for sample in samples])
    relative = np.array(features, dtype=np.float64) / seconds[:, None]
    found = [float(x) for x in solve_nonnegative(relative, np.ones(len(samples)))]
    per_pass, per_session, per_read, per_head_pass, per_head, *slopes = found
    return FittedCosts(
        model,
        dtype,
        threads,
        per_pass,
        per_session,
        per_read,
        per_head_pass,
        per_head,
        knots,
        tuple(slopes),
    )


def choose_knots(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the knots between which a pass was measured: no slope is without a measurement."""
    knots = [KNOTS[0]]
    for knot in KNOTS[1:]:
        if any(knots[-1] < n <= knot for n in sizes) and any(n > knot for n in sizes):
            knots.append(knot)
    return tuple(knots)


def solve_nonnegative(a: Floats, b: Floats) -> Floats:
    """Return the x >= 0 that minimizes |a x - b| (Lawson and Hanson 1974, algorithm NNLS).

    a [m, n], b [m]. Columns of zeros get 0.
    """
    lengths = np.linalg.norm(a, axis=0)
    a = a / np.where(lengths > 0, lengths, 1)  # columns differ by many orders of magnitude
    x, is_free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):  # each step frees one coefficient
        gradient = np.where(is_free, 0, a.T @ (b - a @ x))
        if gradient.max(initial=0) <= TOLERANCE:
            break
        is_free[gradient.argmax()] = True
        while True:
            best = np.zeros_like(x)
            best[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
            below = is_free & (best <= 0)
            if not below.any():
                x = best
                break
            # Go towards the best as far as all stay at least 0, and bind those that reach 0.
            step = float(np.min(x[below] / (x[below] - best[below])))
            x = x + step * (best - x)
            is_free &= x > TOLERANCE
            x[~is_free] = 0
    return x / np.where(lengths > 0, lengths, 1)


def list_relative_errors(costs: PassCosts, samples: Sequence[PassSample]) -> list[float]:
    """Return by how much the costs of each pass are off: 0.1 is 10 % too dear."""
    return [costs.seconds_of(s.rows, s.cached, s.heads) / s.seconds - 1 for s in samples]


# ---------------------------------------------------------------------- computed passes


@dataclass(frozen=True)
class RooflineCosts(PassCosts):
    """Costs by the limits of a device (Williams et al. 2009): not a measurement, but a lower bound.

    device           its name
    bandwidth        bytes/s of its memory;  peak: operations/s
    weight_bytes     of all weights but the head's;  head_bytes: of the head
    row_operations   of a row in all matrices but the head;  head_operations: of a row in the head
    slot_bytes       of the keys and values of one slot
    read_operations  of a row for each key that it reads
    """

    model: str
    device: str
    bandwidth: float
    peak: float
    weight_bytes: float
    head_bytes: float
    row_operations: float
    head_operations: float
    slot_bytes: float
    read_operations: float

    def seconds_of(self, rows: Sequence[int], cached: Sequence[int], heads: Sequence[int]) -> float:
        n_heads = sum(heads)
        moved = self.weight_bytes + self.slot_bytes * sum(cached)
        moved += self.head_bytes if n_heads else 0
        operations = self.row_operations * sum(rows) + self.head_operations * n_heads
        operations += self.read_operations * count_reads(rows, cached)
        return max(moved / self.bandwidth, operations / self.peak)

    @classmethod
    def of_model(
        cls, model: str, config: Config, itemsize: int, device: str, bandwidth: float, peak: float
    ) -> Self:
        """Return the costs of a model with this shape; `itemsize` bytes a weight and a state."""
        matrices = config.repeat * sum(
            shape[0] * shape[1]
            for name, shape in config.shapes().items()
            if len(shape) == 2 and name not in ("positions", "embed", "head")
        )
        head = config.vocab_size * config.d_model
        return cls(
            model=model,
            device=device,
            bandwidth=bandwidth,
            peak=peak,
            weight_bytes=itemsize * matrices,
            head_bytes=itemsize * head,
            row_operations=2 * matrices,
            head_operations=2 * head,
            slot_bytes=2 * itemsize * config.n_layers * config.kv_dim,
            read_operations=4 * config.n_layers * config.q_dim,
        )

    @property
    def knee(self) -> float:
        """Return the rows at which arithmetic takes as long as the weights."""
        return self.weight_bytes / self.bandwidth * self.peak / self.row_operations


LLAMA_13B = Config(
    vocab_size=32_000, d_model=5120, n_layers=40, n_heads=40, n_kv_heads=40, head_dim=128,
    d_ff=13_824, max_positions=2048, tied=False,
)  # fmt: skip
"""Shape of LLaMA-13B (arXiv 2302.13971, table 2), on which SARATHI was measured."""
A100_BANDWIDTH = 2.039e12  # bytes/s: NVIDIA's A100 data sheet (2021), 80 GB SXM
A100_PEAK = 3.12e14  # operations/s in bfloat16, dense: the same data sheet


def a100_costs() -> RooflineCosts:
    """Return the roofline of LLaMA-13B in bfloat16 on one A100 with 80 GB."""
    return RooflineCosts.of_model(
        "LLaMA-13B", LLAMA_13B, 2, "A100 80 GB SXM", A100_BANDWIDTH, A100_PEAK
    )
