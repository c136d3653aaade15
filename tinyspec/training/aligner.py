"""Word alignment by expectation maximisation: IBM models 1 and 2, vectorised.

Brown, Della Pietra, Della Pietra, Mercer, Computational Linguistics 1993. Each target word is
produced by one source word, or by the empty word NULL. Which one is hidden. Model 1 knows how often
source word s gives target word t, t(t|s); model 2 knows also how often target place i of m looks at
source place j of l, a(j|i, l, m). EM alternates: share each target word among the source words that
could have produced it, then count the shares. The likelihood of the corpus never falls (a test).

Model 1 begins uniform, and its optimum does not depend on where it begins (its log-likelihood is
concave); model 2 begins where model 1 ended, with uniform places. A link is one (source place,
target place) of one sentence pair; all links of a corpus lie in flat arrays, so one round of EM is
a gather, a sum by target word and a count by table entry. 29,000 pairs of about twelve words are
about five million links.

Used by techniques that need a supervised reading of who produced what: fertilities (NAT) and phrase
tables (ENAT). The NAT paper ran fast_align, which ties model 2's places to the diagonal by one
parameter; here they are counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec.errors import TinyspecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Sentences = Sequence[Sequence[int]]


class Aligned(NamedTuple):
    """What EM found.

    links       per pair: for each target word the place of the source word it is most likely from
                (NULL is no answer)
    likelihood  log-likelihood of the corpus before each round of EM, and after the last
    lexicon     (source word, target word) -> t(t|s)
    """

    links: list[Ints]
    likelihood: list[float]
    lexicon: dict[tuple[int, int], float]


def align(source: Sentences, target: Sentences, *, rounds: int = 5, placed: int = 5) -> Aligned:
    """Align sentence pairs: `rounds` of model 1, then `placed` rounds of model 2.

    >>> aligned = align([[1, 2], [1, 3], [2]], [[7, 8], [9, 7], [8]])
    >>> [link.tolist() for link in aligned.links]
    [[0, 1], [1, 0], [0]]
    """
    pairs = _Links(source, target)
    said, seen = np.ones(len(pairs.words)), None
    said /= np.bincount(pairs.speaker)[
        pairs.speaker
    ]  # uniform over what each source word was ever seen beside
    likelihood = []
    for number in range(rounds + placed + 1):
        if number == rounds and placed:
            pairs.place()
            seen = (
                1 / np.bincount(pairs.looks)[pairs.looks]
            )  # [places] uniform: model 2 begins as model 1
        share = said[pairs.entry]
        share = share / pairs.choices if seen is None else share * seen[pairs.spot]
        mass = np.add.reduceat(
            share, pairs.starts
        )  # [target words] the model's probability of each
        likelihood.append(float(np.log(mass).sum()))
        if number == rounds + placed:
            break
        share /= np.repeat(mass, pairs.counts)
        said = _normalised(pairs.entry, share, pairs.speaker)
        if seen is not None:
            seen = _normalised(pairs.spot, share, pairs.looks)
    share[pairs.starts] = -1  # NULL stands first in its block, and is no answer
    best = np.maximum.reduceat(share, pairs.starts)
    hits = np.flatnonzero(share == np.repeat(best, pairs.counts))
    slots, first = np.unique(pairs.slot[hits], return_index=True)
    place = hits[first] - pairs.starts[slots] - 1
    links = np.split(place, np.cumsum(pairs.target_lengths)[:-1])
    spoken = {
        (int(s), int(t)): float(p) for (s, t), p in zip(pairs.words, said, strict=True) if s >= 0
    }
    return Aligned(links, likelihood, spoken)


def fertilities(links: Sequence[int] | Ints, words: int, most: int | None = None) -> Ints:
    """How many target words each of `words` source words produced; their sum is the target's
    length.

    most  the largest fertility that a model knows: what a word has beyond it goes to the nearest
          word that has room

    >>> fertilities([0, 0, 2, 0], 3).tolist(), fertilities([0, 0, 2, 0], 3, most=2).tolist()
    ([3, 0, 1], [2, 1, 1])
    """
    counts = np.bincount(np.asarray(links, np.int64), minlength=words)
    if most is not None:
        if counts.sum() > most * words:
            raise TinyspecError(
                f"{counts.sum()} target words from {words} source words: more than {most} for each"
            )
        while counts.max() > most:
            full = int(counts.argmax())
            near = min(np.flatnonzero(counts < most), key=lambda word: abs(word - full))
            counts[full], counts[near] = counts[full] - 1, counts[near] + 1
    return counts


def _normalised(entry: Ints, share: Floats, group: Ints) -> Floats:
    """Shares added up by entry, as probabilities within each entry's group; a group without any
    keeps zeros.
    """
    counts = np.bincount(entry, share, len(group)).astype(np.float64)
    total = np.bincount(group, counts)[group]
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)


class _Links:
    """All links of a corpus, by target word; within a target word NULL first, then the source from
    left to right.

    slot [N] which target word of the corpus; entry [N] row of `words` [E, 2] (source - 1 for NULL,
    target); starts, counts, choices: each target word's block of links, and over how many source
    words it ranges.
    """

    def __init__(self, source: Sentences, target: Sentences):
        if len(source) != len(target) or not source:
            raise TinyspecError(
                f"{len(source)} source and {len(target)} target sentences: they must be pairs"
            )
        lengths = np.array([len(sentence) + 1 for sentence in source])
        self.target_lengths = np.array([len(sentence) for sentence in target])
        for number in np.flatnonzero((lengths == 1) | (self.target_lengths == 0))[:1]:
            raise TinyspecError(f"sentence pair {number} has an empty side: leave it out")
        spoken = np.concatenate([[-1, *sentence] for sentence in source])  # -1: NULL
        heard = np.concatenate([np.asarray(sentence, np.int64) for sentence in target])
        pair = np.repeat(np.arange(len(source)), self.target_lengths)  # [target words]
        self.counts = lengths[pair]
        self.starts = np.cumsum(self.counts) - self.counts
        self.slot = np.repeat(np.arange(len(heard)), self.counts)  # [N]
        self.choices = lengths[pair][self.slot]
        offset = (
            np.arange(len(self.slot)) - self.starts[self.slot]
        )  # place in the source, NULL is 0
        words = spoken[(np.cumsum(lengths) - lengths)[pair][self.slot] + offset]
        wide = int(heard.max()) + 1
        codes, self.entry = np.unique((words + 1) * wide + heard[self.slot], return_inverse=True)
        self.words = np.stack([codes // wide - 1, codes % wide], 1)
        self.speaker = codes // wide
        self._lengths, self._pair, self._offset = lengths, pair, offset

    def place(self) -> None:
        """What model 2 tells apart: spot [N] numbers (j, i, l, m) densely; looks [places] numbers
        its (i, l, m).
        """
        longest = int(max(self._lengths.max(), self.target_lengths.max())) + 1
        before = np.cumsum(self.target_lengths) - self.target_lengths
        i = np.arange(len(self._pair)) - before[self._pair]
        where = (
            self._lengths[self._pair] * longest + self.target_lengths[self._pair]
        ) * longest + i
        codes, self.spot = np.unique(where[self.slot] * longest + self._offset, return_inverse=True)
        self.looks = np.unique(codes // longest, return_inverse=True)[1]
