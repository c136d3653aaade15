"""Lookahead decoding: the window's n-grams, one pass for both branches, and wider windows."""

from itertools import pairwise
from typing import Any

import pytest

from tests.table import Table, exact_distribution
from tests.zoo import tiny_zoo
from tinyspec import generate, load
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import lookahead_jacobi as traps
from tinyspec.speculative.drafting.lookahead_jacobi import (
    JacobiWindow,
    LookaheadJacobiDrafter,
    NgramPool,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT

CARD = find_technique("lookahead_jacobi")
GREEDY = SamplingParams(temperature=0.0)
SMALL = {"window": 2, "n": 3, "guesses": 2}


def test_trap_a_draft_is_the_n_grams_that_the_windows_columns_spelled() -> None:
    assert traps.drafts_its_diagonals(CARD.make).cases > 200


def test_trap_window_and_n_grams_share_one_forward_pass() -> None:
    traps.shares_one_call(CARD.make)


def test_trap_window_finds_what_the_text_does_not_contain_yet() -> None:
    traps.looks_ahead(CARD.make)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
def test_the_joint_distribution_is_the_targets_at_any_temperature(sampling: SamplingParams) -> None:
    plain = exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), 4
    )
    assert (
        exact_distribution(
            lambda: CARD.make(
                Request(Table(3), sampling=sampling, stop=StoppingCriteria(max_new_tokens=6)),
                **SMALL,
            ),
            4,
        )
        == plain
    )


def rounds(tokens: int, **knobs: Any) -> int:
    """Rounds for so many tokens where the target counts the positions modulo 8, so that every cell
    is soon right.
    """
    model = TableModel(
        vocabulary=8, rows=lambda text: [int(x == len(text) % 8) for x in range(8)], positions=256
    )
    d = CARD.make(
        Request(model.session(), sampling=GREEDY, stop=StoppingCriteria(max_new_tokens=tokens)),
        from_prompt=False,
        **knobs,
    )
    d.extend([0])
    while not d.finished:
        d.step(Seeded(d.rounds))
    assert d.new == [at % 8 for at in range(1, tokens + 1)]
    return d.rounds


def test_periodic_text_commits_n_tokens_a_round_and_larger_windows_save_passes() -> None:
    by_n = [rounds(96, window=8, n=n, guesses=8) for n in (2, 3, 4, 5)]
    by_w = [rounds(96, window=w, n=4, guesses=8) for w in (1, 3, 8)]
    assert all(more > fewer for more, fewer in pairwise(by_n))
    assert all(more > fewer for more, fewer in pairwise(by_w))
    assert by_n[-1] <= 96 // 5 + 5 + 5  # full n-grams, but for the warm-up and the end


def tree_of(max_draft_depth: int, width: int = 3, n: int = 3) -> Any:
    drafter = LookaheadJacobiDrafter(width, n, 2, True, frozenset())
    drafter.extend([7, 8, 9, 7, 8], None)  # type: ignore[arg-type]
    return drafter.propose([7, 8, 9, 7], max_draft_depth, GREEDY, Seeded(0))


def test_a_cell_hangs_below_its_column_and_the_first_row_from_the_newest_token() -> None:
    tree = tree_of(9)
    assert tree.tokens[:2] == [8, 9] and tree.probe[:3] == [False, False, True]
    assert tree.parents[2:] == [ROOT, 2, 3]  # one row stands so far, longer by N - 2 columns
    window = JacobiWindow(2, 2, [4, 5])
    assert window.advance([1, 2, 3]) == [] and [len(row) for row in window.rows] == [2, 2]
    assert window.advance([6, 7]) == [[4, 2, 6], [5, 3, 7]]
    assert window.rows == [[2, 3], [6, 7]]


@pytest.mark.parametrize("max_draft_depth", range(6))
def test_draft_and_window_stay_within_the_draft_depth(max_draft_depth: int) -> None:
    assert max(tree_of(max_draft_depth).depths(), default=0) <= max_draft_depth


def test_columns_that_do_not_fit_keep_their_newest_token() -> None:
    window = JacobiWindow(2, 2, [4, 5])
    window.advance([1, 2, 3])
    assert window.count_columns(1) == 1 and window.count_columns(0) == 0
    assert window.advance([6])[:1] == [[4, 2, 6]] and window.rows == [[2, 3], [6, 3]]


def test_the_pool_keeps_the_newest_n_grams_of_a_first_token() -> None:
    pool = NgramPool(2)
    for gram in ([1, 2], [1, 3], [1, 2], [1, 4]):
        pool.add(gram)
    assert pool.after == {1: [(2,), (4,)]} and pool.bytes > 0


def test_nothing_is_left_of_a_request_that_ended() -> None:
    d = CARD.make(
        Request(Table(3), sampling=GREEDY, stop=StoppingCriteria(max_new_tokens=9)), **SMALL
    )
    d.extend([0, 1])
    while not d.finished:
        d.step(Seeded(d.rounds))
    assert d.drafter.pool.after
    d.end()
    assert not d.drafter.pool.after and d.drafter.window is None


def test_draft_ends_with_the_end_of_text() -> None:
    drafter = LookaheadJacobiDrafter(2, 4, 2, True, frozenset({8}))
    drafter.extend([7, 8, 9, 9], None)  # type: ignore[arg-type]
    tree = drafter.propose([7], 9, GREEDY, Seeded(0))
    assert [x for x, probe in zip(tree.tokens, tree.probe, strict=True) if not probe] == [8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_zoo(tmp_path_factory.mktemp("zoo")).big)


def test_a_user_gets_the_greedy_text_up_to_the_edge_of_the_context(model: Any) -> None:
    plain = generate(model, [1, 2, 3], max_new_tokens=200)
    ours = generate(model, [1, 2, 3], max_new_tokens=200, method="lookahead_jacobi")
    assert ours.tokens == plain.tokens and ours.finish_reason == plain.finish_reason
    assert ours.stats.target_calls <= plain.stats.target_calls


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_or_one_token_is_made_where_that_is_asked_for(model: Any, tokens: int) -> None:
    assert (
        len(generate(model, [1], max_new_tokens=tokens, method="lookahead_jacobi").tokens) == tokens
    )


def test_knobs_out_of_range_raise_a_one_line_error() -> None:
    with pytest.raises(TinyspecError, match="n is 1: it must be from 2 to 32"):
        CARD.make(Request(Table(3)), n=1)
