"""SpecTr: K-SEQ against the optimal transport, its factor, and its exactness.

Drafts may share a beginning and then differ.
"""

from fractions import Fraction as F
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.speculative.printed import compare_on_siblings
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import theorems, verification_laws
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass
from tinyspec.laws.theorems import by_linear_program, drafted_sets, kseq_acceptance, kseq_share
from tinyspec.laws.theorems import optimal_transport as least_cut
from tinyspec.speculative.verification.multi_candidate import sequential_acceptance as recursive
from tinyspec.speculative.verification.spectr import (
    chance_of_any,
    division_factor,
    k_seq_acceptance,
    optimal_acceptance,
    select_k_seq,
    verify_tree_k_seq,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("spectr")
HALF = F(1, 2)


def floats(row) -> np.ndarray:
    return np.array(row, float)


def some(v: int, n: int, seed: int = 0):
    """Return random distributions over v tokens, peaked and flat."""
    rng = np.random.default_rng(seed)
    return [
        (rng.dirichlet(np.full(v, c)), rng.dirichlet(np.full(v, d)))
        for c, d in rng.choice([0.1, 1, 5], (n, 2))
    ]


# ------------------------------------------------------------------ what makes it SpecTr


@pytest.mark.slow
def test_printed_algorithm_is_what_runs() -> None:
    """`select_k_seq` has the outcomes of `verify_tree_k_seq` below one node."""

    def printed(p, dists, drafts, rng):
        return select_k_seq(p, dists[0], drafts, rng)

    assert compare_on_siblings(printed, verify_tree_k_seq, theorems.with_replacement) > 1000


def test_k_seq_is_not_recursive_rejection_it_accepts_more() -> None:
    gains = [k_seq_acceptance(p, q, k) - recursive(p, q, k) for p, q in some(6, 40) for k in (2, 4)]
    assert min(gains) > -1e-9  # in these cases; no theorem
    assert max(gains) > 0.02


def test_rho_is_the_least_factor_that_is_exact() -> None:
    assert verification_laws.least_factor(verify_tree_k_seq, largest=4).branches > 1000


def test_exact_where_drafts_meet_and_part() -> None:
    assert verification_laws.selection_keeps_target(verify_tree_k_seq, largest=4).branches > 800


# ------------------------------------------------------------------ theorems


def test_theorem_k_seq_reaches_its_share_of_the_optimum() -> None:
    assert theorems.kseq_reaches_share(verify_tree_k_seq, largest=4).branches > 500


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_optimum_is_the_linear_programs_and_k_seq_lies_between_its_share_of_it_and_all(
    k: int,
) -> None:
    pytest.importorskip("scipy")
    for p, q in list(distribution_pairs((3,), 5))[::19]:
        drawn = drafted_sets(q, k, replace=True)
        assert optimal_acceptance(p, q, k) == least_cut(p, drawn)
        assert optimal_acceptance(floats(p), floats(q), k) == pytest.approx(
            by_linear_program(p, drawn), abs=1e-9
        )
        reached = k_seq_acceptance(floats(p), floats(q), k)
        assert reached == pytest.approx(kseq_acceptance(p, q, k), abs=1e-8)
        assert (
            float(kseq_share(k) * least_cut(p, drawn)) - 1e-9
            <= reached
            <= optimal_acceptance(floats(p), floats(q), k) + 1e-9
        )


@pytest.mark.parametrize("v", [5, 2000])
def test_theorem_for_any_vocabulary_the_share_is_reached_and_more_drafts_accept_more(
    v: int,
) -> None:
    for p, q in some(v, 12, seed=1):
        reached = [k_seq_acceptance(p, q, k) for k in range(1, 9)]
        assert reached[0] == pytest.approx(np.minimum(p, q).sum())
        assert all(a <= b + 1e-9 for a, b in pairwise(reached))
        for k, x in enumerate(reached, start=1):
            assert (
                float(kseq_share(k)) * optimal_acceptance(p, q, k) - 1e-9
                <= x
                <= optimal_acceptance(p, q, k) + 1e-9
            )


ROW = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)


