"""Sequoia: the best tree by dynamic programming, and the tokens that it commits.

What it is measured from is tested too, and that every round has fresh noise.
"""

import json
from collections.abc import Sequence
from fractions import Fraction as F
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA, model
from tests.table import Table, exact_distribution
from tinyspec.decoding.costs import MeasuredRounds
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.museum import find_toy
from tinyspec.laws.traps.auto import Ticking, Watch
from tinyspec.laws.traps.sequoia import every_tree, worth
from tinyspec.speculative.drafting.sequoia import (
    PRIOR,
    best_tree,
    estimate_acceptance,
    expected_tree_tokens,
    fastest_tree,
    mean_acceptance_by_rank,
    most_tokens,
    solve_tree_dp,
)
from tinyspec.speculative.treedraft import TreeDrafter
from tinyspec.technique import Guarantee, Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("sequoia")


def make_decoder(
    p: int = 1,
    q: int = 2,
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    return CARD.make(
        Request(
            Table(p),
            [Table(q, zeros=False)],
            sampling or SamplingParams(),
            stop or StoppingCriteria(),
        ),
        **knobs,
    )


def test_trap_reused_noise_biases_two_tokens_and_not_the_first() -> None:
    with pytest.raises(LawViolated) as accused:
        find_toy("sequoia", "noise kept over rounds").check()
    found = accused.value.counterexample
    expected, got = found.expected, found.got
    for token in range(2):
        first, ours = (
            sum(x for text, x in table.items() if text[0] == token) for table in (expected, got)
        )
        assert first == ours


SHARES = st.lists(st.integers(0, 10), min_size=1, max_size=4).map(
    lambda w: [x / (sum(w) + 1) for x in w]
)


@given(SHARES)
def test_printed_algorithm_is_what_runs(accepts: list[float]) -> None:
    """The paper's recursion is the table that `solve_tree_dp` fills, for every size and depth.

    The table has exactly so many nodes, or -inf where no tree has; the recursion at most so many.
    """
    best, _ = solve_tree_dp(tuple(accepts), 9, 4)
    for nodes, depth in product(range(10), range(5)):
        expected = max(best[depth, 1 : nodes + 2])
        assert most_tokens(tuple(accepts), nodes, depth) == pytest.approx(expected)


@given(SHARES, st.integers(1, 7), st.integers(1, 4))
def test_the_tree_is_the_best_of_all_trees(accepts: list[float], nodes: int, depth: int) -> None:
    tree = best_tree(accepts, nodes, depth)
    assert len(tree) <= nodes and max(TokenTree(tree, tree).depths()) <= depth
    best = max(worth(other, accepts) for n in range(1, nodes + 1) for other in every_tree(n, depth))
    assert worth(tree, accepts) == pytest.approx(best, abs=1e-12)
    assert expected_tree_tokens(tree, accepts) == pytest.approx(best, abs=1e-12)


def test_more_nodes_and_more_depth_never_commit_less_and_each_node_adds_no_more_than_the_last() -> (
    None
):
    tokens = [expected_tree_tokens(best_tree(PRIOR, n, 12), PRIOR) for n in range(1, 24)]
    gains = [b - a for a, b in pairwise(tokens)]
    assert all(gain >= 0 for gain in gains)
    assert all(
        b <= a + 1e-12 for a, b in pairwise(gains)
    )  # with falling shares, unbounded depth: concave growth
    by_depth = [expected_tree_tokens(best_tree(PRIOR, 16, d), PRIOR) for d in range(1, 9)]
    assert by_depth == sorted(by_depth)


def test_the_expected_tokens_are_the_mean_of_a_round_where_every_position_is_alike() -> None:
    """The formula's theorem: p and q the same in every context, so that the positional assumption
    holds exactly.
    """
    p, q = [F(1, 2), F(1, 4), F(1, 4)], [F(1, 4), F(1, 4), F(1, 2)]

    class Constant(Table):
        def row(self, context: Sequence[int]) -> list[F]:
            return p if self.seed == 1 else q

    def shares(rng: Exhaustive) -> tuple[F, ...]:
        return tuple(mean_acceptance_by_rank([(p, q)], 3, rng))

    accepts = [sum(x[rank] * mass for x, mass in Exhaustive.walk(shares)) for rank in range(3)]
    for tree in ((ROOT, ROOT), (ROOT, 0), (ROOT, ROOT, 0), (ROOT, 0, 0), (ROOT, ROOT, 1)):

        def tokens(rng: Exhaustive, tree: tuple[int, ...] = tree) -> int:
            d = Decoder(
                Constant(1, 3),
                TreeDrafter(Constant(2, 3), tree, replace=False, cover=True),
                verify_tree,
            )
            d.extend((0,))
            return len(d.step(rng).tokens)

        assert sum(n * mass for n, mass in Exhaustive.walk(tokens)) == expected_tree_tokens(
            tree, accepts
        )


def test_the_acceptance_vector_of_paired_distributions() -> None:
    same = [F(1, 2), F(1, 2)]
    assert mean_acceptance_by_rank([(same, same)], 2, Seeded(0)) == [1, 0]
    sure, q = [F(0), F(1), F(0)], [F(1, 2), F(1, 3), F(1, 6)]
    assert mean_acceptance_by_rank([(sure, q)], 3, None) == [
        0,
        1,
        0,
    ]  # at temperature 0: the best of q are points


def test_the_vector_of_two_models_is_monotone_enough_and_all_of_p_where_they_are_one() -> None:
    one, other = model(LLAMA, seed=1), model(LLAMA, seed=2)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
    for sampling in (SamplingParams(), SamplingParams(0.0), SamplingParams(0.5, top_k=4)):
        assert estimate_acceptance(one, one, texts, sampling, 3, Seeded(0))[0] == pytest.approx(1)
        shares = estimate_acceptance(one, other, texts, sampling, 5, Seeded(0))
        assert len(shares) == 5 and 0 < sum(shares) <= 1 + 1e-9


def test_the_knob_takes_the_file_of_a_measurement(tmp_path: Path) -> None:
    file = tmp_path / "accepts.json"
    file.write_text(json.dumps({"accepts": [0.5, 0.25, 0.125]}))
    assert make_decoder(accepts=str(file), ranks=2).drafter.learnt.accepts == (0.5, 0.25)
    for content in ("[]", "{", '{"accepts": 3}'):
        file.write_text(content)
        with pytest.raises(TinyspecError, match="no result of `tinyspec bench acceptance`"):
            make_decoder(accepts=str(file))
    with pytest.raises(TinyspecError, match="no result of `tinyspec bench acceptance`"):
        make_decoder(accepts=str(tmp_path / "missing.json"))


def test_dearer_positions_make_the_tree_smaller_and_dearer_steps_make_it_flatter() -> None:
    def plan(row: float, step: float) -> tuple[int, int]:
        costs = MeasuredRounds({1: [1 + row * size for size in range(33)]}, {1: step})
        tree = fastest_tree(PRIOR, costs, range(1, 33), 8)
        return len(tree), max(TokenTree(tree, tree).depths())

    assert plan(0.0, 0.0)[0] == 32
    assert plan(1.0, 0.0)[0] == 1
    sizes = [plan(row, 0.05)[0] for row in (0.0, 0.01, 0.05, 0.3)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    depths = [plan(0.02, step)[1] for step in (0.0, 0.1, 0.3, 1.0)]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[-1] == 1


@pytest.mark.parametrize("row", [0.0, 2.0])
def test_the_clock_decides_how_large_the_trees_become(row: float) -> None:
    watch = Watch()
    target = Ticking(Table(1).model, watch, lambda rows: 1.0 + row * (rows - 1))
    request = Request(
        target, [Table(2, zeros=False)], stop=StoppingCriteria(max_new_tokens=60), clock=watch
    )
    d = CARD.make(request, nodes=8)
    d.extend((0,))
    sizes = []
    while not d.finished:
        sizes.append(len(d.step(Seeded(d.rounds)).tree.tokens))
    late = sizes[len(sizes) // 2 : -3]
    assert (min(late) >= 4) if row == 0 else (max(late) <= 2)


def test_a_target_that_agrees_makes_the_tree_a_chain() -> None:
    request = Request(Table(1), [Table(1)], stop=StoppingCriteria(max_new_tokens=60))
    d = CARD.make(request, nodes=4, depth=4, costs="0.1,1,1")
    d.extend((0,))
    while not d.finished:
        parents = d.step(Seeded(d.rounds)).tree.parents
        if d.rounds == 9:  # planned in round 8
            assert list(parents) == [ROOT, 0, 1, 2]
    assert d.rounds >= 9


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(top_k=2), SamplingParams(0.0)], ids=str
)
def test_the_joint_distribution_with_given_figures(sampling: SamplingParams) -> None:
    got = exact_distribution(
        lambda: make_decoder(sampling=sampling, nodes=2, accepts="0.5,0.4", costs="0,1,1,1"), 2
    )
    assert got == exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )


