"""The encoder-decoder equals a version that is written out token by token.

It does so in batches, as a session, and as a folder on disk.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyspec import _core
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.lm.seq2seq import (
    CompiledCrossAttention,
    EncoderOutput,
    Seq2Seq,
    Seq2SeqConfig,
    attend_dense,
    sinusoidal_positions,
)
from tinyspec.tree import ROOT, TokenTree

PLAIN = Seq2SeqConfig(20, 16, 4, 24, encoder_layers=2, decoder_layers=2, max_positions=12)
FULL = replace(PLAIN, positional=True, lengths=9, fertilities=5)
SOURCE, TARGET = [5, 9, 4, 7], [1, 8, 6, 19, 8, 5]


def model(
    config: Seq2SeqConfig = PLAIN,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    loud: float = 2.0,
) -> Seq2Seq:
    made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), dtype)
    return Seq2Seq(
        config, {name: loud * w if w.ndim == 2 else w + 0.1 for name, w in made.weights.items()}
    )


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


# ---------------------------------------------------------------------- written out once more


class Oracle:
    """Compute one position, one head and one attended position at a time, in numpy. Shares nothing
    with the model but its weights.
    """

    def __init__(self, source: Seq2Seq):
        self.c, self.w = source.config, {name: w.numpy() for name, w in source.weights.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean()
        return (
            x / math.sqrt((x * x).mean() + 1e-5) * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]
        )

    def place(self, n: int) -> np.ndarray:
        d = self.c.d_model
        return np.array(
            [f(n / 10000 ** (2 * i / d)) for i in range(d // 2) for f in (math.sin, math.cos)]
        )

    def look(self, q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
        """One query [d] over keys and values, head by head."""
        width = self.c.d_model // self.c.n_heads
        out = np.zeros(self.c.d_model)
        for at in range(0, self.c.d_model, width):
            head = slice(at, at + width)
            scores = np.array([q[head] @ k[head] / math.sqrt(width) for k in keys])
            shares = np.exp(scores - scores.max())
            out[head] = sum(
                (s * v[head] for s, v in zip(shares / shares.sum(), values, strict=True)),
                np.zeros(width),
            )
        return out

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        h = self.w[f"{name}.up.weight"] @ self.norm(x, f"{name}.norm2")
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.w[f"{name}.down.weight"] @ h

    def attend(self, rows: list[np.ndarray], name: str, sees: list[list[int]]) -> list[np.ndarray]:
        fused = [self.w[f"{name}.qkv.weight"] @ self.norm(x, f"{name}.norm1") for x in rows]
        q, k, v = zip(*(np.split(row, 3) for row in fused), strict=True)
        mixed = [
            self.look(q[i], [k[j] for j in see], [v[j] for j in see]) for i, see in enumerate(sees)
        ]
        return [x + self.w[f"{name}.out.weight"] @ m for x, m in zip(rows, mixed, strict=True)]

    def embed(self, ids: list[int]) -> list[np.ndarray]:
        return [
            self.w["embed"][t] * math.sqrt(self.c.d_model) + self.place(i)
            for i, t in enumerate(ids)
        ]

    def encode(self, ids: list[int]) -> list[np.ndarray]:
        rows = [*([self.w["lengths"][0]] if self.c.lengths else []), *self.embed(ids)]
        for i in range(self.c.encoder_layers):
            rows = self.attend(rows, f"encoder.{i}", [list(range(len(rows)))] * len(rows))
            rows = [x + self.mlp(x, f"encoder.{i}") for x in rows]
        return [self.norm(x, "encoder.norm") for x in rows]

    def decode(self, ids: list[int], source: list[int], sees: list[list[int]]) -> np.ndarray:
        memory = self.encode(source)[int(self.c.lengths > 0) :]
        rows = self.embed(ids)
        for i in range(self.c.decoder_layers):
            rows = self.attend(rows, f"decoder.{i}", sees)
            if self.c.positional:
                name = f"decoder.{i}.positional"
                q, k = zip(
                    *(
                        np.split(self.w[f"{name}.qk.weight"] @ self.place(n), 2)
                        for n in range(len(rows))
                    ),
                    strict=True,
                )
                v = [self.w[f"{name}.v.weight"] @ self.norm(x, f"{name}.norm") for x in rows]
                rows = [
                    x + self.w[f"{name}.out.weight"] @ self.look(q[n], list(k), v)
                    for n, x in enumerate(rows)
                ]
            name = f"decoder.{i}.cross"
            k, v = zip(*(np.split(self.w[f"{name}.kv.weight"] @ m, 2) for m in memory), strict=True)
            q = [self.w[f"{name}.q.weight"] @ self.norm(x, f"{name}.norm") for x in rows]
            rows = [
                x + self.w[f"{name}.out.weight"] @ self.look(y, list(k), list(v))
                for x, y in zip(rows, q, strict=True)
            ]
            rows = [x + self.mlp(x, f"decoder.{i}") for x in rows]
        return np.stack([self.w["embed"] @ self.norm(x, "decoder.norm") for x in rows])


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("others", [False, True], ids=["causal", "all but itself"])
def test_it_computes_what_is_written_out_token_by_token(
    config: Seq2SeqConfig, others: bool
) -> None:
    m, n = model(config), len(TARGET)
    mask = ~torch.eye(n, dtype=torch.bool) if others else causal(n)
    memory = m.encode(torch.tensor([SOURCE]))
    got = m.logits(m.decode(m.embed(torch.tensor([TARGET])), memory, mask))[0]
    expected = Oracle(m).decode(TARGET, SOURCE, [row.nonzero().flatten().tolist() for row in mask])
    assert np.abs(got.numpy() - expected).max() < 1e-9
    if config.lengths:
        summary = Oracle(m).encode(SOURCE)[0]
        assert memory.summary is not None
        assert np.abs(memory.summary[0].numpy() - summary).max() < 1e-9
        lengths = m.length_logits(memory)[0].numpy()
        assert lengths[0] == -np.inf
        assert np.abs(lengths[1:] - m.weights["lengths"].numpy()[1:] @ summary).max() < 1e-9
        assert m.fertility_logits(memory).shape == (1, len(SOURCE), 5)


def test_attention_is_torchs_own() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, n, 16, generator=generator, dtype=torch.float64) for n in (3, 5))
    theirs = torch.nn.MultiheadAttention(16, 4, bias=False, batch_first=True, dtype=torch.float64)
    theirs.out_proj.weight.data = torch.eye(16, dtype=torch.float64)
    q, k, v = (
        w @ z.mT for w, z in zip(theirs.in_proj_weight.data.chunk(3), (x, y, y), strict=True)
    )
    heads = [part.mT.reshape(2, -1, 4, 4) for part in (q, k, v)]
    there = torch.tensor([[True] * 5, [True, True, False, True, False]])
    expected = theirs(x, y, y, key_padding_mask=~there, need_weights=False)[0]
    assert torch.allclose(attend_dense(*heads, there[:, None]), expected, atol=1e-12)


def test_a_position_that_attends_to_nothing_gets_zeros_and_finite_gradients() -> None:
    q = torch.randn(1, 2, 2, 4, requires_grad=True)
    out = attend_dense(q, q, q, torch.tensor([[[False, False], [True, False]]]))
    out.sum().backward()
    assert out[0, 0].abs().sum() == 0
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


def test_positions_are_the_sinusoids_of_vaswani() -> None:
    table = sinusoidal_positions(30, 6)
    assert table[0].tolist() == [0, 1, 0, 1, 0, 1]
    assert float(table[7, 2]) == pytest.approx(math.sin(7 / 10000 ** (2 / 6)))
    assert float(table[7, 3]) == pytest.approx(math.cos(7 / 10000 ** (2 / 6)))


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_row_of_a_padded_batch_is_that_row_alone(
    config: Seq2SeqConfig, dtype: torch.dtype, within: float
) -> None:
    m = model(config, dtype=dtype, loud=1.0)
    sources, targets = [[5, 9, 4, 7], [6], [8, 8, 4]], [[1, 8], [1, 6, 5, 4], [1]]
    wide = [
        torch.tensor([row + [0] * (4 - len(row)) for row in rows]) for rows in (sources, targets)
    ]
    memory = m.encode(wide[0])
    states = m.decode(m.embed(wide[1]), memory, causal(4), slots=wide[1] != 0)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        own = m.encode(torch.tensor([source]))
        assert torch.allclose(own.states[0], memory.states[row, : len(source)], atol=within)
        alone = m.decode(m.embed(torch.tensor([target])), own, causal(len(target)))
        assert torch.allclose(alone[0], states[row, : len(target)], atol=within)
        shared = m.decode(
            m.embed(wide[1]), memory.select_rows([row]), causal(4), slots=wide[1] != 0
        )  # one memory for all rows
        assert torch.allclose(shared[row], states[row], atol=within)


def test_what_stands_in_padding_changes_nothing() -> None:
    m, slots = model(FULL), torch.tensor([[True, True, True, False], [True, False, False, False]])
    memory, others = m.encode(torch.tensor([SOURCE])), ~torch.eye(4, dtype=torch.bool)
    states = [
        m.decode(m.embed(torch.tensor([[4, 5, 6, x], [7, x, x, x]])), memory, others, slots=slots)[
            slots
        ]
        for x in (0, 9)
    ]
    assert torch.equal(*states)


def test_keys_and_values_of_the_source_may_be_made_when_they_are_needed() -> None:
    m = model()
    memory = m.encode(torch.tensor([SOURCE]))
    bare = EncoderOutput(memory.states, memory.mask)
    x = m.embed(torch.tensor([TARGET]))
    assert torch.equal(m.decode(x, memory), m.decode(x, bare))


def test_every_weight_has_a_gradient() -> None:
    m = model(FULL, dtype=torch.float32)
    for w in m.parameters():
        w.requires_grad_()
    memory = m.encode(torch.tensor([SOURCE, [5, 6, 0, 0]]), dropout=0.1)
    x = m.embed(torch.tensor([TARGET, TARGET]))
    states = m.decode(x, memory, causal(len(TARGET)), dropout=0.1)
    loss = (
        m.logits(states).logsumexp(-1).mean()
        + m.fertility_logits(memory).sum()
        + m.length_logits(memory)[:, 1:].sum()
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert [
        name for name, w in m.weights.items() if w.grad is None or not torch.isfinite(w.grad).all()
    ] == []


def test_logits_are_in_float32_where_products_are_in_bfloat16() -> None:
    m = model(FULL, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        memory = m.encode(torch.tensor([SOURCE]))
        states = m.decode(m.embed(torch.tensor([TARGET])), memory)
        found = m.logits(states), m.fertility_logits(memory), m.length_logits(memory)
    assert [logits.dtype for logits in found] == 3 * [torch.float32]


# ---------------------------------------------------------------------- as a session


def dense(m: Seq2Seq, source: list[int], text: list[int]) -> Tensor:
    memory = m.encode(torch.tensor([source]))
    return m.logits(m.decode(m.embed(torch.tensor([text])), memory, causal(len(text))))[0]


def greedy(m: Seq2Seq, source: list[int], tokens: int) -> list[int]:
    text = [m.config.bos]
    while len(text) <= tokens and text[-1] != m.config.eos:
        text.append(int(dense(m, source, text)[-1].argmax()))
    return text[1:]


@pytest.mark.parametrize("seed", range(6))
def test_greedy_through_the_session_is_the_dense_causal_decode(seed: int) -> None:
    m, forward_log = model(seed=seed), list[ForwardRecord]()
    given = m.with_log(forward_log).condition_on(SOURCE)
    decoder = Decoder(
        given.session(forward_log),
        BaseDrafter(),
        verify_tree,
        sampling=SamplingParams(0.0),
        stop=StoppingCriteria(frozenset(given.config.eos), max_new_tokens=9),
    )
    decoder.extend([m.config.bos])
    rng = Seeded(0)
    while not decoder.finished:
        decoder.step(rng)
    assert decoder.new == greedy(m, SOURCE, 9)
    calls = [call.model for call in forward_log]
    assert calls == ["translator/encoder", *["translator"] * len(decoder.new)]
    assert [(call.rows, call.row_layers, call.head_rows) for call in forward_log[1:]] == [
        (1, 2.0, 1)
    ] * len(decoder.new)


def test_a_tree_is_scored_as_each_of_its_paths_and_a_rewind_forgets() -> None:
    m = model()
    session = m.condition_on(SOURCE).session()
    session.extend(TARGET[:2])
    tree = TokenTree((4, 5, 6, 7), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
    scores = session.score(tree)
    for node, path in enumerate(([4], [5], [4, 6], [4, 6, 7])):
        assert torch.allclose(
            scores.logits[node + 1], dense(m, SOURCE, TARGET[:2] + path)[-1], atol=1e-12
        )
    session.commit([0, 2], 9)
    session.rewind(3)
    again = session.score(TokenTree.chain([8]))
    assert torch.allclose(again.logits, dense(m, SOURCE, [*TARGET[:2], 4, 8])[-2:], atol=1e-12)


def test_views_and_half_run_layers_look_at_the_source_too() -> None:
    m = model()
    session = m.condition_on(SOURCE).session()
    session.extend(TARGET[:3])
    exits = session.view(Plan(last=1)).score(TokenTree())
    short = Seq2Seq(
        replace(PLAIN, decoder_layers=1),
        {k: w for k, w in m.weights.items() if "decoder.1." not in k},
    )
    assert torch.allclose(exits.logits[-1], dense(short, SOURCE, TARGET[:3])[-1], atol=1e-12)
    assert torch.allclose(
        session.score(TokenTree()).logits[-1], dense(m, SOURCE, TARGET[:3])[-1], atol=1e-12
    )


def test_the_same_text_of_another_source_is_another_text() -> None:
    m = model()
    a, b = (m.condition_on(source).logits(TARGET) for source in (SOURCE, SOURCE[::-1]))
    assert not torch.allclose(a, b, atol=1e-3)
    assert torch.allclose(a, dense(m, SOURCE, TARGET), atol=1e-12)


def test_passes_are_entered_where_they_are_counted_and_nowhere_else() -> None:
    m, forward_log = model(FULL), list[ForwardRecord]()
    twin = m.with_log(forward_log)
    memory = twin.encode(torch.tensor([[5, 6], [7, 0]]))
    twin.logits(twin.decode(twin.embed(torch.full((2, 3), 3)), memory))
    m.decode(m.embed(torch.full((2, 3), 3)), memory)
    assert forward_log == [
        ForwardRecord("translator/encoder", 6, 12.0, 0, prefill=True),
        ForwardRecord("translator", 6, 12.0, 6),
    ]


# ---------------------------------------------------------------------- compiled

compiled = pytest.mark.skipif(_core.compute is None, reason="the compiled kernels are missing")


def twins(seed: int) -> tuple[Seq2Seq, Seq2Seq]:
    """A model in float32, and the same in float64."""
    small = model(seed=seed, dtype=torch.float32)
    return small, Seq2Seq(small.config, {name: w.double() for name, w in small.weights.items()})


@compiled
@pytest.mark.parametrize("seed", range(3))
def test_the_compiled_path_equals_torch_and_a_rows_bits_depend_on_nothing_beside_it(
    seed: int,
) -> None:
    small, wide = twins(seed)
    given = small.condition_on(SOURCE)
    assert isinstance(given._path, CompiledCrossAttention)
    assert not isinstance(wide.condition_on(SOURCE)._path, CompiledCrossAttention)
    together = given.logits(TARGET)
    assert torch.allclose(together.double(), dense(wide, SOURCE, TARGET), atol=1e-4)
    session, alone = given.session(), []
    for token in TARGET:
        session.extend([token])
        alone.append(session.score(TokenTree()).logits[0])
    assert torch.equal(torch.stack(alone), together)
    session.rewind(2)
    tree = TokenTree((TARGET[2], 5, TARGET[3], 7), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
    session.run_to_layer(tree, 1)
    assert torch.equal(session.score(tree).logits[[0, 1, 3]], together[1:4])
    assert torch.equal(
        given.torch_blocks().training_logits(torch.tensor([TARGET]))[0],
        dense(small, SOURCE, TARGET),
    )


@compiled
def test_states_copied_up_leave_the_same_keys_on_both_paths() -> None:
    rows = []
    for m in twins(0):
        session = m.condition_on(SOURCE).session()
        session.extend(TARGET[:3])
        view = session.view(Plan(last=1))
        view.score(TokenTree.chain([8]))
        view.commit([0], 5)
        session.fill_cache("copy", [2])
        rows.append(session.score(TokenTree()).logits[-1].double())
    assert torch.allclose(*rows, atol=1e-4)


@compiled
def test_weights_that_are_written_to_are_packed_anew_and_weights_in_training_are_not_packed() -> (
    None
):
    small, _ = twins(0)
    before = small.condition_on(SOURCE).logits(TARGET)
    with torch.no_grad():
        small.weights["decoder.1.cross.kv.weight"].mul_(2)
    after = small.condition_on(SOURCE).logits(TARGET)
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(after, dense(small, SOURCE, TARGET), atol=1e-4)
    small.weights["embed"].requires_grad_()
    assert not isinstance(small.condition_on(SOURCE)._path, CompiledCrossAttention)


# ---------------------------------------------------------------------- bad input


def test_bad_input_is_an_error_of_one_line() -> None:
    m, full = model(), model(replace(PLAIN, positional=True))
    for call, says in (
        (
            lambda: m.encode(torch.full((1, 13), 4)),
            "the source has 13 tokens, translator has 12 positions: shorten it",
        ),
        (lambda: m.condition_on([4] * 13), "the source has 13 tokens"),
        (lambda: m.condition_on([]), "the source is empty"),
        (lambda: full.condition_on(SOURCE), "cannot write from left to right"),
        (lambda: m.length_logits(m.encode(torch.tensor([SOURCE]))), "without a LENGTH token"),
        (lambda: m.fertility_logits(m.encode(torch.tensor([SOURCE]))), "without a fertility head"),
        (lambda: m.condition_on(SOURCE).save("nowhere"), "cannot be saved"),
        (lambda: m.tokenizer, "has no tokenizer.json"),
    ):
        with pytest.raises(TinyspecError, match=says) as error:
            call()  # type: ignore[no-untyped-call]
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- on disk


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        replace(FULL, extra={"trained_for": "nat"}),
        replace(PLAIN, decoder_layers=0, heads={"crf_from": (20, 3), "crf.up.bias": (5,)}),
    ],
    ids=["plain", "full", "heads"],
)
def test_a_folder_gives_back_what_was_saved(tmp_path: Path, config: Seq2SeqConfig) -> None:
    m = model(config, dtype=torch.bfloat16)
    m.save(tmp_path / "m")
    back = Seq2Seq.load(tmp_path / "m", dtype=None)
    assert back.config == config
    assert back.name == "m"
    assert all(torch.equal(w, back.weights[name]) for name, w in m.weights.items())
    assert list(back.weights) == list(config.shapes())
    assert Seq2Seq.load(tmp_path / "m").dtype == torch.float32
    assert (
        json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "tinyspec-seq2seq"
    )
    m.save(tmp_path / "m")  # over the old one


def damaged(folder: Path, **changes: object) -> Path:
    model(FULL).save(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"d_model": "big"}, "config.json: d_model is 'big', expected a whole number"),
        (
            {"max_positions": 10**7},
            "max_positions is 10000000, expected a whole number from 1 to 65536",
        ),
        ({"d_model": 15}, "n_heads is 4, expected a divisor of d_model 15"),
        ({"n_heads": 3}, "n_heads is 3, expected a divisor of d_model 16"),
        (
            {"decoder_layers": 10**9},
            "decoder_layers is 1000000000, expected a whole number from 1 to 1000",
        ),
        ({"decoder_layers": 3}, r"missing decoder.2.*, which the config asks for"),
        ({"decoder_layers": 1}, r"decoder.1.*more not in the architecture"),
        ({"vocab_size": 21}, r"embed has shape \[20, 16\], the config makes it \[21, 16\]"),
        ({"fertilities": 0}, "fertility.bias, fertility.weight not in the architecture"),
        ({"lengths": -1}, "lengths is -1, expected"),
        ({"positional": "yes"}, "positional is 'yes', expected true or false"),
        ({"mask": 20}, "mask is 20, expected a token id below vocab_size 20"),
        ({"tinyspec": 3}, "tinyspec is 3, expected a JSON object"),
        ({"model_type": "llama"}, "no encoder-decoder of tinyspec's"),
        ({"heads": 3}, "heads is 3, expected an object of shapes, such as"),
        ({"heads": {"a": 3}}, "heads is {'a': 3}, expected an object of shapes"),
        ({"heads": {"a": [2, 3, 4]}}, "expected an object of shapes"),
        ({"heads": {"a": [2, 0]}}, "sizes from 1 to 16777216"),
        ({"heads": {"a": [True]}}, "sizes from 1 to 16777216"),
        ({"heads": {"embed": [2, 3]}}, "heads: embed is a weight of the architecture: rename"),
        ({"heads": {"a": [2, 3]}}, "missing a, which the config asks for"),
    ],
)
def test_a_config_that_contradicts_is_an_error_that_names_the_field(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(TinyspecError, match=says) as error:
        Seq2Seq.load(damaged(tmp_path / "m", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("repeat", [0, 2, 1.0, "x", None])
def test_a_translator_whose_layers_repeat_is_refused(tmp_path: Path, repeat: object) -> None:
    folder = damaged(tmp_path / "m", tinyspec={"repeat": repeat})
    with pytest.raises(
        TinyspecError, match=r"config.json: tinyspec: repeat is .*, expected nothing"
    ):
        Seq2Seq.load(folder)


def test_a_head_is_stored_beside_the_architecture_and_checked(tmp_path: Path) -> None:
    with_head = replace(PLAIN, heads={"crf_from": (20, 3)})
    made, plain = model(with_head), model(PLAIN)
    assert with_head.parameters() == PLAIN.parameters() + 60
    for name, w in plain.weights.items():  # a head changes no other weight of a fresh model
        assert torch.equal(w, made.weights[name])
    made.save(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    for heads, says in (
        ({}, "crf_from not in the architecture that the config describes"),
        ({"crf_from": [20, 4]}, r"crf_from has shape \[20, 3\], the config makes it \[20, 4\]"),
        ({"crf_from": [20, 3], "crf_to": [20, 3]}, "missing crf_to, which the config asks for"),
    ):
        file.write_text(json.dumps({**json.loads(file.read_text()), "heads": heads}))
        with pytest.raises(TinyspecError, match=says) as error:
            Seq2Seq.load(tmp_path / "m")
        assert "\n" not in str(error.value)
    with pytest.raises(TinyspecError, match="heads: embed is a weight of the architecture"):
        replace(PLAIN, heads={"embed": (20, 3)}).shapes()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_an_error(tmp_path: Path, share: float) -> None:
    file = damaged(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(TinyspecError, match=r"model.safetensors: truncated or damaged"):
        Seq2Seq.load(tmp_path / "m")


def test_a_hostile_or_unfinished_folder_is_an_error(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "embed": tensors["embed"] * float("nan")}, folder / "model.safetensors")
    with pytest.raises(TinyspecError, match="embed holds NaN or infinity"):
        Seq2Seq.load(folder)
    save_file({**tensors, "embed": tensors["embed"].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(TinyspecError, match="embed is int8, expected float32"):
        Seq2Seq.load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(TinyspecError, match="a pickle can run code"):
        Seq2Seq.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TinyspecError, match=r"config.json: not valid JSON"):
        Seq2Seq.load(folder)
    with pytest.raises(TinyspecError, match="no such checkpoint"):
        Seq2Seq.load(tmp_path / "nowhere")


def test_who_extends_texts_says_that_this_one_translates(tmp_path: Path) -> None:
    with pytest.raises(TinyspecError, match="an encoder-decoder, which translates"):
        checkpoint.read_checkpoint(damaged(tmp_path / "m"))


def test_a_model_moves_to_a_device_with_its_weights_and_stays_where_it_is() -> None:
    made = Seq2Seq.create(PLAIN, torch.Generator().manual_seed(0))
    assert made.to(made.device) is made
    moved = made.to(torch.device("meta"))
    assert {w.device.type for w in moved.weights.values()} == {"meta"}
    assert (moved.config, moved.name, moved.device.type) == (made.config, made.name, "meta")
