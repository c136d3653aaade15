"""Autoregressive decoding: generate one token per forward pass.

Paper: none. It is the baseline that every technique is compared with. Nothing is trained.

Idea. The target computes the distribution of the next token, one token is sampled from it, and the
text is one token longer.

    x_t ~ p(. | x_1 ... x_(t-1))

In the shared loop this is the empty draft: nothing is proposed, and the verifier samples from the
target's distribution at the root.

Guarantee: EXACT, by definition: all guarantees are relative to this distribution.
Pitfall: a baseline that recomputes the prompt in every step, or decodes with another library, makes
every speed-up look larger. Here it runs in the same loop, on the same cache.
Tests: tests/speculative/test_autoregressive.py (`generate_tokens` against the code that runs,
outcome by outcome).
Left out: nothing.
"""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.technique import Guarantee, Request, technique


def generate_tokens(p: Callable[[list[int]], Any], text: list[int], n: int, rng: Any) -> list[int]:
    """Sample n tokens to continue the text, one after the other.

    p    a function from a text to the next token's distribution [V]
    rng  a numpy.random.Generator
    """
    tokens: list[int] = []
    for _ in range(n):
        row = p(text + tokens)
        tokens.append(rng.choice(len(row), p=row))
    return tokens


@technique(
    title="Autoregressive decoding",
    summary="one token per forward pass",
    paper="the baseline",
    family="baseline",
    guarantee=Guarantee.EXACT,
    point_masses=True,
)
def autoregressive(request: Request) -> Decoder:
    """Return a decoder that proposes no draft."""
    return request.decoder(BaseDrafter(), verify_tree)
