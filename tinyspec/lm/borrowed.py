"""A draft that shares its target's embeddings, head and tokenizer. Its layers are its own.

Most of a small model is its vocabulary, so a draft need not hold it again. In config.json the
section "tinyspec" names the target (`embeddings_from`) with a checksum of its embedding
(`embeddings_check`). The file holds the layers, the final norm, and in `tinyspec.says` the ids that
the draft may propose, in rising order. Its head has the target's rows of these ids; any other id
has logit -inf. So the draft has the target's vocabulary, and its head costs as many rows as it has
ids.
"""

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm import families
from tinyspec.lm.config import Config

FROM, CHECK = "embeddings_from", "embeddings_check"  # keys of Config.extra
SAYS = "tinyspec.says"  # the tensor of ids, int32 [n]
ROWS = 64  # rows in the checksum: enough to tell one model, or one version of it, from another

Tensors = dict[str, Callable[[], Tensor]]


def shares_embeddings(config: Config) -> bool:
    """Return whether its embeddings are another checkpoint's."""
    return FROM in config.extra


def embedding_checksum(embed: Tensor) -> int:
    """Return a checksum of some rows of an embedding [V, d]; the stored type does not matter."""
    rows = torch.linspace(0, len(embed) - 1, min(ROWS, len(embed))).long()
    return zlib.crc32(
        embed.detach()[rows].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
    )


def shared_weights(target: Mapping[str, Tensor], head_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the target's weights that a draft shares: embed [V, d], head [len(head_ids), d]."""
    head = target["head"] if "head" in target else target["embed"]
    return {"embed": target["embed"], "head": head[torch.tensor(head_ids)]}


def find_target_folder(
    config: Config, folder: Path, find: Callable[[str], Path | None] | None
) -> Path:
    """Return the target's folder: inside the draft's own, or where `find` finds it."""
    name = config.extra[FROM]
    if not isinstance(name, str) or not name:
        raise TinyspecError(
            f"{folder / 'config.json'}: {FROM} is {name!r}, expected the name of a model"
        )
    found: Path | None = folder / name
    if not os.path.isfile(folder / name / "config.json"):  # False if the name is too long
        found = None if find is None else find(name)
    if found is None or not (found / "config.json").is_file():
        raise TinyspecError(
            f"{folder.name} takes its embeddings from {name}, which is not on this machine as a "
            f"folder: run `tinyspec models fetch {name}`, or put that checkpoint beside it"
        )
    return found


def load_shared_weights(
    config: Config, tensors: Tensors, file: str, theirs: Config, shared: Tensors, target: Path
) -> tuple[Config, Tensors]:
    """Return the draft's config and tensors, completed by those of its target.

    theirs, shared, target  the target's config, its tensors and its folder

    Raises TinyspecError if it is another model than the draft was made for, or if it shares its own
    embeddings with a third.
    """
    name = config.extra[FROM]
    if shares_embeddings(theirs):
        raise TinyspecError(f"{file}: {FROM} names {name}, which borrows its own embeddings")
    for field in ("vocab_size", "d_model"):
        if getattr(theirs, field) != getattr(config, field):
            raise TinyspecError(
                f"{file}: {field} is {getattr(config, field)}, but {name}, whose embeddings it "
                f"takes, has {getattr(theirs, field)}: this draft is of another model"
            )
    if SAYS not in tensors:
        raise TinyspecError(f"{file}: {SAYS} is missing: the ids that the draft may say")
    ids = tensors[SAYS]()
    are_ids = ids.ndim == 1 and ids.dtype in (torch.int32, torch.int64)
    head_ids = tuple(ids.tolist()) if are_ids else ()
    if (
        not head_ids
        or any(a >= b for a, b in pairwise(head_ids))
        or head_ids[0] < 0
        or head_ids[-1] >= config.vocab_size
    ):
        raise TinyspecError(f"{file}: {SAYS} must be rising ids from 0 to {config.vocab_size - 1}")
    named = families.weight_sources(theirs)
    embed = _read_shared(theirs, shared, named["embed"].names[0], target)
    if (wanted := config.extra.get(CHECK)) is not None and embedding_checksum(embed) != wanted:
        raise TinyspecError(
            f"{file}: the embeddings of {name} at {target} are not those that this draft was made "
            "with: it is another model, or another version of it"
        )
    head = embed if theirs.tied else _read_shared(theirs, shared, named["head"].names[0], target)
    config = replace(config, head_ids=head_ids, tied=False)
    ours = families.weight_sources(config)
    made = {key: read for key, read in tensors.items() if key != SAYS}
    made[ours["embed"].names[0]] = lambda: embed
    made[ours["head"].names[0]] = lambda: head[ids.long()]
    return config, made


def _read_shared(config: Config, tensors: Tensors, name: str, folder: Path) -> Tensor:
    short = name.removeprefix("transformer.")  # GPT2Model saves without the prefix
    if name not in tensors and short not in tensors:
        raise TinyspecError(f"{folder}: {name} is missing, which a draft takes from it")
    tensor = tensors[name if name in tensors else short]()
    families.check_tensor(tensor, (config.vocab_size, config.d_model), f"{folder}: {name}")
    return tensor


def add_checksum(config: Config, weights: Mapping[str, Tensor]) -> Config:
    """Return the config as it is written: with the checksum of the embedding."""
    if not shares_embeddings(config):
        return config
    if not config.head_ids or config.tied:
        raise TinyspecError(
            f"a draft with {FROM} needs Config.head_ids, the ids of its head, and tied=False"
        )
    return replace(config, extra={**config.extra, CHECK: embedding_checksum(weights["embed"])})


def drop_shared_weights(config: Config, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors without the shared ones, and with the ids of the head."""
    if not shares_embeddings(config):
        return theirs
    named = families.weight_sources(config)
    shared = {named[part].names[0] for part in ("embed", "head")}
    kept = {name: tensor for name, tensor in theirs.items() if name not in shared}
    return {**kept, SAYS: torch.tensor(config.head_ids, dtype=torch.int32)}
