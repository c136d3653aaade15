"""A target given by rational conditionals, and the exact joint law of a decoder over several rounds.

The smallest form of what `tinyspec.laws` will be: enough to prove the techniques of this chapter.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tinyspec.decoding.chance import Exhaustive
from tinyspec.decoding.decode import Decoder
from tinyspec.lm.feed import Scores
from tinyspec.tree import TokenTree

Law = dict[tuple[int, ...], Fraction]


class Table:
    """Conditionals over V tokens that depend on the whole context: weights drawn once per context from a seed."""

    cache_exact = True

    def __init__(self, seed: int, vocabulary: int = 3, zeros: bool = True):
        self.seed, self.vocabulary, self.zeros = seed, vocabulary, zeros
        self.text: list[int] = []
        self.calls = 0

    def row(self, context: Sequence[int]) -> list[Fraction]:
        rng = random.Random(f"{self.seed}:{tuple(context)}")
        weights = [rng.randint(0 if self.zeros else 1, 4) for _ in range(self.vocabulary)]
        if not any(weights):
            weights[0] = 1
        return [Fraction(w, sum(weights)) for w in weights]

    def append(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)

    def extend(self, tokens: Sequence[int], taps: Sequence[int] = ()) -> Scores:
        self.append(tokens)
        return Scores([], [], [])  # type: ignore[arg-type]

    def score(self, tree: TokenTree, taps: Sequence[int] = ()) -> Scores:
        self.calls += 1
        self.tree = tree
        paths = [(), *(tree.path(i) for i in range(len(tree.tokens)))]
        rows: Any = [self.row([*self.text, *tree.spelled(path)]) for path in paths]
        return Scores(rows, [], [1] * len(rows))  # type: ignore[arg-type]

    def commit(self, path: Sequence[int], next: int | None) -> None:
        self.text += [*self.tree.spelled(path), *([] if next is None else [next])]

    def rewind(self, length: int) -> None:
        del self.text[length:]

    def end(self) -> None:
        self.text = []


def law(factory: Callable[[], Decoder], tokens: int, prompt: Sequence[int] = (0,)) -> Law:
    """The exact joint law of the first `tokens` new tokens: every outcome of every choice is walked."""

    def run(chance: Any) -> tuple[int, ...]:
        decoder = factory()
        decoder.extend(prompt)
        while not decoder.finished and len(decoder.new) < tokens:
            decoder.step(chance)
        return tuple(decoder.new[:tokens])

    joint: Law = defaultdict(Fraction)
    for outcome, probability in Exhaustive.walk(run):
        joint[outcome] += probability
    return {outcome: p for outcome, p in joint.items() if p}
