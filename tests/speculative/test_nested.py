"""A decoder as a drafter: the distribution that its tokens declare, and how often models run.

Its own text follows the outer one.
"""

import pytest

from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.contracts import check_contracts
from tinyspec.lm.forward import Plan
from tinyspec.speculative.nested import NestedDrafter
from tinyspec.technique import Request


def levels(request: Request, gamma: int = 2, **how: bool) -> Decoder:
    """Target, middle, small."""
    middle, small = request.drafts
    inner = Decoder(
        middle,
        ModelDrafter(small, 1),
        verify_tree,
        stop=StoppingCriteria(eos=request.stop.eos),
        forward_log=request.forward_log,
    )
    return request.decoder(NestedDrafter(inner, gamma, **how), verify_tree)


def three(
    sampling: SamplingParams | None = None, stop: StoppingCriteria | None = None, gamma: int = 2
) -> Decoder:
    target, middle, small = (Table(seed, 3, zeros=seed != 2) for seed in (1, 2, 3))
    return levels(
        Request(target, [middle, small], sampling or SamplingParams(), stop or StoppingCriteria()),
        gamma,
    )


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.0), SamplingParams(top_p=0.7)], ids=str
)
def test_three_levels_keep_the_targets_joint_distribution(sampling: SamplingParams) -> None:
    assert exact_distribution(lambda: three(sampling), 2) == exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )


def test_tokens_declare_the_middle_models_distribution() -> None:
    d = three()
    d.extend((0, 1))
    tree = d.step(Seeded(3)).tree
    middle = Table(2, 3, zeros=False)
    assert [list(q) for q in tree.draft_probs] == [
        middle.row((0, 1, *tree.tokens[:at])) for at in range(len(tree.tokens))
    ]


def test_an_inexact_inner_decoder_declares_nothing() -> None:
    target, *drafts = (Table(seed) for seed in (1, 2, 3))
    d = levels(Request(target, drafts), is_exact=False)
    d.extend((0,))
    assert set(d.step(Seeded(0)).tree.draft_probs) == {None}


def test_it_keeps_the_contracts_of_a_drafter() -> None:
    assert all(found.cases for found in check_contracts(lambda request: levels(request), 2))


def test_it_makes_gamma_tokens_or_as_many_as_there_is_room_for() -> None:
    d = three(gamma=4, stop=StoppingCriteria(max_new_tokens=4))
    d.extend((0,))
    assert len(d.step(Seeded(0)).tree.tokens) == 3
    d = three(gamma=4)
    d.extend((0,))
    assert len(d.step(Seeded(0)).tree.tokens) == 4


def test_its_text_follows_the_outer_one_through_rounds_rewinds_and_corrections() -> None:
    d = three(gamma=3)
    d.extend((0, 1))
    for number in range(6):
        d.step(Seeded(number))
        inner = d.drafter.decoder
        assert inner.context == d.context == inner.target.text == inner.drafter.model.text
        if number == 3:
            d.rewind(4)
            d.extend((2, 2))
            assert inner.context == d.context == inner.target.text == inner.drafter.model.text
    d.end()
    d.rewind(0)
    assert inner.context == inner.target.text == inner.drafter.model.text == []


def test_a_correction_costs_no_forward_pass_of_its_own() -> None:
    """Tokens from outside run with the next tree, so a plain middle runs once a token."""
    target, middle = Table(1), Table(2)
    d = Decoder(target, NestedDrafter(Decoder(middle, BaseDrafter(), verify_tree), 3), verify_tree)
    d.extend((0, 1, 2))
    del middle.forward_log[:]
    for number in range(5):
        d.step(Seeded(number))
    assert middle.calls == 15


def test_on_a_view_of_the_targets_own_session_only_the_view_moves() -> None:
    target = Table(1)
    inner = Decoder(target.view(Plan(last=2)), ModelDrafter(Table(2), 1), verify_tree)
    d = Decoder(target, NestedDrafter(inner, 2, is_view=True), verify_tree)
    d.extend((0, 1))
    for number in range(6):
        d.step(Seeded(number))
        assert target.text == d.context == inner.context == inner.target.text


def test_beyond_its_models_context_it_proposes_nothing_and_comes_back_after_a_rewind() -> None:
    inner = Decoder(Table(2), ModelDrafter(Table(3), 1), verify_tree)
    d = Decoder(
        Table(1),
        NestedDrafter(inner, 2, positions=6),
        verify_tree,
        stop=StoppingCriteria(max_new_tokens=30),
    )
    d.extend((0, 1, 2))
    while not d.finished:
        tree = d.step(Seeded(d.rounds)).tree
        assert len(d.context) <= 6 or len(inner.context) <= 6
    assert tree.tokens == ()
    d.rewind(4)
    d.step(Seeded(99))
    assert d.rounds and len(inner.context) > 3


def test_an_end_of_text_ends_its_draft() -> None:
    target, middle, small = (Table(seed) for seed in (1, 2, 3))
    d = levels(
        Request(
            target,
            [middle, small],
            stop=StoppingCriteria(eos=frozenset({0, 1, 2}), max_new_tokens=9),
        ),
        5,
    )
    d.extend((0,))
    assert len(d.step(Seeded(0)).tree.tokens) == 1
