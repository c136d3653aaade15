"""Turn books into tokens, and score models on them: bits per byte, acceptance rate.

Bits per UTF-8 byte is the negative log2 likelihood of a text, divided by its length in bytes. It is
the quality measure here because it does not depend on the tokenizer.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.tokenizer import Tokenizer

END_TOKEN = "<|endoftext|>"  # stands between documents
END_ID = 0  # its id in the tokenizers that are trained here
LogitsFn = Callable[[Tensor], Tensor]  # ids [B, T] -> logits [B, T, V]

_HEADER = re.compile(r"\A(?:[ \t]*\n|#+ *(?:Title|Author|Year):[^\n]*\n)*-{3,}[ \t]*\n")


def clean_book(text: str) -> str:
    r"""Return a book as the models read it.

    It has unix line ends, no title block, no spaces at line ends, no blank lines at its ends.

    >>> head = "# Title: A\n\n## Author: B\n\n## Year: 1900\n\n-------\n\n"
    >>> clean_book(head + "## Part I \r\n\r\nIt rained. \r\n")
    '## Part I\n\nIt rained.'
    """
    text = _HEADER.sub("", text.replace("\r\n", "\n").replace("\r", "\n"), count=1)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n")


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokenizer:
    """Learn byte-level BPE from `texts`, and save it to `folder`.

    Any string can be encoded. END_TOKEN has id 0. A carriage return before a line feed is dropped,
    as it is from the training text.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace("\r\n", "\n")
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return train_bpe(bpe, texts, vocab_size, {"eos_token": END_TOKEN}, Path(folder))


def train_bpe(
    bpe: tokenizers.Tokenizer,
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Mapping[str, str],
    folder: Path,
) -> Tokenizer:
    """Learn the merges of a byte-level tokenizer from `texts`, and save it to `folder`.

    special_tokens  role -> text, such as eos_token; their ids are 0, 1, and so on
    """
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    return Tokenizer.from_folder(folder)


def pack_texts(tokenizer: Tokenizer, texts: Iterable[str], end: int) -> Tensor:
    """Return all texts in one row of ids [n], an `end` token before each and after the last."""
    ids = [end]
    for text in texts:
        ids += tokenizer.encode(text)
        ids.append(end)
    return torch.tensor(ids)


def make_crop_sampler(
    tokens: Tensor, batch: int, context: int
) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Return a function that samples a training batch: (inputs, targets), each [batch, context].

    The whole corpus is one tensor on the model's device. So a batch is one gather, and no loader is
    needed.
    """
    if len(tokens) <= context:
        raise ValueError(f"{len(tokens)} tokens are too few for a context of {context}")
    span = torch.arange(context + 1, device=tokens.device)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(
            len(tokens) - context, (batch, 1), generator=generator, device=generator.device
        )
        rows = tokens[starts.to(tokens.device) + span]
        return rows[:, :-1], rows[:, 1:]

    return draw


class Document(NamedTuple):
    """A text to score: its tokens after an end-of-text token, and its length in UTF-8 bytes."""

    tokens: list[int]
    bytes: int


def encode_document(
    tokenizer: Tokenizer, text: str, end: int, characters: int | None = None
) -> Document:
    """Return a text, or its first `characters`, as a document."""
    text = text[:characters]
    return Document([end, *tokenizer.encode(text)], len(text.encode()))


class WindowBatch(NamedTuple):
    """A batch of windows.

    inputs, targets  ids [B, T]
    scored           whether a target is scored, bool [B, T]
    """

    inputs: Tensor
    targets: Tensor
    scored: Tensor


def slide_windows(
    documents: Sequence[Document], context: int, stride: int, batch: int = 16
) -> Iterator[WindowBatch]:
    """Slide a window over each document so that every token but the first is scored once.

    The first window of a document scores all its targets. Each later one scores only its last
    `stride` targets, which have at least context - stride tokens before them. Short windows are
    padded on the right, which a causal model cannot see.
    """
    rows: list[
        tuple[list[int], int]
    ] = []  # tokens of a window, and how many of its targets were scored before
    for tokens, _ in documents:
        start = 0
        while True:
            window = tokens[start : start + context + 1]
            rows.append((window, context - stride if start else 0))
            if start + context + 1 >= len(tokens):
                break
            start += stride
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        full = torch.zeros(len(part), context + 1, dtype=torch.long)
        scored = torch.zeros(len(part), context, dtype=torch.bool)
        for i, (window, old) in enumerate(part):
            full[i, : len(window)] = torch.tensor(window)
            scored[i, old : len(window) - 1] = True
        yield WindowBatch(full[:, :-1], full[:, 1:], scored)


@torch.no_grad()
def bits_per_byte(
    teach: LogitsFn,
    documents: Sequence[Document],
    context: int = 512,
    stride: int = 256,
    device: torch.device | str = "cpu",
    batch: int = 16,
) -> float:
    """Return the negative log2 likelihood per UTF-8 byte of the documents' text."""
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets, scored in slide_windows(documents, context, stride, batch):
        logits = teach(inputs.to(device)).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), reduction="none"
        )
        nats += losses[scored.to(device).flatten()].sum(dtype=torch.float64)
    return float(nats) / math.log(2) / sum(d.bytes for d in documents)


@torch.no_grad()
def measure_acceptance(
    target: LogitsFn,
    draft: LogitsFn,
    documents: Sequence[Document],
    context: int = 512,
    stride: int = 256,
    device: torch.device | str = "cpu",
    batch: int = 16,
) -> float:
    """Return alpha, the probability that a draft token is accepted.

    alpha = mean over all scored positions of sum_x min(p(x), q(x))
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for inputs, _, scored in slide_windows(documents, context, stride, batch):
        p = target(inputs.to(device)).float().softmax(-1)
        q = draft(inputs.to(device)).float().softmax(-1)
        total += torch.minimum(p, q).sum(-1)[scored.to(device)].sum(dtype=torch.float64)
        count += int(scored.sum())
    return float(total) / count
