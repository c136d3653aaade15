"""The pure twin of src/exp.h: the exponential function that laws are made with."""

import math
from collections.abc import Sequence

import numpy as np

ROUND = 1.5 * 2.0**52  # a number added to it loses its fraction


def exponential(exponents: Sequence[float]) -> list[float]:
    """exp of numbers <= 0, by operations whose rounding IEEE 754 fixes: libm's differs by machine. O(n).

    x = k ln 2 + r, ln 2 in two parts (Cody, Waite 1980); exp(r) by Taylor's series, whose remainder is below 2^-57 for
    |r| <= ln 2 / 2. Within two units of the last place. The kernel does these steps in this order (src/exp.h).

    >>> exponential([0.0, -1.0, float("-inf")])
    [1.0, 0.36787944117144233, 0.0]
    """
    x = np.maximum(np.array(exponents, np.float64), -746.0)  # whose exp is 0
    k = (x * 1.4426950408889634 + ROUND) - ROUND
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    series = np.full_like(x, 1 / math.factorial(13))
    for n in range(12, -1, -1):
        series = series * r + 1 / math.factorial(n)
    found: list[float] = np.ldexp(series, k.astype(np.int64)).tolist()
    return found
