"""Drafters that break one contract each, and a verifier that looks at more than it accepts."""

from collections.abc import Callable, Sequence
from fractions import Fraction as F
from typing import Any

import torch

from tinyspec.decoding.decode import Decoder, Round, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws.parts import Siblings
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

Drafting = Callable[..., Any]


def decoder(drafter: Drafting, verifier: Any = verify_tree) -> Callable[[Request], Decoder]:
    return lambda request: request.decoder(
        drafter(request.drafts[0], 2, request.stop.eos), verifier
    )


class Drafted(ModelDrafter):
    """A chain from a model; subclasses break it in one place."""

    def rows(
        self, tree: TokenTree, sampling: SamplingParams, context: Sequence[int]
    ) -> TargetProbs:
        return TargetProbs(self.model.score(tree), sampling, context, tree)

    def one(self, laws: TargetProbs, node: int, rng: RandomSource) -> tuple[int, Any]:
        return rng.draw(laws[node]), laws[node]

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = TokenTree()
        for _ in range(min(self.gamma, max_draft_depth)):
            token, declared = self.one(
                self.rows(tree, sampling, context), len(tree.tokens) - 1, rng
            )
            tree = TokenTree.chain((*tree.tokens, token), (*tree.draft_probs, declared))
        return tree


# ------------------------------------------------------------------- breaches of the first contract


class Argmax(Drafted):
    """Proposes the likeliest token and declares the soft distribution."""

    def one(self, laws: TargetProbs, node: int, rng: RandomSource) -> tuple[int, Any]:
        row = list(laws[node])
        return row.index(max(row)), laws[node]


class Raw(Drafted):
    """Draws from the warped distribution and declares the one before the warpers."""

    def one(self, laws: TargetProbs, node: int, rng: RandomSource) -> tuple[int, Any]:
        return rng.draw(laws[node]), laws.probs_under(node, SamplingParams())


class Narrow(Drafted):
    """Draws from the distribution in bfloat16 and declares the wider one."""

    def one(self, laws: TargetProbs, node: int, rng: RandomSource) -> tuple[int, Any]:
        row = laws[node]
        if isinstance(row, list):
            return rng.draw(row), row
        return rng.draw(torch.as_tensor(row).bfloat16().double().numpy()), row


class SharpSecond(Drafted):
    """The second token is drawn at half the temperature."""

    def one(self, laws: TargetProbs, node: int, rng: RandomSource) -> tuple[int, Any]:
        row = laws[node]
        return rng.draw([x * x for x in row] if node == 0 else row), row


class Twice(Drafted):
    """One draw serves both places."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        q = self.rows(TokenTree(), sampling, context)[ROOT]
        tree = TokenTree.chain([rng.draw(q)], [q])
        if max_draft_depth < 2:
            return tree
        return TokenTree.chain(
            (*tree.tokens, tree.tokens[0]), (q, self.rows(tree, sampling, context)[0])
        )


class Replaced(Siblings):
    """Draws without replacement and declares the distribution with replacement."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        return tree._replace(draft_probs=tuple(tree.draft_probs[:1]) * len(tree.tokens))


# ---------------------------------------------------------------------- of the second


class KeepZero(Drafted):
    """Drafts a token, and proposes it only if it is token 0."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        kept = next(
            (place for place, token in enumerate(tree.tokens) if token != 0), len(tree.tokens)
        )
        return TokenTree.chain(tree.tokens[:kept], tree.draft_probs[:kept])


class Confident(Drafted):
    """Stops at the first token that the draft finds unlikely, and does not propose it."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        sure = [
            law[token] * 2 >= 1 for token, law in zip(tree.tokens, tree.draft_probs, strict=True)
        ]  # type: ignore[index]
        kept = sure.index(False) if False in sure else len(sure)
        return TokenTree.chain(tree.tokens[:kept], tree.draft_probs[:kept])


class BestOfTwo(Drafted):
    """Draws twice and keeps the higher id."""

    def one(self, laws: TargetProbs, node: int, rng: RandomSource) -> tuple[int, Any]:
        return max(rng.draw(laws[node]), rng.draw(laws[node])), laws[node]


# ---------------------------------------------------------------------- of the third


def block(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): the longest prefix whose joint test
    passes; no test stops it.
    """
    ratios, rows, kept = [F(1)], [p[ROOT]], 0
    for node, (token, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
        if q is None:
            return verify_tree(tree, p, rng)
        ratios.append(min(F(1), ratios[-1] * rows[-1][token] / q[token]))
        rows.append(p[node])
    for place in range(1, len(ratios)):
        passed = ratios[place]
        if place < len(tree.tokens):
            spare = sum(
                max(F(0), passed * x - y)
                for x, y in zip(rows[place], tree.draft_probs[place], strict=True)
            )
            passed = spare / (spare + 1 - passed) if spare + 1 - passed else F(1)
        if rng.accept(passed):
            kept = place
    if kept == len(tree.tokens):
        return Verdict(tuple(range(kept)), rng.draw(rows[-1]))
    over = [
        max(F(0), ratios[kept] * x - y)
        for x, y in zip(rows[kept], tree.draft_probs[kept], strict=True)
    ]
    return Verdict(tuple(range(kept)), rng.draw(over))


class Again(Drafted):
    """What came after the rejected token is proposed again with its distribution."""

    declares = True
    tail: tuple[Any, ...] = ()

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if not self.tail:
            return super().propose(context, max_draft_depth, sampling, rng)
        tokens, laws = zip(*self.tail, strict=True)
        return TokenTree.chain(tokens, laws if self.declares else None)

    def observe(self, round: Round) -> None:
        super().observe(round)
        after = len(round.verdict.accepted) + 1
        self.tail = tuple(
            zip(round.tree.tokens[after:], round.tree.draft_probs[after:], strict=True)
        )


class AgainAsAPoint(Again):
    declares = False
