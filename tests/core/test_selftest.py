"""The C behind the compiled transformer passes its own test, which needs no Python: .ci/emulate runs it on other processors."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "tinyspec" / "_core" / "src"
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="NO C COMPILER: the C is not tested by itself")
def test_threads_a_fork_and_every_kernel(tmp_path: Path) -> None:
    parts = [HERE / "selftest.c", *(SOURCES / name for name in ("kernels.c", "layers.c", "pool.c"))]
    flags = ["-O1", "-ffp-contract=off", "-pthread", f"-I{SOURCES}"]
    subprocess.run([str(COMPILER), *flags, *map(str, parts), "-lm", "-o", str(tmp_path / "test")], check=True)
    ran = subprocess.run([str(tmp_path / "test"), "quick"], capture_output=True, text=True)
    assert (ran.returncode, "FAILED" in ran.stdout) == (0, False), ran.stdout
    assert ran.stdout.startswith("portable: 0 failures\n")
