"""Katz's back-off model: its distribution by definition, its likeliest token, and its text.

The text is a model's own sampling run, which the cache keeps.
"""

import json
from collections.abc import Sequence
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import LLAMA, model
from tests.zoo import run
from tinyspec import models
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.speculative import ngram
from tinyspec.speculative.ngram import (
    KatzModel,
    batch_tokens,
    has_exact_rows,
    own_texts_folder,
    read_own_texts,
    sample_unconditionally,
)

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=3)
CONTEXT = st.lists(st.integers(0, 3), max_size=4)


def katz_prob(texts: list[list[int]], context: Sequence[int], token: int, order: int) -> F:
    """Katz's formula, a token at a time."""
    context = tuple(context[max(len(context) - order + 1, 0) :])
    after = [
        text[at + len(context)]
        for text in texts
        for at in range(len(text) - len(context))
        if tuple(text[at : at + len(context)]) == context
    ]
    shorter = [katz_prob(texts, context[1:], x, order) if context else F(1, 4) for x in range(4)]
    if not after:
        return shorter[token]
    discount = F(1, 2) if len(set(after)) < 4 else 0
    if token in after:
        return (after.count(token) - discount) / F(len(after))
    free = discount * len(set(after)) / F(len(after))
    return free * shorter[token] / sum(shorter[x] for x in range(4) if x not in after)


@given(TEXTS, CONTEXT, st.integers(1, 4))
def test_distribution_is_katzs_formula(
    texts: list[list[int]], context: list[int], order: int
) -> None:
    expected = [katz_prob(texts, context, token, order) for token in range(4)]
    assert KatzModel(texts, order, 4, exact=True).probs(context).tolist() == expected
    assert np.allclose(KatzModel(texts, order, 4).probs(context), [float(x) for x in expected])


@given(TEXTS, CONTEXT, st.integers(1, 4))
def test_distribution_sums_to_one_and_unseen_tokens_are_possible(
    texts: list[list[int]], context: list[int], order: int
) -> None:
    row = KatzModel(texts, order, 4, exact=True).probs(context)
    assert sum(row) == 1
    assert min(row) > 0


@given(TEXTS, CONTEXT, st.integers(2, 4))
def test_most_likely_token_is_the_lowest_argmax(
    texts: list[list[int]], context: list[int], order: int
) -> None:
    katz = KatzModel(texts, order, 4, exact=True)
    row = katz.probs(context).tolist()
    continued = bool(context) and any(context[-1] in text[:-1] for text in texts)
    assert katz.most_likely(context) == (row.index(max(row)) if continued else None)


def test_a_worked_example() -> None:
    """1 was followed by 2 twice and by 0 once: a half is taken from both counts, and tokens 1 and 3
    get the freed third.
    """
    row = KatzModel([[1, 2, 1, 2, 1, 0]], 2, 4, exact=True).probs([1])
    assert [row[2], row[0]] == [F(1, 2), F(1, 6)]
    assert row[1] + row[3] == F(1, 3)
    assert row[1] > row[3]  # shared out as the shorter context would: 1 was seen, 3 never


def test_an_unseen_context_is_judged_by_its_end() -> None:
    katz = KatzModel([[1, 2, 3, 1, 2, 0]], 3, 4)
    assert katz.probs([0, 2]).tolist() == katz.probs([2]).tolist()


@pytest.mark.parametrize(
    ("small", "exact"),
    [(TableModel(3), True), (TableModel(3, floats=True), False), (model(LLAMA), False)],
    ids=["table", "table of floats", "model"],
)
def test_logits_give_the_distribution_in_the_numbers_of_the_model(small: Any, exact: bool) -> None:
    assert has_exact_rows(small) is exact
    katz = KatzModel([[1, 2, 1, 0]], 2, 4, exact)
    row = SamplingParams().probs(katz.logits([1]))
    assert isinstance(row[0], F) is exact
    assert np.allclose([float(x) for x in row], [float(x) for x in katz.probs([1])])


