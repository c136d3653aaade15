"""The smallest cases of every kernel, all of them, in order of size: the first that fails is the
one to read.

Rows have one to three tokens and weights with small common denominators; uniforms stand on 0, on
the largest below 1, and on the edges that decide. What is left to chance (long rows, deep trees,
odd floats) is in strategies.py.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from tinyspec._core import fallback
from tinyspec.laws import small
from tinyspec.laws.strategies import LARGEST_UNIFORM, FloatRow, cdf_edges
from tinyspec.tree import ROOT

KernelCase = dict[str, Any]


def _float_row(row: Any) -> FloatRow:
    return np.array([float(x) for x in row])


def float_pairs(largest: int) -> list[tuple[FloatRow, FloatRow]]:
    """Every p and q of two and three tokens whose denominators add up to at most `largest`; few
    tokens first.
    """
    return [(_float_row(p), _float_row(q)) for p, q in small.distribution_pairs((2, 3), largest)]


SMALL_ROWS = [
    _float_row(row)
    for vocabulary in (1, 2, 3)
    for whole in (1, 2, 3)
    for row in small.distributions(vocabulary, whole)
]


def deciding_uniforms(*rows: FloatRow) -> list[float]:
    """0, the largest uniform, and where these rows change their mind."""
    found = {x for row in rows for x in cdf_edges(row) if 0 < x < 1}
    return [0.0, *sorted(found), LARGEST_UNIFORM]


def small_picks() -> Iterator[KernelCase]:
    for row in [*SMALL_ROWS, np.zeros(2), np.array([np.inf, 0.0])]:
        for u in deciding_uniforms(row):
            yield {"row": row, "u": u}


def small_orders() -> Iterator[KernelCase]:
    for row in SMALL_ROWS:
        for n in range(4):
            for uniforms in product((0.0, 0.5, LARGEST_UNIFORM), repeat=n):
                yield {"row": row, "uniforms": np.array(uniforms, np.float64)}


def small_races() -> Iterator[KernelCase]:
    for row in [*SMALL_ROWS, np.zeros(2)]:
        for noise in product((0.0, 1.0, np.inf), repeat=len(row)):
            yield {"row": row, "noise": np.array(noise)}


SETTINGS: list[KernelCase] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 2},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.5},
    {"history": [0], "penalty": 2.0},
    {"history": [0, 1, 0], "penalty": 0.5},
    {"history": [1], "penalty": 2.0, "temperature": 0.0},
    {"temperature": 0.5, "top_k": 2, "top_p": 0.9},
]
NEUTRAL: KernelCase = {
    "history": [],
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "penalty": 1.0,
}


def small_samplings() -> Iterator[KernelCase]:
    for size in (1, 2, 3):
        for logits in product(
            (0.0, 1.0, -np.inf) if size > 2 else (0.0, 1.0, -1.0, -np.inf, np.nan), repeat=size
        ):
            for setting in SETTINGS:
                yield {"logits": np.array(logits), **NEUTRAL, **setting}


def small_draws() -> Iterator[KernelCase]:
    for case in small_samplings():
        for u in (0.0, 0.5, LARGEST_UNIFORM):
            yield {**case, "u": u}


def small_residuals() -> Iterator[KernelCase]:
    for p, q in float_pairs(6):
        yield {"p": p, "q": q}


def small_withouts() -> Iterator[KernelCase]:
    for row in SMALL_ROWS:
        for token in range(len(row)):
            yield {"row": row, "token": token}


def small_walks() -> Iterator[KernelCase]:
    """One guess, drawn from q or a point mass; then two, side by side and in a chain. Rows are the
    same everywhere.
    """
    for parents, largest, size in (
        ([ROOT], 5, 2),
        ([ROOT], 4, 3),
        ([ROOT, ROOT], 3, 2),
        ([ROOT, 0], 3, 2),
    ):
        for p, q in (pair for pair in float_pairs(largest) if len(pair[0]) == size):
            for law in (q, None):
                may = range(len(p)) if law is None else np.flatnonzero(q).tolist()
                for tokens in product(may, repeat=len(parents)):
                    ratio = float(p[tokens[0]] / (1 if law is None else q[tokens[0]]))
                    tests = [
                        0.0,
                        *([float(np.nextafter(ratio, 0)), ratio] if 0 < ratio < 1 else []),
                        LARGEST_UNIFORM,
                    ]
                    for uniforms in product(*[tests] * len(parents), (0.0, 0.5, LARGEST_UNIFORM)):
                        yield {
                            "tokens": list(tokens),
                            "parents": parents,
                            "laws": [law] * len(parents),
                            "probe": [False] * len(parents),
                            "p": dict.fromkeys(range(-1, len(parents)), p),
                            "uniforms": np.array(uniforms),
                        }


def small_shapes() -> Iterator[KernelCase]:
    for n in range(5):
        for parents in product(*(range(ROOT, node) for node in range(n))):
            yield {"parents": list(parents)}
    yield from ({"parents": [0]}, {"parents": [-2]}, {"parents": [ROOT, 1]})


def small_spellings() -> Iterator[KernelCase]:
    for shape in small_shapes():
        for tokens in product(range(2), repeat=len(shape["parents"])):
            yield {"tokens": list(tokens), **shape}
    yield {"tokens": [0], "parents": []}


def small_texts() -> Iterator[KernelCase]:
    for n in range(6):
        for tokens in product((0, 1, -1), repeat=n):
            yield {"tokens": np.array(tokens, np.int32)}


def small_retrievals() -> Iterator[KernelCase]:
    """Short texts and ends of texts; then what is refused."""
    knobs = {"shortest": 1, "longest": 3, "length": 2, "matches": 9, "most": 9}
    for case in small_texts():
        if len(case["tokens"]) < 5:
            order = fallback.suffix_order(case["tokens"])
            for suffix, few in product(([0], [1, 0], [0, 0]), ({}, {"most": 1}, {"matches": 1})):
                yield {**case, "order": order, "suffix": suffix, **knobs, **few}
    often = np.array([0, 1, 0, 2, 0, 3, 0, 4], np.int32)  # of four places two are read: which?
    order = fallback.suffix_order(often)
    yield {**case, "tokens": often, "order": order, "suffix": [0], **knobs, "matches": 2}
    for wrong in (
        {"shortest": 0},
        {"longest": 32},
        {"shortest": 4},
        {"length": 0},
        {"matches": 0},
        {"most": -1},
    ):
        yield {**case, "order": case["tokens"] * 0, "suffix": [0], **knobs, **wrong}


GRIDS: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "pick": small_picks,
    "order": small_orders,
    "race": small_races,
    "warp": small_samplings,
    "draw": small_draws,
    "residual": small_residuals,
    "without": small_withouts,
    "walk": small_walks,
    "ancestors": small_shapes,
    "depths": small_shapes,
    "unique_paths": small_spellings,
    "suffix_order": small_texts,
    "retrieve": small_retrievals,
}
"""By the kernel's name."""
