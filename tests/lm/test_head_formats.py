"""Heads in the formats of other programs: the loaders' tables, the way there and back, damage.

The tables are transcribed from the loaders (names, shapes, types, keys of config.json). Sources:

vllm-medusa  vllm-project/vllm: vllm/model_executor/models/medusa.py at 01dbb08195ca9c70ac9044786a90
             6a353e07fcdf; vllm/transformers_utils/configs/medusa.py at 0531c2226a6a25cd96ccc856f3bd
             a3f0bb4efb5f
vllm-eagle   vllm-project/vllm: vllm/model_executor/models/llama_eagle.py at 00da92319af4b2ad2cde852
             5b7b609c779bdc52f; vllm/transformers_utils/configs/eagle.py at 23c5aa92d517802488a0c77a
             5f58cd0a2019c5a3
speculators  vllm-project/speculators at c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b: src/speculators/
             model.py, config.py and models/eagle3/{config,core,model_definitions}.py;
             vllm-project/vllm: vllm/model_executor/models/llama_eagle3.py at 00bd1493b3e82d6c13c68e
             e8a0e1c5a96707e190 and vllm/transformers_utils/configs/speculators/algos.py at cfb173ab
             8e1b8e44dd35f8b5188255b6a03e13ec
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tinyspec
from tests.lm import small
from tests.zoo import failed, run, tiny_zoo
from tinyspec.cli.models import HEAD_FORMATS
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import begin_decoder
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.head_formats import FORMATS, find_format, read_head_method
from tinyspec.lm.heads import RANKS, TOKEN_MAP, HeadFile, write_head
from tinyspec.lm.model import Model
from tinyspec.pairing import attach_head, export_head, read_fitting_head
from tinyspec.technique import Card, find_technique

V, D, LAYERS, FF = 13, 16, 8, 24
QUERIES, KEYS = 16, 8  # numbers of all heads of queries, and of keys
TIED = replace(small.LLAMA, n_layers=LAYERS)
TARGETS = {
    "tied": TIED,
    "untied": replace(TIED, tied=False),
    "llama3": replace(
        TIED,
        rope_theta=500.0,
        norm_eps=1e-2,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": replace(TIED, qkv_bias=True, family="qwen2"),
    "gpt2": replace(small.GPT2, n_layers=LAYERS),
}
IDS = [1, 3, 4, 9, 12]  # of a draft vocabulary: gaps before, between and none after
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "vllm-medusa": [
        {"heads": 2, "layers": 1, "shared_rows": False, "draft_vocab": 0},
        {"heads": 3, "layers": 2, "shared_rows": True, "draft_vocab": 0},
        {"heads": 1, "layers": 1, "shared_rows": False, "draft_vocab": len(IDS)},
        {"heads": 2, "layers": 1, "shared_rows": True, "draft_vocab": len(IDS)},
    ],
    "vllm-eagle": [{"draft_vocab": 0}],
    "speculators": [
        {"draft_vocab": 0, "steps": 7},
        {"draft_vocab": len(IDS), "steps": 3},
    ],
}
CASES = [(format, i) for format, some in SETTINGS.items() for i in range(len(some))]
cases = pytest.mark.parametrize(("format", "number"), CASES)


def card_of(format: str) -> Card:
    return find_technique(FORMATS[format].method)


def make_target(folder: Path, name: str = "tied") -> Model:
    """A target in bfloat16 that is written to a folder and read from there."""
    small.model(TARGETS[name], seed=3, dtype=torch.bfloat16).save(folder / "target")
    return tinyspec.load(folder / "target", dtype="bfloat16")


def random_head(target: Model, format: str, number: int, seed: int = 0) -> HeadFile:
    """A head as `tinyspec train head` writes it: bfloat16, with float32 ranks that fall."""
    card, generator = card_of(format), torch.Generator().manual_seed(seed)
    assert card.trained is not None
    settings = card.trained.settings(**SETTINGS[format][number])
    weights = dict[str, torch.Tensor]()
    for name, shape in card.trained.all_shapes(target.config, settings).items():
        weights[name] = torch.randn(shape, generator=generator).mul(0.5).bfloat16()
        if name == TOKEN_MAP:
            weights[name] = torch.tensor(IDS)
        elif name == RANKS:
            weights[name] = torch.rand(shape, generator=generator).sort(descending=True).values
    check = embedding_checksum(target.weights["embed"])
    return HeadFile(card.name, target.name, check, vars(settings), {}, weights)


def export(folder: Path, target: Model, format: str, number: int = 0) -> HeadFile:
    """Write a random head to `folder`/ours and, exported, to `folder`/theirs; return it."""
    head = random_head(target, format, number)
    write_head(folder / "ours", head)
    export_head(folder / "ours", format, folder / "theirs", target=folder / "target")
    return head


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(str(folder / "model.safetensors"))


def change(folder: Path, values: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Change keys of config.json, and tensors; None removes one. "__" is a dot in a name."""
    config, weights = read_config(folder) | (values or {}), read_tensors(folder)
    for name, tensor in tensors.items():
        weights[name.replace("__", ".")] = tensor
    kept = {name: w for name, w in weights.items() if w is not None}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    config = {name: value for name, value in config.items() if value != "removed"}
    (folder / "config.json").write_text(json.dumps(config))


