"""Token Recycling: the matrix, the static tree, and the state that outlives a request."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.table import Table, exact_distribution
from tests.zoo import tiny_zoo
from tinyspec import generate, load
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams, top_k_rows
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import token_recycling as traps
from tinyspec.speculative.drafting import token_recycling
from tinyspec.speculative.drafting.token_recycling import (
    AUTHORS_TREE,
    NO_CANDIDATE,
    AdjacencyMatrix,
    TokenRecyclingDrafter,
    build_rank_tree,
    draft_from_matrix,
    read_static_tree,
    update_matrix,
)
from tinyspec.technique import MOST_STATES, Request, find_technique, per_model_state
from tinyspec.tree import ROOT

CARD = find_technique("token_recycling")
GREEDY = SamplingParams(temperature=0.0)
SMALL = {"k": 2, "tree": "ranks", "nodes": 6, "depth": 2}


def test_printed_algorithm_is_what_runs() -> None:
    """Drafts and matrix of a decoder, and those of `draft_from_matrix` and `update_matrix`."""
    small = {"k": 3, "tree": "ranks", "nodes": 9, "depth": 3}
    decoder, matrix = CARD.make(Request(Table(3, 5)), **small), np.zeros((5, 3), int)
    decoder.extend((0,))
    tree = build_rank_tree(9, 3, 3)
    decoder.drafter.matrix.learn(range(5), matrix.tolist(), 5)
    for _ in range(20):
        newest = decoder.context[-1]
        round = decoder.step(Seeded(decoder.rounds))
        assert list(round.tree.tokens) == draft_from_matrix(matrix, newest, tree)
        rest = [node for node in range(9) if node not in round.verdict.accepted]
        order = [*rest, ROOT, *round.verdict.accepted]
        tokens = [newest if node == ROOT else round.tree.tokens[node] for node in order]
        update_matrix(matrix, tokens, [round.scores.logits[node + 1] for node in order])
        assert decoder.drafter.matrix.rows.tolist() == matrix.tolist()


def test_trap_candidates_of_rejected_nodes_are_recycled() -> None:
    assert traps.writes_every_row_back(CARD.make).cases > 20


def test_trap_a_second_request_starts_warm() -> None:
    traps.starts_warm(CARD.make)


def test_no_tree_of_its_size_is_worth_more_than_the_static_tree() -> None:
    assert traps.is_the_best_tree(build_rank_tree).cases == 25


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
def test_the_joint_distribution_is_the_targets_at_any_temperature(sampling: SamplingParams) -> None:
    plain = exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), 4
    )
    assert (
        exact_distribution(lambda: CARD.make(Request(Table(3), sampling=sampling), **SMALL), 4)
        == plain
    )


def test_the_authors_tree_has_their_80_nodes() -> None:
    """By depth there are 8, 21, 25, 15, 8 and 3 nodes, as their README counts. The last ones are
    those that their code names.
    """
    shape = read_static_tree(AUTHORS_TREE)
    paths: list[tuple[int, ...]] = []
    for up, rank in shape:
        paths.append((*(() if up == ROOT else paths[up]), rank))
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 7)] == [
        8,
        21,
        25,
        15,
        8,
        3,
    ]
    assert len(set(paths)) == 80 and max(map(max, paths)) == 7
    assert paths[-3:] == [(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)]
    assert {(0, 7, 0), (0, 2, 1), (0, 0, 4, 0)} <= set(paths)
    assert CARD.make(Request(Table(3))).drafter.shape == shape  # it is the default


MARKOV = ((1, 4, 3, 0), (3, 0, 1, 5), (2, 4, 0, 1), (5, 1, 3, 1))


@pytest.mark.parametrize("chunk", [64, 2])
@pytest.mark.parametrize("prompt", [(0, 1, 0), (2, 3, 1, 2), (1, 1, 2, 0, 3)])
def test_with_learn_prompt_its_rows_are_learnt_before_the_first_round(
    prompt: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of every token but the last; without the knob none."""
    monkeypatch.setattr(token_recycling, "PROMPT_CHUNK", chunk)
    model = TableModel(vocabulary=4, rows=lambda text: MARKOV[text[-1]])
    best = [sorted(range(4), key=lambda x: (-row[x], x))[:2] for row in MARKOV]
    for learns in (False, True):
        decoder = CARD.make(Request(model.session()), **SMALL, learn_prompt=learns)
        decoder.extend(prompt)
        known = decoder.drafter.matrix.candidates_of
        read = set(prompt[:-1]) if learns else set()
        assert {x for x in range(4) if known(x) == best[x]} == read
        drafted = decoder.step(Seeded(0)).tree.tokens
        assert list(drafted[:2]) == (best[prompt[-1]] if prompt[-1] in read else [])
        decoder.rewind(1)
        decoder.extend((3, 0))  # forced text in the middle of a request is read alike
        assert not learns or known(3) == best[3]
        assert decoder.context == [prompt[0], 3, 0] and decoder.target.cache_exact


def test_learning_the_prompt_changes_no_distribution() -> None:
    def recycling() -> Decoder:
        return CARD.make(Request(Table(3)), **SMALL, learn_prompt=True)

    plain = exact_distribution(lambda: Decoder(Table(3), BaseDrafter(), verify_tree), 3, (0, 1, 0))
    assert exact_distribution(recycling, 3, (0, 1, 0)) == plain


