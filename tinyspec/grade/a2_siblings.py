"""Laws of `siblings` of assignment A2: the token has the target's distribution, whatever was
drafted.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.errors import TinyspecError
from tinyspec.grade.task import (
    Cases,
    Function,
    NoResult,
    Task,
    describe_result,
    graded_law,
    is_close,
    is_token,
)
from tinyspec.laws.checking.forms import to_small_fraction
from tinyspec.laws.evidence import accuse
from tinyspec.laws.exact.rational import Exact, distribution_pairs, distributions
from tinyspec.laws.theorems import rejection_probability, without_replacement

KEPT_IS = "what is accepted is the candidate at that place"
LAW = "the token has the target's distribution"
KEPT = "a candidate is accepted as often as recursive rejection accepts one"
POINT = "a candidate that was not drawn is accepted with probability p"

NEEDS_MASS = "a draw from a row that adds up to more than 0"

Outcomes = dict[tuple[int, ...], dict[tuple[int | None, int], Any]]
"""candidates -> (place, token) -> probability of both."""

_results: WeakKeyDictionary[Function, dict[Any, Any]] = WeakKeyDictionary()


def known_results(function: Function) -> dict[Any, Any]:
    """Return what came of a function's cases so far: its laws look at the same cases."""
    return _results.setdefault(function, {})


def is_at_least(expected: Any, got: Any) -> bool:
    """Return whether a number is not less than another, up to rounding of floats."""
    return bool(got >= expected) or is_close(expected, got)


# ---------------------------------------------------------------------- cases


def support_size(q: Sequence[Fraction]) -> int:
    """Return how many tokens can be drawn from a distribution without replacement."""
    return sum(x > 0 for x in q)


def draw_sibling_cases(cases: Cases) -> Iterator[tuple[Exact, Exact, int]]:
    """Yield target row, draft row, number of candidates: all small ones, then larger ones."""
    for vocabulary, largest in ((2, 5), (3, 4)):
        for k in (0, 1, 2, 3):
            for p, q in distribution_pairs((vocabulary,), largest):
                if k <= support_size(q):
                    yield p, q, k
    for p, q in distribution_pairs((4,), 5):
        if support_size(q) == 4:
            yield p, q, 4
    random, larger = Random(f"{cases.seed} siblings"), list[tuple[Exact, Exact, int]]()
    for number in range(100 * cases.times):
        p, q = (_draw_row(random, 4 if number % 5 == 0 else 3, 8) for _ in "pq")
        larger.append((p, q, random.randint(1, min(len(q), support_size(q)))))

    def size(case: tuple[Exact, Exact, int]) -> tuple[int, int, int]:
        p, q, k = case
        return len(p), k, sum(x.denominator for x in p + q)

    yield from sorted(larger, key=size)


