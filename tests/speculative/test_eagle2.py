"""EAGLE-2: its draft is the best part of what its head proposed."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.traps import eagle as eagle_traps
from tinyspec.laws.traps import eagle2 as traps
from tinyspec.speculative.drafting.eagle2 import keep_nodes, rank_nodes
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("eagle2")
GREEDY = SamplingParams(0.0)


def test_trap_no_tree_of_its_size_is_worth_more() -> None:
    assert traps.draft_is_worth_most(CARD.make).cases == 12


def test_trap_the_best_nodes_of_a_depth_are_expanded() -> None:
    assert traps.best_nodes_are_expanded(CARD.make).branches == 3 * (2 + 2 + 2)


@pytest.mark.slow
def test_a_draft_token_is_what_the_training_forward_says() -> None:
    make = partial(CARD.make, nodes=20, depth=4, width=3)
    forward = partial(feature_laws.trained_forward, CARD)
    found = feature_laws.draft_is_training_forward(make, forward, eagle_traps.random_target)
    assert found.branches > 600


@given(st.lists(st.tuples(st.integers(-1, 30), st.sampled_from([1.0, 0.5, 0.25]))), st.integers(0))
def test_the_best_nodes_have_their_parents(proposed: list[tuple[int, float]], k: int) -> None:
    """Also where a child is worth as much as its parent: then the parent was proposed first."""
    tree, values = TokenTree([], [], [], []), list[float]()
    for node, (parent, chance) in enumerate(proposed):
        parent = min(parent, node - 1)
        tree.tokens.append(node)  # type: ignore[attr-defined]
        tree.parents.append(parent)  # type: ignore[attr-defined]
        values.append(chance * (1.0 if parent == ROOT else values[parent]))
    kept = rank_nodes(values, range(len(values)), k)
    assert {tree.parents[node] for node in kept} <= {ROOT, *kept}
    part = keep_nodes(tree, kept)
    paths = [part.tokens_on(part.path(node)) for node in range(len(part.tokens))]
    assert paths == [tree.path(node) for node in sorted(kept)]


def begin(text: list[int], sampling: SamplingParams = GREEDY, **knobs: Any) -> Decoder:
    log: list[Any] = []
    session = eagle_traps.random_target(2, 8).session(log)
    decoder = CARD.make(Request(session, sampling=sampling, forward_log=log), **knobs)
    decoder.extend(text)
    return decoder


def propose(decoder: Decoder, depth: int = 4) -> TokenTree:
    return decoder.drafter.propose(decoder.context, depth, decoder.sampling, Seeded(0))


def test_a_depth_is_one_pass_of_at_most_width_nodes() -> None:
    decoder = begin([1, 2, 3], nodes=30, depth=4, width=3)
    for _ in range(4):
        round = decoder.step(Seeded(decoder.rounds))
        assert len(round.tree.tokens) == 3 + 3 * 9
        assert [call.head_rows for call in round.draft_calls] == [1, 3, 3, 3]
        assert [call.rows for call in round.draft_calls[1:]] == [3, 3, 3]


@pytest.mark.parametrize("nodes", [1, 2, 4, 7, 20])
@pytest.mark.slow
def test_nodes_of_which_no_child_is_kept_do_not_run(nodes: int) -> None:
    """The draft is the best part of what all levels would propose, and takes fewer rows."""
    text = (1, 2, 3)
    values = traps.value_paths(eagle_traps.random_target(2, 8), text, 4)
    proposed = traps.draft_paths(
        CARD.make, eagle_traps.random_target(2, 8), text, 4, nodes=1024, width=3
    )
    best = sorted(proposed, key=lambda path: -values[path])[:nodes]
    decoder = begin([*text], nodes=nodes, depth=4, width=3)
    round = decoder.step(Seeded(0))
    tree = round.tree
    assert sorted(tree.tokens_on(tree.path(node)) for node in range(nodes)) == sorted(best)
    deepest = max(map(len, best))
    assert len(round.draft_calls) in (deepest, min(deepest + 1, 4))
    if nodes == 1:
        assert [call.head_rows for call in round.draft_calls] == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_the_draft_is_the_same_point_masses_at_any_temperature(temperature: float) -> None:
    expected = propose(begin([1, 2, 3], nodes=9))
    got = propose(begin([1, 2, 3], SamplingParams(temperature, top_k=2), nodes=9))
    assert got == expected
    assert set(got.draft_probs) == {None}


def test_a_penalty_changes_the_probabilities_by_which_nodes_are_ranked() -> None:
    sampling, text = SamplingParams(0.0, repetition_penalty=3.0), [1, 2, 3]
    model = eagle_traps.random_target(2, 8)
    tree = propose(begin(text, sampling, nodes=12, depth=2, width=8))
    got = sorted(tree.tokens_on(tree.path(node)) for node in range(12))

    def find_best(count_path: bool) -> list[tuple[int, ...]]:
        values: dict[tuple[int, ...], float] = {}
        for first in (None, *range(8)):
            path = () if first is None else (first,)
            row = feature_laws.trained_forward(CARD, model, text, path)
            assert row is not None
            history = [*text, *path] if count_path else text
            q = SamplingParams(repetition_penalty=3.0).probs(row.numpy(), history)
            values |= {(*path, token): q[token] * values.get(path, 1.0) for token in range(8)}
        return sorted(sorted(values, key=lambda path: -values[path])[:12])

    assert got == find_best(count_path=True) != find_best(count_path=False)


def test_the_draft_is_no_deeper_than_allowed() -> None:
    for depth in (1, 2, 3):
        assert max(propose(begin([1, 2]), depth).depths()) == depth


def test_nothing_follows_the_end_of_a_text() -> None:
    request = Request(eagle_traps.random_target(2, 4).session(), sampling=GREEDY)
    request.stop = replace(request.stop, eos=frozenset(range(4)))
    decoder = CARD.make(request)
    decoder.extend([0, 1])
    assert set(propose(decoder).parents) == {ROOT}


def test_a_text_of_one_token_has_no_draft() -> None:
    assert propose(begin([1])) == TokenTree()


def test_the_tree_is_as_large_as_the_authors_one() -> None:
    """EAGLE-2's code passes total_token 59 and depth 5, which does not count the first pass."""
    defaults = {
        name: [knob.default for knob in find_technique(name).knobs] for name in ("eagle2", "eagle3")
    }
    assert defaults == {"eagle2": [59, 6, 10], "eagle3": [59, 8, 10]}


def test_a_fitted_head_drafts_the_text() -> None:
    """The confident path is deeper than EAGLE's tree of 5 levels."""
    target, text = eagle_traps.reciting_target(2)
    model = feature_laws.fit_head(CARD, target, text)
    for n in (12, 40, 63):
        decoder = CARD.make(Request(model.session(), sampling=SamplingParams(0.0)), nodes=6)
        decoder.extend(text[:n])
        tree = propose(decoder, 8)
        assert tuple(tree.tokens) == text[n : n + 6]
