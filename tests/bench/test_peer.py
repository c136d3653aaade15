"""`tinyspec bench peer` on a tiny model, against our own torch path."""

import json
from pathlib import Path

import pytest

from tests.zoo import Zoo, run, tiny_zoo
from tinyspec import models
from tinyspec.bench.experiments import peer
from tinyspec.data import Question
from tinyspec.lm.blocks import Blocks

BANK = [
    Question(i, "qa", (f"Why is the sky {colour}?",))
    for i, colour in enumerate(("blue", "grey", "red"))
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def test_the_torch_path_writes_the_same_tokens(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyspec.data.read_spec_bench", lambda: BANK)
    out = tmp_path / "p.json"
    call = (
        "bench",
        "peer",
        "--against",
        "torch",
        "--model",
        zoo.big,
        "--questions",
        "3",
        "--tokens",
        "12",
        "--quiet",
    )
    result = run(*call, "--out", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert (found["peer"], found["identical"], found["passed"]) == ("torch", 3, True)


def test_a_model_on_the_torch_path_stays_there(zoo: Zoo) -> None:
    model = models.load(zoo.big, dtype="float32")
    unpacked = peer.TorchPathModel(model.config, dict(model.weights))
    unpacked.logits([1, 2, 3])
    assert isinstance(unpacked._path, Blocks)


def test_a_token_that_differs_is_listed_with_its_gap_and_forced(zoo: Zoo) -> None:
    model = models.load(zoo.big, dtype="float32")
    right, _ = peer.decode_to_length(model, [1, 2, 3], 6)

    def other(ids: list[int], tokens: int) -> list[int]:
        wrong = right[2] ^ 1
        rest, _ = peer.decode_to_length(model, [*ids, *right[:2], wrong], tokens - 3)
        return [*right[:2], wrong, *rest]

    found = peer.list_mismatches(model, other, [1, 2, 3], 6, "autoregressive")
    assert [(m["at"], m["ours"], m["theirs"]) for m in found] == [(2, right[2], right[2] ^ 1)]
    assert found[0]["gap"] > 0
