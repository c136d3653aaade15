"""Drafters that break one contract each, and a verifier that looks at more than it accepts."""

from collections.abc import Callable, Sequence
from fractions import Fraction as F
from typing import Any

import torch

from tinyspec.decoding.chance import Chance
from tinyspec.decoding.decode import Decoder, Laws, Round
from tinyspec.decoding.modeldraft import ModelDraft
from tinyspec.decoding.sampling import Warp
from tinyspec.decoding.verify import Verdict, walk
from tinyspec.laws.parts import Siblings
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

Drafting = Callable[..., Any]


def decoder(drafter: Drafting, verifier: Any = walk) -> Callable[[Request], Decoder]:
    return lambda request: request.decoder(
        drafter(request.drafts[0], 2, request.stop.eos), verifier
    )


class Drafted(ModelDraft):
    """A chain from a model; subclasses break it in one place."""

    def rows(self, tree: TokenTree, warp: Warp, context: Sequence[int]) -> Laws:
        return Laws(self.model.score(tree), warp, context, tree)

    def one(self, laws: Laws, node: int, chance: Chance) -> tuple[int, Any]:
        return chance.draw(laws[node]), laws[node]

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        tree = TokenTree()
        for _ in range(min(self.gamma, room)):
            token, declared = self.one(self.rows(tree, warp, context), len(tree.tokens) - 1, chance)
            tree = TokenTree.chain((*tree.tokens, token), (*tree.laws, declared))
        return tree


# ---------------------------------------------------------------------- breaches of the first contract


class Argmax(Drafted):
    """Proposes the likeliest token and declares the soft law."""

    def one(self, laws: Laws, node: int, chance: Chance) -> tuple[int, Any]:
        row = list(laws[node])
        return row.index(max(row)), laws[node]


class Raw(Drafted):
    """Draws from the warped law and declares the law before the warpers."""

    def one(self, laws: Laws, node: int, chance: Chance) -> tuple[int, Any]:
        return chance.draw(laws[node]), laws.warped(node, Warp())


class Narrow(Drafted):
    """Draws from the law in bfloat16 and declares the wider one."""

    def one(self, laws: Laws, node: int, chance: Chance) -> tuple[int, Any]:
        row = laws[node]
        if isinstance(row, list):
            return chance.draw(row), row
        return chance.draw(torch.as_tensor(row).bfloat16().double().numpy()), row


class SharpSecond(Drafted):
    """The second token is drawn at half the temperature."""

    def one(self, laws: Laws, node: int, chance: Chance) -> tuple[int, Any]:
        row = laws[node]
        return chance.draw([x * x for x in row] if node == 0 else row), row


class Twice(Drafted):
    """One draw serves both places."""

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        q = self.rows(TokenTree(), warp, context)[ROOT]
        tree = TokenTree.chain([chance.draw(q)], [q])
        if room < 2:
            return tree
        return TokenTree.chain(
            (*tree.tokens, tree.tokens[0]), (q, self.rows(tree, warp, context)[0])
        )


class Replaced(Siblings):
    """Draws without replacement and declares the law with it."""

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        tree = super().propose(context, room, warp, chance)
        return tree._replace(laws=tuple(tree.laws[:1]) * len(tree.tokens))


# ---------------------------------------------------------------------- of the second


class KeepZero(Drafted):
    """Drafts a token, and proposes it only if it is token 0."""

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        tree = super().propose(context, room, warp, chance)
        kept = next(
            (place for place, token in enumerate(tree.tokens) if token != 0), len(tree.tokens)
        )
        return TokenTree.chain(tree.tokens[:kept], tree.laws[:kept])


class Confident(Drafted):
    """Stops at the first token that the draft finds unlikely, and does not propose it."""

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        tree = super().propose(context, room, warp, chance)
        sure = [law[token] * 2 >= 1 for token, law in zip(tree.tokens, tree.laws, strict=True)]  # type: ignore[index]
        kept = sure.index(False) if False in sure else len(sure)
        return TokenTree.chain(tree.tokens[:kept], tree.laws[:kept])


class BestOfTwo(Drafted):
    """Draws twice and keeps the higher id."""

    def one(self, laws: Laws, node: int, chance: Chance) -> tuple[int, Any]:
        return max(chance.draw(laws[node]), chance.draw(laws[node])), laws[node]


# ---------------------------------------------------------------------- of the third


def block(tree: TokenTree, p: Any, chance: Chance) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): the longest prefix whose joint test passes; no test stops it."""
    ratios, rows, kept = [F(1)], [p[ROOT]], 0
    for node, (token, q) in enumerate(zip(tree.tokens, tree.laws, strict=True)):
        if q is None:
            return walk(tree, p, chance)
        ratios.append(min(F(1), ratios[-1] * rows[-1][token] / q[token]))
        rows.append(p[node])
    for place in range(1, len(ratios)):
        passed = ratios[place]
        if place < len(tree.tokens):
            spare = sum(
                max(F(0), passed * x - y)
                for x, y in zip(rows[place], tree.laws[place], strict=True)
            )
            passed = spare / (spare + 1 - passed) if spare + 1 - passed else F(1)
        if chance.accept(passed):
            kept = place
    if kept == len(tree.tokens):
        return Verdict(tuple(range(kept)), chance.draw(rows[-1]))
    over = [
        max(F(0), ratios[kept] * x - y) for x, y in zip(rows[kept], tree.laws[kept], strict=True)
    ]
    return Verdict(tuple(range(kept)), chance.draw(over))


class Again(Drafted):
    """What lay behind the refused token is proposed again with its law."""

    declares = True
    tail: tuple[Any, ...] = ()

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        if not self.tail:
            return super().propose(context, room, warp, chance)
        tokens, laws = zip(*self.tail, strict=True)
        return TokenTree.chain(tokens, laws if self.declares else None)

    def observe(self, round: Round) -> None:
        super().observe(round)
        behind = len(round.verdict.path) + 1
        self.tail = tuple(zip(round.tree.tokens[behind:], round.tree.laws[behind:], strict=True))


class AgainAsAPoint(Again):
    declares = False
