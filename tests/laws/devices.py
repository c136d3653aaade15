"""The same decisions in other number formats: narrow dtypes, and the torch operations of a GPU.

On the CPU every dtype is read as float64 exactly, so the verifier decides as the plain twin does,
to the bit. A device adds in its own order: it must decide the same unless a uniform, a ratio or a
knob lies within n * eps of a boundary. Whether one does is worked out from the case alone: the
twin's own lines run over numbers that carry a bound on their rounding error, and every comparison
that the bound leaves open is noted.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tinyspec._core import reference
from tinyspec.decoding import device
from tinyspec.decoding.rng import Replay
from tinyspec.decoding.sampling import DEVICE, HOST, SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws import strategies
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.strategies import VOCABULARY_SIZES, WalkCase, WarpKnobs, search_cases, st
from tinyspec.laws.twins import (
    TWINS,
    Kernel,
    KernelCase,
    abbreviate,
    judge_kernel,
    outcome_or_error,
)
from tinyspec.tree import TokenTree

FLOAT_EPS = 2.0**-52


class RoundingDoubt:
    """A computation over n numbers, and whether one of its comparisons was too close to call.

    A device may add n numbers in any order, which errs by at most n * eps of their sum. The twin
    adds in eight lanes and in blocks of 256, so every addition is charged n / 8 + 2 eps, and the
    whole sum at least n.

    >>> doubt = RoundingDoubt(3)
    >>> third, row = doubt.about(1 / 3), [doubt.about(x) for x in (0.1, 0.2, 0.3)]
    >>> (row[0] + row[1] > third, doubt.near), (row[0] + row[1] > row[2], doubt.near)
    ((False, False), (True, True))
    """

    def __init__(self, n: int) -> None:
        self.charge = (n / 8 + 2) * FLOAT_EPS
        self.near = False

    def about(self, value: float, slack: float = 0.0) -> "BoundedNumber":
        """Return a number of this computation; without slack it is exact."""
        return BoundedNumber(float(value), slack, self)

    def row(self, row: Any) -> "list[BoundedNumber]":
        """Return a distribution of exact numbers."""
        return [self.about(x) for x in row.tolist()]


class BoundedNumber:
    """A number that lies within `slack` of `value`."""

    __slots__ = ("doubt", "slack", "value")

    def __init__(self, value: float, slack: float, doubt: RoundingDoubt) -> None:
        self.value, self.slack, self.doubt = value, slack, doubt

    def _both(self, other: Any) -> tuple[float, float]:
        return (
            (other.value, other.slack) if isinstance(other, BoundedNumber) else (float(other), 0.0)
        )

    def __add__(self, other: Any) -> "BoundedNumber":
        value, slack = self._both(other)
        made = self.value + value
        rounded = 0.0 if value == 0 or self.value == 0 else self.doubt.charge * abs(made)
        return BoundedNumber(made, self.slack + slack + rounded, self.doubt)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "BoundedNumber":
        value, slack = self._both(other)
        made = self.value - value
        return BoundedNumber(made, self.slack + slack + FLOAT_EPS * abs(made), self.doubt)

    def __mul__(self, other: Any) -> "BoundedNumber":
        value, slack = self._both(other)
        made = self.value * value
        return BoundedNumber(
            made,
            abs(value) * self.slack + abs(self.value) * slack + FLOAT_EPS * abs(made),
            self.doubt,
        )

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "BoundedNumber":
        value, slack = self._both(other)
        made = self.value / value
        return BoundedNumber(
            made, (self.slack + abs(made) * slack) / abs(value) + FLOAT_EPS * abs(made), self.doubt
        )

    def __gt__(self, other: Any) -> bool:
        value, slack = self._both(other)
        self.doubt.near |= (self.slack > 0 or slack > 0) and abs(
            self.value - value
        ) <= self.slack + slack
        return self.value > value

    def __lt__(self, other: Any) -> bool:
        value, slack = self._both(other)
        self.doubt.near |= (self.slack > 0 or slack > 0) and abs(
            self.value - value
        ) <= self.slack + slack
        return self.value < value


EPS = 2.0**-52
NEGLIGIBLE_SHARE = (
    1e-290  # below this a share of a row decides nothing, and denormal numbers round coarsely
)

ROW_KINDS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "float64 array": np.ascontiguousarray,
    "float64 tensor": torch.tensor,
    "float32 tensor": partial(torch.tensor, dtype=torch.float32),
    "bfloat16 tensor": partial(torch.tensor, dtype=torch.bfloat16),
}
"""How a draft's row may lie in the memory of the host."""


