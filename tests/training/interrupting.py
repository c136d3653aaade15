"""Stop a training of heads by a Ctrl-C, and go on with it."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyspec.technique import TrainingBatch
from tinyspec.training import heads

BATCHES = 8  # a Ctrl-C arrives while this one is made


def check_it_goes_on_to_the_same_weights(
    train: Callable[[Path], Any],
    read: Callable[[Path], Mapping[str, Tensor]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert that a training that was interrupted ends as one that was not.

    train  trains into a folder by a command
    read   returns the weights of a folder
    """
    assert train(folder / "whole").exit_code == 0
    real, calls = heads.make_feature_collate, [0]  # type: ignore[attr-defined]

    def interrupting(*args: Any) -> Any:
        collate = real(*args)

        def count(*more: Any) -> TrainingBatch:
            calls[0] += 1
            if calls[0] == BATCHES:
                os.kill(os.getpid(), signal.SIGINT)
            made: TrainingBatch = collate(*more)
            return made

        return count

    with monkeypatch.context() as patch:
        patch.setattr(heads, "make_feature_collate", interrupting)
        assert train(folder / "parts").exit_code == 130
    assert not (folder / "parts/model.safetensors").exists()
    assert train(folder / "parts").exit_code == 0
    whole, parts = (read(folder / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
