"""HashEE: a layer for each id, the keys of tokens that left, and the same hash in training."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tinyspec
from tests.early_exit import decoders
from tests.early_exit.decoders import finish
from tests.lm.small import GPT2, LLAMA, PROMPT
from tests.lm.small import model as network
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.early_exit.hash_ee import (
    HashSettings,
    assign_layers,
    build_layer_table,
    check_exits,
    decode_with_hash,
    hash_loss,
    hash_to_index,
    resolve_exits,
)
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.models import run_dense
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import hash_ee as traps
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import TUNED, Config
from tinyspec.lm.heads import freeze_target
from tinyspec.lm.model import Model
from tinyspec.technique import Guarantee, TrainingBatch, Tuning, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("hash_ee")
make_decoder = partial(decoders.make_decoder, CARD)
EMPTY = TokenTree()


def with_table(plain: Model, table: Any, **settings: Any) -> Model:
    """Return a model that was tuned with this table."""
    config = replace(plain.config, extra={TUNED: {"method": "hash_ee", "settings": settings}})
    return Model(config, plain.weights, extras={"hash_ee/layers": torch.tensor(table)})


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


@pytest.mark.parametrize("exits", ["1", "2", "1,3", "1,2,4"])
def test_printed_algorithm_is_what_runs(exits: str) -> None:
    """Every outcome of three tokens on a table of four layers."""
    model, prompt = TableModel(5, 3, 4, zeros=False), [0, 1]
    layers = [int(word) for word in exits.split(",")]
    exit_of = {token: layers[token % len(layers)] for token in range(3)}

    def by_the_paper(rng: Exhaustive) -> tuple[int, ...]:
        net = model.network

        def run_layer(layer: int, state: Any, keys: Any) -> Any:
            return net.feed_forward(layer, net.attend(layer, state, keys))

        generator = EnumeratedGenerator(rng)
        text = decode_with_hash(
            net.embed, net.keys, run_layer, model.head, prompt, 3, exit_of, 4, generator
        )
        return tuple(text[2:])

    def by_the_decoder(rng: Exhaustive) -> tuple[int, ...]:
        decoder = make_decoder(model, SamplingParams(), 3, hash="dealt", exits=exits)
        decoder.extend(prompt)
        for _ in range(3):
            decoder.step(rng)
        return tuple(decoder.new)

    paper, decoder = map(Exhaustive.distribution, (by_the_paper, by_the_decoder))
    assert paper == decoder and len(paper) > 3


# ---------------------------------------------------------------------- the hash


def test_the_buckets_of_the_paper() -> None:
    """Twelve layers and six buckets: 2, 4, ... where the code counts the embedding as 1."""
    assert resolve_exits("", 12) == (1, 3, 5, 7, 9, 11)
    assert resolve_exits(" ", 24) == (1, 5, 9, 13, 17, 21)
    assert resolve_exits("", 1) == (1,)
    for wrong in ("0", "4", "a", "1,,2"):
        with pytest.raises(TinyspecError, match=f"^exits is '{wrong}'"):
            resolve_exits(wrong, 3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_every_id_has_a_layer(counts: list[int], buckets: int, by_tokens: bool) -> None:
    seen, balance = torch.tensor(counts), "tokens" if by_tokens else "types"
    order = seen.argsort(descending=True, stable=True)
    table = assign_layers(seen, order, balance, range(1, buckets + 1), 9).tolist()
    assert [layer == 9 for layer in table] == [count == 0 for count in counts]
    assert all(1 <= layer <= buckets or layer == 9 for layer in table)
    ordered = [table[id] for id in order.tolist()]
    assert ordered == sorted(ordered)


def test_a_hash_is_the_same_in_every_process() -> None:
    """The numbers were printed once, in another process."""
    config = Config(12, 8, 4, 2, 1, 4, 12, 64)
    texts = [torch.arange(12).int(), torch.arange(6).int()]
    tables = [
        build_layer_table(config, HashSettings(kind, exits="1,2,3"), texts, 7)["layers"].tolist()
        for kind in ("frequency", "random", "inconsistent")
    ]
    assert tables == GOLDEN
    assert [hash_to_index(5, at, 100) for at in range(5)] == MIXED


GOLDEN = [
    [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
    [1, 3, 3, 1, 1, 1, 2, 2, 3, 2, 3, 2],
    [1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3],
]
MIXED = [0, 46, 13, 46, 20]


def test_the_control_gives_an_id_other_layers_at_other_places() -> None:
    plain, table = network(LLAMA), [1] * 6 + [2] * 4 + [3] * 3
    for kind, expected in (("random", 1), ("inconsistent", 3)):
        decoder = make_decoder(with_table(plain, table, hash=kind))
        target: Any = decoder.target
        assert len({target.rule.layers_of(0, at) for at in range(40)}) == expected


# ---------------------------------------------------------------------- the session


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_hash_to_the_top_is_plain_greedy_decoding(config: Any, dtype: torch.dtype) -> None:
    model = network(config, dtype=dtype)
    plain = tinyspec.generate(model, PROMPT, max_new_tokens=9).tokens
    for knobs in ({"hash": "off"}, {"hash": "dealt", "exits": "3"}):
        assert list(finish(make_decoder(model, **knobs), PROMPT)) == list(plain)
    top = with_table(model, [3] * 13)
    assert list(finish(make_decoder(top), PROMPT)) == list(plain)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_rows_are_those_of_the_masked_stream(config: Any, dtype: torch.dtype) -> None:
    """Three ways: the session, the pass that is trained, and a dense pass in numpy."""
    table = torch.tensor([1, 2, 3, 3, 1, 2, 2, 3, 1, 1, 2, 3, 1])
    model = with_table(network(config, dtype=dtype), table.tolist())
    target: Any = make_decoder(model).target
    text, rows = list(PROMPT), []
    target.extend(text)
    for token in (7, 8, 9, 2, 6, 5):
        rows.append(target.score(EMPTY).logits[0].numpy())
        target.commit((), token)
        text.append(token)
    depths = table[torch.tensor(text[:-1])]
    *_, states = model.torch_blocks().layer_states(torch.tensor([text[:-1]]), depths=depths[None])
    trained = model.torch_blocks().compute_logits(states)[0, len(PROMPT) - 1 :]
    runs = (torch.arange(3)[:, None] < depths).numpy()
    dense = run_dense(model, text[:-1], runs=runs).logits[len(PROMPT) - 1 :]
    within = 1e-10 if dtype == torch.float64 else 1e-4
    np.testing.assert_allclose(np.array(rows), trained.detach().numpy(), atol=within)
    np.testing.assert_allclose(np.array(rows), dense, atol=within)


def test_later_layers_attend_to_a_token_that_has_left() -> None:
    """The first layer does not attend: what token 2 tells token 3, it tells after it has left."""
    plain = network(LLAMA)
    weights = {**plain.weights, "0.out.weight": torch.zeros_like(plain.weights["0.out.weight"])}
    rows = []
    for shift in (0.0, 1.0):
        changed = dict(weights, embed=weights["embed"].clone())
        changed["embed"][2] += shift
        target: Any = make_decoder(Model(LLAMA, changed), hash="dealt", exits="1,3").target
        target.extend([1, 2, 3])
        rows.append(target.score(EMPTY).logits[0])
    others = torch.arange(13) != 2  # the embedding is the output matrix too
    assert float((rows[0] - rows[1])[others].abs().max()) > 1e-3


@pytest.mark.parametrize("model", [network(LLAMA), TableModel(3, 10)], ids=["network", "table"])
def test_rewound_text_leaves_no_trace(model: Any) -> None:
    knobs = {"hash": "dealt", "exits": "1,2,3"}
    straight = make_decoder(model, tokens=99, **knobs)
    straight.extend([0, 1, 2])
    expected = [straight.step(Seeded(0)).tokens[0] for _ in range(6)]
    for length in (1, 3, 4, 6):
        decoder = make_decoder(model, tokens=99, **knobs)
        decoder.extend([0, 1, 2])
        for _ in range(6):
            decoder.step(Seeded(0))
        decoder.rewind(length)
        if length < 3:
            decoder.extend([0, 1, 2][length:])
        left = max(length - 3, 0)
        assert [decoder.step(Seeded(0)).tokens[0] for _ in expected[left:]] == expected[left:]


def test_forced_text_in_the_middle_goes_through_the_hash_too() -> None:
    model = network(LLAMA)
    target: Any = make_decoder(model, hash="dealt", exits="1,3").target
    target.extend([1, 2])
    target.score(EMPTY)
    target.commit((), 4)
    target.extend([6, 5])
    row = target.score(EMPTY).logits[0].numpy()
    text = [1, 2, 4, 6, 5]
    runs = np.array([[layer < (1, 3)[token % 2] for token in text] for layer in range(3)])
    np.testing.assert_allclose(row, run_dense(model, text, runs=runs).logits[-1], atol=1e-10)
    with pytest.raises(ValueError, match="no drafts"):
        target.score(TokenTree.chain([1]))


# ---------------------------------------------------------------------- training


def test_a_text_that_the_model_did_not_write_has_no_loss() -> None:
    model, batch = traps.tuned_network(0), traps.training_batch(0)
    tuning = Tuning(model.torch_blocks(), model, HashSettings(), {}, 0.0)
    tuning = tuning._replace(beside={"layers": torch.tensor(traps.LAYERS)})
    nothing = batch._replace(is_answer=torch.zeros_like(batch.is_answer))
    assert float(hash_loss(tuning, nothing, torch.Generator())) == 0.0


def test_the_control_draws_new_layers_in_every_step() -> None:
    model, batch = traps.tuned_network(0), traps.training_batch(0)
    beside = {"layers": torch.tensor(traps.LAYERS)}
    for kind, distinct in (("random", 1), ("inconsistent", 4)):
        tuning = Tuning(model.torch_blocks(), model, HashSettings(kind), beside, 0.0)
        losses = {
            float(hash_loss(tuning, batch, torch.Generator().manual_seed(seed)))
            for seed in range(4)
        }
        assert len(losses) == distinct


def write_texts(n: int, seed: int) -> Tensor:
    """Return texts [n, 16] in which a token follows from the two before it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (n, 16), generator=generator)
    for at in range(2, 16):
        ids[:, at] = (ids[:, at - 1] + 2 * ids[:, at - 2]) % 11
    return ids


