"""Objects that a submitted function is given and that remember what was done with them: a model
with a cache, say.

This file, and every file that defines a Prop, also runs in the child process beside the submission:
such files import the standard library and `tinyspec.grade.props` alone.
"""

from typing import Any, Self


class Prop:
    """Something that a function works with. A law makes a fresh one for every call, and reads its
    trace afterwards.

    Subclasses say what they are made of, in plain data (None, bool, int, float, Fraction, str,
    list, tuple, dict), and are made again from it, in another process. Their methods note what
    happened with `note`, and raise ValueError with a sentence where they are misused.
    """

    def __init__(self) -> None:
        self.trace: list[Any] = []  # plain data, one entry for every thing that happened

    def note(self, *event: Any) -> None:
        """Remember that this happened."""
        self.trace.append(event)

    def plain(self) -> Any:
        """What this is made of, before anything happened to it."""
        raise NotImplementedError

    @classmethod
    def make(cls, plain: Any) -> Self:
        """A fresh one, made of what `plain` told; its trace is empty."""
        raise NotImplementedError
