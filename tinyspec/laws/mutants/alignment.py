"""Word alignment with one defect each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from tinyspec.laws.alignment_laws import CORPORA, EM, KNOWN, TWICE
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.training import aligner
from tinyspec.training.aligner import Aligned, align


def _counting(count: Callable[[Any, Any, Any], Any]) -> Callable[..., Aligned]:
    """The aligner, its counts made otherwise."""

    def other(*sides: Any, **rounds: Any) -> Aligned:
        with patch.object(aligner, "_normalised", count):
            return align(*sides, **rounds)

    return other


def one_more(entry: Any, share: Any, group: Any) -> Any:
    counts = np.bincount(entry, share, len(group)) + 1.0  # right: what was counted, no more
    return counts / np.bincount(group, counts)[group]


def winners(entry: Any, share: Any, group: Any) -> Any:
    counts = np.bincount(entry, np.round(share), len(group)) + 1e-9  # right: every share counts
    return counts / np.bincount(group, counts)[group]


def of_all(entry: Any, share: Any, group: Any) -> Any:
    counts = np.bincount(entry, share, len(group))
    return counts / counts.sum()  # right: within what each source word, or each place, produced


def words_alone(source: Any, target: Any, rounds: int = 5, placed: int = 5) -> Aligned:
    return align(source, target, rounds=rounds, placed=0)  # right: model 2 behind model 1


def from_the_end(*sides: Any, **rounds: Any) -> Aligned:
    found = align(*sides, **rounds)
    return found._replace(
        links=[link[::-1] for link in found.links]
    )  # right: in the target's order


def with_null(*sides: Any, **rounds: Any) -> Aligned:
    found = align(*sides, **rounds)
    return found._replace(
        links=[link + 1 for link in found.links]
    )  # right: NULL is no place of the source


def found(parts: Parts) -> Any:
    """Links and likelihood of small corpora."""
    made = [parts.align(*sides) for sides in (*CORPORA, TWICE)]
    return [([link.tolist() for link in one.links], one.likelihood) for one in made]


def _mutant(name: str, law: str, function: Callable[..., Aligned]) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, align=function), found)


MUTANTS = [
    _mutant("every count is one too many", EM, _counting(one_more)),
    _mutant("only the likeliest source of a word is counted", EM, _counting(winners)),
    _mutant("counts are normalised over all words together", EM, _counting(of_all)),
    _mutant("no model 2", KNOWN, words_alone),
    _mutant("links from the end of the target", KNOWN, from_the_end),
    _mutant("places counted from NULL", KNOWN, with_null),
]
