"""Every kernel equals its pure twin to the bit, and a device decides as it does.

Each of these laws kills something.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.laws import devices
from tinyspec import _core
from tinyspec._core import fallback, reference
from tinyspec.decoding.rng import Replay
from tinyspec.decoding.sampling import HOST
from tinyspec.laws import twins
from tinyspec.laws.evidence import LawViolated

compiled = pytest.mark.skipif(
    not _core.COMPILED, reason="the pure twins are in use: there is no kernel to compare"
)


@compiled
@pytest.mark.parametrize("name", twins.TWINS)
def test_a_kernel_equals_its_twin_bit_for_bit(name: str) -> None:
    assert twins.equals_twin(name, getattr(_core, name)).cases > 150


def test_every_function_of_the_core_has_a_twin() -> None:
    functions = {
        name for name in _core.__all__ if name.islower() and callable(getattr(_core, name))
    }
    assert functions == set(twins.TWINS)


def test_verifiers_decide_as_the_twin_on_the_same_uniforms() -> None:
    assert min(devices.walk_equals_twin().cases, devices.decisions_equal_twin().cases) > 100


@pytest.mark.parametrize("name", devices.device_kernels())
def test_torch_operations_decide_as_the_twins(name: str) -> None:
    evidence = devices.on_device(name, devices.device_kernels()[name])
    excused = int(evidence.notes[-1].split()[0])
    assert excused < evidence.cases / 8  # a law that lets everything off proves nothing


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", devices.device_kernels())
def test_a_cuda_device_decides_as_the_twins(name: str) -> None:
    devices.on_device(name, devices.device_kernels("cuda")[name])


# --- each law kills -------------------------------------------------------------------------------

KNOBS = ("history", "temperature", "top_k", "top_p", "min_p", "penalty")


def changed(**other: Any) -> Callable[..., Any]:
    """The twin's warp with some knob overruled."""
    return lambda logits, *knobs: fallback.apply_sampling(
        logits, *(other.get(n, k) for n, k in zip(KNOBS, knobs, strict=True))
    )


def tie_to_the_highest(logits: Any, history: Any, temperature: float, *knobs: Any) -> Any:
    turned = [len(logits) - 1 - token for token in history]
    return fallback.apply_sampling(logits[::-1].copy(), turned, temperature, *knobs)[::-1].copy()


def punished_twice(logits: Any, history: Any, temperature: float, *knobs: Any) -> Any:
    return fallback.apply_sampling(
        np.array(reference.penalize_repetition(logits.tolist(), history, knobs[-1])),
        history,
        temperature,
        *knobs,
    )


def summed_in_one_go(row: Any, u: float) -> int:
    if not 0 < row.sum() < math.inf:
        return fallback.sample_inverse_cdf(row, u)
    after = np.flatnonzero((np.cumsum(row) > u * np.cumsum(row)[-1]) & (row > 0))
    return int(after[0] if len(after) else np.flatnonzero(row)[-1])


def at_zero(row: Any, u: float) -> int:
    sound = fallback.sample_inverse_cdf(row, u)
    return 0 if u == 0 else sound


def with_replacement(row: Any, uniforms: Any) -> list[int]:
    return [fallback.sample_inverse_cdf(row, u) for u in uniforms.tolist() if row.sum() > 0]


def unguarded_race(row: Any, noise: Any) -> int:
    fallback.exponential_race(row, noise)
    with np.errstate(all="ignore"):
        return int(np.argmin(noise / row))


def far_apart(p: Any, q: Any) -> Any:
    left = fallback.residual(p, q)
    return left if (p == q).all() else abs(p - q) / abs(p - q).sum()


def softened(row: Any, q: Any) -> Any:
    left = np.maximum(fallback.residual(row, q) * 0 + row - q, 0)
    return left / (left.sum() + 1e-6) if left.any() else row


def walking(
    accept: Callable[[float, float], bool] = lambda u, ratio: u < ratio,
    reject: Callable[..., Any] = reference.reject,
    draw: Callable[[Any, float], int] = reference.sample_inverse_cdf,
    fresh: bool = True,
) -> Callable[..., Any]:
    """The twin's walk with one of its moves replaced."""

    def walk(tokens: Any, parents: Any, draft_probs: Any, probe: Any, p: Any, uniforms: Any) -> Any:
        given, lists = (
            devices.TwinUniforms(uniforms.tolist()),
            [None if q is None else q.tolist() for q in draft_probs],
        )
        first = uniforms[0] if len(uniforms) else 0.0
        take = given.next if fresh else lambda: given.next() * 0 + first
        verdict = reference.verify_tree(
            tokens,
            parents,
            lists,
            probe,
            fallback.ListRows(p),
            lambda ratio: bool(accept(take(), ratio)),
            lambda row: draw(row, take()),
            reject,
        )
        return (*verdict, len(uniforms) - len(given.rest))

    return walk


def keep(row: Any, q: Any, token: int, last: bool) -> Any:
    return row


def forgetful(row: Any, q: Any, token: int, last: bool) -> Any:
    return reference.reject(row, None, token, last)


