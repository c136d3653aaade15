"""Sample a target's outputs, with its probabilities at every token: what a draft is distilled from.

Texts are sampled from the target in ragged batches. Of every distribution the most probable tokens
are kept, so that a training can use the texts many times without the target. They lie in the cache,
a file per batch. An interrupted run continues, and drafts of several sizes read the same files.
Text i depends on the target, the settings and i alone.

Prompts come from a file (paragraphs between blank lines), if one is given. Else a chat model gets
GSM8K's training questions, German captions to translate and paragraphs of the classics to
summarize, as far as these are on the machine, and questions that it asks itself. A plain model gets
openings from the classics. None of these texts is in a benchmark.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from tinyspec import data, models
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.checkpoint import hash_weights
from tinyspec.lm.model import Model
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.speculative.drafting.distillspec import DIVERGENCES
from tinyspec.training import corpus
from tinyspec.training.text_cache import cache_batches
from tinyspec.tree import TokenTree

SOURCES = ("target", "draft", "mix")  # who writes the texts that a draft is trained on


@dataclass(frozen=True)
class OutputSettings:
    """How a target's outputs are sampled. Drafts with equal settings share the outputs.

    texts        how many
    tokens       new tokens of each, at most
    prompt       tokens of its prompt, at most
    question     tokens of a question that a chat model asks itself, at most
    temperature  of the sampling; the probabilities that are kept are those at temperature 1
    top          tokens kept of each distribution
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
            if type(value := getattr(self, name)) is not int or value < 1:
                raise TinyspecError(f"{name} is {value}: it must be a whole number from 1 on")
        if not self.temperature > 0:
            raise TinyspecError(
                f"temperature is {self.temperature}: outputs are drawn, so it must be above 0"
            )