@given(ROW, ROW, st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_rho_lies_between_1_and_k_solves_its_equation_in_floats_and_is_rounded_up_in_fractions(
    wp, wq, k: int
) -> None:
    p, q = ([F(x, sum(w)) for x in w] for w in (wp, wq))

    def spare(rho):
        beta = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        return rho * beta - chance_of_any(beta, k)

    exactly = division_factor(np.array(p, dtype=object), np.array(q, dtype=object), k)
    rho = F(float(division_factor(floats(p), floats(q), k)))
    assert 1 <= exactly <= k and spare(exactly) >= 0
    assert 1 <= rho <= k and abs(spare(rho)) < 1e-12


def test_one_draft_is_token_verification() -> None:
    for p, q in distribution_pairs(largest=4):
        got, law_of_one, _ = theorems.play_siblings(
            verify_tree_k_seq, theorems.with_replacement, p, q, 1
        )
        assert (got, law_of_one) == (
            overlap_mass(p, q),
            {token: x for token, x in enumerate(p) if x},
        )


# --------------------------------------------------------- the distribution


@pytest.mark.parametrize(
    ("k", "gamma", "sampling"),
    [
        (2, 2, SamplingParams()),
        (3, 1, SamplingParams(temperature=0.5)),
        (1, 3, SamplingParams(top_p=0.7)),
        (3, 2, SamplingParams(temperature=0.0)),
    ],
)
def test_the_joint_distribution_of_three_tokens_is_the_targets(
    k: int, gamma: int, sampling: SamplingParams
) -> None:
    made = lambda: CARD.make(  # noqa: E731
        Request(Table(1, 2), [Table(2, 2, zeros=False)], sampling), k=k, gamma=gamma
    )
    assert exact_distribution(made, 3) == exact_distribution(
        lambda: Decoder(Table(1, 2), BaseDrafter(), verify_tree, sampling=sampling), 3
    )


class Any3(BaseDrafter):
    """Siblings from every kind of distribution: two draws of q, one of r, a point mass, another
    draw of q.
    """

    def propose(self, context, max_draft_depth, sampling, source):
        q, r = [HALF, HALF, F(0)], [F(1, 5), F(1, 5), F(3, 5)]
        draft_probs = [q, r, list(q), None, q]
        tokens = [2 if row is None else source.draw(row) for row in draft_probs]
        return (
            TokenTree(tokens, (ROOT,) * 5, draft_probs, (False,) * 5)
            if max_draft_depth
            else TokenTree()
        )


def test_groups_of_equal_distributions_follow_on_the_residual() -> None:
    """Also in the groups' own order: the drafts of q are judged together, whatever stands between
    them.
    """
    assert exact_distribution(
        lambda: Decoder(Table(3), Any3(), verify_tree_k_seq), 2
    ) == exact_distribution(lambda: Decoder(Table(3), BaseDrafter(), verify_tree), 2)


def test_siblings_without_replacement_are_exact() -> None:
    for p, q in list(distribution_pairs((3,), 6))[::23]:
        _, got, _ = theorems.play_siblings(verify_tree_k_seq, theorems.without_replacement, p, q, 3)
        assert got == {token: x for token, x in enumerate(p) if x}


# ------------------------------------------------------------------ edges


def test_where_draft_and_target_agree_the_first_draft_is_taken() -> None:
    row = np.random.default_rng(0).dirichlet(np.ones(50))
    for p in (row, row * (1 + 1e-16)):
        tree = TokenTree([3, 4], (ROOT, ROOT), (row, row.copy()), (False, False))
        verdict = verify_tree_k_seq(
            tree, dict.fromkeys(range(-1, 2), p), Replay([1 - 1e-9, 0.5, 0.5])
        )
        assert verdict.accepted == (0,)


def test_where_they_share_no_token_p_is_drawn_from() -> None:
    q = [F(0), F(1)]
    tree = TokenTree([1, 1, 1], (ROOT,) * 3, (q,) * 3, (False,) * 3)
    assert Exhaustive.distribution(
        lambda source: verify_tree_k_seq(tree, {ROOT: [F(1), F(0)]}, source)
    ) == {((), 0, (0, 1, 2)): 1}


def test_floats_decide_as_fractions_do_where_rho_is_the_same() -> None:
    """With one draft left, or none, rho is 1 in both. With two, the bracket of the fractions is
    coarser.
    """
    q = [F(1, 4), F(1, 4), HALF]
    tree = TokenTree.chain([2, 0], [q, q])
    rows = {ROOT: [HALF, F(1, 4), F(1, 4)], 0: [F(1, 8), F(3, 8), HALF], 1: q}
    for u in ([0.1, 0.1, 0.9], [0.49, 0.51, 0.2], [0.51, 0.3, 0.1]):
        ours = verify_tree_k_seq(tree, {node: floats(row) for node, row in rows.items()}, Replay(u))
        assert ours == verify_tree_k_seq(tree, rows, Replay([F(x) for x in u]))


def test_no_draft_is_plain_decoding_and_probes_are_passed_over() -> None:
    assert verify_tree_k_seq(TokenTree(), {ROOT: [HALF, HALF]}, Replay([0.6])) == ((), 1, ())
    probed = TokenTree([9, 1], [ROOT, ROOT], [None, [F(0), F(1)]], [True, False])
    assert verify_tree_k_seq(probed, {ROOT: [F(0), F(1)], 1: [F(1), F(0)]}, Seeded(0)) == (
        (1,),
        0,
        (),
    )


@pytest.mark.parametrize(
    ("token", "q", "word"),
    [(1, [F(1), F(0)], "declare None"), (5, [HALF, HALF], "outside"), (0, [F(1)], "pad it")],
)
def test_a_broken_draft_raises_a_named_error(token, q, word) -> None:
    tree = TokenTree([0, token], [ROOT] * 2, [q, q], [False] * 2)
    with pytest.raises(TinyspecError, match=word):
        verify_tree_k_seq(tree, {ROOT: [HALF, HALF]}, Seeded(0))


@pytest.mark.parametrize("wanted", [0, 1, 2, 5])
def test_stops_at_the_limit_and_at_the_end_of_text(wanted: int) -> None:
    stop = StoppingCriteria(eos=frozenset({2}), max_new_tokens=wanted)
    for seed in range(5):
        decoder = CARD.make(Request(Table(1), [Table(2)], stop=stop), k=3, gamma=3)
        decoder.extend((0,))
        source = Seeded(seed)
        while not decoder.finished:
            decoder.step(source)
        assert len(decoder.new) == wanted or decoder.new[-1] == 2
        assert 2 not in decoder.new[:-1]


def test_bad_knobs_raise_a_named_error() -> None:
    with pytest.raises(TinyspecError, match="k is 0"):
        CARD.settings({"k": 0})
    with pytest.raises(TinyspecError, match="more than 1024 nodes"):
        CARD.make(Request(Table(1), [Table(2)]), k=200, gamma=8)