def test_the_static_tree_is_imbalanced_and_as_large_as_asked_for() -> None:
    shape = build_rank_tree(80, 6, 8)
    below = [sum(up == place for up, _ in shape) for place in range(80)]
    assert len(shape) == 80 and below[0] > below[-1] == 0
    assert all(up < place for place, (up, _) in enumerate(shape))
    assert len(build_rank_tree(80, 2, 2)) == 6  # there are no more


def make_matrix(k: int = 2) -> AdjacencyMatrix:
    matrix = AdjacencyMatrix(k)
    matrix.learn([0, 1, 2], [[1, 2], [2, 3], [0, 1]], 4)
    return matrix


def proposed(
    max_draft_depth: int, ends: frozenset[int] = frozenset(), context: tuple[int, ...] = (0,)
) -> Any:
    return TokenRecyclingDrafter(make_matrix(), 6, 3, ends).propose(
        context, max_draft_depth, GREEDY, Seeded(0)
    )


def test_a_draft_stops_at_the_room_at_the_end_of_text_and_at_tokens_never_scored() -> None:
    assert max(proposed(9).depths()) == 3
    assert max(proposed(1).depths()) == 1
    assert proposed(0).tokens == []
    assert all(
        tree.tokens[up] != 1
        for tree in [proposed(9, frozenset({1}))]
        for up in tree.parents
        if up != ROOT
    )
    assert proposed(9, context=(0, 3)).tokens == []  # 3 was never scored


def test_the_last_row_written_wins() -> None:
    matrix = make_matrix()
    matrix.learn([1, 1], [[0, 3], [3, 2]], 4)
    assert matrix.candidates_of(1) == [3, 2]
    assert matrix.candidates_of(3) == [NO_CANDIDATE, NO_CANDIDATE]
    assert matrix.bytes == 4 * 2 * 4  # V k ids of four bytes


def test_a_vocabulary_smaller_than_k_is_filled_up_with_nothing() -> None:
    matrix = AdjacencyMatrix(5)
    matrix.learn([0], top_k_rows(torch.tensor([[0.0, 2.0]]), [0], 5), 2)
    assert matrix.candidates_of(0) == [1, 0, NO_CANDIDATE, NO_CANDIDATE, NO_CANDIDATE]


def test_candidates_are_the_highest_logits_and_of_equals_the_lowest_ids() -> None:
    rows = np.random.default_rng(0).integers(0, 4, (5, 40)).astype(np.float32)
    for k in (1, 3, 40):
        found = top_k_rows(torch.from_numpy(rows), range(5), k)
        assert [[rows[i, t] for t in ids] for i, ids in enumerate(found)] == (-np.sort(-rows))[
            :, :k
        ].tolist()
        assert all(
            a < b
            for i, ids in enumerate(found)
            for a, b in pairwise(ids)
            if rows[i, a] == rows[i, b]
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_zoo(tmp_path_factory.mktemp("zoo")).big)


def test_a_user_gets_the_greedy_text_and_the_matrix_stays_with_the_model(model: Any) -> None:
    prompt, plain = [1, 2, 3], generate(model, [1, 2, 3], max_new_tokens=24)
    first, second = (
        generate(model, prompt, max_new_tokens=24, method="token_recycling") for _ in range(2)
    )
    assert first.tokens == second.tokens == plain.tokens
    assert second.stats.target_calls <= first.stats.target_calls
    out = generate(model, prompt, max_new_tokens=24, method="token_recycling", learn_prompt=True)
    assert out.tokens == plain.tokens
    known = per_model_state(model.session(), ("token_recycling", 8), lambda: AdjacencyMatrix(8))
    assert (known.rows[3] != NO_CANDIDATE).all()


def test_nothing_is_made_where_nothing_is_asked_for(model: Any) -> None:
    assert generate(model, [1], max_new_tokens=0, method="token_recycling").tokens == []
    assert len(generate(model, [1], max_new_tokens=1, method="token_recycling").tokens) == 1


def test_an_end_of_text_inside_a_block_ends_the_text() -> None:
    for eos in range(3):
        d = CARD.make(
            Request(
                Table(3),
                sampling=GREEDY,
                stop=StoppingCriteria(eos=frozenset({eos}), max_new_tokens=9),
            ),
            **SMALL,
        )
        d.extend([0])
        while not d.finished:
            d.step(Seeded(d.rounds))
        assert eos not in d.new[:-1]


def test_knobs_out_of_range_raise_a_one_line_error() -> None:
    with pytest.raises(TinyspecError, match="nodes is 0: it must be from 1 to 1024"):
        CARD.make(Request(Table(3)), nodes=0)


def test_the_oldest_state_of_a_technique_is_forgotten(model: Any) -> None:
    """A client of a server chooses the knobs, and each choice has a state of its own."""
    session = model.session()
    first = per_model_state(session, ("mine", 0), object)
    for k in range(1, MOST_STATES):
        per_model_state(session, ("mine", k), object)
    assert per_model_state(session, ("mine", 0), object) is first
    per_model_state(session, ("mine", MOST_STATES), object)
    assert per_model_state(session, ("mine", 0), object) is not first
