"""The families of checkpoints: translate their config.json and weight names to ours, and back.

`FAMILIES` is one table: a further family is one row of it, and a test. A setting that the
transformer would compute wrongly is an error here. If a field is absent from config.json, its
default is that of the family's class in transformers.

One table of names serves reading and writing, so a round trip is the identity. Our matrices are
[out, in], and matrices that are always multiplied together are one (`Config.shapes`). LLaMA keeps
queries, keys and values apart. GPT-2 has them fused, but stores [in, out] (its "Conv1D"). .gguf
files have their own names and LLaMA's [out, in].
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config

SEQ2SEQ = "tinyspec-seq2seq"  # the model_type of our encoder-decoders (seq2seq_file.py)
_LAYERS = 10_000  # most layers that are accepted: a damaged file may ask for millions
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class ConfigReader:
    """Read typed fields of a JSON object. Errors name the file and the field."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source, self.values = source, values

    def error(self, key: str, want: str) -> TinyspecError:
        """Return the error that this field is not what was expected."""
        shown = repr(self.values.get(key))
        shown = shown if len(shown) < 80 else shown[:76] + "..."
        got = f"is {shown}" if key in self.values else "is missing"
        return TinyspecError(f"{self.source}: {key} {got}, expected {want}")

    def integer(self, key: str, default: int | None = None, most: int = 2**31) -> int:
        """Return a field that is an integer from 1 to `most`."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(key, f"a whole number from 1 to {most}")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """Return a field that is a positive number. Torch takes no int beyond 64 bits."""
        value = self.values.get(key)
        value = default if value is None else value
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.error(key, "a positive number")
        return value if isinstance(value, int) and value < 2**63 else float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a field that is true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Raise TinyspecError unless a field has one of these values; the first is the default."""
        if self.values.get(key, allowed[0]) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise self.error(key, f"{wanted}; tinyspec computes nothing else here")


