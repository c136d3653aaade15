"""Read a checkpoint from a Hugging Face folder, a hub id or a .gguf file; write a folder.

BOS and EOS come from generation_config.json, else from config.json, else from the tokenizer.
Generation puts BOS before a text (`add_bos`) if tokenizer_config.json's `add_bos_token` is true; if
it is absent, if tokenizer.json's own post-processor puts BOS before an empty text.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm import borrowed, families
from tinyspec.lm.config import Config
from tinyspec.lm.families import from_hf, to_hf, token_ids
from tinyspec.lm.ops import rotary_frequencies
from tinyspec.lm.quantised import QuantisedMatrix, QuantisedWeights
from tinyspec.lm.tokenizer import Tokenizer


@contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Yield a folder to write into. At the end of the block its files are moved to `target`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise TinyspecError(f"{target}: cannot be written ({error})") from error
    try:
        yield work
        _make_readable(work)
        if target.is_dir():
            for file in sorted(work.iterdir()):
                file.replace(target / file.name)
        else:
            work.replace(target)
    except (OSError, safetensors.SafetensorError) as error:
        raise TinyspecError(f"{target}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make_readable(folder: Path) -> None:
    """Give a folder and its files the ordinary rights.

    Temporary folders, and the files that safetensors writes, are private.
    """
    folder.chmod(0o777 & ~current_umask())
    for file in folder.iterdir():
        file.chmod(0o666 & ~current_umask())


def current_umask() -> int:
    """Return the rights that this process withholds from new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_INDEX = "model.safetensors.index.json"
_EXTRAS = "extras.safetensors"
QUANTISED = "model.gguf"  # in a folder: the quantised weights that the others were expanded from
MARK = "quantised"  # in the config: the hash of that file; another one is not looked at
_CONVERT = (
    "a pickle can run code when opened, so tinyspec does not open it; "
    "convert it once with transformers: AutoModelForCausalLM.from_pretrained(folder)"
    ".save_pretrained(new_folder, safe_serialization=True)"
)


class Checkpoint(NamedTuple):
    """The parts of a model. Weights have the names of `Config.shapes()` and are on the CPU.

    tokenizer  None: the folder has none
    extras     tensors that were trained for the model (an exit classifier, heads), by name
    """

    config: Config
    weights: dict[str, Tensor] | QuantisedWeights
    tokenizer: Tokenizer | None
    name: str
    extras: dict[str, Tensor] = {}  # noqa: RUF012  (never written to)


