"""The hot paths: compiled if there was a compiler, else their twins in plain Python.

Both are the same functions with the same bits. `TINYSPEC_PURE=1` asks for the twins, and `COMPILED`
tells which of them run.
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
        from tinyspec._core.sampling import (
            apply_sampling,
            exclude_token,
            exponential_race,
            residual,
            sample_from_logits,
            sample_inverse_cdf,
            sample_without_replacement,
            verify_tree,
        )
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
"""The compiled transformer. None: torch computes; TINYSPEC_PURE is set, or nothing was compiled."""

if not TYPE_CHECKING and not COMPILED:
    from tinyspec._core.fallback import (
        Forest,
        NgramIndex,
        ancestors,
        apply_sampling,
        depths,
        exclude_token,
        exponential_race,
        residual,
        retrieve,
        sample_from_logits,
        sample_inverse_cdf,
        sample_without_replacement,
        suffix_order,
        unique_paths,
        verify_tree,
    )

__all__ = [
    "COMPILED",
    "Forest",
    "NgramIndex",
    "ancestors",
    "apply_sampling",
    "compute",
    "depths",
    "exclude_token",
    "exponential_race",
    "residual",
    "retrieve",
    "sample_from_logits",
    "sample_inverse_cdf",
    "sample_without_replacement",
    "suffix_order",
    "unique_paths",
    "verify_tree",
]
