"""The page "prove your own" runs: every cell, in order, prints what stands below it, and none takes ten seconds."""

import contextlib
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tinyspec.errors import TinyspecError
from tinyspec.laws import Accused

PAGE = Path(__file__).parent.parent.parent / "tutorials" / "prove_your_own.md"
CELLS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE.read_text(encoding="utf-8"), re.DOTALL)
STARTED: dict[str, Any] = {"__name__": "prove_your_own"}


def run(cell: str, names: dict[str, Any]) -> str:
    """What a cell prints, an accusation or an error that a user can mend included; seconds are blanked."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(cell, str(PAGE), "exec"), names)
        except (Accused, TinyspecError) as error:
            print(error)
    return re.sub(r"\d+\.\d s", "# s", printed.getvalue())


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_a_cell_prints_what_the_page_says(number: int) -> None:
    cell, said = CELLS[number]
    names = dict(STARTED)
    exec("import numpy as np\nfrom tinyspec.laws import check", names)
    began = time.process_time()
    assert run(cell, names) == said
    assert time.process_time() - began < 10


def test_the_page_has_the_mistakes_it_is_for() -> None:
    assert len(CELLS) >= 13
    assert sum("broken:" in said for _, said in CELLS) >= 9


def test_the_last_cell_is_a_test_that_passes() -> None:
    names = dict(STARTED)
    for cell, _ in (CELLS[0], CELLS[-1]):
        run(cell, names)
    names["test_my_decoding_function"]()
