"""Suffix decoding: the best draft by brute force, and its size by the length of its match.

It searches two trees, and stops drafting where drafts fail.
"""

import gc
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.table import Table, exact_distribution
from tinyspec._core import Forest
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.traps import suffix_decoding as traps
from tinyspec.laws.traps.lookahead_trie import recite
from tinyspec.lm.forward import Scores
from tinyspec.speculative.drafting.suffix_decoding import (
    SuffixDecodingDrafter,
    best_suffix_draft,
)
from tinyspec.speculative.lookup import OUTPUTS
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("suffix_decoding")
GREEDY = SamplingParams(temperature=0.0)
NOTHING = Scores(None, None, ())  # type: ignore[arg-type]


def drafter(
    alpha: float = 1.0, most: int = 32, floor: float = 0.0, price: float = 0.0, depth: int = 32
) -> SuffixDecodingDrafter:
    return SuffixDecodingDrafter(Forest(depth, 1 << 20), count(1), alpha, most, floor, price)


def drafted(d: SuffixDecodingDrafter, context: list[int], max_draft_depth: int = 99) -> TokenTree:
    return d.propose(context, max_draft_depth, GREEDY, Seeded(0))


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(0, 2), max_size=9),
    st.sampled_from([1.0, 1.5, 2.0, 4.0]),
)
@settings(max_examples=150, deadline=None)
def test_printed_algorithm_is_what_runs(text: list[int], other: list[int], alpha: float) -> None:
    """The best score of all drafts, and D(N) of every node; of equal scores any draft will do."""
    d = drafter(alpha, most=99, depth=60)
    d.extend(text, NOTHING)
    d.forest.append(d.forest.open(d.own), other)
    tokens, parents, shares, _ = d.forest.best((d.own,), text, alpha, 99, 99, 0.0)
    printed = best_suffix_draft([text, other], text, alpha)
    assert sum(shares) == pytest.approx(sum(printed.values()))
    tree = TokenTree(tokens, parents)
    drafts = {tree.tokens_on(tree.path(i)): share for i, share in enumerate(shares)}
    assert sorted(drafts.values()) == pytest.approx(sorted(printed.values()))


def test_a_draft_is_bounded_by_alpha_p_by_most_and_by_the_room() -> None:
    text = [*range(10), *range(4)]
    for settings_, room, size in (
        ({}, 99, 4),
        ({"alpha": 1.5}, 99, 6),
        ({"alpha": 9.0, "most": 5}, 99, 5),
        ({}, 2, 2),
    ):
        d = drafter(**settings_)
        d.extend(text, NOTHING)
        assert list(drafted(d, text, room).tokens) == list(range(4, 4 + size))


def test_tokens_below_the_floor_are_left_out() -> None:
    text = [1, 2, 1, 2, 1, 3, 1]
    for floor, tokens in ((0.0, [2, 3]), (0.5, [2])):
        d = drafter(alpha=2.0, floor=floor)
        d.extend(text, NOTHING)
        assert drafted(d, text, max_draft_depth=1).tokens == tokens


def test_prompt_and_output_of_a_request_are_one_text_and_those_of_another_are_none() -> None:
    forest, numbers = Forest(8, 1 << 20), count(1)
    one, other = (SuffixDecodingDrafter(forest, numbers, 1.0, 8, 0.0, 0.0) for _ in range(2))
    one.extend([1, 2], NOTHING)
    one.forest.append(one.text, [3])  # as observe does
    one.insert(OUTPUTS, [3])
    assert drafted(one, [2]).tokens == [3]
    assert drafted(other, [2]).tokens == drafted(other, [1]).tokens == ()


def test_rewinding_takes_the_text_out_of_both_trees() -> None:
    d = drafter()
    d.extend([1, 2], NOTHING)
    for token in (3, 4):
        d.forest.append(d.text, [token])
        d.insert(OUTPUTS, [token])
    d.rewind(3)
    assert drafted(d, [2]).tokens == [3]
    assert drafted(d, [3]) == TokenTree()
    d.extend([5], NOTHING)
    assert drafted(d, [3]).tokens == [5]
    d.rewind(0)
    assert (d.length, d.pieces) == (0, [])
    assert d.forest.size(OUTPUTS) == d.forest.size(d.own) == 0


def test_a_request_that_nobody_ends_leaves_its_own_tree_to_nobody() -> None:
    forest = Forest(8, 1 << 20)
    forgotten = SuffixDecodingDrafter(forest, count(1), 1.0, 8, 0.0, 0.0)
    forgotten.extend([1, 2, 3], NOTHING)
    own = forgotten.own
    del forgotten
    gc.collect()
    assert forest.size(own) == 0


def test_no_match_and_no_room_are_plain_steps() -> None:
    d = drafter()
    d.extend([1, 2, 1], NOTHING)
    assert drafted(d, [3]) == drafted(d, [1], max_draft_depth=0) == TokenTree()
    assert drafted(d, []) == TokenTree()


@pytest.mark.parametrize("wanted", [0, 1])
def test_no_and_one_new_token(wanted: int) -> None:
    decoder = recite(CARD.make, Reciter([1, 2, 1, 2, 1]), 3, wanted)
    assert (decoder.new, decoder.finished) == ([2][:wanted], "length")


def test_an_end_of_text_inside_a_draft_ends_the_text() -> None:
    model = Reciter([1, 2, 3, 4, 5, 1, 2, 3, 4, 5])
    stop = StoppingCriteria(eos=frozenset({4}), max_new_tokens=9)
    decoder = CARD.make(Request(model.session(), (), GREEDY, stop))
    decoder.extend(model.poem[:7])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert (decoder.new, decoder.rounds) == ([3, 4], 1)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
@pytest.mark.parametrize("price", [0.0, 0.25])
def test_the_joint_distribution_is_the_targets_at_any_temperature(
    sampling: SamplingParams, price: float
) -> None:
    def suffixes() -> Decoder:
        return CARD.make(Request(Table(3), sampling=sampling), most=3, depth=5, price=price)

    plain = exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), 3, (0, 1, 0)
    )
    assert exact_distribution(suffixes, 3, (0, 1, 0)) == plain


def test_outputs_stay_bounded_over_requests() -> None:
    model = Reciter(range(1, 42))
    for number in range(12):
        model.poem = [*(1 + (i * i * (number + 1) + number) % 40 for i in range(42)), 41]
        decoder = recite(CARD.make, model, 2, 40, bound=100)
        decoder.end()
        assert decoder.drafter.forest.size(OUTPUTS) <= 100  # type: ignore[attr-defined]


def test_bad_knobs_are_one_line() -> None:
    for knob, says in (
        ({"alpha": -1}, "alpha is -1"),
        ({"depth": 1}, "depth is 1"),
        ({"floor": 2}, "floor is 2"),
    ):
        with pytest.raises(TinyspecError, match=says):
            CARD.make(Request(Table(3)), **knob)
