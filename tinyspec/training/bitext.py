"""Sentences and their translations become batches: a joint vocabulary, ids, batches of like
lengths.

Both languages share one byte-level BPE vocabulary, so that source, target and output share one
embedding. The tokenizer cleans what it reads: Unicode's composed forms (NFC), every run of white
space one space, none at the ends. Case stays. A sentence begins with a space inside the tokenizer,
so that a word is the same token wherever it stands; decoding takes that space away, and what is
decoded is plain text, ready for sacrebleu: nothing is to be detokenised.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.tokenizer import Tokenizer

SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
PAD, BOS, EOS, MASK = range(4)


class Pair(NamedTuple):
    """A sentence and its translation as ids, without the ends."""

    source: list[int]
    target: list[int]


def train_joint_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokenizer:
    """Learn byte-level BPE from the sentences of both languages and save it to `folder`; ids 0 to 3
    are SPECIAL.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "mask_token"), SPECIAL, strict=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    return Tokenizer.from_folder(folder)


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """The sentences and their translations as ids."""
    sources, targets = (
        (tokenizer.encode_all(side) for side in zip(*texts, strict=True)) if texts else ([], [])
    )
    return [Pair(source, target) for source, target in zip(sources, targets, strict=True)]


def usable(pairs: Iterable[Pair], longest: int) -> list[Pair]:
    """The pairs to train on: neither side empty, neither longer than `longest` tokens."""
    return [pair for pair in pairs if all(0 < len(side) <= longest for side in pair)]


def padded(rows: Sequence[Sequence[int]], pad: int = PAD) -> Tensor:
    """Rows of ids as one tensor [B, longest], filled up on the right.

    >>> padded([[5], [6, 7]]).tolist()
    [[5, 0], [6, 7]]
    """
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def buckets(pairs: Sequence[Pair], tokens: int) -> list[list[int]]:
    """The numbers of the pairs, by length, in groups that fill at most `tokens` places on either
    side when padded.

    >>> buckets([Pair([1] * n, [1] * n) for n in (3, 1, 2, 1)], tokens=4)
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


def drawn(
    pairs: Sequence[Pair], tokens: int, pool: int = 8
) -> Callable[[torch.Generator], list[int]]:
    """Random training batches as numbers of pairs, of like lengths, filling about `tokens` places
    on either side.

    A batch is drawn from a pool of `pool` batches' pairs of like lengths, so that it is a new one
    every time, while a step needs no memory of the steps before it. Every pair is as likely as any
    other to be in the next batch.
    """
    if not pairs:
        raise TinyspecError("no pairs to train on: all of them are empty or too long for the model")
    pools = buckets(pairs, tokens * pool)
    sizes = [
        max(1, min(len(group), tokens // max(len(side) for i in group for side in pairs[i])))
        for group in pools
    ]
    weights = torch.tensor(
        [len(group) / size for group, size in zip(pools, sizes, strict=True)], dtype=torch.float64
    )

    def draw(generator: torch.Generator) -> list[int]:
        at = int(torch.multinomial(weights, 1, generator=generator))
        chosen = torch.randperm(len(pools[at]), generator=generator)[: sizes[at]]
        return [pools[at][i] for i in chosen.tolist()]

    return draw
