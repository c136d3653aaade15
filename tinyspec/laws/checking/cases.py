"""The small targets and drafts that a reader's function is tried on, the smallest first.

The fixed cases come first: all small ones, then a few that reach further (chains of four, eight
tokens, rare tokens, contexts, several rounds; those of trees are in trees.py). The random ones have
no end: `check` takes as many as its time allows. A deep case has few outcomes because most of its
probabilities are 0: its distributions have few tokens.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, product
from math import comb
from typing import Any

from tinyspec.laws.exact.rational import Exact, distributions

PRIMES = (5, 7, 11, 13, 101, 1009)
"""Denominators of deep cases: rounding does not hide, and no threshold is met by accident."""
MOST_VOCABULARY, MOST_GAMMA, MOST_TOKENS = 8, 6, 8
"""How large a random case may be: tokens of the vocabulary, of a draft, and of a text."""
RARE = 8
"""The largest weight of a rare token, of 1009: below 1/100."""
DEEP_DRAFTS = 60
"""How many drafts q may make in a deep case, about: each has a few outcomes."""
SIMPLER_ROWS = 150
"""How many simpler distributions are tried for one when a case is made smaller."""


def texts_up_to(vocabulary: int, length: int) -> list[tuple[int, ...]]:
    """Return every text of up to `length` tokens, the shortest first.

    >>> texts_up_to(2, 1)
    [(), (0,), (1,)]
    """
    return [text for n in range(length + 1) for text in product(range(vocabulary), repeat=n)]


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
        texts = texts_up_to(len(self.probs[0]), depth)
        return {text: list(self.next_probs(text)) for text in texts}


@dataclass(frozen=True)
class CheckCase:
    """A target p, a draft q, gamma draft tokens, and how many output tokens are compared.

    context  the text before, which a drafter continues
    """

    p: SmallModel
    q: SmallModel
    gamma: int
    tokens: int
    context: tuple[int, ...] = ()

    @property
    def target(self) -> SmallModel:
        """Return the model whose distribution the output must have."""
        return self.p

    def smaller_cases(self) -> "Iterator[CheckCase]":
        """Yield cases with less in them, for a counterexample."""
        return iter(())

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


# ---------------------------------------------------------------------- cases that reach further


def draw_row(rng: random.Random, tokens: Sequence[int], vocabulary: int, whole: int) -> Exact:
    """Return a random distribution over these tokens with the denominator `whole`.

    >>> row = draw_row(random.Random(0), (0, 2), 3, 7)
    >>> sum(row) == 1, row[1] == 0, min(row[0], row[2]) > 0
    (True, True, True)
    """
    cuts = sorted(rng.sample(range(1, whole), len(tokens) - 1))
    weights = dict(zip(tokens, (b - a for a, b in pairwise((0, *cuts, whole))), strict=True))
    return tuple(Fraction(weights.get(token, 0), whole) for token in range(vocabulary))


def draw_row_pair(
    rng: random.Random, vocabulary: int, whole: int, drafted: int, more: int = 2
) -> tuple[Exact, Exact]:
    """Return p and q for one position.

    q has `drafted` tokens; p has most of them, and at most `more` others.
    """
    of_q = rng.sample(range(vocabulary), drafted)
    of_p = [token for token in of_q if rng.random() < 0.7] or of_q[:1]
    others = [token for token in range(vocabulary) if token not in of_q]
    least = min(len(others), 1 if len(of_p) == 1 else 0)
    of_p += rng.sample(others, rng.randint(least, min(len(others), more)))
    whole = next(prime for prime in PRIMES if prime >= max(whole, vocabulary))
    p, q = (draw_row(rng, sorted(tokens), vocabulary, whole) for tokens in (of_p, of_q))
    return p, q


def draw_support_sizes(rng: random.Random, vocabulary: int, places: int) -> list[int]:
    """Return how many tokens q may draft at each position: few drafts in all."""
    left, sizes = DEEP_DRAFTS, list[int]()
    for _ in range(places):
        sizes.append(rng.randint(1, max(1, min(vocabulary, left))))
        left //= sizes[-1]
    rng.shuffle(sizes)
    return sizes


def draw_deep_round(rng: random.Random, vocabulary: int, gamma: int, whole: int) -> CheckCase:
    """Return a case of one round with few outcomes, however long its chain."""
    if vocabulary == 2 and gamma <= 5 and whole < 1000:
        sizes = [2] * gamma
    else:
        sizes = draw_support_sizes(rng, vocabulary, gamma)
    more = vocabulary if gamma <= 2 else 2
    pairs = [draw_row_pair(rng, vocabulary, whole, size, more) for size in (*sizes, 2)]
    return make_round_case(pairs)


def deep_round_cases() -> Iterator[CheckCase]:
    """Yield the fixed cases of one round that reach beyond the small ones."""
    for vocabulary, gamma, whole, count in (
        (2, 1, 101, 8),
        (3, 1, 1009, 4),
        (6, 1, 13, 6),
        (8, 1, 13, 4),
        (2, 3, 5, 6),
        (2, 4, 7, 8),
        (3, 4, 5, 6),
        (5, 2, 11, 4),
        (2, 5, 101, 2),
        (8, 4, 13, 4),
    ):
        rng = random.Random(f"deep {vocabulary} {gamma} {whole}")
        for _ in range(count):
            yield draw_deep_round(rng, vocabulary, gamma, whole)


def move_unit(rng: random.Random, row: Exact, whole: int) -> Exact:
    """Return the distribution with 1/whole less of one token, and 1/whole more of another.

    >>> row = move_unit(random.Random(0), (Fraction(2, 7), Fraction(5, 7)), 7)
    >>> sorted(row) in ([Fraction(1, 7), Fraction(6, 7)], [Fraction(3, 7), Fraction(4, 7)])
    True
    """
    less = rng.choice([token for token, x in enumerate(row) if x * whole > 1])
    more = rng.choice([token for token in range(len(row)) if token != less])
    changes = {less: Fraction(-1, whole), more: Fraction(1, whole)}
    return tuple(x + changes.get(token, 0) for token, x in enumerate(row))


def draw_near_pairs(
    rng: random.Random, vocabulary: int, whole: int, places: int
) -> list[tuple[Exact, Exact]]:
    """Return p and q for some positions: all are alike, and one token is rare.

    A rule that takes what is close for equal, or what is rare for impossible, is wrong on them.
    """
    rare, rest = rng.randint(1, min(RARE, whole // 10)), list(range(vocabulary))
    token = rest.pop(rng.randrange(vocabulary))
    row = list(draw_row(rng, rest, vocabulary, whole - rare))
    row = [x * (whole - rare) / whole for x in row]
    row[token] = Fraction(rare, whole)
    pairs = list[tuple[Exact, Exact]]()
    for _ in range(places):
        q = move_unit(rng, tuple(row), whole)
        pairs.append((move_unit(rng, q, whole), q))
    return pairs


def draw_wide_pair(rng: random.Random, vocabulary: int, whole: int) -> tuple[Exact, Exact]:
    """Return p and q for one position: p has all tokens, and q has one."""
    tokens = range(vocabulary)
    return draw_row(rng, tokens, vocabulary, whole), draw_row(
        rng, rng.sample(tokens, 1), vocabulary, 1
    )


def make_round_case(pairs: Sequence[tuple[Exact, Exact]]) -> CheckCase:
    """Return a case of one round with p and q for each position; the last one has no draft."""
    p, q = (SmallModel(tuple(pair[i] for pair in pairs)) for i in range(2))
    return CheckCase(p, replace(q, probs=q.probs[:-1]), len(pairs) - 1, len(pairs))


def near_round_cases() -> Iterator[CheckCase]:
    """Yield the fixed cases of one round in which p and q are close, and positions are alike."""
    for vocabulary, gamma, whole in (
        (2, 1, 101),
        (2, 1, 1009),
        (3, 1, 1009),
        (4, 1, 1009),
        (3, 2, 1009),
        (4, 2, 101),
    ):
        rng = random.Random(f"near {vocabulary} {gamma} {whole}")
        for _ in range(3):
            yield make_round_case(draw_near_pairs(rng, vocabulary, whole, gamma + 1))


def wide_round_cases() -> Iterator[CheckCase]:
    """Yield the fixed cases of one round in which almost all tokens are left after a rejection."""
    rng = random.Random("wide")
    for vocabulary in range(5, MOST_VOCABULARY + 1):
        yield make_round_case([draw_wide_pair(rng, vocabulary, 101) for _ in range(2)])


def empty_draft_cases() -> Iterator[CheckCase]:
    """Yield cases without a draft token: a round of plain decoding."""
    for row in distributions_up_to(3, 3):
        yield CheckCase(SmallModel((row,)), SmallModel((row,)), 0, 1)


def random_round_cases(seed: int) -> Iterator[CheckCase]:
    """Yield random cases of one round without end."""
    rng = random.Random(f"round {seed}")
    while True:
        vocabulary, gamma = rng.randint(2, MOST_VOCABULARY), rng.randint(1, MOST_GAMMA)
        yield draw_deep_round(rng, vocabulary, gamma, rng.choice(PRIMES))
        if rng.random() < 0.25:
            near = rng.randint(2, 4), rng.choice(PRIMES[-2:]), rng.randint(2, 3)
            yield make_round_case(draw_near_pairs(rng, *near))
        if rng.random() < 0.1:
            yield make_round_case([draw_wide_pair(rng, vocabulary, 101) for _ in range(2)])


def draw_deep_generation(
    rng: random.Random, vocabulary: int, gamma: int, whole: int, places: str
) -> CheckCase:
    """Return a case of several rounds, for a decoding function.

    places  one letter for each token of the text: "a", its draft token is always accepted; "r",
            always rejected, so that a round ends there; "o", open: p and q are distributions
    """
    pairs = list[tuple[Exact, Exact]]()
    for place in places + "a" * gamma:
        x, y = rng.sample(range(vocabulary), 2)
        ones = [draw_row(rng, (token,), vocabulary, 1) for token in (x, x if place == "a" else y)]
        pairs.append(
            (ones[0], ones[1]) if place != "o" else draw_row_pair(rng, vocabulary, whole, 2)
        )
    p, q = (SmallModel(tuple(pair[i] for pair in pairs)) for i in range(2))
    return CheckCase(p, q, gamma, len(places))


def deep_generation_cases() -> Iterator[CheckCase]:
    """Yield the fixed cases of several rounds that reach beyond the small ones."""
    for vocabulary, gamma, places in (
        (2, 1, "rrroo"),
        (2, 1, "rrrroo"),
        (2, 2, "rrrrrroo"),
        (3, 1, "aaaaaaoo"),
        (3, 4, "aaoro"),
        (8, 3, "oro"),
    ):
        rng = random.Random(f"rounds {vocabulary} {gamma} {places}")
        for whole in (5, 7, 101):
            yield draw_deep_generation(rng, vocabulary, gamma, whole, places)
    for gamma, tokens in ((2, 3), (2, 4), (3, 4), (4, 5)):
        rng = random.Random(f"texts {gamma} {tokens}")
        for _ in range(8):
            yield draw_text_generation(rng, 2, gamma, tokens, 7)


def draw_text_generation(
    rng: random.Random, vocabulary: int, gamma: int, tokens: int, whole: int
) -> CheckCase:
    """Return a case of several rounds in which every text has a distribution of its own.

    After most texts p and q have one token, so that there are few outcomes. The first position is
    open: then later drafts differ from earlier ones in their first token alone.
    """
    rows = list[Exact]()
    for text in range(2 * _count_texts(vocabulary, tokens - 1)):
        is_open = text % 2 == 0 and rng.random() < 0.35
        of_row = rng.sample(range(vocabulary), 2 if is_open or text < 2 else 1)
        rows.append(draw_row(rng, sorted(of_row), vocabulary, whole))
    p, q = (SmallModel(tuple(rows[model::2]), "text") for model in range(2))
    return CheckCase(p, q, gamma, tokens)


def random_generation_cases(seed: int) -> Iterator[CheckCase]:
    """Yield random cases of several rounds without end."""
    rng = random.Random(f"generation {seed}")
    while True:
        if rng.random() < 0.3:
            yield draw_text_generation(rng, 2, rng.randint(2, 4), rng.randint(3, 5), 7)
        vocabulary, gamma = rng.randint(2, MOST_VOCABULARY), rng.randint(1, MOST_GAMMA)
        places = [rng.choice("aarrr") for _ in range(rng.randint(2, MOST_TOKENS))]
        for _ in range(3):
            places[rng.randrange(len(places))] = "o"
        yield draw_deep_generation(rng, vocabulary, gamma, rng.choice(PRIMES), "".join(places))


def draw_deep_draft(
    rng: random.Random, vocabulary: int, gamma: int, whole: int, context: tuple[int, ...]
) -> CheckCase:
    """Return a case for a drafter: a row for each length of the text, or for each text of few."""
    length = len(context) + gamma
    by_text = vocabulary == 2 and length <= 4
    if by_text:
        sizes = [2] * _count_texts(2, length - 1)
    else:
        sizes = [2] * len(context) + draw_support_sizes(rng, vocabulary, gamma)
    rows = tuple(draw_row_pair(rng, vocabulary, whole, size)[1] for size in sizes)
    q = SmallModel(rows, "text" if by_text else "length")
    return CheckCase(q, q, gamma, gamma, context)


def deep_draft_cases() -> Iterator[CheckCase]:
    """Yield the fixed cases for a drafter that reach beyond the small ones."""
    for vocabulary, gamma, whole, context in (
        (2, 1, 101, ()),
        (2, 3, 5, ()),
        (2, 4, 7, ()),
        (3, 3, 5, ()),
        (8, 1, 13, ()),
        (2, 1, 5, (0,)),
        (2, 2, 7, (1,)),
        (2, 2, 5, (1, 0)),
        (3, 3, 7, (2, 0, 1)),
        (8, 2, 13, (7, 7)),
    ):
        rng = random.Random(f"draft {vocabulary} {gamma} {whole} {context}")
        for _ in range(3):
            yield draw_deep_draft(rng, vocabulary, gamma, whole, context)


def random_draft_cases(seed: int) -> Iterator[CheckCase]:
    """Yield random cases for a drafter without end."""
    rng = random.Random(f"drafter {seed}")
    while True:
        vocabulary, gamma = rng.randint(2, MOST_VOCABULARY), rng.randint(1, MOST_GAMMA)
        context = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(0, 5)))
        yield draw_deep_draft(rng, vocabulary, gamma, rng.choice(PRIMES), context)


def _count_texts(vocabulary: int, length: int) -> int:
    """Return how many texts of up to `length` tokens there are."""
    return sum(vocabulary**n for n in range(length + 1))


def _simpler_cases(case: CheckCase) -> Iterator[CheckCase]:
    """Yield smaller cases, then those with one distribution replaced by a simpler one."""
    yield from case.smaller_cases()
    for name in ("p", "q"):
        model: SmallModel = getattr(case, name)
        for place, row in enumerate(model.probs):
            largest = max(x.denominator for x in row) - 1
            while _count_distributions(case.vocabulary, largest) > SIMPLER_ROWS:
                largest -= 1
            for simpler in distributions_up_to(case.vocabulary, largest):
                probs = (*model.probs[:place], simpler, *model.probs[place + 1 :])
                changes: dict[str, Any] = {name: replace(model, probs=probs)}
                yield replace(case, **changes)


def _count_distributions(vocabulary: int, whole: int) -> int:
    """Return about how many distributions have a denominator of at most `whole`."""
    return sum(comb(n + vocabulary - 1, n) for n in range(1, whole + 1))


def shrink_case(case: CheckCase, broken: Callable[[CheckCase], bool]) -> CheckCase:
    """Replace distributions by ones of smaller denominators while the smaller case is broken
    too."""
    while (smaller := next(filter(broken, _simpler_cases(case)), None)) is not None:
        case = smaller
    return case
