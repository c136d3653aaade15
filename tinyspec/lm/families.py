"""The families of checkpoints: config.json and weight names in their words, to and from ours.

`FAMILIES` is one table: a further family is one row of it and its test. Whatever the transformer
would compute wrongly is an error here. Where a field is absent from config.json, the default is the
one of the family's class in transformers.

One table of names serves reading and writing, so that a round trip is the identity. Our matrices
are [out, in], and what is always multiplied together is one matrix (`Config.shapes`). LLaMA keeps
queries, keys and values apart; GPT-2 has them fused but stores [in, out] (its "Conv1D"); .gguf files
have their own names and the [out, in] of LLaMA.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config

SEQ2SEQ = "tinyspec-seq2seq"  # the model_type of our encoder-decoders (seq2seq_file.py)
_LAYERS = 10_000  # each is a dozen names to look for, so a damaged number must not be counted up to
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class Fields:
    """A JSON object that checks the type of what is asked, and whose errors name the file and the
    field.
    """

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source, self.values = source, values

    def refuse(self, key: str, want: str) -> TinyspecError:
        shown = repr(self.values.get(key))
        got = (
            f"is {shown if len(shown) < 80 else shown[:76] + '...'}"
            if key in self.values
            else "is missing"
        )
        return TinyspecError(f"{self.source}: {key} {got}, expected {want}")

    def whole(self, key: str, default: int | None = None, most: int = 2**31) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.refuse(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < float("inf")
        ):
            raise self.refuse(key, "a positive number")
        return value if isinstance(value, int) else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """The first allowed value is the default; any other changes what is computed, and we do not
        compute that.
        """
        if self.values.get(key, allowed[0]) not in allowed:
            raise self.refuse(
                key, " or ".join(map(repr, allowed)) + "; tinyspec computes nothing else here"
            )


def token_ids(value: Any, source: str, key: str) -> tuple[int, ...]:
    """An id, a list of ids, or null, as a tuple."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TinyspecError(f"{source}: {key} is {value!r}, expected a token id or a list of them")
    return tuple(ids)


def from_hf(values: dict[str, Any], source: str = "config.json") -> Config:
    """Read config.json's content. Token ids are its own; `checkpoint.read` lets
    generation_config.json win.
    """
    f = Fields(source, values)
    if "quantization_config" in values:
        raise f.refuse(
            "quantization_config", "none: take the unquantised checkpoint, or a .gguf file"
        )
    family = _family(values)
    if family == SEQ2SEQ:
        raise TinyspecError(
            f"{source}: an encoder-decoder, which translates and extends no text: use `tinyspec translate`, or "
            "tinyspec.load_translator and translate"
        )
    if family not in FAMILIES:
        raise TinyspecError(
            f"{source}: unknown architecture {family!r} (model_type); known: "
            + ", ".join(f"{name} ({known.architecture})" for name, known in FAMILIES.items())
        )
    extra = values.get("tinyspec", {})
    if not isinstance(extra, dict):
        raise f.refuse("tinyspec", "a JSON object")
    bos = token_ids(values.get("bos_token_id"), source, "bos_token_id")
    eos = token_ids(values.get("eos_token_id"), source, "eos_token_id")
    return FAMILIES[family].build(f, {"bos": bos[0] if bos else None, "eos": eos, "extra": extra})


def _family(values: dict[str, Any]) -> Any:
    names = values.get("architectures") or []
    by_class = {known.architecture: name for name, known in FAMILIES.items()}
    first = names[0] if isinstance(names, list) and names else None
    return values.get("model_type") or by_class.get(str(first), first)


