"""A translation task with several right answers: its multimodality is a knob, and the best a model
can do is known exactly.

A source is n distinct words. Whoever translates picks one of K dialects, each with probability 1/K,
says nobody which, and keeps to it for the whole sentence. Dialects differ in one or several ways:

    lex   words     each dialect has a lexicon of its own
    ord   order     dialect z rotates the sentence by z words
    fert  fertility a word w is said with two tokens in dialect w mod K and with one in the others,
          so lengths differ too

and each token may be replaced by any other with probability `noise`. A model that reads what it
wrote needs H(Y|x) nats for a sentence, that is ln K, the choice of the dialect; one that writes all
places at once needs the sum of the places' entropies, n ln K, and mixes dialects when it takes the
likeliest token of each. The choice is uniform on purpose: where one dialect is likelier, the
likeliest token is of that one everywhere, and a model that knows nothing of its other tokens looks
perfect.

Alignments, fertilities and a tree of phrases are known for every pair.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinyspec.errors import TinyspecError

PAD, BOS, EOS, MASK = range(4)
KINDS = ("lex", "ord", "fert")
Span = tuple[int, int]


class Pair(NamedTuple):
    """A source, one of its translations, and all that is known of it.

    mode         the dialect
    alignment    the place in the source of the word that each target token says
    fertilities  how many target tokens say each source word
    tree         phrases of words, a word being the span (begin, end) of its target tokens; an even
                 word ends a phrase
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    mode: int
    alignment: tuple[int, ...]
    fertilities: tuple[int, ...]
    tree: tuple[tuple[Span, ...], ...]


class Floors(NamedTuple):
    """The least nats a sentence can cost, in the mean over a source's translations.

    length    of the length alone, H(T|x)
    sequence  of a model that reads what it wrote, and ends by itself: H(Y|x)
    parallel  of a model that is told the length and writes all places at once: sum of H(Y_i|x, T)
    """

    length: float
    sequence: float
    parallel: float


class Quality(NamedTuple):
    """Shares of the outputs.

    valid     one of the K right translations, word by word
    single    made of tokens that some one dialect would use for this source, in whatever order
    repeated  with a token twice: no right translation has one
    """

    valid: float
    single: float
    repeated: float


