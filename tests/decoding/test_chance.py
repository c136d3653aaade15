"""Chance: reproducible, split by role and round, global state untouched; Exhaustive adds up to one."""

import random
import subprocess
import sys
from fractions import Fraction as F

import numpy as np
import pytest
import torch

from tinyspec.decoding.chance import Exhaustive, Replay, Seeded
from tinyspec.errors import TinyspecError

ROW = np.array([0.0, 0.25, 0.5, 0.25])


def test_a_stream_depends_on_its_key_alone():
    first, second = Seeded(3), Seeded(3)
    second.split("verify", 0).draw(ROW)
    one = first.split("draft", 5).split("inner", 1).uniforms(40)
    two = second.split("draft", 5).split("inner", 1)
    assert one.tolist() == [*two.uniforms(3), *[two._next() for _ in range(20)], *two.uniforms(17)]
    others = [
        Seeded(4).split("draft", 5),
        Seeded(3).split("draft", 6),
        Seeded(3).split("verify", 5),
        Seeded(3),
    ]
    assert len({float(chance.uniforms(1)[0]) for chance in others} | {float(one[0])}) == 5


def test_what_was_not_used_can_be_put_back():
    chance, plain = Seeded(1), Seeded(1).uniforms(200)
    chance.uniforms(15)
    block = chance.uniforms(30)
    chance.unread(28)
    assert block.tolist() == plain[15:45].tolist()
    assert chance.uniforms(100).tolist() == plain[17:117].tolist()


@pytest.mark.parametrize("chance", [Seeded(0), Replay([0.5] * 9)])
def test_asking_one_key_twice_is_an_error(chance):
    chance.split("draft", 0)
    chance.split("draft", 1).split("draft", 0)
    with pytest.raises(TinyspecError, match="'draft' of round 0"):
        chance.split("draft", 0)


def test_seeds_are_the_same_in_another_process():
    code = "from tinyspec.decoding.chance import Seeded; print(Seeded(7).split('draft', 2).uniforms(3).tolist())"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str(Seeded(7).split("draft", 2).uniforms(3).tolist())


def test_global_generators_are_untouched():
    before = (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.random.get_rng_state().tolist(),
    )
    chance = Seeded(0)
    chance.split("a", 0).draw(ROW), chance.race(ROW, 3), chance.order(ROW, 2), chance.accept(0.5)
    after = (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.random.get_rng_state().tolist(),
    )
    assert before == after


def test_a_ratio_of_zero_is_never_accepted_and_one_always():
    assert not Replay([0.0]).accept(0.0)
    assert not Replay([0.5]).accept(0.5)
    assert Replay([1 - 2**-53]).accept(1.0)


def test_a_replay_is_shared_by_its_splits_and_ends_with_a_sentence():
    chance = Replay([0.1, 0.6, 0.9])
    assert chance.split("draft", 0).draw([F(1, 2), F(1, 2)]) == 0
    assert chance.split("verify", 0).uniforms(5).tolist() == [0.6, 0.9]
    chance.unread(1)
    assert chance.left == 1
    assert chance.draw(ROW) == 3
    with pytest.raises(TinyspecError, match="used up"):
        chance.accept(0.5)


def test_races_share_noise_by_position_whoever_asks():
    chance = Seeded(2)
    wins = [chance.split("draft", i).race(ROW, i) for i in range(50)]
    assert wins == [chance.split("verify", i).race(ROW, i) for i in range(50)]
    assert set(wins) == {1, 2, 3}
    longer = np.append(ROW, 0.0)
    assert [Seeded(2).race(longer, i) for i in range(50)] == wins


def test_exhaustive_order_is_plackett_luce():
    row = [F(1, 2), F(1, 3), F(1, 6)]
    law = Exhaustive.law(lambda chance: tuple(chance.order(row, 2)))
    assert law == {
        (a, b): row[a] * row[b] / (1 - row[a]) for a in range(3) for b in range(3) if a != b
    }
    assert Exhaustive.law(lambda chance: tuple(chance.order([F(0), F(1)], 2))) == {(1,): 1}


def test_exhaustive_walks_every_branch_once_and_none_of_probability_zero():
    def play(chance):
        inner = chance.split("draft", 0)
        return (
            inner.draw([F(0), F(1, 4), F(3, 4)]),
            chance.accept(F(1, 3)),
            chance.accept(0),
            chance.accept(2),
        )

    outcomes = list(Exhaustive.walk(play))
    assert len(outcomes) == 4 == len(dict(outcomes))
    assert sum(p for _, p in outcomes) == 1
    assert dict(outcomes)[2, True, False, True] == F(1, 4)


def test_exhaustive_refuses_what_it_cannot_enumerate():
    chance = next(Exhaustive.walk(lambda chance: chance))[0]
    assert chance.uniforms(3) is None
    with pytest.raises(TinyspecError, match="race"):
        chance.race(ROW, 0)
    hidden = iter([2, 1, 1, 1])
    with pytest.raises(TinyspecError, match="randomness of its own"):
        list(Exhaustive.walk(lambda chance: chance.draw([F(1)] * next(hidden))))
