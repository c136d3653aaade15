"""Make a translation task with several right answers, and compute the best that a model can do.

A source is n distinct words. A translator picks one of K dialects, each with probability 1/K, and
uses it for the whole sentence. Dialects differ in one or several ways:

    lex   words      each dialect has its own lexicon
    ord   order      dialect z rotates the sentence by z words
    fert  fertility  word w becomes two tokens in dialect w mod K, and one token in the others; so
                     lengths differ too

With probability `noise` each token is replaced by another one. Without noise, a model that reads
what it has written needs H(Y|x) = ln K nats for a sentence: the choice of the dialect. A model that
writes all positions at once needs the sum of the positions' entropies, n ln K. It mixes dialects
if it takes the most probable token of each position.

The dialects are equally probable on purpose. If one were more probable, its tokens would be the
most probable ones at every position, and a model that ignores its other tokens would look perfect.

Alignments, fertilities and a tree of phrases are known for every pair.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tinyspec.errors import TinyspecError
from tinyspec.training.bitext import MASK

KINDS = ("lex", "ord", "fert")
Span = tuple[int, int]


class DialectPair(NamedTuple):
    """A source, one of its translations, and how it was made.

    mode         the dialect
    alignment    for each target token, the position of its word in the source
    fertilities  for each source word, how many target tokens it has
    tree         phrases of words, each word the span (begin, end) of its target tokens; an even
                 word ends a phrase
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    mode: int
    alignment: tuple[int, ...]
    fertilities: tuple[int, ...]
    tree: tuple[tuple[Span, ...], ...]


class EntropyBounds(NamedTuple):
    """The least mean number of nats that a translation of a source can cost.

    length    of the length alone: H(T|x)
    sequence  for a model that reads what it has written, and decides where to end: H(Y|x)
    parallel  for a model that knows the length and writes all positions at once: sum H(Y_i|x, T)
    """

    length: float
    sequence: float
    parallel: float


class Quality(NamedTuple):
    """Shares of outputs with a property.

    valid     equal to one of the K right translations
    single    all tokens are tokens of one dialect's translation, in any order
    repeated  a token occurs twice, which happens in no right translation
    """

    valid: float
    single: float
    repeated: float


