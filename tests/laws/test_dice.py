"""The stand-ins for random generators: every way to draw has its exact distribution.

What cannot be enumerated is an error.
"""

from collections.abc import Callable
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.laws.checking.generators import EnumeratedGenerator, replace_torch_generators
from tinyspec.laws.checking.uniforms import LazyUniform, NotEnumerable, UniformSpan

# ---------------------------------------------------------------------- uniforms that are not drawn

LAW = (
    st.lists(st.integers(0, 4), min_size=2, max_size=4)
    .filter(any)
    .map(lambda w: [F(x, sum(w)) for x in w])
)


def outcomes(function: Callable[[EnumeratedGenerator], Any]) -> dict[Any, Any]:
    return Exhaustive.distribution(lambda source: function(EnumeratedGenerator(source)))


INVERSIONS = {
    "searchsorted": lambda row, rng: int(
        np.searchsorted(np.cumsum(row), rng.random(), side="right")
    ),
    "argmax": lambda row, rng: int(np.argmax(np.cumsum(row) > rng.random())),
    "loop": lambda row, rng: loop(row, rng.random()),
    "scaled": lambda row, rng: loop([3 * x for x in row], 3 * rng.random()),
    "shifted": lambda row, rng: loop(row, rng.uniform(1, 2) - 1),
    "from above": lambda row, rng: loop(row, 1 - rng.random()),
    "choice": lambda row, rng: rng.choice(len(row), p=row),
    "choices": lambda row, rng: rng.choices(range(len(row)), weights=row)[0],
    "multinomial": lambda row, rng: int(np.argmax(rng.multinomial(1, row))),
    "binomial": lambda row, rng: next(
        t for t, x in enumerate(row) if rng.binomial(1, x / sum(row[t:]))
    ),
}


def loop(row: Any, u: Any) -> int:
    reached = 0
    for token, x in enumerate(row):
        reached += x
        if u < reached:
            return token
    raise AssertionError("u lies in [0, 1)")


@pytest.mark.parametrize("way", INVERSIONS)
@given(LAW)
@settings(max_examples=20)
def test_every_way_to_draw_from_a_distribution_follows_it(way: str, row: list[F]) -> None:
    law = outcomes(lambda rng: INVERSIONS[way](row, rng))
    assert law == {token: x for token, x in enumerate(row) if x}


@given(st.lists(st.fractions(0, 1, max_denominator=5), min_size=1, max_size=4))
@settings(max_examples=40)
def test_one_uniform_answers_consistently(cuts: list[F]) -> None:
    """Its answers are those of one point: monotone in the cut, each with the right probability."""
    law = outcomes(lambda rng: (lambda u: tuple(u < cut for cut in cuts))(rng.random()))
    assert sum(law.values()) == 1
    for place, cut in enumerate(cuts):
        assert sum(mass for answers, mass in law.items() if answers[place]) == cut
    for answers in law:
        assert all(
            answers[i] <= answers[j]
            for i, a in enumerate(cuts)
            for j, b in enumerate(cuts)
            if a <= b
        )


def test_uniforms_as_integers_logarithms_and_arrays() -> None:
    third = F(1, 3)
    assert outcomes(lambda rng: int(3 * rng.random())) == {0: third, 1: third, 2: third}
    assert outcomes(lambda rng: rng.integers(1, 4)) == {1: third, 2: third, 3: third}
    law = outcomes(lambda rng: bool(np.log(rng.random()) < np.log(0.25)))
    assert law[True] == pytest.approx(0.25)
    law = outcomes(lambda rng: tuple((rng.random((2,)) < np.array([0.5, 0.25])).tolist()))
    assert law == pytest.approx(
        {(True, True): 1 / 8, (True, False): 3 / 8, (False, True): 1 / 8, (False, False): 3 / 8}
    )
    assert outcomes(lambda rng: tuple(rng.choice(3, 2, replace=False, p=[third] * 3).tolist())) == {
        (a, b): F(1, 6) for a in range(3) for b in range(3) if a != b
    }


def test_the_same_seed_gives_the_same_noise_and_another_one_does_not() -> None:
    def seeded(first: Any, second: Any) -> Callable[[EnumeratedGenerator], Any]:
        return lambda rng: tuple(
            bool(rng.generator(seed).random() < F(1, 2)) for seed in (first, second)
        )

    assert outcomes(seeded(0, 0)) == {(True, True): F(1, 2), (False, False): F(1, 2)}
    assert len(outcomes(seeded(0, 1))) == len(outcomes(seeded(None, None))) == 4


