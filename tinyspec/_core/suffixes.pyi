from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEPTH: int

def suffix_order(tokens: Any, tell: Callable[[int], None] | None = None) -> NDArray[np.int32]: ...
def retrieve(
    tokens: NDArray[np.int32],
    order: NDArray[np.int32],
    suffix: Sequence[int],
    shortest: int,
    longest: int,
    length: int,
    matches: int,
    most: int,
) -> tuple[int, list[int], list[int], list[int]]: ...