def token_ids(value: Any, source: str, key: str) -> tuple[int, ...]:
    """Return an id, a list of ids, or null as a tuple."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TinyspecError(f"{source}: {key} is {value!r}, expected a token id or a list of them")
    return tuple(ids)


def from_hf(values: dict[str, Any], source: str = "config.json") -> Config:
    """Return the Config of a config.json.

    Its token ids are used as they are. `read_checkpoint` prefers those of generation_config.json.
    """
    f = ConfigReader(source, values)
    if "quantization_config" in values:
        raise f.error(
            "quantization_config", "none: take the unquantised checkpoint, or a .gguf file"
        )
    family = _family_of(values)
    if family == SEQ2SEQ:
        raise TinyspecError(
            f"{source}: an encoder-decoder, which translates and extends no text: "
            "use `tinyspec translate`, or tinyspec.load_translator and translate"
        )
    if not isinstance(family, str) or family not in FAMILIES:
        raise TinyspecError(
            f"{source}: unknown architecture {family!r} (model_type); known: "
            + ", ".join(f"{name} ({known.architecture})" for name, known in FAMILIES.items())
        )
    extra = values.get("tinyspec", {})
    if not isinstance(extra, dict):
        raise f.error("tinyspec", "a JSON object")
    bos = token_ids(values.get("bos_token_id"), source, "bos_token_id")
    eos = token_ids(values.get("eos_token_id"), source, "eos_token_id")
    rest = {"bos": bos[0] if bos else None, "eos": eos, "extra": extra}
    repeat = ConfigReader(f"{source}: tinyspec", extra).integer("repeat", 1)
    config = FAMILIES[family].build(f, rest)
    if config.n_layers % repeat:
        raise TinyspecError(
            f"{source}: tinyspec: repeat is {repeat}, expected a divisor of the "
            f"{config.n_layers} layers"
        )
    return config


def _family_of(values: dict[str, Any]) -> Any:
    names = values.get("architectures") or []
    by_class = {known.architecture: name for name, known in FAMILIES.items()}
    first = names[0] if isinstance(names, list) and names else None
    return values.get("model_type") or by_class.get(str(first), first)


def _build_gpt2(f: ConfigReader, rest: dict[str, Any]) -> Config:
    f.require("activation_function", "gelu_new")
    f.require("scale_attn_weights", True)
    f.require("scale_attn_by_inverse_layer_idx", False)
    f.require("add_cross_attention", False)
    d, heads = f.integer("n_embd", 768), f.integer("n_head", 12)
    if d % heads:
        raise f.error("n_head", f"a divisor of n_embd {d}")
    return Config(
        vocab_size=f.integer("vocab_size", 50257),
        d_model=d,
        n_layers=f.integer("n_layer", 12, most=_LAYERS),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=d // heads,
        d_ff=f.integer("n_inner", 4 * d),
        max_positions=f.integer("n_positions", 1024),
        norm="layer",
        norm_eps=f.positive_number("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation="gelu_new",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=f.boolean("tie_word_embeddings", True),
        family="gpt2",
        **rest,
    )


def _build_llama(f: ConfigReader, rest: dict[str, Any]) -> Config:
    bias = f.boolean("attention_bias", False)
    return _build_rotary(
        f,
        2048,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.boolean("mlp_bias", False),
        family="llama",
        **rest,
    )


def _build_mistral(f: ConfigReader, rest: dict[str, Any]) -> Config:
    context = f.integer("max_position_embeddings", 131072)
    window = f.values.get("sliding_window", 4096)  # absent, it is transformers' default
    if window is not None and f.integer("sliding_window", 4096) < context:
        raise TinyspecError(
            f"{f.source}: sliding_window {window} is less than max_position_embeddings {context}, "
            "and tinyspec attends to every position: lower max_position_embeddings to "
            f"{window}, or take a checkpoint without a window"
        )
    return _build_rotary(f, context, kv_heads=8, family="mistral", **rest)


def _build_qwen2(f: ConfigReader, rest: dict[str, Any]) -> Config:
    _check_full_attention(f)
    return _build_rotary(f, 32768, qkv_bias=True, family="qwen2", **rest)


def _build_qwen3(f: ConfigReader, rest: dict[str, Any]) -> Config:
    _check_full_attention(f)
    bias = f.boolean("attention_bias", False)
    return _build_rotary(
        f,
        32768,
        head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        family="qwen3",
        **rest,
    )


def _check_full_attention(f: ConfigReader) -> None:
    """Raise TinyspecError where a layer attends within a window only."""
    f.require("use_sliding_window", False)
    kinds = f.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise f.error(
            "layer_types", "a list of 'full_attention'; tinyspec computes nothing else here"
        )


def _build_rotary(
    f: ConfigReader,
    context: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **rest: Any,
) -> Config:
    """Return the Config of a family with rotary positions; defaults are its class's own.

    kv_heads, head_dim  None: as many as there are heads; the width divided by them
    """
    f.require("hidden_act", "silu", "swish")
    d, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if f.values.get("head_dim") is None and head_dim is None and d % heads:
        raise f.error(
            "num_attention_heads", f"a divisor of hidden_size {d}, or an explicit head_dim"
        )
    head_dim = f.integer("head_dim", head_dim or d // heads)
    if head_dim % 2:
        raise f.error(
            "head_dim", f"an even number, since rotary positions turn pairs; it is {head_dim}"
        )
    theta, scaling = read_rope(f)
    return Config(
        vocab_size=f.integer("vocab_size"),
        d_model=d,
        n_layers=f.integer("num_hidden_layers", most=_LAYERS),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=f.integer("intermediate_size"),
        max_positions=f.integer("max_position_embeddings", context),
        norm_eps=f.positive_number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=f.boolean("tie_word_embeddings", False),
        **rest,
    )


def read_rope(f: ConfigReader) -> tuple[float, dict[str, Any] | None]:
    """Return theta and scaling of rotary positions.

    transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`.
    """
    name = "rope_parameters" if f.values.get("rope_parameters") else "rope_scaling"
    inner = f.values.get(name) or {}
    if not isinstance(inner, dict):
        raise f.error(name, "a JSON object")
    g = ConfigReader(f"{f.source}: {name}", inner)
    theta = g.positive_number("rope_theta", f.positive_number("rope_theta", 10000.0))
    kind = inner.get("rope_type", inner.get("type", "default"))  # `type` is the older key
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise TinyspecError(f"{g.source}: rope_type is {kind!r}; known: {', '.join(_ROPE_KEYS)}")
    for owner in (f, g):
        owner.require("partial_rotary_factor", 1.0, None)
    if kind == "default":
        return theta, None
    return theta, {"rope_type": kind, **{key: g.positive_number(key) for key in _ROPE_KEYS[kind]}}


def to_hf(config: Config, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    transformers builds the same model from it, and `from_hf` gives `config` back.
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
    elsewhere = {"add_bos"}  # what other files hold
    if "embeddings_from" in config.extra:
        elsewhere.add("head_ids")
    lost = [
        f.name
        for f in dataclass_fields(Config)
        if f.name not in elsewhere and getattr(back, f.name) != getattr(config, f.name)
    ]
    if lost:
        raise TinyspecError(
            f"a {config.family} checkpoint cannot express this Config's {', '.join(lost)}"
        )
    return values


class WeightSource(NamedTuple):
    """Where one of our weights lies in a checkpoint.

    names       the tensors whose rows follow one another in our matrix
    rows        how many rows of each
    transposed  they are stored as [in, out]
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
    """How one family of checkpoints describes the transformer.

    architecture  the name of its class in transformers
    build         makes a Config of config.json's fields
    keys          the keys of config.json -> the Config's field (None: write null)
    names         our weights -> their names in a Hugging Face checkpoint, separated by spaces
    gguf          its general.architecture in a .gguf file
    gguf_names    our weights -> their names in a .gguf file
    transposed    matrices are stored as [in, out]
    permuted      .gguf files hold queries and keys in llama.cpp's order
    """

    architecture: str
    build: Callable[[ConfigReader, dict[str, Any]], Config]
    keys: Mapping[str, str | None]
    names: Mapping[str, str]
    gguf: str
    gguf_names: Mapping[str, str] = field(default_factory=lambda: _GGUF)
    transposed: bool = False
    permuted: bool = False


_BIASES = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", _build_gpt2, _GPT2_KEYS, _GPT2, "gpt2", _GGUF_GPT2, transposed=True
    ),
    "llama": Family(
        "LlamaForCausalLM", _build_llama, _ROTARY_KEYS | _BIASES, _LLAMA, "llama", permuted=True
    ),
    "mistral": Family(  # llama.cpp files it as a LLaMA
        "MistralForCausalLM",
        _build_mistral,
        {**_ROTARY_KEYS, "sliding_window": None},
        _LLAMA,
        "llama",
        permuted=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", _build_qwen2, _ROTARY_KEYS, _LLAMA, "qwen2"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _build_qwen3,
        {**_ROTARY_KEYS, "attention_bias": "qkv_bias"},
        _LLAMA,
        "qwen3",
    ),
}
"""Every family of decoder-only checkpoints that is read and written, by its `model_type`."""

CHECK_CHUNK = 1 << 18  # numbers checked at once: `isfinite` of a whole matrix needs much memory

# Buffers that older versions of transformers saved, and which a config determines.
_HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")


def weight_sources(config: Config, gguf: bool = False) -> dict[str, WeightSource]:
    """Return where each weight lies in a Hugging Face checkpoint, or in a .gguf file."""
    family = FAMILIES[config.family]
    table = family.gguf_names if gguf else family.names
    pieces = {"qkv": (config.q_dim, config.kv_dim, config.kv_dim), "up": (config.d_ff, config.d_ff)}
    sources = {}
    for ours, shape in config.shapes().items():
        if ours in table:  # embed, positions, head
            sources[ours] = WeightSource((table[ours],), (shape[0],))
            continue
        *block, part, kind = ours.split(".")  # "3.qkv.weight", or "norm.weight" outside the blocks
        prefix = table["block"].format(block[0]) if block else ""
        names = tuple(f"{prefix}{name}.{kind}" for name in table[part].split())
        rows = pieces[part] if len(names) > 1 else (shape[0],)
        sources[ours] = WeightSource(
            names, rows, transposed=family.transposed and not gguf and len(shape) == 2
        )
    return sources


def from_checkpoint(
    config: Config,
    theirs: Mapping[str, Callable[[], Tensor]],
    file: str,
    gguf: bool = False,
    dtype: torch.dtype | None = None,
    keep: Callable[[str, Mapping[str, tuple[int, ...]]], bool] = lambda ours, theirs: False,
) -> dict[str, Tensor]:
    """Return our weights, made of a checkpoint's tensors.

    theirs  name -> a function that reads the tensor, so that no more than one is held twice
    dtype   the type of our weights; None: as stored
    keep    our name, the tensors that it is made of and their shapes -> whether the caller keeps
            it in another form: then it is not among the weights

    Raises TinyspecError, naming `file` and the tensor, if one is missing, unknown, not a float, not
    finite, or of another shape than the config gives.
    """
    have = {name: name for name in theirs}
    if config.family == "gpt2" and not gguf:  # GPT2Model saves without GPT2LMHeadModel's prefix
        prefixes = ("transformer.", "lm_head.")
        have = {n if n.startswith(prefixes) else f"transformer.{n}": n for n in theirs}
    sources = weight_sources(config, gguf)
    wanted = [name for source in sources.values() for name in source.names]
    if missing := [name for name in wanted if name not in have]:
        hint = (
            "; set tie_word_embeddings to true if the head is the embedding"
            if missing == ["lm_head.weight"]
            else ""
        )
        raise TinyspecError(
            f"{file}: missing {list_names(missing)}, which the config asks for{hint}"
        )
    head = _tied_head_name(config, gguf)
    left = [n for n in have if n not in set(wanted) and n != head and not _HARMLESS.fullmatch(n)]
    if left:
        raise TinyspecError(
            f"{file}: {list_names(left)} not in the architecture that the config describes"
        )
    shapes, ours = config.shapes(), {}
    for name, source in sources.items():
        due = dict[str, tuple[int, ...]]()
        for their_name, rows in zip(source.names, source.rows, strict=True):
            shape = (rows, *shapes[name][1:])
            due[have[their_name]] = shape[::-1] if source.transposed else shape
        if keep(name, due):
            continue
        parts = []
        for their_name, shape in due.items():
            tensor = theirs[their_name]()
            check_tensor(tensor, shape, f"{file}: {their_name}")
            parts.append(tensor.t() if source.transposed else tensor)
        fused = torch.cat(parts) if len(parts) > 1 else parts[0]
        ours[name] = (fused if dtype is None else fused.to(dtype)).contiguous()
    if head in have and not torch.equal(
        theirs[have[head]]().to(ours["embed"].dtype), ours["embed"]
    ):
        raise TinyspecError(
            f"{file}: {head} differs from the embedding, but the config ties them; "
            "set tie_word_embeddings to false"
        )
    return ours


def _tied_head_name(config: Config, gguf: bool) -> str:
    """Return the name of a head that a file may hold although the config ties it, else ''."""
    return ("output.weight" if gguf else "lm_head.weight") if config.tied else ""


def to_checkpoint(config: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face checkpoint, contiguous and without shared memory."""
    theirs: dict[str, Tensor] = {}
    for ours, shape in config.shapes().items():
        if ours not in weights:
            raise TinyspecError(f"weight {ours} is missing; Config.shapes() lists them all")
        check_tensor(weights[ours], shape, f"weight {ours}")
    for ours, source in weight_sources(config).items():
        tensor = weights[ours].detach().cpu()
        for name, part in zip(source.names, torch.split(tensor, list(source.rows)), strict=True):
            theirs[name] = (part.t() if source.transposed else part).clone(
                memory_format=torch.contiguous_format
            )
    return theirs


def check_tensor(tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Raise TinyspecError unless a tensor has this shape, a float type and finite numbers."""
    check_shape(tuple(tensor.shape), shape, what)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TinyspecError(
            f"{what} is {str(tensor.dtype)[6:]}, expected float32, bfloat16, float16 or float64"
        )
    if not all(torch.isfinite(part).all() for part in torch.split(tensor.reshape(-1), CHECK_CHUNK)):
        raise TinyspecError(f"{what} {NOT_FINITE}")


NOT_FINITE = "holds NaN or infinity; the file is damaged or its training diverged"


def check_shape(found: tuple[int, ...], due: tuple[int, ...], what: str) -> None:
    """Raise TinyspecError unless a tensor has this shape."""
    if found != due:
        raise TinyspecError(
            f"{what} has shape {list(found)}, the config makes it {list(due)}; one is wrong"
        )


def list_names(names: list[str]) -> str:
    """Return the first names, for an error. Names that cannot be printed are quoted."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(n if n.isprintable() else repr(n) for n in sorted(names)[:5]) + more
