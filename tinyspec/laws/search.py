"""Where cases come from: Hypothesis, asked the same questions every time, so that a law is a plain
function of what it judges.

Hypothesis comes with the extra `test`; the library itself does without.
"""

import time
from collections.abc import Callable
from typing import Any

from tinyspec.errors import TinyspecError
from tinyspec.laws.accused import Evidence
from tinyspec.laws.extra import install_command

try:
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import strategies as st
except ImportError as missing:
    raise TinyspecError(f"drawing cases needs Hypothesis: {install_command()}") from missing

__all__ = ["search_cases", "st"]


def search_cases(
    cases: st.SearchStrategy[Any], judge: Callable[[Any], None], law: str, examples: int
) -> Evidence:
    """Judge as many drawn cases; if one is accused, raise the accusation of the smallest one that
    is.

    The cases are the same in every run and on every machine. Exceptions that are no accusations
    pass as they are.
    """
    judged = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def every(case: Any) -> None:
        nonlocal judged
        judged += 1
        judge(case)

    began = time.perf_counter()
    every()
    return Evidence(law, judged, seconds=time.perf_counter() - began)
