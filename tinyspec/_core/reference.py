"""The twin of the compiled kernels: plain Python over any number type.

These lines are the definition. Over Fractions they are exact and serve the proofs; over floats they
fix the order of every sum, so sampling.pyx must reproduce them bit for bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

from tinyspec._core.reference_exp import exponential
from tinyspec.errors import TinyspecError

Number = Any  # float, int or Fraction: the same lines run over each of them

BLOCK, LANES = 256, 8
ROOT = -1


def sum_block(block: Sequence[Number]) -> Number:
    """Return the sum of one block in eight strided lanes: a fixed order that SIMD can follow. O(n).

    The built-in `sum` will not do: since Python 3.12 it compensates its rounding errors.
    """
    a, b, c, d, e, f, g, h = (reduce(add, block[lane::LANES], 0) for lane in range(LANES))
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def ordered_sum(row: Sequence[Number]) -> Number:
    """Return the sum over blocks of 256 in order, lanes inside. O(V). Fractions need no order."""
    if len(row) and all(type(x) is Fraction for x in row):
        return sum_fractions(row)
    return reduce(add, (sum_block(row[i : i + BLOCK]) for i in range(0, len(row), BLOCK)), 0)


def sum_fractions(row: Sequence[Fraction]) -> Fraction:
    """Return the sum of Fractions, over a common denominator.

    >>> sum_fractions([Fraction(1, 3), Fraction(1, 6), Fraction(0)])
    Fraction(1, 2)
    """
    above, below = 0, 1
    for x in row:
        if x.denominator == below:
            above += x.numerator
        elif x.numerator:
            above, below = above * x.denominator + x.numerator * below, below * x.denominator
    return Fraction(above, below)


def normalize(row: Sequence[Number]) -> list[Number] | None:
    """Return the row divided by its sum, or None if the sum is 0. O(V)."""
    mass = ordered_sum(row)
    if mass == 1:
        return list(row)
    return [x / mass for x in row] if mass > 0 else None


# --- sampling


def check_uniform(u: Number) -> None:
    """Raise TinyspecError unless 0 <= u < 1."""
    if not 0 <= u < 1:
        raise TinyspecError(f"a uniform must be at least 0 and below 1, got {u}")


def sample_inverse_cdf(row: Sequence[Number], u: Number) -> int:
    """Return the token whose interval of the cumulative sum holds u * total, 0 <= u < 1. O(V).

    A token of probability 0 is never returned: an interval ends only at a strictly larger sum. If
    rounding puts u after the last interval, the last token of positive probability is returned.

    >>> draw = sample_inverse_cdf
    >>> draw([0.0, 0.25, 0.75], 0.0), draw([0.0, 0.25, 0.75], 0.25)
    (1, 2)
    >>> draw([0.5, 0.5, 0.0], 1 - 2**-53)
    1
    """
    check_uniform(u)
    sums = [sum_block(row[i : i + BLOCK]) for i in range(0, len(row), BLOCK)]
    mass = reduce(add, sums, 0)
    if not 0 < mass < math.inf:
        raise TinyspecError(
            f"cannot draw from a row whose sum is {mass}: "
            "a distribution must be finite and have some mass"
        )
    target = u * mass
    before: Number = 0
    start, stop = 0, len(row)
    for index, part in enumerate(sums):
        after = before + part
        if after > target:
            start, stop = index * BLOCK, min(index * BLOCK + BLOCK, len(row))
            for token in range(start, stop):
                before = before + row[token]
                if before > target:
                    return token
            break  # added one by one, the block sums to less than in lanes: its last token it is
        before = after
    return next(token for token in range(stop - 1, start - 1, -1) if row[token] > 0)


def sample_without_replacement(row: Sequence[Number], uniforms: Sequence[Number]) -> list[int]:
    """Return one token for each uniform, without replacement, until none is left. O(V + k V/B)."""
    left, drawn = list(row), list[int]()
    for u in uniforms:
        if not any(x > 0 for x in left):
            break
        drawn.append(sample_inverse_cdf(left, u))
        left[drawn[-1]] = 0 * left[drawn[-1]]
    return drawn


def exponential_race(row: Sequence[Number], noise: Sequence[Number]) -> int:
    """Return argmin noise[i] / row[i] over the support, lowest id first: an exponential race. O(V).

    With standard exponential noise the result is a sample from the row. Noise of exactly 0 or inf
    must not select a token of probability 0.
    """
    best, time = -1, math.inf
    for token, (x, e) in enumerate(zip(row, noise, strict=True)):
        if x > 0 and (best < 0 or e / x < time):
            best, time = token, e / x
    if best < 0:
        raise TinyspecError("cannot race a row without mass")
    return best


# --- from logits to a distribution


def penalize_repetition(
    logits: Sequence[float], history: Sequence[int], penalty: float
) -> list[float]:
    """Return the logits after the repetition penalty, applied once to each distinct id in range."""
    scores = list(logits)
    if penalty != 1.0:
        for token in history:
            if 0 <= token < len(scores):
                x = float(logits[token])  # the original: a repeated id is penalised once
                scores[token] = x * penalty if x < 0 else x / penalty
    return scores


def highest_logit(scores: Sequence[float]) -> float:
    """Return the largest score. Raises TinyspecError for no score, NaN, +inf and only -inf."""
    if not scores:
        raise TinyspecError("the logits are empty, so they define no distribution")
    if any(x != x for x in scores):
        raise TinyspecError(
            "the logits contain NaN: check the weights, or compute in a wider dtype"
        )
    top = max(scores)
    if math.isinf(top):
        what = "contain +inf" if top > 0 else "are all -inf: no token is allowed"
        raise TinyspecError(f"the logits {what}, so they define no distribution")
    return top


def keep_top_mass(row: Sequence[Number], masses: Sequence[Number], need: Number) -> list[Number]:
    """Keep the tokens of highest weight, ties by lowest id, until their masses reach `need`."""
    reached: Number = 0
    kept = [0 * x for x in row]
    for token in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        kept[token] = row[token]
        reached = reached + masses[token]
        if reached >= need:
            break
    return kept


def order_free_masses(row: Sequence[Number]) -> list[Number]:
    """Return masses whose sum does not depend on the order: floats in [0, 1] become integers.

    A kernel can then search for the nucleus without sorting. The integers sum to less than 2^62.
    """
    if any(isinstance(x, Fraction) for x in row):
        return list(row)
    scale = float(1 << (62 - len(row).bit_length()))
    return [int(x * scale) for x in row]


def filter_tokens(
    row: Sequence[Number], top_k: int | None, top_p: Number, min_p: Number
) -> list[Number]:
    """Apply top-k, then top-p, then min-p to weights of at most 1. O(V log V)."""
    kept = list(row)
    if top_k is not None and top_k < len(kept):
        kept = keep_top_mass(kept, [1] * len(kept), top_k)
    if top_p is not None and top_p < 1:
        masses = order_free_masses(kept)
        whole: Number = reduce(add, masses, 0)
        need = top_p * whole if isinstance(whole, Fraction) else math.ceil(top_p * float(whole))
        kept = keep_top_mass(kept, masses, min(need, whole))
    if min_p is not None and min_p > 0:
        floor = min_p * max(kept)
        kept = [x if x >= floor else 0 * x for x in kept]
    return kept


def one_hot(row: Sequence[Number]) -> list[Number]:
    """Return all mass on the highest weight, ties by lowest id: temperature 0."""
    best = max(range(len(row)), key=lambda i: (row[i], -i))
    one = Fraction(1) if isinstance(row[best], Fraction) else 1.0
    return [one if i == best else 0 * one for i in range(len(row))]


def check_settings(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> None:
    """Raise TinyspecError for settings without a meaning; `not` so that NaN is caught too."""
    if not 0 <= temperature < math.inf:
        raise TinyspecError(f"temperature must be finite and at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise TinyspecError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise TinyspecError(f"top_p must be above 0 and at most 1, got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise TinyspecError(f"min_p must be between 0 and 1, got {min_p}")
    if not 0 < penalty < math.inf:
        raise TinyspecError(f"the repetition penalty must be finite and above 0, got {penalty}")


def apply_sampling(
    logits: Sequence[float],
    history: Sequence[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    penalty: float,
) -> list[float]:
    """Return logits as a distribution: repetition penalty, temperature, top-k, top-p, min-p."""
    check_settings(temperature, top_k, top_p, min_p, penalty)
    scores = penalize_repetition(logits, history, penalty)
    top = highest_logit(scores)
    if temperature == 0:
        return one_hot(scores)
    weights = exponential([(x - top) / temperature for x in scores])  # the top weight is exactly 1
    row = normalize(filter_tokens(weights, top_k, top_p, min_p))
    assert row is not None  # the top token is always kept
    return row


# --- verifying


def unnormalized_residual(
    row: Sequence[Number], q: Sequence[Number] | None, token: int
) -> list[Number]:
    """Return max(0, row - q), not normalised; a q of None is a point mass at `token`. O(V)."""
    if q is None:
        return [0 * x if i == token else x for i, x in enumerate(row)]
    if len(row) != len(q):
        raise TinyspecError(
            f"the draft's distribution has {len(q)} tokens, the target's {len(row)}: "
            "pad it with zeros"
        )
    return [x - y if x > y else 0 * x for x, y in zip(row, q, strict=True)]


def residual(row: Sequence[Number], q: Sequence[Number]) -> list[Number]:
    """Return the target's distribution after a rejection: normalise(max(0, row - q)). O(V).

    If nothing is left, row and q agree up to rounding, and the result is the row.

    >>> residual([0.5, 0.5, 0.0], [1.0, 0.0, 0.0])
    [0.0, 1.0, 0.0]
    """
    return normalize(unnormalized_residual(row, q, -1)) or list(row)


def exclude_token(row: Sequence[Number], token: int) -> list[Number]:
    """Return the row without this token, normalized: the residual of a point mass.

    If nothing is left, return the row.
    """
    if not 0 <= token < len(row):
        raise TinyspecError(f"token {token} is outside of a row of {len(row)} tokens")
    return normalize(unnormalized_residual(row, None, token)) or list(row)


def reject(
    row: Sequence[Number], q: Sequence[Number] | None, token: int, last: bool
) -> Sequence[Number]:
    """Return the residual.

    After the last sibling it is not normalized, because a draw needs no sum of 1.
    """
    left = unnormalized_residual(row, q, token)
    mass = ordered_sum(left)
    return row if not mass > 0 else left if last else [x / mass for x in left]


def acceptance_ratio(row: Sequence[Number], q: Sequence[Number] | None, token: int) -> Number:
    """Return the acceptance ratio row / q of a draft token; a q of None is a point mass.

    Raises TinyspecError if the token has probability 0 under the distribution its drafter declared.
    """
    if not 0 <= token < len(row):
        raise TinyspecError(
            f"drafted token {token} is outside of the target's vocabulary of {len(row)}"
        )
    if q is None:
        return row[token]
    if len(row) != len(q):
        raise TinyspecError(
            f"the draft's distribution has {len(q)} tokens, the target's {len(row)}: "
            "pad it with zeros"
        )
    if not q[token] > 0:
        raise TinyspecError(
            f"drafted token {token} has probability {q[token]} under its declared distribution "
            "(declare None)"
        )
    return row[token] / q[token]


def verify_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Sequence[Any],
    probe: Sequence[bool],
    p: Mapping[int, Any],
    accept: Callable[[Number], bool],
    draw: Callable[[Any], int],
    reject: Callable[[Any, Any, int, bool], Any] = reject,
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Accept a path from the root; after a rejection the target's distribution is its residual.

    Returns the accepted path, the recovered or bonus token, and the rejected nodes. Calls `accept`
    once for each tested node and `draw` once; reads p[ROOT] and p[node] of accepted nodes only.
    O(n * depth + tested * V).
    """
    if not len(tokens) == len(parents) == len(draft_probs) == len(probe):
        raise TinyspecError(
            f"a tree of {len(tokens)} tokens has {len(parents)} parents, "
            f"{len(draft_probs)} distributions and {len(probe)} probe flags"
        )
    accepted, rejected = list[int](), list[int]()
    here = {ROOT}  # the accepted node and its equal siblings: one position, one set of children
    row, siblings = p[ROOT], children_of(here, parents, probe)
    untested = list(siblings)
    while untested:
        node, token = untested[0], tokens[untested[0]]
        if accept(acceptance_ratio(row, draft_probs[node], token)):
            accepted.append(node)
            here = {twin for twin in siblings if tokens[twin] == token}
            row, siblings = p[node], children_of(here, parents, probe)
            untested = list(siblings)
        else:
            rejected.append(node)
            untested = untested[1:]
            row = reject(row, draft_probs[node], token, not untested)
    return tuple(accepted), draw(row), tuple(rejected)


def children_of(nodes: set[int], parents: Sequence[int], probe: Sequence[bool]) -> list[int]:
    """Return the children of these nodes in draw order, without probes."""
    return [child for child, parent in enumerate(parents) if parent in nodes and not probe[child]]
