"""TETRIS: the rows of a pass go to the draft tokens that are likeliest to be accepted."""

import pytest

from tests.speculative.batches import decode_batch, texts_of, verified_of
from tinyspec.laws.traps import tetris as traps
from tinyspec.speculative.integrated.tetris import share_capacity
from tinyspec.technique import find_technique


def test_trap_no_other_choice_is_likelier_to_be_accepted() -> None:
    assert traps.likeliest_are_verified(share_capacity).cases == 3


def test_trap_whether_a_token_is_verified_is_known_before_it_is_drawn() -> None:
    assert traps.kept_before_it_is_drawn(find_technique("tetris").make).cases == 12


@pytest.mark.parametrize("capacity", range(6))
def test_what_is_verified_of_a_draft_is_its_beginning(capacity: int) -> None:
    verified = share_capacity({0: [0.2, 1.0, 1.0], 1: [0.9, 0.1]}, capacity)
    ranked = [1, 0, 0, 0, 1]  # 0.9, 0.2 three times, 0.09
    assert verified == {n: ranked[:capacity].count(n) for n in (0, 1)}


def test_no_pass_verifies_more_than_the_capacity() -> None:
    rounds, log = decode_batch("tetris", gamma=5, verified=2)
    passes = verified_of(log)
    assert all(sum(rows) <= 2 * len(rows) for rows in passes)
    assert any(len(set(rows)) > 1 for rows in passes)  # not an equal share
    assert texts_of(rounds) == texts_of(decode_batch("autoregressive")[0])


def test_a_request_alone_verifies_what_its_capacity_holds() -> None:
    _, log = decode_batch("tetris", [[1, 2, 3]], gamma=5, verified=2)
    assert {rows for (rows,) in verified_of(log)[:-2]} == {2}
