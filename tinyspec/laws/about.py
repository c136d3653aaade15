"""Numbers that know how wrong they may be, and note every question to which they know no sure
answer.
"""

from typing import Any

FLOAT_EPS = 2.0**-52


class RoundingDoubt:
    """A computation over n numbers, and whether any of its comparisons was too close to call.

    A device may add n numbers in any order, which errs by at most n * eps of their sum. The twin
    adds in eight lanes and in blocks of 256, so every addition is charged n / 8 + 2 eps, and the
    whole sum at least n.

    >>> doubt = Doubt(3)
    >>> third, row = doubt.about(1 / 3), [doubt.about(x) for x in (0.1, 0.2, 0.3)]
    >>> (row[0] + row[1] > third, doubt.near), (row[0] + row[1] > row[2], doubt.near)
    ((False, False), (True, True))
    """

    def __init__(self, n: int) -> None:
        self.charge = (n / 8 + 2) * FLOAT_EPS
        self.near = False

    def about(self, value: float, slack: float = 0.0) -> "BoundedNumber":
        """A number of this computation; without slack it is exact."""
        return BoundedNumber(float(value), slack, self)

    def row(self, row: Any) -> "list[BoundedNumber]":
        """A law of exact numbers."""
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
