"""The paired bootstrap: the same draws for both arms, and scores of sums."""

import numpy as np
import pytest

from tinyspec.bench.bootstrap import (
    RESAMPLES,
    Lead,
    compare_bleu,
    draw_resamples,
    find_lead,
    score_resamples,
)
from tinyspec.training.bleu import corpus_bleu, count_ngrams

REFERENCES = ["the cat sat on the mat", "a dog ran to the house", "two cats and a dog slept"] * 4
GOOD = ["the cat sat on the mat", "a dog ran to the house", "two cats and the dog slept"] * 4
POOR = ["the cat sat on a mat", "the dog ran to a house", "two cats and the dog ran"] * 4


def counts(texts: list[str]) -> list[list[int]]:
    found = [count_ngrams([a], [b]) for a, b in zip(texts, REFERENCES, strict=True)]
    return [[*one.matches, *one.totals, one.reference_length] for one in found]


def test_the_first_row_is_all_units_and_the_others_are_as_many_draws() -> None:
    drawn = draw_resamples(7)
    assert drawn.shape == (RESAMPLES + 1, 7) and drawn[0].tolist() == [1.0] * 7
    assert set(drawn.sum(axis=1)) == {7.0} and (drawn[1:] != 1).any()
    assert np.array_equal(drawn, draw_resamples(7))  # both arms of a pair get the same draws
    # A unit is drawn once on average, with a variance of 1 - 1/n.
    assert drawn[1:].mean() == pytest.approx(1) and drawn[1:].var() == pytest.approx(6 / 7, abs=0.1)


def test_a_resample_is_scored_as_its_sentences_together() -> None:
    scores, drawn = score_resamples(counts(POOR)), draw_resamples(len(POOR))
    for row in (0, 1, 2, 9):
        chosen = [at for at, times in enumerate(drawn[row]) for _ in range(int(times))]
        expected = corpus_bleu([POOR[at] for at in chosen], [REFERENCES[at] for at in chosen])
        assert scores[row] == pytest.approx(expected.score, abs=1e-3)


def test_what_is_hard_for_both_cancels_in_a_pair() -> None:
    """Units differ much more than the arms do: only the pair shows a sure lead."""
    hard = np.arange(40) % 10
    mine, others = (draw_resamples(40) @ (hard + more) / 40 for more in (0.3, 0.0))
    paired = find_lead(mine, others)
    assert paired.lead == pytest.approx(0.3) and paired.verdict == "above"
    shuffled = np.concatenate((others[:1], np.roll(others[1:], 1)))
    assert find_lead(mine, shuffled).verdict == "no difference"


def test_the_interval_holds_nineteen_of_twenty_resamples() -> None:
    leads = np.concatenate(([0.0], np.arange(RESAMPLES, dtype=float)))
    found = find_lead(leads, np.zeros(RESAMPLES + 1))
    inside = (leads[1:] >= found.low) & (leads[1:] <= found.high)
    assert inside.mean() == pytest.approx(0.95, abs=0.002)
    assert found.low - 0 == pytest.approx(RESAMPLES - 1 - found.high)


def test_verdicts() -> None:
    better, same = (
        compare_bleu(counts(GOOD), counts(POOR)),
        compare_bleu(counts(GOOD), counts(GOOD)),
    )
    assert better.verdict == "above" and compare_bleu(counts(POOR), counts(GOOD)).verdict == "below"
    assert same == Lead(0, 0, 0) and same.verdict == "no difference"
