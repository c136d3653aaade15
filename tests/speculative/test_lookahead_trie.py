"""Lookahead with a trie: inserting, eliminating, pruning, and retrieval in stages.

It also drafts branches, and stops drafting where drafts fail.
"""

import gc
import random
import time
from collections import Counter
from itertools import count
from typing import Any

import pytest

from tests.table import Table, exact_distribution
from tinyspec._core import Forest
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.traps import lookahead_trie as traps
from tinyspec.laws.traps.lookahead_trie import recite
from tinyspec.lm.forward import Scores
from tinyspec.speculative.integrated.lookahead_trie import (
    LookaheadTrieDrafter,
    reshape_branches,
    retrieve_branches,
)
from tinyspec.speculative.lookup import FIRST_PRIOR, OUTPUTS, AcceptanceTracker
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("lookahead_trie")
GREEDY = SamplingParams(temperature=0.0)
NOTHING = Scores(None, None, ())  # type: ignore[arg-type]


def drafter(
    length: int = 64,
    branch: int = 4,
    mode: str = "hierarchical",
    price: float = 0.0,
    stop_words: frozenset[int] = frozenset(),
) -> LookaheadTrieDrafter:
    return LookaheadTrieDrafter(
        Forest(branch + 1, 1 << 18), count(1), length, branch, mode, price, stop_words
    )


def drafted(d: LookaheadTrieDrafter, context: list[int], max_draft_depth: int = 9) -> TokenTree:
    return d.propose(context, max_draft_depth, GREEDY, Seeded(0))


def spelled(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))}


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


def windows_of(*texts: list[int], longest: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[at : at + size])
        for text in texts
        for size in range(1, longest + 1)
        for at in range(len(text) - size + 1)
    )


@pytest.mark.parametrize("stops", [frozenset(), frozenset({1}), frozenset({0, 2})])
@pytest.mark.parametrize("budget", [1, 2, 3, 64])
def test_printed_algorithm_is_what_runs(budget: int, stops: frozenset[int]) -> None:
    """Random prompts and outputs: the same branches, but for which of equally frequent ones are
    cut.
    """
    rng, branch, cut, grown = random.Random(budget), 3, 0, 0
    for _ in range(300):
        text, output = ([rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(2))
        d = drafter(budget, branch, stop_words=stops)
        d.insert(OUTPUTS, output)
        d.extend(text, NOTHING)
        outputs, prompt = windows_of(output, longest=4), windows_of(text, longest=4)
        expected = retrieve_branches(outputs, prompt, text, branch, budget, stops)
        got = spelled(drafted(d, text))
        if budget == 64:
            assert got == set(expected)
            grown += len(got)
        else:
            assert len(got) == len(expected)
            ends = {tuple(text[-size:]) for size in range(1, branch + 1)}
            known = [(w[:n], w[n:]) for w in (*outputs, *prompt) for n in range(1, len(w))]
            assert got <= {path for match, path in known if match in ends}
            cut += len(got) == budget
    few = 2 if stops else 1  # stop words find less
    assert budget == 64 or cut > 100 / few
    assert budget < 64 or grown > 500 / few


def test_the_draft_is_the_last_stage_and_not_what_all_stages_found() -> None:
    """After 2 1 came 9, once; after 1 alone came 5 and 6, twice each, the two most frequent. With a
    price the stages are joined.
    """
    text = [2, 1, 9, 0, 1, 5, 0, 1, 5, 0, 1, 6, 0, 1, 6, 0, 2, 1]
    for price, expected in ((0.0, {(5,), (6,)}), (1e-9, {(9,), (6,)})):
        d = drafter(length=2, branch=2, price=price)
        d.extend(text, NOTHING)
        got = spelled(drafted(d, text, max_draft_depth=1))
        assert got == expected


def test_a_stop_word_roots_no_branch_of_an_output_and_is_not_looked_up_alone() -> None:
    d = drafter(stop_words=frozenset({7}))
    d.insert(OUTPUTS, [7, 1, 2, 3])
    d.extend([7, 4, 5, 7], NOTHING)
    assert spelled(drafted(d, [9, 7])) == set()
    assert spelled(drafted(d, [7, 1])) == {(2,), (2, 3)}  # found after 1, not after 7 1
    assert spelled(drafted(d, [7, 4])) == {(5,), (5, 7)}  # a prompt's branch begins at any token
    plain = drafter()
    plain.insert(OUTPUTS, [7, 1, 2, 3])
    assert spelled(drafted(plain, [9, 7])) == {(1,), (1, 2), (1, 2, 3)}


def test_branches_are_inserted_after_every_position() -> None:
    d = drafter(branch=2)
    d.extend([1, 2, 3, 4], NOTHING)
    d.insert(OUTPUTS, [5, 6, 7])
    assert spelled(drafted(d, [1])) == {(2,), (2, 3)}
    assert spelled(drafted(d, [3])) == {(4,)}
    assert spelled(drafted(d, [5])) == {(6,), (6, 7)}
    assert spelled(drafted(d, [4])) == set()  # the output is no branch of the prompt


def test_a_prompt_that_goes_on_after_an_output_is_no_branch_of_the_first() -> None:
    d = drafter()
    d.extend([1, 2], NOTHING)
    d.insert(OUTPUTS, [3])
    d.extend([4, 5], NOTHING)
    assert spelled(drafted(d, [2])) == set()
    assert spelled(drafted(d, [4])) == {(5,)}


def test_ending_eliminates_the_prompt_and_keeps_the_output() -> None:
    forest, numbers = Forest(5, 1 << 18), count(1)
    one, other = (
        LookaheadTrieDrafter(forest, numbers, 64, 4, "hierarchical", 0.0) for _ in range(2)
    )
    one.extend([1, 2], NOTHING)
    other.extend([1, 3], NOTHING)
    one.insert(OUTPUTS, [7, 8])
    one.end()
    assert spelled(drafted(other, [1])) == {(3,)}
    assert spelled(drafted(other, [7])) == {(8,)}


def test_request_that_nobody_ends_leaves_no_prompt() -> None:
    forest, numbers = Forest(5, 1 << 18), count(1)
    forgotten = LookaheadTrieDrafter(forest, numbers, 64, 4, "hierarchical", 0.0)
    forgotten.extend([1, 2], NOTHING)
    prompt = forgotten.own
    assert forest.size(prompt) > 0
    del forgotten
    gc.collect()
    assert forest.size(prompt) == 0


def test_of_too_many_branches_half_are_outputs_and_the_rest_are_the_prompts_first() -> None:
    d = drafter(length=4, branch=1)
    for token in (11, 12, 13, 14):
        d.insert(OUTPUTS, [1, token])
    d.extend([1, 21, 1, 22, 1, 23, 1, 24], NOTHING)
    assert sorted(token < 20 for token in drafted(d, [1]).tokens) == [False, False, True, True]


def test_a_shared_beginning_is_checked_once_in_a_tree_and_twice_side_by_side() -> None:
    forms = {}
    for mode in ("hierarchical", "parallel", "single"):
        d = drafter(branch=3, mode=mode)
        d.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4], NOTHING)
        forms[mode] = drafted(d, [1], max_draft_depth=2)
    assert len(forms["hierarchical"].tokens) == 3
    assert sorted(forms["parallel"].tokens) == [2, 2, 3, 4]
    assert forms["single"].tokens == (2, 4)
    assert spelled(forms["hierarchical"]) == spelled(forms["parallel"])


