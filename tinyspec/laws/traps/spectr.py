"""SpecTr (Sun et al., NeurIPS 2023): one division factor for all drafts, and its residual.

The factor is the least that keeps the target's distribution.
"""

from tinyspec.decoding.decode import Verifier
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.laws.verification_laws import FACTOR, SELECTED, least_factor, selection_keeps_target


def _find_verifier(build: Build) -> Verifier:
    """Return the verifier that the technique puts into its decoder."""
    one = table_model(((1, 1),))
    return begin_decoder(build, [one, one], (0,), k=2, gamma=2).verifier


def keeps_the_law(build: Build) -> Evidence:
    """Check one position and two, for each draft that may be taken."""
    return selection_keeps_target(_find_verifier(build), largest=4)


def divides_by_the_least(build: Build) -> Evidence:
    """Check that as much is accepted as with the least valid rho."""
    return least_factor(_find_verifier(build), ks=(1, 2))


TRAPS = [
    Trap(SELECTED, keeps_the_law, card("spectr")),
    Trap(FACTOR, divides_by_the_least, card("spectr")),
]
