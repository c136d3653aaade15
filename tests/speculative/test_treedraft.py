"""TreeDrafter: its nodes, the distributions that it declares, and its cost.

Verified, its trees keep the target's distribution.
"""

from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch

from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.speculative.treedraft import (
    TreeDrafter,
    branching_parents,
    parse_branching,
    top_k_tokens,
    uniform_over_unsampled,
)
from tinyspec.tree import ROOT, TokenTree


def drafter(children: tuple[int, ...], q: int = 2, **options: Any) -> TreeDrafter:
    return TreeDrafter(Table(q, zeros=False), branching_parents(children), **options)


def decoder(
    children: tuple[int, ...],
    p: int = 1,
    q: int = 2,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> Decoder:
    return Decoder(
        Table(p),
        drafter(children, q, **options),
        verify_tree,
        sampling=sampling or SamplingParams(),
    )


def plain(p: int = 1, sampling: SamplingParams | None = None) -> Decoder:
    return Decoder(Table(p), BaseDrafter(), verify_tree, sampling=sampling or SamplingParams())


def proposed(
    draft: TreeDrafter,
    max_draft_depth: int = 9,
    sampling: SamplingParams | None = None,
    seed: int = 0,
) -> TokenTree:
    draft.extend((0,), None)  # type: ignore[arg-type]
    return draft.propose([0], max_draft_depth, sampling or SamplingParams(), Seeded(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3, 40, 200, 1000])
def test_the_likeliest_are_the_first_of_all_in_order_ties_to_the_lowest_id(
    dtype: torch.dtype, k: int
) -> None:
    row = torch.randint(0, 50, (999,), generator=torch.Generator().manual_seed(k)).to(dtype)
    row[::3] = -torch.inf
    in_order = sorted(range(999), key=lambda token: (-float(row[token]), token))[:k]
    assert top_k_tokens(row, k) == in_order
    assert top_k_rows(torch.stack([row, row]), [1], k) == [in_order]


@pytest.mark.parametrize("k", [2, 3, 8, 31])
@pytest.mark.parametrize("seed", range(5))
def test_none_of_the_likeliest_is_missed_where_all_differ(k: int, seed: int) -> None:
    row = torch.randperm(999, generator=torch.Generator().manual_seed(seed)).double()
    assert top_k_tokens(row, k) == row.argsort(descending=True)[:k].tolist()


MODES: list[dict[str, Any]] = [
    {"replace": True},
    {"replace": False},
    {"replace": False, "cover": True},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=2),
        SamplingParams(temperature=0.0),
    ],
    ids=str,
)
def test_verified_tree_keeps_the_joint_distribution(
    sampling: SamplingParams, mode: dict[str, Any]
) -> None:
    for children in ((2, 1), (1, 2)):
        got = exact_distribution(
            lambda children=children: decoder(children, sampling=sampling, **mode), 2
        )  # type: ignore[misc]
        assert got == exact_distribution(lambda: plain(sampling=sampling), 2)


def test_one_pass_of_the_model_a_depth_and_leaves_are_never_run() -> None:
    draft = drafter((3, 2, 2), replace=False)
    tree = proposed(draft)
    calls = [call for call in draft.model.forward_log if not call.prefill]  # type: ignore[attr-defined]
    assert len(tree.tokens) == 3 + 6 + 12
    assert [call.rows for call in calls] == [1, 3, 6]


def test_only_nodes_with_children_are_run_in_a_ragged_tree() -> None:
    draft = TreeDrafter(Table(2, zeros=False), (ROOT, ROOT, 0), replace=False)
    tree = proposed(draft)
    assert list(tree.parents) == [ROOT, ROOT, 0]
    assert [call.rows for call in draft.model.forward_log if not call.prefill] == [1, 1]  # type: ignore[attr-defined]


def test_equal_siblings_are_run_once() -> None:
    draft = TreeDrafter(Table(2, 2, zeros=False), branching_parents((8, 1)))
    tree = proposed(draft)
    rows = [call.rows for call in draft.model.forward_log if not call.prefill]  # type: ignore[attr-defined]
    assert len(tree.tokens) == 16 and rows == [1, len(set(tree.tokens[:8]))]


