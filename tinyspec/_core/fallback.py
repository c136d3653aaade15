"""The compiled functions' signatures over their twins in plain Python.

They run with TINYSPEC_PURE=1 and on machines without a compiler.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyspec._core import reference, reference_suffixes, reference_tree
from tinyspec._core.limits import read_text
from tinyspec._core.reference_forest import Forest as Forest
from tinyspec._core.reference_trie import NgramIndex as NgramIndex
from tinyspec.errors import TinyspecError

Row = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]


def check_rows(*rows: Any, kinds: str = "d") -> None:
    """Raise TypeError or ValueError, as the kernels do, for what is no contiguous row of numbers.

    kinds  of numbers that may be: "d" float64, "f" float32, "i" int32
    """
    for row in rows:
        view = memoryview(row)
        if view.ndim != 1 or view.format not in tuple(kinds) or not view.c_contiguous:
            raise ValueError(
                f"expected a contiguous row of kind {' or '.join(kinds)}, "
                f"got {view.ndim} dimensions of kind {view.format}"
            )


def sample_inverse_cdf(row: Row, u: float) -> int:
    """Run reference.sample_inverse_cdf over an array."""
    check_rows(row)
    return reference.sample_inverse_cdf(row.tolist(), u)


def sample_without_replacement(row: Row, uniforms: Row) -> list[int]:
    """Run reference.sample_without_replacement over an array."""
    check_rows(row, uniforms)
    return reference.sample_without_replacement(row.tolist(), uniforms.tolist())


def exponential_race(row: Row, noise: Row) -> int:
    """Run reference.exponential_race over an array."""
    check_rows(row, noise)
    return reference.exponential_race(row.tolist(), noise.tolist())


def apply_sampling(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> Row:
    """Run reference.apply_sampling over an array."""
    check_rows(logits, kinds="fd")
    return np.array(
        reference.apply_sampling(
            logits.tolist(), history, temperature, top_k, top_p, min_p, penalty
        ),
        np.float64,
    )


def sample_from_logits(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
    u: float,
) -> int:
    """Return sample_inverse_cdf(apply_sampling(...), u)."""
    check_rows(logits, kinds="fd")
    row = reference.apply_sampling(
        logits.tolist(), history, temperature, top_k, top_p, min_p, penalty
    )
    return reference.sample_inverse_cdf(row, u)


def residual(row: Row, q: Row) -> Row:
    """Run reference.residual over an array."""
    check_rows(row, q)
    return np.array(reference.residual(row.tolist(), q.tolist()), np.float64)


def exclude_token(row: Row, token: int) -> Row:
    """Run reference.exclude_token over an array."""
    check_rows(row)
    return np.array(reference.exclude_token(row.tolist(), token), np.float64)


def verify_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Sequence[Any],
    probe: Sequence[bool],
    p: Any,
    uniforms: Row,
) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    """Run reference.verify_tree with these uniforms; also return how many it used."""
    check_rows(uniforms, *(q for q in draft_probs if q is not None))
    used = 0

    def take() -> float:
        nonlocal used
        if used >= len(uniforms):
            raise TinyspecError(
                "the given uniforms are used up: "
                "give one for each tested node and one for the last draw"
            )
        reference.check_uniform(uniforms[used])
        used += 1
        return float(uniforms[used - 1])

    accept: Callable[[float], bool] = lambda ratio: take() < ratio  # noqa: E731
    lists = [q if q is None else q.tolist() for q in draft_probs]
    accepted, token, rejected = reference.verify_tree(
        tokens,
        parents,
        lists,
        probe,
        ListRows(p),
        accept,
        lambda row: reference.sample_inverse_cdf(row, take()),
    )
    return accepted, token, rejected, used


class ListRows(Mapping[int, list[float]]):
    """Rows as lists, converted when they are read."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.size: int | None = None  # tokens of the first row that was read

    def __getitem__(self, node: int) -> list[float]:
        given = self.rows[node]
        check_rows(given)
        row: list[float] = given.tolist()
        if self.size is None:
            self.size = len(row)
        if len(row) != self.size:
            raise TinyspecError(
                f"the target's distribution has {self.size} tokens at the root, "
                f"{len(row)} at node {node}"
            )
        return row

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def ancestors(parents: Sequence[int]) -> NDArray[np.uint8]:
    """Run reference_tree.ancestors and return an array."""
    mask = reference_tree.ancestors(parents)
    return np.array(mask, np.uint8).reshape(len(mask), len(mask))


def depths(parents: Sequence[int]) -> NDArray[np.int32]:
    """Run reference_tree.depths and return an array."""
    return np.array(reference_tree.depths(parents), np.int32)


def unique_paths(tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.int32]:
    """Run reference_tree.unique_paths and return an array."""
    return np.array(reference_tree.unique_paths(tokens, parents), np.int32)


def suffix_order(tokens: Any, tell: Callable[[int], None] | None = None) -> NDArray[np.int32]:
    """Run reference_suffixes.suffix_order and return an array."""
    tokens = read_text(tokens)
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
    """Run reference_suffixes.retrieve over arrays."""
    check_rows(tokens, order, kinds="i")
    text: Any = tokens  # arrays are sequences, of which only what is looked at is read
    places: Any = order
    return reference_suffixes.retrieve(
        text, places, suffix, shortest, longest, length, matches, most
    )
