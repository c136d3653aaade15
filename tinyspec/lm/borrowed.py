"""A draft that borrows: its layers are its own; its embeddings, the rows of its head and its
tokenizer are its target's.

Most of a small model is its vocabulary. A draft of a target whose tokens it shares need not hold it
again: config.json's section "tinyspec" names the target (`embeddings_from`) with a check sum of its
embedding (`embeddings_check`), the file holds the layers, the final norm, and under `tinyspec.says`
the ids that the draft may say, in rising order. The head is the target's rows of these ids; any id
may be read, and the logit of one that cannot be said is -inf. So the draft speaks the target's
vocabulary, and its product with the head costs as many rows as it has words.
"""

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
ROWS = 64  # of the embedding that are summed up: enough to tell one model, or one state of it, from another

Tensors = dict[str, Callable[[], Tensor]]


def borrows(config: Config) -> bool:
    """Whether its embeddings are another checkpoint's."""
    return FROM in config.extra


def check(embed: Tensor) -> int:
    """A check sum of an embedding [V, d]: of some rows, over all of it, whatever they are stored
    in.
    """
    rows = torch.linspace(0, len(embed) - 1, min(ROWS, len(embed))).long()
    return zlib.crc32(
        embed.detach()[rows].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
    )


def rows(lender: Mapping[str, Tensor], says: tuple[int, ...]) -> dict[str, Tensor]:
    """What a draft takes from its target's weights: {"embed": [V, d], "head": [len(says), d]}."""
    head = lender["head"] if "head" in lender else lender["embed"]
    return {"embed": lender["embed"], "head": head[torch.tensor(says)]}


def find_target_folder(
    config: Config, folder: Path, find: Callable[[str], Path | None] | None
) -> Path:
    """The folder of the checkpoint that lends: beside the draft's own, or where `find` says."""
    name = config.extra[FROM]
    if not isinstance(name, str) or not name:
        raise TinyspecError(
            f"{folder / 'config.json'}: {FROM} is {name!r}, expected the name of a model"
        )
    found = (
        folder / name
        if (folder / name / "config.json").is_file()
        else find(name)
        if find is not None
        else None
    )
    if found is None or not (found / "config.json").is_file():
        raise TinyspecError(
            f"{folder.name} takes its embeddings from {name}, which is not on this machine as a folder: "
            f"run `tinyspec models fetch {name}`, or put that checkpoint beside it"
        )
    return found


def load_shared_weights(
    config: Config, tensors: Tensors, file: str, theirs: Config, lent: Tensors, lender: Path
) -> tuple[Config, Tensors]:
    """The draft's config and tensors with what `lender` (config `theirs`, tensors `lent`) lends.
    TinyspecError where it is another model than the draft was made for, or borrows itself."""
    name = config.extra[FROM]
    if borrows(theirs):
        raise TinyspecError(f"{file}: {FROM} names {name}, which borrows its own embeddings")
    for field in ("vocab_size", "d_model"):
        if getattr(theirs, field) != getattr(config, field):
            raise TinyspecError(
                f"{file}: {field} is {getattr(config, field)}, but {name}, whose embeddings it takes, "
                f"has {getattr(theirs, field)}: this draft is of another model"
            )
    if SAYS not in tensors:
        raise TinyspecError(f"{file}: {SAYS} is missing: the ids that the draft may say")
    ids = tensors[SAYS]()
    says = tuple(ids.tolist()) if ids.ndim == 1 and not ids.is_floating_point() else ()
    if (
        not says
        or any(a >= b for a, b in pairwise(says))
        or says[0] < 0
        or says[-1] >= config.vocab_size
    ):
        raise TinyspecError(f"{file}: {SAYS} must be rising ids from 0 to {config.vocab_size - 1}")
    named = families.layout(theirs)
    embed = _tensor(lent, named["embed"].names[0], lender)
    if (wanted := config.extra.get(CHECK)) is not None and check(embed) != wanted:
        raise TinyspecError(
            f"{file}: the embeddings of {name} at {lender} are not those that this draft was made with: "
            "it is another model, or another version of it"
        )
    head = embed if theirs.tied else _tensor(lent, named["head"].names[0], lender)
    config = replace(config, says=says, tied=False)
    ours = families.layout(config)
    made = {key: read for key, read in tensors.items() if key != SAYS}
    made[ours["embed"].names[0]] = lambda: embed
    made[ours["head"].names[0]] = lambda: head[ids.long()]
    return config, made


def _tensor(tensors: Tensors, name: str, folder: Path) -> Tensor:
    short = name.removeprefix("transformer.")  # GPT2Model saves without the prefix
    if name not in tensors and short not in tensors:
        raise TinyspecError(f"{folder}: {name} is missing, which a draft takes from it")
    return tensors[name if name in tensors else short]()


def marked(config: Config, weights: Mapping[str, Tensor]) -> Config:
    """The config as it is written: with the check sum of the embedding."""
    if not borrows(config):
        return config
    if not config.says or config.tied:
        raise TinyspecError(
            f"a draft with {FROM} says which ids its head has rows for (Config.says, tied=False)"
        )
    return replace(config, extra={**config.extra, CHECK: check(weights["embed"])})


def own(config: Config, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors without those that are borrowed, and with the ids."""
    if not borrows(config):
        return theirs
    named = families.layout(config)
    lent = {named[part].names[0] for part in ("embed", "head")}
    kept = {name: tensor for name, tensor in theirs.items() if name not in lent}
    return {**kept, SAYS: torch.tensor(config.says, dtype=torch.int32)}
