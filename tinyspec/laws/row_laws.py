"""Laws of what acts on one row: warpers, residual, drawing, unknown ids, look-up, counts.

Each law takes a `Parts`, tries its cases smallest first, raises `LawViolated` with the first that
breaks it, and returns `Evidence`. The definitions they compare with are written here from the
papers' formulas and call nothing of the library.
"""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import apply_warpers
from tinyspec.laws.parts import Parts
from tinyspec.tree import ROOT, TokenTree

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


def normalised(weights: Sequence[int]) -> list[Fraction]:
    """Return weights as a distribution."""
    return [Fraction(w, sum(weights)) for w in weights]


# ------------------------------------------------------------------ warpers


def warp_is_its_definition(parts: Parts) -> Evidence:
    """Check temperature, top-k, top-p and min-p, in Fractions and floats; NaN and +inf are
    errors."""
    name, cases = "warp is its definition", 0
    got: Any
    for weights in ((1, 2), (2, 2), (1, 1, 1), (1, 2, 3), (2, 1, 2), (3, 1, 2, 3)):
        for knobs in ROW_KNOBS:
            sampling, cases = parts.sampling(**knobs), cases + 1
            expected = apply_warpers(normalised(weights), (), SamplingParams(**knobs))
            got = list(sampling.probs([Fraction(w) for w in weights]))
            if got != expected:
                accuse(name, expected, got, weights=weights, sampling=knobs)
            floats = sampling.probs(np.log(np.array(weights, np.float64)))
            if not np.allclose(floats, np.array(expected, np.float64), rtol=0, atol=1e-12):
                accuse(name, expected, floats, logits=[f"log {w}" for w in weights], sampling=knobs)
    for logits, history in product(([1.0, -1.0], [2.0, 0.5, -1.0]), ((), (0,), (1, 1), (0, 0, 1))):
        for knobs in PENALTIES:
            cases, got = cases + 1, parts.sampling(**knobs).probs(np.array(logits), history)
            expected = apply_warpers(np.array(logits), history, SamplingParams(**knobs))
            if not np.allclose(got, expected, rtol=0, atol=1e-12):
                accuse(name, expected, got, logits=logits, history=history, sampling=knobs)
    for logits in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]):
        for knobs in ({}, {"temperature": 0.0}):
            cases += 1
            try:
                got = list(parts.sampling(**knobs).probs(np.array(logits)))
            except TinyspecError:
                continue
            accuse(name, "an error: these logits define no law", got, logits=logits, sampling=knobs)
    return Evidence(name, cases)


# ------------------------------------------------------------------ the residual


def residual_is_a_law(parts: Parts) -> Evidence:
    """Check that residual(p, q) is max(0, p - q) over its sum.

    Where p and q agree up to rounding, it is still a distribution within p.
    """
    name, cases = "residual is a law", 0
    half = [0.5, 0.5]
    close = [[1.0, 0.0], half, [np.nextafter(0.5, 0), np.nextafter(0.5, 1)], [0.25, 0.75]]
    for p, q in [
        *((a, b) for a in close for b in close),
        *((normalised(a), normalised(b)) for a, b in ROW_PAIRS),
    ]:
        cases += 1
        arrays = [np.array(row, np.float64) for row in (p, q)]
        got = np.asarray(parts.residual(*arrays), np.float64)
        left = np.maximum(arrays[0] - arrays[1], 0)
        case = {"p": p, "q": q}
        if not (np.isfinite(got).all() and abs(got.sum() - 1) < 1e-9):
            accuse(name, "finite numbers that sum to 1", got, **case)
        if (got[arrays[0] == 0] > 0).any():
            accuse(name, "nothing where p is 0", got, **case)
        if left.sum() > 1e-9 and not np.allclose(got, left / left.sum(), rtol=0, atol=1e-12):
            accuse(name, left / left.sum(), got, **case)
    return Evidence(name, cases)


# ------------------------------------------------------------------ edges


def support_law(parts: Parts) -> Evidence:
    """Check that no token of probability zero is drawn, whatever the noise.

    Uniforms are 0 and 1 - 2^-53, the noise of a race is 0 and infinity.
    """
    name, cases = "support", 0
    for row, u in product([(0, 1), (1, 0), (0, 1, 0), (0, 1, 2, 0)], EDGES):
        cases += 1
        token = parts.replay([u]).draw(normalised(row))
        if row[token] == 0:
            accuse(name, "a token that p allows", token, p=normalised(row), uniform=u)
    for noise, row in product(
        product([0.0, -0.0, 5e-324, math.inf, 1.0], repeat=2), ((0, 1), (1, 0))
    ):
        cases += 1
        token = parts.race(np.array(row, np.float64), np.array(noise))
        if not 0 <= token < 2 or row[token] == 0:
            accuse(name, "a token that p allows", token, p=row, noise=noise)
    for (wp, wq), us in product(ROW_PAIRS, product(EDGES, repeat=2)):
        p, q = normalised(wp), normalised(wq)
        for x in (x for x in range(len(q)) if q[x] > 0):
            cases += 1
            verdict = parts.walk(TokenTree.chain([x], [q]), [p, p], parts.replay([*us, 0.0]))  # type: ignore[arg-type]
            said = [x] * len(verdict.accepted) + ([] if verdict.next is None else [verdict.next])
            if any(p[token] == 0 for token in said):
                accuse(name, "tokens that p allows", said, p=p, q=q, draft=[x], uniforms=us)
    return Evidence(name, cases)


