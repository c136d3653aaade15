"""Block verification (Sun et al., ICLR 2025): the block is judged as a whole.

The largest place that passes counts.
"""

from collections.abc import Callable

from tinyspec.laws.evidence import Evidence
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.laws.verification_laws import BLOCK_EMITTED, BLOCK_TOKENS, block_keeps_its_promise


def judge_verifier(law: str) -> Callable[[Build], Evidence]:
    """Return a theorem as a check of the verifier that the technique puts into its decoder."""

    def check(build: Build) -> Evidence:
        one = table_model(((1, 1),))
        verifier = begin_decoder(build, [one, one], (0,), gamma=2).verifier
        return block_keeps_its_promise(verifier, largest=5, gamma=2, laws=(law,))

    return check


TRAPS = [
    Trap(law, judge_verifier(law), card("block_verification"))
    for law in (BLOCK_TOKENS, BLOCK_EMITTED)
]