def tree(function: Callable[..., Any], spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *given: spoil(function(*given))


def any_sibling(mask: Any) -> Any:
    return np.maximum(mask, np.tril(np.ones_like(mask)) * (len(mask) > 3))


def first_of_its_token(tokens: Any, parents: Any) -> Any:
    fallback.unique_paths(tokens, parents)
    return np.array([list(tokens).index(token) for token in tokens], np.int32)


DEFECTS: list[tuple[str, str, Callable[..., Any]]] = [
    ("sample_inverse_cdf", "another order of summing", summed_in_one_go),
    ("sample_inverse_cdf", "u = 0 gives token 0", at_zero),
    ("sample_without_replacement", "with replacement", with_replacement),
    ("exponential_race", "0 / 0 wins", unguarded_race),
    ("apply_sampling", "ties go to the highest id", tie_to_the_highest),
    ("apply_sampling", "the penalty hits twice", punished_twice),
    ("apply_sampling", "no min-p", changed(min_p=None)),
    (
        "apply_sampling",
        "temperature 0 is nearly 0",
        lambda *k: changed(temperature=k[2] or 1e-3)(*k),
    ),
    (
        "apply_sampling",
        "float32 inside",
        lambda logits, *k: (
            fallback.apply_sampling(logits, *k).astype(np.float32).astype(np.float64)
        ),
    ),
    (
        "sample_from_logits",
        "the history is forgotten",
        lambda *k: fallback.sample_from_logits(k[0], [], *k[2:]),
    ),
    ("residual", "the absolute difference", far_apart),
    ("residual", "eps in the normaliser", softened),
    (
        "exclude_token",
        "not normalised",
        lambda row, token: np.where(np.arange(len(row)) == token, 0.0, row),
    ),
    ("verify_tree", "u <= ratio", walking(accept=lambda u, ratio: u <= ratio)),
    (
        "verify_tree",
        "a ratio is never quite 1",
        walking(accept=lambda u, ratio: u < min(ratio, 1 - 2**-53)),
    ),
    ("verify_tree", "the residual is p", walking(reject=keep)),
    ("verify_tree", "every distribution is a point mass", walking(reject=forgetful)),
    ("verify_tree", "one uniform for all", walking(fresh=False)),
    (
        "verify_tree",
        "the bonus is the likeliest",
        walking(draw=lambda row, u: max(range(len(row)), key=row.__getitem__)),
    ),
    ("ancestors", "a sibling is seen", tree(fallback.ancestors, any_sibling)),
    ("depths", "the root's children have depth 0", tree(fallback.depths, lambda depth: depth - 1)),
    ("unique_paths", "equal tokens are one row", first_of_its_token),
]


@pytest.mark.parametrize(
    ("name", "defect", "kernel"), DEFECTS, ids=[f"{name}: {defect}" for name, defect, _ in DEFECTS]
)
def test_a_defective_kernel_is_accused(name: str, defect: str, kernel: Callable[..., Any]) -> None:
    with pytest.raises(LawViolated) as caught:
        twins.equals_twin(name, kernel)
    assert (caught.value.counterexample.law, caught.value.counterexample.case["kernel"]) == (
        "twin",
        name,
    )


def test_an_accusation_names_the_smallest_distributions() -> None:
    with pytest.raises(LawViolated) as caught:
        twins.equals_twin("residual", far_apart)
    case = caught.value.counterexample.case
    assert ({*case["p"]}, {*case["q"]}) == ({0.0, 1.0}, {0.0, 1.0})
    assert str(caught.value).splitlines()[2:4] == ["  p = [0, 1]", "  q = [1, 0]"]


class SpendthriftChance(Replay):
    """Never puts back what the kernel did not need."""

    def push_back(self, count: int) -> None:
        return None


class EagerChance(Replay):
    """Accepts a uniform that equals the ratio."""

    def accept(self, ratio: Any) -> bool:
        return bool(self._next() <= ratio)


def test_defects_of_verifiers_are_accused() -> None:
    with pytest.raises(LawViolated):
        devices.walk_equals_twin(rng=SpendthriftChance)
    with pytest.raises(LawViolated):
        devices.decisions_equal_twin(rng=EagerChance)
    with pytest.raises(LawViolated):  # a distribution that is rounded once more on its way
        devices.walk_equals_twin(
            walk=lambda tree, p, rng: HOST.verify_tree(
                tree._replace(draft_probs=[narrow(q) for q in tree.draft_probs]), p, rng
            )
        )


def narrow(q: Any) -> Any:
    return None if q is None else torch.as_tensor(q).to(torch.bfloat16)


def not_beyond(row: Any, u: float) -> int:
    ON_CPU["sample_inverse_cdf"](row, u)
    return int(np.searchsorted(np.cumsum(row), u * row.sum()))


ON_CPU = devices.device_kernels()


def small_nucleus(*k: Any) -> Any:
    return ON_CPU["apply_sampling"](*k[:4], k[4] and k[4] * 0.7, *k[5:])


DEVICE_DEFECTS: list[tuple[str, str, Callable[..., Any]]] = [
    ("sample_inverse_cdf", "a sum that equals u * total wins", not_beyond),
    ("sample_inverse_cdf", "u = 0 gives token 0", at_zero),
    ("sample_without_replacement", "with replacement", with_replacement),
    ("exponential_race", "0 / 0 wins", unguarded_race),
    ("apply_sampling", "ties go to the highest id", tie_to_the_highest),
    ("apply_sampling", "top-p without the token that crosses", small_nucleus),
    ("residual", "no clamp", lambda p, q: p if (p == q).all() else (p - q) / abs(p - q).sum()),
    ("exclude_token", "not normalised", lambda row, token: np.where(np.arange(len(row)) == token,
    0.0, row)),
    ("verify_tree", "the residual is p", walking(reject=keep)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "defect", "kernel"), DEVICE_DEFECTS, ids=[f"{n}: {d}" for n, d, _ in DEVICE_DEFECTS]
)
def test_a_defective_device_is_accused(name: str, defect: str, kernel: Callable[..., Any]) -> None:
    with pytest.raises(LawViolated) as caught:
        devices.on_device(name, kernel)
    assert caught.value.counterexample.law == "twin on a device"
