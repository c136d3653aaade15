"""Block verification (Sun et al., ICLR 2025): the block is judged as a whole, the largest place
that passes counts.
"""

from collections.abc import Callable

from tinyspec.decoding.decode import Decoder
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import Trap, card
from tinyspec.laws.verification_laws import BLOCK_EMITTED, BLOCK_TOKENS, block_keeps_its_promise
from tinyspec.technique import Request


def judged(law: str) -> Callable[[Callable[..., Decoder]], Evidence]:
    """A theorem, asked of the verifier that the technique puts into its decoder."""

    def check(build: Callable[..., Decoder]) -> Evidence:
        one = table_model(((1, 1),))
        verifier = build(Request(one.session(), [one.session()]), gamma=2).verifier
        return block_keeps_its_promise(verifier, largest=5, gamma=2, laws=(law,))

    return check


TRAPS = [
    Trap(law, judged(law), card("block_verification")) for law in (BLOCK_TOKENS, BLOCK_EMITTED)
]
