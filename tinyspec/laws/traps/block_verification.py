"""Block verification (Sun et al., ICLR 2025): the block is judged as a whole, the largest place
that passes counts.
"""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import Verdict, residual, verify_tree
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.loop_laws import table_model
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.laws.verification_laws import BLOCK_EMITTED, BLOCK_TOKENS, block_keeps_its_promise
from tinyspec.technique import Request
from tinyspec.tree import TokenTree


def judged(law: str) -> Callable[[Callable[..., Decoder]], Evidence]:
    """A theorem, asked of the verifier that the technique puts into its decoder."""

    def check(build: Callable[..., Decoder]) -> Evidence:
        one = table_model(((1, 1),))
        verifier = build(Request(one.session(), [one.session()]), gamma=2).verifier
        return block_keeps_its_promise(verifier, largest=5, gamma=2, laws=(law,))

    return check


# ------------------------------------------------------------------ toys


def token_by_token(request: Request, gamma: int) -> Decoder:
    """A longer draft, judged as ever."""
    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify_tree)


def _places(tree: TokenTree, p: Any) -> tuple[list[Any], list[Any]]:
    """Each place's weight, and its probability of passing."""
    weights: list[Any] = [1]
    for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
        weights.append(min(1, weights[-1] * p[node - 1][x] / q[x]))  # type: ignore[index]
    passes: list[Any] = [1]
    for place in range(1, len(weights) - 1):
        law: Any = tree.draft_probs[place]
        left = sum(max(0, weights[place] * a - b) for a, b in zip(p[place - 1], law, strict=True))
        passes.append(left / (left + 1 - weights[place]) if left + 1 > weights[place] else 1)
    return weights, [*passes, weights[-1]] if tree.tokens else passes


def up_to_the_first_failure(request: Request, gamma: int) -> Decoder:
    """A loop with a break in it."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        weights, passes = _places(tree, p)
        n = 0
        while n < len(tree.tokens) and rng.accept(passes[n + 1]):
            n += 1
        scaled = [weights[n] * x for x in p[n - 1]]
        row = p[n - 1] if n == len(tree.tokens) else _over(scaled, tree.draft_probs[n]) or p[n - 1]
        return Verdict(tuple(range(n)), rng.draw(row))

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


def plain_residual(request: Request, gamma: int) -> Decoder:
    """The largest place that passes, and the residual of token verification."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        _, passes = _places(tree, p)
        n = max((place for place in range(1, len(passes)) if rng.accept(passes[place])), default=0)
        row: Any = p[n - 1]
        return Verdict(
            tuple(range(n)),
            rng.draw(row if n == len(tree.tokens) else residual(row, tree.draft_probs[n])),
        )

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


def all_or_nothing(request: Request, gamma: int) -> Decoder:
    """The whole block passes with its clipped ratio; if it does not, the first token is drawn
    anew.
    """

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        weights, n = _places(tree, p)[0], len(tree.tokens)
        if rng.accept(weights[-1]):
            return Verdict(tuple(range(n)), rng.draw(p[n - 1]))
        return Verdict((), rng.draw(_over(p[-1], tree.draft_probs[0]) or p[-1]))

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


def _over(row: Any, q: Any) -> list[Any] | None:
    left = [max(0 * a, a - b) for a, b in zip(row, q, strict=True)]
    return left if sum(left) else None


TRAPS = [
    Trap(law, judged(law), card("block_verification")) for law in (BLOCK_TOKENS, BLOCK_EMITTED)
]
TOYS = [
    Toy("token by token", BLOCK_TOKENS, token_by_token),
    Toy("up to the first failure", BLOCK_EMITTED, up_to_the_first_failure),
    Toy("the residual of token verification", BLOCK_EMITTED, plain_residual),
    Toy("all or nothing", BLOCK_EMITTED, all_or_nothing),
]
