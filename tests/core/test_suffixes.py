"""The suffix array finds what a search through the whole text finds.

This holds for the kernel and for its twin.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec import _core
from tinyspec._core import fallback
from tinyspec._core.reference_suffixes import DEPTH
from tinyspec.errors import TinyspecError

CORES = [pytest.param(_core, id="compiled"), pytest.param(fallback, id="pure")]
TEXTS = st.lists(
    st.sampled_from([0, 1, 2, 70_000, -1]), max_size=30
)  # an id that does not fit into 16 bits


def indexed(core, tokens):
    text = np.array(tokens, np.int32)
    return text, core.suffix_order(text)


@pytest.mark.parametrize("core", CORES)
@given(TEXTS)
@settings(max_examples=150)
def test_places_are_sorted_by_what_stands_there_and_equal_ones_in_order(core, tokens):
    text, order = indexed(core, tokens * 3)
    spelled = [(text[place : place + DEPTH].tolist(), place) for place in order.tolist()]
    assert spelled == sorted(spelled) and sorted(order.tolist()) == list(range(len(text)))


@pytest.mark.parametrize("core", CORES)
@given(
    TEXTS,
    st.lists(st.sampled_from([0, 1, 70_000]), max_size=4),
    st.integers(1, 3),
    st.integers(0, 9),
)
@settings(max_examples=300)
def test_the_longest_match_and_its_heaviest_continuations_are_those_of_a_search_through_the_text(
    core, tokens, suffix, shortest, most
):
    """By the definition: every place, every continuation within its document, every beginning of
    it.
    """
    n, found, parents, weights = core.retrieve(
        *indexed(core, tokens), suffix, shortest, 4, 3, 5000, most
    )
    places, longest = [], 0
    for longest in range(min(4, len(suffix)), shortest - 1, -1):
        end = suffix[len(suffix) - longest :]
        places = [at + longest for at in range(len(tokens)) if tokens[at : at + longest] == end]
        places = [at for at in places if at < len(tokens) and tokens[at] >= 0]
        if places:
            break
    assert n == (longest if places else 0)
    weight = Counter()
    for at in places:
        for stop in range(at + 1, min(at + 3, len(tokens)) + 1):
            if tokens[stop - 1] < 0:
                break
            weight[tuple(tokens[at:stop])] += 1
    spelled = []
    for token, up in zip(found, parents, strict=True):
        assert -1 <= up < len(spelled)  # a parent before its children: the kept set is closed
        spelled.append((*(spelled[up] if up >= 0 else ()), token))
    assert len(spelled) == len(set(spelled)) == min(most, len(weight))
    assert (
        weights
        == [weight[path] for path in spelled]
        == sorted(weight.values(), reverse=True)[:most]
    )


@pytest.mark.parametrize("core", CORES)
def test_of_too_many_matches_evenly_spaced_ones_are_taken(core):
    tokens = [5, 1, -1] * 50 + [5, 2, -1] * 150
    found = core.retrieve(*indexed(core, tokens), [5], 1, 4, 3, 8, 9)
    assert found == (1, [2, 1], [-1, -1], [6, 2])


@pytest.mark.parametrize("core", CORES)
def test_nothing_is_read_beyond_the_depth_that_is_sorted(core):
    tokens = list(range(100))
    n, found, _, _ = core.retrieve(*indexed(core, tokens), tokens[:31], 1, 31, 31, 9, 99)
    assert (n, found) == (31, [31])
    assert core.retrieve(*indexed(core, tokens), tokens[:16], 1, 16, 31, 9, 99)[1] == list(
        range(16, 32)
    )


@pytest.mark.parametrize("core", CORES)
def test_an_empty_text_and_an_empty_suffix_find_nothing(core):
    assert core.suffix_order(np.zeros(0, np.int32)).tolist() == []
    assert core.retrieve(*indexed(core, []), [1], 1, 4, 3, 9, 9) == (0, [], [], [])
    assert core.retrieve(*indexed(core, [1, 2]), [], 1, 4, 3, 9, 9) == (0, [], [], [])


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_a_damaged_order_is_an_error_and_no_crash(core, wrong):
    text = np.array([1, 2, 1], np.int32)
    with pytest.raises(TinyspecError, match="damaged"):
        core.retrieve(text, np.full(3, wrong, np.int32), [1], 1, 4, 3, 9, 9)
    with pytest.raises(TinyspecError, match="not that of 3 tokens"):
        core.retrieve(text, np.zeros(2, np.int32), [1], 1, 4, 3, 9, 9)


@pytest.mark.parametrize("core", CORES)
def test_progress_is_reported_and_what_it_raises_comes_through(core):
    depths = []
    core.suffix_order(np.zeros(40, np.int32), depths.append)
    assert depths[-1] == DEPTH and depths == sorted(depths)

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        core.suffix_order(np.zeros(40, np.int32), stop)


def test_read_only_memory_is_searched_as_it_is(tmp_path):
    text, order = indexed(_core, [1, 2, 3, 1, 2, 4])
    path = tmp_path / "order"
    order.tofile(path)
    mapped = np.memmap(path, np.int32, "r")
    text.flags.writeable = False
    assert _core.retrieve(text, mapped, [1, 2], 1, 4, 1, 9, 9)[1] == [3, 4]
