"""The two networks of a table model: one whose states are hashes, and one whose states are the
tokens that were seen.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tinyspec.lm.forward import Plan

HEAVIEST = 4  # weights are 0..4: small enough that a counterexample can be read


class HashNetwork:
    """The network whose states are hashes. `hash` of a tuple of integers is the same in every run
    and process.
    """

    def __init__(self, seed: int, vocabulary: int, zeros: bool):
        self.seed, self.vocabulary, self.zeros = seed, vocabulary, zeros

    def embed(self, token: int) -> Any:
        """The state that enters the first layer."""
        return hash((self.seed, 11, token))

    def keys(self, layer: int, state: Any, position: int) -> Any:
        """What later tokens see of this one in this layer."""
        return hash((state, layer, position))

    def attend(self, layer: int, state: Any, seen: Sequence[Any]) -> Any:
        """The state after attention; `seen` are keys by position, the token's own last."""
        return hash((state, layer, *seen))

    def feed_forward(self, layer: int, state: Any) -> Any:
        """The state after the other half of a layer."""
        return hash((state, layer))

    def weights(self, state: Any) -> Sequence[Any]:
        """Weights of the next token: 0 (or 1, without zeros) to 4, not all zero."""
        low = 0 if self.zeros else 1
        row = [
            low + (hash((state, 13, token)) >> 9) % (HEAVIEST + 1 - low)
            for token in range(self.vocabulary)
        ]
        return row if any(row) else [1, *row[1:]]


class RowsByHand:
    """The network whose states are the tokens it saw: for conditionals written by hand."""

    def __init__(self, rows: Callable[[tuple[int, ...]], Sequence[Any]]):
        self.rows = rows

    def embed(self, token: int) -> Any:
        return (token,)

    def keys(self, layer: int, state: Any, position: int) -> Any:
        return (position, state[-1])

    def attend(self, layer: int, state: Any, seen: Sequence[Any]) -> Any:
        return tuple(token for _, token in seen)

    def feed_forward(self, layer: int, state: Any) -> Any:
        return state

    def weights(self, state: Any) -> Sequence[Any]:
        return self.rows(state)


def is_visible(plan: Plan, layer: int, row: int, at: int) -> bool:
    """Whether the row at a position may look at another position under a plan (its first head
    speaks for all).
    """
    heads = None if plan.visible is None else plan.visible.layers[layer]
    if plan.visible is None or heads is None or at == row or at >= plan.visible.since:
        return True
    return heads[0] is None or at in heads[0]
