"""Staged speculative decoding: both stages, what each changes, and what neither may."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA, PROMPT, model
from tests.table import Table, exact_distribution
from tinyspec.decoding import sampling
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.museum import find_toy
from tinyspec.laws.traps.staged import (
    beats_fixed_trees,
    calls_are_spared,
    tokens_are_the_drafts,
    trees_are_as_likely,
)
from tinyspec.speculative.drafting.staged import ComputedPaths, grow_tree, judge_guess
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("staged")
WEIGHTS = st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any)


def make_decoder(
    p: int = 1,
    q: int = 2,
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: object,
) -> Decoder:
    forward_log: list = []
    target, draft = Table(p), Table(q, 3, zeros=False)
    target.forward_log = draft.forward_log = forward_log
    request = Request(
        target,
        [draft],
        sampling or SamplingParams(),
        stop or StoppingCriteria(),
        forward_log=forward_log,
    )
    return CARD.make(request, **{"sample": 96, "budget": 4, **knobs})


def finish(d: Decoder, prompt: tuple[int, ...] = (0, 1)) -> list[int]:
    d.extend(prompt)
    rng = Seeded(0)
    while not d.finished:
        d.step(rng)
    return d.new


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize(("budget", "width"), [(1, 1), (5, 1), (7, 2), (9, 3)])
def test_printed_algorithm_is_what_runs(guesses: int, budget: int, width: int) -> None:
    for seed in range(2, 8):
        d = make_decoder(1, seed, budget=budget, width=width, children="likeliest", guesses=guesses)
        d.extend((0, 1))
        tree = d.drafter.propose(d.context, 99, SamplingParams(), Seeded(0))
        paths = [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]
        table = Table(seed, 3, zeros=False)
        assert paths == grow_tree(lambda text: normalized(table.row(text)), [0, 1], budget, width)  # noqa: B023


def normalized(weights: Sequence[Any]) -> list[Fraction]:
    return [Fraction(x, sum(weights)) for x in weights]


def test_trap_n_grams_save_passes_of_the_draft() -> None:
    assert calls_are_spared(CARD.make).cases == 3
    with pytest.raises(AssertionError, match="spare"):
        find_toy("staged", "a tree and no second stage").check()


def test_trap_n_grams_draft_for_the_draft_model_alone() -> None:
    assert tokens_are_the_drafts(CARD.make).cases == 24
    with pytest.raises(AssertionError, match="whatever"):
        find_toy("staged", "n-grams straight to the target").check()


def test_trap_the_tree_follows_the_drafts_probability() -> None:
    assert beats_fixed_trees(CARD.make).cases == 1
    with pytest.raises(AssertionError, match="beats fixed trees"):
        find_toy("staged", "a fixed tree").check()


@given(st.tuples(WEIGHTS, WEIGHTS))
def test_a_judged_guess_follows_the_draft_and_is_kept_as_often_as_the_two_agree(
    weights: tuple[list[int], list[int]],
) -> None:
    """A guess is kept with probability 1 - TV(q, g)."""
    q, g = map(normalized, weights)

    def play(rng: Exhaustive) -> tuple[int, int]:
        guess = rng.draw(g)
        return guess, judge_guess(q, (guess, g), rng)

    law = Exhaustive.distribution(play)
    got = [sum(p for (_, token), p in law.items() if token == x) for x in range(len(q))]
    assert got == q
    kept = sum(p for (guess, token), p in law.items() if token == guess)
    assert kept == 1 - sum(abs(a - b) for a, b in zip(q, g, strict=True)) / 2


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.5, top_k=2)], ids=str)
def test_guesses_are_sampled_from_the_n_grams_under_the_requests_settings(
    sampling: SamplingParams,
) -> None:
    d = make_decoder(sampling=sampling)
    table = d.drafter.table
    g = sampling.probs(table.logits([2, 1]))

    def play(rng: Exhaustive) -> int:
        computed = ComputedPaths(d.drafter.model, sampling, [0, 2])
        token = d.drafter.guess_token(computed, (1,), rng)
        assert computed.guesses == {(1,): (token, g)}
        return token

    assert Exhaustive.distribution(play) == {token: p for token, p in enumerate(g) if p}


def test_trap_the_second_stage_keeps_the_distribution_of_the_tree() -> None:
    assert trees_are_as_likely(CARD.make).cases == 8
    with pytest.raises(AssertionError, match="as likely"):
        find_toy("staged", "the n-gram model's distribution is declared").check()
    with pytest.raises(AssertionError, match="as likely"):
        find_toy("staged", "a guessed end of text is not judged").check()


@pytest.mark.parametrize("children", ["drawn", "likeliest"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.5), SamplingParams(0.0)], ids=str
)
@pytest.mark.slow
def test_the_joint_distribution_is_the_targets(children: str, sampling: SamplingParams) -> None:
    plain = exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )
    assert (
        exact_distribution(lambda: make_decoder(sampling=sampling, children=children, budget=3), 2)
        == plain
    )


def test_one_target_pass_a_round_and_no_more_draft_passes_than_tokens() -> None:
    d = make_decoder(stop=StoppingCriteria(max_new_tokens=40), budget=6)
    d.extend((0, 1))
    while not d.finished:
        round = d.step(Seeded(d.rounds))
        assert len(round.calls) == 1
        assert len(round.draft_calls) <= -(
            -len(round.tree.tokens) // 2
        )  # at most one pass for each leaf that got children


@pytest.mark.parametrize(("budget", "width"), [(1, 1), (1, 3), (5, 2), (9, 3), (4, 1)])
def test_the_tree_has_its_budget_and_no_node_more_children_than_the_width(
    budget: int, width: int
) -> None:
    d = make_decoder(budget=budget, width=width)
    d.extend((0, 1))
    tree = d.step(Seeded(0)).tree
    assert len(tree.tokens) == budget
    assert max(tree.parents.count(node) for node in tree.parents) <= width


def test_tree_stays_within_the_depth_and_ends_with_the_text() -> None:
    d = make_decoder(stop=StoppingCriteria(max_new_tokens=3), budget=9)
    d.extend((0, 1))
    assert max(d.step(Seeded(0)).tree.depths()) <= 2
    d = make_decoder(stop=StoppingCriteria(eos=frozenset({1}), max_new_tokens=30), budget=9)
    d.extend((0, 2))
    tree = d.step(Seeded(0)).tree
    assert all(tree.tokens[parent] != 1 for parent in tree.parents if parent >= 0)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_short_requests_end_where_they_should(tokens: int) -> None:
    assert len(finish(make_decoder(stop=StoppingCriteria(max_new_tokens=tokens)))) == tokens


def test_a_text_beyond_the_drafts_context_is_plain() -> None:
    request = Request(
        Table(1),
        [Table(2)],
        SamplingParams(),
        StoppingCriteria(max_new_tokens=12),
        draft_max_lengths=[6],
    )
    assert len(finish(CARD.make(request, sample=8))) == 12


def test_the_n_grams_are_counted_once_a_model() -> None:
    draft = Table(2).model
    request = [Request(Table(1), [draft.session()]) for _ in range(2)]
    one, other = (CARD.make(each, sample=20).drafter.table for each in request)
    assert one is other is not None
    assert CARD.make(request[0], sample=20, order=4).drafter.table is not one
    assert CARD.make(request[0], guesses=0).drafter.table is None


def test_temperature_0_gives_plain_greedy_text_and_children_that_are_point_masses() -> None:
    d = make_decoder(sampling=SamplingParams(0.0), stop=StoppingCriteria(max_new_tokens=20))
    plain = Decoder(
        Table(1),
        BaseDrafter(),
        verify_tree,
        sampling=SamplingParams(0.0),
        stop=StoppingCriteria(max_new_tokens=20),
    )
    assert finish(d) == finish(plain)
    d.rewind(2)
    assert set(d.step(Seeded(1)).tree.draft_probs) == {None}


def test_on_a_device_the_trees_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand in for the device."""

    def propose_trees() -> list[TokenTree]:
        big, small = (model(LLAMA, seed=seed, dtype=torch.float64) for seed in (1, 2))
        request = Request(big.session(), [small.session()], SamplingParams(0.8, top_k=9))
        d = CARD.make(request, sample=640)
        d.extend(PROMPT)
        return [d.step(Seeded(number)).tree for number in range(6)]

    on_the_host = propose_trees()
    monkeypatch.setattr(sampling, "is_on_device", lambda row: True)
    for tree, expected in zip(propose_trees(), on_the_host, strict=True):
        assert tree[:2] == expected[:2]
        for q, row in zip(tree.draft_probs, expected.draft_probs, strict=True):
            assert isinstance(q, torch.Tensor)
            assert q.numpy() == pytest.approx(row)


@pytest.mark.parametrize("knobs", [{"budget": 0}, {"width": 0}, {"children": "all"}, {"order": 1}])
def test_knobs_out_of_range_raise_a_named_error(knobs: dict[str, object]) -> None:
    with pytest.raises(TinyspecError, match=r"budget|width|children|order"):
        CARD.settings(knobs)
