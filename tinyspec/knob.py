"""A knob of a technique: a parameter that a user may set."""

from dataclasses import dataclass
from typing import Any

from tinyspec.errors import TinyspecError


@dataclass(frozen=True)
class Knob:
    """A parameter a user may set, with the paper's default and the range that makes sense."""

    name: str
    default: Any
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    small: tuple[
        Any, ...
    ] = ()  # values the laws walk every outcome at; the first everywhere, each other one once
    beyond: float | None = None  # a value outside the range with a meaning of its own: inf, never

    def check(self, value: Any) -> Any:
        """The value in the default's type, or a one-line error that names the range."""
        if isinstance(self.default, bool) and isinstance(value, str):  # from the command line
            value = {
                "true": True,
                "yes": True,
                "1": True,
                "false": False,
                "no": False,
                "0": False,
            }.get(value, value)
        if self.choices:
            if value not in self.choices:
                raise TinyspecError(
                    f"{self.name} is {value!r}: it must be one of {', '.join(map(str, self.choices))}"
                )
            return value
        if isinstance(self.default, bool) or not isinstance(self.default, (int, float)):
            return value
        try:
            if isinstance(value, bool):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError):
            raise TinyspecError(f"{self.name} is {value!r}: it must be a number") from None
        if isinstance(self.default, int) and number != round(number):
            raise TinyspecError(f"{self.name} is {value!r}: it must be a whole number")
        outside = (self.low is not None and not number >= self.low) or (
            self.high is not None and not number <= self.high
        )
        if outside and number != self.beyond:
            span = (
                f"at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
            )
            span += "" if self.beyond is None else f", or {self.beyond}"
            raise TinyspecError(f"{self.name} is {value}: it must be {span}")
        return type(self.default)(number)
