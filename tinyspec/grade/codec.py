"""Plain data as text between the grader and its child: numbers, texts, lists, tuples, dictionaries,
and nothing else.

Strict on purpose: an object that only looks like a number may compare as it likes, so subclasses
are refused, and so is what is too large or too deep. Runs on both sides of the border: standard
library alone.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

DEPTH = 12  # lists in lists
VALUES = 50_000  # in one message
DIGITS = 1_000  # of a whole number, so also of a numerator or denominator
LETTERS = 20_000  # of a text
LOG2_10 = 3.33
ENCODER = json.JSONEncoder(separators=(",", ":"))


class NotPlain(ValueError):
    """A value that may not cross the border, in words: "a generator, which is no plain data"."""


def plain(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """What JSON can hold of a value. `other` turns the objects of a Prop into plain data, where
    there may be any.

    >>> plain([(1, Fraction(1, 3)), {"a": None}])
    [{'t': [1, {'q': '1/3'}]}, {'d': [['a', None]]}]
    """
    left = VALUES

    def walk(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise NotPlain(f"more than {VALUES} values")
        if depth > DEPTH:
            raise NotPlain(f"data nested deeper than {DEPTH} levels")
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            if len(value) > LETTERS:
                raise NotPlain(f"a text of more than {LETTERS} letters")
            return value
        if kind is int:
            return _whole(value)
        if kind is Fraction:
            return {"q": f"{_whole(value.numerator)}/{_whole(value.denominator)}"}
        if kind is list:
            return [walk(item, depth + 1) for item in value]
        if kind is tuple:
            return {"t": [walk(item, depth + 1) for item in value]}
        if kind is dict:
            return {
                "d": [
                    [walk(name, depth + 1), walk(item, depth + 1)] for name, item in value.items()
                ]
            }
        if other is not None:
            return {"p": walk(other(value), depth + 1)}
        raise NotPlain(f"{described(value)}, which is no plain data")

    return walk(value, 0)


def back(data: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """The value that `plain` made data of; NotPlain where the data is none of its making."""

    def walk(data: Any) -> Any:
        if isinstance(data, list):
            return [walk(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((mark, inner),) = data.items()
        if mark == "q":
            over, under = map(int, inner.split("/"))
            return Fraction(over, under)
        if mark == "t":
            return tuple(map(walk, inner))
        if mark == "d":
            return {walk(name): walk(item) for name, item in inner}
        if mark == "p" and other is not None:
            return other(walk(inner))
        raise NotPlain(f"data marked {mark!r}")

    try:
        return walk(data)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise NotPlain(f"data that nobody wrote in this way ({error})") from None


def text(data: Any) -> str:
    """One line."""
    return ENCODER.encode(data)


def described(value: Any) -> str:
    """What sort of thing it is: "a generator", "an object of the class Cheat"."""
    kind = type(value)
    name = "".join(letter for letter in str(kind.__name__)[:60] if letter.isprintable())
    for base in (bool, int, float, str, list, tuple, dict, Fraction):
        if issubclass(kind, base) and kind is not base:
            return f"an object of the class {name}, made to look like {base.__name__}"
    return (
        f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
        if kind.__module__ == "builtins"
        else f"an object of {name}"
    )


def _whole(value: int) -> int:
    if value.bit_length() > DIGITS * LOG2_10:
        raise NotPlain(f"a number of more than {DIGITS} digits")
    return value
