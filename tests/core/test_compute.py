"""The compiled product equals its pure twin, and no bit of a row depends on the rows beside it.

Each law is a function of the kernel under test, for every kernel that this machine has. Wrong
kernels must break the law.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.core import stacks
from tests.core.stacks import EPS, each_kernel, falls  # noqa: F401
from tinyspec._core import compute
from tinyspec._core import reference_compute as twin

Array = NDArray[Any]
Multiply = Callable[[Array, Array, Array | None, bool, int], Array]
"""Return y [k, out] of a weight [out, in], rows [k, in] and a bias.

The other arguments say whether the weight is stored in bfloat16, and the number of threads."""
FUSED = {"avx2", "avx512", "avx512bf16"}  # these round a product and its addition once
some = settings(max_examples=60, deadline=None)
quick = settings(max_examples=25, deadline=None)


def compiled(weight: Array, x: Array, bias: Array | None, half: bool, threads: int) -> Array:
    y = np.full((len(x), len(weight)), np.nan, np.float32)
    stacks.packed(weight, half, bias).product(np.ascontiguousarray(x), y, threads)
    return y


def rounds(half: bool) -> bool:
    """Whether the kernel in use rounds its rows to bfloat16, having instructions that multiply
    these.
    """
    return half and compute.kernel() == "avx512bf16"


# ------------------------------------------------------------------ laws of a product


class Case:
    """A product with random numbers, stored as its dtype stores them."""

    def __init__(self, out: int, inputs: int, k: int, half: bool, bias: bool, seed: int):
        rng = np.random.default_rng(seed)
        self.half = half
        self.weight = stacks.stored(rng, out, inputs + (half and inputs % 2), half=half)
        self.x = stacks.stored(rng, k, self.weight.shape[1], half=False)
        self.bias = stacks.stored(rng, out, half=half) if bias else None


cases = st.builds(
    Case,
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)


def bounded(multiply: Multiply, case: Case, threads: int = 1) -> None:
    """|y - exact| <= (n + 2) eps sum |w x|: n sums, a product each, and the bias."""
    x = twin.bfloat16(case.x) if stacks.rounds(case.half) else case.x
    y = multiply(case.weight, case.x, case.bias, case.half, threads)
    n = x.shape[1]
    for row, got in zip(x.astype(float), y, strict=True):
        bias = None if case.bias is None else case.bias.astype(float)
        right = twin.product(case.weight.astype(float), row, bias)
        size = np.abs(case.weight) @ np.abs(row) + (0 if bias is None else np.abs(bias))
        assert (np.abs(got - right) <= (n + 2) * EPS / (1 - (n + 2) * EPS) * size).all()


def ordered(multiply: Multiply, case: Case) -> None:
    """Bit for bit one accumulator over the inputs in their order."""
    step = twin.multiply_add if compute.kernel() in FUSED else twin.separate
    y = multiply(case.weight, case.x, case.bias, case.half, 1)
    for row, got in zip(case.x, y, strict=True):
        np.testing.assert_array_equal(got, twin.product(case.weight, row, case.bias, step))


def companionable(multiply: Multiply, case: Case, threads: int = 1) -> None:
    """Check that a row has the same bits whatever stands beside it, and wherever it stands."""
    k = len(case.x)
    single = np.concatenate(
        [multiply(case.weight, row[None], case.bias, case.half, 1) for row in case.x]
    )
    np.testing.assert_array_equal(
        multiply(case.weight, case.x, case.bias, case.half, threads), single
    )
    order = np.random.default_rng(k).permutation(k)
    np.testing.assert_array_equal(
        multiply(case.weight, case.x[order], case.bias, case.half, threads), single[order]
    )
    part = slice(k // 3, k // 3 + max(1, k // 2))
    np.testing.assert_array_equal(
        multiply(case.weight, case.x[part], case.bias, case.half, threads), single[part]
    )


class TestProduct:
    @some
    @given(cases, st.integers(1, 4))
    def test_it_is_within_n_eps_of_the_exact_sum(self, case: Case, threads: int) -> None:
        bounded(compiled, case, threads)

    @some
    @given(cases)
    def test_its_bits_are_those_of_one_sum_in_order(self, case: Case) -> None:
        if not stacks.rounds(case.half):
            ordered(compiled, case)

    @quick
    @given(cases, st.integers(1, 120), st.integers(1, 4))
    def test_a_row_is_the_same_whatever_is_computed_with_it(
        self, case: Case, k: int, threads: int
    ) -> None:
        case.x = (
            np.resize(case.x, (k, case.x.shape[1]))
            + np.float32(0.1) * np.arange(k, dtype=np.float32)[:, None]
        )
        companionable(compiled, case, threads)

    @pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
    def test_every_number_of_rows_up_to_120_on_any_threads(self, half: bool) -> None:
        case = Case(150, 66, 120, half, True, 7)
        single = np.concatenate(
            [compiled(case.weight, row[None], case.bias, half, 1) for row in case.x]
        )
        for k in range(1, 121):
            for threads in (1, 2, 3, 4):
                y = compiled(case.weight, case.x[:k], case.bias, half, threads)
                np.testing.assert_array_equal(y, single[:k])

    def test_no_rows_are_no_work(self) -> None:
        assert compiled(
            np.ones((3, 2), np.float32), np.ones((0, 2), np.float32), None, False, 2
        ).shape == (0, 3)

    def test_wrong_products_fall(self) -> None:
        """The wrong products: what each does wrong, and the law that sees it."""

        def in_float32(change: Callable[[Array, Array], Array]) -> Multiply:
            def multiply(
                weight: Array, x: Array, bias: Array | None, half: bool, threads: int
            ) -> Array:
                y = change(weight, x)
                return y if bias is None else y + bias

            return multiply

        sums = twin.multiply_add if compute.kernel() in FUSED else twin.separate
        other = twin.separate if sums is twin.multiply_add else twin.multiply_add

        def inorder(w: Array, x: Array, step: twin.Step = sums) -> Array:
            return np.array([twin.product(w, row, None, step) for row in x])

        wrong: list[tuple[str, Callable[..., None], Callable[[Array, Array], Array]]] = [
            ("numpy's pairwise sum", ordered, lambda w, x: (w[None] * x[:, None]).sum(-1,
            dtype=np.float32)),
            ("from the last to the first", ordered, lambda w, x: inorder(w[:, ::-1], x[:, ::-1])),
            ("the other rounding", ordered, lambda w, x: inorder(w, x, other)),
            ("an odd last input is lost", bounded, lambda w, x: inorder(w[:, :50], x[:, :50])),
            ("sums kept in bfloat16", bounded, lambda w, x: twin.bfloat16(inorder(w, x))),
            ("rows read one input late", bounded, lambda w, x: inorder(w, np.roll(x, 1, axis=1))),
            ("another order for many rows", companionable,
             lambda w, x: inorder(w, x) if len(x) < 7 else inorder(w[:, ::-1], x[:, ::-1])),
            ("rows of a slab are mixed up", companionable, lambda w, x: inorder(w,
            x if len(x) < 2 else x[::-1])),
        ]  # fmt: skip
        case = Case(37, 51, 9, False, True, 3)
        right = in_float32(inorder)
        for law in (bounded, ordered, companionable):
            law(right, case)
        for name, law, change in wrong:
            assert falls(law, in_float32(change), case), name

    def test_what_does_not_fit_is_an_error(self) -> None:
        matrix = stacks.packed(np.ones((5, 4), np.float32), False)
        for x, y in (((2, 3), (2, 5)), ((2, 4), (2, 4)), ((2, 4), (3, 5))):
            with pytest.raises(ValueError, match="do not fit"):
                matrix.product(np.ones(x, np.float32), np.ones(y, np.float32), 1)
        with pytest.raises(ValueError, match="no packed matrix"):
            compute.Packed(np.ones(16 * 4, np.float32), 17, 4)
        with pytest.raises(ValueError, match="a bias of 4 for 5"):
            stacks.packed(np.ones((5, 4), np.float32), False, np.ones(4, np.float32))
        with pytest.raises(ValueError, match="no kernel 'mmx': it has"):
            compute.use("mmx")


class TestChoice:
    def test_every_kernel_is_sound(self) -> None:
        assert all(compute.sound(name) for name in compute.kernels())
        assert compute.kernels()[-1] == "portable"

    def test_an_unsound_kernel_is_named_and_skipped(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert compute.best(machine="aarch64") == compute.kernels()[0]
        assert capsys.readouterr().err == ""
        assert compute.best(lambda name: name == "portable", machine="x86_64") == "portable"
        lines = capsys.readouterr().err.splitlines()
        assert [line.split()[2] for line in lines[:-1]] == compute.kernels()[:-1]
        assert "the portable kernels are several times slower" in lines[-1]