@dataclass(frozen=True)
class Dialects:
    """A task. Its ids: four special ones, the source's words, then the target's tokens."""

    kinds: tuple[str, ...] = ("lex",)
    modes: int = 4
    words: int = 20
    shortest: int = 5
    longest: int = 9
    noise: float = 0.0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise TinyspecError(f"there is no dialect '{kind}': known are {', '.join(KINDS)}")
        if self.modes < 1:
            raise TinyspecError(f"modes is {self.modes}: a source needs at least one translation")
        if not 1 <= self.shortest <= self.longest <= self.words:
            raise TinyspecError(
                f"lengths {self.shortest} to {self.longest} of {self.words} words: "
                "a source has at least one word, and none twice"
            )
        if "ord" in self.kinds and self.modes > self.shortest:
            raise TinyspecError(
                f"{self.modes} orders of {self.shortest} words: "
                f"a rotation by {self.shortest} is none, so take at most {self.shortest} modes"
            )
        if not 0 <= self.noise < 1:
            raise TinyspecError(f"noise is {self.noise}: it must be from 0 to below 1")

    @property
    def tokens(self) -> int:
        """Return the number of distinct target tokens."""
        return (
            self.words
            * (self.modes if "lex" in self.kinds else 1)
            * (2 if "fert" in self.kinds else 1)
        )

    @property
    def vocab_size(self) -> int:
        return MASK + 1 + self.words + self.tokens

    @property
    def max_target_length(self) -> int:
        """Return the number of tokens of the longest translation."""
        return self.longest * (2 if "fert" in self.kinds else 1)

    def tokens_of_word(self, word: int, mode: int) -> list[int]:
        """Return the target tokens of a word (0 to words - 1) in a dialect."""
        parts = 2 if "fert" in self.kinds else 1
        lexicon = mode if "lex" in self.kinds else 0
        first = MASK + 1 + self.words + (lexicon * self.words + word) * parts
        return [first, first + 1] if parts == 2 and word % self.modes == mode else [first]

    def translate(self, source: Sequence[int], mode: int) -> DialectPair:
        """Return the translation into a dialect, without noise.

        >>> task = Dialects(("ord",), modes=2, words=3, shortest=2, longest=3)
        >>> task.translate((4, 5, 6), 1).target
        (8, 9, 7)
        """
        n = len(source)
        order = [(i + mode) % n for i in range(n)] if "ord" in self.kinds else list(range(n))
        target, alignment, fertilities = list[int](), list[int](), [0] * n
        tree, phrase = list[tuple[Span, ...]](), list[Span]()
        for place, at in enumerate(order):
            word = source[at] - MASK - 1
            tokens = self.tokens_of_word(word, mode)
            phrase.append((len(target), len(target) + len(tokens)))
            target += tokens
            alignment += [at] * len(tokens)
            fertilities[at] = len(tokens)
            if word % 2 == 0 or place == n - 1:
                tree.append(tuple(phrase))
                phrase = []
        return DialectPair(
            tuple(source), tuple(target), mode, tuple(alignment), tuple(fertilities), tuple(tree)
        )

    def all_translations(self, source: Sequence[int]) -> list[DialectPair]:
        """Return the translation into each dialect.

        With `fert`, two dialects translate a few sources alike.
        """
        return [self.translate(source, mode) for mode in range(self.modes)]

    def sample_pairs(
        self, count: int, seed: int = 0, exclude: Collection[tuple[int, ...]] = ()
    ) -> list[DialectPair]:
        """Return `count` pairs, whose dialects take turns; no source is one of `exclude`."""
        random = np.random.default_rng(seed)
        first, held = MASK + 1 + self.words, set(exclude)
        pairs = list[DialectPair]()
        while len(pairs) < count:
            n = int(random.integers(self.shortest, self.longest + 1))
            source = tuple(int(word) + MASK + 1 for word in random.permutation(self.words)[:n])
            if source in held:
                continue
            pair = self.translate(source, len(pairs) % self.modes)
            if self.noise:
                target = list(pair.target)
                for i in np.flatnonzero(random.random(len(target)) < self.noise):
                    other = int(random.integers(self.tokens - 1))  # any token but the right one
                    target[i] = first + other + (first + other >= target[i])
                pair = pair._replace(target=tuple(target))
            pairs.append(pair)
        return pairs

    # ------------------------------------------------------------------ what a model can reach

    def entropy_bounds(self, source: Sequence[int]) -> EntropyBounds:
        """Return the exact bounds, for any kind and any noise."""
        groups: dict[int, list[tuple[int, ...]]] = {}
        for pair in self.all_translations(source):
            groups.setdefault(len(pair.target), []).append(pair.target)
        length = entropy(len(group) / self.modes for group in groups.values())
        sequence, parallel = length, 0.0
        for group in groups.values():
            share = len(group) / self.modes
            sequence += share * self._mixture_entropy(group)
            parallel += share * sum(
                self._mixture_entropy([(target[i],) for target in group])
                for i in range(len(group[0]))
            )
        return EntropyBounds(length, sequence, parallel)

    def _mixture_entropy(self, group: Sequence[tuple[int, ...]]) -> float:
        """Return the entropy of a noisy copy of one of these equally long, equally probable texts.

        The probability of a copy depends only on how many tokens it shares with each of them. So
        copies are counted by these numbers.
        """
        right, wrong = 1 - self.noise, self.noise / max(self.tokens - 1, 1)
        copies = Counter({(0,) * len(group): 1})  # tokens shared with each text -> copies
        for i, column in enumerate(zip(*group, strict=True)):
            longer = Counter[tuple[int, ...]]()
            for shared, count in copies.items():
                for token in set(column):
                    now = tuple(s + (token == c) for s, c in zip(shared, column, strict=True))
                    longer[now] += count
                if self.noise:
                    longer[shared] += count * (self.tokens - len(set(column)))
            if not self.noise:  # each copy equals one of the texts
                longer = Counter({s: n for s, n in longer.items() if max(s) == i + 1})
            copies = longer
        n, total = len(group[0]), 0.0
        for shared, count in copies.items():
            p = sum(right**s * wrong ** (n - s) for s in shared) / len(group)
            total -= count * p * math.log(p) if p > 0 else 0.0
        return total

    def judge_output(self, source: Sequence[int], output: Sequence[int]) -> tuple[bool, bool, bool]:
        """Return whether one output is valid, single, and repeated: see `Quality`."""
        right = [pair.target for pair in self.all_translations(source)]
        single = any(set(output) <= set(target) for target in right)
        return tuple(output) in right, single, len(set(output)) < len(output)

    def measure_quality(
        self, sources: Iterable[Sequence[int]], outputs: Iterable[Sequence[int]]
    ) -> Quality:
        """Return the quality of outputs, one for each source."""
        judged = [
            self.judge_output(source, output)
            for source, output in zip(sources, outputs, strict=True)
        ]
        if not judged:
            raise TinyspecError("there are no outputs to judge: give at least one source")
        return Quality(*(sum(one) / len(judged) for one in zip(*judged, strict=True)))


def entropy(probs: Iterable[float]) -> float:
    """Return the entropy of a distribution, in nats.

    >>> entropy([0.5, 0.5]) == math.log(2)
    True
    """
    return 0.0 - sum(p * math.log(p) for p in probs if p > 0)
