"""Read a .gguf file, llama.cpp's format: a Config, weights, and a tokenizer.

The `gguf` package reads and dequantises. Weights become float32, or matrices stay quantised. This
file translates the names, undoes the permutation of LLaMA's queries and keys, and infers the llama3
scaling, of which a .gguf file keeps only the resulting frequencies.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm import families
from tinyspec.lm.config import Config
from tinyspec.lm.families import ConfigReader, from_hf, list_names
from tinyspec.lm.ops import rotary_frequencies
from tinyspec.lm.quantised import SCALE_BYTES, QuantisedMatrix
from tinyspec.lm.tokenizer import Tokenizer, catch_panics

_KNOWN = ("llama", "qwen2", "qwen3", "gpt2")
FLOAT_KINDS = ("F32", "F16", "BF16", "F64")
_ROPE_FACTORS = "rope_freqs.weight"
_UNCHANGED = {  # what others compute and we do not, with the value that changes nothing
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "attention.causal": True,
}


def read_gguf(
    path: Path,
    advance: Callable[[int, int], None] | None = None,
    matrices: dict[str, QuantisedMatrix] | None = None,
) -> tuple[Config, dict[str, Tensor], Tokenizer | None]:
    """Return the Config, float32 weights by our names, and the tokenizer (None: the file has none).

    advance   called after each tensor with the bytes read so far, and the bytes of all tensors
    matrices  gets the matrices of the kinds that the kernels multiply; if there are any, the other
              weights become bfloat16. A matrix that is made of tensors of two kinds is expanded.

    Raises TinyspecError naming the file if it is damaged, its architecture is unknown, or a setting
    is not computed here.
    """
    try:
        with np.errstate(all="ignore"):  # a damaged offset overflows: `_check_layout` says so
            reader = _open_reader(path)
        if reader.byte_order != "I":
            raise TinyspecError(
                f"{path}: its numbers have the other byte order than this machine's; "
                "convert it with gguf-convert-endian"
            )
        _check_layout(reader)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {t.name: t for t in reader.tensors}
    except TinyspecError:
        raise
    except FileNotFoundError:
        raise TinyspecError(f"{path}: no such file") from None
    except ModuleNotFoundError as error:
        raise TinyspecError(f"{path} needs {error.name}: pip install {error.name}") from error
    except Exception as error:  # the reader trusts its input: a damaged file fails anywhere
        raise TinyspecError(f"{path}: truncated or damaged ({error}); fetch it again") from error
    config = read_gguf_config(metadata, tensors, str(path))
    read_here = {name: tensor for name, tensor in tensors.items() if name != _ROPE_FACTORS}
    whole, done = sum(int(tensor.n_bytes) for tensor in read_here.values()), 0

    def dequantised(tensor: Any) -> Tensor:
        nonlocal done
        found, done = _dequantize(tensor, path), done + int(tensor.n_bytes)
        if advance is not None:
            advance(done, whole)
        return found

    theirs: dict[str, Callable[[], Tensor]] = {
        name: partial(dequantised, tensor) for name, tensor in read_here.items()
    }
    rows: dict[str, Callable[[], Tensor]] = {
        name: partial(torch.tensor, tensor.data) for name, tensor in read_here.items()
    }
    if families.FAMILIES[config.family].permuted:
        _unpermute_all(config, theirs)
        _unpermute_all(config, rows)

    shapes = config.shapes()

    def packs(ours: str, names: Collection[str]) -> bool:
        kinds = {tensors[name].tensor_type.name for name in names if name in tensors}
        is_matrix = len(shapes[ours]) == 2 and ours != "positions"
        return is_matrix and len(kinds) == 1 and kinds <= SCALE_BYTES.keys()

    sources, wanted = families.weight_sources(config, gguf=True), matrices is not None
    if not any(packs(ours, source.names) for ours, source in sources.items()):
        matrices = None

    def keep(ours: str, due: Mapping[str, tuple[int, ...]]) -> bool:
        if matrices is None or not packs(ours, due):
            return False
        kinds = {tensors[name].tensor_type.name for name in due}
        for name, shape in due.items():
            found = tuple(int(n) for n in reversed(tensors[name].shape))
            families.check_shape(found, shape, f"{path}: {name}")
        parts = [rows[name]().numpy() for name in due]
        matrices[ours] = matrix = QuantisedMatrix(kinds.pop(), np.concatenate(parts))
        if not np.isfinite(matrix.scales()).all():
            raise TinyspecError(f"{path}: {list_names([*due])} {families.NOT_FINITE}")
        return True

    expanded = {
        tensors[name].tensor_type.name
        for ours, source in sources.items()
        for name in source.names
        if wanted and name in tensors and (matrices is None or not packs(ours, source.names))
    }
    if others := sorted(expanded - {*FLOAT_KINDS}):
        print(
            f"tinyspec: {path}: weights in {', '.join(others)} are expanded: a matrix stays "
            f"quantised if all of it is in one of {', '.join(SCALE_BYTES)}",
            file=sys.stderr,
        )
    dtype = None if matrices is None else torch.bfloat16
    weights = families.from_checkpoint(config, theirs, str(path), True, dtype, keep)
    try:
        with catch_panics():
            tokenizer = build_tokenizer(metadata, str(path))
    except TinyspecError:
        raise
    except Exception as error:  # tokens that are not text, ids out of range, and so on
        raise TinyspecError(f"{path}: its tokenizer metadata is damaged ({error})") from error
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise TinyspecError(
            f"{path}: {tokenizer.vocab_size} tokens, but an embedding of {config.vocab_size} rows"
        )
    return config, weights, tokenizer


def _open_reader(path: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """The package's reader, but faster and with a check of lengths.

        The package slices a memory map for each string, which is slow; here plain views are sliced.
        At the end of a file it reads nothing and raises no error, so it would count up to a damaged
        number of 2**60 entries.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.data = np.asarray(self.data)  # type: ignore[assignment]
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError(
                    f"{int(count)} values at byte {offset} lie beyond the end of the file"
                )
            return found

    return Reader(path)


