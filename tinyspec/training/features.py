"""Compute a target's hidden states on its own texts, once: what heads are trained on.

The target runs as it runs when it generates: so a head sees in training, up to the rounding to
bfloat16, the numbers that it will see in use. The states lie in the cache beside the texts, a file
for each batch of them. Heads that read the same layers share them.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.technique import TrainingBatch
from tinyspec.training.outputs import TargetOutput
from tinyspec.training.text_cache import cache_batches

BYTES = 2  # of a stored number, bfloat16


def write_states(
    model: Model,
    texts: Sequence[TargetOutput],
    layers: Sequence[int],
    batch: int,
    folder: Path,
    console: Console | None = None,
) -> list[Tensor]:
    """Return the states [layers, n - 1, d] of each text of n tokens, all but the last one.

    batch   texts in a file
    folder  of the texts; the states are put into a folder in it

    Raises TinyspecError before anything is computed if the disk is too small.
    """
    folder = folder / f"states-{'-'.join(map(str, layers))}"
    needed = sum(len(text.ids) for text in texts) * len(layers) * model.config.d_model * BYTES
    folder.mkdir(parents=True, exist_ok=True)
    written = sum(file.stat().st_size for file in folder.glob("*.pt"))
    free = shutil.disk_usage(folder).free
    if needed - written > free:
        raise TinyspecError(
            f"the states of {len(texts)} texts take {needed / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB left: train on fewer texts, or set TINYSPEC_CACHE to another disk"
        )

    def compute(first: int, chosen: Sequence[TargetOutput]) -> dict[str, list[Tensor]]:
        states = []
        for text in chosen:
            session = model.session()
            hidden = session.extend(text.ids.tolist(), layers).hidden
            states.append(hidden.to("cpu", torch.bfloat16, copy=True))
        return {"ids": [text.ids for text in chosen], "states": states}

    def is_complete(content: Any, chosen: Sequence[TargetOutput]) -> bool:
        ids = content["ids"] if isinstance(content, dict) else []  # older files are lists
        return len(ids) >= len(chosen) and all(
            torch.equal(one, text.ids) for one, text in zip(ids, chosen, strict=False)
        )

    files = cache_batches(
        folder,
        texts,
        batch,
        compute,
        name_file=lambda first: f"{first // batch:05d}.pt",
        is_complete=is_complete,
        title=f"states of {model.name}",
        console=console,
    )
    return [states for content in files for states in content["states"]][: len(texts)]


def make_feature_collate(
    texts: Sequence[TargetOutput], states: Sequence[Tensor]
) -> Callable[[Sequence[int], int, torch.device], TrainingBatch]:
    """Return a function that makes a batch of texts with these numbers.

    A text that is longer than the context is cut on the left, and a shorter one is filled up on the
    right.
    """

    def collate(numbers: Sequence[int], context: int, device: torch.device) -> TrainingBatch:
        width = min(max(len(texts[i].ids) for i in numbers), context)
        layers, _, d = states[numbers[0]].shape
        k, n = max(texts[i].top_ids.shape[1] for i in numbers), len(numbers)
        batch = TrainingBatch(
            torch.zeros(n, width, dtype=torch.long),
            torch.zeros(n, width, dtype=torch.bool),
            torch.zeros(n, layers, width, d),
            torch.zeros(n, width, k, dtype=torch.long),
            torch.zeros(n, width, k),
        )
        for row, number in enumerate(numbers):
            text = texts[number]
            cut = max(len(text.ids) - width, 0)
            ids, own = text.ids[cut:].long(), states[number][:, cut:]
            inside = text.positions >= cut
            at = text.positions[inside] - cut
            batch.ids[row, : len(ids)] = ids
            batch.is_answer[row, at] = True
            batch.states[row, :, : own.shape[1]] = own
            batch.top_ids[row, at] = text.top_ids[inside].long()
            batch.top_probs[row, at] = text.top_probs[inside].float()
        return TrainingBatch(*(part.to(device) for part in batch))

    return collate
