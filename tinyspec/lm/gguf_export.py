"""Write our weights as a .gguf file for llama.cpp, whole or quantised.

The file has no tokenizer and says "no vocabulary": the benchmark gives llama.cpp token ids and gets
ids back, and a folder has its tokenizer beside it. Our layout is changed to llama.cpp's: fused
matrices are split, and the rows of LLaMA's queries and keys are put into its order.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.families import FAMILIES, weight_sources
from tinyspec.lm.gguf_file import read_gguf
from tinyspec.lm.model import Model
from tinyspec.lm.ops import rotary_frequencies
from tinyspec.lm.quantised import GROUP, SCALE_BYTES, QuantisedMatrix, QuantisedWeights

QUANTISED_KINDS = {kind.lower(): kind for kind in SCALE_BYTES}
KINDS = {"float32": "F32", "bfloat16": "BF16", **QUANTISED_KINDS}


def write_gguf(path: Path, model: Model, kind: str) -> None:
    """Write the file. Vectors stay float32, as llama.cpp wants them; matrices are of `kind`.

    Raises TinyspecError for an unknown kind, and for a quantised one if rows are no multiple of 32.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    if kind not in KINDS:
        raise TinyspecError(f"llama.cpp's weights are {', '.join(KINDS)} here, not '{kind}'")
    c, wanted = model.config, GGMLQuantizationType[KINDS[kind]]
    writer: Any = GGUFWriter(path, FAMILIES[c.family].gguf)
    _write_metadata(writer, c)
    if c.rope_scaling and c.rope_scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_divisors(c))
    for ours, source in weight_sources(c, gguf=True).items():
        parts = torch.split(model.weights[ours].detach().cpu().float(), list(source.rows))
        for name, part in zip(source.names, parts, strict=True):
            numbers = _permute_if_llama(part, c, name).contiguous().numpy()
            stays = ours == "positions" and kind in QUANTISED_KINDS  # as llama.cpp has it
            if numbers.ndim == 1 or stays or wanted == GGMLQuantizationType.F32:
                writer.add_tensor(name, numbers)
                continue
            if kind in QUANTISED_KINDS and numbers.shape[1] % GROUP:
                raise TinyspecError(
                    f"{kind} works on blocks of {GROUP}, and {name} has rows of {numbers.shape[1]}"
                )
            with np.errstate(over="ignore"):
                rows = quantize(numbers, wanted)
            is_lossy = kind in QUANTISED_KINDS
            if is_lossy and not np.isfinite(QuantisedMatrix(wanted.name, rows).scales()).all():
                raise TinyspecError(
                    f"{name} has numbers that {kind} cannot hold: its scales are float16"
                )
            writer.add_tensor(name, rows, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise_model(model: Model, kind: str, folder: Path) -> Checkpoint:
    """Write a folder with the model's matrices rounded to `kind`, and return what is in it.

    model.gguf has the quantised weights, and the other files their expansion to bfloat16, so that
    any program reads the folder. Vectors are rounded to bfloat16. Heads and exits are left out:
    they were trained on the weights as they are. Raises TinyspecError as `write_gguf` does, and if
    the folder cannot be written.
    """
    if folder.exists():
        raise TinyspecError(f"{folder} exists already: give a new folder")
    if model.config.repeat > 1 or model.config.head_ids:
        raise TinyspecError(
            f"{model.name} repeats layers or borrows embeddings, which no .gguf file describes"
        )
    try:
        with tempfile.TemporaryDirectory() as work:
            file = Path(work) / "model.gguf"
            write_gguf(file, model, kind)
            matrices = dict[str, QuantisedMatrix]()
            _, plain, _ = read_gguf(file, None, matrices)
            weights = QuantisedWeights(matrices, plain)
            tokenizer = model.tokenizer if model.has_tokenizer else None
            write_checkpoint(folder, model.config, dict(weights), tokenizer, quantised=file)
    except OSError as error:
        raise TinyspecError(f"{folder}: cannot be written ({error})") from error
    return read_checkpoint(folder, quantised=True)


def _write_metadata(writer: Any, c: Config) -> None:
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_head_count(c.n_heads)
    if c.norm == "rms":
        writer.add_layer_norm_rms_eps(c.norm_eps)
    else:
        writer.add_layer_norm_eps(c.norm_eps)
    if c.positions == "learned":
        return
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    if c.rope_scaling and c.rope_scaling.get("rope_type") == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(c.rope_scaling["factor"]))


def _frequency_divisors(c: Config) -> Any:
    """Return what llama.cpp divides each frequency by: [head_dim / 2]."""
    from dataclasses import replace

    unscaled = rotary_frequencies(replace(c, rope_scaling=None))
    return (unscaled / rotary_frequencies(c)).float().numpy()


def _permute_if_llama(rows: Tensor, c: Config, name: str) -> Tensor:
    """Return queries and keys of LLaMA in llama.cpp's order of rows, and others unchanged.

    llama.cpp rotates neighbouring pairs of rows.
    """
    if not FAMILIES[c.family].permuted:
        return rows
    heads = {"attn_q": c.n_heads, "attn_k": c.n_kv_heads}.get(name.split(".")[-2])
    return rows if heads is None else permute_heads(rows, heads)


def permute_heads(rows: Tensor, heads: int) -> Tensor:
    """Put rows i and i + hd/2 of each head side by side. `gguf_file.unpermute_rows` undoes it.

    >>> permute_heads(torch.tensor([0, 1, 2, 3]), heads=1).tolist()
    [0, 2, 1, 3]
    """
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
