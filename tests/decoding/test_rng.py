"""Random sources: reproducible, split by role and round, and apart from global generators.

The probabilities of the outcomes that Exhaustive walks add up to one.
"""

import random
import subprocess
import sys
from fractions import Fraction as F

import numpy as np
import pytest
import torch

from tinyspec.decoding.rng import Exhaustive, Replay, Seeded
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
    assert len({float(rng.uniforms(1)[0]) for rng in others} | {float(one[0])}) == 5


def test_what_was_not_used_can_be_put_back():
    rng, plain = Seeded(1), Seeded(1).uniforms(200)
    rng.uniforms(15)
    block = rng.uniforms(30)
    rng.push_back(28)
    assert block.tolist() == plain[15:45].tolist()
    assert rng.uniforms(100).tolist() == plain[17:117].tolist()


@pytest.mark.parametrize("rng", [Seeded(0), Replay([0.5] * 9)])
def test_asking_one_key_twice_is_an_error(rng):
    rng.split("draft", 0)
    rng.split("draft", 1).split("draft", 0)
    with pytest.raises(TinyspecError, match="'draft' of round 0"):
        rng.split("draft", 0)


@pytest.mark.slow
def test_seeds_are_the_same_in_another_process():
    code = (
        "from tinyspec.decoding.rng import Seeded; print(Seeded(7).split('draft', "
        "2).uniforms(3).tolist())"
    )
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
    rng = Seeded(0)
    (
        rng.split("a", 0).draw(ROW),
        rng.exponential_race(ROW, 3),
        rng.sample_without_replacement(ROW, 2),
        rng.accept(0.5),
    )
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
    rng = Replay([0.1, 0.6, 0.9])
    assert rng.split("draft", 0).draw([F(1, 2), F(1, 2)]) == 0
    assert rng.split("verify", 0).uniforms(5).tolist() == [0.6, 0.9]
    rng.push_back(1)
    assert rng.left == 1
    assert rng.draw(ROW) == 3
    with pytest.raises(TinyspecError, match="used up"):
        rng.accept(0.5)


def test_races_share_noise_by_position_whoever_asks():
    rng = Seeded(2)
    wins = [rng.split("draft", i).exponential_race(ROW, i) for i in range(50)]
    assert wins == [rng.split("verify", i).exponential_race(ROW, i) for i in range(50)]
    assert set(wins) == {1, 2, 3}
    longer = np.append(ROW, 0.0)
    assert [Seeded(2).exponential_race(longer, i) for i in range(50)] == wins


@pytest.mark.parametrize("make", [lambda: Seeded(2), lambda: Replay(np.linspace(0, 1, 99))])
def test_the_draw_of_a_position_does_not_depend_on_the_round(make):
    by_rounds, at_once = make(), make()
    drawn = [by_rounds.split("verify", i // 3).draw_at(ROW, i) for i in range(0, 90, 3)]
    assert drawn == [at_once.draw_at(ROW, i) for i in range(0, 90, 3)]
    assert by_rounds.split("draft", 0).draw_at(ROW, 0) == drawn[0]


def test_positions_have_uniforms_of_their_own():
    rng = Seeded(5)
    inner = rng.split("draft", 0).split("verify", 0)  # a decoder that drafts in round 0
    uniforms = [source.uniform_at(i) for source in (rng, inner) for i in range(300)]
    assert len({*uniforms, *rng.uniforms(300)}) == 900
    assert abs(np.mean(uniforms) - 0.5) < 0.05
    assert [Seeded(5).uniform_at(i) for i in (299, 0, 64)] == [uniforms[i] for i in (299, 0, 64)]


def test_exhaustive_order_is_plackett_luce():
    row = [F(1, 2), F(1, 3), F(1, 6)]
    distribution = Exhaustive.distribution(
        lambda rng: tuple(rng.sample_without_replacement(row, 2))
    )
    assert distribution == {
        (a, b): row[a] * row[b] / (1 - row[a]) for a in range(3) for b in range(3) if a != b
    }
    assert Exhaustive.distribution(
        lambda rng: tuple(rng.sample_without_replacement([F(0), F(1)], 2))
    ) == {(1,): 1}


def test_exhaustive_walks_every_branch_once_and_none_of_probability_zero():
    def play(rng):
        inner = rng.split("draft", 0)
        return (
            inner.draw([F(0), F(1, 4), F(3, 4)]),
            rng.accept(F(1, 3)),
            rng.accept(0),
            rng.accept(2),
        )

    outcomes = list(Exhaustive.walk(play))
    assert len(outcomes) == 4 == len(dict(outcomes))
    assert sum(p for _, p in outcomes) == 1
    assert dict(outcomes)[2, True, False, True] == F(1, 4)


def test_what_exhaustive_cannot_enumerate_is_an_error():
    rng = next(Exhaustive.walk(lambda rng: rng))[0]
    assert rng.uniforms(3) is None
    with pytest.raises(TinyspecError, match="race"):
        rng.exponential_race(ROW, 0)
    hidden = iter([2, 1, 1, 1])
    with pytest.raises(TinyspecError, match="draw every random number from the given source"):
        list(Exhaustive.walk(lambda rng: rng.draw([F(1)] * next(hidden))))
