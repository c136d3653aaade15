"""Suffix arrays and retrievals with one defect each: what is found is not what followed the longest
match, by weight.
"""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from tinyspec._core import retrieve, suffix_order
from tinyspec._core.reference_suffixes import DEPTH
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts

whole: Any = retrieve  # its arguments are passed on as they come


def sixteen_bits(tokens: Any, order: Any, suffix: Any, *knobs: int) -> Any:
    narrow = (tokens & 0xFFFF).astype(np.int32)  # right: tokens
    return whole(narrow, suffix_order(narrow), [token & 0xFFFF for token in suffix], *knobs)


def shortest_first(
    tokens: Any, order: Any, suffix: Any, shortest: int, longest: int, *knobs: int
) -> Any:
    found = whole(tokens, order, suffix, shortest, longest, *knobs)
    return found and whole(
        tokens, order, suffix, shortest, shortest, *knobs
    )  # right: from the longest down


def across_documents(tokens: Any, order: Any, suffix: Any, *knobs: int) -> Any:
    joined = np.where(tokens < 0, 0, tokens).astype(np.int32)  # right: tokens
    return whole(joined, suffix_order(joined), suffix, *knobs)


def unweighted(tokens: Any, order: Any, suffix: Any, *knobs: int) -> Any:
    """The continuations as they come, until the tree is full."""
    *given, most = knobs
    n, found, up, weights = whole(tokens, order, suffix, *given, 1 << 20)
    spelled: list[tuple[int, ...]] = []
    for token, parent in zip(found, up, strict=True):
        spelled.append((*(spelled[parent] if parent >= 0 else ()), token))
    kept = sorted(range(len(spelled)), key=spelled.__getitem__)[:most]  # right: the heaviest
    place = {node: at for at, node in enumerate(kept)} | {-1: -1}
    return n, [found[i] for i in kept], [place[up[i]] for i in kept], [weights[i] for i in kept]


def weighed_at_the_end(tokens: Any, order: Any, suffix: Any, *knobs: int) -> Any:
    """Only whole continuations are counted, so a common beginning of different ones weighs nothing
    more.
    """
    n, found, up, weights = whole(tokens, order, suffix, *knobs)
    below = Counter[int]()
    for parent, weight in zip(up, weights, strict=True):
        below[parent] += weight
    return n, found, up, [max(w - below[i], 1) for i, w in enumerate(weights)]  # right: weights


def the_first_matches(tokens: Any, order: Any, suffix: Any, *knobs: int) -> Any:
    found, matches = whole(tokens, order, suffix, *knobs), knobs[-2]
    m, end = found[0], list(suffix)[len(suffix) - found[0] :]
    ends = [
        p
        for p in order
        if m and tokens[p : p + m].tolist() == end and (tokens[p + m : p + m + 1] >= 0).any()
    ]
    if len(ends) <= matches:
        return found
    few = np.concatenate(
        [[*tokens[p : p + m + knobs[2]], -1] for p in ends[:matches]]
    )  # right: evenly spaced ones
    few = few.astype(np.int32)
    return whole(few, suffix_order(few), suffix, *knobs)


def by_the_first_token(tokens: Any, tell: Any = None) -> Any:
    places = sorted(range(len(tokens)), key=lambda place: int(tokens[place]))  # right: DEPTH tokens
    return np.array(places, np.int32)


def late_places_first(tokens: Any, tell: Any = None) -> Any:
    """Equal stretches in the reverse order of the text."""
    spelled = lambda place: tokens[place : place + DEPTH].tolist()  # noqa: E731
    groups = groupby(suffix_order(tokens).tolist(), key=spelled)
    return np.array(
        [place for _, group in groups for place in reversed(list(group))], np.int32
    )  # right: in order


def seen(parts: Parts) -> Any:
    """The order of a text that repeats, and what followed in it."""
    text = np.array(
        [7, 1, 2, 4, -1, 7, 1, 2, 5, -1, 7, 1, 3, 9, -1, 7, 1, -1, 5, 1, 0, 65543, 1, 8, 3]
        + [6] * 70,
        np.int32,
    )
    order, find = suffix_order(text), parts.kernels["retrieve"]
    asked = (
        ([7, 1], 1, 4, 3, 9, 3),
        ([7, 1], 1, 4, 3, 1, 9),
        ([1], 1, 4, 3, 2, 9),
        ([3], 1, 4, 3, 9, 2),
    )
    return parts.kernels["suffix_order"](text).tolist(), [find(text, order, *one) for one in asked]


def _find(name: str, bug: str, kernel: Any, which: str = "retrieve") -> Mutant:
    return Mutant(name, bug, "twin", replace(PARTS, kernels={**PARTS.kernels, which: kernel}), seen)


MUTANTS = [
    _find("a datastore's ids in 16 bits", "B35", sixteen_bits),
    _find("the shortest match is continued", "slip", shortest_first),
    _find("a continuation runs into the next document", "slip", across_documents),
    _find("a tree of what comes first, not of what is heaviest", "slip", unweighted),
    _find("a beginning weighs as its own end", "slip", weighed_at_the_end),
    _find("the first matches instead of evenly spaced ones", "slip", the_first_matches),
    _find("places sorted by their first token", "slip", by_the_first_token, "suffix_order"),
    _find("equal places in reverse", "slip", late_places_first, "suffix_order"),
]
