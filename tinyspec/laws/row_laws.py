"""Laws of what acts on one distribution: warpers, residual, drawing, unknown ids, look-up, counts.

Each law takes a `Parts`, tries its cases smallest first, raises `LawViolated` with the first that
breaks it, and returns `Evidence`. The definitions they compare with are written here from the
papers' formulas and call nothing of the library.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import apply_warpers
from tinyspec.laws.parts import Parts
from tinyspec.tree import ROOT, TokenTree

WARP = "warp is its definition"
RESIDUAL = "residual is a distribution"
SUPPORT = "support"
VOCABULARY = "vocabulary"
LOOKUP = "lookup is a search"

LARGEST_UNIFORM = 1 - 2**-53  # the largest uniform there is
EDGES = (0.0, LARGEST_UNIFORM)

ROW_PAIRS = [
    ((1, 0), (0, 1)),
    ((0, 1), (1, 1)),
    ((1, 1), (1, 1)),
    ((1, 3), (3, 1)),
    ((0, 1, 0), (1, 1, 1)),
    ((0, 1, 2), (2, 1, 1)),
]
"""Weights of p and q, smallest first: disjoint, p without some of q's tokens, equal, crossing."""

ROW_KNOBS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"temperature": 0.5, "top_p": 0.8},
    {"top_k": 2, "top_p": 0.55},
]

PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5, "temperature": 0.7},
]


def normalize_weights(weights: Sequence[int]) -> list[Fraction]:
    """Return weights as a distribution."""
    return [Fraction(w, sum(weights)) for w in weights]


# ------------------------------------------------------------------ warpers


@collect_evidence(WARP)
def warp_is_its_definition(parts: Parts) -> Iterator[int]:
    """Check temperature, top-k, top-p and min-p, in Fractions and floats.

    NaN and +inf are errors.
    """
    got: Any
    for weights in ((1, 2), (2, 2), (1, 1, 1), (1, 2, 3), (2, 1, 2), (3, 1, 2, 3)):
        for knobs in ROW_KNOBS:
            sampling = parts.sampling(**knobs)
            expected = apply_warpers(normalize_weights(weights), (), SamplingParams(**knobs))
            got = list(sampling.probs([Fraction(w) for w in weights]))
            expect_equal(WARP, expected, got, weights=weights, sampling=knobs)
            floats = sampling.probs(np.log(np.array(weights, np.float64)))
            if not np.allclose(floats, np.array(expected, np.float64), rtol=0, atol=1e-12):
                accuse(WARP, expected, floats, logits=[f"log {w}" for w in weights], sampling=knobs)
            yield 0
    for logits, history in product(([1.0, -1.0], [2.0, 0.5, -1.0]), ((), (0,), (1, 1), (0, 0, 1))):
        for knobs in PENALTIES:
            got = parts.sampling(**knobs).probs(np.array(logits), history)
            expected = apply_warpers(np.array(logits), history, SamplingParams(**knobs))
            if not np.allclose(got, expected, rtol=0, atol=1e-12):
                accuse(WARP, expected, got, logits=logits, history=history, sampling=knobs)
            yield 0
    for logits in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]):
        for knobs in ({}, {"temperature": 0.0}):
            try:
                got = list(parts.sampling(**knobs).probs(np.array(logits)))
            except TinyspecError:
                yield 0
                continue
            error = "an error: these logits define no distribution"
            accuse(WARP, error, got, logits=logits, sampling=knobs)


# ------------------------------------------------------------------ the residual


@collect_evidence(RESIDUAL)
def check_residual(parts: Parts) -> Iterator[int]:
    """Check that residual(p, q) is max(0, p - q) over its sum.

    Where p and q agree up to rounding, it is still a distribution within p.
    """
    half = [0.5, 0.5]
    close = [[1.0, 0.0], half, [np.nextafter(0.5, 0), np.nextafter(0.5, 1)], [0.25, 0.75]]
    for p, q in [
        *((a, b) for a in close for b in close),
        *((normalize_weights(a), normalize_weights(b)) for a, b in ROW_PAIRS),
    ]:
        arrays = [np.array(row, np.float64) for row in (p, q)]
        got = np.asarray(parts.residual(*arrays), np.float64)
        left = np.maximum(arrays[0] - arrays[1], 0)
        case = {"p": p, "q": q}
        if not (np.isfinite(got).all() and abs(got.sum() - 1) < 1e-9):
            accuse(RESIDUAL, "finite numbers that sum to 1", got, **case)
        if (got[arrays[0] == 0] > 0).any():
            accuse(RESIDUAL, "nothing where p is 0", got, **case)
        if left.sum() > 1e-9 and not np.allclose(got, left / left.sum(), rtol=0, atol=1e-12):
            accuse(RESIDUAL, left / left.sum(), got, **case)
        yield 0


