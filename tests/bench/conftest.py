"""Collect no garbage before each sample: tests wind the clock by hand."""

from collections.abc import Iterator

import pytest

from tinyspec.bench import curve, measure


@pytest.fixture(autouse=True, scope="session")
def no_garbage() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (measure, curve):
            patch.setattr(module, "collect_garbage", lambda: None)
        yield
