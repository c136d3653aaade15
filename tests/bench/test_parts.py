"""The parts of a forward pass: each computes what it does in the pass; together they are it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.bench.fakes import Hand
from tests.lm.small import LLAMA, model
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec import _core
from tinyspec.bench import curve
from tinyspec.bench.experiments import parts
from tinyspec.errors import TinyspecError
from tinyspec.pairing import advised_knobs
from tinyspec.technique import find_technique

compiled = pytest.mark.skipif(
    _core.compute is None, reason="NOT COMPILED: there are no layers to take apart"
)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def layers(cached: int = 9, most: int = 8) -> parts.CompiledLayers:
    m = model(LLAMA, dtype=torch.float32)
    assert m.engine is not None
    return parts.CompiledLayers(m, m.engine, cached, most)


@compiled
@pytest.mark.parametrize("k", [1, 3, 8])
def test_layers_alone_compute_what_they_compute_in_the_forward_pass(k: int) -> None:
    """Given the embeddings of the text's own tokens they end at its own logits, to the bit."""
    alone = layers()
    m, text = alone.session.model, alone.session.text
    alone.rows[k] = m.weights["embed"][torch.tensor(text[9 : 9 + k])]
    states = torch.from_numpy(alone.run(k, [(9 + row + 1, ()) for row in range(k)]))
    assert torch.equal(alone.engine.compute_logits(states), m.logits(text)[9 : 9 + k])


@compiled
def test_positions_that_see_themselves_alone_attend_to_no_text() -> None:
    """Whatever stands after them, and whoever stands beside them."""
    short, long = layers(cached=1), layers(cached=30)
    for k in (1, 8):
        one, other = (x.run(k, [(0, (x.cached + row,)) for row in range(k)]) for x in (short, long))
        assert torch.allclose(torch.from_numpy(one), torch.from_numpy(other), atol=1e-5)
        seeing = long.run(k, [(31 + row, ()) for row in range(k)])
        assert not torch.allclose(torch.from_numpy(seeing), torch.from_numpy(other), atol=1e-2)


@compiled
def test_the_matrices_are_those_of_all_layers_once_each() -> None:
    alone = layers()
    weights = [w for name, w in model(LLAMA).weights.items() if w.ndim == 2 and name != "embed"]
    assert sorted(out * inputs for _, out, inputs in alone.steps) == sorted(
        w.numel() for w in weights
    )
    alone.multiply_matrices(8)
    _, out, _ = alone.steps[-1]
    expected = model(LLAMA, dtype=torch.float32).weights["2.down.weight"].sum(dim=1)
    made = torch.from_numpy(alone.made.reshape(-1)[: 8 * out].reshape(8, out))
    assert torch.allclose(made, expected.expand(8, -1), atol=1e-5)  # of rows of ones


def test_the_parts_add_up_to_the_whole() -> None:
    """Each arm takes its own time; what lies between two of them is a part too."""
    hand = Hand()
    takes = {
        parts.WHOLE: 20.0,
        parts.LAYERS: 14.0,
        parts.BLIND: 9.0,
        parts.MATRICES: 7.0,
        parts.HEAD: 3.0,
        parts.GUESSED: 30.0,
    }

    def work(label: str) -> Any:
        return lambda k: hand.wind(1e-3 * k * takes[label])

    arms = [parts.PassPart(label, work(label)) for label in takes]
    arms[0].weights = 100
    meters = [
        curve.Meter(kind, kind, 100, lambda: hand.wind(1e-3)) for kind in ("bandwidth", "peak")
    ]
    raw = curve.measure_curve(arms, meters, 3, hand, ks=(1, 2), settle=hand.wind)
    found = parts.summarize_parts(raw, LLAMA, 4, 9)
    for k, of in found["milliseconds"].items():
        shares = {name: of[name] / int(k) for name in ("whole", *parts.PARTS)}
        assert shares == pytest.approx(
            {"whole": 20, "matrices": 7, "head": 3, "attention": 5, "between": 2, "around": 3}
        )
        assert sum(of[part] for part in parts.PARTS) == pytest.approx(of["whole"])
        assert of["guesses"] == pytest.approx(30 * int(k))
        assert of["floor"] == pytest.approx(
            max(1.0, curve.count_operations(LLAMA, int(k), 9) / 100)
        )
    head = 4 * LLAMA.vocab_size * LLAMA.d_model
    assert found["reads"] == pytest.approx(
        {
            "matrices": (curve.count_weight_bytes(LLAMA, 4) - head) / 7e-3,
            "head": head / 3e-3,
            "fastest": 100 / 1e-3,
        }
    )