def test_a_pinned_uniform_is_zero_and_may_meet_its_boundary() -> None:
    def ask(source: Exhaustive) -> Any:
        u = LazyUniform(UniformSpan(source, pinned=True))
        return u < 0, u <= 0, u > 0, u >= 0, u == 0, 1 - u <= 1, u + 1 < 1, int(5 * u)

    assert Exhaustive.distribution(ask) == {(False, True, False, True, True, True, False, 0): 1}


def test_nan_is_neither_above_nor_below() -> None:
    assert outcomes(
        lambda rng: (lambda u: (u < np.nan, u > np.nan, u <= np.nan, u >= np.nan))(rng.random())
    ) == {(False,) * 4: 1}


@pytest.mark.parametrize(
    "use", [float, lambda u: u + u, lambda u: [0, 1][u], lambda u: u and 1, round]
)
def test_the_value_of_a_uniform_is_not_to_be_had(use: Callable[[Any], Any]) -> None:
    with pytest.raises(NotEnumerable):
        outcomes(lambda rng: use(rng.random()))


HALF = torch.tensor([0.5, 0.5], dtype=torch.float64)
ASKED_IN_TORCH: dict[str, Callable[[], Any]] = {
    "less": lambda: torch.rand(2) < HALF,
    "mirrored": lambda: HALF > torch.rand_like(HALF),  # noqa: SIM300
    "function": lambda: torch.lt(torch.rand(2), HALF),
    "mirrored function": lambda: torch.ge(HALF, torch.rand((2,))),
    "scaled": lambda: 2 * torch.rand(2) + 1 < 2 * torch.ones(2),
    "from above": lambda: (1 - torch.rand(2)) / 2 <= HALF / 2,
    "tensor minus": lambda: HALF - torch.rand(size=(2,)) > torch.zeros(2),
    "logarithms": lambda: torch.log(torch.rand(2)) < HALF.log(),
    "one by one": lambda: torch.tensor([bool(torch.rand(1)[0] < x) for x in HALF]),
    "items": lambda: torch.tensor([torch.rand(1, device="cpu").item() < x for x in HALF.tolist()]),
    "shapes": lambda: (torch.rand(1, 2).squeeze(0).to("cpu").view(2).unsqueeze(0) < HALF)[0],
    "searchsorted": lambda: torch.searchsorted(HALF.cumsum(0), torch.rand(2), right=True) == 0,
    "multinomial": lambda: torch.multinomial(HALF, 2, replacement=True) == 0,
    "method": lambda: HALF.expand(2, 2).multinomial(1).squeeze(1) == 0,
    "categorical": lambda: torch.distributions.Categorical(probs=HALF.expand(2, 2)).sample() == 0,
}


def in_torch(function: Callable[[], Any]) -> dict[Any, Any]:
    def run(source: Exhaustive) -> Any:
        with replace_torch_generators(EnumeratedGenerator(source)):
            return tuple(bool(x) for x in function())

    return Exhaustive.distribution(run)


@pytest.mark.parametrize("way", ASKED_IN_TORCH)
def test_every_way_to_ask_torch_for_two_fair_coins(way: str) -> None:
    assert in_torch(ASKED_IN_TORCH[way]) == pytest.approx(
        {(a, b): 0.25 for a in (True, False) for b in (True, False)}
    )


def test_torch_reseeded_gives_the_same_noise_and_what_cannot_be_asked_is_an_error() -> None:
    def reseeded() -> Any:
        return [torch.manual_seed(0) or torch.rand(1) < 0.5 for _ in range(2)]

    assert in_torch(reseeded) == {(True, True): 0.5, (False, False): 0.5}
    refused: list[Callable[[], Any]] = [
        lambda: torch.randn(2),
        lambda: HALF.clone().exponential_(),
        lambda: torch.argmax(torch.rand(2)),
        lambda: float(torch.rand(1)),
        lambda: HALF / torch.rand(2) > 1,
        lambda: torch.rand(2) < torch.rand(2),
    ]
    for function in refused:
        with pytest.raises(NotEnumerable):
            in_torch(function)
    for row in ([0.0, 0.0], [float("nan"), 1.0], [-0.5, 1.5]):
        with pytest.raises(RuntimeError, match="probability tensor"):
            in_torch(lambda row=row: torch.multinomial(torch.tensor(row), 1))  # type: ignore[misc]
