"""Where each of our weights lies in somebody's checkpoint: their names, fused or apart, transposed
or not.

One table serves reading and writing, so that a round trip is the identity. Our matrices are [out,
in], and what is always multiplied together is one matrix (`Config.shapes`); LLaMA keeps queries,
keys and values apart, GPT-2 has them fused but stores [in, out] (its "Conv1D"), and .gguf files
have their own names and the [out, in] of LLaMA.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config


class Source(NamedTuple):
    """One of our weights there: the rows of `names` one after another, `rows` of each; `transposed`
    if [in, out].
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool = False


_GPT2 = {
    "embed": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "head": "lm_head.weight",
    "block": "transformer.h.{}.",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_LLAMA = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm",
    "head": "lm_head.weight",
    "block": "model.layers.{}.",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "out": "self_attn.o_proj",
    "up": "mlp.gate_proj mlp.up_proj",
    "down": "mlp.down_proj",
}
_GGUF = {
    "embed": "token_embd.weight",
    "positions": "position_embd.weight",
    "norm": "output_norm",
    "head": "output.weight",
    "block": "blk.{}.",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "qkv": "attn_q attn_k attn_v",
    "out": "attn_output",
    "up": "ffn_gate ffn_up",
    "down": "ffn_down",
}
_GGUF_GPT2 = {**_GGUF, "qkv": "attn_qkv", "up": "ffn_up"}

PART = (
    1 << 18
)  # numbers that are looked at together: what `isfinite` makes on the way would be the peak of all memory

# Buffers that older versions of transformers saved, and which a config determines.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")


def layout(config: Config, gguf: bool = False) -> dict[str, Source]:
    """Where each weight of `config.shapes()` lies, in a Hugging Face checkpoint or in a .gguf
    file.
    """
    gpt2 = config.family == "gpt2"
    table = (_GGUF_GPT2 if gpt2 else _GGUF) if gguf else (_GPT2 if gpt2 else _LLAMA)
    pieces = {"qkv": (config.q_dim, config.kv_dim, config.kv_dim), "up": (config.d_ff, config.d_ff)}
    sources = {}
    for ours, shape in config.shapes().items():
        if ours in table:  # embed, positions, head
            sources[ours] = Source((table[ours],), (shape[0],))
            continue
        *block, part, kind = ours.split(".")  # "3.qkv.weight", or "norm.weight" outside the blocks
        prefix = table["block"].format(block[0]) if block else ""
        names = tuple(f"{prefix}{name}.{kind}" for name in table[part].split())
        rows = pieces[part] if len(names) > 1 else (shape[0],)
        sources[ours] = Source(names, rows, transposed=gpt2 and not gguf and len(shape) == 2)
    return sources


def from_checkpoint(
    config: Config,
    theirs: Mapping[str, Callable[[], Tensor]],
    file: str,
    gguf: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Our weights (in `dtype`, None: as stored) from their tensors, each read by a call: no more
    than one is held twice.

    Raises TinyspecError, naming `file` and the tensor, for one that is missing, left over, of
    another shape than config.json says, not a float, or not finite.
    """
    have = {name: name for name in theirs}
    if (
        config.family == "gpt2" and not gguf
    ):  # GPT2Model saves without the prefix that GPT2LMHeadModel adds
        have = {
            n if n.startswith(("transformer.", "lm_head.")) else f"transformer.{n}": n
            for n in theirs
        }
    sources = layout(config, gguf)
    wanted = [name for source in sources.values() for name in source.names]
    if missing := [name for name in wanted if name not in have]:
        hint = (
            "; set tie_word_embeddings to true if the head is the embedding"
            if missing == ["lm_head.weight"]
            else ""
        )
        raise TinyspecError(f"{file}: missing {_some(missing)}, which config.json asks for{hint}")
    head = layout_head(config, gguf)
    left = [n for n in have if n not in set(wanted) and n != head and not _HARMLESS.fullmatch(n)]
    if left:
        raise TinyspecError(
            f"{file}: {_some(left)} not in the architecture that config.json describes"
        )
    shapes, ours = config.shapes(), {}
    for name, source in sources.items():
        parts = []
        for their_name, rows in zip(source.names, source.rows, strict=True):
            tensor = theirs[have[their_name]]()
            shape = (rows, *shapes[name][1:])
            _check(
                tensor, shape[::-1] if source.transposed else shape, f"{file}: {have[their_name]}"
            )
            parts.append(tensor.t() if source.transposed else tensor)
        fused = torch.cat(parts) if len(parts) > 1 else parts[0]
        ours[name] = (fused if dtype is None else fused.to(dtype)).contiguous()
    if head in have and not torch.equal(
        theirs[have[head]]().to(ours["embed"].dtype), ours["embed"]
    ):
        raise TinyspecError(
            f"{file}: {head} differs from the embedding, but config.json ties them; set tie_word_embeddings to false"
        )
    return ours


def layout_head(config: Config, gguf: bool) -> str:
    """The head's name if it may be in the file though the config ties it, else ''."""
    return ("output.weight" if gguf else "lm_head.weight") if config.tied else ""


def to_checkpoint(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Hugging Face checkpoint's tensors, contiguous, without shared memory."""
    theirs: dict[str, Tensor] = {}
    for ours, shape in config.shapes().items():
        if ours not in weights:
            raise TinyspecError(f"weight {ours} is missing; Config.shapes() lists them all")
        _check(weights[ours], shape, f"weight {ours}")
    for ours, source in layout(config).items():
        tensor = weights[ours].detach().cpu()
        for name, part in zip(source.names, torch.split(tensor, list(source.rows)), strict=True):
            theirs[name] = (part.t() if source.transposed else part).clone(
                memory_format=torch.contiguous_format
            )
    return theirs


def _check(tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != shape:
        raise TinyspecError(
            f"{what} has shape {list(tensor.shape)}, config.json makes it {list(shape)}; one is wrong"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TinyspecError(
            f"{what} is {str(tensor.dtype)[6:]}, expected float32, bfloat16, float16 or float64"
        )
    if not all(torch.isfinite(part).all() for part in torch.split(tensor.reshape(-1), PART)):
        raise TinyspecError(
            f"{what} holds NaN or infinity; the file is damaged or its training diverged"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        ", ".join(n if n.isprintable() else repr(n) for n in sorted(names)[:5]) + more
    )  # a file may hold any name
