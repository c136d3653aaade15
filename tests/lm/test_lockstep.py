"""Translations in lockstep are those of the dense decoder under a causal mask."""

import pytest
import torch

from tinyspec.decoding.beam import greedy_search
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Lockstep, Seq2Seq
from tinyspec.training.bitext import BOS, EOS, pad_sequences

SOURCES = [[4, 5, 6, 7], [8], [9, 4, 9]]


@pytest.fixture
def model() -> Seq2Seq:
    config = Seq2SeqConfig(
        11, d_model=16, n_heads=2, d_ff=24, encoder_layers=2, decoder_layers=2, max_positions=12
    )
    return Seq2Seq.create(config, torch.Generator().manual_seed(3), torch.float64)


def test_every_step_is_the_dense_pass(model: Seq2Seq) -> None:
    memory = model.encode(pad_sequences(SOURCES))
    tokens = torch.randint(4, 11, (3, 6), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = BOS
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    dense = model.logits(model.decode(model.embed(tokens), memory, causal))
    rows = Lockstep(model, memory, 6)
    for at in range(6):
        torch.testing.assert_close(rows.step(tokens[:, at]), dense[:, at], rtol=0, atol=1e-10)
    with pytest.raises(TinyspecError, match="room for 6 tokens"):
        rows.step(tokens[:, 0])


def test_texts_that_are_selected_go_on_with_their_own_past_and_source(model: Seq2Seq) -> None:
    rows = Lockstep(model, model.encode(pad_sequences(SOURCES)), 6)
    rows.step(torch.tensor([BOS, BOS, BOS]))
    rows.step(torch.tensor([5, 6, 7]))
    rows.select(torch.tensor([2, 0, 2]))
    found = rows.step(torch.tensor([8, 8, 9]))
    for row, (source, tokens) in enumerate((([2], [7, 8]), ([0], [5, 8]), ([2], [7, 9]))):
        alone = Lockstep(model, model.encode(pad_sequences([SOURCES[source[0]]])), 6)
        for token in (BOS, *tokens):
            last = alone.step(torch.tensor([token]))
        torch.testing.assert_close(found[row], last[0], rtol=0, atol=1e-10)


def test_greedy_translations_together_are_those_one_by_one(model: Seq2Seq) -> None:
    together = greedy_search(
        Lockstep(model, model.encode(pad_sequences(SOURCES)), 9), BOS, EOS, [9, 5, 7]
    )
    for source, limit, text in zip(SOURCES, (9, 5, 7), together, strict=True):
        assert greedy_search(
            Lockstep(model, model.encode(pad_sequences([source])), 9), BOS, EOS, [limit]
        ) == [text]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_tokens_appended_together_see_each_other(model: Seq2Seq, count: int) -> None:
    """The dense pass has a mask of blocks: position t sees all before the end of its group."""
    memory = model.encode(pad_sequences(SOURCES))
    tokens = torch.randint(4, 11, (3, 12), generator=torch.Generator().manual_seed(0))
    group = torch.arange(12) // count
    dense = model.logits(model.decode(model.embed(tokens), memory, group[:, None] >= group))
    rows = Lockstep(model, memory, 12)
    for at in range(0, 12, count):
        found = rows.append(tokens[:, at : at + count])
        torch.testing.assert_close(found, dense[:, at : at + count], rtol=0, atol=1e-10)
    with pytest.raises(TinyspecError, match="room for 12 tokens"):
        rows.append(tokens[:, :count])
