"""Errors a user can mend: one line that names the thing and says what to do. The command line
prints them bare.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TinyspecError(Exception):
    """Something in the input (a file, a knob, a prompt) is wrong, and the message says what to do
    about it.
    """


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """End an error message: the closest known name, and all of them.

    >>> nearest("lmla", ["llma", "autoregressive"])
    "did you mean 'llma'? known: autoregressive, llma"
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"did you mean '{close[0]}'? " if close else "") + "known: " + ", ".join(names)
