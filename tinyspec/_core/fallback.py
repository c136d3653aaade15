"""The compiled signatures over the pure twin, for TINYSPEC_PURE=1 and for machines without a compiler."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyspec._core import reference, reference_suffixes, reference_tree
from tinyspec._core.reference_forest import Forest
from tinyspec._core.reference_trie import NgramIndex
from tinyspec.errors import TinyspecError

__all__ = [
    "Forest",
    "NgramIndex",
    "ancestors",
    "depths",
    "draw",
    "order",
    "pick",
    "race",
    "residual",
    "retrieve",
    "suffix_order",
    "unique_paths",
    "walk",
    "warp",
    "without",
]

Row = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]


def pick(row: Row, u: float) -> int:
    """reference.sample_inverse_cdf."""
    return reference.sample_inverse_cdf(row.tolist(), u)


def order(row: Row, uniforms: Row) -> list[int]:
    """reference.sample_without_replacement."""
    return reference.sample_without_replacement(row.tolist(), uniforms.tolist())


def race(row: Row, noise: Row) -> int:
    """reference.exponential_race."""
    return reference.exponential_race(row.tolist(), noise.tolist())


def warp(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> Row:
    """reference.apply_sampling."""
    return np.array(
        reference.apply_sampling(
            logits.tolist(), history, temperature, top_k, top_p, min_p, penalty
        ),
        np.float64,
    )


def draw(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
    u: float,
) -> int:
    """pick(warp(...), u)."""
    row = reference.apply_sampling(
        logits.tolist(), history, temperature, top_k, top_p, min_p, penalty
    )
    return reference.sample_inverse_cdf(row, u)


def residual(row: Row, q: Row) -> Row:
    """reference.residual."""
    return np.array(reference.residual(row.tolist(), q.tolist()), np.float64)


def without(row: Row, token: int) -> Row:
    """reference.exclude_token."""
    return np.array(reference.exclude_token(row.tolist(), token), np.float64)


def walk(
    tokens: Sequence[int],
    parents: Sequence[int],
    laws: Sequence[Any],
    probe: Sequence[bool],
    p: Any,
    uniforms: Row,
) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    """reference.verify from given uniforms; also returns how many it used."""
    used = 0

    def take() -> float:
        nonlocal used
        if used >= len(uniforms):
            raise TinyspecError(
                "the given uniforms are used up: a walk needs one a tested node and one for the last draw"
            )
        used += 1
        return float(uniforms[used - 1])

    accept: Callable[[float], bool] = lambda ratio: take() < ratio  # noqa: E731
    lists = [law if law is None else law.tolist() for law in laws]
    path, token, refused = reference.verify(
        tokens,
        parents,
        lists,
        probe,
        Lists(p),
        accept,
        lambda row: reference.sample_inverse_cdf(row, take()),
    )
    return path, token, refused, used


class Lists(Mapping[int, list[float]]):
    """Rows as lists, read when asked for."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, node: int) -> list[float]:
        row: list[float] = self.rows[node].tolist()
        return row

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def ancestors(parents: Sequence[int]) -> NDArray[np.uint8]:
    """reference_tree.ancestors."""
    n = len(parents)
    return np.array(reference_tree.ancestors(parents), np.uint8).reshape(n, n)


def depths(parents: Sequence[int]) -> NDArray[np.int32]:
    """reference_tree.depths."""
    return np.array(reference_tree.depths(parents), np.int32)


def unique_paths(tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.int32]:
    """reference_tree.unique_paths."""
    return np.array(reference_tree.unique_paths(tokens, parents), np.int32)


def suffix_order(tokens: Any, tell: Callable[[int], None] | None = None) -> NDArray[np.int32]:
    """reference_suffixes.suffix_order."""
    return np.array(reference_suffixes.suffix_order(np.asarray(tokens).tolist(), tell), np.int32)


def retrieve(
    tokens: NDArray[np.int32],
    order: NDArray[np.int32],
    suffix: Sequence[int],
    shortest: int,
    longest: int,
    length: int,
    matches: int,
    most: int,
) -> reference_suffixes.Found:
    """reference_suffixes.retrieve."""
    text: Any = tokens  # arrays are sequences, of which only what is looked at is read
    places: Any = order
    return reference_suffixes.retrieve(
        text, places, suffix, shortest, longest, length, matches, most
    )
