"""Laws of word alignment: EM never loses likelihood, is what plain loops say, and finds who
produced which word.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.training.dialects import Dialects

EM = "expectation maximisation, round by round (Brown et al. 1993)"
KNOWN = "known alignments are found (Brown et al. 1993)"

Align = Callable[..., Any]
NULL = -1
CORPORA = [
    ([[1, 2], [1, 3], [2]], [[7, 8], [9, 7], [8, 8]]),
    ([[1, 2, 1], [3], [2, 4, 3]], [[5, 6], [7, 7, 6], [6]]),
]
TWICE = (
    [[1, 2, 1], [2], [3, 4], [4, 5, 6], [5, 3]] * 5,
    [[7, 8, 7], [8], [9, 10], [10, 11, 12], [11, 9]] * 5,
)


def em_by_plain_loops(source: Any, target: Any, rounds: int, placed: int) -> list[float]:
    """The log-likelihood before each round and after the last, word by word: model 1, then model
    2.
    """
    beside: dict[int, set[int]] = defaultdict(set)
    for x, y in zip(source, target, strict=True):
        for s in (NULL, *x):
            beside[s] |= set(y)
    said = {(s, t): 1 / len(words) for s, words in beside.items() for t in words}
    seen: dict[tuple[int, ...], float] = {}
    told = []
    for number in range(rounds + placed + 1):
        second, likelihood = number >= rounds and placed > 0, 0.0
        words, places = Counter[tuple[int, int]](), Counter[tuple[int, ...]]()
        for x, y in zip(source, target, strict=True):
            for i, t in enumerate(y):
                spots = [(j, i, len(x), len(y)) for j in range(len(x) + 1)]
                shares = [
                    said[s, t] * (seen.get(spot, 1 / len(spots)) if second else 1 / len(spots))
                    for s, spot in zip((NULL, *x), spots, strict=True)
                ]
                likelihood += math.log(sum(shares))
                for s, spot, share in zip((NULL, *x), spots, shares, strict=True):
                    words[s, t] += share / sum(shares)  # type: ignore[assignment]
                    places[spot] += share / sum(shares)  # type: ignore[assignment]
        told.append(likelihood)
        said = {(s, t): n / sum(words[s, u] for u in beside[s]) for (s, t), n in words.items()}
        if second:
            seen = {
                (j, *r): n / sum(places[k, *r] for k in range(r[1] + 1))
                for (j, *r), n in places.items()
            }
    return told


def rounds_of_em(align: Align) -> Evidence:
    """The likelihood after each round, against plain loops on tiny corpora; and that none falls, on
    a random one.
    """
    seen = 0
    for (source, target), (rounds, placed) in (
        (c, r) for c in CORPORA for r in ((3, 0), (0, 3), (2, 2))
    ):
        want = em_by_plain_loops(source, target, rounds, placed)
        got, seen = align(source, target, rounds=rounds, placed=placed).likelihood, seen + 1
        if len(want) != len(got) or any(abs(a - b) > 1e-9 for a, b in zip(want, got, strict=True)):
            accuse(EM, want, got, source=source, target=target, model_1=rounds, model_2=placed)
    random = np.random.default_rng(0)
    sides = [
        [random.integers(0, 9, random.integers(1, 7)).tolist() for _ in range(150)]
        for _ in range(2)
    ]
    for before, after in pairwise(align(*sides).likelihood):
        if after < before - 1e-9:
            accuse(
                EM,
                f"at least {before}",
                after,
                corpus="150 random pairs",
                asked="the likelihood of the next round",
            )
    return Evidence(EM, seen + 1)


def known_alignments(align: Align) -> Evidence:
    """More than 95 in 100 of what a task of dialects knows; a word that stands twice is told apart
    by its place.
    """
    for kinds, modes in ((("lex",), 4), (("ord", "fert"), 3)):
        pairs = Dialects(kinds, modes).corpus(800, seed=1)
        links = align([p.source for p in pairs], [p.target for p in pairs]).links
        right = sum(
            sum(map(int.__eq__, link.tolist(), p.alignment))
            for link, p in zip(links, pairs, strict=True)
        )
        share = right / sum(len(p.target) for p in pairs)
        if share <= 0.95:
            accuse(KNOWN, "more than 0.95", round(share, 3), task="+".join(kinds), dialects=modes)
    got = align(*TWICE).links[0].tolist()
    if got != [0, 1, 2]:
        accuse(KNOWN, [0, 1, 2], got, source=TWICE[0][0], target=TWICE[1][0])
    return Evidence(KNOWN, 3)


ALIGNMENT_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    EM: lambda parts: rounds_of_em(parts.align),
    KNOWN: lambda parts: known_alignments(parts.align),
}
