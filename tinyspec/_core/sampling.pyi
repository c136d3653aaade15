from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]

def pick(row: Row, u: float) -> int: ...
def order(row: Row, uniforms: Row) -> list[int]: ...
def race(row: Row, noise: Row) -> int: ...
def warp(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> Row: ...
def draw(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
    u: float,
) -> int: ...
def residual(row: Row, q: Row) -> Row: ...
def without(row: Row, token: int) -> Row: ...
def walk(
    tokens: Sequence[int],
    parents: Sequence[int],
    laws: Sequence[Any],
    probe: Sequence[bool],
    p: Any,
    uniforms: Row,
) -> tuple[tuple[int, ...], int, tuple[int, ...], int]: ...
