"""One experiment of `tinyspec bench`: what measures it, and what is shown of its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinyspec.bench.plot import Chart
from tinyspec.bench.report import Grid

Result = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What a file of `experiments/` offers. Its settings and options stand in `settings.py`.

    run      (settings, quiet=...) -> result; with `resumes` also out=... and resume=...
    tables   the tables of a result; without them its figures are printed, indented
    chart    the chart of a result
    notes    lines below the tables of its page
    closing  lines printed after the tables
    """

    run: Callable[..., Result]
    tables: Callable[[Result], Sequence[Grid]] | None = None
    chart: Callable[[Result], Chart] | None = None
    notes: Callable[[Result], Sequence[str]] | None = None
    closing: Callable[[Result], Sequence[str]] | None = None
