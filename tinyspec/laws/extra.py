"""Libraries that only the laws need: imported when asked for, so that decoding works without
them.
"""

import importlib
from pathlib import Path
from typing import Any

import tinyspec
from tinyspec.errors import TinyspecError


def import_extra(module: str) -> Any:
    """The module, or an error that says how to get it.

    >>> extra("no_such_library.part")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tinyspec.errors.TinyspecError: this law needs no_such_library: pip install ...
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise TinyspecError(f"this law needs {package}: {install_command()}") from None


def install_command() -> str:
    """Return the command that installs the test extra: another one in a clone than elsewhere."""
    in_clone = (Path(tinyspec.__file__).parents[1] / "pyproject.toml").is_file()
    return 'pip install -e ".[test]"' if in_clone else 'pip install "tinyspec[test]"'
