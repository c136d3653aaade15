"""Download a file over HTTP: resume where it broke, check it, and never leave half a file.

What has arrived grows in `<name>.part` beside its place. Only a whole file with the right checksum
is moved there.
"""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tinyspec.errors import TinyspecError

ShowBytes = Callable[[int, int | None], None]
"""Told the bytes that have arrived, and the bytes in all if the server says."""


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_file(
    url: str,
    target: str | Path,
    *,
    digest: str | None = None,
    progress: ShowBytes | None = None,
    tries: int = 4,
    timeout: float = 30.0,
) -> Path:
    """Download `url` to `target`, and return `target`.

    A connection that breaks is taken up again at the byte where it broke, `tries` times.

    digest    sha256 of the whole file; a file with another one is deleted, and the next call starts
              anew

    Raises TinyspecError when the server refuses, cannot be reached, or sends something else. What
    has arrived by then is kept, and the next call goes on from there.
    """
    target = Path(target)
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    trouble: Exception | None = None
    for attempt in range(tries):
        if attempt:
            time.sleep(min(0.2 * 4**attempt, 5.0))
        try:
            _transfer(url, part, progress, timeout)
            break
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise TinyspecError(
                    f"{url}: the server answers {error.code} {error.reason}"
                ) from error
            trouble = error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            trouble = error
    else:
        kept = f"; {part.stat().st_size:,} bytes are kept" if part.exists() else ""
        reason = getattr(trouble, "reason", None) or trouble
        raise TinyspecError(
            f"{url}: cannot be fetched ({reason}){kept}; run the command again to go on"
        ) from trouble
    if digest is not None and (found := sha256_of(part)) != digest:
        part.unlink()
        raise TinyspecError(
            f"{url}: refused, its sha256 is {found}, expected {digest}; run the command again"
        )
    os.replace(part, target)
    return target


def _transfer(url: str, part: Path, progress: ShowBytes | None, timeout: float) -> None:
    """Append to `part` what it lacks.

    Raises OSError unless the server sends all that it announces.
    """
    have = part.stat().st_size if part.exists() else 0
    headers = {
        "User-Agent": "tinyspec",
        "Accept-Encoding": "identity",
    }  # compressed bytes would not match the checksum
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        answer = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # nothing is lacking
        part.unlink()  # it is longer than the file: not of this file
        raise OSError("what had arrived did not belong to this file") from error
    with answer:
        if have and (
            answer.status != 206 or not _starts_at(answer.headers.get("Content-Range", ""), have)
        ):
            have = 0  # the server sends the whole file
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        with part.open("ab" if have else "wb") as file:
            while chunk := answer.read1(1 << 16):
                file.write(chunk)
                have += len(chunk)
                if progress:
                    progress(have, total)
    if total is not None and have < total:
        raise OSError(f"the connection broke after {have:,} of {total:,} bytes")


def _starts_at(content_range: str, have: int) -> bool:
    """Return whether a Content-Range header begins at byte `have`.

    >>> _starts_at("bytes 100-199/200", 100), _starts_at("bytes 0-199/200", 100)
    (True, False)
    """
    return content_range.startswith(f"bytes {have}-")
