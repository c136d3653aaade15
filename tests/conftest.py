"""Hypothesis profiles, and a check that the compiled kernels are those of the sources."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

LAWS = Path(__file__).parent / "laws"
CORE = Path(__file__).parent.parent / "tinyspec" / "_core"

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000
)
settings.load_profile("ci" if os.environ.get("CI") else os.environ.get("HYPOTHESIS_PROFILE", "ci"))


if workers := int(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")
):  # the workers share the cores: pools would fight
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // workers, 1))
    )  # for what tests start
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def included(source: Path) -> list[Path]:
    """The .pxd files beside a .pyx that it names, and its own; and the C that it calls."""
    text = source.read_text()
    own = source.with_suffix(".pxd")
    named = [
        file
        for file in source.parent.glob("*.pxd")
        if f"tinyspec._core.{file.stem} cimport" in text
    ]
    found = [file for file in [own, *named] if file.exists()]
    return found + [
        c
        for c in (source.parent / "src").glob("*")
        if any("cdef extern" in f.read_text() for f in found)
    ]


def stale_kernels(core: Path = CORE) -> list[str]:
    """Compiled modules older than their source: Python would import them without a word."""
    return [
        library.name
        for source in core.glob("*.pyx")
        for library in core.glob(f"{source.stem}.*.so")
        if library.stat().st_mtime
        < max(file.stat().st_mtime for file in [source, *included(source)])
    ]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to test old kernels, unless none are to be used."""
    if os.environ.get("TINYSPEC_PURE", "0") in ("", "0") and (stale := stale_kernels()):
        pytest.exit(
            f"{', '.join(stale)} older than the source; rebuild with: pip install -e .",
            returncode=4,
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suite that proves the laws is long: `-m "not (laws or slow)"` is the fast part."""
    for item in items:
        if LAWS in item.path.parents:
            item.add_marker("laws")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry, an environment and modules of its own for each test: it may load plugins."""
    from tinyspec import plugins, technique  # not before the kernels are looked at

    monkeypatch.setattr(technique, "_cards", dict(technique.load_techniques()))
    monkeypatch.setenv(plugins.VARIABLE, "")
    yield
    for name in [
        name for name in sys.modules if name.startswith((plugins.NAMESPACE, "their_package"))
    ]:
        del sys.modules[name]
    plugins.import_packages.cache_clear()