def _gpt2(f: Fields, rest: dict[str, Any]) -> Config:
    f.only("activation_function", "gelu_new")
    f.only("scale_attn_weights", True)
    f.only("scale_attn_by_inverse_layer_idx", False)
    f.only("add_cross_attention", False)
    d, heads = f.whole("n_embd", 768), f.whole("n_head", 12)
    if d % heads:
        raise f.refuse("n_head", f"a divisor of n_embd {d}")
    return Config(
        vocab_size=f.whole("vocab_size", 50257),
        d_model=d,
        n_layers=f.whole("n_layer", 12, most=_LAYERS),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=d // heads,
        d_ff=f.whole("n_inner", 4 * d),
        max_positions=f.whole("n_positions", 1024),
        norm="layer",
        norm_eps=f.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation="gelu_new",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=f.flag("tie_word_embeddings", True),
        family="gpt2",
        **rest,
    )


def _llama(f: Fields, rest: dict[str, Any]) -> Config:
    bias = f.flag("attention_bias", False)
    return _rotary(
        f,
        2048,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.flag("mlp_bias", False),
        family="llama",
        **rest,
    )


def _mistral(f: Fields, rest: dict[str, Any]) -> Config:
    context = f.whole("max_position_embeddings", 131072)
    window = f.values.get("sliding_window", 4096)  # absent, it is transformers' default
    if window is not None and f.whole("sliding_window", 4096) < context:
        raise TinyspecError(
            f"{f.source}: sliding_window {window} is less than max_position_embeddings {context}, and tinyspec attends "
            f"to every position: lower max_position_embeddings to {window}, or take a checkpoint without a window"
        )
    return _rotary(f, context, kv_heads=8, family="mistral", **rest)


def _qwen2(f: Fields, rest: dict[str, Any]) -> Config:
    _check_full_attention(f)
    return _rotary(f, 32768, qkv_bias=True, family="qwen2", **rest)


def _qwen3(f: Fields, rest: dict[str, Any]) -> Config:
    _check_full_attention(f)
    bias = f.flag("attention_bias", False)
    return _rotary(
        f,
        32768,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        family="qwen3",
        **rest,
    )


def _check_full_attention(f: Fields) -> None:
    """Raise TinyspecError where a layer attends within a window only."""
    f.only("use_sliding_window", False)
    if any(kind != "full_attention" for kind in f.values.get("layer_types") or ()):
        raise f.refuse(
            "layer_types", "'full_attention' in every layer; tinyspec computes nothing else here"
        )


