"""What was asked and said, in a forest of counted tries: one tree for the outputs of all requests,
one for each that runs.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from tinyspec._core import Forest
from tinyspec.decoding.candidates import per_model_state
from tinyspec.decoding.decode import BaseDrafter, Round
from tinyspec.decoding.goodput import Clock
from tinyspec.lm.feed import Scores

OUTPUTS = 0  # the tree of what was said; those of requests are 1, 2, ...


class Remembered(BaseDrafter):
    """The texts of a request in a forest: prompts in a tree of its own, outputs in that of all
    requests.

    `runs` are the pieces of the text in their order: (number in the forest, its tree, where it
    begins). No window crosses from one to the next.
    """

    def __init__(self, forest: Forest, numbers: "count[int]"):
        self.forest, self.numbers = forest, numbers
        self.own = next(numbers)
        self.runs: list[tuple[int, int, int]] = []
        self.length = self.reach = 0  # of the text; where its last piece ends
        self.fresh: list[int] = []  # said, and not yet counted: that is done when it is looked at

    def insert(self, tree: int, tokens: Sequence[int]) -> int:
        """These tokens go on with the text, and belong to this tree; returns its nodes."""
        if not self.runs or self.runs[-1][1] != tree or self.reach != self.length:
            self.runs.append((self.forest.open(tree), tree, self.length))
        self.length = self.reach = self.length + len(tokens)
        return self.forest.append(self.runs[-1][0], tokens)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.settle()
        self.insert(self.own, tokens)

    def observe(self, round: Round) -> None:
        self.fresh += round.tokens

    def settle(self) -> None:
        """Count what was said since the last time."""
        if self.fresh:
            said, self.fresh = self.fresh, []
            if self.insert(OUTPUTS, said) > self.forest.bound:
                self.forest.prune(OUTPUTS)

    def rewind(self, length: int) -> None:
        self.settle()
        while self.runs and self.runs[-1][2] >= length:
            text, _, _ = self.runs.pop()
            self.forest.rewind(text, 0)
            self.forest.close(text)
        if self.runs:
            text, _, begin = self.runs[-1]
            self.reach = min(begin + self.forest.length(text), length)
            self.forest.rewind(text, self.reach - begin)
        self.length = min(self.length, length)

    def end(self) -> None:
        """The request is over: what was said stays, what was asked goes."""
        self.release()
        self.own, self.runs, self.length, self.reach = next(self.numbers), [], 0, 0

    def release(self) -> None:
        """Leave nothing in the forest but what was said."""
        self.settle()
        for text, _, _ in self.runs:
            self.forest.close(text)
        self.forest.drop(self.own)

    def __del__(self) -> None:
        if hasattr(self, "runs"):  # a request that nobody ended leaves nothing behind either
            self.release()


def memory(
    target: Any, clock: Clock | None, name: str, depth: int, bound: int, remember: bool
) -> "tuple[Forest, count[int]]":
    """The forest of this model under these knobs, and the numbers of its requests.

    A new one where nothing is to be kept, and in a batch (no clock), where a row must equal the row
    run alone.
    """

    def make() -> "tuple[Forest, count[int]]":
        return Forest(depth, bound), count(OUTPUTS + 1)

    return (
        per_model_state(target, (name, depth, bound), make)
        if remember and clock is not None
        else make()
    )
