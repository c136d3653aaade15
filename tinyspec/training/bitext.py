"""Turn sentence pairs into batches: a joint vocabulary, token ids, batches of similar lengths.

Both languages share one byte-level BPE vocabulary, so that source, target and output share one
embedding. The tokenizer normalizes text: Unicode's composed forms (NFC), one space for every run of
white space, none at the ends. Case stays. A sentence begins with a space inside the tokenizer, so
that a word is the same token at every position. Decoding removes that space. Decoded text is plain
text for sacrebleu; it needs no detokenizer.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training.corpus import train_bpe

SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
PAD, BOS, EOS, MASK = range(4)


class SentencePair(NamedTuple):
    """A sentence and its translation as ids, without end tokens."""

    source: list[int]
    target: list[int]


def train_joint_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokenizer:
    """Learn byte-level BPE from the sentences of both languages, and save it to `folder`.

    Ids 0 to 3 are SPECIAL.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    roles = ("pad_token", "bos_token", "eos_token", "mask_token")
    return train_bpe(bpe, texts, vocab_size, dict(zip(roles, SPECIAL, strict=True)), Path(folder))


def encode_pairs(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[SentencePair]:
    """Return the sentences and their translations as ids."""
    sources, targets = (
        (tokenizer.encode_all(side) for side in zip(*texts, strict=True)) if texts else ([], [])
    )
    return [SentencePair(source, target) for source, target in zip(sources, targets, strict=True)]


def filter_pairs(pairs: Iterable[SentencePair], longest: int) -> list[SentencePair]:
    """Return the pairs to train on: neither side is empty or longer than `longest` tokens."""
    return [pair for pair in pairs if all(0 < len(side) <= longest for side in pair)]


def pad_sequences(rows: Sequence[Sequence[int]], pad: int = PAD) -> Tensor:
    """Return sequences of ids as one tensor [B, longest], padded on the right.

    >>> pad_sequences([[5], [6, 7]]).tolist()
    [[5, 0], [6, 7]]
    """
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.long)


def group_by_length(pairs: Sequence[SentencePair], tokens: int) -> list[list[int]]:
    """Return the numbers of the pairs, by length, in groups of at most `tokens` positions.

    The positions of a group are counted after padding, on its longer side.

    >>> pairs = [SentencePair([1] * n, [1] * n) for n in (3, 1, 2, 1)]
    >>> group_by_length(pairs, tokens=4)
    [[1, 3], [2], [0]]
    """
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i].target), len(pairs[i].source), i))
    groups: list[list[int]] = []
    wide = 0
    for i in order:
        wider = max(wide, *map(len, pairs[i]))
        if groups and wider * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(i)
            wide = wider
        else:
            groups.append([i])
            wide = max(map(len, pairs[i]))
    return groups


def make_batch_sampler(
    pairs: Sequence[SentencePair], tokens: int, pool: int = 8
) -> Callable[[torch.Generator], list[int]]:
    """Return a function that samples a training batch: numbers of pairs of similar lengths.

    A batch fills about `tokens` positions on its longer side. It is sampled from a group as large
    as `pool` batches, so batches differ, and no step needs to remember the steps before it. Every
    pair is equally likely to be in the next batch.
    """
    if not pairs:
        raise TinyspecError("no pairs to train on: all of them are empty or too long for the model")
    pools = group_by_length(pairs, tokens * pool)
    sizes = [
        max(1, min(len(group), tokens // max(len(side) for i in group for side in pairs[i])))
        for group in pools
    ]
    weights = torch.tensor(
        [len(group) / size for group, size in zip(pools, sizes, strict=True)], dtype=torch.float64
    )

    def draw(generator: torch.Generator) -> list[int]:
        where = generator.device
        at = int(torch.multinomial(weights.to(where), 1, generator=generator))
        chosen = torch.randperm(len(pools[at]), generator=generator, device=where)[: sizes[at]]
        return [pools[at][i] for i in chosen.tolist()]

    return draw
