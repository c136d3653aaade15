"""Train a draft on text that its teacher wrote, under the sampling settings of its users.

The teacher's own texts are DistillSpec (Zhou et al. 2024, arXiv 2310.08461). The settings matter
for the repetition penalty. It changes raw logits, so two models with equal distributions can differ
under it, and it moves probability to tokens that were improbable before. The acceptance rate that
users see is that of the penalized distributions. So these are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.generation import Generation, generate
from tinyspec.lm.model import Model
from tinyspec.training.corpus import LogitsFn
from tinyspec.training.text_cache import HELD, cache_batches
from tinyspec.training.train import Batch, Batches


@dataclass(frozen=True)
class OwnTextSettings:
    """The section [own] of a recipe with a teacher.

    texts         how many texts the teacher writes, equally many for each pair of a temperature
                  and a penalty
    tokens        of each text, with its opening from the books
    prompt        tokens of the longest opening
    temperatures  of the sampling; 0 is greedy
    penalties     repetition penalties of the sampling; the distributions are compared under them
    share         of the steps that use these texts; the other steps use the books, under one of
                  the penalties
    """

    texts: int = 2000
    tokens: int = 256
    prompt: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.8)
    penalties: tuple[float, ...] = (1.0, 1.2)
    share: float = 0.5
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not 8 <= self.prompt < self.tokens or min(self.texts, self.batch) < 1:
            raise TinyspecError(
                f"[own]: prompt is {self.prompt}, tokens {self.tokens}: "
                "an opening has 8 tokens or more and is shorter than its text; "
                "texts and batch are at least 1"
            )
        if (
            not self.temperatures
            or not self.penalties
            or min(self.temperatures) < 0
            or min(self.penalties) <= 0
        ):
            raise TinyspecError(
                "[own]: temperatures are 0 or more, penalties above 0, "
                "and there is at least one of each"
            )
        if not 0 <= self.share <= 1:
            raise TinyspecError(
                f"[own] share is {self.share}: "
                "it is between 0 (books alone) and 1 (own texts alone)"
            )

    def batch_sampling(self, batch: int) -> tuple[float, float]:
        """Return the temperature and the penalty of a batch's texts."""
        pairs = [(t, r) for r in self.penalties for t in self.temperatures]
        return pairs[batch % len(pairs)]


def write_own_texts(
    teacher: Model,
    books: Tensor,
    own: OwnTextSettings,
    folder: Path,
    console: Console | None = None,
) -> tuple[Tensor, Tensor]:
    """Return texts of the teacher [n, tokens + 1] and the penalty of each [n].

    They are kept in `folder`, a file per batch. Each text opens with a piece of the books, one row
    of ids. Texts that end too early are left out.
    """
    batches = cache_batches(
        folder,
        range(own.texts),
        own.batch,
        lambda first, batch: _write_batch(teacher, books, own, first // own.batch),
        name_file=lambda first: f"{first // own.batch:05d}.pt",
        title=f"texts of {teacher.name}",
        console=console,
    )
    penalties = [own.batch_sampling(i)[1] for i, texts in enumerate(batches) for _ in texts]
    if not penalties:
        raise TinyspecError(
            f"[own]: no text of {teacher.name} reached {own.tokens} tokens: lower tokens"
        )
    return torch.cat(batches).to(books.device), torch.tensor(penalties, device=books.device)


def _write_batch(teacher: Model, books: Tensor, own: OwnTextSettings, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(own.seed * 1_000_003 + number)
    # One length for the batch, so that its texts stay aligned.
    length = int(torch.randint(8, own.prompt + 1, (), generator=generator))
    starts = torch.randint(max(len(books) - length, 1), (own.batch,), generator=generator).tolist()
    prompts = [books[start : start + length].tolist() for start in starts]
    temperature, penalty = own.batch_sampling(number)
    made = generate(
        teacher,
        prompts,
        max_new_tokens=own.tokens + 1 - length,
        temperature=temperature,
        repetition_penalty=penalty,
        seed=own.seed + number * own.batch,
    )
    assert isinstance(made, list)
    return drop_short_texts(prompts, made, own.tokens + 1)


def drop_short_texts(
    prompts: Sequence[list[int]], made: Sequence[Generation], length: int
) -> Tensor:
    """Return the texts, prompt and answer, that are long enough: [n, length]."""
    rows = [[*prompt, *one.tokens] for prompt, one in zip(prompts, made, strict=True)]
    return torch.tensor([row for row in rows if len(row) == length]).reshape(-1, length)


def apply_repetition_penalty(logits: Tensor, inputs: Tensor, penalty: Tensor) -> Tensor:
    """Apply the repetition penalty [B] for the inputs [B, T] read so far to logits [B, T, V].

    >>> logits = torch.tensor([[[2.0, 3.0, -1.0]] * 3])
    >>> inputs, penalty = torch.tensor([[1, 2, 1]]), torch.tensor([2.0])
    >>> apply_repetition_penalty(logits, inputs, penalty).tolist()
    [[[2.0, 1.5, -1.0], [2.0, 1.5, -2.0], [2.0, 1.5, -2.0]]]
    """
    rows, length, vocabulary = logits.shape
    place = torch.arange(length, device=inputs.device)
    # Where each token occurs first; `length` if it does not occur.
    first = torch.full((rows, vocabulary), length, device=inputs.device)
    first = first.scatter_reduce(1, inputs, place.expand(rows, length), "amin")
    strength = penalty.to(logits)[:, None, None]
    penalized = torch.where(logits > 0, logits / strength, logits * strength)
    return torch.where(first[:, None] <= place[:, None], penalized, logits)


class OwnTexts:
    """Texts [n, T + 1] with their penalties [n]. One of HELD texts is held out of the training."""

    def __init__(self, texts: Tensor, penalties: Tensor, own: OwnTextSettings):
        held = torch.arange(len(texts), device=texts.device) % HELD == 0
        self.own, self.held_out = own, (texts[held], penalties[held])
        self.texts, self.penalties = self.held_out
        if len(texts) > 1:
            self.texts, self.penalties = texts[~held], penalties[~held]

    def mix_batches(self, books: Batches, rows: int) -> Batches:
        """Return a sampler of batches (inputs, targets, penalty [B]).

        A batch is one of `books`, or `rows` of the texts, with the probability `own.share`.
        """
        own = self.own

        def sample_batch(generator: torch.Generator) -> Batch:
            def sample_indices(n: int, below: int) -> Tensor:
                return torch.randint(below, (n,), generator=generator, device=generator.device)

            if float(torch.rand((), generator=generator, device=generator.device)) < own.share:
                chosen = sample_indices(rows, len(self.texts)).to(self.texts.device)
                return self.texts[chosen, :-1], self.texts[chosen, 1:], self.penalties[chosen]
            inputs, targets = books(generator)[:2]
            penalties = torch.tensor(own.penalties, device=inputs.device)
            chosen = sample_indices(len(inputs), len(penalties)).to(inputs.device)
            return inputs, targets, penalties[chosen]

        return sample_batch

    @torch.no_grad()
    def measure_acceptance(self, target: LogitsFn, draft: LogitsFn) -> float:
        """Return the mean of sum min(p, q) over the held-out texts, under their penalties."""
        total, (texts, penalties) = 0.0, self.held_out
        for at in range(0, len(texts), 8):
            inputs, penalty = texts[at : at + 8, :-1], penalties[at : at + 8]
            p, q = (
                apply_repetition_penalty(model(inputs).float(), inputs, penalty).softmax(-1)
                for model in (target, draft)
            )
            total += float(torch.minimum(p, q).sum(-1).mean(1).sum())
        return total / len(texts)
