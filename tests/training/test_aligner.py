"""EM loses no likelihood, finds known alignments, and computes on whole arrays."""

import math
import sys
from collections import Counter
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tinyspec.errors import TinyspecError
from tinyspec.training import aligner
from tinyspec.training.aligner import align_words, count_fertilities
from tinyspec.training.dialects import Dialects


def corpus(kinds: tuple[str, ...], modes: int, count: int = 1500) -> tuple[list, list, list]:
    pairs = Dialects(kinds, modes).sample_pairs(count, seed=1)
    return [p.source for p in pairs], [p.target for p in pairs], [p.alignment for p in pairs]


@pytest.mark.parametrize(("rounds", "placed"), [(8, 0), (0, 8), (5, 5)])
def test_em_never_loses_likelihood(rounds: int, placed: int) -> None:
    random = np.random.default_rng(0)
    source = [random.integers(0, 9, random.integers(1, 7)).tolist() for _ in range(200)]
    target = [random.integers(0, 7, random.integers(1, 7)).tolist() for _ in range(200)]
    likelihood = align_words(source, target, model1_rounds=rounds, model2_rounds=placed).likelihood
    assert len(likelihood) == rounds + placed + 1
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(likelihood))
    assert likelihood[-1] > likelihood[0]


def test_model_1_is_what_brute_force_says() -> None:
    """One round by plain loops on a corpus of three pairs, NULL included."""
    source, target = [[1, 2], [1, 3], [2]], [[7, 8], [9, 7], [8, 8]]
    beside = {
        s: {t for x, y in zip(source, target, strict=True) for t in y if s in (-1, *x)}
        for s in (-1, 1, 2, 3)
    }
    probs = {(s, t): 1 / len(beside[s]) for s in beside for t in beside[s]}
    counts = Counter[tuple[int, int]]()
    likelihood = 0.0
    for x, y in zip(source, target, strict=True):
        for t in y:
            mass = sum(probs[s, t] for s in (-1, *x))
            likelihood += math.log(mass / (len(x) + 1))
            for s in (-1, *x):
                counts[s, t] += probs[s, t] / mass
    aligned = align_words(source, target, model1_rounds=1, model2_rounds=0)
    assert aligned.likelihood[0] == pytest.approx(likelihood)
    for (s, t), p in aligned.lexicon.items():
        assert p == pytest.approx(
            counts[s, t] / sum(n for (other, _), n in counts.items() if other == s)
        )


@pytest.mark.parametrize(
    ("kinds", "modes"), [(("lex",), 4), (("ord",), 3), (("fert",), 2), (("lex", "ord", "fert"), 3)]
)
def test_more_than_95_in_100_known_alignments_are_found(kinds: tuple[str, ...], modes: int) -> None:
    source, target, truth = corpus(kinds, modes)
    links = align_words(source, target).links
    right = sum(
        int((link == np.array(known)).sum()) for link, known in zip(links, truth, strict=True)
    )
    assert right > 0.95 * sum(map(len, truth))


def test_places_settle_what_words_cannot() -> None:
    """A word that occurs twice in a source is aligned rightly by model 2 alone."""
    source = [[1, 2, 1], [2], [3, 4], [4, 5, 6], [5, 3]] * 5
    target = [[7, 8, 7], [8], [9, 10], [10, 11, 12], [11, 9]] * 5
    assert align_words(source, target, model2_rounds=0).links[0].tolist() == [0, 1, 0]
    assert align_words(source, target).links[0].tolist() == [0, 1, 2]


def test_fertilities_add_up_to_the_targets_length() -> None:
    source, target, truth = corpus(("fert",), 2, 300)
    for x, y, link, known in zip(
        source, target, align_words(source, target).links, truth, strict=True
    ):
        assert count_fertilities(link, len(x)).sum() == len(y) and len(
            count_fertilities(known, len(x))
        ) == len(x)
        assert count_fertilities(link, len(x), most=2).max() <= 2 and count_fertilities(
            link, len(x), most=2
        ).sum() == len(y)


def count_lines(pairs: int, rounds: int) -> int:
    """Return how many lines of the aligner Python executes for a corpus of so many pairs."""
    random = np.random.default_rng(0)
    source = [(random.zipf(1.3, 12) % 9000).tolist() for _ in range(pairs)]
    target = [(random.zipf(1.3, 12) % 9000).tolist() for _ in range(pairs)]
    executed, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace if frame.f_code.co_filename == aligner.__file__ else None

    sys.settrace(trace)
    try:
        align_words(source, target, model1_rounds=rounds, model2_rounds=rounds)
    finally:
        sys.settrace(before)
    return executed


def test_a_round_of_em_has_no_loop_over_the_corpus() -> None:
    """So 29,000 pairs of 12 words, five million links, are a matter of array operations."""
    small, large = (count_lines(pairs, 3) - count_lines(pairs, 2) for pairs in (5, 500))
    assert 0 < small == large


def test_bad_input_is_named() -> None:
    with pytest.raises(TinyspecError, match="sentence pair 1 has an empty side"):
        align_words([[1], []], [[2], [3]])
    with pytest.raises(TinyspecError, match="must be pairs"):
        align_words([[1], [2]], [[2]])
    with pytest.raises(TinyspecError, match="more than 2 for each"):
        count_fertilities([0, 0, 0], 1, most=2)
