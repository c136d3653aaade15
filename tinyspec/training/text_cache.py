"""Keep texts that a model writes for a training: one file per batch, in a folder.

An interrupted run continues with the first batch that has no file.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from tinyspec.errors import TinyspecError
from tinyspec.progress import progress_bar
from tinyspec.training import ranks

HELD = 20  # one of so many texts is held out of a training
Item = TypeVar("Item")


def select_seen(texts: Sequence[Item]) -> list[Item]:
    """Return the texts that are not held out; of one text that one.

    >>> select_seen(range(22))[-2:], select_seen(["only"])
    ([19, 21], ['only'])
    """
    return [text for i, text in enumerate(texts) if i % HELD] or [*texts]


def cache_batches(
    folder: Path,
    items: Sequence[Item],
    size: int,
    compute: Callable[[int, Sequence[Item]], Any],
    *,
    name_file: Callable[[int], str],
    is_complete: Callable[[Any, Sequence[Item]], bool] = lambda content, batch: True,
    title: str,
    console: Console | None = None,
) -> list[Any]:
    """Return the content of each batch of items; what has a file is read, the rest is computed.

    size         items per batch
    compute      content of a batch, from the number of its first item and the batch
    name_file    name of a batch's file (.json or .pt), from the number of its first item
    is_complete  whether content that was read is all of the batch; else it is computed again

    Raises TinyspecError if a file is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = []
    with ranks.main_rank_first(), progress_bar(console) as bar:
        task = bar.add_task(title, total=len(items))
        for first in range(0, len(items), size):
            path, batch = folder / name_file(first), items[first : first + size]
            content = _read_file(path) if path.exists() else None
            if content is None or not is_complete(content, batch):
                content = compute(first, batch)
                _write_file(path, content)
            contents.append(content)
            bar.advance(task, len(batch))
    return contents


def _read_file(path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        return torch.load(path, weights_only=True)
    except Exception as error:
        raise TinyspecError(
            f"{path}: damaged ({type(error).__name__}); delete it, and it is written again"
        ) from error


def _write_file(path: Path, content: Any) -> None:
    with write_part(path) as part:
        if path.suffix == ".json":
            part.write_text(json.dumps(content), encoding="utf-8")
        else:
            torch.save(content, part)


@contextmanager
def write_part(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write, then move it to `path`: a reader never sees half a file.

    Raises TinyspecError if it cannot be written. Then nothing is left of it.
    """
    part = path.with_suffix(f"{path.suffix}.part")
    try:
        yield part
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        part.unlink(missing_ok=True)
        raise TinyspecError(f"{path}: cannot be written ({error}); is the disk full?") from error
