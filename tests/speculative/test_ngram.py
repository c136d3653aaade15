"""Katz's back-off model: its distribution by definition, and its likeliest token.

Both follow from the text that it counted.
"""

from fractions import Fraction as F

from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA, model
from tinyspec.laws.exact.tables import TableModel
from tinyspec.speculative.ngram import KatzModel, sample_unconditionally

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=3)
CONTEXT = st.lists(st.integers(0, 3), max_size=4)


@given(TEXTS, CONTEXT, st.integers(1, 4))
def test_distribution_sums_to_one_and_unseen_tokens_are_possible(
    texts: list[list[int]], context: list[int], order: int
) -> None:
    katz = KatzModel(texts, order, 4)
    row = [katz.prob(token, context) for token in range(4)]
    assert sum(row) == 1
    assert min(row) > 0


@given(TEXTS, CONTEXT, st.integers(2, 4))
def test_most_likely_token_is_the_lowest_argmax(
    texts: list[list[int]], context: list[int], order: int
) -> None:
    katz = KatzModel(texts, order, 4)
    row = [katz.prob(token, context) for token in range(4)]
    found = katz.most_likely(context)
    continued = bool(context) and any(context[-1] in text[:-1] for text in texts)
    assert found == (row.index(max(row)) if continued else None)


def test_a_worked_example() -> None:
    """1 was followed by 2 twice and by 0 once: a half is taken from both counts, and token 3 gets
    the freed third.
    """
    katz = KatzModel([[1, 2, 1, 2, 1, 0]], 2, 4)
    assert [katz.prob(token, [1]) for token in (2, 0)] == [F(1, 2), F(1, 6)]
    assert katz.prob(1, [1]) + katz.prob(3, [1]) == F(1, 3)
    assert katz.prob(1, [1]) > katz.prob(
        3, [1]
    )  # shared out as the shorter context would: 1 was seen, 3 never


def test_an_unseen_context_is_judged_by_its_end() -> None:
    katz = KatzModel([[1, 2, 3, 1, 2, 0]], 3, 4)
    assert [katz.prob(t, [0, 2]) for t in range(4)] == [katz.prob(t, [2]) for t in range(4)]


def test_what_a_model_says_of_itself_is_reproducible_and_as_long_as_asked() -> None:
    for small in (TableModel(3), model(LLAMA, seed=1)):
        texts = sample_unconditionally(small, 50)
        assert sum(len(text) - 1 for text in texts) == 50
        assert (
            texts == sample_unconditionally(small, 50) != sample_unconditionally(small, 50, seed=1)
        )
    assert sample_unconditionally(TableModel(3), 0) == []