@dataclass(frozen=True)
class Dialects:
    """The task. Ids: the four special ones, the source's words, then the target's tokens."""

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
                f"{self.modes} orders of {self.shortest} words: a rotation by {self.shortest} is none, "
                f"so take at most {self.shortest} modes"
            )
        if not 0 <= self.noise < 1:
            raise TinyspecError(f"noise is {self.noise}: it must be from 0 to below 1")

    @property
    def tokens(self) -> int:
        """Distinct target tokens."""
        return (
            self.words
            * (self.modes if "lex" in self.kinds else 1)
            * (2 if "fert" in self.kinds else 1)
        )

    @property
    def vocab_size(self) -> int:
        return MASK + 1 + self.words + self.tokens

    @property
    def most(self) -> int:
        """Tokens of the longest translation."""
        return self.longest * (2 if "fert" in self.kinds else 1)

    def said(self, word: int, mode: int) -> list[int]:
        """The target tokens that say a word (0 to words - 1) in a dialect."""
        parts = 2 if "fert" in self.kinds else 1
        first = (
            MASK
            + 1
            + self.words
            + ((mode if "lex" in self.kinds else 0) * self.words + word) * parts
        )
        return [first, first + 1] if parts == 2 and word % self.modes == mode else [first]

    def render(self, source: Sequence[int], mode: int) -> Pair:
        """The translation into a dialect, without noise.

        >>> Dialects(("ord",), modes=2, words=3, shortest=2, longest=3).render((4, 5, 6), 1).target
        (8, 9, 7)
        """
        n = len(source)
        order = [(i + mode) % n for i in range(n)] if "ord" in self.kinds else list(range(n))
        target, alignment, tree, phrase = (
            list[int](),
            list[int](),
            list[tuple[Span, ...]](),
            list[Span](),
        )
        fertilities = [0] * n
        for place, at in enumerate(order):
            word = source[at] - MASK - 1
            said = self.said(word, mode)
            phrase.append((len(target), len(target) + len(said)))
            target += said
            alignment += [at] * len(said)
            fertilities[at] = len(said)
            if word % 2 == 0 or place == n - 1:
                tree.append(tuple(phrase))
                phrase = []
        return Pair(
            tuple(source), tuple(target), mode, tuple(alignment), tuple(fertilities), tuple(tree)
        )

    def renderings(self, source: Sequence[int]) -> list[Pair]:
        """All right translations, by dialect; in a few sources of `fert` two dialects say the
        same.
        """
        return [self.render(source, mode) for mode in range(self.modes)]

    def corpus(
        self, count: int, seed: int = 0, without: Collection[tuple[int, ...]] = ()
    ) -> list[Pair]:
        """So many pairs with the dialects in turn, equally often; sources of `exclude_token` are
        held out.
        """
        random = np.random.default_rng(seed)
        first, held = MASK + 1 + self.words, set(without)
        pairs = list[Pair]()
        while len(pairs) < count:
            n = int(random.integers(self.shortest, self.longest + 1))
            source = tuple(int(word) + MASK + 1 for word in random.permutation(self.words)[:n])
            if source in held:
                continue
            pair = self.render(source, len(pairs) % self.modes)
            if self.noise:
                target = list(pair.target)
                for i in np.flatnonzero(
                    random.random(len(target)) < self.noise
                ):  # any token but the right one
                    other = int(random.integers(self.tokens - 1))
                    target[i] = first + other + (first + other >= target[i])
                pair = pair._replace(target=tuple(target))
            pairs.append(pair)
        return pairs

    # ------------------------------------------------------------------ what a model can reach

    def floors(self, source: Sequence[int]) -> Floors:
        """Exact, for any kind and any noise: by the dialects of each length, and place by place."""
        groups: dict[int, list[tuple[int, ...]]] = {}
        for pair in self.renderings(source):
            groups.setdefault(len(pair.target), []).append(pair.target)
        length = entropy(len(group) / self.modes for group in groups.values())
        sequence, parallel = length, 0.0
        for group in groups.values():
            share = len(group) / self.modes
            sequence += share * self._together(group)
            parallel += share * sum(
                self._together([(target[i],) for target in group]) for i in range(len(group[0]))
            )
        return Floors(length, sequence, parallel)

    def _together(self, group: Sequence[tuple[int, ...]]) -> float:
        """H of a noisy copy of one of these equally long, equally likely texts.

        How likely a text is depends only on how many tokens it shares with each of them, so texts
        are counted by that.
        """
        right, wrong = 1 - self.noise, self.noise / max(self.tokens - 1, 1)
        counted = Counter({(0,) * len(group): 1})
        for i, column in enumerate(zip(*group, strict=True)):
            longer = Counter[tuple[int, ...]]()
            for shared, texts in counted.items():
                for token in set(column):
                    longer[
                        tuple(s + (token == c) for s, c in zip(shared, column, strict=True))
                    ] += texts
                if self.noise:
                    longer[shared] += texts * (self.tokens - len(set(column)))
            counted = (
                longer
                if self.noise
                else Counter({s: n for s, n in longer.items() if max(s) == i + 1})
            )
        n, total = len(group[0]), 0.0
        for shared, texts in counted.items():
            p = sum(right**s * wrong ** (n - s) for s in shared) / len(group)
            total -= texts * p * math.log(p) if p > 0 else 0.0
        return total

    def judge(self, source: Sequence[int], output: Sequence[int]) -> tuple[bool, bool, bool]:
        """Whether one output is valid, of a single dialect, and repeats a token: see `Quality`."""
        right = [pair.target for pair in self.renderings(source)]
        single = any(set(output) <= set(target) for target in right)
        return tuple(output) in right, single, len(set(output)) < len(output)

    def quality(
        self, sources: Iterable[Sequence[int]], outputs: Iterable[Sequence[int]]
    ) -> Quality:
        """How good outputs are, each for the source in its place."""
        judged = [
            self.judge(source, output) for source, output in zip(sources, outputs, strict=True)
        ]
        if not judged:
            raise TinyspecError("there are no outputs to judge: give at least one source")
        return Quality(*(sum(one) / len(judged) for one in zip(*judged, strict=True)))


def entropy(law: Iterable[float]) -> float:
    """In nats.

    >>> entropy([0.5, 0.5]) == math.log(2)
    True
    """
    return 0.0 - sum(p * math.log(p) for p in law if p > 0)


def padded(rows: Sequence[Sequence[int]], pad: int = PAD) -> Tensor:
    """Rows of different lengths as one tensor [B, longest].

    >>> padded([(5, 6), (7,)]).tolist()
    [[5, 6], [7, 0]]
    """
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.long)
