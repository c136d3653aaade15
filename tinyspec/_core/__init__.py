"""The hot paths: compiled where a compiler was found, their pure twin elsewhere. One flat set of functions, same bits.

`TINYSPEC_PURE=1` asks for the twin. `COMPILED` says which one runs.
"""

import os
import sys
from typing import TYPE_CHECKING

COMPILED: bool = False
"""Whether the compiled kernels run."""

PURE = os.environ.get("TINYSPEC_PURE", "0") not in ("", "0")

if not PURE or TYPE_CHECKING:
    try:
        from tinyspec._core.forest import Forest
        from tinyspec._core.sampling import draw, order, pick, race, residual, walk, warp, without
        from tinyspec._core.suffixes import retrieve, suffix_order
        from tinyspec._core.tree import ancestors, depths, unique_paths
        from tinyspec._core.trie import NgramIndex

        COMPILED = True
    except ImportError:
        print(
            "tinyspec: no compiled kernels found, using the slow pure-Python ones (same results)",
            file=sys.stderr,
        )

try:
    if PURE and not TYPE_CHECKING:
        raise ImportError
    from tinyspec._core import compute as compute
except ImportError:
    compute = None  # type: ignore[assignment]
"""The compiled transformer. None: torch computes (TINYSPEC_PURE, no compiler, or one that does not know the C)."""

if not TYPE_CHECKING and not COMPILED:
    from tinyspec._core.fallback import (
        Forest,
        NgramIndex,
        ancestors,
        depths,
        draw,
        order,
        pick,
        race,
        residual,
        retrieve,
        suffix_order,
        unique_paths,
        walk,
        warp,
        without,
    )

__all__ = [
    "COMPILED",
    "Forest",
    "NgramIndex",
    "ancestors",
    "compute",
    "depths",
    "draw",
    "order",
    "pick",
    "race",
    "residual",
    "retrieve",
    "suffix_order",
    "unique_paths",
    "walk",
    "warp",
    "without",
]
