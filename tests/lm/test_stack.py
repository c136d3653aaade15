"""A head's own layers are LLaMA's layers, whoever runs them, and a row sees its ancestors alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.lm.small import GPT2, LLAMA, close, model
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.heads import embed_tokens
from tinyspec.lm.model import Model
from tinyspec.lm.stack import HeadLayer, Stack, UnrolledLayer, head_config, layer_shapes
from tinyspec.tree import ROOT

ONE = replace(LLAMA, n_layers=1)
D, Q, KV, F = ONE.d_model, ONE.q_dim, ONE.kv_dim, ONE.d_ff


def layer_of(target: Model, lead: str = "layers.0.") -> dict[str, Tensor]:
    """Return the target's first layer under a head's names."""
    w = target.weights
    q, k, v = w["0.qkv.weight"].split((Q, KV, KV))
    gate, up = w["0.up.weight"].chunk(2)
    parts = {
        "input_layernorm": w["0.norm1.weight"],
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": w["0.out.weight"],
        "post_attention_layernorm": w["0.norm2.weight"],
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": w["0.down.weight"],
    }
    return {f"{lead}{name}.weight": weight.clone() for name, weight in parts.items()}


TARGET = model(ONE)
WHOLE = layer_of(TARGET)
PARTS = {
    "whole": WHOLE,
    "no input norm": {name: w for name, w in WHOLE.items() if "input" not in name},
    "attention alone": {
        name: w for name, w in WHOLE.items() if "mlp" not in name and "post" not in name
    },
}


def draw(n: int, width: int = D) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def new_stack(weights: dict[str, Tensor] = WHOLE, target: Model = TARGET) -> Stack:
    return Stack(target, [HeadLayer(target, weights)], "head", [])


def run_dense(x: Tensor, weights: dict[str, Tensor] = WHOLE) -> Tensor:
    return UnrolledLayer(TARGET.config, weights).run(x[None])[0]


def test_a_whole_layer_is_the_layer_of_the_transformer() -> None:
    ids = [3, 1, 4, 1, 5]
    blocks = TARGET.torch_blocks()
    expected = next(blocks.layer_states(torch.tensor([ids])))[0]
    x = embed_tokens(TARGET, ids)
    close(new_stack().run(x, range(-1, 4)), expected)
    close(run_dense(x), expected)


@pytest.mark.parametrize("parts", PARTS)
def test_rows_that_are_run_one_by_one_are_the_dense_pass(parts: str) -> None:
    """So the tables of cos and sin hold every position, however they grow."""
    x, stack = draw(9), new_stack(PARTS[parts])
    rows = [stack.run(x[i : i + 1], [i - 1]) for i in range(9)]
    close(torch.cat(rows), run_dense(x, PARTS[parts]))


def test_a_long_prompt_runs_in_pieces_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = draw(9), {name: w for name, w in WHOLE.items() if "input" not in name}
    whole = new_stack(wide).run(x, range(-1, 8), first_input=x)
    monkeypatch.setattr("tinyspec.lm.stack.PREFILL_CHUNK", 4)
    stack = new_stack(wide)
    close(stack.run(x, range(-1, 8), first_input=x, head_rows=1, prefill=True), whole)
    assert [(r.rows, r.head_rows) for r in stack.forward_log] == [(4, 0), (4, 0), (1, 1)]


def test_a_row_attends_to_its_ancestors_alone() -> None:
    """Two branches after three rows, run together: each is the dense pass of its own path."""
    x, stack = draw(8), new_stack()
    stack.run(x[:3], range(-1, 2))
    first = stack.run(x[3:5], [2, 2])
    second = stack.run(x[5:8], [3, 4, 3])
    for got, path in (
        (first[0], [0, 1, 2, 3]),
        (first[1], [0, 1, 2, 4]),
        (second[0], [0, 1, 2, 3, 5]),
        (second[1], [0, 1, 2, 4, 6]),
        (second[2], [0, 1, 2, 3, 7]),
    ):
        close(got, run_dense(x[path])[-1])


def test_rows_that_were_cut_leave_no_trace() -> None:
    x, stack = draw(6), new_stack()
    stack.run(x[:4], [ROOT, 0, 1, 1])
    stack.cut(2)
    stack.cut(5)  # more than there are: nothing to drop
    assert len(stack) == 2
    close(stack.run(x[4:], [1, 2]), run_dense(x[[0, 1, 4, 5]])[2:])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_later_runs_continue_every_position_on_its_own(groups: int) -> None:
    """Run j at row t is row t + j of a chain: the inputs 0 .. t of the first run, then one of each
    later run.
    """
    config = replace(ONE, n_kv_heads=4 // groups)
    weights = {name: draw(*shape) / 4 for name, shape in layer_shapes(config).items() if shape[1:]}
    weights["layers.0.post_attention_layernorm.weight"] = draw(D, 1)[:, 0]
    runs, layer = [draw(5), draw(6)[:5], draw(7)[:5]], UnrolledLayer(config, weights)
    outputs = [layer.run(x[None])[0] for x in runs]
    target = model(config)
    for t in range(5):
        chain = torch.cat((runs[0][: t + 1], runs[1][t : t + 1], runs[2][t : t + 1]))
        expected = new_stack(weights, target).run(chain, range(-1, t + 2))[t:]
        close(torch.stack([output[t] for output in outputs]), expected)


def test_attention_may_read_a_wider_input_than_the_stream() -> None:
    """As EAGLE-3's layer does: q, k and v of [token; state], added to the state."""
    wide = {name: w for name, w in WHOLE.items() if "input" not in name}
    for name in ("q", "k", "v"):
        key = f"layers.0.self_attn.{name}_proj.weight"
        wide[key] = torch.cat((wide[key], draw(len(wide[key]), D)), dim=1)
    x, both = draw(4), torch.cat((draw(4), draw(5)[:4]), dim=1)
    got = new_stack(wide).run(x, range(-1, 3), first_input=both)
    close(got, UnrolledLayer(TARGET.config, wide).run(x[None], both[None])[0])
    moved = both + torch.cat((torch.zeros(4, D), torch.ones(4, D)), dim=1)
    assert not torch.allclose(got, new_stack(wide).run(x, range(-1, 3), first_input=moved))