def vocabulary_law(parts: Parts) -> Evidence:
    """Check that an unknown draft id, or a draft row of another length, is an error, never a
    token."""
    name, cases = "vocabulary", 0
    half, third = normalised((1, 1)), normalised((1, 1, 1))
    for token, q in ((-1, None), (2, None), (-1, half), (0, third), (0, normalised((1,)))):
        cases += 1
        tree = TokenTree.chain([token], [q])
        try:
            verdict = parts.walk(tree, {ROOT: half, 0: half}, parts.replay([0.75, 0.5, 0.5]))  # type: ignore[arg-type]
        except TinyspecError:
            continue
        accuse(
            name,
            "an error that names the token or the two sizes",
            verdict,
            p=half,
            q=q,
            draft=[token],
        )
    return Evidence(name, cases)


# ------------------------------------------------------------------ look-up


def lookup_is_a_search(parts: Parts) -> Evidence:
    """Check the n-gram index against a search through the text: longest suffix, last occurrence."""
    name, cases = "lookup is a search", 0
    for big in (2, 70_000):  # ids that do not fit into 16 bits as well
        for text in (t for n in range(2, 6) for t in product((1, big), repeat=n)):
            index, cases = parts.index(3), cases + 1
            index.append(0, text)
            expected: list[int] = []
            for n in (1, 2, 3):
                ends = [at for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
                expected = (
                    list(text[ends[-1] : ends[-1] + 2]) if ends and n < len(text) else expected
                )
            got = list(index.lookup(text, 2, 3, 1, "last"))
            if got != expected:
                accuse(
                    name, expected, got, text=text, suffix="the last 3, then 2, then 1 tokens", k=2
                )
    return Evidence(name, cases)


LAWS = {
    "warp is its definition": warp_is_its_definition,
    "residual is a law": residual_is_a_law,
    "support": support_law,
    "vocabulary": vocabulary_law,
    "lookup is a search": lookup_is_a_search,
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


def expect_counts(forest: Any, tree: int, counts: WindowCounts, **case: Any) -> None:
    """Raise LawViolated if a tree tells anything else than these counts."""
    ids = sorted(
        {window[0] for window in counts} | {token for text in case["texts"] for token in text}
    )
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
            accuse(
                FOREST_COUNT,
                "the most frequent window first",
                [w for w in got if w[0] == first],
                **case,
            )


def forest_is_a_count(parts: Parts) -> Evidence:
    """Check that each tree of a forest counts the windows of its own texts, and nothing else.

    What must be counted is counted anew from the texts of two owners, after histories of growing,
    rewinding, closing, halving and dropping. Texts have up to five tokens, smallest first, with ids
    that do not fit into 16 bits as well.
    """
    cases = 0
    for big in (2, 70_000):
        for text in (t for n in range(2, 6) for t in product((1, big), repeat=n)):
            cases += 1
            case: dict[str, Any] = {"texts": [text], "depth": FOREST_DEPTH}
            forest = parts.forest(FOREST_DEPTH, 999)
            own, other = forest.open(0), forest.open(1)
            forest.append(own, text)
            forest.append(other, text[::-1])
            expect_counts(
                forest,
                0,
                count_windows(text),
                **case,
                done="text 1 was appended, in another tree it stands backward",
            )
            forest.append(own, text)
            forest.rewind(own, len(text))
            expect_counts(
                forest,
                0,
                count_windows(text),
                **case,
                done="appended twice, and taken back to its first length",
            )
            forest.drop(1)
            expect_counts(
                forest, 1, Counter(), **case, done="the other tree was dropped: it is looked at"
            )
            forest.close(own)
            more = forest.open(0)
            forest.append(more, text)
            expect_counts(
                forest, 0, count_windows(text, text), **case, done="closed, and said once more"
            )
            forest.halve(0)
            expect_counts(forest, 0, count_windows(text), **case, done="said twice, and halved")
            forest.append(more, text)
            both = count_windows(text) + count_windows(text)
            expect_counts(
                forest,
                0,
                both,
                **case,
                done="said twice, halved, and the second text goes on with it again",
            )
            forest.halve(0)
            forest.halve(0)
            expect_counts(
                forest,
                0,
                halve_counts(halve_counts(both)),
                **case,
                done="as before, and halved twice",
            )
    return Evidence(FOREST_COUNT, cases)


FOREST_LAWS = {FOREST_COUNT: forest_is_a_count}