def make_foreign(folder: Path) -> None:
    """Make an exported folder one of another program: without what only we read."""
    change(folder, {"tinyspec": "removed"})


# ---------------------------------------------------------------------- the tables

BF16, INT64, BOOL = torch.bfloat16, torch.int64, torch.bool
Table = dict[str, tuple[tuple[int, ...], torch.dtype]]


def layer_table(wide: int, queries: int, keys: int) -> Table:
    """LlamaDecoderLayer without input norm; queries, keys and values read `wide` numbers."""
    shapes = {
        "self_attn.q_proj.weight": (queries, wide),
        "self_attn.k_proj.weight": (keys, wide),
        "self_attn.v_proj.weight": (keys, wide),
        "self_attn.o_proj.weight": (D, queries),
        "mlp.gate_proj.weight": (FF, D),
        "mlp.up_proj.weight": (FF, D),
        "mlp.down_proj.weight": (D, FF),
        "post_attention_layernorm.weight": (D,),
    }
    return {f"layers.0.{name}": (shape, BF16) for name, shape in shapes.items()}


def expected_table(format: str, settings: dict[str, Any], keys: int) -> Table:
    words = settings["draft_vocab"] or V
    if format == "vllm-medusa":
        table: Table = {}
        for i in range(settings["heads"]):
            for j in range(settings["layers"]):
                table[f"blocks.{i}.layers.{j}.weight"] = ((D, D), BF16)
                table[f"blocks.{i}.layers.{j}.bias"] = ((D,), BF16)
            if not settings["shared_rows"] or i == 0:
                table[f"lm_heads.{i}.weight"] = ((words, D), BF16)
        return table | ({"token_map": ((words,), INT64)} if words < V else {})
    if format == "vllm-eagle":
        return {"fc.weight": ((D, 2 * D), BF16), **layer_table(D, QUERIES, keys)}
    table = {
        "embed_tokens.weight": ((V, D), BF16),
        "fc.weight": ((D, 3 * D), BF16),
        **layer_table(2 * D, QUERIES, keys),
        "layers.0.input_layernorm.weight": ((D,), BF16),
        "layers.0.hidden_norm.weight": ((D,), BF16),
        "norm.weight": ((D,), BF16),
        "lm_head.weight": ((words, D), BF16),
    }
    return table | ({"d2t": ((words,), INT64), "t2d": ((V,), BOOL)} if words < V else {})


