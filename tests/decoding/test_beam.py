"""Greedy and beam search over many rows, against one row at a time and against all texts."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tinyspec.decoding.beam import beam_search, greedy_search
from tinyspec.errors import TinyspecError

BEGIN, EOS, V = 1, 2, 5


class Table:
    """A random distribution for each source and text so far. It remembers the texts of its rows."""

    def __init__(self, sources: list[int]):
        self.texts: list[tuple[int, ...]] = [(source,) for source in sources]
        self.steps = 0

    def step(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        self.texts = [
            (*text, token) for text, token in zip(self.texts, tokens.tolist(), strict=True)
        ]
        return torch.stack([next_logits(text) for text in self.texts])

    def select(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]


def next_logits(text: tuple[int, ...]) -> Tensor:
    seed = hash(text) % (1 << 31)  # hashes of tuples of ints do not change between runs
    return 3 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def score(source: int, text: tuple[int, ...], length_power: float) -> float:
    prefix, total = (source, BEGIN), 0.0
    for token in (*text, EOS):
        total += float(next_logits(prefix).log_softmax(-1)[token])
        prefix = (*prefix, token)
    return total / (len(text) + 1) ** length_power


def test_texts_in_a_batch_do_not_change_each_other() -> None:
    limits = [3, 0, 7, 1, 6, 6]
    together = greedy_search(Table(list(range(6))), BEGIN, EOS, limits)
    assert together == [
        greedy_search(Table([i]), BEGIN, EOS, [limit])[0] for i, limit in enumerate(limits)
    ]
    together = beam_search(Table(list(range(6))), BEGIN, EOS, limits, beam=3)
    assert together == [
        beam_search(Table([i]), BEGIN, EOS, [limit], beam=3)[0] for i, limit in enumerate(limits)
    ]


def test_a_beam_of_one_is_greedy_decoding() -> None:
    sources, limits = list(range(40)), [i % 9 for i in range(40)]
    for power in (0.0, 1.0):
        assert beam_search(Table(sources), BEGIN, EOS, limits, 1, power) == greedy_search(
            Table(sources), BEGIN, EOS, limits
        )


@pytest.mark.parametrize("power", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_beam_as_wide_as_all_texts_finds_the_best_of_them(limit: int, power: float) -> None:
    words = [token for token in range(V) if token != EOS]
    texts = [text for n in range(limit + 1) for text in itertools.product(words, repeat=n)]
    for source in range(8):
        best = max(texts, key=lambda text: score(source, text, power))
        found = beam_search(Table([source]), BEGIN, EOS, [limit], len(texts), power)[0]
        assert tuple(found) == best


def test_what_has_ended_is_not_computed_any_more() -> None:
    rows = Table([3, 4])
    texts = greedy_search(rows, BEGIN, EOS, [2, 2])
    assert all(len(text) <= 2 for text in texts)
    assert rows.steps <= 2
    nothing = Table([3, 4])
    assert greedy_search(nothing, BEGIN, EOS, [0, 0]) == [[], []]
    assert nothing.steps == 0


@pytest.mark.parametrize(("limit", "logit"), [(3, math.nan), (3, -math.inf), (0, 0.0)])
def test_logits_that_allow_no_text_are_an_error(limit: int, logit: float) -> None:
    class Broken(Table):
        def step(self, tokens: Tensor) -> Tensor:
            logits = torch.full_like(super().step(tokens), logit)
            logits[:, EOS] = -math.inf
            return logits

    with pytest.raises(TinyspecError, match="the logits define no distribution"):
        beam_search(Broken([3, 4]), BEGIN, EOS, [limit, limit])
