"""The digest sees everything that can make two decoders differ, and nothing else."""

import functools
import itertools
import random
import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyspec import _core
from tinyspec._core import reference_trie
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.digest import compute_digest
from tinyspec.laws.exact.tables import TableModel


class Slotted:
    __slots__ = ("a", "b")


class Plain:
    shared = 0
    table: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, a: Any = 0):
        self.a = a

    def method(self) -> int:
        return NOISE[0] + self.a


class Pair(NamedTuple):
    a: Any
    b: Any


class Colour(Enum):
    RED = 1
    BLUE = 2


class Names(dict[str, int]):
    """A container with attributes."""


NOISE = [0]
COUNT = 0


def helper() -> int:
    return NOISE[0] + COUNT


def calls_helper() -> int:
    return helper()


@functools.lru_cache
def remembered(x: int) -> float:
    return random.Random(x).random()


def uses_cache(x: int) -> float:
    return remembered(x)


def counting(start: int) -> Callable[[], int]:
    def count() -> int:
        nonlocal start
        start += 1
        return start

    return count


def slotted(a: Any) -> Slotted:
    s = Slotted()
    s.a = a
    return s


def looped(n: int) -> list[Any]:
    loop: list[Any] = [n]
    loop.append(loop)
    return loop


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counted(n: int) -> Callable[[], int]:
    count = counting(0)
    for _ in range(n):
        count()
    return count


MAKERS: list[Callable[[int], Any]] = [
    lambda n: n, lambda n: float(n), lambda n: str(n), lambda n: Fraction(n, 7), lambda n: [1, n],
    lambda n: (1, n),
    lambda n: {n}, lambda n: frozenset({n}), lambda n: {1: n}, lambda n: {n: 1},
    lambda n: deque([1, n]),
    lambda n: OrderedDict(a=n), lambda n: Names(a=n), lambda n: Plain(n), lambda n: Pair(1, n),
    slotted, looped, counted,
    lambda n: np.array([1.0, n]), lambda n: np.float64(n), lambda n: torch.tensor([1.0, n]),
    lambda n: np.array([None, n]),
    lambda n: torch.tensor([n], dtype=torch.bfloat16), lambda n: random.Random(n),
    lambda n: np.random.default_rng(n),
    generator, lambda n: Seeded(n), lambda n: functools.partial(max, n), lambda n: Plain(n).method,
    lambda n: itertools.count(n),
    lambda n: list(Colour)[n], lambda n: iter([n, 2]), lambda n: SimpleNamespace(a=n),
    lambda n: TableModel(n),
    lambda n: (lambda: n), lambda n: (lambda x=n: x), lambda n: slice(n), lambda n: range(n),
    lambda n: bytearray([n]), lambda n: re.compile(f"a{n}", re.ASCII),
    lambda n: [Plain(n), Plain(1)], lambda n: {Pair(0, n): Plain(n)}, lambda n: {"f": [counted(n)]},
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=range(len(MAKERS)))
def test_equal_things_have_equal_digests_and_others_have_not(make: Callable[[int], Any]) -> None:
    assert compute_digest(make(0)) == compute_digest(make(0))
    assert compute_digest(make(0)) != compute_digest(make(1))
    assert compute_digest([make(0), 1]) != compute_digest([make(0), 2])


def test_kinds_differ() -> None:
    things = [0, 0.0, False, None, "0", b"0", (), [], {}, set(), Fraction(0), np.float64(0),
              np.zeros(1), torch.zeros(1),
              np.zeros((1, 1)), np.zeros(1, np.float32), deque(), Colour.RED, 0j, Plain,
              compute_digest]  # fmt: skip
    assert len({compute_digest(thing) for thing in things}) == len(things)