@compiled
def test_the_command_writes_the_result_and_the_table(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "SETTLE", 0.0)
    monkeypatch.setattr(parts.curve, "make_meters", lambda model: [
        curve.Meter(kind, kind, 100, lambda: sum(range(999))) for kind in ("bandwidth", "peak")
    ])  # fmt: skip
    out, page = tmp_path / "p.json", tmp_path / "p.md"
    call = (
        "bench",
        "parts",
        "--model",
        zoo.big,
        "--cached",
        "8,40",
        "--rounds",
        "1",
        "--quiet",
        "--dtype",
        "float32",
    )
    result = run(*call, "--out", str(out), "--markdown", str(page))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found["figures"]) == {"8", "40"}
    assert all(
        set(of["milliseconds"]) == {str(k) for k in parts.KS} for of in found["figures"].values()
    )
    assert "32 after 40" in page.read_text(encoding="utf-8") and "attention" in result.stdout
    said = "\n".join(parts.describe_parts(found))
    assert "From 1 to 8 positions after 40 tokens" in said and "| 1 after 8 |" in said


def test_a_round_costs_its_draft_tokens_and_the_pass_that_verifies_them() -> None:
    """Four draft tokens of 0.15 ms and a pass of 0.9: 1.5 / 0.5 = 3 plain steps."""
    assert advised_knobs(find_technique("speculative_decoding"), [tinyspec.load("apprentice")]) == {
        "gamma": parts.GAMMA
    }

    def result(name: str, wholes: dict[str, float], guesses: float = 0.0) -> dict[str, Any]:
        of = {k: {"whole": whole, "guesses": guesses} for k, whole in wholes.items()}
        return {"command": name, "figures": {"128": {"milliseconds": of}}}

    table = parts.tabulate_race_round(
        result("big", {"1": 0.5, "4": 9.0, "5": 0.9}), result("small", {"1": 9.0, "4": 9.0}, 0.6)
    )
    assert table.splitlines()[2:] == [
        "| plain step of the target | 0.50 | 1.00 |",
        "| forward pass that verifies 4 draft tokens | 0.90 | 1.80 |",
        "| one draft token | 0.15 | 0.30 |",
        "| round of 4 draft tokens | 1.50 | 3.00 |",
    ]


@compiled
def test_a_model_without_compiled_layers_is_one_line(zoo: Zoo) -> None:
    assert "float32 or bfloat16" in failed(
        run("bench", "parts", "--model", zoo.big, "--dtype", "float64", "--quiet")
    )
    assert "do not fit" in failed(
        run("bench", "parts", "--model", zoo.big, "--cached", "70", "--quiet")
    )
    assert "--cached" in failed(
        run("bench", "parts", "--model", zoo.big, "--cached", "no", "--quiet")
    )


def test_without_compiled_layers_there_is_nothing_to_take_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_core, "compute", None)
    with pytest.raises(TinyspecError, match="compiled"):
        parts.make_timed_parts(model(LLAMA, dtype=torch.float32), 9, 8)


@compiled
@pytest.mark.parametrize("k", [1, 4])
def test_draft_tokens_run_one_position_each(k: int) -> None:
    m = model(LLAMA, dtype=torch.float32)
    arm = parts.DraftChain(m, 9)
    for _ in range(2):
        arm.prepare(k)
        before = len(arm.session.forward_log)
        arm.run(k)
        assert [call.rows for call in arm.session.forward_log[before:]] == [1] * k
