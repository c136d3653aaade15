"""Random calls of the compiled core return or are refused: a fixed share of what .ci/sanitize runs."""

import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz import kernels
from tests.fuzz.kernels import fuzz
from tinyspec.errors import TinyspecError

SCRIPT = Path(kernels.__file__)


def test_every_call_of_the_compiled_core_returns_or_is_refused() -> None:
    """In a process of its own, as a crash would end this one."""
    command = [sys.executable, str(SCRIPT), "--calls", "300", "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout[-3000:] + ran.stderr[-3000:]
    assert len(re.findall(r"returned +[1-9]", ran.stdout)) == len(kernels.list_calls())


def test_another_exception_and_nothing_but_refusals_are_failures() -> None:
    def refuse(_: kernels.Dice) -> None:
        raise TinyspecError("always")

    def fail(dice: kernels.Dice) -> None:
        if dice.upto(3) == 0:
            raise AttributeError("an attribute")

    assert fuzz("good", lambda dice: dice.upto(3), 99, 0)[1] == ""
    assert "no call returned" in fuzz("refused", refuse, 9, 0)[1]
    ends, failure = fuzz("failing", fail, 99, 0)
    assert 0 < ends["FAILED"] < 99 and re.match(r"failing, call \d+, seed 0\n", failure)
    assert fuzz("failing", fail, 99, 0)[0] == ends
