"""The formats of heads that other programs load: write them, and read them back.

    format        holds       read by
    speculators   EAGLE-3     the speculators package, and vLLM's loader of its folders
    vllm-medusa   Medusa      vLLM
    vllm-eagle    EAGLE-1     vLLM

Names, shapes and keys of config.json are those that the loaders ask for. The tables with their
sources are in tests/lm/test_head_formats.py. tests/lm/test_head_formats_peer.py compares logits
with the speculators package: it passes with 0.9.0, on transformers 5.19.0 and torch 2.13.0.
tests/vllm_by_hand.py ran one head of each format in vLLM, with the results in
tutorials/results/vllm.md. vLLM 0.32.0 refuses a Medusa head with a draft vocabulary (it
forgets the name token_map when it checks what was loaded): train one with draft_vocab 0 for it. A
folder has config.json and model.safetensors.
What only we read stands in config.json's section "tinyspec": method, target, checksum, ranks.

    token_map (ids)     speculators: d2t, the id minus the row (an *offset*, not the id), and t2d,
                        whether the head has a row for a token
    shared_rows         vllm-medusa: lm_heads.0, rows of the target, written out
    target's embedding  speculators: embed_tokens, written out; vllm-eagle leaves it out

Reading. A folder of another program names no checksum. Then the head is compared with the target in
what the folder has: widths and vocabulary, the config of its layer, the layers that it reads, and
the embedding if the folder holds one. A head of another model with the same sizes cannot be told
from a right one; its drafts are only worse. Such a folder has no measured ranks either. Then a
static tree is a chain of first candidates.

Left out: the MLP speculator's format; the authors' own folders, which are pickles; what other heads
of a format may have and ours have not (more layers, norms before `fc`, a bias of `fc`). Each of
these is an error that names it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.config import TUNED, Config
from tinyspec.lm.families import FAMILIES, ConfigReader, from_hf, to_hf
from tinyspec.lm.heads import (
    RANKS,
    TOKEN_MAP,
    WHOLE,
    HeadFile,
    freeze_target,
    read_head_config,
    read_head_weights,
)
from tinyspec.lm.model import Model
from tinyspec.lm.stack import head_config

EMBEDDING = "embed_tokens.weight"
OFFSETS = "d2t"
MARKS = "t2d"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COMPARED = (
    *("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "norm_eps"),
    *("rope_theta", "rope_scaling", "qkv_bias", "out_bias", "mlp_bias", "qk_norm"),
)
"""Fields of a layer's config that decide what it computes."""

LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""The values of LlamaConfig that transformers leaves out of a file. `from_hf` knows the others."""

Weights = dict[str, Tensor]


class HeadFormat(NamedTuple):
    """A format of another program.

    method  the technique whose heads it holds
    write   (head, target, layers) -> the keys of config.json, and the tensors
    read    (config.json, tensors, target, layers) -> our settings, and our tensors

    `layers` are those of the target whose outputs the head reads.
    """

    method: str
    write: Callable[[HeadFile, Model, Sequence[int]], tuple[dict[str, Any], Weights]]
    read: Callable[[ConfigReader, Weights, Model, Sequence[int]], tuple[dict[str, Any], Weights]]


# ---------------------------------------------------------------------- Medusa, as vLLM reads it


def write_medusa(
    head: HeadFile, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return the config and the tensors of a Medusa head in the format of vLLM."""
    settings, weights = head.settings, dict(head.weights)
    dtype = weights["blocks.0.layers.0.weight"].dtype
    if settings["shared_rows"]:
        token_map = weights.get(TOKEN_MAP)
        rows = freeze_target(target, token_map, dtype, layers=False).head
        weights["lm_heads.0.weight"] = rows
    # The loader renames every key that has "num" with "heads" or "layers": there are no others.
    values = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_size": target.config.d_model,
        "vocab_size": target.config.vocab_size,
        "truncated_vocab_size": settings["draft_vocab"] or target.config.vocab_size,
        "num_heads": settings["heads"],
        "num_hidden_layers": settings["layers"],
        "max_paths": 64,
        "topk": 10,
        "medusa_fc_bias": True,
        "original_lm_head": settings["shared_rows"],
    }
    return values, weights