def test_parallel_branches_keep_the_budget() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, 0, 0, 0), (None,) * 4, (False,) * 4)
    assert len(reshape_branches(tree, "parallel", 5).tokens) == 4
    assert reshape_branches(TokenTree(), "parallel", 5) == TokenTree()


def test_rewinding_takes_the_text_out_of_the_trie() -> None:
    d = drafter()
    d.extend([1, 2], NOTHING)
    d.insert(OUTPUTS, [3, 4, 5])
    d.rewind(4)
    assert spelled(drafted(d, [3])) == {(4,)}
    d.rewind(1)
    assert spelled(drafted(d, [3])) == spelled(drafted(d, [1])) == set()
    d.extend([6], NOTHING)
    assert spelled(drafted(d, [1])) == {(6,)}
    assert d.length == 2
    d.rewind(0)
    assert d.pieces == []


def test_no_match_no_room_and_an_unknown_word_are_plain_steps() -> None:
    d = drafter()
    d.extend([1, 2, 1], NOTHING)
    assert drafted(d, [3]) == drafted(d, [1], max_draft_depth=0) == TokenTree()
    assert drafted(d, [1], max_draft_depth=1).tokens == [2]


@pytest.mark.parametrize("wanted", [0, 1])
def test_no_and_one_new_token(wanted: int) -> None:
    decoder = recite(CARD.make, Reciter([1, 2, 1, 2, 1]), 3, wanted)
    assert (decoder.new, decoder.finished) == ([1, 2][1 : 1 + wanted], "length")


def test_an_end_of_text_inside_a_branch_ends_the_text() -> None:
    stop = StoppingCriteria(eos=frozenset({3}), max_new_tokens=9)
    model = Reciter([1, 2, 3, 4, 1, 2, 3, 4])
    decoder = CARD.make(Request(model.session(), (), GREEDY, stop))
    decoder.extend(model.poem[:5])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert (decoder.new, decoder.rounds) == ([2, 3], 1)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
@pytest.mark.parametrize("price", [0.0, 0.25])
def test_the_joint_distribution_is_the_targets_at_any_temperature(
    sampling: SamplingParams, price: float
) -> None:
    def looking() -> Decoder:
        return CARD.make(
            Request(Table(3), sampling=sampling), decoding_length=3, branch_length=2, price=price
        )

    plain = exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), 3, (0, 1, 0)
    )
    assert exact_distribution(looking, 3, (0, 1, 0)) == plain


