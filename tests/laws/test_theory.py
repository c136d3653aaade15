"""Every theorem holds for the library; what each of them kills is in test_theorems and test_passes."""

from collections.abc import Callable

import pytest

from tinyspec.laws import session_laws, theorems
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.theory import all_theorems
from tinyspec.technique import load_techniques

THEORY = all_theorems()


@pytest.mark.parametrize("law", THEORY.values(), ids=THEORY)
def test_it_holds(law: Callable[[], Evidence]) -> None:
    evidence = law()
    assert evidence.cases >= 20
    assert evidence.seconds > 0
    if evidence.law in (theorems.ACCEPTANCE, theorems.TRANSPORT, session_laws.COMMITTED_SLOTS):
        assert evidence.branches > evidence.cases  # outcomes walked, or slots compared


def test_no_technique_is_left_out() -> None:
    for name in (name for name, card in load_techniques().items() if card.kind == "decoder"):
        assert sum(f"committed slots of {name} on" in law for law in THEORY) == 2
