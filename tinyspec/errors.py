"""Errors a user can mend: one line that names the thing and says what to do. The command line
prints them bare.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TinyspecError(Exception):
    """Report something wrong in the input; the message is one line that says what to do."""


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest known name, and all of them.

    >>> suggest_nearest("lmla", ["llma", "autoregressive"])
    "did you mean 'llma'? known: autoregressive, llma"
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"did you mean '{close[0]}'? " if close else "") + "known: " + ", ".join(names)
