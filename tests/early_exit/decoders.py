"""Decoders of early exits, as the tests of each technique need them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.technique import Card, Request

GREEDY = SamplingParams(temperature=0.0)


class RowOfOneOp(np.ndarray[Any, Any]):
    """A row that no Python loop may go through: on a device it would wait at each element."""

    def __iter__(self) -> Any:
        raise AssertionError("a loop over a row")


def row_of_one_op(row: Any) -> Any:
    """Return a row that no Python loop may go through."""
    return np.asarray(row).view(RowOfOneOp)


def make_decoder(
    card: Card,
    model: Any,
    sampling: SamplingParams = GREEDY,
    tokens: int | None = 9,
    clock: Callable[[], float] | None = None,
    **knobs: Any,
) -> Decoder:
    """Return a decoder of a technique for so many new tokens of one text."""
    log: list[Any] = []
    stop = StoppingCriteria(max_new_tokens=tokens)
    request = Request(
        model.session(log), sampling=sampling, stop=stop, forward_log=log, clock=clock
    )
    return card.make(request, **knobs)


def finish(decoder: Decoder, prompt: list[int]) -> list[int]:
    """Return the new tokens of a whole text."""
    decoder.extend(prompt)
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder.new
