"""The law of a forest: each of its trees is a count of the windows of its own texts, and of nothing
else.

What must be counted is counted here anew from the texts, after every history of growing, taking
back, closing, halving and dropping that is looked at; what a forest tells of it are its drafts:
tokens in the order of their counts, with their shares.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts

FOREST_COUNT = "a forest is a count of windows"
FOREST_DEPTH = 3

WindowCounts = Counter[tuple[int, ...]]


def count_windows(*texts: Sequence[int]) -> WindowCounts:
    """How often each window of up to DEPTH tokens occurs."""
    spans = [
        (text, end, n)
        for text in texts
        for end in range(1, len(text) + 1)
        for n in range(1, min(FOREST_DEPTH, end) + 1)
    ]
    return Counter(tuple(text[end - n : end]) for text, end, n in spans)


def halve_counts(counts: WindowCounts) -> WindowCounts:
    """Rounded down; what falls to 0 goes."""
    return Counter({window: count // 2 for window, count in counts.items() if count > 1})


def forest_windows(forest: Any, tree: int, ids: Sequence[int]) -> dict[tuple[int, ...], float]:
    """All windows of two tokens and more that a forest knows, in its order, with the share of each
    behind its first token.
    """
    found: dict[tuple[int, ...], float] = {}
    for first in ids:
        tokens, parents, shares, _ = forest.gather([(tree, 99)], [first], 1, 1, FOREST_DEPTH)
        paths: list[tuple[int, ...]] = []
        for token, parent, share in zip(tokens, parents, shares, strict=True):
            paths.append((*((first,) if parent < 0 else paths[parent]), token))
            found[paths[-1]] = share
    return found


def expect_counts(forest: Any, tree: int, counts: WindowCounts, **case: Any) -> None:
    """Accuse a tree that tells anything else than these counts."""
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
    """Two owners, texts of up to five tokens, smallest first; ids that do not fit into 16 bits as
    well.
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
