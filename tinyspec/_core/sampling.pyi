from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]

def sample_inverse_cdf(row: Row, u: float) -> int: ...
def sample_without_replacement(row: Row, uniforms: Row) -> list[int]: ...
def exponential_race(row: Row, noise: Row) -> int: ...
def apply_sampling(
    logits: Floats,
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> Row: ...
def sample_from_logits(
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
def exclude_token(row: Row, token: int) -> Row: ...
def verify_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Sequence[Any],
    probe: Sequence[bool],
    p: Any,
    uniforms: Row,
) -> tuple[tuple[int, ...], int, tuple[int, ...], int]: ...
