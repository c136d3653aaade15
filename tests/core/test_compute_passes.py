"""A pass of the compiled transformer gives each row the bits that it has alone.

A pass is a forest of rows (stacks.py). The state of a row, its logits and what it leaves in the
cache do not depend on the rows beside it, the slots, the number of threads or the split into
blocks. They agree with the pure twin.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.core import stacks
from tests.core.stacks import (  # noqa: F401
    EPS,
    GPT2,
    LLAMA,
    Rows,
    Shape,
    Stack,
    Way,
    alone,
    each_kernel,
    exact,
    falls,
    forest,
    in_half,
    together,
)

Array = NDArray[Any]
FOUR = [GPT2, LLAMA, in_half(GPT2), in_half(LLAMA)]
some = settings(max_examples=60, deadline=None)

ways = st.builds(
    Way,
    threads=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 30), max_size=3).map(tuple),
    shuffle=st.none() | st.integers(0, 9),
    spare=st.integers(0, 5),
)
trees = st.integers(1, 30).flatmap(
    lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n))).map(list)
)


def same_bits(one: tuple[Array, ...], other: tuple[Array, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def faithful(stack: Stack, rows: Rows, mute: bool = False) -> None:
    """States, keys and values within 4 n eps a layer of the greatest number there is, where n
    counts the terms of a layer's sums; in bfloat16 a key may be rounded the other way. Logits as a
    product of the state that was reached.
    """
    s = stack.shape
    n = s.d + s.hidden + s.shared * s.group * s.width + len(rows.parents)
    bound = 2.0**-7 if s.half else 4 * n * s.layers * EPS
    x, logits, cache = alone(stack, rows, mute)
    right, _, kept = exact(stack, rows, mute)
    wide = (cache.astype(np.uint32) << 16).view(np.float32) if s.half else cache
    assert np.abs(x - right).max() <= bound * np.abs(right).max()
    assert np.abs(wide - kept).max() <= bound * np.abs(kept).max()
    weight, _ = stack.twin.vocabulary
    for row, got in zip(x.astype(float), logits, strict=True):
        size = np.abs(weight) @ np.abs(stack.twin.norm(row, stack.twin.final)) + 1
        near = (
            2.0**-8 if stacks.rounds(s.half) else 4 * (s.d + 4) * EPS
        )  # a tie may be rounded the other way
        assert (np.abs(got - stack.twin.head(row)) <= near * size).all()


class TestPass:
    @some
    @given(
        stacks.shapes(),
        st.lists(trees, min_size=1, max_size=3),
        ways,
        st.integers(0, 3),
        st.booleans(),
        st.data(),
    )
    def test_a_row_is_the_same_whatever_is_computed_with_it(
        self,
        shape: Shape,
        parents: list[list[int]],
        way: Way,
        lead: int,
        mute: bool,
        data: st.DataObject,
    ) -> None:
        """Trees of several sessions, any slots, threads and splits; by key/value head any part of
        the path; probes.
        """
        stack = Stack(shape)
        hiding = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
        sessions = [forest(stack, p, seed, hiding, lead) for seed, p in enumerate(parents)]
        way = replace(way, by_head=hiding > 0)
        for rows, got in zip(sessions, together(stack, sessions, way, mute), strict=True):
            same_bits(alone(stack, rows, mute), got)

    @pytest.mark.parametrize(
        "shape", FOUR, ids=["gpt2", "llama", "gpt2 bfloat16", "llama bfloat16"]
    )
    @pytest.mark.parametrize("threads", [1, 2, 4])
    def test_long_prompts_and_wide_trees(self, shape: Shape, threads: int) -> None:
        """More rows than one block of the layers takes (96): a tree of 120 leaves."""
        stack = Stack(shape)
        for parents in (list(range(-1, 149)), [-1, *[0] * 120], [(i - 1) // 2 for i in range(110)]):
            rows = forest(stack, parents, 5)
            expected = alone(stack, rows)
            for way in (Way(threads), Way(threads, (40, 97), 3, 2)):
                same_bits(expected, together(stack, [rows], way)[0])

    @some
    @given(stacks.shapes(), trees, st.sampled_from([0.0, 0.3]), st.integers(0, 3), st.booleans())
    def test_it_computes_what_the_twin_defines(
        self, shape: Shape, parents: list[int], hiding: float, lead: int, mute: bool
    ) -> None:
        stack = Stack(shape)
        faithful(stack, forest(stack, parents, shape.seed, hiding, lead), mute)

    def test_wrong_passes_fall(self) -> None:
        class Reversed(Rows):
            def seen(self, row: int, slots: Any) -> list[list[int]]:
                return [own[::-1] for own in super().seen(row, slots)]

        class Beside(Rows):
            def seen(self, row: int, slots: Any) -> list[list[int]]:
                return [
                    [*own[:-1], slots[(row + 2) % len(self.parents)], own[-1]]
                    for own in super().seen(row, slots)
                ]

        class Blind(Rows):
            def seen(self, row: int, slots: Any) -> list[list[int]]:
                return [own[1:] or own for own in super().seen(row, slots)]

        class Late(Rows):
            def path(self, row: int) -> list[int]:
                own = super().path(row)
                return own if row % 2 else [own[0], *own]

        for shape in FOUR:
            stack = Stack(replace(shape, d=40, width=32, rope=True, rms=True))
            rows = forest(stack, [-1, 0, 1, 2, 3, 3, 4, 6, 7, 7, 8], 1)
            expected = alone(stack, rows)
            same_bits(expected, together(stack, [rows], Way())[0])
            for wrong in (Reversed, Beside, Blind, Late):
                broken = [wrong(rows.x, rows.parents, rows.hidden)]
                fell = falls(same_bits, expected, together(stack, broken, Way())[0])
                assert fell or (wrong is Reversed and stacks.rounds(shape.half)), (
                    wrong.__name__
                )  # then hardly a bit is left
            faithful(
                stack, Reversed(rows.x, rows.parents, rows.hidden)
            )  # another order changes nothing but bits
            for fact, value in {
                "silu": not shape.silu,
                "rms": False,
                "eps": 0.1,
                "scale": 0.2,
                "cos": None,
            }.items():
                other = Stack(stack.shape)
                setattr(other.twin, fact, value)
                assert falls(faithful, other, rows), fact

    def test_what_does_not_fit_is_an_error(self) -> None:
        stack = Stack(LLAMA)
        cache, x = stack.cache(4), np.zeros((1, LLAMA.d), np.float32)
        good: dict[str, Any] = {
            "capacity": 4,
            "slots": [0],
            "positions": [0],
            "sight": (1, [(1, ())]),
            "lead": None,
        }

        def run(x: Array = x, first: int = 0, last: int = 4, **changed: Any) -> None:
            stack.engine.run(
                x, first, last, [(cache.ctypes.data, *{**good, **changed}.values())], 1
            )

        run()
        lead = np.zeros((2, 2, 1, 8), np.float32)
        for match, arguments in {
            "sublayers 0 to 5": {"last": 5},
            "sublayers 3 to 2": {"first": 3, "last": 2},
            "rows of 7": {"x": np.zeros((1, 7), np.float32)},
            "slot 4 of 4": {"slots": [4]},
            "slot -1 of 4": {"sight": (1, [(0, (-1,))])},
            "slot 9 of 4": {"sight": (1, [(0, (9,))])},
            "5 visible slots of 4": {"sight": (1, [(5, ())])},
            "position 160 of 160": {"positions": [160]},
            "2 lists of visible slots for 1 rows": {"sight": (1, [(1, ()), (1, ())])},
            "3 lists of visible slots": {"sight": (3, [(1, ())] * 3)},
            "2 slots for 1 rows": {"slots": [0, 1], "positions": [0, 1]},
            r"a prefix of \[2, 2, 1, 8\]": {"lead": ([True], lead, lead[:, :, :, :4].copy())},
        }.items():
            with pytest.raises(ValueError, match=match):
                run(**arguments)