@cases
@pytest.mark.parametrize("name", TARGETS)
def test_names_shapes_and_types_are_those_of_the_loader(
    name: str, format: str, number: int, tmp_path: Path
) -> None:
    export(tmp_path, make_target(tmp_path, name), format, number)
    found = read_tensors(tmp_path / "theirs")
    keys = QUERIES if name == "gpt2" else KEYS
    expected = expected_table(format, SETTINGS[format][number], keys)
    assert {key: (tuple(w.shape), w.dtype) for key, w in found.items()} == expected


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": V,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": FF,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def test_the_config_of_medusa_is_vllms(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "vllm-medusa", 3)
    values = read_config(tmp_path / "theirs")
    del values["tinyspec"]
    assert values == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "torch_dtype": "bfloat16",
        "hidden_size": D,
        "vocab_size": V,
        "truncated_vocab_size": len(IDS),
        "num_heads": 2,
        "num_hidden_layers": 1,
        "max_paths": 64,
        "topk": 10,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    renamed = [key for key in values if "num" in key and ("heads" in key or "layers" in key)]
    assert renamed == ["num_heads", "num_hidden_layers"]  # what vLLM takes for these two


def test_the_config_of_eagle_is_that_of_a_llama_of_one_layer(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "vllm-eagle")
    values = read_config(tmp_path / "theirs")
    del values["tinyspec"]
    assert values == LLAMA_CONFIG


def test_the_config_of_eagle3_is_that_of_the_speculators_package(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "speculators", 1)
    values = read_config(tmp_path / "theirs")
    del values["tinyspec"]
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    assert values == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(IDS),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": LLAMA_CONFIG,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def test_an_offset_is_the_id_minus_the_row(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "speculators", 1)
    found = read_tensors(tmp_path / "theirs")
    assert found["d2t"].tolist() == [1, 2, 2, 6, 8]  # of 1, 3, 4, 9, 12
    assert found["t2d"].nonzero().flatten().tolist() == IDS


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_rows_that_heads_share_with_the_target_are_written_out(name: str, tmp_path: Path) -> None:
    target = make_target(tmp_path, name)
    export(tmp_path, target, "vllm-medusa", 3)
    output = target.weights["embed" if name == "tied" else "head"]
    assert torch.equal(read_tensors(tmp_path / "theirs")["lm_heads.0.weight"], output[IDS])


def test_what_only_we_read_stands_in_a_section_of_its_own(tmp_path: Path) -> None:
    head = export(tmp_path, make_target(tmp_path), "vllm-eagle")
    own = read_config(tmp_path / "theirs")["tinyspec"]
    assert own.keys() == {"method", "head_of", "check", "ranks"}
    assert (own["method"], own["head_of"], own["check"]) == head[:3]


# ---------------------------------------------------------------------- there and back


@cases
@pytest.mark.parametrize("name", TARGETS)
def test_a_round_trip_keeps_settings_and_every_bit(
    name: str, format: str, number: int, tmp_path: Path
) -> None:
    target = make_target(tmp_path, name)
    head = export(tmp_path, target, format, number)
    again = read_fitting_head(tmp_path / "theirs", target, card_of(format))
    assert again[:4] == head[:4]
    assert again.weights.keys() == head.weights.keys()
    for key, tensor in head.weights.items():
        assert again.weights[key].dtype == tensor.dtype
        assert torch.equal(again.weights[key], tensor), key


@cases
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_exported_head_drafts_what_the_head_drafts(
    temperature: float, format: str, number: int, tmp_path: Path
) -> None:
    """Token for token, after several texts: the trees of both folders are equal."""
    target, card = make_target(tmp_path), card_of(format)
    export(tmp_path, target, format, number)
    models = [attach_head(target, card, tmp_path / folder) for folder in ("ours", "theirs")]
    sampling = SamplingParams(temperature)
    for n in range(1, 9):
        text, drafts = [5 * i % V for i in range(n)], []
        for model in models:
            decoder = begin_decoder(card.make, [model], text, sampling, nodes=6)
            tree = decoder.drafter.propose(decoder.context, 4, decoder.sampling, Seeded(n))
            drafts.append((list(tree.tokens), list(tree.parents)))
        assert drafts[0] == drafts[1]
        assert bool(drafts[0][0]) == (n > 1)  # after one token no state is known


