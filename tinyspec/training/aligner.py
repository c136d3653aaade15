"""Align words by expectation maximization: IBM models 1 and 2, vectorized.

Brown, Della Pietra, Della Pietra, Mercer, Computational Linguistics 1993. Each target word is
produced by one source word, or by the empty word NULL. Which one is a hidden variable.

    model 1:  t(t|s)        how often source word s produces target word t
    model 2:  a(j|i, l, m)  how often target position i of m is produced by source position j of l

EM alternates two steps. It shares each target word among the source words that could have produced
it; then it counts the shares. The likelihood of the corpus never falls (a test).

Model 1 begins uniform. Its log-likelihood is concave, so its optimum does not depend on where it
begins. Model 2 begins where model 1 ended, with uniform positions. A link is one (source position,
target position) of one sentence pair. All links of a corpus lie in flat arrays: a round of EM is a
gather, a sum by target word, and a count by table entry. 29,000 pairs of about twelve words have
about five million links.

Techniques use it that learn which source word produced which target word: fertilities (NAT) and
phrase tables (ENAT). The NAT paper ran fast_align, which describes model 2's positions by one
parameter, their distance from the diagonal. Here they are counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec.errors import TinyspecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Sentences = Sequence[Sequence[int]]


class Alignment(NamedTuple):
    """The result of EM.

    links       per pair: for each target word the position of its most likely source word
                (NULL is left out)
    likelihood  log-likelihood of the corpus before each round of EM, and after the last
    lexicon     (source word, target word) -> t(t|s)
    """

    links: list[Ints]
    likelihood: list[float]
    lexicon: dict[tuple[int, int], float]


def align_words(
    source: Sentences, target: Sentences, *, model1_rounds: int = 5, model2_rounds: int = 5
) -> Alignment:
    """Align sentence pairs by rounds of model 1, then of model 2.

    >>> aligned = align_words([[1, 2], [1, 3], [2]], [[7, 8], [9, 7], [8]])
    >>> [link.tolist() for link in aligned.links]
    [[0, 1], [1, 0], [0]]
    """
    table = _LinkTable(source, target)
    # Uniform over the target words that each source word occurs with.
    word_probs = 1 / np.bincount(table.source_word)[table.source_word]  # [E], t(t|s)
    position_probs = None  # [positions], a(j|i, l, m)
    likelihood = []
    for number in range(model1_rounds + model2_rounds + 1):
        if number == model1_rounds and model2_rounds:
            table.add_positions()
            position_probs = 1 / np.bincount(table.position_group)[table.position_group]
        share = word_probs[table.entry]
        if position_probs is None:
            share = share / table.source_lengths
        else:
            share = share * position_probs[table.position]
        mass = np.add.reduceat(share, table.starts)  # probability of each target word
        likelihood.append(float(np.log(mass).sum()))
        if number == model1_rounds + model2_rounds:
            break
        share /= np.repeat(mass, table.counts)
        word_probs = _normalize_counts(table.entry, share, table.source_word)
        if position_probs is not None:
            position_probs = _normalize_counts(table.position, share, table.position_group)
    share[table.starts] = -1  # NULL stands first in each block, and is never the answer
    best = np.maximum.reduceat(share, table.starts)
    hits = np.flatnonzero(share == np.repeat(best, table.counts))
    targets, first = np.unique(table.target[hits], return_index=True)
    place = hits[first] - table.starts[targets] - 1
    links = np.split(place, np.cumsum(table.target_lengths)[:-1])
    lexicon = {
        (int(s), int(t)): float(p)
        for (s, t), p in zip(table.words, word_probs, strict=True)
        if s >= 0
    }
    return Alignment(links, likelihood, lexicon)


def count_fertilities(links: Sequence[int] | Ints, words: int, most: int | None = None) -> Ints:
    """Return how many target words each of `words` source words produced.

    Their sum is the target's length.

    most  the largest fertility that a model knows: a word gives what it has beyond it to the
          nearest word that has less

    >>> count_fertilities([0, 0, 2, 0], 3).tolist()
    [3, 0, 1]
    >>> count_fertilities([0, 0, 2, 0], 3, most=2).tolist()
    [2, 1, 1]
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


def _normalize_counts(entry: Ints, share: Floats, group: Ints) -> Floats:
    """Add up shares by entry, and return them as probabilities within each entry's group.

    A group without any share keeps zeros.
    """
    counts = np.bincount(entry, share, len(group)).astype(np.float64)
    total = np.bincount(group, counts)[group]
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)


class _LinkTable:
    """All N links of a corpus in blocks, one for each target word.

    Within a block NULL stands first, then the source from left to right.

    target          [N] number of the target word in the corpus
    entry           [N] row of `words`
    source_lengths  [N] source words and NULL: how many links the block has
    words           [E, 2] each pair of words that are linked: source (-1 for NULL), target
    source_word     [E] number of the source word
    starts, counts  of each target word's block
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
        source_words = np.concatenate([[-1, *sentence] for sentence in source])  # -1: NULL
        target_words = np.concatenate([np.asarray(sentence, np.int64) for sentence in target])
        pair = np.repeat(np.arange(len(source)), self.target_lengths)  # [target words]
        self.counts = lengths[pair]
        self.starts = np.cumsum(self.counts) - self.counts
        self.target = np.repeat(np.arange(len(target_words)), self.counts)
        self.source_lengths = self.counts[self.target]
        offset = np.arange(len(self.target)) - self.starts[self.target]  # in the source; NULL is 0
        words = source_words[(np.cumsum(lengths) - lengths)[pair][self.target] + offset]
        width = int(target_words.max()) + 1
        codes, self.entry = np.unique(
            (words + 1) * width + target_words[self.target], return_inverse=True
        )
        self.words = np.stack([codes // width - 1, codes % width], 1)
        self.source_word = codes // width
        self._lengths, self._pair, self._offset = lengths, pair, offset

    def add_positions(self) -> None:
        """Number what model 2 distinguishes.

        position        [N] number of the link's (j, i, l, m)
        position_group  [positions] number of its (i, l, m)
        """
        longest = int(max(self._lengths.max(), self.target_lengths.max())) + 1
        before = np.cumsum(self.target_lengths) - self.target_lengths
        i = np.arange(len(self._pair)) - before[self._pair]
        sizes = self._lengths[self._pair] * longest + self.target_lengths[self._pair]
        group = sizes * longest + i  # [target words]
        codes, self.position = np.unique(
            group[self.target] * longest + self._offset, return_inverse=True
        )
        self.position_group = np.unique(codes // longest, return_inverse=True)[1]