def read_medusa(
    f: ConfigReader, weights: Weights, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return the settings and the tensors of a Medusa head from vLLM's format.

    A matrix that all heads share becomes `shared_rows` if it has the target's rows; else each head
    gets it as its own.
    """
    d, vocabulary = target.config.d_model, target.config.vocab_size
    expect_values(f, target, hidden_size=d, vocab_size=vocabulary)
    heads, blocks = f.integer("num_heads"), f.integer("num_hidden_layers", 1)
    words = f.integer("truncated_vocab_size", vocabulary, most=vocabulary)
    weights = {name.replace("medusa_heads.", ""): w for name, w in weights.items()}
    matrices = [n for n in weights if n.startswith("blocks.") and n.endswith(".weight")]
    if len(matrices) != heads * blocks:
        raise TinyspecError(
            f"{f.source}: num_heads {heads} times num_hidden_layers {blocks} should be the number "
            f"of blocks in model.safetensors, which has {len(matrices)}"
        )
    if not f.boolean("medusa_fc_bias", False):
        for name in matrices:
            bias = torch.zeros(d, dtype=weights[name].dtype)
            weights[name.removesuffix("weight") + "bias"] = bias
    is_shared = f.boolean("original_lm_head", False)
    if is_shared:
        weights = {
            name: w
            for name, w in weights.items()
            if not name.startswith("lm_heads.") or name == "lm_heads.0.weight"
        }
    names = [name for name in weights if name.startswith("lm_heads.")]
    if words == vocabulary:
        weights.pop(TOKEN_MAP, None)
    else:
        ids = read_draft_vocabulary(f, TOKEN_MAP, weights.get(TOKEN_MAP), words, vocabulary)
        weights |= order_rows({name: weights[name] for name in names}, ids, vocabulary)
    if is_shared:
        rows = weights.pop("lm_heads.0.weight", None)
        if rows is None:
            raise TinyspecError(
                f"{f.source}: original_lm_head is true, but lm_heads.0.weight is missing"
            )
        own = freeze_target(target, weights.get(TOKEN_MAP), rows.dtype, layers=False).head
        is_shared = torch.equal(rows, own.cpu())
        if not is_shared:
            weights |= {f"lm_heads.{i}.weight": rows for i in range(heads)}
    settings = {"heads": heads, "layers": blocks, "shared_rows": is_shared}
    return {**settings, "draft_vocab": 0 if words == vocabulary else words}, weights


# ---------------------------------------------------------------------- EAGLE-1, as vLLM reads it


def write_eagle(
    head: HeadFile, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return the config and the tensors of an EAGLE-1 head in the format of vLLM."""
    if head.settings["draft_vocab"]:
        raise TinyspecError(
            f"this head has draft_vocab {head.settings['draft_vocab']}, and vllm-eagle always has "
            "the target's vocabulary: train a head with draft_vocab = 0"
        )
    weights = dict(head.weights)
    return describe_layer(target, weights["fc.weight"].dtype), weights


def read_eagle(
    f: ConfigReader, weights: Weights, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return the settings and the tensors of an EAGLE-1 head from vLLM's format."""
    if "fc.weight" not in weights:
        raise TinyspecError(
            f"{f.source}: this looks like a model, not like a head of EAGLE: model.safetensors has "
            "no fc.weight"
        )
    f.require("add_para_norm", False)
    check_layer(f.values, f.source, target)
    return {"draft_vocab": 0}, drop_embedding(f, weights, target)


# ---------------------------------------------------------------------- EAGLE-3, of speculators


def write_eagle3(
    head: HeadFile, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return the config and the tensors of an EAGLE-3 head in the format of speculators."""
    check_layer_order(target, layers)
    weights, steps = dict(head.weights), head.settings["steps"]
    vocabulary = target.config.vocab_size
    # Without it the speculators package computes with unset memory (0.9.0, on transformers 5).
    weights[EMBEDDING] = target.weights["embed"].to(weights["fc.weight"].dtype)
    ids = weights.pop(TOKEN_MAP, None)
    if ids is not None:
        weights[OFFSETS] = ids - torch.arange(len(ids))
        weights[MARKS] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    greedy = {"proposal_type": "greedy", "speculative_tokens": steps, "verifier_accept_k": 1}
    verifier = {
        "name_or_path": head.target,
        "architectures": [FAMILIES[target.config.family].architecture],
    }
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": vocabulary if ids is None else len(ids),
        # Written although false: vLLM takes norm_before_residual for true where it is missing.
        **dict.fromkeys(EAGLE3_FLAGS, False),
        "embed_requires_grad": False,
        "target_hidden_size": None,
        AUX_LAYERS: list(layers),
        "transformer_layer_config": describe_layer(target, weights["fc.weight"].dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
    }
    return values, weights


def read_eagle3(
    f: ConfigReader, weights: Weights, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return the settings and the tensors of an EAGLE-3 head from the format of speculators."""
    check_layer_order(target, layers)
    for name in EAGLE3_FLAGS:
        f.require(name, False)
    f.require("target_hidden_size", None, target.config.d_model)
    f.require(AUX_LAYERS, None, list(layers))
    layer = f.values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise f.error("transformer_layer_config", "a JSON object")
    check_layer(layer, f"{f.source}: transformer_layer_config", target)
    weights, vocabulary = drop_embedding(f, weights, target), target.config.vocab_size
    words = f.integer("draft_vocab_size", vocabulary, most=vocabulary)
    offsets, marks = weights.pop(OFFSETS, None), weights.pop(MARKS, None)
    if words < vocabulary:
        rows = torch.arange(words)
        ids = read_draft_vocabulary(f, OFFSETS, offsets, words, vocabulary, rows)
        if marks is not None and marks.nonzero().flatten().tolist() != sorted(ids.tolist()):
            raise TinyspecError(f"{f.source}: {MARKS} and {OFFSETS} name other tokens")
        weights |= order_rows({"lm_head.weight": weights.get("lm_head.weight")}, ids, vocabulary)
    try:
        steps = f.values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        raise f.error("speculators_config", "proposal_methods with speculative_tokens") from None
    reader = ConfigReader(f"{f.source}: speculators_config", {"speculative_tokens": steps})
    settings = {"steps": reader.integer("speculative_tokens")}
    return {**settings, "draft_vocab": 0 if words == vocabulary else words}, weights


FORMATS = {
    "speculators": HeadFormat("eagle3", write_eagle3, read_eagle3),
    "vllm-medusa": HeadFormat("medusa", write_medusa, read_medusa),
    "vllm-eagle": HeadFormat("eagle", write_eagle, read_eagle),
}
"""Every format by the name that `tinyspec export --format` takes."""

# ---------------------------------------------------------------------- what several formats need


def layer_config(target: Model) -> Config:
    """Return the config of a LLaMA model of one layer, which is a layer of our heads."""
    config = head_config(target.config)
    return replace(config, family="llama", tied=False, head_ids=(), extra={})


def describe_layer(target: Model, dtype: torch.dtype) -> dict[str, Any]:
    """Return the layer of a target's heads as a LlamaConfig with one layer."""
    return to_hf(layer_config(target), str(dtype).removeprefix("torch."))


def check_layer(values: dict[str, Any], source: str, target: Model) -> None:
    """Raise TinyspecError unless a layer's config is the one that our heads of a target have."""
    defaults = LLAMA_DEFAULTS if values.get("model_type") == "llama" else {}
    found, expected = from_hf({**defaults, **values}, source), layer_config(target)
    theirs = {ours: name for name, ours in FAMILIES["llama"].keys.items()}
    for name in COMPARED:
        got, want = getattr(found, name), getattr(expected, name)
        is_near = isinstance(want, float) and math.isclose(got, want, rel_tol=1e-6)
        if got != want and not is_near:  # .gguf files round to float32
            raise TinyspecError(
                f"{source}: {theirs.get(name, name)} is {got}, but a head of {target.name} has "
                f"{want}: it is of another model, or its layer has another form"
            )


def expect_values(f: ConfigReader, target: Model, **wanted: int) -> None:
    """Raise TinyspecError unless these keys have the target's numbers."""
    for name, want in wanted.items():
        if (got := f.integer(name)) != want:
            raise TinyspecError(
                f"{f.source}: {name} is {got}, but {target.name} has {want}: this head is of "
                "another model"
            )


def check_layer_order(target: Model, layers: Sequence[int]) -> None:
    """Raise TinyspecError unless the layers that a head reads are different and rise.

    vLLM joins states in the order of its layers, each once, whatever order the config has.
    """
    if list(layers) != sorted(set(layers)):
        raise TinyspecError(
            f"{target.name} has {target.config.n_layers} layers, and an EAGLE-3 head of it reads "
            f"the layers {list(layers)}: the format speculators takes rising ones, which a target "
            "of 7 layers or more has"
        )


def drop_embedding(f: ConfigReader, weights: Weights, target: Model) -> Weights:
    """Return the tensors without an embedding. Raises TinyspecError if it is not the target's."""
    others = {name: w for name, w in weights.items() if name != EMBEDDING}
    if (found := weights.get(EMBEDDING)) is not None:
        own = target.weights["embed"].detach().cpu().to(found.dtype)
        if not torch.equal(found, own):
            raise TinyspecError(
                f"{f.source}: {EMBEDDING} is not that of {target.name}: this head is of another "
                "model, or its embedding was trained too"
            )
    return others


def read_draft_vocabulary(
    f: ConfigReader,
    name: str,
    stored: Tensor | None,
    words: int,
    vocabulary: int,
    first: Tensor | int = 0,
) -> Tensor:
    """Return the ids of a draft vocabulary as int64, in the order of the head's rows.

    stored  the tensor of this name
    first   what it counts from

    Raises TinyspecError unless it gives so many different tokens of the target.
    """
    found = [-1]
    if stored is not None and stored.shape == (words,) and stored.dtype in WHOLE:
        found = (stored + first).tolist()
    if len(set(found)) < words or min(found) < 0 or max(found) >= vocabulary:
        raise TinyspecError(
            f"{f.source}: {name} must give {words} different tokens from 0 to {vocabulary - 1}, "
            "as many as the draft vocabulary has"
        )
    return torch.tensor(found)


def order_rows(
    matrices: Mapping[str, Tensor | None], ids: Tensor, vocabulary: int
) -> dict[str, Tensor]:
    """Return a draft vocabulary in rising order, and matrices with their rows in that order.

    Rows of the whole vocabulary are cut to those of the ids, as vLLM cuts them.
    """
    rising, order = ids.sort()
    ordered = {TOKEN_MAP: rising}
    for name, w in matrices.items():
        if w is not None and w.ndim == 2 and len(w) in (len(ids), vocabulary):
            ordered[name] = w[order if len(w) == len(ids) else rising]
    return ordered


# ---------------------------------------------------------------------- folders


def find_format(folder: str | Path) -> str | None:
    """Return the format of a head's folder; None: ours, or no head.

    Raises TinyspecError for a speculator that is read by nothing here.
    """
    file = Path(folder) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # `read_head_config` says what is wrong
    own = values.get("tinyspec", {}) if isinstance(values, dict) else None
    if not isinstance(own, dict) or "settings" in own:
        return None
    if "speculators_model_type" in values:
        ConfigReader(str(file), values).require("speculators_model_type", "eagle3")
        return "speculators"
    if values.get("model_type") == "medusa":
        return "vllm-medusa"
    is_layer = values.get("architectures") in (["LlamaForCausalLM"], ["EagleLlamaForCausalLM"])
    return "vllm-eagle" if is_layer and TUNED not in own else None


def read_head_method(folder: str | Path) -> str:
    """Return the technique that a head's folder is for, in any format."""
    name = find_format(folder)
    method: str = read_head_config(folder)["method"] if name is None else FORMATS[name].method
    return method


def convert_head(
    name: str, head: HeadFile, target: Model, layers: Sequence[int]
) -> tuple[dict[str, Any], Weights]:
    """Return config.json and the tensors of a head in another format.

    name    of the format
    layers  of the target whose outputs the head reads

    Raises TinyspecError for settings that the format cannot express.
    """
    values, weights = FORMATS[name].write(head, target, layers)
    ranks = weights.pop(RANKS)
    own = {"method": head.method, "head_of": head.target, "check": head.check}
    more = head.values.get("tinyspec", {})
    return {**values, "tinyspec": {**more, **own, "ranks": ranks.tolist()}}, weights


def restore_head(
    name: str,
    values: dict[str, Any],
    weights: Weights,
    target: Model,
    layers: Sequence[int],
    source: str = "config.json",
) -> HeadFile:
    """Return a head in our form from config.json and the tensors of another format.

    Raises TinyspecError for what the head and the target do not have in common. `check_head` checks
    the names and shapes. The tensor RANKS is missing where no ranks were measured.
    """
    f, own = ConfigReader(source, values), values.get("tinyspec", {})
    settings, weights = FORMATS[name].read(f, weights, target, layers)
    if "ranks" in own:
        try:
            weights[RANKS] = torch.tensor(own["ranks"], dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ConfigReader(f"{source}: tinyspec", own).error("ranks", "rows of numbers") from (
                None
            )
    check = own.get("check", embedding_checksum(target.weights["embed"]))
    made_for = str(own.get("head_of", "another model"))
    return HeadFile(FORMATS[name].method, made_for, check, settings, values, weights)


def read_foreign_head(folder: Path, name: str, target: Model, layers: Sequence[int]) -> HeadFile:
    """Return a head in our form from a folder in another format, whose name `find_format` gave."""
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    return restore_head(name, values, read_head_weights(folder), target, layers, str(file))
