"""A further decoder stack has weights of its own, and reads the source as the decoder does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.tree import TokenTree

PLAIN = Seq2SeqConfig(11, 16, 2, 24, encoder_layers=1, decoder_layers=1, max_positions=12)
CONFIG = replace(PLAIN, stacks={"parse": 1, "refiner": 2})
SOURCE, TARGET = torch.tensor([[4, 5, 6], [7, 8, 0]]), torch.tensor([[9, 4, 5, 5], [6, 6, 7, 10]])


def create(config: Seq2SeqConfig = CONFIG) -> Seq2Seq:
    return Seq2Seq.create(config, torch.Generator().manual_seed(1), torch.float64)


def test_each_stack_is_the_decoder_that_has_its_weights() -> None:
    model = create()
    memory = model.encode(SOURCE)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    found = []
    for stack, layers in CONFIG.decoder_stacks.items():
        weights = {
            "decoder" + name.removeprefix(stack): w
            for name, w in model.weights.items()
            if name.startswith(f"{stack}.")
        }
        shared = {k: w for k, w in model.weights.items() if k.startswith(("embed", "encoder"))}
        alone = Seq2Seq(replace(PLAIN, decoder_layers=layers), {**shared, **weights})
        expected = alone.decode(alone.embed(TARGET), alone.encode(SOURCE), causal)
        got = model.decode(model.embed(TARGET), memory, causal, stack=stack)
        assert torch.equal(got, expected)
        found.append(got)
    assert not torch.equal(found[0], found[1])


def test_a_pass_of_a_stack_is_counted_with_its_layers() -> None:
    model = create().with_log([])
    model.decode(model.embed(TARGET), model.encode(SOURCE), stack="refiner")
    assert model.forward_log is not None
    assert [call.row_layers for call in model.forward_log] == [2 * 3 * 1, 2 * 4 * 2]


def test_keys_and_values_that_were_not_stored_are_computed() -> None:
    model = create()
    memory = model.encode(SOURCE)
    for stack in CONFIG.decoder_stacks:
        stored = model.decode(model.embed(TARGET), memory, stack=stack)
        bare = memory._replace(cross_kv=None)
        assert torch.equal(model.decode(model.embed(TARGET), bare, stack=stack), stored)


def test_the_decoder_alone_writes_from_left_to_right() -> None:
    """The compiled path packs the decoder's layers and no further stack's."""
    config = replace(CONFIG, extra={})
    model = create(config)
    for made in (model, Seq2Seq(config, {k: w.float() for k, w in model.weights.items()})):
        session = made.condition_on([4, 5]).session()
        session.extend([1, 6])
        row = session.score(TokenTree()).logits[0].double()
        causal = torch.ones(2, 2, dtype=torch.bool).tril()
        memory = model.encode(torch.tensor([[4, 5]]))
        states = model.decode(model.embed(torch.tensor([[1, 6]])), memory, causal)
        torch.testing.assert_close(row, model.logits(states)[0, -1], atol=1e-4, rtol=0)


def test_vectors_stand_where_embeddings_would() -> None:
    model = create()
    assert torch.equal(model.place(model.embed_words(TARGET)), model.embed(TARGET))
    with pytest.raises(TinyspecError, match="has 13 tokens"):
        model.place(torch.zeros(1, 13, 16))


def test_stacks_are_stored_and_bad_ones_are_named(tmp_path: Path) -> None:
    model = create()
    model.save(tmp_path / "model", torch.float64)
    stored = Seq2Seq.load(tmp_path / "model", None)
    assert stored.config.stacks == {"parse": 1, "refiner": 2}
    assert all(torch.equal(w, stored.weights[name]) for name, w in model.weights.items())
    file = tmp_path / "model/config.json"
    values = json.loads(file.read_text())
    for bad in ({"decoder": 1}, {"refiner": 0}, {"refiner": "2"}, {"a.b": 1}, ["refiner"], 3):
        file.write_text(json.dumps({**values, "stacks": bad}))
        with pytest.raises(TinyspecError, match="stacks"):
            Seq2Seq.load(tmp_path / "model")
