"""A checkpoint folder appears whole or not at all; in an existing one, each file is replaced
whole.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from tinyspec.errors import TinyspecError


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A folder to write into; what is in it at the end of the block becomes, or joins, `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield work
        _open_to_others(work)
        if target.is_dir():
            for file in sorted(work.iterdir()):
                file.replace(target / file.name)
        else:
            work.replace(target)
    except (OSError, safetensors.SafetensorError) as error:
        raise TinyspecError(f"{target}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _open_to_others(folder: Path) -> None:
    """Temporary folders, and the files that safetensors writes, are private; a checkpoint is an
    ordinary folder.
    """
    folder.chmod(0o777 & ~umask())
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask())


def umask() -> int:
    """What this process takes from the rights of new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