def fit(kind: str, steps: int = 250) -> dict[str, float]:
    """Train a small model with a hash, and return its losses on other texts, under hashes."""
    config = Config(11, 32, 4, 2, 2, 16, 64, 32)
    start = Model.random(config, seed=1, dtype=torch.float32)
    weights = {name: w.clone().requires_grad_() for name, w in start.weights.items()}
    blocks, optimizer = Blocks(config, weights), torch.optim.AdamW(weights.values(), lr=4e-3)
    kinds = {
        name: HashSettings("random" if name == "none" else name, "tokens", "1,2,4")
        for name in ("none", "random", "inconsistent")
    }
    tables = {
        name: build_layer_table(config, settings, list(write_texts(50, 0)), 0)
        for name, settings in kinds.items()
    }
    tables["none"] = {"layers": torch.full((11,), 4)}

    def loss(name: str, ids: Tensor, seed: int) -> Tensor:
        tuning = Tuning(blocks, start, kinds[name], tables[name], 0.0)
        is_answer = torch.ones_like(ids, dtype=torch.bool)
        is_answer[:, 0] = False
        batch = TrainingBatch(ids, is_answer, *[torch.empty(0)] * 3)
        return hash_loss(tuning, batch, torch.Generator().manual_seed(seed))

    for step in range(steps):
        optimizer.zero_grad()
        loss(kind, write_texts(32, 1 + step), step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return {name: float(loss(name, write_texts(400, 0), 0)) for name in kinds}


@pytest.mark.slow
def test_a_model_must_be_trained_with_its_hash_and_the_hash_must_be_consistent() -> None:
    """The paper's finding: in nats, on texts in which every token follows from two others."""
    plain, hashed, control = fit("none"), fit("random"), fit("inconsistent")
    assert plain["none"] < 0.3
    assert hashed["random"] < plain["random"] - 0.5  # the hash in use only
    assert hashed["random"] < 0.6 * control["inconsistent"]


# ---------------------------------------------------------------------- the card


def test_the_card_promises_and_rejects() -> None:
    assert CARD.promise(hash="off") is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    for wrong in ({"hash": "md5"}, {"balance": "both"}):
        with pytest.raises(TinyspecError, match=r"^\[head\] wants hash to be one of"):
            HashSettings(**wrong)
    with pytest.raises(
        TinyspecError, match=r"^exits is '1,4': the target has 3 layers: choose layers from 1 to 3$"
    ):
        check_exits(freeze_target(network(LLAMA)), HashSettings(exits="1,4"), 0)
    with pytest.raises(TinyspecError, match=r"^exits is 'x': it must be layers"):
        make_decoder(network(LLAMA), exits="x")


@pytest.mark.parametrize("table", [[1] * 12, [0] + [1] * 12, [4] * 13])
def test_a_damaged_table_is_an_error_of_one_line(table: list[int]) -> None:
    with pytest.raises(TinyspecError, match=r"must have a layer for each of 13 tokens"):
        make_decoder(with_table(network(LLAMA), table))


def test_exits_beside_a_models_own_table_are_refused() -> None:
    """They would change nothing. Without a table they are dealt."""
    tuned = with_table(network(LLAMA), [1] * 13)
    with pytest.raises(TinyspecError, match=r"^exits is for hash dealt: "):
        make_decoder(tuned, exits="2")
    for model, knobs in ((tuned, {"hash": "dealt"}), (network(LLAMA), {})):
        target: Any = make_decoder(model, exits="2", **knobs).target
        assert target.rule.layers == (2,)


def test_exits_of_the_tuning_are_dealt_too() -> None:
    """Empty: those that the model was tuned for, else the paper's."""
    tuned = with_table(network(LLAMA), [1] * 13, exits="2")
    for (model, knobs), expected in (
        ((tuned, {}), (1,)),
        ((tuned, {"hash": "dealt"}), (2,)),
        ((tuned, {"hash": "dealt", "exits": "1,3"}), (1,)),
        ((network(LLAMA), {}), (1, 2)),
    ):
        target: Any = make_decoder(model, **knobs).target
        assert target.rule.layers == expected


@pytest.mark.parametrize("tokens", [0, 1])
def test_short_texts(tokens: int) -> None:
    got = tinyspec.generate(
        network(LLAMA), [1], method="hash_ee", max_new_tokens=tokens, temperature=0
    )
    assert len(got.tokens) == tokens