# ------------------------------ a model's own sampling run


def count_tokens(texts: list[list[int]]) -> int:
    return sum(len(text) - 1 for text in texts)


def test_what_a_model_says_of_itself_is_reproducible_and_as_long_as_asked() -> None:
    for small in (TableModel(3), model(LLAMA, seed=1)):
        texts = sample_unconditionally(small, 50)
        assert count_tokens(texts) == 50
        assert (
            texts == sample_unconditionally(small, 50) != sample_unconditionally(small, 50, seed=1)
        )
    assert sample_unconditionally(TableModel(3), 0) == []


def test_a_run_longer_than_a_batch_goes_on_with_other_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "TEXT_LENGTH", 6)
    texts = sample_unconditionally(TableModel(3), 300)
    assert (batch_tokens(TableModel(3)), len(texts), count_tokens(texts)) == (192, 64, 300)
    assert texts[:32] != texts[32:]
    assert max(map(len, texts)) == 7


@pytest.fixture
def short_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in a folder, and a cache: 5 tokens are a text, 160 a batch and sampled at once."""
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ngram, "TEXT_LENGTH", 5)
    monkeypatch.setattr(ngram, "AT_ONCE", 160)
    model(LLAMA, seed=1).save(tmp_path / "small")
    return str(tmp_path / "small")


def test_the_command_keeps_the_run_that_would_be_sampled(short_runs: str) -> None:
    done = run("train", "ngrams", "--draft", short_runs, "--tokens", "400", "--quiet")
    small = models.load(short_runs)
    assert done.stdout == f"{own_texts_folder(small)}: 480 tokens\n"
    for tokens in (161, 320, 333, 480):
        assert read_own_texts(small, tokens) == sample_unconditionally(small, tokens)


def test_an_interrupted_run_goes_on_and_a_longer_one_too(
    short_runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sampled = ngram.sample_batch, list[int]()

    def sample(small: object, number: int, tokens: int) -> list[list[int]]:
        if number == 2 and not sampled.count(2):
            sampled.append(2)
            raise KeyboardInterrupt
        sampled.append(number)
        return real(small, number, tokens)

    monkeypatch.setattr(ngram, "sample_batch", sample)
    command = ("train", "ngrams", "--draft", short_runs, "--quiet", "--tokens")
    assert run(*command, "480").exit_code
    assert run(*command, "480").stdout.endswith(": 480 tokens\n")
    assert run(*command, "500").stdout.endswith(": 640 tokens\n")
    assert sampled == [0, 1, 2, 2, 3]


def test_a_run_that_is_too_short_names_the_command_that_goes_on(short_runs: str) -> None:
    small = models.load(short_runs)
    assert read_own_texts(small, 160) == sample_unconditionally(small, 160)
    with pytest.raises(TinyspecError, match=r"^0 tokens .* --draft small --tokens 161`$"):
        read_own_texts(small, 161)
    run("train", "ngrams", "--draft", short_runs, "--tokens", "161", "--quiet")
    with pytest.raises(TinyspecError, match=r"^320 tokens .* 321 are to be counted: run `tiny"):
        read_own_texts(small, 321)


def test_a_run_belongs_to_the_weights_and_not_to_their_type(short_runs: str) -> None:
    small = models.load(short_runs)
    other = model(LLAMA, seed=2)
    other.name = small.name
    assert own_texts_folder(small) != own_texts_folder(other)
    wider = models.load(short_runs, dtype="float64")
    assert own_texts_folder(small) == own_texts_folder(wider)


def test_a_damaged_file_is_named(short_runs: str) -> None:
    run("train", "ngrams", "--draft", short_runs, "--tokens", "320", "--quiet")
    small = models.load(short_runs)
    file = own_texts_folder(small) / "00001.json"
    file.write_text(json.dumps([[0, 1]])[:-1])
    with pytest.raises(TinyspecError, match=r"00001.json: damaged; delete it"):
        read_own_texts(small, 320)
