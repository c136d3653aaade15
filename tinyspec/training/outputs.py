"""A target's own outputs, with its law at every token: what a draft is distilled from.

Texts are sampled from the target in ragged batches, and of every law the most probable tokens are
kept, so that a training can go over them many times without the target. They lie in the cache, a
file a batch; an interrupted writing goes on where it was, and drafts of several sizes read the same
files. Text i depends on (target, asking, seed, i) alone.

Where prompts come from: a file (paragraphs, split at blank lines); else, for a chat model, GSM8K's
training questions, German captions to translate and paragraphs of the classics to summarise, as far
as these are on the machine, and questions that the model asks itself; for a plain model, openings
in the classics. None of them is in a benchmark.
"""

import json
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from tinyspec import data, models
from tinyspec.errors import TinyspecError
from tinyspec.lm import borrowed
from tinyspec.lm.gate import BatchBarrier, run_together
from tinyspec.lm.model import Model
from tinyspec.progress import progress_bar
from tinyspec.training import corpus
from tinyspec.tree import TokenTree


@dataclass(frozen=True)
class OutputSettings:
    """What is written. Texts of several drafts are shared where all of it agrees.

    texts        how many
    tokens       new tokens of each, at most
    prompt       tokens of its prompt, at most
    question     tokens of a question that a chat model asks itself, at most
    temperature  at which they are drawn; the laws that are kept are those at temperature 1
    top          tokens kept of each law
    """

    texts: int = 1500
    tokens: int = 128
    prompt: int = 96
    question: int = 40
    temperature: float = 0.8
    top: int = 64
    seed: int = 0
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("texts", "tokens", "prompt", "question", "top", "batch"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise TinyspecError(
                    f"[distill] {name} is {getattr(self, name)}: it must be a whole number from 1 on"
                )
        if not self.temperature > 0:
            raise TinyspecError(
                f"[distill] temperature is {self.temperature}: outputs are drawn, so it must be above 0"
            )


class TargetOutput(NamedTuple):
    """A text of the target.

    ids    [n] prompt, answer
    known  [m] places whose next token's law is known: ids[place + 1] was drawn there
    top    [m, k] ids of the most probable tokens, int32
    law    [m, k] their probabilities at temperature 1, float16
    """

    ids: Tensor
    positions: Tensor
    top_ids: Tensor
    top_probs: Tensor


class TargetPrompt(NamedTuple):
    """A prompt; with `closing`, the model asks a question behind it first, and these ids follow its
    question.
    """

    ids: Sequence[int]
    closing: Sequence[int] | None = None


# ---------------------------------------------------------------------- prompts


PromptSource = Callable[[random.Random], str]


def make_prompts(
    model: Model,
    asking: OutputSettings,
    file: Path | None = None,
    data_folder: str | Path | None = None,
) -> list[TargetPrompt]:
    """As many prompts as texts are wanted; prompt i depends on (asking.seed, i) and the data, not
    on how many there are.
    """
    chat = model.has_tokenizer and model.tokenizer.has_chat
    if file is not None:
        own = [
            part.strip() for part in file.read_text(encoding="utf-8").split("\n\n") if part.strip()
        ]
        if not own:
            raise TinyspecError(
                f"{file}: no prompts in it; they are paragraphs, split at blank lines"
            )
        kinds: list[PromptSource] = [lambda chance: chance.choice(own)]
    else:
        kinds = list(_find_questions(data_folder)) if chat else _find_openings(data_folder)
    itself = (
        TargetPrompt(*_split_chat_template(model)) if chat else TargetPrompt(_empty_prompt(model))
    )
    room = model.config.max_positions - asking.tokens - asking.question
    made = []
    for i in range(asking.texts):
        chance = random.Random(f"{asking.seed} {i}")
        # a batch waits for its longest text, so it is of one kind; the last kind is what the model
        # asks itself
        kind = i // asking.batch % (len(kinds) + (chat and file is None)) if kinds else 0
        if kind >= len(kinds):
            made.append(itself)
        elif chat:
            ids = model.tokenizer.chat([{"role": "user", "content": kinds[kind](chance)}])
            made.append(TargetPrompt(ids) if len(ids) <= room else itself)
        else:
            ids = _encode_plain_prompt(model, kinds[kind](chance))
            length = len(ids) if file is not None else chance.randint(8, max(asking.prompt, 8))
            made.append(TargetPrompt(ids[: min(length, room)] or itself.ids))
    return made


def _find_questions(root: str | Path | None) -> Iterator[PromptSource]:
    """Kinds of questions, of the data that is here."""
    with suppress(TinyspecError):
        sums = [s.question for s in data.read_gsm8k("train", root)]
        yield lambda chance: chance.choice(sums)
    with suppress(TinyspecError):
        captions = [german for _, german in data.read_multi30k("train", root)]
        yield lambda chance: f"Translate German to English: {chance.choice(captions)}"
    with suppress(TinyspecError):
        parts = [
            part
            for book in data.read_books("train", root)
            for part in corpus.clean_book(book.text).split("\n\n")
        ]
        parts = [part for part in parts if 200 < len(part) < 500]
        lead = (
            "Summarize:",
            "Explain in simple words:",
            "Continue this story:",
            "What happens here?",
        )
        yield lambda chance: f"{chance.choice(lead)} {chance.choice(parts)}"


def _find_openings(root: str | Path | None) -> list[PromptSource]:
    """Paragraphs of the training books with what follows them; nothing where there are none."""
    try:
        books = [
            corpus.clean_book(book.text).split("\n\n") for book in data.read_books("train", root)
        ]
    except TinyspecError:
        return []

    def opening(chance: random.Random) -> str:
        book = chance.choice(books)
        return "\n\n".join(book[chance.randrange(len(book)) :][:4])

    return [opening]


def _split_chat_template(model: Model) -> tuple[list[int], list[int]]:
    """What stands before a user's question in the chat template, and what stands behind it."""
    one, two = (
        model.tokenizer.chat([{"role": "user", "content": word}]) for word in ("What", "Please")
    )

    def common(a: Sequence[int], b: Sequence[int]) -> list[int]:
        return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]

    return common(one, two), common(one[::-1], two[::-1])[::-1]