# --- front doors ----------------------------------------------------------------------------------
# ------------------


class TwinUniforms:
    """The uniforms of a plain twin, one at a time, and how many are left."""

    def __init__(self, uniforms: Sequence[Any]):
        self.rest = list(uniforms)

    def next(self) -> Any:
        if not self.rest:
            raise TinyspecError("used up")
        return self.rest.pop(0)

    def accept(self, ratio: Any) -> bool:
        return bool(self.next() < ratio)


def walk_equals_twin(
    walk: Callable[..., Any] = HOST.verify_tree,
    rng: Callable[..., Any] = Replay,
    examples: int = 120,
) -> Evidence:
    """Check that verification under `Replay` gives what the twin gives, in every memory layout.

    It must also leave as many uniforms.
    """

    def judge(drawn: tuple[str, WalkCase]) -> None:
        kind, case = drawn
        draft_probs = [None if row is None else ROW_KINDS[kind](row) for row in case.draft_probs]
        tree, given = (
            TokenTree(case.tokens, case.parents, draft_probs, case.probe),
            TwinUniforms(case.uniforms.tolist()),
        )

        def ours() -> Any:
            stream = rng(case.uniforms.tolist())
            return (*walk(tree, case.p, stream), stream.left)

        def theirs() -> Any:
            lists = {node: row.tolist() for node, row in case.p.items()}
            columns = (
                case.tokens,
                case.parents,
                [None if row is None else _row_as_floats(row) for row in draft_probs],
                case.probe,
            )
            verdict = reference.verify_tree(
                *columns,
                lists,
                given.accept,
                lambda row: reference.sample_inverse_cdf(row, given.next()),
            )
            return (*verdict, len(given.rest))

        expected, got = outcome_or_error(theirs, {}), outcome_or_error(ours, {})
        if expected != got:
            shown = {key: abbreviate(value) for key, value in case._asdict().items()}
            accuse("twin", expected, got, kernel="walk under Replay", laws_lie_in=kind, **shown)

    cases, grid = (
        st.tuples(
            st.sampled_from(list(ROW_KINDS)), VOCABULARY_SIZES.flatmap(strategies.tree_walks)
        ),
        0,
    )
    for case in TWINS["verify_tree"].small():
        kind = list(ROW_KINDS)[grid % len(ROW_KINDS)]
        judge((kind, WalkCase(**case)))
        grid += 1
    return Evidence("twin", grid) + search_cases(cases, judge, "twin", examples)


def decisions_equal_twin(rng: Callable[..., Any] = Replay, examples: int = 120) -> Evidence:
    """Check that `accept`, `draw` and sampling without replacement decide as the twin's lines
    do."""

    @st.composite
    def questions(draw: st.DrawFn) -> tuple[list[tuple[str, Any, int]], list[float]]:
        asked: list[tuple[str, Any, int]] = []
        uniforms: list[float] = []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["accept", "draw", "order"]))
            row = draw(strategies.float_rows(draw(st.integers(1, 4))))
            ratio = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
            times = draw(st.integers(1, 3)) if kind == "order" else 1
            asked.append((kind, ratio if kind == "accept" else row, times))
            edges = [ratio] if kind == "accept" else strategies.cdf_edges(row)
            uniforms += [draw(strategies.edge_uniforms(edges)) for _ in range(times)]
        return asked, uniforms

    def judge(case: tuple[list[tuple[str, Any, int]], list[float]]) -> None:
        asked, uniforms = case
        stream, rest = rng(uniforms), list(uniforms)
        for kind, what, times in asked:
            expected: Any
            if kind == "accept":
                expected, got, used = rest[0] < what, stream.accept(what), 1
            elif kind == "draw":
                expected, got, used = (
                    reference.sample_inverse_cdf(what.tolist(), rest[0]),
                    stream.draw(what),
                    1,
                )
            else:
                expected, got = (
                    reference.sample_without_replacement(what.tolist(), rest[:times]),
                    stream.sample_without_replacement(what, times),
                )
                used = len(expected)
            if (expected, len(rest) - used) != (got, stream.left):
                accuse(
                    "twin",
                    expected,
                    got,
                    kernel=kind,
                    of=what,
                    uniforms=rest,
                    push_back=stream.left,
                )
            rest = rest[used:]

    return search_cases(questions(), judge, "twin", examples)


