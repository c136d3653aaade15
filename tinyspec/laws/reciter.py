"""A target that recites a given text, so that what a copying technique may and must do is plain to
see.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.tables import TableModel
from tinyspec.technique import Request


class Reciter(TableModel):
    """A target that recites one text: the certain next token after each prefix."""

    def __init__(self, poem: Sequence[int]):
        super().__init__(vocabulary=max(poem) + 1, rows=self._next, positions=max(64, len(poem)))
        self.poem = poem

    def _next(self, text: Sequence[int]) -> list[int]:
        token = self.poem[len(text)] if len(text) < len(self.poem) else 0
        return [int(x == token) for x in range(max(self.poem) + 1)]


def recite_until(
    build: Callable[..., Decoder],
    poem: list[int],
    wanted: int,
    references: Sequence[Any],
    **knobs: Any,
) -> Decoder:
    """The decoder after it has made `wanted` tokens of a text whose first two are the prompt."""
    stop, sampling = StoppingCriteria(max_new_tokens=wanted), SamplingParams(temperature=0.0)
    decoder = build(
        Request(Reciter(poem).session(), (), sampling, stop, references=references), **knobs
    )
    decoder.extend(poem[:2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder


class CountedText(list[int]):
    """A text that counts how often it is read from the beginning."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += 1
        return super().__iter__()
