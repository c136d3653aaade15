"""The twin of src/exp.h: the exponential function of the softmax."""

import math
from collections.abc import Sequence

import numpy as np

ROUND = 1.5 * 2.0**52  # a number added to it loses its fraction


def exponential(exponents: Sequence[float]) -> list[float]:
    """Return exp of numbers <= 0, within two units of the last place. O(n).

    It uses only operations whose rounding IEEE 754 fixes; libm's exp differs between machines.
    x = k ln 2 + r with ln 2 in two parts (Cody, Waite 1980), and exp(r) by Taylor's series, whose
    remainder is below 2^-57 for |r| <= ln 2 / 2. The kernel does these steps in this order.

    >>> exponential([0.0, -1.0, float("-inf")])
    [1.0, 0.36787944117144233, 0.0]
    """
    x = np.maximum(np.array(exponents, np.float64), -746.0)  # exp of this is 0
    k = (x * 1.4426950408889634 + ROUND) - ROUND
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    series = np.full_like(x, 1 / math.factorial(13))
    for n in range(12, -1, -1):
        series = series * r + 1 / math.factorial(n)
    found: list[float] = np.ldexp(series, k.astype(np.int64)).tolist()
    return found
