"""Quantised matrices, multiplied as they are stored: the bits of the bfloat16 matrix.

A weight is d q or d q + m, rounded to bfloat16. The kernels unpack it where they need it.
"""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec.lm import engine
from tinyspec.lm.engine import pack_matrix, time_products, wrap_matrix, wrap_quantised
from tinyspec.lm.quantised import SCALE_BYTES, QuantisedMatrix, quantise_matrix

compute: Any = pytest.importorskip("tinyspec._core.compute", reason="needs compiled kernels")
KINDS = list(SCALE_BYTES)
HALF = np.float16


def some_matrix(kind: str, out: int, inputs: int, seed: int = 0) -> QuantisedMatrix:
    """A matrix of random weights, of unequal size by row."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((out, inputs)) * rng.uniform(0.001, 2.0, (out, 1))
    return quantise_matrix(torch.from_numpy(weight), kind)


def test_a_group_is_what_the_formula_says() -> None:
    """One output, 32 inputs, d = 0.5 and m = -3, q of input j is j mod 16."""
    d, m = (np.array([x], HALF).tobytes() for x in (0.5, -3.0))
    fours = bytes(j | j << 4 for j in range(16))  # a byte has inputs j and j + 16
    row = np.frombuffer(d + m + fours, np.uint8)[None]
    weights = QuantisedMatrix("Q4_1", row).expand()[0].tolist()
    assert weights == [0.5 * (j % 16) - 3 for j in range(32)]
    row = np.frombuffer(d + fours, np.uint8)[None]
    assert QuantisedMatrix("Q4_0", row).expand()[0].tolist() == [
        0.5 * (j % 16 - 8) for j in range(32)
    ]
    row = np.frombuffer(d + np.arange(-16, 16, dtype=np.int8).tobytes(), np.uint8)[None]
    assert QuantisedMatrix("Q8_0", row).expand()[0].tolist() == [0.5 * j for j in range(-16, 16)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 70),
    st.integers(1, 6),
    st.integers(1, 64),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_a_product_has_the_bits_of_the_bfloat16_matrix(
    kind: str, out: int, groups: int, rows: int, threads: int, has_bias: bool, seed: int
) -> None:
    matrix = some_matrix(kind, out, 32 * groups, seed)
    whole = matrix.expand()
    rng = np.random.default_rng(seed + 1)
    x = rng.standard_normal((rows, 32 * groups)).astype(np.float32)
    bias = torch.from_numpy(rng.standard_normal(out)) if has_bias else None
    one = wrap_matrix(pack_matrix(whole), whole.shape, bias)
    other = wrap_quantised(matrix, whole.shape, bias)
    before = compute.kernel()
    try:
        for kernel in compute.kernels():
            compute.use(kernel)
            due, got = (np.full((rows, out), np.nan, np.float32) for _ in range(2))
            one.product(x, due, 1)
            other.product(x, got, threads)
            assert np.array_equal(due.view(np.uint32), got.view(np.uint32)), kernel
    finally:
        compute.use(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_looked_up_as_it_expands(kind: str) -> None:
    matrix = some_matrix(kind, 37, 96)
    whole, ids = matrix.expand().float().numpy(), [36, 0, 17, 16, 16]
    rows = np.empty((len(ids), 96), np.float32)
    wrap_quantised(matrix, whole.shape).rows(ids, rows)
    assert np.array_equal(rows, whole[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_it_takes_no_more_than_the_file(kind: str) -> None:
    """Outputs are filled up to a multiple of 16, and that is all."""
    matrix = some_matrix(kind, 48, 96)
    assert matrix.interleave().nbytes == matrix.rows.nbytes


def test_what_cannot_be_packed_is_named() -> None:
    groups = some_matrix("Q8_0", 16, 64).interleave()
    with pytest.raises(ValueError, match="no kernel multiplies Q6_K"):
        compute.Packed(groups, 16, 64, None, "Q6_K")
    for out, inputs in ((16, 48), (16, 96), (32, 64)):
        with pytest.raises(ValueError, match="no packed matrix"):
            compute.Packed(groups, out, inputs, None, "Q8_0")


PEAK = """
import sys
import numpy as np
import tinyspec._core.compute as compute  # also where TINYSPEC_PURE asks for the twins

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

compute.use(sys.argv[1])
out, inputs = 16384, 2048
matrix = compute.Packed(np.full(out * inputs // 32 * 20, 1, np.uint8), out, inputs, None, "Q4_1")
ones = np.ones
pairs = [(ones((n, inputs), np.float32), ones((n, out), np.float32)) for n in (1, 64)]
before = peak()
for x, y in pairs:
    matrix.product(x, y, 2)
print(peak() - before, 2 * out * inputs)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kernel", compute.kernels())
def test_a_matrix_is_never_unpacked_whole(kernel: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, kernel], capture_output=True, text=True, check=True
    )
    more, whole = map(int, done.stdout.split())
    assert more < whole / 8


@pytest.mark.parametrize("kernel", compute.kernels())
def test_every_form_is_timed_and_the_kernel_stays_what_it_was(kernel: str) -> None:
    before = compute.kernel()
    seconds = time_products(kernel, 1, KINDS, rounds=2)
    assert {form: len(taken) for form, taken in seconds.items()} == dict.fromkeys(
        ("bfloat16", *KINDS), 2
    )
    assert min(map(min, seconds.values())) > 0 and compute.kernel() == before


@pytest.mark.parametrize(("quantised", "faster"), [(1.0, True), (3.0, False)])
def test_the_faster_form_is_chosen_after_one_measurement(
    monkeypatch: pytest.MonkeyPatch, quantised: float, faster: bool
) -> None:
    timed = list[str]()

    def time_both(kernel: str, threads: int, kinds: Any) -> dict[str, list[float]]:
        timed.append(kernel)
        return {"bfloat16": [9.0, 2.0], "Q4_1": [quantised, 9.0]}

    monkeypatch.setattr(engine, "time_products", time_both)
    engine.is_quantised_faster.cache_clear()
    try:
        for kernel in ("avx2", "avx2", "avx512bf16"):
            assert engine.is_quantised_faster(kernel, 1) == (faster or kernel == "avx512bf16")
        assert timed == ["avx2"]
    finally:
        engine.is_quantised_faster.cache_clear()
