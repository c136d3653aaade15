"""Fetch data files from their public homes, at fixed commits, and check their sha256."""

import gzip
import hashlib
import json
import lzma
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from rich.console import Console
from rich.progress import TaskID

from tinyspec import data
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.hub.download import ShowBytes, download_file
from tinyspec.progress import progress_bar

BASE = "https://raw.githubusercontent.com"


class Source(NamedTuple):
    """One file of a data set.

    path    below the data folder; a .gz is packed here where the public file is not
    home    owner/repository/commit
    file    the public file's path in the repository
    digest  sha256 of the public file, or of the JSON lines that books become
    books   author -> titles: many files, which become one of JSON lines
    """

    path: str
    home: str
    file: str
    digest: str
    books: Mapping[str, Sequence[str]] | None = None


class DataSet(NamedTuple):
    """A data set by name; its licence is the public home's."""

    licence: str
    sources: tuple[Source, ...]


def read_data_sets() -> dict[str, DataSet]:
    """Return what data_sets.json lists.

    The valid books are never trained on, neither by a model nor by its tokenizer.
    """
    listed = json.loads(files("tinyspec.hub").joinpath("data_sets.json").read_text("utf-8"))
    return {
        name: DataSet(entry["licence"], tuple(Source(**file) for file in entry["files"]))
        for name, entry in listed.items()
    }


DATA_SETS = read_data_sets()


def fetch_data_sets(
    names: Iterable[str] = (),
    *,
    root: str | Path | None = None,
    base_url: str = BASE,
    console: Console | None = None,
    data_sets: Mapping[str, DataSet] | None = None,
) -> list[Path]:
    """Bring data sets into the data folder, and return their files. What is there stays.

    Interrupted, it goes on where it was: nothing half-arrived ever has a final name.

    names      none: all of them
    root       the folder; None: the one that `tinyspec.data` reads from

    Raises TinyspecError for an unknown name, an unreachable server, or a file that is not the
    expected one.
    """
    data_sets = DATA_SETS if data_sets is None else data_sets
    chosen = list(names) or list(data_sets)
    for name in chosen:
        if name not in data_sets:
            raise TinyspecError(
                f"no data set is called '{name}'; {suggest_nearest(name, data_sets)}"
            )
    root = Path(root) if root is not None else data.data_folder()
    paths = []
    with progress_bar(console, in_bytes=True) as bar:
        for source in (source for name in chosen for source in data_sets[name].sources):
            target = root / source.path
            paths.append(target)
            if target.exists():
                if console:
                    console.print(f"{target}: already here")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            task = bar.add_task(source.path, total=None)

            def show(have: int, total: int | None, task: TaskID = task) -> None:
                bar.update(task, completed=have, total=total)

            if source.books is None:
                _fetch_file(source, target, base_url, show)
            else:
                _fetch_books(source, source.books, target, base_url, show)
    return paths


def _fetch_file(source: Source, target: Path, base: str, show: ShowBytes) -> None:
    url = f"{base}/{source.home}/{quote(source.file)}"
    if target.suffix != ".gz" or source.file.endswith(".gz"):
        download_file(url, target, digest=source.digest, progress=show)
        return
    plain = download_file(url, target.with_suffix(""), digest=source.digest, progress=show)
    _put(target, gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()


def _fetch_books(
    source: Source, books: Mapping[str, Sequence[str]], target: Path, base: str, show: ShowBytes
) -> None:
    """Fetch each book into a folder beside the target, then make one file of JSON lines of them."""
    desk = target.with_name(target.name + ".books")
    rows, size = [], 0
    for author, title in [(name, title) for name, titles in books.items() for title in titles]:
        path = desk / f"{author} - {title}.md"
        if not path.exists():
            download_file(f"{base}/{source.home}/{quote(f'{author}/{title}.md')}", path)
        size += path.stat().st_size
        show(size, None)
        text = path.read_bytes().decode("utf-8", "replace")
        rows.append({"author": author, "title": title, "text": text})
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    found = hashlib.sha256(content).hexdigest()
    if found != source.digest:
        shutil.rmtree(desk)
        raise TinyspecError(
            f"{target}: refused, the sha256 of the books together is {found}, "
            f"expected {source.digest}; "
            "run the command again"
        )
    _put(target, lzma.compress(content))
    shutil.rmtree(desk)


def _put(target: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    os.replace(part, target)