def read_checkpoint(
    name_or_path: str | Path,
    progress: bool = True,
    dtype: torch.dtype | None = None,
    find: Callable[[str], Path | None] | None = None,
    quantised: bool = False,
) -> Checkpoint:
    """Read a checkpoint folder, a .gguf file, or a hub id `org/name`, which is fetched.

    dtype      converts each tensor of a folder as it is read, so that both precisions are never
               held whole; None: as stored
    find       returns the folder of a model whose embeddings a draft shares (borrowed.py); None:
               look below the draft's own folder only
    quantised  keep quantised matrices of a .gguf file as they are

    Raises TinyspecError, one line that names the file, the field and what to do, for whatever is
    missing, damaged, contradictory, or not computed here.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists() and isinstance(name_or_path, str) and name_or_path.count("/") == 1:
        from tinyspec.lm import hub

        return read_checkpoint_folder(
            hub.fetch_snapshot(name_or_path, progress), name_or_path, dtype, find
        )
    if path.suffix == ".gguf" and (path.is_file() or not path.exists()):  # no folder, no pipe
        return _read_gguf_file(path, quantised)
    if path.is_file() and path.suffix in {pattern[1:] for pattern in _PICKLES}:
        raise TinyspecError(f"{path}: {_CONVERT}")
    if path.is_file():
        raise TinyspecError(
            f"{path}: not a .gguf file; a safetensors checkpoint is named by its folder"
        )
    if not path.is_dir():
        raise TinyspecError(
            f"{path}: no such checkpoint; expected a folder with config.json, or a .gguf file"
        )
    if _is_quantised_alone(path) or (quantised and find_quantised_file(path)):
        return _read_quantised_folder(path, quantised)
    return read_checkpoint_folder(path, path.resolve().name, dtype, find)


def _read_gguf_file(path: Path, quantised: bool) -> Checkpoint:
    from tinyspec.lm import gguf_file

    matrices = dict[str, QuantisedMatrix]() if quantised else None
    config, weights, tokenizer = gguf_file.read_gguf(path, None, matrices)
    found = QuantisedWeights(matrices, weights) if matrices else weights
    return Checkpoint(config, found, tokenizer, name=path.stem)


def find_quantised_file(folder: Path) -> Path | None:
    """Return the .gguf file that has a folder's weights; None: there is none.

    Where safetensors lie beside it, the config names both files by their hashes: they were written
    together. A program that saves other weights into the folder keeps what config.json says.
    """
    file = folder / QUANTISED
    if not file.is_file() or _is_quantised_alone(folder):
        return file if file.is_file() else None
    mark = read_checkpoint_config(folder).extra.get(MARK)
    files = file, folder / "model.safetensors"
    if not isinstance(mark, list) or not files[1].is_file():
        return None
    return file if mark == [hash_file(one) for one in files] else None


def _is_quantised_alone(folder: Path) -> bool:
    """Return whether a folder has its weights in a .gguf file and nowhere else."""
    others = (folder / name for name in ("model.safetensors", _INDEX))
    return (folder / QUANTISED).is_file() and not any(other.is_file() for other in others)


def _describe_same_model(one: Config, other: Config) -> bool:
    """Return whether two configs describe one computation, up to the float32 of a .gguf file."""
    first, second = (
        (c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.norm, c.positions) for c in (one, other)
    )
    if first != second or not math.isclose(one.norm_eps, other.norm_eps, rel_tol=1e-6):
        return False
    if one.positions != "rope":
        return True
    return torch.allclose(rotary_frequencies(one), rotary_frequencies(other), rtol=1e-5)


def _read_quantised_folder(folder: Path, quantised: bool) -> Checkpoint:
    """Read the weights of a folder from its .gguf file, of which any others are the expansion."""
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    config = _with_tokens(read_checkpoint_config(folder), folder, tokenizer)
    own = _read_gguf_file(folder / QUANTISED, quantised)
    is_same = own.config.shapes() == config.shapes()
    if _is_quantised_alone(folder):  # else the file's weights are those of the safetensors
        is_same = is_same and _describe_same_model(own.config, config)
    if not is_same:
        raise TinyspecError(f"{folder / QUANTISED}: another model than config.json describes")
    if tokenizer is None:
        tokenizer = own.tokenizer
    return Checkpoint(config, own.weights, tokenizer, folder.resolve().name, read_extras(folder))


def read_checkpoint_folder(
    folder: Path,
    name: str,
    dtype: torch.dtype | None = None,
    find: Callable[[str], Path | None] | None = None,
) -> Checkpoint:
    """Read config.json, the safetensors and the tokenizer of a folder."""
    config = read_checkpoint_config(folder)
    tokenizer, source = None, folder
    if borrowed.shares_embeddings(config):
        target = source = borrowed.find_target_folder(config, folder, find)
    if any(
        (source / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        tokenizer = Tokenizer.from_folder(source)
    config = _with_tokens(config, folder, tokenizer)
    tensors, file = open_tensors(folder)
    if borrowed.shares_embeddings(config):
        shared = read_checkpoint_config(target), open_tensors(target)[0], target
        config, tensors = borrowed.load_shared_weights(config, tensors, str(file), *shared)
    weights = families.from_checkpoint(config, tensors, str(file), dtype=dtype)
    return Checkpoint(config, weights, tokenizer, name, read_extras(folder))


def read_checkpoint_config(folder: Path) -> Config:
    """Return the Config of a folder. No weights are read."""
    return from_hf(read_json(folder / "config.json"), str(folder / "config.json"))


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises TinyspecError if there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TinyspecError(f"{file}: missing; a checkpoint folder needs it") from None
    except OSError as error:
        raise TinyspecError(f"{file}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise TinyspecError(f"{file}: not valid JSON ({error}); fetch or save it again") from error
    if not isinstance(values, dict):
        raise TinyspecError(f"{file}: expected a JSON object, got {type(values).__name__}")
    return values


def _with_tokens(config: Config, folder: Path, tokenizer: Tokenizer | None) -> Config:
    """Return the config with BOS, EOS and `add_bos`, as the module\'s docstring says."""
    bos, eos = config.bos, config.eos
    if (file := folder / "generation_config.json").is_file():
        values = read_json(file)
        starts = token_ids(values.get("bos_token_id"), str(file), "bos_token_id")
        bos = starts[0] if starts else bos
        eos = token_ids(values.get("eos_token_id"), str(file), "eos_token_id") or eos
    add_bos = False
    if tokenizer is not None:
        known = [
            i for i in (tokenizer.bos, tokenizer.eos) if i is not None and i < config.vocab_size
        ]
        bos = tokenizer.bos if bos is None and tokenizer.bos in known else bos
        eos = (tokenizer.eos,) if not eos and tokenizer.eos in known else eos
        asked = tokenizer.config.get("add_bos_token")
        add_bos = (
            asked if isinstance(asked, bool) else tokenizer.backend.encode("").ids[:1] == [bos]
        )
    return replace(
        config, bos=bos, eos=eos, add_bos=add_bos and bos is not None and bos < config.vocab_size
    )


def open_tensors(folder: Path) -> tuple[dict[str, Callable[[], Tensor]], Path]:
    """Return a function for each tensor that reads it, by name; and the file to name in errors."""
    single, index = folder / "model.safetensors", folder / _INDEX
    if single.is_file():
        return {name: partial(_read_tensor, name, single) for name in _tensor_names(single)}, single
    if index.is_file():
        where = _read_index(index)
        held: dict[str, str] = {}
        for shard in sorted(set(where.values())):
            if not os.path.isfile(folder / shard):  # False if the name is too long
                raise TinyspecError(
                    f"{folder / shard}: missing, but {_INDEX} names it; fetch it again"
                )
            held |= dict.fromkeys(_tensor_names(folder / shard), shard)
        for name, shard in where.items():
            if held.get(name) != shard:
                raise TinyspecError(
                    f"{folder / shard}: tensor {name!r} is missing, but {_INDEX} places it there"
                )
        return {
            name: partial(_read_tensor, name, folder / shard) for name, shard in held.items()
        }, index
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    raise TinyspecError(
        f"{folder / pickles[0]}: {_CONVERT}"
        if pickles
        else f"{single}: missing, and so is {_INDEX}; nothing but safetensors is read"
    )