def test_a_model_keeps_its_trie_and_a_batch_keeps_none() -> None:
    model = Reciter(list(range(1, 9)))
    alone = [
        CARD.make(Request(model.session(), clock=time.perf_counter)).drafter.forest
        for _ in range(2)
    ]
    rows = [CARD.make(Request(model.session())).drafter.forest for _ in range(2)]
    other = CARD.make(Request(Reciter([1, 2]).session(), clock=time.perf_counter)).drafter.forest
    assert alone[0] is alone[1] and rows[0] is not rows[1] and other is not alone[0]
    forgetful = CARD.make(Request(model.session(), clock=time.perf_counter), remember=False)
    assert forgetful.drafter.forest is not alone[0]


def test_bad_knobs_are_one_line() -> None:
    for knob, says in (
        ({"mode": "wide"}, "mode is 'wide'"),
        ({"price": 2}, "price is 2"),
        ({"branch_length": 0}, "branch"),
        ({"stop_words": "the"}, "stop_words is 'the': write token ids"),
    ):
        with pytest.raises(TinyspecError, match=says):
            CARD.make(Request(Table(3)), **knob)


# ------------------------------------------------------------------ trust


def test_token_is_run_if_its_estimated_chance_reaches_the_price() -> None:
    trust = AcceptanceTracker(0.3)
    assert trust.select_tree([5, 6, 7], [-1, 0, -1], [0.9, 0.9, 0.1], [5] * 3).tokens == [
        5,
        6,
    ]  # 0.45, 0.36 and 0.05
    assert trust.select_tree([5, 6], [-1, 0], [1.0, 1.0], [1, 1]).tokens == ()
    assert AcceptanceTracker(0.0).select_tree(
        [5, 6, 7], [-1, 0, -1], [0.9, 0.9, 0.1], [1] * 3
    ).tokens == [
        5,
        6,
        7,
    ]


def test_trust_is_lost_by_failures_and_regained_without_running() -> None:
    trust = AcceptanceTracker(0.3)
    for _ in range(9):
        trust.select_tree([5], [-1], [1.0], [5])
        trust.learn([6])
    assert (
        not trust.is_worth_running([1.0], 5)
        and trust.select_tree([5], [-1], [1.0], [5]) == TokenTree()
    )
    assert trust.is_worth_running([1.0], 8)  # other lengths are judged apart
    for _ in range(9):
        assert trust.select_tree([5], [-1], [1.0], [5]).tokens in ((), [5])
        trust.learn([5])
    assert trust.is_worth_running([1.0], 5)
    trust.reset()
    assert trust.first == FIRST_PRIOR


def test_what_lies_beyond_a_leaf_or_a_mismatch_is_not_judged() -> None:
    trust = AcceptanceTracker(0.0)
    trust.select_tree([5, 6], [-1, 0], [1.0, 1.0], [5, 5])
    trust.learn([5, 6, 7, 8])
    assert trust.first[5] > FIRST_PRIOR[5] and trust.further[5] > 0.8
    before = dict(trust.further)
    trust.select_tree([5, 6], [-1, 0], [1.0, 1.0], [5, 5])
    trust.learn([9, 6])
    assert trust.further == before


def test_random_text_runs_hardly_any_draft_token() -> None:
    """Every word occurred before, but after other words: draft tokens fail, and soon none is
    run.
    """
    rng = random.Random(0)
    text = [1 + rng.randrange(12) for _ in range(200)]
    d = CARD.make(
        Request(Reciter(text).session(), (), GREEDY, StoppingCriteria(max_new_tokens=150)),
        price=0.25,
    )
    d.extend(text[:40])
    rows = 0
    while not d.finished:
        rows += len(d.step(Seeded(d.rounds)).tree.tokens)
    assert d.new == text[40:190]
    assert rows < 0.1 * len(d.new)


def test_after_looks_in_vain_only_every_fourth_round_is_looked_at_until_one_is_worth_it() -> None:
    trust = AcceptanceTracker(0.3)
    for _ in range(8):
        assert not trust.should_skip_round(1)
        trust.select_tree([5], [-1], [1.0], [1])
    assert [trust.should_skip_round(1) for _ in range(8)] == [True, True, True, False] * 2
    trust.select_tree([5], [-1], [1.0], [8])
    assert not any(trust.should_skip_round(1) for _ in range(8))
    paper = AcceptanceTracker(0.0)
    for _ in range(20):
        paper.remember_lookup((), (), ())
        assert not paper.should_skip_round(1)


def test_without_room_nothing_is_looked_at_and_that_is_no_look_in_vain() -> None:
    trust = AcceptanceTracker(0.3)
    trust.select_tree([5], [-1], [1.0], [8])
    for _ in range(20):
        assert trust.should_skip_round(0)
    trust.learn([6])
    assert trust.first == FIRST_PRIOR, "draft tokens of an earlier round are not judged again"
    assert not trust.should_skip_round(1)


def test_output_of_skipped_rounds_is_counted_at_the_next_lookup() -> None:
    d = drafter(price=1.0)
    d.extend([1], NOTHING)
    for token in range(2, 30):
        drafted(d, [token - 1])
        d.observe(Round(TokenTree(), NOTHING, Verdict((), token), (token,), ()))
    d.insert_outputs()
    assert d.forest.gather([(OUTPUTS, 9)], [20], 1, 1, 4)[0] == [21, 22, 23, 24]
