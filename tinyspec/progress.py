"""Show how far work is: what is done, how much there is, and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Advance = Callable[[str, int, int | None], None]
"""Tell what is under way: words, how much is done, of how much (None: nobody knows)."""


def progress_bar(
    console: Console | None, *more: TextColumn, in_bytes: bool = False, transient: bool = False
) -> Progress:
    """Return a bar for one task or several; nothing is shown where there is no console.

    more       columns between the count and the times
    in_bytes   what is counted are bytes, of which the rate is shown
    transient  the bar disappears in the end
    """
    count = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *count, *more, *times)
    return Progress(*columns, console=console, disable=console is None, transient=transient)


@contextmanager
def show_progress(
    quiet: bool = False, *, in_pipes: bool = False, in_bytes: bool = False, transient: bool = False
) -> Iterator[Advance]:
    """Show one bar on standard error, and yield what moves it.

    in_pipes  where standard error is no terminal, the bar is printed once, in the end
    """
    console = Console(stderr=True)
    shown = not quiet and (in_pipes or console.is_terminal)
    with progress_bar(console if shown else None, in_bytes=in_bytes, transient=transient) as bar:
        task = bar.add_task("", total=None)

        def advance(words: str, done: int, total: int | None) -> None:
            bar.update(task, description=words, completed=done, total=total)

        yield advance