def _row_as_floats(row: Any) -> list[float]:
    return [float(x) for x in (row.double().numpy() if isinstance(row, torch.Tensor) else row)]


# --- devices --------------------------------------------------------------------------------------
# ------------------


def device_kernels(where: str = "cpu") -> dict[str, Kernel]:
    """Return the operations of device.py as functions of arrays, like the kernels they replace."""

    def there(x: Any) -> torch.Tensor:
        return torch.tensor(x, device=where)

    def probs(logits: torch.Tensor, history: Sequence[int], *settings: Any) -> torch.Tensor:
        return DEVICE.probs(logits, history, SamplingParams(*settings))

    def move(operation: Callable[..., Any], rows: int) -> Kernel:
        def run(*given: Any) -> Any:
            made = operation(*map(there, given[:rows]), *given[rows:])
            return made.cpu().numpy() if isinstance(made, torch.Tensor) else made

        return run

    def walk(
        tokens: Any, parents: Any, draft_probs: Any, probe: Any, p: Mapping[int, Any], uniforms: Any
    ) -> Any:
        rows = torch.stack([there(p[node]) for node in range(-1, len(tokens))])
        far = [None if row is None else there(row) for row in draft_probs]
        return device.verify_on_device(tokens, parents, far, probe, rows, None, uniforms.tolist())

    return {
        "sample_inverse_cdf": move(DEVICE.sample_inverse_cdf, 1),
        "sample_without_replacement": lambda row, uniforms: DEVICE.sample_without_replacement(
            there(row), uniforms.tolist()
        ),
        "exponential_race": move(DEVICE.exponential_race, 1),
        "apply_sampling": move(probs, 1),
        "residual": move(DEVICE.residual, 2),
        "exclude_token": move(DEVICE.exclude_token, 1),
        "verify_tree": walk,
    }


def on_device(name: str, kernel: Kernel, examples: int = 120, large: int = 2) -> Evidence:
    """Check that an operation on a device decides as the twin does, except on a boundary.

    The notes say how many cases were let off because they lay on one.
    """
    off = 0

    def judge(case: KernelCase) -> None:
        nonlocal off
        expected, got = (
            outcome_or_error(TWINS[name].define, case),
            outcome_or_error(kernel, case),
        )
        failed = isinstance(expected, str) or isinstance(got, str)
        agreed = (
            isinstance(expected, str) and isinstance(got, str)
            if failed
            else AGREEMENT_BY_KERNEL[name](case, expected, got)
        )
        if agreed is None:
            off += 1
        elif not agreed:
            shown = {key: abbreviate(x) for key, x in case.items()}
            accuse("twin on a device", abbreviate(expected), abbreviate(got), kernel=name, **shown)

    evidence = judge_kernel(name, judge, "twin on a device", examples, large)
    evidence.notes.append(f"{off} of {evidence.cases} decided otherwise on a boundary")
    return evidence


def _is_doubtful(twin: Kernel, n: int, rows: Callable[[RoundingDoubt], Any]) -> bool:
    """Return whether a comparison of the twin was too close to call."""
    doubt = RoundingDoubt(n)
    twin(*rows(doubt))
    return doubt.near


def _equal_outcomes(case: KernelCase, expected: Any, got: Any) -> bool:
    return bool(expected == got)


