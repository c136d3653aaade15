"""Peers on a tiny model: the same ids, as many tokens, counted passes, and clear errors."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lm.test_gguf import CONFIG, GPT2
from tests.zoo import TEXT, Zoo, tiny_zoo
from tinyspec import models
from tinyspec.bench import llamacpp, peers
from tinyspec.bench.arms import TechniqueArm, check_token_balance
from tinyspec.bench.curve import TimedForward
from tinyspec.bench.peers import TransformersArm
from tinyspec.bench.plan import PLAIN, STORED, ArmSpec, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint, gguf_export
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def big(zoo: Zoo) -> Model:
    return models.load(zoo.big, dtype="float32")


def make_job(model: Model, tokens: int = 12) -> Job:
    return Job("qa", "0", 0, tuple(model.tokenizer.encode(TEXT)[:40]), tokens)


@pytest.mark.parametrize(
    "label", ["transformers", "transformers:lookup=4", "transformers:assistant=SMALL:tokens=3"]
)
def test_transformers_makes_the_same_tokens_and_its_forward_passes_are_counted(
    zoo: Zoo, big: Model, label: str
) -> None:
    pytest.importorskip("transformers")
    settings = BenchSettings(model=zoo.big, dtype="float32")
    spec = ArmSpec.parse(label.replace("SMALL", "s"))
    spec = ArmSpec(
        spec.name, tuple((k, zoo.small if k == "assistant" else v) for k, v in spec.knobs)
    )
    (arm,) = peers.make_peer_arms([spec], settings, big, 96)
    job = make_job(big)
    made = arm.run(job, 0, time.perf_counter)
    plain = TechniqueArm(ArmSpec(PLAIN), big, settings).run(job, 0, time.perf_counter)
    check_token_balance(made, job, arm.label)
    assert made.ids == plain.ids
    assert 1 <= made.early <= job.tokens
    assert made.nodes is not None
    if label == "transformers":
        assert (made.calls, made.draft_calls, made.nodes, made.early) == (12, 0, 0, 1)
    else:
        assert made.calls <= 12
        assert made.nodes >= 12 - made.calls
        assert bool(made.draft_calls) == ("assistant" in label)
    assert arm.run(job, 0, time.perf_counter)._replace(
        prefill=0, decode=0, first=0
    ) == made._replace(prefill=0, decode=0, first=0)
    arm.close()


def test_transformers_samples_by_seed(zoo: Zoo, big: Model) -> None:
    pytest.importorskip("transformers")
    (arm,) = peers.make_peer_arms(
        [ArmSpec("transformers")],
        BenchSettings(model=zoo.big, dtype="float32", temperature=1.0),
        big,
        96,
    )
    texts = [arm.run(make_job(big), seed, time.perf_counter).ids for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_transformers_forwards_leave_the_cache_as_it_was(zoo: Zoo, big: Model) -> None:
    pytest.importorskip("transformers")
    (arm,) = peers.make_peer_arms(
        [ArmSpec("transformers")], BenchSettings(model=zoo.big, dtype="float32"), big, 96
    )
    assert isinstance(arm, TransformersArm)
    forwards: TimedForward = arm.forwards(20)
    for k in (1, 5, 3):
        forwards.prepare(k)
        assert arm.forwards(20).cache.get_seq_length() == 20
        forwards.run(k)
        assert forwards.cache.get_seq_length() == 20 + k  # type: ignore[attr-defined]


def test_a_peer_that_is_not_installed_names_the_extra(
    zoo: Zoo, big: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BenchSettings(model=zoo.big, dtype="float32")
    for module, label in (("llama_cpp", "llama.cpp"), ("transformers", "transformers")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            TinyspecError, match=rf"{label} is not installed: pip install 'tinyspec\[peers\]'"
        ):
            peers.make_peer_arms([ArmSpec(label)], settings, big, 96)


def test_llama_cpp_can_run_the_models_own_file(zoo: Zoo, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert llamacpp.find_own_file(str(file)) == llamacpp.find_own_file(str(tmp_path)) == file
    with pytest.raises(TinyspecError, match=r"has no \.gguf file of its own: take llama\.cpp:wei"):
        llamacpp.find_own_file(zoo.big)


def test_a_run_with_weights_as_stored_gives_no_dtype_to_the_loader() -> None:
    assert BenchSettings(dtype=STORED).load_dtype is None
    assert BenchSettings(dtype="float32").load_dtype == "float32"


def test_a_wrong_knob_of_a_peer_is_an_error(zoo: Zoo, big: Model) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TinyspecError, match="did you mean 'lookup'"):
        peers.make_peer_arms(
            [ArmSpec.parse("transformers:lokup=3")],
            BenchSettings(model=zoo.big, dtype="float32"),
            big,
            96,
        )


# ---------------------------------------------------------------------- .gguf


@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0"])
def test_exported_weights_read_back(config: Config, kind: str, tmp_path: Path) -> None:
    m = Model.random(config, seed=1)
    gguf_export.write_gguf(tmp_path / "m.gguf", m, kind)
    parts = checkpoint.read_checkpoint(tmp_path / "m.gguf")
    shape = (
        "d_model",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "d_ff",
        "max_positions",
        "norm_eps",
        "tied",
    )
    assert all(getattr(parts.config, name) == getattr(config, name) for name in shape)
    tolerance = {"float32": 0.0, "bfloat16": 2**-8, "q8_0": 1 / 127}[kind]
    for name, weight in m.weights.items():
        spread = weight.abs().max() if kind == "q8_0" else weight.abs()
        assert ((parts.weights[name] - weight).abs() <= tolerance * spread + 1e-9).all(), name


def test_weights_that_cannot_be_exported_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TinyspecError, match="q4"):
        gguf_export.write_gguf(tmp_path / "m.gguf", Model.random(CONFIG), "q4")


# ----------------------------------------------------------------- llama.cpp, where it is installed

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES = {
    "llama": CONFIG,
    "gpt2": GPT2,
    "untied": replace(CONFIG, tied=False),
    "llama3": replace(CONFIG, rope_scaling=LLAMA3),
    "linear": replace(CONFIG, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "qwen2": replace(CONFIG, family="qwen2", qkv_bias=True),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0"])
def test_llama_cpp_makes_as_many_tokens_and_in_float32_the_same(shape: str, kind: str) -> None:
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: pip install 'tinyspec[peers]'"
    )
    m = Model.random(SHAPES[shape], seed=3, scale=0.4)
    settings, job = (
        BenchSettings(model="random", dtype="float32"),
        Job("qa", "0", 0, (5, 7, 5, 11, 13, 5), 12),
    )
    (arm,) = peers.make_peer_arms(
        [ArmSpec("llama.cpp", (("weights", kind), ("repack", False)))], settings, m, 32
    )
    made = arm.run(job, 0, time.perf_counter)
    check_token_balance(made, job, arm.label)
    assert made.calls == 12
    if kind == "float32":
        assert (
            made.ids == TechniqueArm(ArmSpec(PLAIN), m, settings).run(job, 0, time.perf_counter).ids
        )
    assert arm.run(job, 0, time.perf_counter).ids == made.ids
    forwards: TimedForward = arm.forwards(20)  # type: ignore[attr-defined]
    for k in (1, 5, 3):
        forwards.prepare(k)
        forwards.run(k)
    assert arm.run(job, 0, time.perf_counter).ids == made.ids
    arm.close()


def test_llama_cpps_own_lookup_writes_the_text_of_its_plain_decoding() -> None:
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: pip install 'tinyspec[peers]'"
    )
    m = Model.random(CONFIG, seed=3, scale=0.02)
    settings, job = BenchSettings(dtype="float32"), Job("qa", "0", 0, (5, 7, 5, 11, 13, 5), 24)
    labels = ("llama.cpp:repack=false", "llama.cpp:lookup=4")
    specs = [ArmSpec.parse(label) for label in labels]
    plain, lookup = peers.make_peer_arms(specs, settings, m, 32)
    expected = plain.run(job, 0, time.perf_counter)
    for _ in range(2):
        made = lookup.run(job, 0, time.perf_counter)
        check_token_balance(made, job, lookup.label)
        assert made.ids == expected.ids and made.early == 1
        assert made.calls < expected.calls and made.nodes is not None and made.nodes > 0
    lookup.close()


def test_llama_cpp_samples_by_seed_and_reports_errors() -> None:
    pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed: pip install 'tinyspec[peers]'"
    )
    m = Model.random(CONFIG, seed=3)
    settings, job = (
        BenchSettings(dtype="float32", temperature=1.0, top_p=0.9),
        Job("qa", "0", 0, (5, 7), 12),
    )
    (arm,) = peers.make_peer_arms([ArmSpec("llama.cpp")], settings, m, 32)
    texts = [arm.run(job, seed, time.perf_counter).ids for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    narrow = Model.random(replace(CONFIG, d_ff=48))
    for wrong, model, says in (
        ("llama.cpp:weights=q4", m, "not 'q4'"),
        ("llama.cpp:kind=q8_0", m, "no knob 'kind'"),
        ("llama.cpp:weights=q8_0", narrow, "blocks of 32"),
        ("llama.cpp:lookup=0", m, "from 1 on"),
        ("llama.cpp:lookup=4:repack=false", m, "without repack"),
    ):
        with pytest.raises(TinyspecError, match=says):
            peers.make_peer_arms([ArmSpec.parse(wrong)], settings, model, 32)