def test_floats_are_rounded_to_twelve_digits() -> None:
    for make in (float, lambda x: [x], np.array, lambda x: torch.tensor(x, dtype=torch.float64)):
        assert (
            compute_digest(make(0.5))
            == compute_digest(make(0.5 + 1e-14))
            != compute_digest(make(0.5 + 1e-10))
        )
    assert compute_digest(0.0) == compute_digest(-0.0) and compute_digest(
        np.zeros(2)
    ) == compute_digest(-np.zeros(2))


def test_one_list_under_two_names_is_not_two_equal_lists() -> None:
    one: list[int] = []
    assert compute_digest([one, one]) != compute_digest([[], []])


def test_the_order_of_a_set_is_no_state_and_that_of_a_dict_is() -> None:
    a, b = {8, 0, 16}, {16, 8, 0}
    assert compute_digest(a) == compute_digest(b)
    assert compute_digest({"x": 1, "y": 2}) != compute_digest({"y": 2, "x": 1})


def test_a_counter_in_a_closure_a_class_or_a_module_is_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = counting(3)
    before = compute_digest(count)
    count()
    assert compute_digest(count) != before
    for owner in (Plain(), calls_helper, helper, lambda: calls_helper()):
        before = compute_digest(owner)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "NOISE", [5])
            assert compute_digest(owner) != before
        assert compute_digest(owner) == before
    for name, value in (("shared", 7), ("table", {1: 2})):
        before = compute_digest(Plain())
        with monkeypatch.context() as patch:
            patch.setattr(Plain, name, value)
            assert compute_digest(Plain()) != before
    before = compute_digest(calls_helper)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "COUNT", 4)
        assert compute_digest(calls_helper) != before
    assert compute_digest(calls_helper) == before


def test_a_cache_tells_that_it_was_used() -> None:
    before = compute_digest(uses_cache)
    uses_cache(1)
    assert compute_digest(uses_cache) != before


def test_a_random_generator_that_has_moved_on_is_another() -> None:
    for make in (random.Random, np.random.default_rng, generator):
        owner = Plain(make(1))
        before = compute_digest(owner)
        owner.a.random() if not isinstance(owner.a, torch.Generator) else torch.rand(
            1, generator=owner.a
        )
        assert compute_digest(owner) != before


def test_what_cannot_be_seen_through_is_an_error() -> None:
    for opaque in ((x for x in ()), threading.RLock(), memoryview(b"x")):
        with pytest.raises(TinyspecError, match="cannot see"):
            compute_digest(Plain(opaque))


def test_a_lock_is_known_by_whether_it_is_held() -> None:
    free, held = threading.Lock(), threading.Lock()
    with held:
        assert compute_digest(Plain(free)) != compute_digest(Plain(held))
    assert compute_digest(Plain(free)) == compute_digest(Plain(held))


def test_a_digest_skips_what_is_named_as_outside() -> None:
    forward_log: list[int] = []
    owner = Plain(forward_log)
    before = compute_digest(owner, (forward_log,))
    forward_log.append(1)
    assert compute_digest(owner, (forward_log,)) == before
    assert compute_digest(owner) != before


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 3), max_size=4), st.floats(0, 1)
    ),
    max_size=8,
)


@given(OPERATIONS)
def test_the_compiled_index_shows_all_that_its_twin_holds(
    operations: list[tuple[int, bool, list[int], float]],
) -> None:
    """Two indices of one state answer alike whatever comes; the state is texts, and places in the
    order of appending.
    """
    kernel, twin = _core.NgramIndex(3), reference_trie.NgramIndex(3)
    for text, back, tokens, share in operations:
        for index in (kernel, twin):
            if back:
                index.rewind(text, int(share * index.length(text)))
            else:
                index.append(text, tokens)
    places = {gram: list(where) for gram, where in twin._places.items() if where}
    state = kernel.__getstate__()
    assert {text: line for text, line in state["texts"].items() if line} == {
        text: line for text, line in twin._texts.items() if line
    }
    assert state["places"] == places
    other = _core.NgramIndex(3)
    other.append(0, [1, 2])
    assert (compute_digest(other) == compute_digest(kernel)) == (state == other.__getstate__())
