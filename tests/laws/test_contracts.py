"""The contracts of a drafter: what is honest passes, each breach is named, and each breach changes what is emitted."""

from collections.abc import Callable, Sequence
from fractions import Fraction as F
from typing import Any

import pytest
import torch

import tinyspec
from tinyspec.decoding.chance import Chance
from tinyspec.decoding.decode import Decoder, Laws, NoDraft, Round
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.modeldraft import ModelDraft
from tinyspec.decoding.sampling import Warp
from tinyspec.decoding.verify import Verdict, walk
from tinyspec.laws import contracts
from tinyspec.laws.accused import Accused
from tinyspec.laws.contracts import EXAMINED, PRESENCE, TRUTHFUL, Setting, looked_at, offences
from tinyspec.laws.exact import law
from tinyspec.laws.parts import Siblings
from tinyspec.laws.tables import TableModel
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

Drafting = Callable[..., Any]


def decoder(drafter: Drafting, verifier: Any = walk) -> Callable[[Request], Decoder]:
    return lambda request: request.decoder(drafter(request.drafts[0], 2, request.stop.eos), verifier)


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
        return TokenTree.chain((*tree.tokens, tree.tokens[0]), (q, self.rows(tree, warp, context)[0]))


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
        kept = next((place for place, token in enumerate(tree.tokens) if token != 0), len(tree.tokens))
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
            spare = sum(max(F(0), passed * x - y) for x, y in zip(rows[place], tree.laws[place], strict=True))
            passed = spare / (spare + 1 - passed) if spare + 1 - passed else F(1)
        if chance.accept(passed):
            kept = place
    if kept == len(tree.tokens):
        return Verdict(tuple(range(kept)), chance.draw(rows[-1]))
    over = [max(F(0), ratios[kept] * x - y) for x, y in zip(rows[kept], tree.laws[kept], strict=True)]
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


# ---------------------------------------------------------------------- the laws name them

BREACHES = {
    TRUTHFUL: (Argmax, Raw, Narrow, SharpSecond, Twice, lambda model, k, ends: Replaced(model, k, False)),
    PRESENCE: (KeepZero, Confident, BestOfTwo),
}
JUDGES = {TRUTHFUL: contracts.truthful, PRESENCE: contracts.presence, EXAMINED: contracts.examined}


@pytest.mark.parametrize(("law", "drafter"), [(law, drafter) for law in BREACHES for drafter in BREACHES[law]])
def test_a_breach_is_accused_by_the_contract_it_breaks(law: str, drafter: Drafting) -> None:
    with pytest.raises(Accused) as accused:
        JUDGES[law](decoder(drafter))
    counterexample = accused.value.counterexample
    assert counterexample.law == law
    assert counterexample.got != counterexample.case["declared"]


def test_tokens_that_block_verification_looked_at_are_not_to_be_proposed_again() -> None:
    with pytest.raises(Accused) as accused:
        contracts.examined(decoder(Again, block))
    assert accused.value.counterexample.law == EXAMINED


HONEST = [
    (ModelDraft, walk), (ModelDraft, block), (Drafted, walk),
    (lambda model, k, ends: Siblings(model, k, True), walk), (lambda model, k, ends: Siblings(model, k, False), walk),
    (Again, walk),  # the walk has not looked behind the token it refused
    (AgainAsAPoint, block),
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "verifier"), HONEST)
def test_an_honest_drafter_is_not_accused(drafter: Drafting, verifier: Any) -> None:
    for evidence in contracts.contracts(decoder(drafter, verifier)):
        assert evidence.cases > 60
        assert evidence.branches >= evidence.cases


@pytest.mark.parametrize("card", tinyspec.techniques(), ids=lambda card: card.name)
def test_every_technique_keeps_its_contracts(card: Any) -> None:
    knobs = {knob.name: 2 for knob in card.knobs if knob.name == "gamma"}
    assert len(contracts.contracts(lambda request: card.make(request, **knobs), card.drafts)) == 3


