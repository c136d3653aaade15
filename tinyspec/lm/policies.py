"""Which of the waiting forward passes run together: the policies of a scheduler.

A policy is asked when every live request waits for a forward pass. It sees what they wait for, in
the order of their arrival, and returns how many rows of each run now. It may cut a prompt and run
its first rows only: the request then comes back for the rest. All other passes run whole.

A policy decides by what waits and by its own past, never by the clock. So the same arrivals give
the same schedule.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol


class Pending(NamedTuple):
    """A forward pass that a request waits for.

    request     its number: requests count in the order of their arrival
    model       name of the model
    weights     how many weights the model has
    rows        positions to run
    is_prefill  they belong to a prompt, so that a part of them may run
    held        turns in which it was not picked
    """

    request: int
    model: str
    weights: int
    rows: int
    is_prefill: bool
    held: int


class Policy(Protocol):
    """Picks what runs. If it has `most_rows`, no pass takes more rows of a prompt."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        """Return how many rows run now, by request; at least one request.

        waiting  what every live request waits for, in the order of their arrival
        """


class LockstepPolicy:
    """Run all that wait: requests that begin together stay together."""

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        return {pending.request: pending.rows for pending in waiting}


class FirstComePolicy:
    """Run what waits in the order of arrival, as far as the budget of a pass goes.

    Continuous batching (Orca, OSDI 2022): requests join and leave at every pass. A prompt is cut
    to what is left of the budget. A pass that cannot be cut and is larger runs alone.

    budget  rows of a pass, of each model;  chunk  rows of a prompt in one pass
    """

    def __init__(self, budget: int = 512, chunk: int = 512):
        self.budget, self.chunk = budget, chunk
        self.most_rows = min(budget, chunk)

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        picked: dict[int, int] = {}
        for own in split_by_model(waiting):
            picked |= fill_budget(own, self.budget, self.chunk)
        return picked


class AlignedPolicy:
    """Keep unequal drafts in step: hold the passes of larger models while a smaller one waits.

    Requests whose drafts differ in length would otherwise drift apart. Then every turn runs the
    target for some requests and the draft model for the others: several passes of the target, each
    half empty, where one would do.

    patience  turns that a pass is held at most
    """

    def __init__(self, patience: int = 8):
        self.patience = patience

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        lightest = min(pending.weights for pending in waiting)
        return {
            pending.request: pending.rows
            for pending in waiting
            if pending.weights == lightest or pending.held >= self.patience
        }


def split_by_model(waiting: Iterable[Pending]) -> Iterator[list[Pending]]:
    """Yield what waits for each model, in the order of arrival."""
    for _, own in groupby(sorted(waiting, key=lambda one: one.model), lambda one: one.model):
        yield list(own)


def fill_budget(waiting: Iterable[Pending], budget: int, chunk: int) -> dict[int, int]:
    """Return how many rows of each run, if they are served in this order.

    The first one always runs, if need be alone. No one overtakes another: so nobody starves.

    >>> prompt = Pending(0, "m", 1, rows=9, is_prefill=True, held=0)
    >>> step = Pending(1, "m", 1, rows=2, is_prefill=False, held=0)
    >>> fill_budget([prompt, step], budget=8, chunk=4)
    {0: 4, 1: 2}
    >>> fill_budget([step, prompt], budget=8, chunk=8)
    {1: 2, 0: 6}
    """
    picked: dict[int, int] = {}
    left = budget
    for pending in waiting:
        rows = min(pending.rows, chunk, max(left, 1)) if pending.is_prefill else pending.rows
        if picked and rows > left:
            break
        picked[pending.request] = rows
        left -= rows
    return picked
