"""Typical acceptance (Cai et al. 2024): entropy moves the threshold, the longest path is kept."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Verifier
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.rational import distributions
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.session_laws import random_tree
from tinyspec.laws.traps import Trap
from tinyspec.speculative.verification.typical_acceptance import typical_threshold, typical_verifier
from tinyspec.tree import ROOT, TokenTree

THRESHOLD = "a token is accepted if p(x) > min(epsilon, delta exp(-H(p)))"
LIKELIEST = "the likeliest token is accepted, if delta < 1"
LONGEST = "the longest accepted path is kept, and of equals the likeliest"

MakeVerifier = Callable[[float, float, str], Verifier]
"""(epsilon, delta, bonus) -> the verifier that is judged."""

HALVES = (0.5, 0.5)  # exp(-H) = 1/2
SIXTEENTHS = (0.0625,) * 16  # exp(-H) = 1/16
MIXED = (0.5, *(0.0625,) * 8)  # H = log(2) / 2 + log(16) / 2, so exp(-H) = 2^(-5/2) = 0.1768

BY_HAND = (
    # p, epsilon, delta, the threshold
    (HALVES, 0.09, 0.3, 0.09),  # 0.3 / 2 is greater
    (HALVES, 0.6, 0.7, 0.35),
    (HALVES, 0.6, 0.99, 0.495),
    (SIXTEENTHS, 0.09, 0.3, 0.01875),
    (SIXTEENTHS, 0.01, 0.9, 0.01),
    (MIXED, 0.09, 0.3, 0.0530),
    (MIXED, 0.09, 0.4, 0.0707),  # above 1/16
    (MIXED, 0.05, 0.4, 0.05),
)


def accepted_tokens(verifier: Verifier, tree: TokenTree, rows: Sequence[Any]) -> tuple[int, ...]:
    """Return the tokens that a verifier accepts.

    rows  distributions after ROOT and after each node
    """
    p: Any = {node: np.array(row) for node, row in enumerate(rows, ROOT)}
    return tree.tokens_on(verifier(tree, p, Seeded(0)).accepted)


@collect_evidence(THRESHOLD)
def threshold_is_of_the_target(make: MakeVerifier) -> Iterator[int]:
    """Check which single tokens are accepted of three distributions, whatever they were drawn from.

    Where the threshold is not round, it is given to four digits; no probability is that near to it.
    """
    for p, epsilon, delta, threshold in BY_HAND:
        declared = [None, [1.0, *(0.0,) * (len(p) - 1)], [1 / len(p)] * len(p)]
        for token, q in product(range(len(p)), declared):
            tree = TokenTree.chain([token], [q])
            got = accepted_tokens(make(epsilon, delta, "argmax"), tree, [p, p])
            expected = (token,) if p[token] > threshold else ()
            case = {"p": p, "epsilon": epsilon, "delta": delta, "token": token, "drawn from": q}
            expect_equal(THRESHOLD, expected, got, **case)
            yield 1


def all_rows() -> Iterator[tuple[float, ...]]:
    """Yield small distributions, and uniform ones over up to 64 tokens."""
    for vocabulary, whole in product((2, 3, 4), range(1, 8)):
        for row in distributions(vocabulary, whole):
            yield tuple(map(float, row))
    for n in (8, 16, 64):
        yield (1 / n,) * n


@collect_evidence(LIKELIEST)
def likeliest_token_passes(make: MakeVerifier) -> Iterator[int]:
    """Check that the likeliest token is accepted at any epsilon and any delta below 1.

    Proof: H is the mean of -log p(y) under p, and each of them is at least -log max p. So H is at
    least -log max p, and delta exp(-H) <= delta max p < max p.
    """
    for p, epsilon, delta in product(all_rows(), (0.09, 0.5, 1.0), (0.3, 0.9)):
        token = p.index(max(p))
        got = accepted_tokens(make(epsilon, delta, "argmax"), TokenTree.chain([token]), [p, p])
        expect_equal(LIKELIEST, (token,), got, p=p, epsilon=epsilon, delta=delta)
        yield 1


def random_rows(rng: random.Random, n: int) -> list[list[float]]:
    """Return n distributions over 5 tokens, sharp and flat ones."""
    rows = list[list[float]]()
    for _ in range(n):
        weights = [rng.choice((0, 1, 2, 5, 20)) + rng.random() / 8 for _ in range(5)]
        rows.append([x / sum(weights) for x in weights])
    return rows


def score_path(
    tree: TokenTree, rows: Sequence[Sequence[float]], node: int, epsilon: float, delta: float
) -> tuple[int, float] | None:
    """Return length and log-likelihood of the path to a node; None: a token of it is rejected."""
    path, likelihood = tree.path(node), 0.0
    for before, here in zip((ROOT, *path), path, strict=False):
        p = rows[before + 1]
        entropy = sum(-x * math.log(x) for x in p if x > 0)
        if p[tree.tokens[here]] <= min(epsilon, delta / math.exp(entropy)):
            return None
        likelihood += math.log(p[tree.tokens[here]])
    return len(path), likelihood


@collect_evidence(LONGEST)
def longest_path_is_kept(make: MakeVerifier) -> Iterator[int]:
    """Check the accepted path of random trees against all paths."""
    for seed, (epsilon, delta) in product(range(60), ((0.09, 0.3), (0.3, 0.5))):
        rng = random.Random(seed)
        tree, rows = random_tree(rng, 9, range(5)), random_rows(rng, 10)
        paths = [(node, score_path(tree, rows, node, epsilon, delta)) for node in range(ROOT, 9)]
        scores = {node: score for node, score in paths if score is not None}
        best = max(scores, key=lambda node: scores[node])
        expected = tree.tokens_on(tree.path(best))
        got = accepted_tokens(make(epsilon, delta, "argmax"), tree, rows)
        if expected != got:
            case = {"paths": [tree.tokens_on(tree.path(node)) for node in scores], "rows": rows}
            accuse(LONGEST, expected, got, **case, epsilon=epsilon, delta=delta)
        yield len(scores)


TRAPS = [
    Trap(THRESHOLD, threshold_is_of_the_target, lambda: typical_verifier),
    Trap(LIKELIEST, likeliest_token_passes, lambda: typical_verifier),
    Trap(LONGEST, longest_path_is_kept, lambda: typical_verifier),
]

_typical = partial(Toy, technique="typical_acceptance")

TOYS = [
    _typical(
        "a threshold without the entropy",
        "min(epsilon, delta * math.exp(-entropy))",
        "epsilon",
        typical_threshold,
        law=LIKELIEST,
    ),
    _typical(
        "the threshold of the draft's distribution",
        "rows[parent] = row, typical_threshold(row, epsilon, delta)",
        """q = row if tree.draft_probs[node] is None else np.array(tree.draft_probs[node])
rows[parent] = row, typical_threshold(q, epsilon, delta)""",
        typical_verifier,
        law=THRESHOLD,
    ),
    _typical(
        "the first of the longest paths",
        "key=lambda node: score[node]",
        "key=lambda node: score[node][0]",
        typical_verifier,
        law=LONGEST,
    ),
]
