"""Distill sequences: a teacher translates the training sentences, and students learn from these.

Kim, Rush, EMNLP 2016, arXiv 1606.07947. People translate a sentence in many ways; the teacher
translates it in one. Models that are not autoregressive need such targets most.

The translations lie in the cache, a file per batch. The folder's name contains a hash of the
teacher's weights, the sentences and the settings. An interrupted run continues, and students of
several kinds read the same files.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from tinyspec import models
from tinyspec.decoding.beam import beam_search, greedy_search
from tinyspec.errors import TinyspecError
from tinyspec.lm.checkpoint import hash_weights
from tinyspec.lm.seq2seq import Lockstep, Seq2Seq
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.text_cache import cache_batches


@dataclass(frozen=True)
class BeamSettings:
    """How a teacher translates.

    beam          texts that beam search keeps; 1: greedy search
    length_power  see beam.py
    factor, more  a translation has at most factor * (source tokens) + more tokens
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
        """Return the most tokens that a translation of the source may have before its end."""
        return min(int(self.factor * len(source)) + self.more, model.config.max_positions - 1)


def write_translations(
    model: Seq2Seq, sources: Sequence[Sequence[int]], settings: BeamSettings = BeamSettings()
) -> list[list[int]]:
    """Translate these sources together; return ids without end tokens."""
    if not all(sources):
        raise TinyspecError("a source is empty: give at least one token")
    limits = [settings.limit(model, source) for source in sources]
    with torch.inference_mode():
        memory = model.encode(pad_sequences(sources, model.config.pad).to(model.device))
    rows = Lockstep(model, memory, max(limits) + 1)
    c = model.config
    if settings.beam == 1:
        return greedy_search(rows, c.bos, c.eos, limits)
    return beam_search(rows, c.bos, c.eos, limits, settings.beam, settings.length_power)


def translations_folder(
    model: Seq2Seq, sources: Sequence[Sequence[int]], settings: BeamSettings
) -> Path:
    """Return the folder in the cache for this teacher's translations of these sources."""
    asked = [hash_weights(model.weights), [list(source) for source in sources], asdict(settings)]
    key = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()
    return models.models_folder().parent / "distilled" / f"{model.name}-{key}"


def distill_translations(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    settings: BeamSettings = BeamSettings(),
    folder: Path | None = None,
    batch: int = 128,
    console: Console | None = None,
) -> list[list[int]]:
    """Return the translations in the order of `sources`, from the cache or written now."""
    # In the order of lengths, because batches of similar lengths have less padding.
    order = sorted(range(len(sources)), key=lambda i: (len(sources[i]), i))
    batches = cache_batches(
        folder or translations_folder(model, sources, settings),
        order,
        batch,
        lambda first, part: write_translations(model, [sources[i] for i in part], settings),
        name_file=lambda first: f"{first:06d}-{batch}.json",
        is_complete=lambda content, part: len(content) == len(part),
        title=f"{model.name} writes",
        console=console,
    )
    found = dict(zip(order, (text for content in batches for text in content), strict=True))
    return [found[i] for i in range(len(sources))]