def test_without_replacement_each_sibling_declares_what_the_earlier_ones_left() -> None:
    tree = proposed(drafter((3,), replace=False))
    first, second, third = ([F(x) for x in row] for row in tree.draft_probs if row is not None)
    a, b, _ = tree.tokens
    assert len(set(tree.tokens)) == 3
    assert second == [x / (1 - first[a]) if token != a else 0 for token, x in enumerate(first)]
    assert third == [F(int(token not in (a, b))) for token in range(3)]


def test_no_more_children_than_possible_tokens_unless_covered() -> None:
    sampling = SamplingParams(top_k=2)
    assert len(proposed(drafter((3,), replace=False), sampling=sampling).tokens) == 2
    covered = proposed(drafter((3,), replace=False, cover=True), sampling=sampling)
    assert sorted(covered.tokens) == [0, 1, 2]
    last = covered.draft_probs[2]
    assert last is not None and list(last) == [
        F(int(token == covered.tokens[2])) for token in range(3)
    ]
    assert len(proposed(drafter((9,), replace=False, cover=True)).tokens) == 3  # there are no more


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_tokens_as_children_without_replacement_accept_surely(mode: dict[str, Any]) -> None:
    def rejects_all(rng: Exhaustive) -> bool:
        made = decoder((3,), **mode)
        made.extend((0,))
        return not made.step(rng).verdict.accepted

    assert (
        sum(mass for rejected, mass in Exhaustive.walk(rejects_all) if rejected) == 0
    ) is not mode["replace"]


def test_at_temperature_0_the_likeliest_tokens_are_point_masses() -> None:
    tree = proposed(drafter((2, 1)), sampling=SamplingParams(temperature=0.0))
    row = Table(2, zeros=False).row((0,))
    assert list(tree.tokens[:2]) == top_k_tokens(row, 2)
    assert all(probs is None for probs in tree.draft_probs)


def test_nothing_comes_after_an_end_below_the_room_or_beyond_the_context() -> None:
    assert len(proposed(drafter((2, 2), ends=frozenset({0, 1, 2}))).tokens) == 2
    assert max(proposed(drafter((1, 2, 1)), max_draft_depth=2).depths()) == 2
    assert not proposed(drafter((2,)), max_draft_depth=0).tokens
    assert max(proposed(drafter((1, 1, 1), positions=3)).depths()) == 2
    assert not proposed(drafter((2,), positions=1)).tokens
    lagging = drafter((2,), positions=2)
    lagging.extend((0, 1, 0), None)  # type: ignore[arg-type]
    assert not lagging.propose([0, 1, 0], 3, SamplingParams(), Seeded(0)).tokens


def test_a_text_goes_on_after_an_end_and_a_rewind() -> None:
    made = decoder((2, 1), replace=False)
    made.stop = StoppingCriteria(max_new_tokens=6)
    texts = []
    for _ in range(2):
        made.extend((0,))
        rng = Seeded(3)
        while not made.finished:
            made.step(rng.split("again", made.rounds))
        texts.append(len(made.new))
        made.end()
        made.rewind(0)
    assert texts == [6, 6]


@pytest.mark.parametrize("configuration", ["", "4y2", "0x2", "-1", "2x", "2.5"])
def test_a_configuration_that_is_no_tree_raises_an_error(configuration: str) -> None:
    with pytest.raises(TinyspecError, match="4x2x1"):
        parse_branching(configuration)


def test_a_tree_beyond_the_bound_raises_an_error() -> None:
    with pytest.raises(TinyspecError, match="more than 1024 nodes"):
        branching_parents((9, 9, 9, 9))


def test_the_likeliest_of_any_distribution_come_best_first_and_equals_by_id() -> None:
    values = [0.1, 0.3, 0.1, 0.3, 0.0, 0.2]
    for row in (
        [F(str(x)) for x in values],
        np.array(values),
        torch.tensor(values, dtype=torch.float64),
    ):
        assert [top_k_tokens(row, k) for k in (1, 2, 3, 4, 9)] == [
            [1],
            [1, 3],
            [1, 3, 5],
            [1, 3, 5, 0],
            [1, 3, 5, 0, 2, 4],
        ]


def test_the_unsampled_tokens_of_any_distribution_are_equally_likely() -> None:
    for row in ([F(1), F(0), F(0), F(0)], np.eye(4)[0], torch.eye(4, dtype=torch.float64)[0]):
        assert [round(float(x), 12) for x in uniform_over_unsampled(row, [0])] == [
            0,
            *[round(1 / 3, 12)] * 3,
        ]
