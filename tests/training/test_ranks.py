"""Several processes that train together get the weights of one that works in as many pieces."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.zoo import Zoo, tiny_zoo

WORKER = """
import sys, torch
from torch.nn import functional as F
from tests.training.test_train import SHAPE, batches
from tinyspec.lm.model import Model
from tinyspec.training import ranks
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import train

torch.set_num_threads(1)
folder, pieces, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ranks.join_ranks()
for name in ("train", "again"):  # the second call goes on from the state of the first
    model = Model.random(SHAPE, seed=1)
    def loss(inputs, targets):
        logits = model.training_logits(inputs, 0.1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def validate():
        return {"valid": float(loss(*batches(torch.Generator().manual_seed(0))))}
    settings = TrainSettings(
        steps=steps, lr=1e-2, optimizer="muon", ema=0.9, pieces=pieces, log_every=1, valid_every=3
    )
    ended = train(model.weights, batches, loss, settings, folder, validate=validate)
    steps += 3
if ranks.this_rank() == 0:
    torch.save(dict(model.weights), folder + "/result.pt")
ranks.leave_ranks()
assert ranks.count_processes() == 1
"""


WRITER = """
import sys, torch
from tinyspec.training import ranks
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.train import train

ranks.join_ranks()
weights = {"codebook": torch.zeros(3), "w": torch.ones(3)}
def batches(generator):
    return (torch.rand(4, 3, generator=generator),)
def loss(x):
    weights["codebook"].data.add_(x.mean(dim=0))  # as a codebook that is no part of the gradient
    return ((x - weights["codebook"].detach()) * weights["w"]).square().mean()
train(weights, batches, loss, TrainSettings(steps=3, lr=1e-2), sys.argv[1])
torch.save(weights, f"{sys.argv[1]}/result{ranks.this_rank()}.pt")
ranks.leave_ranks()
"""


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a process."""
    told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return os.environ | {"OMP_NUM_THREADS": "1", **{key: str(x) for key, x in told.items()}}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_ranks(command: list[str], ranks: int) -> None:
    """Run a command in so many processes, as torchrun does."""
    port = free_port()
    running = [
        subprocess.Popen(command, env=environment(rank, ranks, port), stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    for process in running:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error.decode()


def work(folder: Path, ranks: int, pieces: int) -> dict[str, torch.Tensor]:
    """Train with so many processes, and return the weights of rank 0."""
    folder.mkdir()
    run_ranks([sys.executable, "-c", WORKER, str(folder), str(pieces), "5"], ranks)
    weights: dict[str, torch.Tensor] = torch.load(folder / "result.pt", weights_only=True)
    return weights


@pytest.mark.slow
def test_two_ranks_are_two_pieces_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, an average, both optimizers, validation, and a training that went on."""
    one = work(tmp_path / "one", ranks=1, pieces=2)
    two = work(tmp_path / "two", ranks=2, pieces=1)
    assert all(torch.equal(two[name], weight) for name, weight in one.items())
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("one", "two")]
    assert [len(log.splitlines()) for log in logs] == [12, 12]  # 8 steps, 4 validations


@pytest.mark.slow
def test_a_piece_has_the_same_dropout_on_any_rank(tmp_path: Path) -> None:
    """Three pieces on two ranks: rank 0 computes the first and the last."""
    one = work(tmp_path / "one", ranks=1, pieces=3)
    two = work(tmp_path / "two", ranks=2, pieces=3)
    assert all(torch.allclose(two[name], weight, atol=1e-5) for name, weight in one.items())


@pytest.mark.slow
def test_ranks_have_the_same_weights_where_the_loss_writes_some(tmp_path: Path) -> None:
    """Each rank writes what its own part of the batch says."""
    run_ranks([sys.executable, "-c", WRITER, str(tmp_path)], 2)
    one, other = (torch.load(tmp_path / f"result{rank}.pt", weights_only=True) for rank in range(2))
    assert one["codebook"].any() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tiny_zoo(tmp_path)


@pytest.mark.slow
def test_torchrun_trains_the_same_head(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, lead, pieces in (
        ("one", [sys.executable], 2),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"], 1),
    ):
        monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / name / "cache"))
        out = tmp_path / name / "head"
        asked = ["--for", zoo.big, "--method", "medusa", "--out", str(out), "--quiet"]
        values = ["head.heads=2", "texts.texts=12", "texts.tokens=12", "texts.prompt=8"]
        values += ["texts.batch=4", "train.steps=4", f"train.pieces={pieces}", "batch=4"]
        sets = [word for value in values for word in ("--set", value)]
        port = [] if len(lead) == 1 else ["--master-port", str(free_port())]
        command = [*lead, *port, "-m", "tinyspec", "train", "head", *asked, *sets]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(str(out)) == 1  # one rank says where the head is
        found.append(safetensors.torch.load_file(out / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], weight) for name, weight in found[0].items())