def test_the_rest_of_the_vocabulary_is_covered_where_the_draft_ends() -> None:
    d = make_decoder(
        sampling=SamplingParams(top_k=1), nodes=3, accepts="0.3,0.3,0.3", costs="9,1,1,1,1"
    )
    d.extend((0,))
    tree = d.drafter.propose([0], 5, SamplingParams(top_k=1), Seeded(0))
    assert sorted(tree.tokens) == [0, 1, 2]


@pytest.mark.parametrize("wanted", [0, 1, 2, 7])
def test_a_text_has_the_length_that_was_asked_for(wanted: int) -> None:
    d = make_decoder(stop=StoppingCriteria(max_new_tokens=wanted))
    d.extend((0,))
    while not d.finished:
        d.step(Seeded(d.rounds))
    assert len(d.new) == wanted


@pytest.mark.parametrize(
    "knobs",
    [
        {"accepts": "0.9,0.9"},
        {"accepts": "a"},
        {"accepts": "nan"},
        {"accepts": "0.5,nan"},
        {"accepts": "-0.1"},
        {"costs": "1,2"},
        {"costs": "1,x,2"},
        {"costs": "nan,1,2"},
        {"costs": "1,1,inf"},
        {"nodes": 0},
    ],
)
def test_figures_that_mean_nothing_raise_a_named_error(knobs: dict[str, Any]) -> None:
    with pytest.raises(TinyspecError, match="|".join(knobs)):
        make_decoder(**knobs)


def test_card_is_timed_and_the_distribution_does_not_depend_on_time() -> None:
    assert CARD.timed and CARD.guarantee is Guarantee.EXACT