def test_each_pass_is_in_the_forward_log() -> None:
    stack = new_stack()
    stack.run(draw(3), range(-1, 2), head_rows=1, prefill=True)
    stack.run(draw(2), [2, 2], head_rows=2)
    assert stack.forward_log == [
        ForwardRecord("head", 3, 3.0, 1, 0, True),
        ForwardRecord("head", 2, 2.0, 2),
    ]
    half = new_stack(PARTS["attention alone"])
    half.run(draw(3), range(-1, 2))
    assert half.forward_log == [ForwardRecord("head", 3, 1.5, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_target_of_another_type_the_layer_is_the_same_up_to_rounding(
    dtype: torch.dtype,
) -> None:
    x = draw(5)
    got = new_stack(WHOLE, model(ONE, dtype=dtype)).run(x, [ROOT, 0, 1, 1, 3])
    expected = new_stack().run(x, [ROOT, 0, 1, 1, 3])
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.05)


def test_a_target_with_learned_positions_has_rotated_layers_too() -> None:
    """Such a layer is LLaMA's: its row i stands at position i, so the order of rows matters."""
    config = head_config(replace(GPT2, n_layers=2))
    assert (config.positions, config.norm, config.gated, config.n_layers) == (
        "rope",
        "rms",
        True,
        1,
    )
    target = model(GPT2)
    weights = {name: draw(*shape) / 4 for name, shape in layer_shapes(GPT2).items() if shape[1:]}
    weights["layers.0.post_attention_layernorm.weight"] = draw(D, 1)[:, 0]
    x = draw(4)
    got = new_stack(weights, target).run(x, range(-1, 3))
    close(got, UnrolledLayer(GPT2, weights).run(x[None])[0])
    swapped = new_stack(weights, target).run(x[[1, 0, 2, 3]], range(-1, 3))
    assert not torch.allclose(got[-1], swapped[-1])


def test_a_layer_has_the_tensor_names_of_llama() -> None:
    config = Config(99, 8, 3, 2, 1, 4, 12, 64)
    assert layer_shapes(config) == {
        "layers.0.self_attn.q_proj.weight": (8, 8),
        "layers.0.self_attn.k_proj.weight": (4, 8),
        "layers.0.self_attn.v_proj.weight": (4, 8),
        "layers.0.self_attn.o_proj.weight": (8, 8),
        "layers.0.mlp.gate_proj.weight": (12, 8),
        "layers.0.mlp.up_proj.weight": (12, 8),
        "layers.0.mlp.down_proj.weight": (8, 12),
        "layers.0.post_attention_layernorm.weight": (8,),
    }
