"""The one place that computes: ragged, in every family, precision and on every device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.oracle import Oracle
from tests.lm.small import GPT2, LLAMA, model
from tests.lm.test_tokenizer import byte_level
from tinyspec.lm import blocks, engine, ops
from tinyspec.lm.config import Config
from tinyspec.lm.forward import Cache, ForwardBatch, ForwardRecord, Plan, VisibleSet
from tinyspec.lm.model import Model
from tinyspec.lm.ops import rotary_frequencies
from tinyspec.lm.static import CudaGraphRunner
from tinyspec.tree import ROOT, TokenTree

L, V = LLAMA.n_layers, LLAMA.vocab_size
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
TREE = TokenTree((1, 2, 1, 3), (ROOT, 0, ROOT, 2), (None,) * 4, (False,) * 4)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen2": replace(LLAMA, qkv_bias=True, family="qwen2"),
    "qwen3": replace(LLAMA, qk_norm=True, family="qwen3"),
    "biases everywhere": replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True),
    "untied": replace(LLAMA, tied=False),
    "one key for all": replace(LLAMA, n_kv_heads=1),
    "wide heads": replace(LLAMA, head_dim=6),
    "linear": replace(LLAMA, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama3": replace(
        LLAMA,
        rope_theta=50.0,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}  # fmt: skip
every = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: not tested"),
        ],
    ),
]


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=atol)


@every
@pytest.mark.parametrize("device", DEVICES)
def test_every_configuration_computes_what_the_oracle_says(config: Config, device: str) -> None:
    m = model(config)
    expected = torch.tensor(np.array([t.logits for t in Oracle(m).text(IDS)]))
    m = m.to(device=device)
    close(m.logits(IDS), expected)
    session = m.session()
    session.extend(IDS[:4])
    close(session.score(TokenTree.chain(IDS[4:])).logits, expected[3:])


@every
def test_teaching_equals_inference_and_has_gradients(config: Config) -> None:
    m = model(config)
    for weight in m.parameters():
        weight.requires_grad_()
    logits = m.training_logits(torch.tensor([IDS, IDS[::-1]]))
    assert logits.shape == (2, len(IDS), V)
    close(logits[0].detach(), m.logits(IDS))
    logits.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in m.parameters())
    session = m.session()
    session.extend(IDS)
    close(session.score(TokenTree()).logits[0], m.logits(IDS)[-1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 0), (torch.float32, 1e-4), (torch.float16, 0.1), (torch.bfloat16, 0.8)],
)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_precision_runs(
    config: Config, dtype: torch.dtype, bound: float, device: str
) -> None:
    exact = model(config)
    m = exact.to(device=device, dtype=dtype)
    assert (m.dtype, m.device.type) == (dtype, device)
    session = m.session()
    session.extend(IDS, hidden_layers=(0, L))
    session.view(
        Plan(last=2, visible=VisibleSet.for_all_layers((0, 1), 5, L, config.n_kv_heads))
    ).score(TREE)
    scores = session.score(TREE, hidden_layers=(1,))
    assert scores.hidden.dtype == m.state_dtype
    assert scores.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(
        scores.logits[0].double(),
        exact.logits(IDS)[-1],
        max(bound, 1e-10) * max(1, exact.logits(IDS).abs().max()),
    )
    session.commit([2, 3], 5)
    assert session.score(TokenTree()).logits.isfinite().all()


# ------------------------------------------------------------------ ragged


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_feeds_of_one_forward_equal_each_alone(data: st.DataObject) -> None:
    """B21, B22: no position changes with the lengths, plans, entries and exits beside it."""
    m = model(data.draw(st.sampled_from([LLAMA, GPT2])))
    kv = m.config.n_kv_heads
    plans = [
        Plan(),
        Plan(last=1),
        Plan(skip=frozenset({1, 4})),
        Plan(visible=VisibleSet.for_all_layers((0,), 2, L, kv)),
    ]
    caught: list[ForwardBatch] = []

    def catch(feeds):  # type: ignore[no-untyped-def]
        caught.extend(feeds)
        raise StopIteration

    def prepare(seed: int):  # type: ignore[no-untyped-def]
        """A session with a feed on its way, the same for the same seed."""
        n, half, plan = seed % 5 + 1, seed // 5 % 3, plans[seed // 15 % 4]
        session = m.session([])
        session.extend([(seed + i) % V for i in range(n)])
        if half:
            session.run_to_layer(TokenTree.chain([1, 2]), half)
        if half == 2:
            session.commit([0], 3)
        session.forward = catch
        with pytest.raises(StopIteration):
            session.view(plan).score(TREE, hidden_layers=(1,))
        return session

    seeds = data.draw(st.lists(st.integers(0, 59), min_size=2, max_size=4))
    alone = []
    for seed in seeds:
        prepare(seed)
        alone.append(m.forward([caught.pop()])[0])
    sessions = [prepare(seed) for seed in seeds]
    together = m.forward(caught)
    for one, other, session in zip(alone, together, sessions, strict=True):
        close(one.logits, other.logits, 1e-12)
        close(one.hidden, other.hidden, 1e-12)
        assert session.forward_log[-1].rows == len(other.layers)


def test_the_forward_log_counts_positions_layers_heads_and_prefills() -> None:
    m = model(LLAMA)
    forward_log: list[ForwardRecord] = []
    session = m.session(forward_log)
    session.extend([1, 2, 3, 4])
    session.score(TREE)
    session.run_to_layer(TokenTree.chain([7, 8, 9]), 2)
    session.view(Plan(skip=frozenset({0, 3, 5}))).score(TokenTree())
    assert forward_log == [
        ForwardRecord("model", 3, 3 * L, 0, prefill=True),
        ForwardRecord("model", 4, 4 * L, 4),
        ForwardRecord("model", 3, 3 * 2, 0),
        ForwardRecord("model", 1, L - 1.5, 1),
    ]


def test_a_feed_needs_no_ledger() -> None:
    m = model(LLAMA)
    feed = ForwardBatch(
        Cache(LLAMA, m.dtype, m.device), Plan(), [3], [0], [0], [0], 2 * L, 1, [(1, ())], heads=[0]
    )
    close(m.forward([feed])[0].logits, m.logits([3]))


# ------------------------------------------------------------------ the operations


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 9))
def test_the_product_turned_round_is_the_product(
    n: int, i: int, o: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((n, i), (o, i), (o,)))
    with pytest.MonkeyPatch.context() as patch:  # on one thread it would not be turned
        patch.setattr(torch, "get_num_threads", lambda: 2)
        turned = ops.linear(x, w, b if bias else None)
    plain = torch.nn.functional.linear(x.double(), w.double(), b.double() if bias else None)
    close(turned.double(), plain, 1e-4)
    assert turned.shape == (n, o)


def test_the_product_turned_round_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    w = torch.randn(5, 4, requires_grad=True)
    ops.linear(torch.ones(1, 4), w).sum().backward()
    assert w.grad is not None
    close(w.grad, torch.ones(5, 4))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 7), st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.data())
def test_attention_is_a_weighted_mean_of_what_is_seen(
    n: int, m: int, heads, data: st.DataObject
) -> None:
    h, kv = heads
    generator = torch.Generator().manual_seed(n * 10 + m)
    q, k, v = (
        torch.randn(*s, generator=generator, dtype=torch.float64)
        for s in ((n, h, 4), (kv, m, 4), (kv, m, 4))
    )
    shape = data.draw(st.sampled_from([None, (n, m), (kv, n, m)]))
    mask = None if shape is None else torch.rand(*shape, generator=generator) < 0.6
    if mask is not None:
        mask[..., 0] = True
    out = ops.attend(q, k, v, mask).view(n, h, 4)
    for row in range(n):
        for head in range(h):
            group = head * kv // h
            seen = (
                range(m)
                if mask is None
                else (mask if mask.ndim == 2 else mask[group])[row].nonzero().flatten().tolist()
            )
            scores = torch.stack([q[row, head] @ k[group, at] / 2 for at in seen])
            mean = sum(p * v[group, at] for p, at in zip(scores.softmax(0), seen, strict=True))
            close(out[row, head], mean)


def test_llama3_scaling_keeps_fast_waves_and_stretches_slow_ones() -> None:
    scaled = CONFIGS["llama3"]
    wide = replace(scaled, head_dim=32)
    old, new = rotary_frequencies(replace(wide, rope_scaling=None)), rotary_frequencies(wide)
    wavelength = 2 * torch.pi / old
    fast, slow = wavelength < 32 / 4, wavelength > 32
    assert fast.any()
    assert slow.any()
    assert (~(fast | slow)).any()
    close(new[fast], old[fast], 0)
    close(new[slow], old[slow] / 8, 1e-8)
    between = ~(fast | slow)
    assert ((new[between] < old[between]) & (new[between] > old[between] / 8)).all()


def test_linear_scaling_divides_positions() -> None:
    close(rotary_frequencies(CONFIGS["linear"]) * 4, rotary_frequencies(LLAMA), 1e-8)


def test_an_unknown_scaling_is_named() -> None:
    with pytest.raises(Exception, match="'yarn' is not known here; known: default, linear, llama3"):
        rotary_frequencies(replace(LLAMA, rope_scaling={"rope_type": "yarn"}))


def test_a_model_describes_itself_and_moves() -> None:
    m = model(LLAMA)
    assert "3 layers of 16" in repr(m)
    assert m.to(dtype=torch.float32).dtype == torch.float32
    assert Model.random(LLAMA, seed=1).weights["embed"].std() < 0.03


def test_a_model_moves_with_its_extras() -> None:
    m = Model(LLAMA, model().weights, extras={"exits.bias": torch.zeros(1)})
    assert m.to(device="meta").extras["exits.bias"].device.type == "meta"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_new_tokens_begin_as_the_mean_of_the_known_ones_in_a_padded_matrix_too(
    padding: int, tied: bool
) -> None:
    tokenizer = byte_level()
    known = tokenizer.vocab_size
    padded = Model.random(replace(LLAMA, vocab_size=known + padding, tied=tied))
    grown = Model(padded.config, padded.weights, tokenizer).with_tokens(["[A]", "[B]"])
    assert grown.tokenizer.find_id("[B]") == known + 1
    assert grown.config.vocab_size == known + max(2, padding)
    for name in ("embed",) if tied else ("embed", "head"):
        old, new = padded.weights[name], grown.weights[name]
        assert torch.equal(new[:known], old[:known])
        close(new[known : known + 2], old[:known].mean(0).expand(2, -1), 1e-6)
        assert torch.equal(new[known + 2 :], old[known + 2 :])


# ------------------------------------------------------------------ tables of cos and sin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 6, 64])
def test_no_bit_of_a_rotation_depends_on_how_long_the_tables_are(
    dtype: torch.dtype, width: int
) -> None:
    config = replace(LLAMA, head_dim=width)
    whole = ops.rotary_tables(config, dtype, torch.device("cpu"), 20_000)
    for n in (1, 3, 64, 4096, 8192, 19_999):
        for part, all_of_it in zip(
            ops.rotary_tables(config, dtype, torch.device("cpu"), n), whole, strict=True
        ):
            assert len(part) == n and torch.equal(part, all_of_it[:n])


def test_tables_double_up_to_the_context() -> None:
    """4096 positions at first; then 8192, 16384, ...; never more than the context has."""
    endless = replace(LLAMA, max_positions=2**31)
    assert [ops.rotary_rows(endless, n) for n in (0, 4096, 4097, 9000)] == [4096, 4096, 8192, 16384]
    assert [ops.rotary_rows(LLAMA, n) for n in (0, 5000)] == [LLAMA.max_positions] * 2


PATHS = {
    "blocks": (torch.float64, False),
    "engine": (torch.float32, False),
    "engine, half": (torch.bfloat16, False),
    "steps of fixed shape": (torch.float64, True),
}


@pytest.mark.parametrize(("dtype", "fixed"), PATHS.values(), ids=PATHS)
def test_a_text_that_outgrows_the_tables_has_the_bits_of_whole_tables(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, fixed: bool
) -> None:
    """A context of 2**31 positions, tables of 8 at first, and a text of 150 tokens."""
    ids = [(7 * i) % V for i in range(150)]
    expected = model(replace(LLAMA, max_positions=512), dtype=dtype)
    want = expected.session()
    monkeypatch.setattr(ops, "ROTARY_ROWS", 8)
    grown = model(replace(LLAMA, max_positions=2**31), dtype=dtype)
    if fixed:
        grown._static = CudaGraphRunner(grown._path)  # type: ignore[arg-type]
    got = grown.session()
    for first in range(0, len(ids), 10):  # many short passes, and a tree after each
        for session in (want, got):
            session.extend(ids[first : first + 10])
        a, b = want.score(TREE).logits, got.score(TREE).logits
        assert torch.allclose(a, b, rtol=0, atol=1e-10) if fixed else torch.equal(a, b)
    assert torch.equal(grown.logits(ids), expected.logits(ids))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tables_grow_between_passes_and_not_in_layers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """200 tokens, one a pass, through three layers: larger tables are made once each."""
    monkeypatch.setattr(ops, "ROTARY_ROWS", 8)
    sizes: list[int] = []
    for module in (engine, blocks):
        make = module.rotary_tables
        monkeypatch.setattr(
            module,
            "rotary_tables",
            lambda *given, make=make: (sizes.append(given[3]), make(*given))[1],
        )
    session = model(replace(LLAMA, max_positions=2**31), dtype=dtype).session()
    session.extend([0])
    session.score(TokenTree())
    sizes.clear()  # those of loading
    for i in range(200):
        session.extend([i % V])
        session.score(TokenTree())
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 256
