"""What A2 holds a verifier of siblings to: whatever was drafted, the token has the target's
distribution.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.errors import TinyspecError
from tinyspec.grade.a2_trees import same, words
from tinyspec.grade.task import Cases, Failed
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.forms import to_small_fraction
from tinyspec.laws.small import (
    Exact,
    distribution_pairs,
    distributions,
    overlap_mass,
    positive_part,
    without_token,
)

KEPT_IS = "what is accepted is the candidate at that place"
LAW = "the token has the target's distribution"
KEPT = "a candidate is accepted as often as recursive rejection accepts one"
POINT = "a candidate that was not drawn is accepted with probability p"

MASSLESS = "a draw from a row that adds up to more than 0"
Function = Callable[..., Any]
Case = tuple[Exact, Exact, int]
Said = dict[tuple[int, ...], dict[tuple[int | None, int], Any]]
"""candidates -> (place, token) -> probability of both."""

_played: WeakKeyDictionary[Function, dict[Any, Any]] = WeakKeyDictionary()


def played(function: Function) -> dict[Any, Any]:
    """What came of a function's cases so far: its laws ask for the same ones, and playing them is
    what takes time.
    """
    return _played.setdefault(function, {})


def at_least(expected: Any, got: Any) -> bool:
    """Not less, up to rounding where a float is among them."""
    return bool(got >= expected) or same(expected, got)


def support(q: Sequence[Fraction]) -> int:
    """How many tokens can be drawn from a law without replacement."""
    return sum(x > 0 for x in q)


def drafts(cases: Cases) -> Iterator[Case]:
    """Target row, draft row, number of candidates: all small ones, then larger ones."""
    for vocabulary, largest in ((2, 5), (3, 4)):
        for k in (0, 1, 2, 3):
            for p, q in distribution_pairs((vocabulary,), largest):
                if k <= support(q):
                    yield p, q, k
    for p, q in distribution_pairs((4,), 5):
        if support(q) == 4:
            yield p, q, 4
    random, larger = Random(f"{cases.seed} siblings"), list[Case]()
    for number in range(100 * cases.times):
        p, q = (_row(random, 4 if number % 5 == 0 else 3, 8) for _ in "pq")
        larger.append((p, q, random.randint(1, min(len(q), support(q)))))
    yield from sorted(
        larger,
        key=lambda case: (len(case[0]), case[2], sum(x.denominator for x in case[0] + case[1])),
    )


def _row(random: Random, vocabulary: int, whole: int) -> Exact:
    """A law with a denominator of up to so much."""
    weights = [random.randrange(whole // vocabulary + 2) for _ in range(vocabulary)]
    weights[random.randrange(vocabulary)] += 1
    return tuple(Fraction(x, sum(weights)) for x in weights)


def judged(
    law: str,
    function: Function,
    p: Exact,
    q: Exact | None,
    candidates: list[int],
    chance: Exhaustive,
) -> Any:
    """The place and the token that the function returns; accuses what is neither."""
    case = {"p": p, "q": q, "candidates": candidates}
    try:
        got = function(list(p), None if q is None else list(q), list(candidates), chance)
    except Failed:
        raise
    except TinyspecError as error:  # from the chance
        accuse(law, MASSLESS, str(error), **case)
    if not isinstance(got, (list, tuple)) or len(got) != 2:
        accuse(KEPT_IS, "two things: a place or None, and a token", words(got), **case)
    place, token = got
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(p):
        accuse(KEPT_IS, f"a token, 0 to {len(p) - 1}", words(token), **case)
    if place is None:
        return None, token
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(candidates):
        accuse(KEPT_IS, f"a place, 0 to {len(candidates) - 1}, or None", words(place), **case)
    if candidates[place] != token:
        accuse(KEPT_IS, (place, candidates[place]), (place, token), **case)
    return place, token


def said(law: str, function: Function, p: Exact, q: Exact, k: int) -> Said:
    """All that can happen when k candidates are drawn from q and judged."""

    def play(chance: Exhaustive) -> Any:
        left: Exact | None = q
        candidates: list[int] = []
        for _ in range(k):
            assert left is not None
            candidates.append(chance.draw(left))
            left = without_token(left, candidates[-1])
        return tuple(candidates), judged(law, function, p, q, candidates, chance)

    if (p, q, k) in played(function):
        return played(function)[p, q, k]  # type: ignore[no-any-return]
    found: Said = {}
    for (candidates, outcome), mass in Exhaustive.walk(play):
        outcomes = found.setdefault(candidates, {})
        outcomes[outcome] = outcomes.get(outcome, 0) + mass
    return played(function).setdefault((p, q, k), found)  # type: ignore[no-any-return]


def kept_is_a_candidate(function: Function, cases: Cases) -> Evidence:
    """A place is a place, a token is a token, and the two agree."""
    seen = 0
    for p, q, k in drafts(cases):
        said(KEPT_IS, function, p, q, k)
        seen += 1
    return Evidence(KEPT_IS, seen)


def has_the_law(function: Function, cases: Cases) -> Evidence:
    """Over all that could be drawn and all that can be decided. Only cases count in which a
    candidate was accepted.
    """
    seen = 0
    for p, q, k in drafts(cases):
        found = said(LAW, function, p, q, k)
        got: list[Any] = [Fraction(0)] * len(p)
        for outcomes in found.values():
            for (_, token), mass in outcomes.items():
                got[token] += mass
        if not all(map(same, p, got)):
            what: dict[Any, Any] = {}
            for candidates, outcomes in sorted(found.items()):
                total = sum(outcomes.values())
                what[candidates] = {
                    place_token: to_small_fraction(x / total) for place_token, x in outcomes.items()
                }
            case: dict[str, Any] = {
                "p": p,
                "q": q,
                "candidates": f"{k} drawn from q, without replacement",
            }
            case["each draw"] = what
            case["compared"] = "the distribution of the token, over all draws"
            accuse(LAW, list(p), [to_small_fraction(x) for x in got], **case)
        seen += any(place is not None for outcomes in found.values() for place, _ in outcomes)
    return Evidence(LAW, seen)


def rule(p: Exact, q: Exact, k: int) -> Fraction:
    """How probable it is that recursive rejection keeps one of k candidates: at each place the
    overlap of what is left.

    >>> half, third = Fraction(1, 2), Fraction(1, 3)
    >>> str(rule((half, half, 0 * half), (third, third, third), 1))
    '2/3'
    """
    if k == 0:
        return Fraction(0)
    kept, left = overlap_mass(p, q), positive_part(p, q)
    for token, x in enumerate(q):
        rest = without_token(q, token)
        refused = x - min(p[token], x)
        if refused and left is not None and rest is not None:
            kept += refused * rule(left, rest, k - 1)
    return kept


def keeps(function: Function, cases: Cases) -> Evidence:
    """To draw from p and keep nothing has the right law, too."""
    seen = 0
    for p, q, k in drafts(cases):
        found = said(KEPT, function, p, q, k)
        got: Any = Fraction(0)
        for outcomes in found.values():
            got += sum(mass for (place, _), mass in outcomes.items() if place is not None)
        expected = rule(p, q, k)
        if not at_least(expected, got):
            case = {"p": p, "q": q, "candidates": f"{k} drawn from q, without replacement"}
            accuse(
                KEPT,
                f"one is accepted with probability {expected}",
                f"with probability {to_small_fraction(got)}",
                **case,
            )
        seen += 1
    return Evidence(KEPT, seen)


def points(cases: Cases) -> Iterator[tuple[Exact, tuple[int, ...]]]:
    """Target rows and candidates, in every order."""
    for vocabulary, largest in ((2, 3), (3, 3)):
        for whole in range(1, largest + 1):
            for p in distributions(vocabulary, whole):
                for k in (0, 1, 2, 3):
                    for candidates in permutations(range(vocabulary), k):
                        yield p, candidates
    random = Random(f"{cases.seed} points")
    for _ in range(40 * cases.times):
        yield _row(random, 4, 8), tuple(random.sample(range(4), random.randint(1, 4)))


def keeps_points(function: Function, cases: Cases) -> Evidence:
    """Then every candidate is kept with its probability under p, and the token has the law p
    whatever the candidates are.
    """
    seen = 0
    for p, candidates in points(cases):
        law: dict[tuple[int | None, int], Any] = {}
        for outcome, mass in Exhaustive.walk(
            lambda chance, p=p, c=candidates: judged(POINT, function, p, None, list(c), chance)  # type: ignore[misc]
        ):
            law[outcome] = law.get(outcome, 0) + mass
        expected = {
            (candidates.index(token) if token in candidates else None, token): x
            for token, x in enumerate(p)
            if x
        }
        if not all(same(expected.get(key, 0), law.get(key, 0)) for key in {*expected, *law}):
            got = {key: to_small_fraction(x) for key, x in law.items()}
            case = {
                "p": p,
                "q": None,
                "candidates": list(candidates),
                "compared": "the distribution of (place, token)",
            }
            accuse(POINT, expected, got, **case)
        seen += 1
    return Evidence(POINT, seen)
