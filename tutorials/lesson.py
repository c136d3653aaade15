"""What the lessons share: how a plot looks, and how code is shown from its file."""

import inspect
from collections.abc import Callable
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.display import Code
from matplotlib_inline.backend_inline import set_matplotlib_formats

TARGET, DRAFT, KEPT, REST = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
)  # Okabe and Ito: told apart by the colour-blind

matplotlib.rcParams.update(
    {
        "figure.facecolor": "white",  # its own paper: legible on a dark page too
        "figure.figsize": (6.4, 3.0),
        "figure.dpi": 110,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "tinyspec",
    }
)

if get_ipython() is not None:  # in a notebook or the book: figures as lines, sharp at any size
    set_matplotlib_formats("svg", metadata={"Date": None, "Creator": None})


def show(*things: Callable[..., Any] | type) -> Code:
    """The source of functions, as it stands in their files."""
    return Code(
        "\n\n".join(inspect.getsource(thing).rstrip() for thing in things), language="python"
    )


def axes(width: float = 6.4, height: float = 3.0, **layout: Any) -> Any:
    """A figure's axes."""
    return plt.subplots(figsize=(width, height), layout="constrained", **layout)[1]


def refuted(law: str, judge: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a judge says of something wrong, printed: the smallest case. An error if nothing, or another law, is broken."""
    from tinyspec.laws import LawViolated, check

    found = None
    try:
        found = getattr(judge(*given, **named), "counterexample", None)
    except LawViolated as accused:
        found = accused.counterexample
    assert found is not None, f"{law}: nothing was found"
    assert found.law == law, f"{law}: {found.law} was found broken instead"
    if judge is not check:  # which prints its verdict itself
        print(found)
    return found
