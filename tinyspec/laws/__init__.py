"""What each guarantee means, as code.

from tinyspec.laws import check

check(my_verifier)              # proves it exact on every small case, or shows the smallest one
                                that it gets wrong
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyspec.laws.checking.check import check
    from tinyspec.laws.evidence import LawViolated

__all__ = ["LawViolated", "check"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and nothing before."""
    if name == "check":
        from tinyspec.laws.checking.check import check

        return check
    if name == "LawViolated":
        from tinyspec.laws.evidence import LawViolated

        return LawViolated
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
