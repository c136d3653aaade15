"""How long work shows that it goes on: one bar, with what is done, how much there is, and the time
left.
"""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def counted(console: Console | None, *more: TextColumn) -> Progress:
    """A bar of things counted, for one task or several; nothing is shown where there is no console.

    more  columns between the count and the times
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *more,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )
