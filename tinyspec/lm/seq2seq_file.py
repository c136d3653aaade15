"""A checkpoint of an encoder-decoder: a folder with config.json, model.safetensors and tokenizer.json, and back."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tinyspec.lm import checkpoint
from tinyspec.lm.seq2seq_config import Seq2SeqConfig
from tinyspec.lm.tokenizer import Tokenizer

KIND = "tinyspec-seq2seq"  # config.json's model_type


def read(
    folder: str | Path, dtype: torch.dtype | None = None
) -> tuple[Seq2SeqConfig, dict[str, Tensor], Tokenizer | None, str]:
    """Config, weights (on the CPU), tokenizer and name. Raises TinyspecError, one line that names file and field."""
    path = Path(folder)
    values = checkpoint._json(path / "config.json")
    config = Seq2SeqConfig(**{f.name: values[f.name] for f in fields(Seq2SeqConfig) if f.name in values})
    tensors, _ = checkpoint._tensors(path)
    weights = {name: get() if dtype is None else get().to(dtype) for name, get in tensors.items()}
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None
    return config, weights, tokenizer, path.resolve().name


def write(folder: str | Path, config: Seq2SeqConfig, weights: dict[str, Tensor], tokenizer: Tokenizer | None) -> None:
    """Write a folder that `read` reads."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"model_type": KIND, **asdict(config)}
    safetensors.torch.save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(target)