def _draw_row(random: Random, vocabulary: int, whole: int) -> Exact:
    """Return a distribution with a denominator of up to about `whole`."""
    weights = [random.randrange(whole // vocabulary + 2) for _ in range(vocabulary)]
    weights[random.randrange(vocabulary)] += 1
    return tuple(Fraction(x, sum(weights)) for x in weights)


def draw_point_cases(cases: Cases) -> Iterator[tuple[Exact, tuple[int, ...]]]:
    """Yield target rows and candidates in every order, which were drawn from nothing."""
    for vocabulary in (2, 3):
        for whole in (1, 2, 3):
            for p in distributions(vocabulary, whole):
                for k in (0, 1, 2, 3):
                    for candidates in permutations(range(vocabulary), k):
                        yield p, candidates
    random = Random(f"{cases.seed} points")
    for _ in range(40 * cases.times):
        yield _draw_row(random, 4, 8), tuple(random.sample(range(4), random.randint(1, 4)))


# ---------------------------------------------------------------------- runs


def run_siblings(
    law: str,
    siblings: Function,
    p: Exact,
    q: Exact | None,
    candidates: list[int],
    rng: Exhaustive,
) -> tuple[int | None, int]:
    """Return the place and the token that come back; accuse what is neither."""
    case = {"p": p, "q": q, "candidates": candidates}
    try:
        got = siblings(list(p), None if q is None else list(q), list(candidates), rng)
    except NoResult:
        raise
    except TinyspecError as error:  # of the random numbers, which were asked for the impossible
        accuse(law, NEEDS_MASS, str(error), **case)
    if not isinstance(got, (list, tuple)) or len(got) != 2:
        accuse(KEPT_IS, "two things: a place or None, and a token", describe_result(got), **case)
    place, token = got
    if not is_token(token, len(p)):
        accuse(KEPT_IS, f"a token, 0 to {len(p) - 1}", describe_result(token), **case)
    if place is None:
        return None, token
    if not is_token(place, len(candidates)):
        what = f"a place, 0 to {len(candidates) - 1}, or None"
        accuse(KEPT_IS, what, describe_result(place), **case)
    if candidates[place] != token:
        accuse(KEPT_IS, (place, candidates[place]), (place, token), **case)
    return place, token


def find_outcomes(law: str, siblings: Function, p: Exact, q: Exact, k: int) -> Outcomes:
    """Return all that can happen when k candidates are drawn from q and verified."""
    known = known_results(siblings)
    if (p, q, k) in known:
        return known[p, q, k]  # type: ignore[no-any-return]

    def play(rng: Exhaustive) -> Any:
        candidates, _ = without_replacement(q, k, rng)
        return tuple(candidates), run_siblings(law, siblings, p, q, list(candidates), rng)

    found: Outcomes = {}
    for (candidates, outcome), mass in Exhaustive.distribution(play).items():
        found.setdefault(candidates, {})[outcome] = mass
    return known.setdefault((p, q, k), found)  # type: ignore[no-any-return]


def drawn_case(p: Exact, q: Exact, k: int) -> dict[str, Any]:
    """Return a case in the words of the hand-out."""
    return {"p": p, "q": q, "candidates": f"{k} drawn from q, without replacement"}


# ---------------------------------------------------------------------- the laws


@graded_law(3, KEPT_IS)
def accepted_is_a_candidate(siblings: Function, cases: Cases) -> Iterator[bool]:
    """Check that a place is a place, a token a token, and that the two agree."""
    for p, q, k in draw_sibling_cases(cases):
        find_outcomes(KEPT_IS, siblings, p, q, k)
        yield True


@graded_law(8, LAW)
def token_has_the_targets_distribution(siblings: Function, cases: Cases) -> Iterator[bool]:
    """Check it over all draws and decisions. Only cases count in which a candidate was accepted."""
    for p, q, k in draw_sibling_cases(cases):
        found = find_outcomes(LAW, siblings, p, q, k)
        got: list[Any] = [Fraction(0)] * len(p)
        for outcomes in found.values():
            for (_, token), mass in outcomes.items():
                got[token] += mass
        if not is_close(p, got):
            case = drawn_case(p, q, k)
            case["each draw"] = {
                candidates: {
                    o: to_small_fraction(x / sum(outcomes.values())) for o, x in outcomes.items()
                }
                for candidates, outcomes in sorted(found.items())
            }
            case["compared"] = "the distribution of the token, over all draws"
            accuse(LAW, list(p), [to_small_fraction(x) for x in got], **case)
        yield any(place is not None for outcomes in found.values() for place, _ in outcomes)


@graded_law(5, KEPT, LAW)
def accepts_as_often_as_the_rule(siblings: Function, cases: Cases) -> Iterator[bool]:
    """Check this too: to draw from p and accept nothing has the right distribution."""
    for p, q, k in draw_sibling_cases(cases):
        found = find_outcomes(KEPT, siblings, p, q, k)
        accepted = [x for o in found.values() for (place, _), x in o.items() if place is not None]
        expected = 1 - rejection_probability(p, q, k, replace=False)
        got = sum(accepted, Fraction(0))
        if not is_at_least(expected, got):
            wanted = f"one is accepted with probability {expected}"
            accuse(
                KEPT, wanted, f"with probability {to_small_fraction(got)}", **drawn_case(p, q, k)
            )
        yield True


@graded_law(9, POINT)
def accepts_points_with_probability_p(siblings: Function, cases: Cases) -> Iterator[bool]:
    """Check candidates that were not drawn: each is accepted with its probability under p."""
    for p, candidates in draw_point_cases(cases):

        def play(rng: Exhaustive, p: Exact = p, c: tuple[int, ...] = candidates) -> Any:
            return run_siblings(POINT, siblings, p, None, list(c), rng)

        places: dict[int, int] = {token: place for place, token in enumerate(candidates)}
        expected = {(places.get(token), token): x for token, x in enumerate(p) if x}
        got = Exhaustive.distribution(play)
        if not is_close(expected, got):
            case: dict[str, Any] = {"p": p, "q": None, "candidates": list(candidates)}
            case["compared"] = "the distribution of (place, token)"
            accuse(
                POINT,
                expected,
                {outcome: to_small_fraction(x) for outcome, x in got.items()},
                **case,
            )
        yield True


SIBLINGS_TASK = Task(
    "siblings",
    "A2.4 Siblings",
    (
        accepted_is_a_candidate,
        token_has_the_targets_distribution,
        accepts_as_often_as_the_rule,
        accepts_points_with_probability_p,
    ),
)