def _rotary(
    f: Fields,
    context: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **rest: Any,
) -> Config:
    """Return the Config of a family with rotary positions; defaults are its class's own.

    kv_heads, head_dim  None: as many as there are heads; the width divided by them
    """
    f.only("hidden_act", "silu", "swish")
    d, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    kv_heads = f.whole("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if f.values.get("head_dim") is None and head_dim is None and d % heads:
        raise f.refuse(
            "num_attention_heads", f"a divisor of hidden_size {d}, or an explicit head_dim"
        )
    head_dim = f.whole("head_dim", head_dim or d // heads)
    if head_dim % 2:
        raise f.refuse(
            "head_dim", f"an even number, since rotary positions turn pairs; it is {head_dim}"
        )
    theta, scaling = rope(f)
    return Config(
        vocab_size=f.whole("vocab_size"),
        d_model=d,
        n_layers=f.whole("num_hidden_layers", most=_LAYERS),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=f.whole("intermediate_size"),
        max_positions=f.whole("max_position_embeddings", context),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=f.flag("tie_word_embeddings", False),
        **rest,
    )


def rope(f: Fields) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling, from transformers 5's `rope_parameters`, or from `rope_theta` and
    `rope_scaling` before it.
    """
    name = "rope_parameters" if f.values.get("rope_parameters") else "rope_scaling"
    inner = f.values.get(name) or {}
    if not isinstance(inner, dict):
        raise f.refuse(name, "a JSON object")
    g = Fields(f"{f.source}: {name}", inner)
    theta = g.number("rope_theta", f.number("rope_theta", 10000.0))
    kind = inner.get("rope_type", inner.get("type", "default"))  # `type` is the older key
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise TinyspecError(f"{g.source}: rope_type is {kind!r}; known: {', '.join(_ROPE_KEYS)}")
    for owner in (f, g):
        owner.only("partial_rotary_factor", 1.0, None)
    if kind == "default":
        return theta, None
    return theta, {"rope_type": kind, **{key: g.number(key) for key in _ROPE_KEYS[kind]}}


def to_hf(config: Config, dtype: str) -> dict[str, Any]:
    """The content of config.json, such that transformers builds the same model and `from_hf` gives
    `config` back.
    """
    eos = config.eos[0] if len(config.eos) == 1 else list(config.eos) or None
    values: dict[str, Any] = {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos,
        "eos_token_id": eos,
    }
    for theirs, ours in FAMILIES[config.family].keys.items():
        values[theirs] = None if ours is None else getattr(config, ours)
    if config.extra:
        values["tinyspec"] = config.extra
    back = from_hf(values)
    kept = {"add_bos"} | (
        {"says"} if "embeddings_from" in config.extra else set()
    )  # what other files hold
    lost = [
        f.name
        for f in dataclass_fields(Config)
        if f.name not in kept and _get(back, f) != _get(config, f)
    ]
    if lost:
        raise TinyspecError(
            f"a {config.family} checkpoint cannot express this Config's {', '.join(lost)}"
        )
    return values


def _get(config: Config, field: Any) -> Any:
    return getattr(config, field.name)


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
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
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
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_GGUF_GPT2 = {**_GGUF, "qkv": "attn_qkv", "up": "ffn_up"}

_GPT2_KEYS: dict[str, str | None] = {
    "n_embd": "d_model",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_inner": "d_ff",
    "n_positions": "max_positions",
    "layer_norm_epsilon": "norm_eps",
    "activation_function": "activation",
}
_ROTARY_KEYS: dict[str, str | None] = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "hidden_act": "activation",
}


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints says what the transformer is: a new family is one row of these.

    architecture  the name of its class in transformers
    build         makes a Config of config.json's fields
    keys          the keys that are written to config.json -> the Config's field (None: null)
    names         our weights -> their names in a Hugging Face checkpoint; several: one after another
    gguf          its general.architecture in a .gguf file
    gguf_names    our weights -> their names there
    transposed    matrices are stored as [in, out]
    permuted      .gguf files hold queries and keys in llama.cpp's order
    """

    architecture: str
    build: Callable[[Fields, dict[str, Any]], Config]
    keys: Mapping[str, str | None]
    names: Mapping[str, str]
    gguf: str
    gguf_names: Mapping[str, str] = field(default_factory=lambda: _GGUF)
    transposed: bool = False
    permuted: bool = False


_BIASES = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", _gpt2, _GPT2_KEYS, _GPT2, "gpt2", _GGUF_GPT2, transposed=True
    ),
    "llama": Family(
        "LlamaForCausalLM", _llama, _ROTARY_KEYS | _BIASES, _LLAMA, "llama", permuted=True
    ),
    "mistral": Family(  # llama.cpp files it as a LLaMA
        "MistralForCausalLM",
        _mistral,
        {**_ROTARY_KEYS, "sliding_window": None},
        _LLAMA,
        "llama",
        permuted=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _ROTARY_KEYS, _LLAMA, "qwen2"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        {**_ROTARY_KEYS, "attention_bias": "qkv_bias"},
        _LLAMA,
        "qwen3",
    ),
}
"""Every family of decoder-only checkpoints that is read and written, by its `model_type`."""

PART = (
    1 << 18
)  # numbers that are looked at together: what `isfinite` makes on the way would be the peak of all memory

# Buffers that older versions of transformers saved, and which a config determines.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")


def layout(config: Config, gguf: bool = False) -> dict[str, Source]:
    """Where each weight of `config.shapes()` lies, in a Hugging Face checkpoint or in a .gguf
    file.
    """
    family = FAMILIES[config.family]
    table = family.gguf_names if gguf else family.names
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
        sources[ours] = Source(
            names, rows, transposed=family.transposed and not gguf and len(shape) == 2
        )
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