def _encode_plain_prompt(model: Model, text: str) -> list[int]:
    bos = [model.config.bos] if model.config.add_bos and model.config.bos is not None else []
    return bos + model.tokenizer.encode(text)


def _empty_prompt(model: Model) -> list[int]:
    """The prompt that says nothing."""
    return [model.config.bos if model.config.bos is not None else next(iter(model.config.eos), 0)]


# ---------------------------------------------------------------------- writing


def outputs_folder(model: Model, asking: OutputSettings, prompts: Path | None = None) -> Path:
    """Where the outputs of this target, asked so, are kept."""
    said = "" if prompts is None else prompts.read_text(encoding="utf-8")
    asked = {
        name: value for name, value in asdict(asking).items() if name != "texts"
    }  # more texts go on with these
    key = json.dumps(
        [borrowed.check(model.weights["embed"]), model.config.n_layers, asked, said], sort_keys=True
    )
    return (
        models.models_folder().parent / "outputs" / f"{model.name}-{zlib.crc32(key.encode()):08x}"
    )


def write_outputs(
    model: Model,
    asks: Sequence[TargetPrompt],
    asking: OutputSettings,
    where: Path,
    console: Console | None = None,
) -> list[TargetOutput]:
    """All outputs: those that are in the folder already, and the others, written now, a file a
    batch.
    """
    where.mkdir(parents=True, exist_ok=True)
    (where / "asking.json").write_text(
        json.dumps({"target": model.name, **asdict(asking)}, indent=1) + "\n", encoding="utf-8"
    )
    bar = progress_bar(console)
    made: list[TargetOutput] = []
    with bar:
        task = bar.add_task(f"texts of {model.name}", total=len(asks))
        for at in range(0, len(asks), asking.batch):
            path, part = where / f"{at // asking.batch:05d}.pt", asks[at : at + asking.batch]
            found = read_outputs(path) if path.exists() else []
            if len(found) < len(part):
                found = sample_outputs(model, part, asking, at)
                torch.save([tuple(output) for output in found], path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)
            made += found[: len(part)]
            bar.advance(task, len(part))
    return made


def read_outputs(path: Path) -> list[TargetOutput]:
    """The outputs of a file. TinyspecError where it is damaged."""
    try:
        return [TargetOutput(*parts) for parts in torch.load(path, weights_only=True)]
    except Exception as error:
        raise TinyspecError(
            f"{path}: damaged ({type(error).__name__}); delete it, and it is written again"
        ) from error


def sample_outputs(
    model: Model, asks: Sequence[TargetPrompt], asking: OutputSettings, first: int
) -> list[TargetOutput]:
    """Outputs for these prompts, in one ragged batch; `first` is the number of the first."""

    def job(row: int) -> Any:
        return lambda gate: _sample_output(model, asks[row], asking, first + row, gate)

    return run_together([job(row) for row in range(len(asks))])


def _sample_output(
    model: Model, ask: TargetPrompt, asking: OutputSettings, number: int, gate: BatchBarrier
) -> TargetOutput:
    """One text, drawn token by token."""
    generator = torch.Generator(model.device).manual_seed(asking.seed * 1_000_003 + number)
    session = model.session(gate=gate)
    ids, known = list(ask.ids), list[int]()
    tops, laws = list[Tensor](), list[Tensor]()
    session.extend(ids)

    def draw(most: int) -> None:
        for _ in range(most):
            logits = session.score(TokenTree()).logits[0]
            best = logits.softmax(-1).topk(min(asking.top, len(logits)))
            law = (
                (logits / asking.temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
            )  # multinomial is ten times slower
            u = (
                torch.rand((1,), generator=generator, dtype=torch.float64, device=model.device)
                * law[-1]
            )
            token = min(int(torch.searchsorted(law, u, right=True)), len(law) - 1)
            known.append(len(ids) - 1)
            tops.append(best.indices.int().cpu())
            laws.append(best.values.half().cpu())
            ids.append(token)
            session.commit((), token)
            if token in model.config.eos:
                return

    if ask.closing is not None:
        draw(asking.question)
        closing = (
            ask.closing[1:] if ids[-1] == ask.closing[0] else ask.closing
        )  # it may have ended its question itself
        ids += closing
        session.extend(closing)
    draw(asking.tokens)
    return TargetOutput(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(known),
        torch.stack(tops),
        torch.stack(laws),
    )
