"""Write a file so that no interruption and no full disk leaves half of it."""

import os
from contextlib import suppress
from pathlib import Path

from tinyspec.errors import TinyspecError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all: the old one stays until all of the new one is written.

    A device or a pipe is written in place, and so is a file in a folder that takes no new file.
    Raises TinyspecError if it cannot be written.
    """
    target = path.resolve()  # where a link leads to: the link stays
    part = target.with_name(f"{target.name}.part")
    try:
        if path.exists() and not (path.is_file() and os.access(target.parent, os.W_OK)):
            path.write_bytes(data)
        else:
            part.write_bytes(data)
            os.replace(part, target)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise TinyspecError(f"cannot write {path}: {error.strerror}") from error
