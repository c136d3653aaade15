"""Multi-candidate speculative decoding: both modes are exact, and what each accepts."""

from fractions import Fraction as F
from itertools import product
from typing import Any

import pytest

from tests.speculative.printed import compare_on_siblings
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.laws.theorems import (
    matching_acceptance,
    play_siblings,
    with_replacement,
    without_replacement,
)
from tinyspec.speculative.verification.multi_candidate import (
    sequential_acceptance,
    verify_siblings,
)
from tinyspec.technique import Request, find_technique

CARD = find_technique("multi_candidate")


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


def plain(p: int = 1, sampling: SamplingParams | None = None) -> Decoder:
    return Decoder(Table(p), BaseDrafter(), verify_tree, sampling=sampling or SamplingParams())


@pytest.mark.parametrize("draft", [with_replacement, without_replacement])
def test_printed_algorithm_is_what_runs(draft: Any) -> None:
    """`verify_siblings` has the outcomes of `verify_tree` below one node."""
    assert compare_on_siblings(verify_siblings, verify_tree, draft) > 1000


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.7)], ids=str)
def test_trap_three_candidates_keep_the_joint_distribution(
    sampling: SamplingParams, replacement: bool
) -> None:
    """The best k judged by q, sorted draws, a forgotten rejection: each gives another
    distribution (laws/traps/multi_candidate.py)."""
    got = exact_distribution(
        lambda: make_decoder(sampling=sampling, configuration="3", replacement=replacement), 2
    )
    assert got == exact_distribution(lambda: plain(sampling=sampling), 2)


def test_all_tokens_without_replacement_accept() -> None:
    for p, q in ((p, q) for p, q in distribution_pairs(largest=6) if all(q)):
        accepted, _, _ = play_siblings(verify_tree, without_replacement, p, q, len(p))
        assert accepted == 1


def test_acceptance_is_ordered() -> None:
    strict = 0
    for (p, q), k in product(distribution_pairs(largest=5), (1, 2, 3)):
        twice, _, _ = play_siblings(verify_tree, with_replacement, p, q, k)
        once, _, _ = play_siblings(verify_tree, without_replacement, p, q, k)
        assert matching_acceptance(p, q, k) <= twice <= once
        strict += matching_acceptance(p, q, k) < twice < once
    assert strict > 0


def test_acceptance_is_the_formulas() -> None:
    for (p, q), k in product(distribution_pairs(largest=5), (1, 2, 3)):
        assert (
            sequential_acceptance(list(p), list(q), k)
            == play_siblings(verify_tree, with_replacement, p, q, k)[0]
        )
    assert sequential_acceptance([0.5, 0.5], [0.5, 0.5], 1) == pytest.approx(1)


def test_a_round_is_one_target_pass() -> None:
    d = make_decoder(stop=StoppingCriteria(max_new_tokens=30), configuration="2x2x1")
    d.extend((0,))
    while not d.finished:
        depth = min(3, d.max_draft_depth)
        before = d.drafter.model.calls  # type: ignore[attr-defined]
        round = d.step(Seeded(d.rounds))
        assert d.drafter.model.calls - before == depth  # type: ignore[attr-defined]
        assert max(round.tree.depths(), default=0) == depth
    assert d.target.calls == d.rounds  # type: ignore[attr-defined]
    assert len(d.new) == 30


def test_greedy_second_best_saves_a_round() -> None:
    """All draws would be the same token there, so the two likeliest are proposed instead."""
    greedy, wanted = SamplingParams(temperature=0.0), StoppingCriteria(max_new_tokens=24)
    rounds = {}
    for configuration in ("1x1", "3x3"):
        d = make_decoder(3, 4, greedy, wanted, configuration=configuration)
        d.extend((0,))
        while not d.finished:
            d.step(Seeded(d.rounds))
        rounds[configuration] = d.rounds
    assert (
        rounds["3x3"] == 8 < rounds["1x1"]
    )  # all three tokens at each depth: every round commits three


@pytest.mark.parametrize("wanted", [0, 1])
def test_no_room_is_no_draft(wanted: int) -> None:
    d = make_decoder(stop=StoppingCriteria(max_new_tokens=wanted))
    d.extend((0,))
    if wanted:
        assert d.step(Seeded(0)).tree.tokens == []
    assert d.finished


def test_eos_inside_a_draft_is_last() -> None:
    d = make_decoder(
        stop=StoppingCriteria(eos=frozenset({2}), max_new_tokens=40), configuration="3x3x2"
    )
    d.extend((0,))
    while not d.finished:
        round = d.step(Seeded(d.rounds))
        for node, up in enumerate(round.tree.parents):
            assert up < 0 or round.tree.tokens[up] != 2, (node, up)
    assert d.new.index(2) == len(d.new) - 1


@pytest.mark.parametrize("configuration", ["4x", "tree", "0", "4 by 2", "9x9x9x9"])
def test_bad_configuration_is_one_line(configuration: str) -> None:
    with pytest.raises(TinyspecError, match="children"):
        make_decoder(configuration=configuration)


def test_impossible_tokens_are_no_candidates() -> None:
    d = CARD.make(Request(Table(1), [Table(3)], SamplingParams(top_k=2)), configuration="3")
    d.extend((0,))
    tree = d.drafter.propose([0], 5, SamplingParams(top_k=2), Seeded(0))
    assert len(tree.tokens) == 2
    assert all(
        F(probs[token]) > 0 for token, probs in zip(tree.tokens, tree.draft_probs, strict=True)
    )  # type: ignore[index]
