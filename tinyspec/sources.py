"""`tinyspec data fetch`: every data file from its public home, at a fixed commit, checked by its
sha256.
"""

import gzip
import hashlib
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from tinyspec import data, shelf
from tinyspec.download import download
from tinyspec.errors import TinyspecError, nearest

BASE = "https://raw.githubusercontent.com"


class Source(NamedTuple):
    """One file of a data set."""

    path: str  # below the data folder; .gz is packed here where the public file is not
    home: str  # owner/repository/commit
    file: str
    digest: str  # sha256 of the public file
    shelf: Mapping[str, tuple[str, ...]] | None = (
        None  # author -> titles: many files, made into one of JSON lines
    )


class DataSet(NamedTuple):
    licence: str
    sources: tuple[Source, ...]


_BOOKS = "mlschmitt/classic-books-markdown/944882722e9a96fa6cf2739dc2ea757e101f412f"
_WIKI = "pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8"
_MATHS = "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
_FLICKR = "multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a"
_FLICKR_FILES = {
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
}

DATA_SETS: dict[str, DataSet] = {
    "classics": DataSet(
        "public domain",
        (
            # the digest is that of the JSON lines, unpacked
            Source(
                "text/classics.train.jsonl.xz", _BOOKS, "",
                "d4e519a910ce413edcb65f2575fa749ac89ae18b48c4ce95b52e5cc5e6b57db0", shelf.TRAIN,
            ),
            Source(
                "text/classics.valid.jsonl.xz", _BOOKS, "",
                "5782ed2c71e07fb98a32af694ecee918a753444b366eb66edfcbd0c54e86c4f3", shelf.VALID,
            ),
        ),
    ),
    "tinyshakespeare": DataSet(
        "public domain",
        (
            Source(
                "text/tinyshakespeare.txt", "karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e",
                "data/tinyshakespeare/input.txt",
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
    ),
    "wikitext-2": DataSet(
        "CC BY-SA",
        (
            Source(
                "text/wikitext-2.valid.txt", _WIKI, "word_language_model/data/wikitext-2/valid.txt",
                "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            ),
            Source(
                "text/wikitext-2.test.txt", _WIKI, "word_language_model/data/wikitext-2/test.txt",
                "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            ),
        ),
    ),
    "multi30k": DataSet(
        "for research; cite Elliott et al. 2016",
        tuple(
            Source(f"multi30k/{name}.gz", _FLICKR, f"data/task1/raw/{name}.gz", digest)
            for name, digest in _FLICKR_FILES.items()
        ),
    ),
    "spec_bench": DataSet(
        "Apache-2.0",
        (
            Source(
                "spec_bench/question.jsonl", "hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf",
                "data/spec_bench/question.jsonl",
                "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
            ),
        ),
    ),
    "human_eval": DataSet(
        "MIT",
        (
            Source(
                "code_math/HumanEval.jsonl.gz", "openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d",
                "data/HumanEval.jsonl.gz",
                "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            ),
        ),
    ),
    "gsm8k": DataSet(
        "MIT",
        (
            Source(
                "code_math/gsm8k.train.jsonl.gz", _MATHS, "grade_school_math/data/train.jsonl",
                "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
            ),
            Source(
                "code_math/gsm8k.test.jsonl", _MATHS, "grade_school_math/data/test.jsonl",
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            ),
        ),
    ),
}  # fmt: skip


def fetch(
    names: Iterable[str] = (),
    *,
    root: str | Path | None = None,
    base_url: str = BASE,
    console: Console | None = None,
    data_sets: Mapping[str, DataSet] | None = None,
) -> list[Path]:
    """Bring the named data sets (all of them where none is named) into the data folder; what is
    there stays.

    Returns the files. Interrupted, it goes on where it was: nothing half-arrived ever has a final
    name.
    Raises TinyspecError for an unknown name, an unreachable server, or a file that is not the
    expected one.
    """
    data_sets = DATA_SETS if data_sets is None else data_sets
    chosen = list(names) or list(data_sets)
    for name in chosen:
        if name not in data_sets:
            raise TinyspecError(f"no data set is called '{name}'; {nearest(name, data_sets)}")
    root = Path(root) if root is not None else data.folder()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=console is None,
    )
    paths = []
    with bar:
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

            if source.shelf is None:
                _file(source, target, base_url, show)
            else:
                _library(source, source.shelf, target, base_url, show)
    return paths


def _file(source: Source, target: Path, base: str, show: Callable[[int, int | None], None]) -> None:
    url = f"{base}/{source.home}/{quote(source.file)}"
    if target.suffix != ".gz" or source.file.endswith(".gz"):
        download(url, target, digest=source.digest, progress=show)
        return
    plain = download(url, target.with_suffix(""), digest=source.digest, progress=show)
    _put(target, gzip.compress(plain.read_bytes(), mtime=0))
    plain.unlink()


def _library(
    source: Source,
    books: Mapping[str, tuple[str, ...]],
    target: Path,
    base: str,
    show: Callable[[int, int | None], None],
) -> None:
    """Fetch every book into a folder beside the target, then make one file of JSON lines of
    them.
    """
    desk = target.with_name(target.name + ".books")
    rows, size = [], 0
    for author, titles in books.items():
        for title in titles:
            path = desk / f"{author} - {title}.md"
            if not path.exists():
                download(f"{base}/{source.home}/{quote(f'{author}/{title}.md')}", path)
            size += path.stat().st_size
            show(size, None)
            rows.append(
                {
                    "author": author,
                    "title": title,
                    "text": path.read_bytes().decode("utf-8", "replace"),
                }
            )
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    found = hashlib.sha256(content).hexdigest()
    if found != source.digest:
        shutil.rmtree(desk)
        raise TinyspecError(
            f"{target}: refused, the sha256 of the books together is {found}, expected {source.digest}; "
            "run the command again"
        )
    _put(target, lzma.compress(content))
    shutil.rmtree(desk)


def _put(target: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    os.replace(part, target)