def _check_layout(reader: Any) -> None:
    """Raise ValueError unless each tensor begins where the one before it ends, as in llama.cpp.

    The reader takes any offset: a damaged one gives the weights of another tensor.
    """
    due, step = 0, int(reader.alignment)
    for tensor in reader.tensors:
        if not len(tensor.shape) or not all(tensor.shape):
            raise ValueError(f"{tensor.name} has the shape {tensor.shape.tolist()}")
        offset = int(tensor.field.parts[-1][0])
        if offset != due:
            raise ValueError(f"{tensor.name} lies at byte {offset} of the data, expected {due}")
        due += -(-int(tensor.n_bytes) // step) * step


def read_gguf_config(metadata: dict[str, Any], tensors: dict[str, Any], source: str) -> Config:
    """Return the Config: translate the metadata to Hugging Face's keys, then use `from_hf`.

    The vocabulary is the height of the embedding. The head is tied if there is no output.weight. A
    bias exists if its tensor does.
    """
    family = metadata.get("general.architecture")
    if family not in _KNOWN:
        raise TinyspecError(
            f"{source}: unknown general.architecture {family!r}; known: {', '.join(_KNOWN)}"
        )
    f = ConfigReader(source, metadata)
    if "token_embd.weight" not in tensors:
        raise TinyspecError(f"{source}: missing token_embd.weight; the file holds no whole model")
    d, heads = f.integer(f"{family}.embedding_length"), f.integer(f"{family}.attention.head_count")
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": int(
            tensors["token_embd.weight"].shape[-1]
        ),  # gguf counts dimensions from the inside
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    layers, ff = f.integer(f"{family}.block_count"), f.integer(f"{family}.feed_forward_length")
    context = f.integer(f"{family}.context_length")
    if family == "gpt2":
        eps = f.positive_number("gpt2.attention.layer_norm_epsilon", 1e-5)
        values |= {
            "n_embd": d,
            "n_head": heads,
            "n_layer": layers,
            "n_inner": ff,
            "n_positions": context,
        }
        return _with_bos(
            from_hf(values | {"layer_norm_epsilon": _shortest_float(eps)}, source), metadata
        )
    f.require(f"{family}.expert_count", 0, None)
    head_dim = f.integer(f"{family}.attention.key_length", d // heads)
    f.require(f"{family}.attention.value_length", head_dim, None)
    f.require(f"{family}.rope.dimension_count", head_dim, None)
    values |= {
        "hidden_size": d,
        "num_attention_heads": heads,
        "num_key_value_heads": f.integer(f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "intermediate_size": ff,
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest_float(
            f.positive_number(f"{family}.attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": _shortest_float(f.positive_number(f"{family}.rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    for name, plain in _UNCHANGED.items():
        f.require(f"{family}.{name}", plain)
    usual = "linear" if f"{family}.rope.scaling.factor" in metadata else "none"
    f.require(kind := f"{family}.rope.scaling.type", "none", "linear")
    if metadata.get(kind, usual) == "linear":
        values["rope_scaling"] = {
            "rope_type": "linear",
            "factor": f.positive_number(f"{family}.rope.scaling.factor"),
        }
    if _ROPE_FACTORS in tensors:
        factors = _dequantize(tensors[_ROPE_FACTORS], Path(source))
        values["rope_scaling"] = _infer_llama3_scaling(from_hf(values, source), factors, source)
    return _with_bos(from_hf(values, source), metadata)


def _with_bos(config: Config, metadata: dict[str, Any]) -> Config:
    # If the file does not say, llama.cpp puts BOS before a text of SentencePiece's vocabularies.
    by_default = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))
    return replace(config, add_bos=add_bos and config.bos is not None)


def _shortest_float(value: float) -> float:
    """Return the shortest number that rounds to a 32-bit float, as metadata floats are.

    >>> _shortest_float(9.999999747378752e-06)
    1e-05
    """
    with np.errstate(all="ignore"):
        return float(str(np.float32(value)))


def _infer_llama3_scaling(config: Config, factors: Tensor, source: str) -> dict[str, Any]:
    """Return the scaling that gives these factors [head_dim / 2], which divide the frequencies.

    Every published llama3 scaling blends between 1 and 4 turns of an old context of 8192, and
    divides the slowest wave by `factor` itself. Raises TinyspecError if that does not fit.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The number of factors is compared first: a damaged head_dim may be 2**31.
    if factors.shape != (config.head_dim // 2,) or not torch.allclose(
        rotary_frequencies(config) / factors,
        rotary_frequencies(replace(config, rope_scaling=scaling)),
        rtol=1e-5,
    ):
        raise TinyspecError(
            f"{source}: {_ROPE_FACTORS} is not the llama3 scaling known here; "
            "take the safetensors folder"
        )
    return scaling


def _dequantize(tensor: Any, path: Path) -> Tensor:
    from gguf.quants import dequantize

    if len(tensor.shape) == 1 and tensor.tensor_type.name not in FLOAT_KINDS:
        raise TinyspecError(
            f"{path}: {tensor.name!r} is {tensor.tensor_type.name}, but vectors are floats in a "
            ".gguf file; fetch or convert it again"
        )
    try:
        with np.errstate(all="ignore"):  # what is not finite is an error later, by name
            values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise TinyspecError(
            f"{path}: {tensor.name} is {tensor.tensor_type.name}, which gguf cannot dequantise"
        ) from None
    except Exception as error:  # blocks that do not fill a row
        raise TinyspecError(
            f"{path}: {tensor.name!r} is damaged ({error}); fetch the file again"
        ) from error
    return torch.from_numpy(values.astype("<f4", copy=True))


def _unpermute_all(config: Config, theirs: dict[str, Callable[[], Tensor]]) -> None:
    for name, get in theirs.items():
        for part, heads in (("attn_q.", config.n_heads), ("attn_k.", config.n_kv_heads)):
            if part in name:
                theirs[name] = partial(_read_unpermuted, get, heads, config.head_dim)


def _read_unpermuted(get: Callable[[], Tensor], heads: int, head_dim: int) -> Tensor:
    rows = get()
    if len(rows) != heads * head_dim:
        return rows  # a later check rejects its shape by name
    return unpermute_rows(rows, heads)


def unpermute_rows(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of queries or keys: [heads * hd, in], or [heads * hd].

    It rotates neighbouring dimensions (0, 1), (2, 3), ...; Hugging Face rotates (0, hd/2),
    (1, hd/2 + 1), ...

    >>> unpermute_rows(torch.tensor([0, 2, 1, 3]), heads=1).tolist()
    [0, 1, 2, 3]
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # tokenizer.ggml.token_type; 1 is an ordinary token, 6 a byte
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REGEX = {"llama-bpe": _CASELESS + r"\p{N}{1,3}" + _TAIL, "qwen2": _CASELESS + r"\p{N}" + _TAIL}
_GPT2 = ("gpt-2", "gpt2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # digits one by one, then GPT-2's rule
_UNNAMED = ("default", None)
_LONGEST = 256  # characters of a token, whose splits are all listed; SentencePiece makes 16 at most


def build_tokenizer(metadata: dict[str, Any], source: str) -> Tokenizer | None:
    """Return the tokenizer, or None if the file has none.

    Raises TinyspecError for a kind or a rule that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "no_vocab"):
        return None
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens:
        raise TinyspecError(
            f"{source}: tokenizer.ggml.tokens is missing; take the safetensors folder"
        )
    types = types or [1] * len(tokens)
    if len(types) != len(tokens):
        raise TinyspecError(
            f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if kind == "gpt2":
        backend = _build_byte_level(metadata, tokens, types, source)
    elif kind == "llama":
        backend = _build_sentencepiece(metadata, tokens, source)
    else:
        raise TinyspecError(f"{source}: tokenizer.ggml.model is {kind!r}; known: gpt2, llama")
    named = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in named if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, k in named if k == _USER]
    )
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(id, int) and id < len(tokens):
            config[f"{name}_token"] = tokens[id]
    config["clean_up_tokenization_spaces"] = False
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, config, template if isinstance(template, str) else None)


def _build_byte_level(
    metadata: dict[str, Any], tokens: list[str], types: list[int], source: str
) -> Backend:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: id for id, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab, merges))
    except Exception as error:  # the library's own: a merge of, or into, a token that is not there
        raise TinyspecError(
            f"{source}: tokenizer.ggml.merges do not fit the tokens ({error})"
        ) from error
    ordinary = [token for token, kind in zip(tokens, types, strict=True) if kind == 1]
    backend.pre_tokenizer = _make_pre_tokenizer(
        metadata.get("tokenizer.ggml.pre"), ordinary, source
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _make_pre_tokenizer(
    name: str | None, ordinary: list[str], source: str
) -> pre_tokenizers.PreTokenizer:
    if name in _REGEX:
        split = pre_tokenizers.Split(Regex(_REGEX[name]), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if name not in _GPT2 + _DIGITS + _UNNAMED:
        known = ", ".join([*_GPT2[:1], *_DIGITS, *_REGEX, "default"])
        raise TinyspecError(
            f"{source}: tokenizer.ggml.pre is {name!r}; known: {known}; take the safetensors folder"
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alone = not any(len(token) > 1 and any(c in "0123456789" for c in token) for token in ordinary)
    if name in _DIGITS or (name in _UNNAMED and alone):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _build_sentencepiece(metadata: dict[str, Any], tokens: list[str], source: str) -> Backend:
    """Return SentencePiece's BPE: it merges the pair whose union has the best score first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TinyspecError(
            f"{source}: tokenizer.ggml.scores is missing or of another length than the tokens"
        )
    if (longest := max(map(len, tokens))) > _LONGEST:
        raise TinyspecError(
            f"{source}: tokenizer.ggml.tokens has a token of {longest} characters, expected at "
            f"most {_LONGEST}; take the safetensors folder"
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in vocab and token[i:] in vocab
        ]
        ranked += [(-score, vocab[left], vocab[right], (left, right)) for left, right in pairs]
    merges = [pair for *_, pair in sorted(ranked)]
    unk = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Backend(
        models.BPE(vocab, merges, unk_token=tokens[unk], fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces, strip = [normalizers.Prepend("▁"), *spaces], [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