@pytest.mark.parametrize("warp", contracts.RATIONAL + contracts.IRRATIONAL, ids=str)
def test_a_law_declared_before_the_warper_is_seen_under_every_warper(warp: Warp) -> None:
    """Each warper in the list changes some row of the tables, so none is there for show."""
    settings = [Setting(seed, warp, torch.float64) for seed in range(1, 7)]
    assert any(offences(lambda s=s: decoder(Raw)(request(s)))[0] for s in settings)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", contracts.DTYPES, ids=str)
def test_a_law_drawn_in_another_dtype_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    setting = Setting(2, Warp(temperature=0.7), dtype)
    found, _ = offences(lambda: decoder(Narrow)(request(setting)))
    assert {offence.law for offence in found} == {TRUTHFUL}


def request(setting: Setting) -> Request:
    return Request(setting.model(0).session(), [setting.model(1).session()], setting.warp)


# ---------------------------------------------------------------------- and they change what is emitted


def emitted(drafter: Drafting, verifier: Any, p: Sequence[int], q: Sequence[int], tokens: int, gamma: int = 2) -> Any:
    def made() -> Decoder:
        target, draft = (TableModel(0, 2, rows=lambda context, row=row: row) for row in (p, q))
        return Request(target.session(), [draft.session()]).decoder(
            drafter(draft.session(), gamma, frozenset()), verifier
        )

    return law(made, tokens)


def test_keep_only_token_0_emits_it_with_three_quarters() -> None:
    """p = q = (1/2, 1/2), and the declared law is the one that is drawn from: presence alone is at fault."""
    assert emitted(KeepZero, walk, (1, 1), (1, 1), 1, gamma=1) == {(0,): F(3, 4), (1,): F(1, 4)}
    assert emitted(Drafted, walk, (1, 1), (1, 1), 1, gamma=1) == {(0,): F(1, 2), (1,): F(1, 2)}
    found, _ = offences(lambda: decoder(KeepZero)(request(Setting(((1, 1), (1, 1))))))
    assert found[0] == (PRESENCE, (0,), (), [F(1, 2), F(1, 2)], [1, 0])


def test_keep_only_token_0_is_exact_when_it_declares_no_law() -> None:
    class Points(KeepZero):
        def propose(self, *given: Any) -> TokenTree:
            return TokenTree.chain(super().propose(*given).tokens)

    assert emitted(Points, walk, (1, 1), (1, 1), 1, gamma=1) == {(0,): F(1, 2), (1,): F(1, 2)}


def test_block_verification_and_examined_tokens_29_128_instead_of_3_16() -> None:
    """p = (1/4, 3/4), q = (2/3, 1/3), gamma 2: the text (1, 0)."""
    assert emitted(Again, block, (1, 3), (2, 1), 2)[1, 0] == F(29, 128)
    for drafter, verifier in ((Drafted, block), (AgainAsAPoint, block), (Again, walk)):
        assert emitted(drafter, verifier, (1, 3), (2, 1), 2)[1, 0] == F(3, 16)


def test_block_verification_keeps_the_law_of_fresh_drafts() -> None:
    target, draft = TableModel(4), TableModel(5, zeros=False)
    plain = law(lambda: Request(target.session()).decoder(NoDraft(), walk), 3)
    fast = law(lambda: Request(target.session()).decoder(Drafted(draft.session(), 2), block), 3)
    assert fast == plain


# ---------------------------------------------------------------------- what a verifier has looked at


def test_the_walk_reads_chance_exactly_as_often_as_looked_at_says() -> None:
    """On random trees: the nodes before the last one tested are those that looked_at names."""
    import random

    rng = random.Random(0)
    for _ in range(300):
        n = rng.randint(1, 7)
        parents = [rng.randint(-1, node - 1) for node in range(n)]
        tree = TokenTree([rng.randint(0, 1) for _ in range(n)], parents, (None,) * n, (False,) * n)
        rows = {node: [F(1, 2), F(1, 2)] for node in range(-1, n)}

        def tested(chance: Exhaustive, tree: TokenTree = tree, rows: Any = rows) -> Verdict:
            return walk(tree, rows, chance)

        for verdict, _ in Exhaustive.walk(tested):
            order = sorted({*verdict.path, *verdict.refused}, key=lambda node: len(looked_at(tree, node)))
            if order:
                assert looked_at(tree, order[-1]) == order[:-1]
