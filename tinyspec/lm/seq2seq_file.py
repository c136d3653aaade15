"""Read and write a checkpoint of an encoder-decoder.

A checkpoint is a folder with config.json (its `model_type` is ours: no library has this
architecture), model.safetensors with the names of `Seq2SeqConfig.shapes()`, and tokenizer.json.
Errors are those of checkpoint.py.
"""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.checkpoint import write_atomically
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.families import SEQ2SEQ, ConfigReader, check_tensor, list_names
from tinyspec.lm.tokenizer import Tokenizer

_MOST = {"encoder_layers": 1000, "decoder_layers": 1000, "max_positions": 1 << 16, "block": 64}
"""Most of each: a number may be damaged, and the table of positions is made at once."""

_MAY_BE_ZERO = (
    *("decoder_layers", "pad", "bos", "eos", "mask", "lengths", "fertilities"),
    "block",
)


def read_seq2seq(
    folder: str | Path, dtype: torch.dtype | None = None
) -> tuple[Seq2SeqConfig, dict[str, Tensor], Tokenizer | None, str]:
    """Return config, weights on the CPU, tokenizer (None: there is no file) and name.

    dtype  the type of the weights; None: as stored

    Raises TinyspecError, one line that names the file, the field and what to do.
    """
    path = Path(folder)
    if not path.is_dir():
        raise TinyspecError(f"{path}: no such checkpoint; expected a folder with config.json")
    config = read_seq2seq_config(path)
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None
    if tokenizer is not None and tokenizer.backend.get_vocab_size() > config.vocab_size:
        raise TinyspecError(
            f"{path / 'tokenizer.json'}: {tokenizer.backend.get_vocab_size()} tokens, "
            f"config.json has a vocab_size of {config.vocab_size}; one is wrong"
        )
    return config, _read_weights(config, path, dtype), tokenizer, path.resolve().name


def read_seq2seq_config(folder: Path) -> Seq2SeqConfig:
    """Return the config of a folder. No weights are read."""
    file = folder / "config.json"
    values = checkpoint.read_json(file)
    if values.get("model_type") != SEQ2SEQ:
        raise TinyspecError(
            f"{file}: no encoder-decoder of tinyspec's (model_type {values.get('model_type')!r}, "
            f"expected {SEQ2SEQ!r}): it cannot translate; to extend a text with it, use "
            "tinyspec.load and generate"
        )
    f = ConfigReader(str(file), values)
    sizes: dict[str, Any] = {}
    for field in fields(Seq2SeqConfig):
        if field.name in ("positional", "stacks", "heads", "extra"):
            continue
        if field.name in _MAY_BE_ZERO and values.get(field.name) == 0:
            sizes[field.name] = 0
        elif field.name in values or field.name not in _MAY_BE_ZERO or field.default is MISSING:
            sizes[field.name] = f.integer(field.name, most=_MOST.get(field.name, 2**24))
    extra = values.get("tinyspec", {})
    if not isinstance(extra, dict):
        raise f.error("tinyspec", "a JSON object")
    if "repeat" in extra:
        raise ConfigReader(f"{file}: tinyspec", extra).error(
            "repeat", "nothing: no layer of a translator repeats"
        )
    config = Seq2SeqConfig(
        **sizes,
        positional=f.boolean("positional", False),
        stacks=_read_stacks(f, values.get("stacks", {})),
        heads=_read_heads(f),
        extra=extra,
    )
    if config.d_model % 2 or config.d_model % config.n_heads:
        raise f.error("n_heads", f"a divisor of d_model {config.d_model}, which is even")
    for name in ("pad", "bos", "eos", "mask"):
        if getattr(config, name) >= config.vocab_size:
            raise f.error(name, f"a token id below vocab_size {config.vocab_size}")
    try:
        config.shapes()
    except TinyspecError as error:
        raise TinyspecError(f"{file}: {error}") from None
    return config


def _read_heads(f: ConfigReader) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a technique added, by name."""
    heads = f.values.get("heads", {})
    wanted = 'an object of shapes, such as {"crf_from": [4800, 32]}'
    if not isinstance(heads, dict):
        raise f.error("heads", wanted)
    for shape in heads.values():
        if not (isinstance(shape, list) and 1 <= len(shape) <= 2):
            raise f.error("heads", wanted)
        if not all(type(size) is int and 1 <= size <= 2**24 for size in shape):
            raise f.error("heads", f"{wanted}, sizes from 1 to {2**24}")
    return {name: tuple(shape) for name, shape in heads.items()}


def _read_stacks(f: ConfigReader, stacks: Any) -> dict[str, int]:
    """Return the layers of the further decoder stacks, by name."""
    names = stacks if isinstance(stacks, dict) else {"": 0}
    for name, layers in names.items():
        is_name = name.isidentifier() and name not in ("encoder", "decoder")
        is_count = isinstance(layers, int) and not isinstance(layers, bool)
        if not (is_name and is_count and 1 <= layers <= _MOST["decoder_layers"]):
            raise f.error("stacks", 'names of decoder stacks with layers, as {"refiner": 2}')
    return dict(names)


def _read_weights(
    config: Seq2SeqConfig, folder: Path, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    tensors, file = checkpoint.open_tensors(folder)
    shapes = config.shapes()
    if missing := [name for name in shapes if name not in tensors]:
        raise TinyspecError(f"{file}: missing {list_names(missing)}, which the config asks for")
    if left := [name for name in tensors if name not in shapes]:
        raise TinyspecError(
            f"{file}: {list_names(left)} not in the architecture that the config describes"
        )
    weights = {}
    for name, shape in shapes.items():
        tensor = tensors[name]()
        check_tensor(tensor, shape, f"{file}: {name}")
        weights[name] = tensor if dtype is None else tensor.to(dtype)
    return weights


def write_seq2seq(
    folder: str | Path,
    config: Seq2SeqConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer | None,
) -> None:
    """Write a folder that `read_seq2seq` reads. A new one appears complete or not at all."""
    values = asdict(config)
    extra = values.pop("extra")
    for name, shape in config.shapes().items():
        if name not in weights:
            raise TinyspecError(f"weight {name} is missing; Seq2SeqConfig.shapes() lists them all")
        check_tensor(weights[name], shape, f"weight {name}")
    dtype = str(weights["embed"].dtype)[len("torch.") :]
    content = {"model_type": SEQ2SEQ, **values, "torch_dtype": dtype, "tinyspec": extra}
    with write_atomically(Path(folder)) as work:
        safetensors.torch.save_file(weights, work / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (work / "config.json").write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(work)
