"""Packed weights: where they stand in memory."""

import pytest
import torch

from tinyspec.lm.engine import LINE, pack, rooms, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rooms_are_zeros_in_one_piece_each_at_the_beginning_of_a_cache_line(dtype: torch.dtype) -> None:
    sizes = [1, 64, 65, 640, 2]
    made = rooms(sizes, dtype)
    assert [len(room) for room in made] == sizes
    assert all(room.dtype == dtype and room.data_ptr() % LINE == 0 and not room.any() for room in made)
    ends = [room.data_ptr() + len(room) * dtype.itemsize for room in made]
    gaps = [after.data_ptr() - end for end, after in zip(ends, made[1:], strict=False)]
    assert all(0 <= gap < LINE for gap in gaps)  # apart, and nothing lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [1, 16, 33])
def test_a_matrix_packed_into_its_room_is_the_same_and_unpacks_to_itself(out: int, dtype: torch.dtype) -> None:
    weight = torch.arange(out * 6).reshape(out, 6).to(dtype)
    [_, room] = rooms([7, -(-out // 16) * 16 * 6], dtype)
    packed = pack(weight, room)
    assert packed.data_ptr() == room.data_ptr()
    assert torch.equal(packed, pack(weight)) and torch.equal(unpack(packed, out), weight)
