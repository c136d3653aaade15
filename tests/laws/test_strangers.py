"""Wrong implementations that nobody made the cases for: `check` refutes each by the named law."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.laws import strangers
from tests.laws.strangers import CHAIN_VERIFIERS, DECODERS, DRAFTERS, TREE_VERIFIERS
from tinyspec.laws import check

JOINT, TRUTHFUL = "joint distribution", "truthful drafter"

LAWS: dict[Callable[..., Any], str] = {
    strangers.slice_siblings: "tokens of a round",
    strangers.count_positions_from_round: "each position of the text has a uniform of its own",
    strangers.draft_in_window: TRUTHFUL,
    strangers.declare_cached_trigram: TRUTHFUL,
    strangers.drop_unlikely_token: "presence",
    strangers.declare_set_of_followers: TRUTHFUL,
}
"""The law that refutes a function; the joint distribution if none is named."""

BY_FORM = [
    *(("verifier", function) for function in (*CHAIN_VERIFIERS, *TREE_VERIFIERS)),
    *(("drafter", function) for function in DRAFTERS),
    *(("generate", function) for function in DECODERS),
]


@pytest.mark.parametrize(("form", "function"), BY_FORM, ids=[f.__name__ for _, f in BY_FORM])
def test_a_stranger_is_refuted_by_its_law(form: str, function: Callable[..., Any]) -> None:
    found = check(**{form: function}).counterexample
    assert found is not None, "nothing was found"
    assert found.law == LAWS.get(function, JOINT)
    assert found.expected != found.got


def test_a_verifier_that_fails_without_a_draft_is_not_accused() -> None:
    """It may never be given an empty draft; the report says that this was not covered."""

    def verify(p: Any, q: Any, draft: list[int], rng: Any) -> list[int]:
        assert len(draft) > 0
        return strangers.verify_chain(p, q, draft, rng)

    result = check(verify, random_cases=5, calls=0)
    assert result
    assert "; an empty draft, where it ends in AssertionError; a fault" in str(result)


def test_there_are_thirty_of_four_kinds() -> None:
    counts = [len(group) for group in (CHAIN_VERIFIERS, TREE_VERIFIERS, DRAFTERS, DECODERS)]
    assert counts == [12, 8, 4, 6]
    assert len({function for _, function in BY_FORM}) == 30
    assert len(set(strangers.MISSED_AT_FIRST)) == 10
