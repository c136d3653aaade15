"""Learn then Test: exact risks, what is needed, losses of texts, one-line errors."""

from fractions import Fraction as F

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from tinyspec.early_exit.calibrate import (
    binomial_p_value,
    calibrate,
    hoeffding_p_value,
    least_examples,
    risk_loss,
    rouge_l,
    textual_loss,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    CALIBRATION_LAWS,
    EPSILON,
    binomial_probability,
    violation_probability,
)
from tinyspec.laws.museum import mutants
from tinyspec.laws.parts import PARTS


@pytest.mark.parametrize("law", CALIBRATION_LAWS)
def test_calibrate_obeys_its_law(law: str) -> None:
    assert CALIBRATION_LAWS[law](PARTS).cases > 0


def test_fixed_sequence_testing_errs_with_3_percent_and_testing_on_errs_with_38() -> None:
    """delta 0.1, epsilon 0.05; five safe candidates, then fifteen whose risk is 0.101: exact
    products of binomial tails.
    """
    n, delta, above = 400, F(1, 10), F(101, 1000)
    passing = max(k for k in range(60) if binomial_p_value(k, n, delta) <= EPSILON)
    rejected = sum(
        binomial_probability(k, n, above) for k in range(passing + 1)
    )  # a null that is true, and is rejected
    assert float(rejected) == pytest.approx(0.031, abs=5e-4) and rejected < EPSILON
    assert float(1 - (1 - rejected) ** 15) == pytest.approx(0.376, abs=5e-4)


def test_the_whole_procedure_errs_exactly_as_often_as_its_first_true_null_is_rejected() -> None:
    risks = (F(1, 10), F(51, 100), F(51, 100))
    safe, bad = F(9, 10) ** 5, F(49, 100) ** 5  # only five examples without a loss pass
    assert violation_probability(calibrate, risks)[0] == safe * bad
    goes_on = next(row for row in mutants() if row.name == "the testing goes on after a failure")
    with goes_on.applied():
        assert violation_probability(calibrate, risks)[0] == 1 - (1 - bad) ** 2 > EPSILON


def test_hoeffding_alone_would_not_tell_the_mutant_from_the_real_thing() -> None:
    """Why the logic is tested with binomial p-values: five examples never reach epsilon by
    Hoeffding at a half.
    """
    assert hoeffding_p_value(0, 5, F(1, 2)) > EPSILON
    assert CALIBRATED in CALIBRATION_LAWS


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.data())
def test_binomial_is_the_binomial_tail_and_never_above_hoeffdings(
    n: int, delta: float, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, n))
    assert binomial_p_value(k, n, delta) == pytest.approx(
        scipy.stats.binom.cdf(k, n, delta), abs=1e-9
    )
    assert binomial_p_value(k, n, delta) <= hoeffding_p_value(k, n, delta) + 1e-9


def test_the_fewest_examples_are_the_fewest() -> None:
    for p_value in (hoeffding_p_value, binomial_p_value):
        for delta, epsilon in ((0.1, 0.05), (0.05, 0.05), (0.3, 0.2), (0.9, 0.5)):
            n = least_examples(delta, epsilon, p_value)
            assert p_value(0, n, delta) <= epsilon < p_value(0, n - 1, delta) if n > 1 else n == 1


def test_too_few_examples_say_how_many_are_needed() -> None:
    with pytest.raises(
        TinyspecError,
        match=r"149 .* too few for delta 0.1 and epsilon 0.05: at least 150 are needed",
    ):
        calibrate([1.0], lambda candidate: [0.0] * 149, 0.1, 0.05)
    assert calibrate([1.0], lambda candidate: [0.0] * 150, 0.1, 0.05).choice == 1.0
    with pytest.raises(TinyspecError, match="0 calibration examples"):
        calibrate([1.0], lambda candidate: [], 0.1, 0.05)


def test_testing_stops_at_the_first_failure() -> None:
    asked = []

    def losses(candidate: float) -> list[float]:
        asked.append(candidate)
        return [0.0 if candidate > 0.8 else 1.0] * 200

    found = calibrate([1.0, 0.9, 0.8, 0.7], losses, 0.1, 0.05)
    assert (found.choice, asked) == (0.9, [1.0, 0.9, 0.8])
    assert [test.rejected for test in found.tested] == [True, True, False]
    assert calibrate([0.5], losses, 0.1, 0.05).choice is None


@pytest.mark.parametrize(
    ("delta", "epsilon"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 1.0), (-1, 0.1), (float("nan"), 0.1)]
)
def test_delta_and_epsilon_are_probabilities(delta: float, epsilon: float) -> None:
    with pytest.raises(
        TinyspecError, match=r"(delta|epsilon) is .*: it must be above 0 and below 1"
    ):
        calibrate([1.0], lambda candidate: [0.0] * 200, delta, epsilon)


@pytest.mark.parametrize("loss", [-0.5, 1.5, float("nan")])
def test_a_loss_outside_its_range_raises_an_error(loss: float) -> None:
    with pytest.raises(TinyspecError, match="loss is outside 0 to 1"):
        calibrate([1.0], lambda candidate: [0.0] * 200 + [loss], 0.1, 0.05)


@given(st.lists(st.integers(0, 3), max_size=7), st.lists(st.integers(0, 3), max_size=7))
def test_rouge_l_is_the_longest_common_subsequence(one: list[int], other: list[int]) -> None:
    def longest(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        if not (a and b):
            return 0
        if a[0] == b[0]:
            return 1 + longest(a[1:], b[1:])
        return max(longest(a[1:], b), longest(a, b[1:]))

    if one or other:
        assert rouge_l(one, other) == pytest.approx(
            2 * longest(tuple(one), tuple(other)) / (len(one) + len(other))
        )
    assert rouge_l(one, other) == rouge_l(other, one)
    assert 0 <= textual_loss(one, other) <= 1 and textual_loss(one, one) == 0


def test_risk_consistency_counts_only_what_is_worse_than_the_full_model() -> None:
    reference = [1, 2, 3, 4]
    assert risk_loss([1, 2, 3, 4], [1, 2, 9, 9], reference) == 0
    assert risk_loss([9, 9, 9, 9], [1, 2, 3, 4], reference) == 1
    assert risk_loss([1, 2, 9, 9], [1, 2, 9, 9], reference) == 0
