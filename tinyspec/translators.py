"""Where translation models come from: by name, by folder, or by the method that they were trained
for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyspec import models
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.families import SEQ2SEQ

if TYPE_CHECKING:
    import torch

    from tinyspec.lm.seq2seq import Seq2Seq

TEACHER = "teacher"  # what a model is trained for that writes from left to right
_WHERE = (
    "the wheel carries none: run in a clone of the repository, whose models/ folder has them, or train one with "
    "`tinyspec train mt`"
)


def list_translators() -> dict[str, str]:
    """Translation models on this machine, name -> what each was trained for: teacher, nat, ..."""
    found = dict[str, str]()
    for known in models.list_known():
        values = _config(known.path)
        if values.get("model_type") == SEQ2SEQ:
            extra = values.get("tinyspec")
            found[known.name] = (
                str(extra.get("trained_for", TEACHER)) if isinstance(extra, dict) else TEACHER
            )
    return found


def name_for_method(method: str, rewrites: bool) -> str:
    """The name of a model on this machine that was trained for this method; one that extends a text
    takes a teacher.
    """
    wanted = method if rewrites else TEACHER
    for name, kind in list_translators().items():
        if kind == wanted:
            return name
    raise TinyspecError(f"no translation model for {method} on this machine: {_WHERE}")


def is_translator(name_or_path: str | Path) -> bool:
    """Whether this names an encoder-decoder on this machine."""
    return _config(models.find_model(name_or_path)).get("model_type") == SEQ2SEQ


def load_translator(
    name_or_path: str | Path,
    device: "str | torch.device" = "cpu",
    dtype: "str | torch.dtype | None" = None,
) -> "Seq2Seq":
    """Load an encoder-decoder by name or folder. `dtype` None: float32, in which these small models
    are quickest.

    Raises TinyspecError, one line, for an unknown name, a damaged checkpoint, a model that extends
    texts.
    """
    import torch

    from tinyspec.lm.seq2seq import Seq2Seq
    from tinyspec.lm.seq2seq_file import read

    path = models.find_model(name_or_path)
    if path is None:
        known = list_translators()
        hint = suggest_nearest(str(name_or_path), known) if known else _WHERE
        raise TinyspecError(f"there is no translation model {str(name_or_path)!r}: {hint}")
    if path.is_file():
        raise TinyspecError(f"{path}: a file; a translation model is a folder with config.json")
    where = models._device(device)
    config, weights, tokenizer, name = read(path, models._dtype(dtype) or torch.float32)
    return Seq2Seq(config, {key: w.to(where) for key, w in weights.items()}, tokenizer, name)


def load_translator_once(
    name_or_path: str | Path, device: Any = "cpu", dtype: Any = None
) -> "Seq2Seq":
    """Return the translation model of this name, loaded once and kept as by `models.load_once`."""
    load_kept: Callable[..., Seq2Seq] = models.keep_loaded(load_translator)
    return load_kept(name_or_path, device, dtype)


def _config(path: Path | None) -> dict[str, object]:
    """config.json as it stands, or nothing: who asks only wants to know the kind."""
    try:
        values = (
            {} if path is None else json.loads((path / "config.json").read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