# ------------------------------------------------------------------ edges


@collect_evidence(SUPPORT)
def support_law(parts: Parts) -> Iterator[int]:
    """Check that no token of probability zero is drawn, whatever the noise.

    Uniforms are 0 and 1 - 2^-53, the noise of a race is 0 and infinity.
    """
    for row, u in product([(0, 1), (1, 0), (0, 1, 0), (0, 1, 2, 0)], EDGES):
        token = parts.replay([u]).draw(normalize_weights(row))
        if row[token] == 0:
            accuse(SUPPORT, "a token that p allows", token, p=normalize_weights(row), uniform=u)
        yield 0
    for noise, row in product(
        product([0.0, -0.0, 5e-324, math.inf, 1.0], repeat=2), ((0, 1), (1, 0))
    ):
        token = parts.race(np.array(row, np.float64), np.array(noise))
        if not 0 <= token < 2 or row[token] == 0:
            accuse(SUPPORT, "a token that p allows", token, p=row, noise=noise)
        yield 0
    for (wp, wq), us in product(ROW_PAIRS, product(EDGES, repeat=2)):
        p, q = normalize_weights(wp), normalize_weights(wq)
        for x in (x for x in range(len(q)) if q[x] > 0):
            rows: Any = [p, p]
            verdict = parts.walk(TokenTree.chain([x], [q]), rows, parts.replay([*us, 0.0]))
            output = [x] * len(verdict.accepted) + ([] if verdict.next is None else [verdict.next])
            if any(p[token] == 0 for token in output):
                accuse(SUPPORT, "tokens that p allows", output, p=p, q=q, draft=[x], uniforms=us)
            yield 0


@collect_evidence(VOCABULARY)
def vocabulary_law(parts: Parts) -> Iterator[int]:
    """Check that an unknown draft id is an error, never a token.

    So is a draft distribution of another length.
    """
    half, third = normalize_weights((1, 1)), normalize_weights((1, 1, 1))
    rows: Any = {ROOT: half, 0: half}
    for token, q in ((-1, None), (2, None), (-1, half), (0, third), (0, normalize_weights((1,)))):
        tree = TokenTree.chain([token], [q])
        try:
            verdict = parts.walk(tree, rows, parts.replay([0.75, 0.5, 0.5]))
        except TinyspecError:
            yield 0
            continue
        error = "an error that names the token or the two sizes"
        accuse(VOCABULARY, error, verdict, p=half, q=q, draft=[token])


# ------------------------------------------------------------------ look-up


