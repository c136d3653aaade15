"""SpecTr (Sun et al., NeurIPS 2023): one division factor for all drafts, the least that keeps the
law, and its residual.
"""

from collections.abc import Callable

from tinyspec.decoding.decode import Decoder, Verifier
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import Trap, card
from tinyspec.laws.verification_laws import FACTOR, SELECTED, least_factor, selection_keeps_target
from tinyspec.technique import Request

Build = Callable[..., Decoder]


def _verifier(build: Build) -> Verifier:
    """What the technique puts into its decoder."""
    one = table_model(((1, 1),))
    return build(Request(one.session(), [one.session()]), k=2, gamma=2).verifier


def keeps_the_law(build: Build) -> Evidence:
    """Of one position and of two, whichever draft is taken."""
    return selection_keeps_target(_verifier(build), largest=4)


def divides_by_the_least(build: Build) -> Evidence:
    """As much is accepted as with the least lawful rho."""
    return least_factor(_verifier(build), ks=(1, 2))


TRAPS = [
    Trap(SELECTED, keeps_the_law, card("spectr")),
    Trap(FACTOR, divides_by_the_least, card("spectr")),
]
