"""Rollbacks of the Big Little Decoder with one defect each: what is bad, where it is cut, and who
writes that place.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinyspec.decoding.decode import TargetProbs, Verifier
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.loop_laws import model
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.laws.toys.bild import ALGORITHM, CAP, policed, settings
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree


def right_trust(p: TargetProbs, at: int, node: int, token: int) -> Any:
    """What the large model gives a token, before temperature and filters."""
    return p.probs_under(at, SamplingParams())[token]


def right_writer(p: TargetProbs, at: int, node: int, rng: RandomSource) -> int:
    """The large model's own token in a place."""
    return rng.draw(p[at])


def rollback(
    trust: Callable[..., Any] = right_trust,
    writer: Callable[..., int] = right_writer,
    bad: Callable[[Any, float], bool] = lambda trusted, least: trusted < least,
    kept: int = 0,
    push_back: bool = False,
) -> Callable[[float, str], Verifier]:
    """A rollback policy that decides so.

    kept    tokens of the bad place on that stay
    unread  where the large model agrees with the first bad token, the rest stays unread
    """

    def make(distance: float, rule: str) -> Verifier:
        least = math.exp(-distance)

        def review(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
            for node, token in enumerate(tree.tokens):
                if bad(trust(p, node - 1, node, token), least):
                    said = writer(p, node - 1, node, rng)
                    if rule == "paper" or said != token:
                        return Verdict(tuple(range(node + kept)), said, (node,))
                    if push_back:
                        break
            last = len(tree.tokens) - 1 if tree.tokens else ROOT
            return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[last]))

        return review

    return make


def sharpened(p: TargetProbs, at: int, node: int, token: int) -> Any:
    return p[at][token]  # right: under the law before temperature and filters


def row_behind(p: TargetProbs, at: int, node: int, token: int) -> Any:
    return p.probs_under(node, SamplingParams())[
        token
    ]  # right: the row of the place where the token stands


def against_the_best(p: TargetProbs, at: int, node: int, token: int) -> Any:
    row = p.probs_under(at, SamplingParams())
    return row[token] / max(row)  # right: the probability itself


def small_stays(p: TargetProbs, at: int, node: int, rng: RandomSource) -> int:
    return p.tree.tokens[node]  # right: the large model writes where it took back


def writes_behind(p: TargetProbs, at: int, node: int, rng: RandomSource) -> int:
    return rng.draw(p[node])  # right: the law of the place, not of the one behind it


def _rollback(name: str, bug: str = "slip", **defect: Any) -> Mutant:
    return Mutant(name, bug, ALGORITHM, replace(PARTS, rollback=rollback(**defect)), outcomes)


def outcomes(parts: Parts) -> Any:
    """The texts of three rounds at temperature 0, for every setting of the trap."""
    texts = []
    for p, q, fallback, distance, rule in settings():
        request = Request(model(p).session(), [model(q).session()], SamplingParams(0.0))
        decoder = policed(parts.rollback)(
            request, fallback=fallback, rollback=distance, rule=rule, gamma=CAP
        )
        decoder.extend((0,))
        texts.append([decoder.step(Seeded(0)).tokens for _ in range(3)])
    return texts


MUTANTS = [
    _rollback("distance under the user's temperature", trust=sharpened),
    _rollback("distance by the row behind the token", trust=row_behind),
    _rollback("distance to the likeliest token", trust=against_the_best),
    _rollback("a certain token is bad", bad=lambda trusted, least: trusted <= least),
    _rollback("the bad token stays", kept=1),
    _rollback("the bad token is written again", writer=small_stays),
    _rollback("the large model writes the place behind", writer=writes_behind),
    _rollback("the block stays unread behind a bad token", push_back=True),
]
