"""The oracle of techniques that write several words in a pass: one source, in plain lists.

There is no batch, no padding, no cache and no canvas. A pass is given its input vectors, which
positions see which, and the name of the stack. The dense decoder runs it for this source alone; it
is itself compared with a version written token by token (tests/lm/test_seq2seq.py). A technique's
own rule stands in its traps: what a pass reads, who sees whom, and what follows from its rows.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinyspec.lm.seq2seq import Seq2Seq

Vector = list[float]


def word_vector(model: Seq2Seq, word: int) -> Vector:
    """Return the embedding of a word, times sqrt(d)."""
    return [x * math.sqrt(model.config.d_model) for x in model.embedding[word].tolist()]


def add_vectors(a: Vector, b: Vector) -> Vector:
    """Return the sum of two vectors."""
    return [x + y for x, y in zip(a, b, strict=True)]


def multiply_vector(matrix: Tensor, vector: Vector) -> Vector:
    """Return the product of a matrix and a vector."""
    rows = matrix.tolist()
    return [math.fsum(a * b for a, b in zip(row, vector, strict=True)) for row in rows]


def mix_vectors(vectors: Sequence[Vector], scores: Vector) -> Vector:
    """Return the mean of vectors, weighed by the softmax of their scores."""
    weights = [math.exp(score - max(scores)) for score in scores]
    return [
        math.fsum(w * x for w, x in zip(weights, column, strict=True)) / math.fsum(weights)
        for column in zip(*vectors, strict=True)
    ]


def position_vector(position: int, width: int) -> Vector:
    """Return the sinusoids of a position: sine and cosine in turn."""
    angles = [position / 10000 ** (2 * i / width) for i in range(width // 2)]
    return [wave(angle) for angle in angles for wave in (math.sin, math.cos)]


def run_plain_pass(
    model: Seq2Seq,
    source: Sequence[int],
    inputs: Sequence[Vector],
    sees: Callable[[int, int], bool],
    stack: str = "decoder",
) -> list[Vector]:
    """Return the states of one decoder pass, which the head reads.

    inputs  a vector for each position, without the sinusoids
    sees    (t, s) -> whether position t attends to position s
    """
    width, count = model.config.d_model, range(len(inputs))
    placed = [add_vectors(x, position_vector(t, width)) for t, x in enumerate(inputs)]
    mask = torch.tensor([[sees(t, s) for s in count] for t in count])
    vectors = torch.tensor([placed], dtype=model.dtype)
    memory = model.encode(torch.tensor([list(source)]))
    states: list[Vector] = model.decode(vectors, memory, mask, stack=stack)[0].tolist()
    return states


def word_logits(model: Seq2Seq, state: Vector) -> Vector:
    """Return the logit of every word: the product of a state and its embedding."""
    return [sum(x * y for x, y in zip(state, row, strict=True)) for row in model.embedding.tolist()]


def find_likeliest_word(model: Seq2Seq, state: Vector) -> tuple[int, float]:
    """Return the likeliest word that is no special token, and its log-probability among them."""
    c, row = model.config, word_logits(model, state)
    words = [word for word in range(len(row)) if word not in (c.pad, c.bos, c.eos, c.mask)]
    best = max(words, key=lambda word: row[word])
    return best, row[best] - math.log(sum(math.exp(row[word]) for word in words))


def read_until_end(model: Seq2Seq, rows: Sequence[Vector]) -> tuple[list[int], list[float]]:
    """Return the likeliest words up to the first end, and their log-probabilities.

    rows  logits of all words at every position

    There is at least one word. Of the special tokens, the end alone may be written.
    """
    c, found, scores = model.config, list[int](), list[float]()
    for t, row in enumerate(rows):
        never = (c.pad, c.bos, c.mask) if t else (c.pad, c.bos, c.mask, c.eos)
        words = [word for word in range(len(row)) if word not in never]
        best = max(words, key=lambda word: row[word])
        if best == c.eos:
            break
        found.append(best)
        scores.append(row[best] - math.log(sum(math.exp(row[word]) for word in words)))
    return found, scores


def copy_evenly(source: Sequence[int], count: int) -> list[int]:
    """Return `count` copies of source words: the nearest to i (S - 1) / (T - 1), for each i.

    >>> copy_evenly([7, 8, 9], 5)
    [7, 8, 8, 9, 9]
    """
    exact = [i * (len(source) - 1) / max(count - 1, 1) for i in range(count)]
    return [source[math.floor(place + 0.5)] for place in exact]


def score_all_texts(
    after: Callable[[tuple[int, ...]], list[float]], eos: int, limit: int
) -> dict[tuple[int, ...], float]:
    """Return the mean log-probability of the words and the end of every text."""
    sums: dict[tuple[int, ...], float] = {(): 0.0}
    found = dict[tuple[int, ...], float]()
    for _ in range(limit + 1):
        rows = {text: after(text) for text in sums}
        found |= {text: (sums[text] + row[eos]) / (len(text) + 1) for text, row in rows.items()}
        sums = {
            (*text, word): sums[text] + score
            for text, row in rows.items()
            for word, score in enumerate(row)
            if word != eos and len(text) < limit and score > -math.inf
        }
    return found


def search_by_rule(
    after: Callable[[tuple[int, ...]], list[float]], eos: int, limit: int, beam: int
) -> tuple[int, ...]:
    """Return the text that a beam search finds: word by word, all continuations compared."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended = list[tuple[float, tuple[int, ...]]]()
    while live and len(ended) < beam:
        longer = [
            (total + score, text, word)
            for total, text in live
            for word, score in enumerate(after(text))
            if score > -math.inf and (word == eos or len(text) < limit)
        ]
        longer.sort(reverse=True)
        ended += [
            (score / (len(text) + 1), text) for score, text, word in longer[:beam] if word == eos
        ]
        live = [(score, (*text, word)) for score, text, word in longer if word != eos][:beam]
    return max(ended)[1]
