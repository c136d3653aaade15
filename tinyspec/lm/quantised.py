"""Quantised weights, kept as llama.cpp stores them.

A row of a matrix [out, in] is cut into groups of 32 inputs. A group has a scale d, of Q4_1 also a
shift m, both float16, and 32 whole numbers q:

    Q8_0  weight = d q        q in -128..127        34 bytes, 8.5 bits a weight
    Q4_0  weight = d (q - 8)  q in 0..15            18 bytes, 4.5 bits
    Q4_1  weight = d q + m    q in 0..15            20 bytes, 5 bits

A weight is then rounded to bfloat16. d q is exact in float32, so d q + m is rounded to float32
once, whether the product and the sum are one instruction or two. The kernels unpack groups in
registers and get the same bfloat16. So the logits are those of the bfloat16 model, bit for bit.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
GROUP = 32  # inputs that share a scale
BLOCK = 16  # outputs that are interleaved for the kernels
SCALE_BYTES = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}  # of a group: scales and shifts, by the kind


class QuantisedMatrix(NamedTuple):
    """A matrix [out, in] as a .gguf file has it: `rows` [out, bytes of a row]."""

    kind: str
    rows: Bytes

    def expand(self) -> Tensor:
        """Return the matrix [out, in] as bfloat16."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values = dequantize(self.rows, GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).to(torch.bfloat16)

    def groups(self) -> Bytes:
        """Return the bytes of each group, [out, in / 32, bytes]."""
        size = SCALE_BYTES[self.kind] + (GROUP if self.kind == "Q8_0" else GROUP // 2)
        return self.rows.reshape(len(self.rows), -1, size)

    def scales(self) -> NDArray[np.float16]:
        """Return the scale of each group, and the shift of Q4_1: [out, in / 32, 1 or 2]."""
        return np.ascontiguousarray(self.groups()[..., : SCALE_BYTES[self.kind]]).view("<f2")

    def interleave(self) -> Bytes:
        """Return the groups of 16 outputs side by side, [blocks, in / 32, bytes], padded.

        src/quantised.h says what stands where.
        """
        out, head = len(self.rows), SCALE_BYTES[self.kind]
        blocks = -(-out // BLOCK)
        groups = np.pad(self.groups(), ((0, blocks * BLOCK - out), (0, 0), (0, 0)))
        n, numbers = groups.shape[1], groups[..., head:]
        if self.kind != "Q8_0":  # a byte has inputs j and j + 16: let it have 2 j and 2 j + 1
            fours = np.concatenate((numbers & 15, numbers >> 4), -1)
            numbers = fours[..., 0::2] | fours[..., 1::2] << 4

        def put_side_by_side(part: Bytes, together: int) -> Bytes:
            steps = part.reshape(blocks, BLOCK, n, -1, together)
            return steps.transpose(0, 2, 3, 1, 4).reshape(blocks, n, -1)

        scales = put_side_by_side(groups[..., :head], 2)
        return np.concatenate((scales, put_side_by_side(numbers, 4)), -1)


def quantise_matrix(weight: Tensor, kind: str) -> QuantisedMatrix:
    """Return a matrix [out, in] rounded to this kind, as llama.cpp rounds it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    numbers = weight.detach().float().cpu().numpy()
    with np.errstate(over="ignore"):  # a scale beyond float16 is infinite: `scales` shows it
        return QuantisedMatrix(kind, quantize(numbers, GGMLQuantizationType[kind]))


class QuantisedWeights(Mapping[str, Tensor]):
    """Weights by name, as bfloat16. A quantised one is expanded when it is read.

    A model that is made of them takes them over, and leaves none here: they are in memory once.
    """

    def __init__(self, matrices: dict[str, QuantisedMatrix], plain: dict[str, Tensor]):
        self.matrices, self.plain = matrices, plain

    def __getitem__(self, name: str) -> Tensor:
        if name in self.matrices:
            return self.matrices[name].expand()
        return self.plain[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.matrices
        yield from self.plain

    def __len__(self) -> int:
        return len(self.matrices) + len(self.plain)
