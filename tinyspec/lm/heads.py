"""What was trained for a model that stays as it is: its files, its place, its products.

A head's folder holds config.json and model.safetensors. The section "tinyspec" of config.json names
the method, the target, a checksum of the target's embedding, and the settings that decide the
shapes. The tensors have the names that the method's authors or vLLM use, where there are any. On a
loaded model they are among `model.extras`, as "method/name".

A large head can be stored in bytes, half of bfloat16. Each row w of a matrix becomes whole numbers

    q = round(w / s),   s = max |w| / 127

and s is the tensor NAME_scale, [..., 1]. When the head is read, w is q * s in float32.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.errors import TinyspecError, describe_value
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.checkpoint import write_atomically
from tinyspec.lm.config import Config
from tinyspec.lm.engine import pack_matrix, wrap_matrix
from tinyspec.lm.model import Model
from tinyspec.lm.transformer import Transformer

T = TypeVar("T")

TOKEN_MAP = "token_map"  # the tensor of ids that a head may propose, rising; vLLM's name
RANKS = "ranks"  # [depths, RANKED] how often each candidate was right, on held-out texts
RANKED = 10  # candidates of a depth that are measured
SCALE = "_scale"  # ends the name of a tensor of scales
MOST_BYTE = 127
SETTINGS = "settings/"  # leads the names of a head's settings among a model's extras
NO_ROW = -1  # of a token that a head has no row for
MOST_HEADS = 64  # heads, and layers of each: a damaged file must not ask for millions
MOST = 2**31  # of any other setting


@dataclass(frozen=True)
class HeadSettings:
    """The section [head] of every recipe of a head.

    draft_vocab  tokens that the head may propose, the target's most frequent; 0: all. In shapes it
                 is V'

    Whole numbers are from 1 (from 0 if 0 is the default) to MOST or MOST_HEADS. Other numbers must
    be from 0 to MOST. What is true or false by default must be one of the two. Texts are left to
    the subclass.
    """

    draft_vocab: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            default = getattr(type(self), name)
            if isinstance(default, str):
                continue
            if isinstance(default, bool):
                is_right, allowed = isinstance(value, bool), "true or false"
            elif isinstance(default, float):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                is_right, allowed = is_number and 0 <= value <= MOST, f"a number from 0 to {MOST}"
            else:
                least = int(default != 0)
                most = MOST_HEADS if name in ("heads", "layers") else MOST
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                is_right = is_whole and least <= value <= most
                allowed = f"a whole number from {least} to {most}"
            if not is_right:
                raise TinyspecError(
                    f"[head] {name} is {describe_value(value)}: it must be {allowed}"
                )


class FrozenTarget(NamedTuple):
    """The parts of a target that a head is trained on and computed with.

    embed      [V, d] input embeddings
    head       [V', d] rows of the output matrix, for the ids that the head may propose
    token_map  [V'] these ids, rising; None: all of them, so that V' is V
    blocks     its layers, for what is trained through them
    settings   of the head that is trained on it
    """

    config: Config
    embed: Tensor
    head: Tensor
    token_map: Tensor | None = None
    blocks: Blocks | None = None
    settings: Any = None

    @property
    def row_of(self) -> Tensor:
        """Return the row of each token in `head`, [V]; NO_ROW for a token that has none."""
        ids = torch.arange(self.config.vocab_size, device=self.embed.device)
        if self.token_map is None:
            return ids
        rows = torch.full_like(ids, NO_ROW)
        rows[self.token_map] = torch.arange(len(self.token_map), device=rows.device)
        return rows


def freeze_target(
    model: Transformer,
    token_map: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layers: bool = True,
) -> FrozenTarget:
    """Return the parts of a model that a head needs.

    dtype   None: the model's own
    layers  whether the head is trained through the target's layers

    Raises TinyspecError for a draft model with a vocabulary of its own.
    """
    config, names = model.config, ("embed", "head")
    if config.head_ids:
        raise TinyspecError(
            f"{model.name} proposes only some tokens itself, so no head is trained for it: take "
            "the model that it drafts for"
        )
    stored = model.weights
    weights = {name: stored[name].detach().to(dtype) for name in stored if layers or name in names}
    embed = weights["embed"]
    head = embed if config.tied else weights["head"]
    rows = head if token_map is None else head[token_map.to(head.device)]
    blocks = Blocks(config, weights) if layers else None
    return FrozenTarget(config, embed, rows, token_map, blocks)


def shift_tokens(ids: Tensor, k: int) -> Tensor:
    """Return the token k places after each position of texts [B, T]; 0 beyond their end.

    >>> shift_tokens(torch.tensor([[5, 6, 7]]), 2).tolist()
    [[7, 0, 0]]
    >>> shift_tokens(torch.tensor([[5, 6, 7]]), 5).tolist()
    [[0, 0, 0]]
    """
    return F.pad(ids, (0, k))[:, k:]


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [n, V']; 0 where n is 0: nothing is known there.

    labels  [n] rows of the right tokens, or [n, V'] distributions
    """
    return F.cross_entropy(logits.float(), labels) if len(logits) else logits.float().sum()


# ---------------------------------------------------------------------- products at inference


class HeadMatrix:
    """A matrix of a head, as it is multiplied at inference: by the compiled kernels on a CPU.

    weight  [out, in], on the target's device
    bias    [out] or None

    Weights take the type of the target's weights, inputs and outputs that of its states. No bit of
    a row depends on the rows beside it where the kernels are compiled.
    """

    def __init__(self, target: Transformer, weight: Tensor, bias: Tensor | None = None):
        self.out, inputs = weight.shape
        self.dtype, self._packed = target.state_dtype, None
        if target.engine is None or (target.dtype == torch.bfloat16 and inputs % 2):
            self.weight = weight.to(target.device, self.dtype)
            self.bias = None if bias is None else bias.to(target.device, self.dtype)
            return
        self._packed = wrap_matrix(pack_matrix(weight.to(target.dtype)), weight.shape, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [n, in] times the matrix, plus the bias: [n, out]."""
        x = x.to(self.dtype)
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        y = torch.empty(len(x), self.out)
        self._packed.product(x.contiguous().numpy(), y.numpy(), torch.get_num_threads())
        return y


class OutputMatrix(HeadMatrix):
    """The target's output matrix, or its rows for the ids that a head may propose.

    The whole matrix is the target's own packed one: no head has a copy of it.
    """

    def __init__(self, target: Transformer, token_map: Tensor | None = None):
        config, engine = target.config, target.engine
        if engine is None or token_map is not None or config.head_ids:
            super().__init__(target, freeze_target(target, token_map, layers=False).head)
            return
        self.out, self.dtype = config.vocab_size, target.state_dtype
        self._packed = engine.matrices["embed" if config.tied else "head"]


def embed_tokens(target: Transformer, tokens: Sequence[int]) -> Tensor:
    """Return the target's input embeddings [n, d] of some tokens, without positions."""
    return (target.engine or target.torch_blocks()).embed_tokens(tokens)


# ---------------------------------------------------------------------- on a loaded model


def head_weights(model: Any, method: str) -> dict[str, Tensor]:
    """Return the tensors of a method's head that a model holds.

    Raises TinyspecError if it has no such head.
    """
    lead = f"{method}/"
    extras: Mapping[str, Tensor] = getattr(model, "extras", {})
    found = {
        name[len(lead) :]: w
        for name, w in extras.items()
        if name.startswith(lead) and not name.startswith(f"{lead}{SETTINGS}")
    }
    if not found:
        raise missing_head(model.name, method)
    return found


def prepare_head(model: Any, method: str, make: Callable[[Any], T]) -> T:
    """Return what a method makes of a model and its head, made on the first call.

    It lives as long as the model, and all requests of the model share it.
    """
    known: dict[str, T] = vars(model).setdefault("_prepared", {})
    if method not in known:
        known[method] = make(model)
    return known[method]


def missing_head(model: str, method: str) -> TinyspecError:
    """Return the error of a method whose head is not there."""
    return TinyspecError(
        f"{model} has no head for {method}: name its folder with --head (head=...), or train one: "
        f"tinyspec train head --for {model} --method {method} --out FOLDER"
    )


def head_settings(model: Any, method: str) -> dict[str, Any]:
    """Return the settings of a method's head that a model holds: numbers and words."""
    lead = f"{method}/{SETTINGS}"
    extras: Mapping[str, Tensor] = getattr(model, "extras", {})
    return {
        name[len(lead) :]: x.item() if x.ndim == 0 else bytes(x.tolist()).decode()
        for name, x in extras.items()
        if name.startswith(lead)
    }


def add_head(
    model: Model,
    method: str,
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any] | None = None,
) -> Model:
    """Return the same model with this head, in place of another head of the method.

    Both share the model's weights; the given model stays as it is.
    """
    numbers = {
        f"{SETTINGS}{name}": torch.tensor(list(x.encode()) if isinstance(x, str) else x)
        for name, x in (settings or {}).items()
    }
    weights = {**weights, **numbers}
    others = {name: w for name, w in model.extras.items() if not name.startswith(f"{method}/")}
    own = {f"{method}/{name}": w.detach().to(model.device) for name, w in weights.items()}
    return model.with_extras({**others, **own})


# ---------------------------------------------------------------------- files


class HeadFile(NamedTuple):
    """The content of a head's folder.

    method    the technique that it was trained for
    target    the name of the model that it was trained on
    check     `embedding_checksum` of that model
    settings  what decides the shapes, by name
    values    all other keys of config.json
    weights   tensors by name, on the CPU
    """

    method: str
    target: str
    check: int
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    weights: Mapping[str, Tensor]


def write_head(folder: str | Path, head: HeadFile) -> None:
    """Write a head's folder: a new one appears complete, an existing one file by file."""
    own = {
        "method": head.method,
        "head_of": head.target,
        "check": head.check,
        "settings": dict(head.settings),
    }
    values = {**head.values, "tinyspec": {**head.values.get("tinyspec", {}), **own}}
    write_head_files(folder, values, head.weights)


def write_head_files(
    folder: str | Path, values: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write config.json and model.safetensors: a new folder appears complete."""
    stored = {name: w.detach().cpu().contiguous() for name, w in weights.items()}
    with write_atomically(Path(folder)) as work:
        safetensors.torch.save_file(stored, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_head_config(folder: str | Path) -> dict[str, Any]:
    """Return method, head_of, check and settings of a head's folder, and `values`: all other keys.

    Raises TinyspecError, one line, for what is missing or damaged.
    """
    file = Path(folder) / "config.json"
    kinds = {"method": str, "head_of": str, "check": int, "settings": dict}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        extra = values.pop("tinyspec")
        own = {name: extra.pop(name) for name in kinds}
        if not all(isinstance(own[name], kind) for name, kind in kinds.items()):
            raise TypeError
    except FileNotFoundError:
        raise TinyspecError(f"{folder}: no head: it has no config.json") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TinyspecError(
            f"{file}: not the config of a head: its section tinyspec must have method, head_of, "
            "check and settings, as `tinyspec train head` writes them"
        ) from None
    return {**own, "values": {**values, "tinyspec": extra}}


def read_head(folder: str | Path) -> HeadFile:
    """Read a head's folder. Raises TinyspecError, one line, for what is missing or damaged."""
    own = read_head_config(folder)
    weights = restore_bytes(read_head_weights(folder))
    return HeadFile(
        own["method"], own["head_of"], own["check"], own["settings"], own["values"], weights
    )


def store_in_bytes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors whose matrices are bytes with scales, and whose vectors stay as they are."""
    stored = dict(weights)
    for name, w in weights.items():
        if w.ndim > 1:
            scale = w.float().abs().amax(-1, keepdim=True) / MOST_BYTE
            of_row = torch.where(scale > 0, scale, 1.0)  # a row of zeros
            stored[name] = (w.float() / of_row).round().to(torch.int8)
            stored[name + SCALE] = scale
    return stored


def restore_bytes(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `store_in_bytes` stored, in float32; others stay as they are."""
    weights = dict(stored)
    for name, q in stored.items():
        scale = stored.get(name + SCALE)
        if q.dtype == torch.int8 and scale is not None and scale.shape == (*q.shape[:-1], 1):
            weights[name] = q.float() * weights.pop(name + SCALE).float()
    return weights


def read_head_weights(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a head's folder. Raises TinyspecError if its file cannot be read."""
    file = Path(folder) / "model.safetensors"
    try:
        return safetensors.torch.load_file(str(file))
    except Exception as error:  # a damaged file, or none
        raise TinyspecError(
            f"{file}: cannot be read ({error}); copy it again, or train the head again"
        ) from error


def check_head(
    head: HeadFile, model: Model, shapes: Mapping[str, Sequence[int]], folder: Path
) -> None:
    """Raise TinyspecError unless a head fits a model.

    shapes  of its tensors by name, as its settings decide them
    """
    if head.check != embedding_checksum(model.weights["embed"]):
        raise TinyspecError(
            f"{folder}: this head was trained on {head.target}, not on {model.name} (another "
            f"checksum): train one with `tinyspec train head --for {model.name} "
            f"--method {head.method}`"
        )
    for problem in _find_problems(head, model.config, shapes):
        raise TinyspecError(f"{folder / 'model.safetensors'}: {problem}; train it again")


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = (torch.int32, torch.int64)


def _find_problems(
    head: HeadFile, config: Config, shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    for name, shape in shapes.items():
        if name not in head.weights:
            yield f"{name} is missing"
        elif tuple(head.weights[name].shape) != tuple(shape):
            got = list(head.weights[name].shape)
            yield f"{name} has the shape {got}, expected {list(shape)}"
    for name, weight in head.weights.items():
        if name not in shapes:
            yield f"{name} is not a tensor of {head.method} with these settings"
        elif weight.dtype not in (WHOLE if name == TOKEN_MAP else FLOATS):
            yield f"{name} has numbers of the type {str(weight.dtype).removeprefix('torch.')}"
        elif weight.is_floating_point() and not bool(weight.isfinite().all()):
            yield f"{name} has numbers that are not finite"
    if (ids := head.weights.get(TOKEN_MAP)) is not None and TOKEN_MAP in shapes:
        rising = ids.tolist() if ids.dtype in WHOLE else []
        if (
            not rising
            or any(a >= b for a, b in pairwise(rising))
            or rising[0] < 0
            or rising[-1] >= config.vocab_size
        ):
            yield f"{TOKEN_MAP} must be rising ids from 0 to {config.vocab_size - 1}"
