"""Errors a user can mend: one line that names the thing and says what to do. The command line
prints them bare.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")

MESSAGE_LIMIT = 1200  # characters of an error: about ten lines of a terminal


class TinyspecError(Exception):
    """Report something wrong in the input; the message is one line that says what to do.

    What an error quotes may come from a damaged file. So line breaks and control characters are
    shown as escapes, and of a very long message the middle is left out.

    >>> print(TinyspecError("no such file: a\\nb"))
    no such file: a\\nb
    """

    def __init__(self, message: str = ""):
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
        if len(text) > MESSAGE_LIMIT:
            text = f"{text[: MESSAGE_LIMIT - 400]} ... {text[-395:]}"
        super().__init__(text)


class BatchError(TinyspecError):
    """Report the rows of a batch that failed, after all the others have ended.

    results  of each row; None where it failed
    errors   of the rows that failed, by their numbers; the first one is the cause

    >>> print(BatchError("prompt", ["a text", None], {1: TinyspecError("it is too long")}))
    prompt[1]: it is too long; 1 of 2 rows failed, error.results has the others
    """

    def __init__(self, name: str, results: list[Any], errors: dict[int, Exception]):
        self.results, self.errors = results, errors
        row, self.__cause__ = next(iter(sorted(errors.items())))
        kind = "" if isinstance(self.__cause__, TinyspecError) else type(self.__cause__).__name__
        what = ": ".join(filter(None, (f"{name}[{row}]", kind, str(self.__cause__))))
        others = ", error.results has the others" if len(errors) < len(results) else ""
        super().__init__(f"{what}; {len(errors)} of {len(results)} rows failed{others}")


def unwrap_rows(name: str, results: Sequence[T | None], errors: dict[int, Exception]) -> list[T]:
    """Return the results of a batch. Raise BatchError if rows failed.

    An error that all of them share is raised as it is: it names no row.
    """
    if len(errors) == len(results) > 1 and len({str(error) for error in errors.values()}) == 1:
        raise errors[0]
    if errors:
        raise BatchError(name, list(results), errors)
    return [row for row in results if row is not None]


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest known name, and all of them.

    >>> suggest_nearest("lmla", ["llma", "autoregressive"])
    "did you mean 'llma'? known: autoregressive, llma"
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"did you mean '{close[0]}'? " if close else "") + "known: " + ", ".join(names)


def describe_value(value: Any) -> str:
    """Return a value as an error shows it: short, on one line.

    >>> describe_value("0.8"), describe_value(list(range(50)))
    ("'0.8'", '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...')
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return (
            f"an array of {str(value.dtype).removeprefix('torch.')} with shape {tuple(value.shape)}"
        )
    if type(value).__module__ != "builtins":
        return f"of type {type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of 5,000 digits, lists in lists without end, a broken __repr__
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 42 else text[:39] + "..."