@collect_evidence(LOOKUP)
def lookup_is_a_search(parts: Parts) -> Iterator[int]:
    """Check the n-gram index against a search through the text: longest suffix, last occurrence."""
    suffix = "the last 3, then 2, then 1 tokens"
    for big in (2, 70_000):  # ids that do not fit into 16 bits as well
        for text in (t for n in range(2, 6) for t in product((1, big), repeat=n)):
            index = parts.index(3)
            index.append(0, text)
            expected: list[int] = []
            for n in (1, 2, 3):
                ends = [at for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
                if ends and n < len(text):
                    expected = list(text[ends[-1] : ends[-1] + 2])
            got = list(index.lookup(text, 2, 3, 1, "last"))
            expect_equal(LOOKUP, expected, got, text=text, suffix=suffix, k=2)
            yield 0


LAWS = {
    WARP: warp_is_its_definition,
    RESIDUAL: check_residual,
    SUPPORT: support_law,
    VOCABULARY: vocabulary_law,
    LOOKUP: lookup_is_a_search,
}


FOREST_COUNT = "a forest is a count of windows"
FOREST_DEPTH = 3

WindowCounts = Counter[tuple[int, ...]]


def count_windows(*texts: Sequence[int]) -> WindowCounts:
    """Return how often each window of up to FOREST_DEPTH tokens occurs."""
    spans = [
        (text, end, n)
        for text in texts
        for end in range(1, len(text) + 1)
        for n in range(1, min(FOREST_DEPTH, end) + 1)
    ]
    return Counter(tuple(text[end - n : end]) for text, end, n in spans)


def halve_counts(counts: WindowCounts) -> WindowCounts:
    """Return the counts halved and rounded down; what falls to 0 goes."""
    return Counter({window: count // 2 for window, count in counts.items() if count > 1})


def forest_windows(forest: Any, tree: int, ids: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Return all windows of two tokens and more of a forest, in its order, with their shares."""
    found: dict[tuple[int, ...], float] = {}
    for first in ids:
        tokens, parents, shares, _ = forest.gather([(tree, 99)], [first], 1, 1, FOREST_DEPTH)
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(tokens, parents, shares, strict=True):
            paths.append((*((first,) if parent < 0 else paths[parent]), token))
            found[paths[-1]] = share
    return found


def expect_counts(
    forest: Any, tree: int, counts: WindowCounts, text: Sequence[int], done: str
) -> None:
    """Raise LawViolated if a tree holds anything else than these counts."""
    case = {"texts": [text], "depth": FOREST_DEPTH, "done": done}
    ids = sorted({window[0] for window in counts} | {*text})
    got = forest_windows(forest, tree, ids)
    expected = dict[tuple[int, ...], float]()
    for window in sorted((window for window in counts if len(window) > 1), key=len):
        siblings = sum(count for other, count in counts.items() if other[:-1] == window[:-1])
        expected[window] = expected.get(window[:-1], 1.0) * counts[window] / siblings
    if {window: round(share, 9) for window, share in got.items()} != {
        w: round(s, 9) for w, s in expected.items()
    }:
        accuse(FOREST_COUNT, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
    for first in ids:
        order = [counts[window] for window in got if window[0] == first]
        if order != sorted(order, reverse=True):
            windows = [window for window in got if window[0] == first]
            accuse(FOREST_COUNT, "the most frequent window first", windows, **case)


@collect_evidence(FOREST_COUNT)
def forest_is_a_count(parts: Parts) -> Iterator[int]:
    """Check that each tree of a forest counts the windows of its own texts, and nothing else.

    What must be counted is counted anew from the texts of two owners, after histories of growing,
    rewinding, closing, halving and dropping. Texts have up to five tokens, smallest first, with ids
    that do not fit into 16 bits as well.
    """
    for big in (2, 70_000):
        for text in (t for n in range(2, 6) for t in product((1, big), repeat=n)):
            forest = parts.forest(FOREST_DEPTH, 999)
            own, other = forest.open(0), forest.open(1)
            once, twice = count_windows(text), count_windows(text, text)
            forest.append(own, text)
            forest.append(other, text[::-1])
            done = "text 1 was appended, in another tree it stands backward"
            expect_counts(forest, 0, once, text, done)
            forest.append(own, text)
            forest.rewind(own, len(text))
            done = "appended twice, and rewound to its first length"
            expect_counts(forest, 0, once, text, done)
            forest.drop(1)
            expect_counts(forest, 1, Counter(), text, "the other tree was dropped, and is read")
            forest.close(own)
            more = forest.open(0)
            forest.append(more, text)
            expect_counts(forest, 0, twice, text, "closed, and appended once more")
            forest.halve(0)
            expect_counts(forest, 0, once, text, "appended twice, and halved")
            forest.append(more, text)
            done = "appended twice, halved, and appended to the second text again"
            expect_counts(forest, 0, twice, text, done)
            forest.halve(0)
            forest.halve(0)
            halved = halve_counts(halve_counts(twice))
            expect_counts(forest, 0, halved, text, "as before, and halved twice")
            yield 0


FOREST_LAWS = {FOREST_COUNT: forest_is_a_count}
