"""Packed weights: where they stand in memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.lm.small import model
from tinyspec import _core
from tinyspec.lm import engine
from tinyspec.lm.engine import LINE, aligned_zeros, pack_matrix, unpack_matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rooms_are_zeros_in_one_piece_each_at_the_beginning_of_a_cache_line(
    dtype: torch.dtype,
) -> None:
    sizes = [1, 64, 65, 640, 2]
    made = aligned_zeros(sizes, dtype)
    assert [len(room) for room in made] == sizes
    assert all(
        room.dtype == dtype and room.data_ptr() % LINE == 0 and not room.any() for room in made
    )
    ends = [room.data_ptr() + len(room) * dtype.itemsize for room in made]
    gaps = [after.data_ptr() - end for end, after in zip(ends, made[1:], strict=False)]
    assert all(0 <= gap < LINE for gap in gaps)  # apart, and nothing lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [1, 16, 33])
def test_a_matrix_packed_into_its_room_is_the_same_and_unpacks_to_itself(
    out: int, dtype: torch.dtype
) -> None:
    weight = torch.arange(out * 6).reshape(out, 6).to(dtype)
    [_, room] = aligned_zeros([7, -(-out // 16) * 16 * 6], dtype)
    packed = pack_matrix(weight, room)
    assert packed.data_ptr() == room.data_ptr()
    assert torch.equal(packed, pack_matrix(weight)) and torch.equal(
        unpack_matrix(packed, out), weight
    )


@pytest.mark.skipif(_core.compute is None, reason="not compiled: nothing is packed")
def test_a_failed_packing_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third matrix fails: every weight is back, the model computes, and packs when it can."""
    m = model().to(dtype=torch.float32)
    before, packed = {name: w.clone() for name, w in m.weights.items()}, []

    def failing(*args: Any) -> torch.Tensor:
        packed.append(pack_matrix(*args))
        if len(packed) == 3:
            raise MemoryError("no room")
        return packed[-1]

    with monkeypatch.context() as patch:
        patch.setattr(engine, "pack_matrix", failing)
        with pytest.raises(MemoryError):
            m.logits([1, 2])
    assert list(m.weights) == list(before)
    assert all(torch.equal(m.weights[name], w) for name, w in before.items())
    plain = m.training_logits(torch.tensor([[1, 2]]))[0]
    torch.testing.assert_close(m.logits([1, 2]), plain)
    assert m.engine is not None


MEMORY = """
import torch
from tinyspec.lm.config import Config
from tinyspec.lm.engine import Engine

def read(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024

config = Config(vocab_size=64, d_model=512, n_layers=10, n_heads=8, n_kv_heads=8, head_dim=64,
                d_ff=1536, max_positions=64)
torch.ones(1 << 22)  # whose freeing lets the allocator keep pieces of this size from now on
before = read("VmRSS")
weights = {name: torch.zeros(shape).add_(1) for name, shape in config.shapes().items()}
pin = [bytes(600) for _ in range(99)]  # above them all, so that the end of the heap stays in use
whole = sum(weight.nbytes for weight in weights.values())
engine = Engine(config, weights)
print(whole, read("VmHWM") - before, read("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(_core.compute is None, reason="not compiled: nothing is packed")
@pytest.mark.slow
def test_weights_are_in_memory_once_also_while_they_are_packed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    whole, most, left = map(int, done.stdout.split())
    assert whole > 1 << 27
    assert most < 1.35 * whole and left < 1.15 * whole
