"""A draft is trained where it will be asked: on text that its teacher wrote, under the settings of
the people who ask.

The first is DistillSpec (Zhou et al. 2024, arXiv 2310.08461). The second matters for the repetition
penalty: it acts on raw logits, so that two models of one law part under it, and it moves the mass
to tokens that were hardly likely before. The acceptance rate that counts is then that of the
penalised laws, and so these are what is compared.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.generation import Generation, generate
from tinyspec.lm.model import Model
from tinyspec.progress import progress_bar
from tinyspec.training.corpus import LogitsFn
from tinyspec.training.train import Batch

Draw = Callable[[torch.Generator], Batch]
HELD = 20  # every so many texts, one is held out


@dataclass(frozen=True)
class OwnTextSettings:
    """Section [own] of a recipe with a teacher.

    texts         how many texts it writes, in equal shares for each pair of a temperature and a
                  penalty
    tokens        length of each, its opening from the books included
    prompt        longest opening
    temperatures  at which they are drawn; 0 is greedy
    penalties     repetition penalties under which they are drawn, and under which the laws are
                  compared
    share         of the steps that are made on them; the others are on the books, under one of the
                  penalties
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
                f"[own]: prompt is {self.prompt}, tokens {self.tokens}: an opening has 8 tokens or more and is shorter than "
                "its text; texts and batch are at least 1"
            )
        if (
            not self.temperatures
            or not self.penalties
            or min(self.temperatures) < 0
            or min(self.penalties) <= 0
        ):
            raise TinyspecError(
                "[own]: temperatures are 0 or more, penalties above 0, and there is at least one of each"
            )
        if not 0 <= self.share <= 1:
            raise TinyspecError(
                f"[own] share is {self.share}: it is between 0 (books alone) and 1 (own texts alone)"
            )

    def batch_sampling(self, batch: int) -> tuple[float, float]:
        """Temperature and penalty of all texts of a batch."""
        pairs = [(t, r) for r in self.penalties for t in self.temperatures]
        return pairs[batch % len(pairs)]


def write_own_texts(
    teacher: Model,
    books: Tensor,
    own: OwnTextSettings,
    folder: Path,
    console: Console | None = None,
) -> tuple[Tensor, Tensor]:
    """The texts [n, tokens + 1] and the penalty of each [n]; a file a batch in `folder`, so that it
    goes on where it was.

    Every text opens with a piece of the books, a row of tokens. One that comes to an end before it
    is long enough is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts, penalties, batches = list[Tensor](), list[float](), -(-own.texts // own.batch)
    bar = progress_bar(console)
    with bar:
        task = bar.add_task(f"texts of {teacher.name}", total=batches)
        for number in range(batches):
            path = folder / f"{number:05d}.pt"
            if not path.exists():
                torch.save(_write_batch(teacher, books, own, number), path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)
            part: Tensor = torch.load(path, weights_only=True)
            texts.append(part)
            penalties += [own.batch_sampling(number)[1]] * len(part)
            bar.advance(task)
    if not penalties:
        raise TinyspecError(
            f"[own]: no text of {teacher.name} reached {own.tokens} tokens: lower tokens"
        )
    return torch.cat(texts).to(books.device), torch.tensor(penalties, device=books.device)


def _write_batch(teacher: Model, books: Tensor, own: OwnTextSettings, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(own.seed * 1_000_003 + number)
    length = int(
        torch.randint(8, own.prompt + 1, (), generator=generator)
    )  # one for all: they stay together
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
    """Prompts with what was made of them: those that reached their length, [n, length]."""
    rows = [[*prompt, *one.tokens] for prompt, one in zip(prompts, made, strict=True)]
    return torch.tensor([row for row in rows if len(row) == length]).reshape(-1, length)


def apply_repetition_penalty(logits: Tensor, inputs: Tensor, penalty: Tensor) -> Tensor:
    """Logits [B, T, V] behind inputs [B, T], after the repetition penalty [B] on what was read so
    far.

    >>> logits = torch.tensor([[[2.0, 3.0, -1.0]] * 3])
    >>> inputs, penalty = torch.tensor([[1, 2, 1]]), torch.tensor([2.0])
    >>> apply_repetition_penalty(logits, inputs, penalty).tolist()
    [[[2.0, 1.5, -1.0], [2.0, 1.5, -2.0], [2.0, 1.5, -2.0]]]
    """
    rows, length, vocabulary = logits.shape
    place = torch.arange(length, device=inputs.device)
    first = torch.full((rows, vocabulary), length, device=inputs.device)
    first = first.scatter_reduce(
        1, inputs, place.expand(rows, length), "amin"
    )  # where a token was read first
    strength = penalty.to(logits)[:, None, None]
    heavier = torch.where(logits > 0, logits / strength, logits * strength)
    return torch.where(first[:, None] <= place[:, None], heavier, logits)


class OwnTexts:
    """Texts [n, T + 1] with their penalties [n]: every twentieth is held out, the others are
    trained on.
    """

    def __init__(self, texts: Tensor, penalties: Tensor, own: OwnTextSettings):
        out = torch.arange(len(texts), device=texts.device) % HELD == 0
        self.own, self.held = own, (texts[out], penalties[out])
        self.texts, self.penalties = (texts[~out], penalties[~out]) if len(texts) > 1 else self.held

    def mix_batches(self, books: Draw, rows: int) -> Draw:
        """Batches (inputs, targets, penalty [B]): what `books` draws, or `rows` of the texts, as
        the share says.
        """
        own = self.own

        def draw(generator: torch.Generator) -> Batch:
            def pick(n: int, of: int) -> Tensor:
                return torch.randint(of, (n,), generator=generator, device=generator.device)

            if float(torch.rand((), generator=generator, device=generator.device)) < own.share:
                chosen = pick(rows, len(self.texts)).to(self.texts.device)
                return self.texts[chosen, :-1], self.texts[chosen, 1:], self.penalties[chosen]
            inputs, targets = books(generator)[:2]
            penalties = torch.tensor(own.penalties, device=inputs.device)
            return inputs, targets, penalties[pick(len(inputs), len(penalties)).to(inputs.device)]

        return draw

    @torch.no_grad()
    def measure_acceptance(self, target: LogitsFn, draft: LogitsFn) -> float:
        """Over the texts held out: the mean of sum min(p, q) of the penalised laws."""
        total, (texts, penalties) = 0.0, self.held
        for at in range(0, len(texts), 8):
            inputs, penalty = texts[at : at + 8, :-1], penalties[at : at + 8]
            p, q = (
                apply_repetition_penalty(model(inputs).float(), inputs, penalty).softmax(-1)
                for model in (target, draft)
            )
            total += float(torch.minimum(p, q).sum(-1).mean(1).sum())
        return total / len(texts)
