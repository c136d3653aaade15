"""Libraries that only the laws need: imported when asked for, so that decoding works without
them.
"""

import importlib
from typing import Any

from tinyspec.errors import TinyspecError


def extra(module: str) -> Any:
    """The module, or an error that says how to get it.

    >>> extra("no_such_library.part")
    Traceback (most recent call last):
    tinyspec.errors.TinyspecError: this law needs no_such_library: pip install 'tinyspec[test]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise TinyspecError(f"this law needs {package}: pip install 'tinyspec[test]'") from None
