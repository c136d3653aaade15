"""Compare an algorithm as its paper prints it with what runs, outcome by outcome."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.rng import Exhaustive
from tinyspec.laws.checking.cases import round_cases
from tinyspec.laws.checking.check import _Search
from tinyspec.laws.checking.forms import HouseVerifierForm, VerifierForm
from tinyspec.laws.checking.generators import EnumeratedGenerator
from tinyspec.laws.exact.rational import Exact, distribution_pairs
from tinyspec.laws.theorems import DraftSiblings, NodeRows, TreeVerifier
from tinyspec.tree import ROOT, TokenTree

Outcomes = dict[Any, Any]


def outcomes_of(function: Callable[..., Any], *given: Any) -> Outcomes:
    """Return the exact probability of every result of a function whose last argument is `rng`."""
    return Exhaustive.distribution(lambda rng: function(*given, EnumeratedGenerator(rng)))


def compare_on_chains(printed: Callable[..., Any], runs: TreeVerifier) -> int:
    """Assert that two rules for chains agree on every case of the exact suite.

    printed  (p, q, draft, rng) -> tokens
    runs     (tree, p, rng) -> Verdict

    Returns how many outcomes (draft, tokens) were compared.
    """
    one, other = (
        _Search(form) for form in (VerifierForm(printed, 0.0), HouseVerifierForm(runs, 0.0))
    )
    compared = 0
    for case in round_cases(0):
        expected = other.outcome_probs(case)
        assert expected and one.outcome_probs(case) == expected, case
        compared += len(expected)
    return compared


def compare_on_siblings(
    printed: Callable[..., Any], runs: TreeVerifier, draft: DraftSiblings, largest: int = 5
) -> int:
    """Assert that two rules for k siblings agree, for all small p and q and k from 1 to 3.

    printed  (p, dists, tokens, rng) -> (token, is_accepted); dists[i] is what tokens[i] was drawn
             from
    runs     (tree, p, rng) -> Verdict
    draft    (q, k, rng) -> (tokens, dists), the siblings in draw order

    Returns how many outcomes (tokens, token, is_accepted) were compared.
    """
    compared = 0
    for (p, q), k in product(distribution_pairs(largest=largest), (1, 2, 3)):
        for tokens, dists in every_draft(draft, q, k):
            n = len(tokens)
            tree = TokenTree(tokens, (ROOT,) * n, dists, (False,) * n)
            expected = Exhaustive.distribution(lambda rng: _first(runs, tree, p, rng))  # noqa: B023
            assert outcomes_of(printed, list(p), dists, list(tokens)) == expected, (p, q, tokens)
            compared += len(expected)
    return compared


def every_draft(
    draft: DraftSiblings, q: Exact, k: int
) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
    """Yield every draw of k siblings from q, with their distributions."""

    def draw(rng: Exhaustive) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        tokens, dists = draft(q, k, rng)
        return tuple(tokens), tuple(None if x is None else tuple(x) for x in dists)

    for tokens, dists in Exhaustive.distribution(draw):
        yield tokens, [None if x is None else list(x) for x in dists]


def _first(runs: TreeVerifier, tree: TokenTree, p: Exact, rng: Exhaustive) -> tuple[int, bool]:
    verdict = runs(tree, NodeRows(dict.fromkeys(range(ROOT, len(tree.tokens)), p)), rng)
    token = tree.tokens[verdict.accepted[0]] if verdict.accepted else verdict.next
    assert token is not None
    return token, bool(verdict.accepted)


def fractions(*rows: str) -> list[list[Fraction]]:
    """Return rows written as words.

    >>> fractions("1/2 1/2")
    [[Fraction(1, 2), Fraction(1, 2)]]
    """
    return [[Fraction(word) for word in row.split()] for row in rows]