def _read_index(file: Path) -> dict[str, str]:
    """Return the shard of each tensor.

    A shard must lie beside its index: its name comes from a stranger.
    """
    where = read_json(file).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise TinyspecError(f"{file}: weight_map is missing, expected the shard of each tensor")
    for name, shard in where.items():
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise TinyspecError(
                f"{file}: weight_map places {name!r} in {shard!r}, "
                "expected a .safetensors file beside it"
            )
    unlisted = sorted(
        {path.name for path in file.parent.glob("model-*-of-*.safetensors")} - set(where.values())
    )
    if unlisted:
        raise TinyspecError(
            f"{file}: weight_map does not name {', '.join(unlisted)}; "
            "fetch the index or the shard again"
        )
    return where


def _tensor_names(file: Path) -> list[str]:
    """Return the names of a file's tensors."""
    try:
        with safetensors.safe_open(str(file), framework="pt") as handle:
            return list(handle.keys())
    except (safetensors.SafetensorError, OSError, ValueError, MemoryError) as error:
        size = file.stat().st_size
        raise TinyspecError(
            f"{file}: truncated or damaged ({error}; {size} bytes); fetch or save it again"
        ) from error


def _read_tensor(name: str, file: Path) -> Tensor:
    """Return one tensor.

    The file is opened again for each: a tensor is a view into the mapped file, and an open handle
    would keep all that was read in memory, even after the tensors were converted.
    """
    try:
        with safetensors.safe_open(str(file), framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
    except Exception as error:  # a dtype torch lacks, or a file cut short since it was opened
        raise TinyspecError(f"{file}: {name!r} cannot be read ({error})") from error
    return tensor


def read_extras(folder: Path) -> dict[str, Tensor]:
    """Return the extra tensors of a folder; none if nothing was trained."""
    file = folder / _EXTRAS
    return (
        {name: _read_tensor(name, file) for name in _tensor_names(file)} if file.is_file() else {}
    )


def write_extras(folder: str | Path, extras: Mapping[str, Tensor]) -> None:
    """Add these extra tensors to a checkpoint's, in their types. The file is replaced whole."""
    folder = Path(folder)
    kept = {
        **read_extras(folder),
        **{name: t.detach().cpu().contiguous() for name, t in extras.items()},
    }
    part = folder / f".{_EXTRAS}.part"
    try:
        safetensors.torch.save_file(kept, part, metadata={"format": "pt"})
        part.chmod(0o666 & ~current_umask())
        part.replace(folder / _EXTRAS)
    except (OSError, safetensors.SafetensorError) as error:
        raise TinyspecError(f"{folder / _EXTRAS}: cannot be written ({error})") from error


def hash_file(file: Path) -> str:
    """Return a hash of a file. Raises TinyspecError if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError as error:
        raise TinyspecError(f"{file}: cannot be read ({error})") from error


def hash_weights(weights: Mapping[str, Tensor]) -> str:
    """Return a hash of a model's weights in float32: the stored type does not matter."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_checkpoint(
    folder: str | Path,
    config: Config,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer | None = None,
    quantised: Path | None = None,
) -> None:
    """Write a folder that `read_checkpoint` and transformers load. Weights keep their bytes.

    quantised  a .gguf file of which the weights are the expansion: it is copied to model.gguf

    A new folder appears complete or not at all. In an existing one, each file is replaced as a
    whole.
    """
    target = Path(folder)
    extra = {name: value for name, value in config.extra.items() if name != MARK}
    config = borrowed.add_checksum(replace(config, extra=extra), weights)
    theirs = borrowed.drop_shared_weights(config, families.to_checkpoint(config, weights))
    dtype = str(weights["embed"].dtype)[len("torch.") :]
    values = to_hf(config, dtype)
    generation = {"bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"]}
    with write_atomically(target) as work:
        safetensors.torch.save_file(theirs, work / "model.safetensors", metadata={"format": "pt"})
        if quantised is not None:
            shutil.copy(quantised, work / QUANTISED)
            files = work / QUANTISED, work / "model.safetensors"
            values["tinyspec"] = {**config.extra, MARK: [hash_file(file) for file in files]}
        for name, content in (("config.json", values), ("generation_config.json", generation)):
            (work / name).write_text(
                json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        if tokenizer is not None and not borrowed.shares_embeddings(config):
            Tokenizer(
                tokenizer.backend,
                {**tokenizer.config, "add_bos_token": config.add_bos},
                tokenizer.chat_template,
            ).save(work)
