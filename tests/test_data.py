"""Fetching resumes where it broke, trusts only checksums, and leaves no partial file.

Readers of files name what is wrong.
"""

import gzip
import hashlib
import http.server
import json
import lzma
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyspec import data
from tinyspec.errors import TinyspecError
from tinyspec.hub.data_sets import DATA_SETS, DataSet, Source, fetch_data_sets
from tinyspec.hub.download import download_file

CONTENT = bytes(range(256)) * 4000  # 1 MB
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Home(http.server.ThreadingHTTPServer):
    """A public server on 127.0.0.1 that can break connections, ignore ranges, or send wrong
    bytes.
    """

    files: dict[str, bytes]
    cut: int | None = None  # answer at most so many bytes of a body, then break
    ranges = True
    asked: list[tuple[str, str | None]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Home

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(
            content[start:] if self.server.cut is None else content[start : start + self.server.cut]
        )

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def home() -> Iterator[Home]:
    server = Home(("127.0.0.1", 0), Handler)
    server.files, server.asked = {"/a.bin": CONTENT}, []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_arrives_whole_and_reports_its_progress(home: Home, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = download_file(
        f"{home.url}/a.bin", tmp_path / "a.bin", digest=DIGEST, progress=lambda *at: seen.append(at)
    )
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_a_broken_transfer_goes_on_at_the_byte_where_it_broke(home: Home, tmp_path: Path) -> None:
    home.cut = 300_000
    target = tmp_path / "a.bin"
    with pytest.raises(TinyspecError, match="300,000 bytes are kept; run the command again"):
        download_file(f"{home.url}/a.bin", target, digest=DIGEST, tries=1)
    assert not target.exists()
    home.cut = None
    download_file(f"{home.url}/a.bin", target, digest=DIGEST)
    assert home.asked[-1] == ("/a.bin", "bytes=300000-")
    assert target.read_bytes() == CONTENT


def test_one_fetch_resumes_a_broken_connection(
    home: Home, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    home.cut = 400_000
    assert (
        download_file(f"{home.url}/a.bin", tmp_path / "a.bin", digest=DIGEST).read_bytes()
        == CONTENT
    )
    assert [asked for _, asked in home.asked] == [None, "bytes=400000-", "bytes=800000-"]


def test_a_server_without_ranges_starts_over(home: Home, tmp_path: Path) -> None:
    home.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"old")
    assert (
        download_file(f"{home.url}/a.bin", tmp_path / "a.bin", digest=DIGEST).read_bytes()
        == CONTENT
    )


def test_a_part_that_is_already_whole_is_taken(home: Home, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert (
        download_file(f"{home.url}/a.bin", tmp_path / "a.bin", digest=DIGEST).read_bytes()
        == CONTENT
    )


def test_a_part_longer_than_the_file_is_dropped(
    home: Home, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "a.bin.part").write_bytes(CONTENT + b"more")
    assert (
        download_file(f"{home.url}/a.bin", tmp_path / "a.bin", digest=DIGEST).read_bytes()
        == CONTENT
    )


def test_a_corrupt_file_is_an_error_and_not_kept(home: Home, tmp_path: Path) -> None:
    home.files["/a.bin"] = b"x" + CONTENT[1:]
    with pytest.raises(TinyspecError, match=f"a.bin: refused, its sha256 is .*, expected {DIGEST}"):
        download_file(f"{home.url}/a.bin", tmp_path / "a.bin", digest=DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_and_a_dead_server_are_one_line(home: Home, tmp_path: Path) -> None:
    with pytest.raises(TinyspecError, match="nothing: the server answers 404"):
        download_file(f"{home.url}/nothing", tmp_path / "x")
    with pytest.raises(TinyspecError, match="cannot be fetched"):
        download_file("http://127.0.0.1:1/a", tmp_path / "x", tries=1)


def _library(home: Home) -> dict[str, DataSet]:
    books = {"An Author": ("One", "Two's \u00e9nd")}
    texts = {"One": "# Title: One\n\n-------\nfirst\r\n", "Two's \u00e9nd": "second \u00e9\n"}
    home.files["/o/r/c/An%20Author/One.md"] = texts["One"].encode()
    home.files["/o/r/c/An%20Author/Two%27s%20%C3%A9nd.md"] = texts["Two's \u00e9nd"].encode()
    rows = [{"author": "An Author", "title": t, "text": texts[t]} for t in books["An Author"]]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    source = Source(
        "text/classics.train.jsonl.xz", "o/r/c", "", hashlib.sha256(content).hexdigest(), books
    )
    return {"classics": DataSet("public domain", (source,))}


def test_books_are_fetched_one_by_one_and_become_one_file(home: Home, tmp_path: Path) -> None:
    sets = _library(home)
    second = home.files.pop("/o/r/c/An%20Author/Two%27s%20%C3%A9nd.md")
    with pytest.raises(TinyspecError, match="404"):
        fetch_data_sets(["classics"], root=tmp_path, base_url=home.url, data_sets=sets)
    assert not (tmp_path / "text/classics.train.jsonl.xz").exists()
    home.files["/o/r/c/An%20Author/Two%27s%20%C3%A9nd.md"] = second
    fetch_data_sets(["classics"], root=tmp_path, base_url=home.url, data_sets=sets)
    assert [path.endswith("One.md") for path, _ in home.asked] == [
        True,
        False,
        False,
    ]  # the first was kept
    found = data.read_books("train", tmp_path)
    assert [(b.author, b.title, b.text) for b in found] == [
        ("An Author", "One", "# Title: One\n\n-------\nfirst\r\n"),
        ("An Author", "Two's \u00e9nd", "second \u00e9\n"),
    ]
    assert [p.name for p in (tmp_path / "text").iterdir()] == ["classics.train.jsonl.xz"]


def test_a_changed_book_is_an_error(home: Home, tmp_path: Path) -> None:
    sets = _library(home)
    home.files["/o/r/c/An%20Author/One.md"] = b"\xff something else"
    with pytest.raises(TinyspecError, match="refused, the sha256 of the books together"):
        fetch_data_sets(["classics"], root=tmp_path, base_url=home.url, data_sets=sets)
    assert list((tmp_path / "text").iterdir()) == []


def test_what_is_public_unpacked_is_packed_here_and_not_fetched_twice(
    home: Home, tmp_path: Path
) -> None:
    plain = b'{"question": "1 + 1?", "answer": "2"}\n'
    home.files["/o/r/c/train.jsonl"] = plain
    source = Source(
        "code_math/gsm8k.train.jsonl.gz", "o/r/c", "train.jsonl", hashlib.sha256(plain).hexdigest()
    )
    sets = {"gsm8k": DataSet("MIT", (source,))}
    fetch_data_sets(root=tmp_path, base_url=home.url, data_sets=sets)
    fetch_data_sets(root=tmp_path, base_url=home.url, data_sets=sets)
    assert len(home.asked) == 1
    assert [(s.question, s.answer) for s in data.read_gsm8k("train", tmp_path)] == [("1 + 1?", "2")]
    assert [p.name for p in (tmp_path / "code_math").iterdir()] == ["gsm8k.train.jsonl.gz"]


def test_captions_are_fetched_in_both_languages_and_read_as_pairs(
    home: Home, tmp_path: Path
) -> None:
    texts = {"en": "A dog.\nTwo men.\n", "de": "Ein Hund.\nZwei M\u00e4nner.\n"}
    pinned = []
    for source in DATA_SETS["multi30k"].sources:
        content = gzip.compress(texts[source.file.removesuffix(".gz")[-2:]].encode())
        home.files[f"/{source.home}/{source.file}"] = content
        pinned.append(source._replace(digest=hashlib.sha256(content).hexdigest()))
    sets = {"multi30k": DataSet("research", tuple(pinned))}
    assert len(fetch_data_sets(["multi30k"], root=tmp_path, base_url=home.url, data_sets=sets)) == 6
    for split in ("train", "valid", "test"):
        assert data.read_multi30k(split, tmp_path) == [
            ("A dog.", "Ein Hund."),
            ("Two men.", "Zwei M\u00e4nner."),
        ]  # type: ignore[arg-type]
    (tmp_path / "multi30k/val.de.gz").unlink()
    with pytest.raises(TinyspecError, match=r"val.de.gz: no such data file; `tinyspec data fetch`"):
        data.read_multi30k("valid", tmp_path)
    (tmp_path / "multi30k/val.de.gz").write_bytes(
        (tmp_path / "multi30k/val.en.gz").read_bytes()[:-9]
    )
    with pytest.raises(TinyspecError, match="damaged"):
        data.read_multi30k("valid", tmp_path)
    (tmp_path / "multi30k/val.de.gz").write_bytes(gzip.compress(b"Ein Hund.\n"))
    with pytest.raises(TinyspecError, match="2 English lines but 1 German ones"):
        data.read_multi30k("valid", tmp_path)


def test_an_unknown_set_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        TinyspecError, match="no data set is called 'clasics'; did you mean 'classics'"
    ):
        fetch_data_sets(["clasics"], root=tmp_path)


def test_every_public_file_is_pinned_and_checked() -> None:
    for entry in DATA_SETS.values():
        for source in entry.sources:
            assert len(source.digest) == 64
            assert len(source.home.split("/")[2]) == 40, "a commit, not a branch: it never changes"


def test_missing_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path))
    assert data.data_folder() == tmp_path
    with pytest.raises(
        TinyspecError,
        match=r"question.jsonl: no such data file; `tinyspec data fetch` .* TINYSPEC_DATA",
    ):
        data.read_spec_bench()


def test_damaged_data_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    path = tmp_path / "text/classics.valid.jsonl.xz"
    path.write_bytes(
        lzma.compress(b'{"author": "A", "title": "T", "text": "x"}\n{"author": "A"}\n')
    )
    with pytest.raises(TinyspecError, match=r"line 2: expected an object with author, title, text"):
        data.read_books("valid", tmp_path)
    path.write_bytes(lzma.compress(b"[1]\n"))
    with pytest.raises(TinyspecError, match=r"line 1: expected an object"):
        data.read_books("valid", tmp_path)
    path.write_bytes(lzma.compress(CONTENT)[:-20])
    with pytest.raises(TinyspecError, match=r"damaged"):
        data.read_books("valid", tmp_path)
