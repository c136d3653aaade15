"""Sequence-level distillation: the teacher's translations of the training sentences, kept on disk.

Kim, Rush, EMNLP 2016, arXiv 1606.07947. A student that is trained on what its teacher says, instead
of what people said, meets one translation of each sentence, not one of many: that is what models
without autoregression need most.

The translations lie in the cache, a file a batch, in a folder named by a hash of the teacher's
weights, the sentences and the settings. An interrupted writing goes on where it was; students of
several kinds read the same files.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from tinyspec import models
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Lockstep, Seq2Seq
from tinyspec.progress import progress_bar
from tinyspec.training.beam import beam_search, greedy_search
from tinyspec.training.bitext import pad_sequences


@dataclass(frozen=True)
class BeamSettings:
    """How a teacher writes.

    beam          texts kept by beam search; 1: greedy decoding
    length_power  see training/beam.py
    factor, more  a translation has at most factor * source + more tokens
    """

    beam: int = 4
    length_power: float = 1.0
    factor: float = 1.5
    more: int = 11

    def __post_init__(self) -> None:
        if not isinstance(self.beam, int) or self.beam < 1:
            raise TinyspecError(
                f"beam is {self.beam}: it must be a whole number from 1 (greedy) on"
            )
        if not self.factor >= 0 or not self.more >= 0:
            raise TinyspecError(
                f"at most {self.factor} * source + {self.more} tokens: neither may be negative"
            )

    def limit(self, model: Seq2Seq, source: Sequence[int]) -> int:
        """Tokens of a translation, at most, before its end."""
        return min(int(self.factor * len(source)) + self.more, model.config.max_positions - 1)


def write_translations(
    model: Seq2Seq, sources: Sequence[Sequence[int]], writing: BeamSettings = BeamSettings()
) -> list[list[int]]:
    """Translations of these sources, computed together: ids without the ends."""
    if not all(sources):
        raise TinyspecError("a source is empty: give at least one token")
    limits = [writing.limit(model, source) for source in sources]
    with torch.inference_mode():
        memory = model.encode(pad_sequences(sources, model.config.pad).to(model.device))
    rows = Lockstep(model, memory, max(limits) + 1)
    c = model.config
    if writing.beam == 1:
        return greedy_search(rows, c.bos, c.eos, limits)
    return beam_search(rows, c.bos, c.eos, limits, writing.beam, writing.length_power)


def hash_weights(model: Seq2Seq) -> str:
    """A hash of its weights, in float32."""
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(model.weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def translations_folder(
    model: Seq2Seq, sources: Sequence[Sequence[int]], writing: BeamSettings
) -> Path:
    """Where the translations of these sources, by this teacher, written so, are kept."""
    asked = [hash_weights(model), [list(source) for source in sources], asdict(writing)]
    key = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()
    return models.models_folder().parent / "distilled" / f"{model.name}-{key}"


def distill_translations(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    writing: BeamSettings = BeamSettings(),
    where: Path | None = None,
    batch: int = 128,
    console: Console | None = None,
) -> list[list[int]]:
    """All translations, in the order of `sources`: those that are in the folder, and the others,
    written now.
    """
    where = where or translations_folder(model, sources, writing)
    where.mkdir(parents=True, exist_ok=True)
    order = sorted(
        range(len(sources)), key=lambda i: (len(sources[i]), i)
    )  # of like lengths: less padding
    found: dict[int, list[int]] = {}
    bar = progress_bar(console)
    with bar:
        task = bar.add_task(f"{model.name} writes", total=len(order))
        for at in range(0, len(order), batch):
            part, path = order[at : at + batch], where / f"{at:06d}-{batch}.json"
            texts = _read(path, len(part)) if path.exists() else None
            if texts is None:
                texts = write_translations(model, [sources[i] for i in part], writing)
                beside = path.with_suffix(".part")
                beside.write_text(json.dumps(texts), encoding="utf-8")
                os.replace(beside, path)
            found.update(zip(part, texts, strict=True))
            bar.advance(task, len(part))
    return [found[i] for i in range(len(sources))]


def _read(path: Path, rows: int) -> list[list[int]]:
    try:
        texts: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
        if len(texts) != rows or not all(
            isinstance(token, int) for text in texts for token in text
        ):
            raise ValueError(f"{len(texts)} texts instead of {rows}")
        return texts
    except (OSError, ValueError, TypeError) as error:
        raise TinyspecError(
            f"{path}: damaged ({error}); delete it, and it is written again"
        ) from error
