"""config.json in Hugging Face's words, to and from `Config`. Whatever the transformer would get
wrong is refused here.

Three families are known: gpt2, llama (also SmolLM, TinyLlama, ...) and qwen2. Where a field is
absent, the default is the one of the family's class in transformers.
"""

from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from typing import Any

from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
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
    build = _FAMILIES.get(str(family := _family(values)))
    if family == SEQ2SEQ:
        raise TinyspecError(
            f"{source}: an encoder-decoder, which translates and extends no text: use `tinyspec translate`, or "
            "tinyspec.load_translator and translate"
        )
    if build is None:
        raise TinyspecError(
            f"{source}: unknown architecture {family!r} (model_type); known: "
            + ", ".join(f"{known} ({name})" for known, name in _ARCHITECTURES.items())
        )
    extra = values.get("tinyspec", {})
    if not isinstance(extra, dict):
        raise f.refuse("tinyspec", "a JSON object")
    bos = token_ids(values.get("bos_token_id"), source, "bos_token_id")
    eos = token_ids(values.get("eos_token_id"), source, "eos_token_id")
    return build(f, {"bos": bos[0] if bos else None, "eos": eos, "extra": extra})


def _family(values: dict[str, Any]) -> Any:
    names = values.get("architectures") or []
    by_class = {name: family for family, name in _ARCHITECTURES.items()}
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


def _qwen2(f: Fields, rest: dict[str, Any]) -> Config:
    f.only("use_sliding_window", False)
    if any(kind != "full_attention" for kind in f.values.get("layer_types") or ()):
        raise f.refuse(
            "layer_types", "'full_attention' in every layer; tinyspec computes nothing else here"
        )
    return _rotary(f, 32768, qkv_bias=True, family="qwen2", **rest)


def _rotary(f: Fields, context: int, **rest: Any) -> Config:
    f.only("hidden_act", "silu", "swish")
    d, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    kv_heads = f.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if f.values.get("head_dim") is None and d % heads:
        raise f.refuse(
            "num_attention_heads", f"a divisor of hidden_size {d}, or an explicit head_dim"
        )
    head_dim = f.whole("head_dim", d // heads)
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


_FAMILIES: dict[str, Callable[[Fields, dict[str, Any]], Config]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
}


def to_hf(config: Config, dtype: str) -> dict[str, Any]:
    """The content of config.json, such that transformers builds the same model and `from_hf` gives
    `config` back.
    """
    eos = config.eos[0] if len(config.eos) == 1 else list(config.eos) or None
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos,
        "eos_token_id": eos,
    }
    if config.family == "gpt2":
        values |= {
            "n_embd": config.d_model,
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_inner": config.d_ff,
            "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": config.activation,
        }
    else:
        values |= {
            "hidden_size": config.d_model,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.d_ff,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": config.rope_scaling,
            "hidden_act": config.activation,
        }
    if config.family == "llama":
        values |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
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
