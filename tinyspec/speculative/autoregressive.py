"""Plain autoregressive decoding: one token a call. What every technique is compared with.

The empty tree is plain decoding: nothing is proposed, the verifier draws from the target's law at
the root. Nothing is trained, nothing is left out.

Guarantee: EXACT, by definition: its law is the reference that the laws compare the others with.
"""

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.technique import Guarantee, Request, technique


@technique(
    title="Autoregressive decoding",
    summary="one token per forward pass",
    paper="the baseline",
    family="baseline",
    guarantee=Guarantee.EXACT,
)
def autoregressive(request: Request) -> Decoder:
    """One target call a token."""
    return request.decoder(BaseDrafter(), verify_tree)
