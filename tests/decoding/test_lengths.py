"""Three laws of a translation's length, and the lengths that are tried."""

import math
from itertools import product

import pytest
import torch

from tinyspec.decoding.lengths import beam, by_difference, by_fertility, by_token, difference
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig


def test_the_sum_of_fertilities_has_the_enumerated_law() -> None:
    law = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = law / law.sum(dim=-1, keepdim=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    got = by_fertility(law, mask).exp()
    for row, words in ((0, 3), (1, 2)):
        expected = [0.0] * 10
        for counts in product(range(4), repeat=words):
            expected[sum(counts)] += math.prod(
                float(law[row, word, count]) for word, count in enumerate(counts)
            )
        expected[0] = 0  # nobody translates into nothing
        assert got[row].tolist() == pytest.approx([p / sum(expected) for p in expected], abs=1e-12)


def test_the_length_token_tells_no_empty_translation() -> None:
    config = Seq2SeqConfig(8, 8, 2, 8, encoder_layers=1, decoder_layers=1, lengths=6)
    model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
    law = by_token(model, model.encode(torch.tensor([[4, 5], [6, 0]]))).exp()
    assert law[:, 0].tolist() == [0, 0]
    assert law.sum(dim=1).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_differences_are_lengths_once_the_source_is_known() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])  # two shorter .. two longer
    law = by_difference(logits.expand(3, -1), torch.tensor([1, 3, 6]), 7)
    weights = logits[0].exp()
    for row, (first, lengths) in enumerate(
        [(2, (1, 2, 3)), (0, (1, 2, 3, 4, 5)), (0, (4, 5, 6, 7))]
    ):
        kept = weights[first : first + len(lengths)]
        expected = torch.zeros(8)
        expected[list(lengths)] = kept / kept.sum()
        torch.testing.assert_close(law[row].exp(), expected)
    assert difference(torch.tensor([5, 5, 5]), torch.tensor([4, 9, 1]), 2).tolist() == [1, 4, 0]


def test_the_beam_holds_the_likeliest_first_and_the_shorter_of_equals() -> None:
    law = torch.tensor([[0.0, 0.3, 0.4, 0.3], [0.0, 0.25, 0.25, 0.5]]).log()
    assert beam(law, 2) == [[2, 1], [3, 1]]
    assert beam(law, 99) == [[2, 1, 3], [3, 1, 2]]  # length 0 is none


def test_wider_beams_contain_the_narrower() -> None:
    law = torch.rand(5, 20, generator=torch.Generator().manual_seed(1)).log()
    for narrow, wide in zip(beam(law, 3), beam(law, 8), strict=True):
        assert wide[:3] == narrow


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(TinyspecError, match="at least one"):
        beam(torch.zeros(1, 3), 0)
    with pytest.raises(TinyspecError, match="train it anew"):
        beam(torch.full((1, 3), -torch.inf), 1)
