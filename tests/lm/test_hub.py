"""Fetching by hub id, against a server on this machine that answers as the hub does.

No test here uses the network beyond this machine.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.lm.checkpoints import random
from tests.lm.small import LLAMA
from tests.lm.test_tokenizer import byte_level
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint, hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = replace(LLAMA, vocab_size=300, bos=263, eos=(264,))
ROOT = Path(__file__).parent.parent.parent


class Hub:
    """A hub with one model, `org/tiny`. `cut` ends the next answer of the weights early; `ranges`
    lists the asked.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.cut, self.status, self.ranges = False, 200, list[str | None]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def do_GET(self, body: bool = True) -> None:
                path, _, _ = self.path.partition("?")
                if hub.status != 200:
                    return self.reply(hub.status, b"{}", body, {"X-Error-Code": "Unavailable"})
                if not re.match(r"(/api/models)?/org/tiny(/|$)", path):
                    return self.reply(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
                if path.startswith("/api/models/org/tiny/tree/"):
                    entries = [entry(name, data) for name, data in hub.files.items()]
                    return self.reply(200, json.dumps(entries).encode(), body)
                if path.startswith("/api/"):
                    siblings = [{"rfilename": name} for name in hub.files]
                    info = {
                        "id": "org/tiny",
                        "sha": COMMIT,
                        "siblings": siblings,
                        "private": False,
                        "tags": [],
                    }
                    return self.reply(200, json.dumps(info).encode(), body)
                return self.send(path.rpartition("/")[2], body)

            def send(self, name: str, body: bool) -> None:
                if name not in hub.files:
                    return self.reply(
                        404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                    )
                data = hub.files[name]
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                start, status = 0, 200
                if name == "model.safetensors" and body:
                    hub.ranges.append(self.headers["Range"])
                if found := re.match(r"bytes=(\d+)-", self.headers["Range"] or ""):
                    start, status = int(found[1]), 206
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                if hub.cut and body and name == "model.safetensors":
                    hub.cut = False
                    self.reply(
                        status,
                        data[start : len(data) // 2],
                        True,
                        headers,
                        length=len(data) - start,
                    )
                    self.close_connection = True
                    return None
                return self.reply(status, data[start:], body, headers)

            def reply(
                self,
                status: int,
                data: bytes,
                body: bool,
                headers: dict[str, str] | None = None,
                length: int = -1,
            ) -> None:
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data) if length < 0 else length))
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()


def entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "source"
    checkpoint.write_checkpoint(path, CONFIG, random(CONFIG), byte_level())
    (path / "pytorch_model.bin").write_bytes(b"never fetched")
    return path


@pytest.fixture
def server(source: Path) -> Iterator[Hub]:
    hub = Hub(source)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def fetch(home: Path, url: str, repo: str = "org/tiny", **env: str) -> tuple[str, str]:
    """The folder, or the error, that a fresh process reports; and what it wrote to the terminal."""
    code = (
        "import sys\nfrom tinyspec.lm import hub\nfrom tinyspec.errors import TinyspecError\n"
        "try: print(hub.fetch_snapshot(sys.argv[1]))\nexcept TinyspecError as e: print('ERROR', e)"
    )
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_DISABLE_XET": "1",
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, repo],
        env={**clean, **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip(), done.stderr


def complete(folder: str, source: Path) -> bool:
    return (Path(folder) / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


def test_a_model_is_fetched_once_and_then_found_offline(server, source, tmp_path):
    folder, shown = fetch(tmp_path, server.url)
    assert complete(folder, source)
    assert not (Path(folder) / "pytorch_model.bin").exists()
    assert "%" in shown  # a progress bar
    parts = checkpoint.read_checkpoint_folder(Path(folder), "org/tiny")
    assert (parts.config, parts.name) == (CONFIG, "org/tiny")
    assert parts.tokenizer.has_chat
    asked = len(server.ranges)
    assert fetch(tmp_path, server.url)[0] == folder
    assert fetch(tmp_path, server.url, HF_HUB_OFFLINE="1")[0] == folder
    assert len(server.ranges) == asked


def test_an_interrupted_download_leaves_no_half_file_and_goes_on_where_it_was(server, tmp_path):
    server.files["model.safetensors"] = (
        b"0123456789abcdef" * 1_500_000
    )  # the client keeps whole pieces of 10 MB
    server.cut = True
    folder, _ = fetch(tmp_path, server.url)
    if folder.startswith(
        "ERROR"
    ):  # versions of huggingface_hub differ in whether they try again by themselves
        assert not [p for p in tmp_path.rglob("model.safetensors") if p.exists()]
        folder, _ = fetch(tmp_path, server.url)
    assert (Path(folder) / "model.safetensors").read_bytes() == server.files["model.safetensors"]
    assert server.ranges[0] is None
    assert server.ranges[1] is not None


@pytest.mark.parametrize(
    ("repo", "env", "says"),
    [
        ("org/other", {}, "org/other: no such model on the hub"),
        ("org/ti ny", {}, "org/ti ny: not a hub id"),
        (
            "org/tiny",
            {"HF_HUB_OFFLINE": "1"},
            "org/tiny: HF_HUB_OFFLINE is set, and it is not in the cache",
        ),
        (
            "org/tiny",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "org/tiny: no connection to http://127.0.0.1:9",
        ),
    ],
)
def test_what_cannot_be_fetched_is_an_error_of_one_line(server, tmp_path, repo, env, says):
    out, _ = fetch(tmp_path, server.url, repo, **env)
    assert out.startswith(f"ERROR {says}")
    assert "\n" not in out


def test_a_hub_that_answers_with_an_error_is_named(server, tmp_path):
    server.status = 503
    out, _ = fetch(tmp_path, server.url, HF_HUB_DOWNLOAD_TIMEOUT="2")
    assert out.startswith("ERROR org/tiny: ")
    assert "\n" not in out


def test_a_name_with_one_slash_that_is_no_path_goes_to_the_hub(monkeypatch):
    def snapshot(name: str, progress: bool) -> Path:
        raise TinyspecError(f"asked for {name}, progress {progress}")

    monkeypatch.setattr(hub, "fetch_snapshot", snapshot)
    with pytest.raises(TinyspecError, match="asked for org/tiny, progress False"):
        checkpoint.read_checkpoint("org/tiny", progress=False)