def test_a_head_in_another_type_of_the_target_is_the_same_head(tmp_path: Path) -> None:
    """Rows of a bfloat16 target are recognised when the target is loaded in float32."""
    export(tmp_path, make_target(tmp_path), "vllm-medusa", 1)
    wide = tinyspec.load(tmp_path / "target", dtype="float32")
    found = read_fitting_head(tmp_path / "theirs", wide, card_of("vllm-medusa"))
    assert found.settings["shared_rows"] is True


# ---------------------------------------------------------------------- folders of other programs


@cases
def test_a_folder_of_another_program_is_read(format: str, number: int, tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = export(tmp_path, target, format, number)
    make_foreign(tmp_path / "theirs")
    found = read_fitting_head(tmp_path / "theirs", target, card_of(format))
    assert (found.method, found.settings) == (head.method, head.settings)
    for key, tensor in head.weights.items():
        assert key == RANKS or torch.equal(found.weights[key], tensor)


@pytest.mark.parametrize("format", ["vllm-medusa", "vllm-eagle"])
def test_a_head_without_ranks_drafts_a_chain(format: str, tmp_path: Path) -> None:
    target, card = make_target(tmp_path), card_of(format)
    export(tmp_path, target, format)
    make_foreign(tmp_path / "theirs")
    model = attach_head(target, card, tmp_path / "theirs")
    decoder = begin_decoder(card.make, [model], [3, 1, 4])
    tree = decoder.drafter.propose(decoder.context, 9, decoder.sampling, Seeded(0))
    depths = 2 if format == "vllm-medusa" else 5
    assert list(tree.parents) == list(range(-1, depths - 1))


def test_a_token_map_in_any_order_is_sorted_with_its_rows(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = export(tmp_path, target, "vllm-medusa", 2)
    order = torch.tensor([4, 0, 3, 1, 2])
    rows = head.weights["lm_heads.0.weight"]
    change(tmp_path / "theirs", token_map=torch.tensor(IDS)[order], lm_heads__0__weight=rows[order])
    found = read_fitting_head(tmp_path / "theirs", target, card_of("vllm-medusa")).weights
    assert found[TOKEN_MAP].tolist() == IDS
    assert torch.equal(found["lm_heads.0.weight"], rows)


def test_offsets_in_any_order_are_sorted_with_their_rows(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = export(tmp_path, target, "speculators", 1)
    order = torch.tensor([2, 4, 1, 0, 3])
    rows = head.weights["lm_head.weight"]
    offsets = torch.tensor(IDS)[order] - torch.arange(5)
    change(tmp_path / "theirs", d2t=offsets, lm_head__weight=rows[order])
    found = read_fitting_head(tmp_path / "theirs", target, card_of("speculators")).weights
    assert found[TOKEN_MAP].tolist() == IDS
    assert torch.equal(found["lm_head.weight"], rows)


def test_rows_of_the_whole_vocabulary_are_cut_to_the_token_map(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    export(tmp_path, target, "vllm-medusa", 2)
    rows = torch.randn(V, D).bfloat16()
    change(tmp_path / "theirs", lm_heads__0__weight=rows)
    found = read_fitting_head(tmp_path / "theirs", target, card_of("vllm-medusa")).weights
    assert torch.equal(found["lm_heads.0.weight"], rows[IDS])


def test_a_shared_matrix_that_is_not_the_targets_becomes_each_heads_own(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    export(tmp_path, target, "vllm-medusa", 1)
    rows = torch.randn(V, D).bfloat16()
    change(tmp_path / "theirs", lm_heads__0__weight=rows)
    found = read_fitting_head(tmp_path / "theirs", target, card_of("vllm-medusa"))
    assert found.settings["shared_rows"] is False
    assert all(torch.equal(found.weights[f"lm_heads.{i}.weight"], rows) for i in range(3))


def test_medusa_without_biases_has_zeros(tmp_path: Path) -> None:
    """vLLM reads no bias where medusa_fc_bias is not true, also if the file has one."""
    target = make_target(tmp_path)
    export(tmp_path, target, "vllm-medusa")
    change(tmp_path / "theirs", {"medusa_fc_bias": False}, blocks__0__layers__0__bias=None)
    found = read_fitting_head(tmp_path / "theirs", target, card_of("vllm-medusa")).weights
    biases = [found[f"blocks.{i}.layers.0.bias"] for i in (0, 1)]
    assert all(torch.equal(bias, torch.zeros(D, dtype=BF16)) for bias in biases)


def test_the_prefix_of_medusas_names_is_dropped(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = export(tmp_path, target, "vllm-medusa")
    folder = tmp_path / "theirs"
    tensors = {f"medusa_heads.{name}": w for name, w in read_tensors(folder).items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    found = read_fitting_head(folder, target, card_of("vllm-medusa"))
    assert found.weights.keys() == head.weights.keys()


@pytest.mark.parametrize("format", ["vllm-eagle", "speculators"])
def test_an_embedding_in_the_folder_must_be_the_targets(format: str, tmp_path: Path) -> None:
    target = make_target(tmp_path)
    head = export(tmp_path, target, format)
    embed = target.weights["embed"].clone()
    for right in (embed, None):
        change(tmp_path / "theirs", embed_tokens__weight=right)
        found = read_fitting_head(tmp_path / "theirs", target, card_of(format))
        assert found.weights.keys() == head.weights.keys()
    embed[0, 0] += 1
    change(tmp_path / "theirs", embed_tokens__weight=embed)
    with pytest.raises(TinyspecError, match=r"embed_tokens\.weight is not that of target"):
        read_fitting_head(tmp_path / "theirs", target, card_of(format))


def test_a_head_of_another_model_with_a_checksum_is_refused(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "vllm-eagle")
    other = small.model(TIED, seed=4, dtype=BF16)
    with pytest.raises(TinyspecError, match="was trained on target, not on model"):
        read_fitting_head(tmp_path / "theirs", other, card_of("vllm-eagle"))


# ---------------------------------------------------------------------- what does not fit

LAYER = "transformer_layer_config"
UNFIT: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "another width": (
        "vllm-medusa",
        0,
        {"hidden_size": 99},
        "hidden_size is 99, but target has 16",
    ),
    "another vocabulary": (
        "vllm-medusa",
        0,
        {"vocab_size": 5},
        "vocab_size is 5, but target has 13",
    ),
    "more heads than blocks": ("vllm-medusa", 0, {"num_heads": 10**9}, "the number of blocks"),
    "a truncated vocabulary without ids": (
        "vllm-medusa",
        0,
        {"truncated_vocab_size": 4},
        "token_map must give 4 different tokens",
    ),
    "a draft vocabulary of another size": (
        "speculators",
        1,
        {"draft_vocab_size": 4},
        "d2t must give 4 different tokens",
    ),
    "another MLP": (
        "vllm-eagle",
        0,
        {"intermediate_size": 25},
        "intermediate_size is 25, but a head of target",
    ),
    "more layers": ("vllm-eagle", 0, {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    "another rotation": ("vllm-eagle", 0, {"rope_theta": 500.0}, "rope_theta is 500.0"),
    "HASS": ("vllm-eagle", 0, {"add_para_norm": True}, "add_para_norm is True"),
    "another speculator": (
        "speculators",
        0,
        {"speculators_model_type": "dflash"},
        "speculators_model_type is 'dflash'",
    ),
    "a norm of the residual": (
        "speculators",
        0,
        {"norm_before_residual": True},
        "norm_before_residual is True",
    ),
    "a norm before fc": ("speculators", 0, {"norm_before_fc": True}, "norm_before_fc is True"),
    "other layers of the target": (
        "speculators",
        0,
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
        "expected None or [2, 4, 5]",
    ),
    "no layer": ("speculators", 0, {LAYER: 3}, "transformer_layer_config is 3"),
    "a layer of Qwen3": (
        "speculators",
        0,
        {LAYER: {**LLAMA_CONFIG, "model_type": "qwen3"}},
        "qk_norm is True",
    ),
    "no proposal": (
        "speculators",
        0,
        {"speculators_config": {"proposal_methods": []}},
        "with speculative_tokens",
    ),
    "ranks that are words": ("vllm-eagle", 0, {"tinyspec": {"ranks": "best"}}, "ranks is 'best'"),
    "ranks of another shape": (
        "vllm-eagle",
        0,
        {"tinyspec": {"ranks": [[1.0]]}},
        "expected [5, 10]",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_said_in_one_line(case: str, tmp_path: Path) -> None:
    format, number, values, said = UNFIT[case]
    target = make_target(tmp_path)
    export(tmp_path, target, format, number)
    change(tmp_path / "theirs", values)
    with pytest.raises(TinyspecError) as error:
        read_fitting_head(tmp_path / "theirs", target, card_of(format))
    assert said in str(error.value) and "\n" not in str(error.value)


DAMAGED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "a missing matrix": ("vllm-eagle", 0, {"layers__0__mlp__up_proj__weight": None}, "is missing"),
    "a model": ("vllm-eagle", 0, {"fc__weight": None}, "looks like a model"),
    "a bias of fc": ("vllm-eagle", 0, {"fc__bias": torch.zeros(D)}, "fc.bias is not a tensor"),
    "a norm": ("speculators", 0, {"input_norm__weight": torch.zeros(3 * D)}, "is not a tensor of"),
    "no offsets": ("speculators", 1, {"d2t": None}, "d2t must give 5 different tokens"),
    "offsets that are fractions": ("speculators", 1, {"d2t": torch.ones(5)}, "d2t must give"),
    "offsets beyond the end": ("speculators", 1, {"d2t": torch.full((5,), 9)}, "d2t must give"),
    "equal ids": (
        "speculators",
        1,
        {"d2t": torch.tensor([1, 0, 0, 0, 0])},
        "5 different tokens from 0 to 12",
    ),
    "other marks": (
        "speculators",
        1,
        {"t2d": torch.ones(V, dtype=BOOL)},
        "t2d and d2t name other tokens",
    ),
    "ids beyond the vocabulary": (
        "vllm-medusa",
        3,
        {"token_map": torch.tensor([1, 2, 3, 4, 13])},
        "token_map must give",
    ),
    "no shared matrix": ("vllm-medusa", 1, {"lm_heads__0__weight": None}, "is missing"),
    "a shared matrix of another shape": (
        "vllm-medusa",
        1,
        {"lm_heads__0__weight": torch.zeros(3, 3)},
        "has the shape [3, 3]",
    ),
    "NaN": ("speculators", 0, {"norm__weight": torch.full((D,), torch.nan)}, "not finite"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    format, number, tensors, said = DAMAGED[case]
    target = make_target(tmp_path)
    export(tmp_path, target, format, number)
    change(tmp_path / "theirs", **tensors)
    with pytest.raises(TinyspecError) as error:
        read_fitting_head(tmp_path / "theirs", target, card_of(format))
    assert said in str(error.value) and "\n" not in str(error.value)


def is_read(folder: Path, target: Model, card: Card) -> bool:
    """Whether a folder is read; if not, its error is one line."""
    message = ""
    try:
        read_fitting_head(folder, target, card)
    except TinyspecError as error:
        message = str(error)
    assert "\n" not in message
    return not message


VALUES = (None, True, -1, 0, 1.5, 10**30, "x", [], [[]], {}, {"a": 1}, "removed")


@cases
def test_any_value_in_a_config_is_read_or_refused(format: str, number: int, tmp_path: Path) -> None:
    target, card = make_target(tmp_path), card_of(format)
    export(tmp_path, target, format, number)
    whole, folder = read_config(tmp_path / "theirs"), tmp_path / "theirs"
    refused = 0
    for section in (None, "tinyspec", LAYER, "speculators_config"):
        if section is not None and section not in whole:
            continue
        for key in whole if section is None else whole[section]:
            for value in VALUES:
                values = json.loads(json.dumps(whole))
                (values if section is None else values[section])[key] = value
                (folder / "config.json").write_text(json.dumps(values))
                refused += not is_read(folder, target, card)
    assert refused > 50


@cases
def test_any_tensor_in_a_file_is_read_or_refused(format: str, number: int, tmp_path: Path) -> None:
    target, card = make_target(tmp_path), card_of(format)
    export(tmp_path, target, format, number)
    whole, folder = read_tensors(tmp_path / "theirs"), tmp_path / "theirs"
    others = [
        torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 3, 4), torch.tensor([2**62, -1]),
        torch.ones(V, dtype=BOOL), torch.zeros(5, dtype=torch.complex64),
    ]  # fmt: skip
    for name, tensor in whole.items():
        for other in (*others, tensor[:-1], tensor[None], None):
            new = {**whole, name: other}
            if other is None:
                del new[name]
            new = {key: w.contiguous() for key, w in new.items()}
            safetensors.torch.save_file(new, folder / "model.safetensors")
            if is_read(folder, target, card):
                assert name in ("t2d", "embed_tokens.weight") and other is None  # may be missing


# ---------------------------------------------------------------------- which format it is


def test_each_format_is_recognised(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    for format in FORMATS:
        folder = tmp_path / format
        folder.mkdir()
        write_head(folder / "ours", random_head(target, format, 0))
        export_head(folder / "ours", format, folder / "theirs", target=tmp_path / "target")
        assert find_format(folder / "ours") is None
        assert find_format(folder / "theirs") == format
        assert read_head_method(folder / "theirs") == FORMATS[format].method


def test_a_head_for_another_method_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    export(tmp_path, target, "vllm-eagle")
    with pytest.raises(TinyspecError, match="a head for eagle, not for medusa"):
        read_fitting_head(tmp_path / "theirs", target, find_technique("medusa"))


def test_a_model_is_no_head(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    with pytest.raises(TinyspecError, match="looks like a model, not like a head of EAGLE"):
        tinyspec.generate(target, [1, 2], method="eagle", head=tmp_path / "target")


def test_an_exported_head_is_no_model(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "vllm-eagle")
    with pytest.raises(TinyspecError, match="is no model but a head of target: use --model target"):
        tinyspec.load(tmp_path / "theirs")


# ---------------------------------------------------------------------- writing


def refuse(match: str, *args: Any, **more: Any) -> None:
    with pytest.raises(TinyspecError, match=match) as error:
        export_head(*args, **more)
    assert "\n" not in str(error.value)


def test_what_cannot_be_exported_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    where = {"target": tmp_path / "target"}
    ours, out = tmp_path / "ours", tmp_path / "out"
    write_head(ours, random_head(target, "vllm-eagle", 0))
    refuse("a head of eagle, and vllm-medusa holds heads of medusa: use vllm-eagle",
           ours, "vllm-medusa", out, **where)  # fmt: skip
    refuse("unknown format 'onnx'", ours, "onnx", out, **where)
    refuse("no such head", tmp_path / "nowhere", "vllm-eagle", out, **where)
    refuse("takes no verifier", ours, "vllm-eagle", out, verifier="x", **where)
    refuse("name its folder with --target", ours, "vllm-eagle", out)
    small.model(TIED, seed=9, dtype=BF16).save(tmp_path / "other")
    refuse("was trained on target", ours, "vllm-eagle", out, target=tmp_path / "other")
    hydra = random_head(target, "vllm-eagle", 0)._replace(method="hydra")
    write_head(tmp_path / "hydra", hydra)
    refuse(
        "no format holds heads of hydra",
        tmp_path / "hydra",
        "vllm-eagle",
        out,
        **where,
    )
    words = random_head(target, "vllm-eagle", 0)
    words = words._replace(
        settings={"draft_vocab": 5}, weights={**words.weights, TOKEN_MAP: torch.tensor(IDS)}
    )
    write_head(tmp_path / "words", words)
    refuse("this head has draft_vocab 5", tmp_path / "words", "vllm-eagle", out, **where)
    assert {path.name for path in tmp_path.iterdir()} == {
        "target",
        "ours",
        "other",
        "hydra",
        "words",
    }


def test_an_existing_folder_is_left_as_it_is(tmp_path: Path) -> None:
    export(tmp_path, make_target(tmp_path), "vllm-eagle")
    before = (tmp_path / "theirs" / "config.json").read_bytes()
    where = {"target": tmp_path / "target"}
    refuse("exists already", tmp_path / "ours", "vllm-eagle", tmp_path / "theirs", **where)
    assert (tmp_path / "theirs" / "config.json").read_bytes() == before
    refuse("in the format vllm-eagle", tmp_path / "theirs", "vllm-eagle", tmp_path / "x", **where)


@pytest.mark.parametrize("layers", range(1, 9))
def test_a_target_of_few_layers_has_no_speculators_format(layers: int, tmp_path: Path) -> None:
    """vLLM joins the states in the order of its layers: they must be different and rise."""
    target = small.model(replace(TIED, n_layers=layers), dtype=BF16)
    target.save(tmp_path / "target")
    target.name = "target"
    write_head(tmp_path / "ours", random_head(target, "speculators", 0))
    args = (tmp_path / "ours", "speculators", tmp_path / "out")
    if layers < 7:
        refuse("which a target of 7 layers or more has", *args, target=tmp_path / "target")
    else:
        assert export_head(*args, target=tmp_path / "target") == tmp_path / "out"


def test_the_verifier_can_be_named(tmp_path: Path) -> None:
    write_head(tmp_path / "ours", random_head(make_target(tmp_path), "speculators", 0))
    export_head(tmp_path / "ours", "speculators", tmp_path / "out",
                target=tmp_path / "target", verifier="org/model")  # fmt: skip
    verifier = read_config(tmp_path / "out")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "org/model"


def test_the_command_knows_every_format() -> None:
    assert list(HEAD_FORMATS) == list(FORMATS)


def test_the_command_exports_and_generate_uses_the_folder(tmp_path: Path) -> None:
    zoo = tiny_zoo(tmp_path)
    target = tinyspec.load(zoo.big)
    settings = {"heads": 2, "layers": 1, "shared_rows": True, "draft_vocab": 0}
    trained = find_technique("medusa").trained
    assert trained is not None
    shapes = trained.all_shapes(target.config, trained.settings(**settings))
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    weights[RANKS][:, :2] = torch.tensor([0.5, 0.2])
    check = embedding_checksum(target.weights["embed"])
    write_head(tmp_path / "ours", HeadFile("medusa", "big", check, settings, {}, weights))
    out, args = str(tmp_path / "theirs"), ["--format", "vllm-medusa", "--target", zoo.big]
    done = run("export", str(tmp_path / "ours"), *args, "--out", out)
    assert (done.exit_code, done.stdout.strip()) == (0, out)
    used = run("generate", "--model", zoo.big, "--method", "medusa", "--head", out, "the cat", "-n",
               "12")  # fmt: skip
    assert used.exit_code == 0, used.output
    assert used.stdout == run("generate", "--model", zoo.big, "the cat", "-n", "12").stdout
    assert "exists already" in failed(run("export", str(tmp_path / "ours"), *args, "--out", out))
    assert "not for eagle" in failed(
        run("generate", "--model", zoo.big, "--method", "eagle", "--head", out, "the cat")
    )