def _draws_agree(case: KernelCase, expected: Any, got: Any) -> bool | None:
    """Return whether drawn tokens agree, or None where a cumulative sum lies at the uniform."""
    row, last = case["row"], case.get("u", case.get("uniforms"))
    tokens = got if isinstance(got, list) else [got]
    if (
        expected == got
        or len(set(tokens)) < len(tokens)
        or not all(0 <= t < len(row) and row[t] > 0 for t in tokens)
    ):
        return bool(expected == got)
    twin = (
        reference.sample_without_replacement
        if isinstance(got, list)
        else reference.sample_inverse_cdf
    )
    return None if _is_doubtful(twin, len(row), lambda doubt: (doubt.row(row), last)) else False


def _walks_agree(case: KernelCase, expected: Any, got: Any) -> bool | None:
    if expected == got:
        return True

    def doubted(doubt: RoundingDoubt) -> Any:
        given = TwinUniforms(case["uniforms"].tolist())
        columns = [case[name] for name in ("tokens", "parents", "probe")]
        draft_probs = [None if row is None else doubt.row(row) for row in case["draft_probs"]]
        p = {node: doubt.row(row) for node, row in case["p"].items()}
        draw = lambda row: reference.sample_inverse_cdf(row, given.next())  # noqa: E731
        return (*columns[:2], draft_probs, columns[2], p, given.accept, draw)

    return None if _is_doubtful(reference.verify_tree, len(case["p"][-1]), doubted) else False


def _rows_agree(case: KernelCase, expected: Any, got: Any) -> bool:
    """Return whether residuals have one support, and shares within a few n * eps."""
    slack = 4 * (len(expected) + 4) * EPS
    return bool(
        (
            ((expected > NEGLIGIBLE_SHARE) == (got > NEGLIGIBLE_SHARE))
            & (abs(expected - got) <= slack * expected + NEGLIGIBLE_SHARE)
        ).all()
    )


def _warps_agree(case: KernelCase, expected: Any, got: Any) -> bool | None:
    if _rows_agree(case, expected, got):
        return True
    scores, knobs = case["logits"], [case[name] for name in WarpKnobs._fields]
    whole = reference.apply_sampling(
        scores.tolist(), knobs[0], knobs[1], None, None, None, knobs[-1]
    )
    lawful = abs(got.sum() - 1) < 1e-9 and (np.array(whole)[got > NEGLIGIBLE_SHARE] > 0).all()
    return None if lawful and not _is_firm(scores.tolist(), *knobs) else False


def _is_firm(
    scores: list[float],
    history: Any,
    temperature: float,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    penalty: float,
) -> bool:
    """Return whether small changes of top-p, min-p and rounding leave the kept tokens as they
    are."""
    n = len(scores)
    loose = (
        8 * n * (EPS + 2.0 ** (n.bit_length() - 62))
    )  # the twin counts a nucleus in units of 2^-(62 - bits of n)
    kept = {
        tuple(
            x > 0
            for x in reference.apply_sampling(
                scores, history, temperature, top_k, share, floor, penalty
            )
        )
        for share in (
            top_p,
            *(min(1.0, top_p * (1 + sign * loose)) for sign in (-1, 1) if top_p is not None),
        )
        for floor in (
            min_p,
            *(min(1.0, min_p * (1 + sign * loose)) for sign in (-1, 1) if min_p is not None),
        )
    }
    if len(kept) > 1 or temperature == 0:
        return temperature == 0
    final = reference.penalize_repetition(scores, history, penalty)
    inside = [x for x, stays in zip(final, next(iter(kept)), strict=True) if stays]
    outside = [x for x, stays in zip(final, next(iter(kept)), strict=True) if not stays]
    gap = (min(inside) - max(outside, default=-np.inf)) / temperature
    return not 0 < gap < 16 * EPS * max(1.0, abs(min(inside) - max(final)) / temperature)


AGREEMENT_BY_KERNEL: dict[str, Callable[[KernelCase, Any, Any], bool | None]] = {
    "sample_inverse_cdf": _draws_agree,
    "sample_without_replacement": _draws_agree,
    "exponential_race": _equal_outcomes,
    "apply_sampling": _warps_agree,
    "residual": _rows_agree,
    "exclude_token": _rows_agree,
    "verify_tree": _walks_agree,
}
"""Whether an outcome is the twin's; None where it is not and the case allows either."""
