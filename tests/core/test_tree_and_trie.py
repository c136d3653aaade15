"""Draft trees and the n-gram index: kernels equal their twins, and both equal what they claim."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec import _core
from tinyspec._core import fallback, reference_tree
from tinyspec.errors import TinyspecError
from tinyspec.tree import TokenTree


@st.composite
def trees(draw):
    n = draw(st.integers(0, 12))
    return [draw(st.integers(0, 2)) for _ in range(n)], [
        draw(st.integers(-1, node - 1)) for node in range(n)
    ]


@given(trees())
def test_tree_kernels_equal_their_twins_and_the_definition(tree):
    tokens, parents = tree
    whole = TokenTree(tokens, parents, [None] * len(tokens), [False] * len(tokens))
    paths = [whole.path(node) for node in range(len(tokens))]
    assert _core.ancestors(parents).tolist() == reference_tree.ancestors(parents)
    assert reference_tree.ancestors(parents) == [
        [int(j in path) for j in range(len(tokens))] for path in paths
    ]
    assert (
        _core.depths(parents).tolist()
        == reference_tree.depths(parents)
        == [len(path) for path in paths]
    )
    spelled = [whole.tokens_on(path) for path in paths]
    first = [spelled.index(words) for words in spelled]
    assert (
        _core.unique_paths(tokens, parents).tolist()
        == reference_tree.unique_paths(tokens, parents)
        == first
    )


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 5]])
def test_a_parent_after_its_child_is_an_error(parents):
    for core in (_core, fallback):
        for function in (
            core.ancestors,
            core.depths,
            lambda x, core=core: core.unique_paths([0] * len(x), x),
        ):
            with pytest.raises(TinyspecError, match="parent"):
                function(parents)


OPERATION = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 2), st.lists(st.integers(0, 3), max_size=8)),
    st.tuples(st.just("rewind"), st.integers(0, 2), st.integers(0, 10)),
    st.tuples(st.just("lookup"), st.lists(st.integers(0, 4), max_size=6), st.integers(0, 5)),
)


@given(st.integers(1, 4), st.lists(OPERATION, max_size=40))
@settings(max_examples=300)
def test_the_index_equals_dictionaries_after_any_history(max_n, operations):
    index, twin = _core.NgramIndex(max_n), fallback.NgramIndex(max_n)
    for kind, a, b in operations:
        if kind == "append":
            index.append(a, b)
            twin.append(a, b)
        elif kind == "rewind":
            length = max(0, twin.length(a) - b)
            index.rewind(a, length)
            twin.rewind(a, length)
            assert index.length(a) == twin.length(a) == length
        else:
            for which in ("first", "last", "frequent"):
                for low in range(1, max_n + 1):
                    assert index.lookup(a, b, max_n, low, which) == twin.lookup(
                        a, b, max_n, low, which
                    )


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 3), st.integers(0, 3))
def test_lookup_is_the_longest_suffix_by_brute_force(text, max_n, k):
    index = _core.NgramIndex(max_n)
    index.append(0, text)
    expected = {"first": [], "last": []}
    for n in range(min(max_n, len(text)), 0, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if ends:
            expected = {"first": text[ends[0] : ends[0] + k], "last": text[ends[-1] : ends[-1] + k]}
            break
    for which, answer in expected.items():
        assert index.lookup(text, k, which=which) == answer


@pytest.mark.parametrize("core", [_core, fallback])
def test_a_continuation_never_crosses_the_end_of_its_text(core):
    index = core.NgramIndex(2)
    index.append(0, [1, 2, 3])
    index.append(1, [70000, 8])
    index.append(0, [4])
    assert index.lookup([1, 2], 9) == [3, 4]
    assert index.lookup([70000], 9) == [8]
    assert index.lookup([8], 9) == index.lookup([], 9) == []


@pytest.mark.parametrize("core", [_core, fallback])
def test_the_most_frequent_continuation_wins_and_can_be_taken_back(core):
    index = core.NgramIndex(2)
    index.append(0, [1, 5, 1, 6, 1, 6, 1, 5, 1, 5])
    assert index.lookup([1], 1, which="frequent") == [5]
    index.rewind(0, 7)
    assert index.lookup([1], 1, which="frequent") == [6]
    with pytest.raises(TinyspecError, match="rewind"):
        index.rewind(0, 8)
    with pytest.raises(TinyspecError, match="first, last, frequent"):
        index.lookup([1], 1, which="best")


def test_forgotten_text_costs_no_memory_growth():
    index = _core.NgramIndex(3)
    rng = np.random.default_rng(0)
    for _ in range(300):
        index.append(0, rng.integers(0, 50000, 100).tolist())
        index.rewind(0, 0)
    index.append(0, [1, 2, 3, 1, 2])
    assert index.lookup([1, 2], 3) == [3, 1, 2]
