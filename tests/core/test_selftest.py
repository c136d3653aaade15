"""The C code of the compiled transformer passes its own test, which needs no Python.

.ci/emulate runs the same test on other processors.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tinyspec._core.reference_exp import exponential

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "tinyspec" / "_core" / "src"
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="NO C COMPILER: the C is not tested by itself")
def test_threads_a_fork_and_every_kernel(tmp_path: Path) -> None:
    parts = [HERE / "selftest.c", *(SOURCES / name for name in ("kernels.c", "layers.c", "pool.c"))]
    flags = ["-O1", "-ffp-contract=off", "-pthread", f"-I{SOURCES}"]
    subprocess.run(
        [str(COMPILER), *flags, *map(str, parts), "-lm", "-o", str(tmp_path / "test")], check=True
    )
    ran = subprocess.run([str(tmp_path / "test"), "quick"], capture_output=True, text=True)
    assert (ran.returncode, "FAILED" in ran.stdout) == (0, False), ran.stdout
    assert ran.stdout.startswith("portable: 0 failures\n")


def test_exp_is_the_twins_wherever_the_self_test_runs() -> None:
    """What the C compares its bits with are the twin's."""
    found = 0
    for x in exponential([i * -0.751 / 0.5 for i in range(1001)]):
        found = (found * 31 + int.from_bytes(struct.pack("<d", x), "little")) % 2**64
    assert f"{found:#x}u" in (HERE / "selftest.c").read_text()