@dataclass(frozen=True)
class DistillSettings(OutputSettings):
    """The section [distill] of a recipe.

    draft_vocab  size of the draft's vocabulary, the target's most frequent tokens; 0: all tokens
    loss         lk: the loss above (distill.py); or a divergence of DistillSpec: kl, rkl, jsd, tv
    source       who writes the texts: target; draft, as it is at the time; mix, half and half
    refresh      steps between two writings of the draft
    fresh        texts that the draft writes each time
    """

    draft_vocab: int = 0
    loss: str = "lk"
    source: str = "target"
    refresh: int = 250
    fresh: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.draft_vocab) is not int or self.draft_vocab < 0:
            raise TinyspecError(
                f"[distill] draft_vocab is {self.draft_vocab!r}: "
                "a number of tokens, or 0 for all of them"
            )
        for name, known in (("loss", ("lk", *DIVERGENCES)), ("source", SOURCES)):
            if (value := getattr(self, name)) not in known:
                hint = suggest_nearest(str(value), known)
                raise TinyspecError(f"[distill] {name} is {value!r}: {hint}")
        for name in ("refresh", "fresh"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise TinyspecError(
                    f"[distill] {name} is {value!r}: it must be a whole number from 1 on"
                )


class TargetOutput(NamedTuple):
    """A text of the target.

    ids        [n] prompt, then answer
    positions  [m] positions after which the next token, ids[position + 1], was sampled
    top_ids    [m, k] most probable next tokens at these positions, int32
    top_probs  [m, k] their probabilities at temperature 1, float16
    """

    ids: Tensor
    positions: Tensor
    top_ids: Tensor
    top_probs: Tensor


class TargetPrompt(NamedTuple):
    """A prompt. With `closing`, the model first writes a question, and these ids follow it."""

    ids: Sequence[int]
    closing: Sequence[int] | None = None


# ---------------------------------------------------------------------- prompts


PromptSource = Callable[[random.Random], str]
TASKS_ON_PASSAGES = (
    "Summarize:",
    "Explain in simple words:",
    "Continue this story:",
    "What happens here?",
)


def make_prompts(
    model: Model,
    asking: OutputSettings,
    file: Path | None = None,
    data_folder: str | Path | None = None,
) -> list[TargetPrompt]:
    """Return a prompt for each text. Prompt i depends on the seed, i and the data alone."""
    is_chat = model.has_tokenizer and model.tokenizer.has_chat
    if file is not None:
        parts = [part.strip() for part in file.read_text(encoding="utf-8").split("\n\n")]
        paragraphs = [part for part in parts if part]
        if not paragraphs:
            raise TinyspecError(
                f"{file}: no prompts in it; they are paragraphs, split at blank lines"
            )
        sources: list[PromptSource] = [lambda rng: rng.choice(paragraphs)]
    else:
        sources = list(_find_questions(data_folder)) if is_chat else _find_openings(data_folder)
    no_question = _split_chat_template(model) if is_chat else (_empty_prompt(model),)
    default = TargetPrompt(*no_question)  # a chat model asks its own question
    longest = model.config.max_positions - asking.tokens - asking.question
    n_kinds = len(sources) + (is_chat and file is None)  # with the model's own questions
    prompts = []
    for i in range(asking.texts):
        rng = random.Random(f"{asking.seed} {i}")
        # All prompts of a batch are of one kind, because a batch waits for its longest text.
        kind = i // asking.batch % n_kinds if sources else 0
        if kind >= len(sources):
            prompts.append(default)
        elif is_chat:
            ids = model.tokenizer.chat([{"role": "user", "content": sources[kind](rng)}])
            prompts.append(TargetPrompt(ids) if len(ids) <= longest else default)
        else:
            ids = _encode_plain_prompt(model, sources[kind](rng))
            length = len(ids) if file is not None else rng.randint(8, max(asking.prompt, 8))
            prompts.append(TargetPrompt(ids[: min(length, longest)] or default.ids))
    return prompts


def _find_questions(root: str | Path | None) -> Iterator[PromptSource]:
    """Yield sources of questions, for the data on this machine."""
    with suppress(TinyspecError):
        questions = [s.question for s in data.read_gsm8k("train", root)]
        yield lambda rng: rng.choice(questions)
    with suppress(TinyspecError):
        captions = [german for _, german in data.read_multi30k("train", root)]
        yield lambda rng: f"Translate German to English: {rng.choice(captions)}"
    with suppress(TinyspecError):
        passages = [
            paragraph
            for book in data.read_books("train", root)
            for paragraph in corpus.clean_book(book.text).split("\n\n")
            if 200 < len(paragraph) < 500  # characters
        ]
        yield lambda rng: f"{rng.choice(TASKS_ON_PASSAGES)} {rng.choice(passages)}"


def _find_openings(root: str | Path | None) -> list[PromptSource]:
    """Return a source of openings: paragraphs of the training books. Without books: no source."""
    try:
        books = [
            corpus.clean_book(book.text).split("\n\n") for book in data.read_books("train", root)
        ]
    except TinyspecError:
        return []

    def open_at_random(rng: random.Random) -> str:
        book = rng.choice(books)
        return "\n\n".join(book[rng.randrange(len(book)) :][:4])

    return [open_at_random]


def _split_chat_template(model: Model) -> tuple[list[int], list[int]]:
    """Return the ids before and after a user's question in the chat template."""
    one, two = (
        model.tokenizer.chat([{"role": "user", "content": word}]) for word in ("What", "Please")
    )
    return _common_prefix(one, two), _common_prefix(one[::-1], two[::-1])[::-1]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> list[int]:
    pairs = zip(a, b, strict=False)
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _encode_plain_prompt(model: Model, text: str) -> list[int]:
    """Return the ids of a text, after the model's begin token if it wants one."""
    bos = [model.config.bos] if model.config.add_bos and model.config.bos is not None else []
    return bos + model.tokenizer.encode(text)


def _empty_prompt(model: Model) -> list[int]:
    """Return the shortest prompt."""
    return [model.config.bos if model.config.bos is not None else next(iter(model.config.eos), 0)]


# ---------------------------------------------------------------------- sampling


def outputs_folder(model: Model, asking: OutputSettings, prompts: Path | None = None) -> Path:
    """Return the folder in the cache for this target's outputs to these prompts."""
    text = "" if prompts is None else prompts.read_text(encoding="utf-8")
    settings = _as_dict(asking)
    settings.pop("texts")  # further texts are added to the folder
    key = json.dumps([hash_weights(model.weights), settings, text], sort_keys=True)
    name = f"{model.name}-{zlib.crc32(key.encode()):08x}"
    return models.models_folder().parent / "outputs" / name


def _as_dict(asking: OutputSettings) -> dict[str, Any]:
    """Return the settings that the outputs depend on."""
    return {f.name: getattr(asking, f.name) for f in fields(OutputSettings)}


def write_outputs(
    model: Model,
    prompts: Sequence[TargetPrompt],
    asking: OutputSettings,
    where: Path,
    console: Console | None = None,
) -> list[TargetOutput]:
    """Return the outputs to these prompts, from the files in the folder or sampled now.

    A file whose outputs follow other prompts is written again: the data may have changed.
    """

    def compute(first: int, batch: Sequence[TargetPrompt]) -> Any:
        return [tuple(output) for output in sample_outputs(model, batch, asking, first)]

    def follow_prompts(content: Sequence[Any], batch: Sequence[TargetPrompt]) -> bool:
        return len(content) >= len(batch) and all(
            ids[: len(prompt.ids)].tolist() == list(prompt.ids)
            for (ids, *_), prompt in zip(content, batch, strict=False)
        )

    where.mkdir(parents=True, exist_ok=True)
    (where / "asking.json").write_text(
        json.dumps({"target": model.name, **_as_dict(asking)}, indent=1) + "\n", encoding="utf-8"
    )
    batches = cache_batches(
        where,
        prompts,
        asking.batch,
        compute,
        name_file=lambda first: f"{first // asking.batch:05d}.pt",
        is_complete=follow_prompts,
        title=f"texts of {model.name}",
        console=console,
    )
    return [TargetOutput(*parts) for content in batches for parts in content][: len(prompts)]


def sample_outputs(
    model: Model, prompts: Sequence[TargetPrompt], asking: OutputSettings, first: int
) -> list[TargetOutput]:
    """Sample outputs to these prompts in one ragged batch; `first` is the number of the first."""

    def job(row: int) -> Any:
        return lambda scheduler: _sample_output(model, prompts[row], asking, first + row, scheduler)

    return run_together([job(row) for row in range(len(prompts))])


def _sample_output(
    model: Model, prompt: TargetPrompt, asking: OutputSettings, number: int, scheduler: Scheduler
) -> TargetOutput:
    """Sample one text, token by token."""
    generator = torch.Generator(model.device).manual_seed(asking.seed * 1_000_003 + number)
    session = model.session(scheduler=scheduler)
    ids, positions = list(prompt.ids), list[int]()
    top_ids, top_probs = list[Tensor](), list[Tensor]()
    session.extend(ids)

    def sample(most: int) -> None:
        for _ in range(most):
            logits = session.score(TokenTree()).logits[0]
            best = logits.softmax(-1).topk(min(asking.top, len(logits)))
            # By the inverse CDF, because torch.multinomial is ten times slower.
            cdf = (logits / asking.temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
            u = torch.rand((1,), generator=generator, dtype=torch.float64, device=model.device)
            index = torch.searchsorted(cdf, u * cdf[-1], right=True)
            token = min(int(index), len(cdf) - 1)
            positions.append(len(ids) - 1)
            top_ids.append(best.indices.int().cpu())
            top_probs.append(best.values.half().cpu())
            ids.append(token)
            session.commit((), token)
            if token in model.config.eos:
                return

    if prompt.closing is not None:
        sample(asking.question)
        # The model may have ended its question with the first id of the closing.
        is_closed = ids[-1] == prompt.closing[0]
        closing = prompt.closing[1:] if is_closed else prompt.closing
        ids += closing
        session.extend(closing)
    sample(asking.tokens)
    return TargetOutput(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(positions),
        torch.stack(top_ids),
        torch.stack(top_probs),
    )
