"""What a coupling on shared noise promises (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

Noise is continuous, so nothing here is enumerated: tokens are compared seed by seed, guesses
uniform by uniform, and the probability of agreement with an area that is measured.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.loop_laws import Table, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.small import Exact, distribution_pairs, overlap_mass
from tinyspec.technique import Request

COUPLING_INVARIANT = "on one seed the text is one, whoever drafts (arXiv 2408.07978)"
COUPLING_AGREES = "a guess is kept where both races on the noise of its position have one winner (arXiv 2408.07978)"
COUPLING_FORMULA = (
    "P(same) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) >= (1 - TV) / (1 + TV) (arXiv 2408.07978)"
)

Build = Callable[..., Decoder]

COUPLING_TARGET: Table = ((1, 2, 3), (3, 1, 2), (2, 0, 1))
COUPLING_DRAFTS: Sequence[Table | None] = (
    None,
    COUPLING_TARGET,
    ((1, 1, 1),),
    ((3, 1, 0), (0, 1, 1), (1, 5, 1)),
)


def same_text_whoever_drafts(build: Build, seeds: int = 12, tokens: int = 8) -> Evidence:
    """The tokens are those that win the races of the target's rows, with each draft model and with
    none.
    """
    begun, seen = perf_counter(), 0
    for seed, gamma, q in product(range(seeds), (1, 3), COUPLING_DRAFTS):
        drafts = [] if q is None else [table_model(q).session()]
        decoder = build(
            Request(
                table_model(COUPLING_TARGET).session(),
                drafts,
                SamplingParams(),
                StoppingCriteria(max_new_tokens=tokens),
            ),
            gamma=gamma,
        )
        decoder.extend((0,))
        rng, races, text = Seeded(seed), Seeded(seed), [0]
        while not decoder.finished:
            decoder.step(rng)
        while len(text) <= tokens:
            text.append(
                races.exponential_race(
                    [float(x) for x in normalised(COUPLING_TARGET[text[-1]])], len(text)
                )
            )
        seen += 1
        if decoder.context != text:
            accuse(
                COUPLING_INVARIANT,
                text,
                decoder.context,
                p=format_table(COUPLING_TARGET),
                q=None if q is None else format_table(q),
                gamma=gamma,
                seed=seed,
            )
    return Evidence(COUPLING_INVARIANT, seen, seen, perf_counter() - begun)


def draft_kept_where_winners_agree(build: Build, grid: int = 12) -> Evidence:
    """One guess over two tokens, for a grid of uniforms that make the noise of its position: E =
    -log(1 - u).
    """
    begun, seen = perf_counter(), 0
    for p, q in (((1, 1), (1, 3)), ((1, 4), (3, 2)), ((0, 1), (1, 1))):
        for i, j in product(range(grid), repeat=2):
            uniforms = [(i + 0.5) / grid, (j + 0.35) / grid]
            decoder = build(
                Request(table_model((p,)).session(), [table_model((q,)).session()]), gamma=1
            )
            decoder.extend((0,))
            round = decoder.step(Replay([*uniforms, *[0.5] * 9]))
            winners = [min((-math.log1p(-u) / x, t) for t, (u, x) in enumerate(zip(uniforms, row, strict=True)) if x)[1]
                       for row in (p, q)]  # fmt: skip
            expected = {"said": winners[0], "kept": winners[0] == winners[1]}
            got = {"said": round.tokens[0], "kept": bool(round.verdict.accepted)}
            seen += 1
            if got != expected:
                accuse(
                    COUPLING_AGREES,
                    expected,
                    got,
                    p=normalised(p),
                    q=normalised(q),
                    uniforms=uniforms,
                )
    return Evidence(COUPLING_AGREES, seen, seen, perf_counter() - begun)


def agreement_formula(agreement: Callable[[Any, Any], Any], largest: int = 5) -> Evidence:
    """P(same) as a number, against the share of noise on which both races have one winner, and
    between its bounds.

    Over two tokens the noise matters by its ratio alone: the races differ between two thresholds, a
    set of probability TV. Over three, exponentials divided by their sum are uniform on the
    triangle, and the share is an area.
    """
    begun, seen = perf_counter(), 0
    for p, q in distribution_pairs(largest=largest):
        got, same = agreement(list(p), list(q)), overlap_mass(p, q)
        expected, within = (same, 0.0) if len(p) == 2 else (_agreement_area(p, q), 0.03)
        seen += 1
        if abs(got - expected) > within:
            accuse(COUPLING_FORMULA, expected, got, p=p, q=q)
        if not same / (2 - same) <= got <= same:  # TV = 1 - same
            accuse(COUPLING_FORMULA, f"from {same / (2 - same)} to {same}", got, p=p, q=q)
    return Evidence(COUPLING_FORMULA, seen, 0, perf_counter() - begun)


def _agreement_area(p: Exact, q: Exact, grid: int = 90) -> float:
    """The share of the triangle where argmin E / p is argmin E / q, by the middles of a grid's
    cells.
    """
    at = (np.arange(grid) + 0.5) / grid
    x, y = (side.ravel() for side in np.meshgrid(at, at))
    x, y = (
        np.where(x + y > 1, 1 - x, x),
        np.where(x + y > 1, 1 - y, y),
    )  # the square's other half folded over
    noise = np.stack([x, y, 1 - x - y])
    winners = [np.stack([e / float(w) if w else e + np.inf for e, w in zip(noise, row, strict=True)]).argmin(axis=0)
               for row in (p, q)]  # fmt: skip
    return float((winners[0] == winners[1]).mean())
