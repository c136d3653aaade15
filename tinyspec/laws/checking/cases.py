"""The small targets and drafts that a reader's function is tried on, the smallest first."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.laws.exact.rational import Exact, distributions


@dataclass(frozen=True)
class SmallModel:
    """A target or draft that takes its next-token distribution, [V], from a short list.

    by  "length": the context's length says which (longer ones take the last);  "text": every text
        up to some length has its own
    """

    probs: tuple[Exact, ...]
    by: str = "length"

    def next_probs(self, context: Sequence[int]) -> Exact:
        """Return the distribution of the next token."""
        if self.by == "length":
            return self.probs[min(len(context), len(self.probs) - 1)]
        place = 0
        for token in context:
            place = place * len(self.probs[0]) + token + 1
        return self.probs[place % len(self.probs)]

    def joint(
        self, tokens: int, start: tuple[int, ...] = (), mass: Any = Fraction(1)
    ) -> dict[tuple[int, ...], Any]:
        """Return the distribution of texts of `tokens` tokens after `start`, times `mass`."""
        texts = {start: mass}
        for _ in range(tokens - len(start)):
            texts = {
                (*text, token): x * weight
                for text, weight in texts.items()
                for token, x in enumerate(self.next_probs(text))
                if x
            }
        return texts

    def shown(self, depth: int) -> Any:
        """Return the distributions after contexts of up to `depth` tokens, for display."""
        if self.by == "length":
            return [
                list(self.probs[min(length, len(self.probs) - 1)]) for length in range(depth + 1)
            ]
        texts = [
            text
            for length in range(depth + 1)
            for text in product(range(len(self.probs[0])), repeat=length)
        ]
        return {text: list(self.next_probs(text)) for text in texts}


@dataclass(frozen=True)
class CheckCase:
    """A target p, a draft q, gamma draft tokens, and how many output tokens are compared."""

    p: SmallModel
    q: SmallModel
    gamma: int
    tokens: int

    @property
    def vocabulary(self) -> int:
        return len(self.p.probs[0])

    @property
    def size(self) -> int:
        """Return the sum of all denominators: how much there is to read."""
        return sum(max(x.denominator for x in row) for row in (*self.p.probs, *self.q.probs))


def distributions_up_to(vocabulary: int, whole: int) -> list[Exact]:
    """Return every distribution with a common denominator of at most `whole`."""
    return [
        row for denominator in range(1, whole + 1) for row in distributions(vocabulary, denominator)
    ]


def cases_of_kind(
    vocabulary: int,
    gamma: int,
    tokens: int,
    whole: int,
    lengths: tuple[int, int],
    by: str,
    count: int,
    seed: int,
) -> list[CheckCase]:
    """Return cases of one kind by size: all there are, or `count` of them.

    `lengths` counts the distributions of p and of q.
    """
    rows = distributions_up_to(vocabulary, whole)
    n = sum(lengths)
    if len(rows) ** n <= count:
        chosen = list(product(rows, repeat=n))
    else:
        rng = random.Random(f"{seed} {vocabulary} {gamma} {tokens} {whole} {by}")
        chosen = [tuple(rng.choice(rows) for _ in range(n)) for _ in range(count)]
    cases = [
        CheckCase(SmallModel(c[: lengths[0]], by), SmallModel(c[lengths[0] :], by), gamma, tokens)
        for c in chosen
    ]
    return sorted(cases, key=lambda case: case.size)


def round_cases(seed: int) -> Iterator[CheckCase]:
    """Yield cases of one round for a verifier, gamma + 1 tokens each.

    First a distribution for each position, then one for each text.
    """
    for vocabulary, gamma, whole, places, texts in (
        (2, 1, 3, 125, 20),
        (2, 2, 2, 243, 0),
        (2, 2, 4, 60, 20),
        (2, 3, 3, 12, 0),
        (3, 1, 3, 80, 20),
        (3, 2, 3, 20, 6),
        (4, 1, 5, 10, 0),
    ):
        tokens = gamma + 1
        yield from cases_of_kind(
            vocabulary, gamma, tokens, whole, (gamma + 1, gamma), "length", places, seed
        )
        if texts:
            lengths = (_count_texts(vocabulary, gamma), _count_texts(vocabulary, gamma - 1))
            yield from cases_of_kind(vocabulary, gamma, tokens, whole, lengths, "text", texts, seed)


def generation_cases(seed: int) -> Iterator[CheckCase]:
    """Yield cases of several rounds for a decoding function.

    First p and q are the same in every context, then they are not.
    """
    for vocabulary, gamma, tokens, whole, lengths, by, count in (
        (2, 1, 2, 3, (1, 1), "length", 25),
        (2, 1, 2, 2, (2, 2), "length", 81),
        (2, 2, 2, 3, (2, 2), "length", 30),
        (2, 1, 3, 3, (1, 1), "length", 25),
        (2, 1, 3, 3, (3, 3), "text", 12),
        (2, 2, 3, 2, (1, 1), "length", 9),
        (2, 2, 3, 3, (7, 7), "text", 4),
        (3, 1, 2, 3, (4, 4), "text", 12),
        (3, 2, 2, 2, (4, 4), "text", 4),
    ):
        yield from cases_of_kind(vocabulary, gamma, tokens, whole, lengths, by, count, seed)


def draft_cases(seed: int) -> Iterator[CheckCase]:
    """Yield cases for a drafter: only q matters."""
    for vocabulary, gamma, whole, count in (
        (2, 1, 4, 9),
        (2, 2, 3, 25),
        (3, 1, 4, 30),
        (3, 2, 3, 30),
    ):
        for case in cases_of_kind(
            vocabulary, gamma, gamma, whole, (0, gamma), "length", count, seed
        ):
            yield replace(case, p=case.q)


def _count_texts(vocabulary: int, length: int) -> int:
    """Return how many texts of up to `length` tokens there are."""
    return sum(vocabulary**n for n in range(length + 1))


def _simpler_cases(case: CheckCase) -> Iterator[CheckCase]:
    """Yield the case with one of its distributions replaced by one of smaller denominators."""
    for name in ("p", "q"):
        model: SmallModel = getattr(case, name)
        for place, row in enumerate(model.probs):
            largest = max(x.denominator for x in row)
            for simpler in distributions_up_to(case.vocabulary, largest - 1):
                probs = (*model.probs[:place], simpler, *model.probs[place + 1 :])
                changes: dict[str, Any] = {name: replace(model, probs=probs)}
                yield replace(case, **changes)


def shrink_case(case: CheckCase, broken: Callable[[CheckCase], bool]) -> CheckCase:
    """Replace distributions by ones of smaller denominators while the smaller case is broken
    too."""
    while (smaller := next(filter(broken, _simpler_cases(case)), None)) is not None:
        case = smaller
    return case
