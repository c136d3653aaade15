"""The contracts of a drafter: honest drafters pass, and each breach is named.

Each breach also changes the distribution of the output.
"""

from collections.abc import Sequence
from fractions import Fraction as F
from typing import Any

import pytest
import torch

import tinyspec
from tests.laws.breaches import (
    Again,
    AgainAsAPoint,
    Argmax,
    BestOfTwo,
    Confident,
    Drafted,
    Drafting,
    KeepZero,
    Narrow,
    Raw,
    Replaced,
    SharpSecond,
    Twice,
    block,
    decoder,
)  # fmt: skip
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import contracts
from tinyspec.laws.contracts import (
    EXAMINED,
    PRESENCE,
    TRUTHFUL,
    ContractSetting,
    examined_nodes,
    find_violations,
)
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.exact.joint import exact_distribution
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.parts import Siblings
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

# ---------------------------------------------------------------------- the laws name them

BREACHES = {
    TRUTHFUL: (
        Argmax,
        Raw,
        Narrow,
        SharpSecond,
        Twice,
        lambda model, k, ends: Replaced(model, k, False),
    ),
    PRESENCE: (KeepZero, Confident, BestOfTwo),
}


@pytest.mark.parametrize(
    ("law", "drafter"), [(law, drafter) for law in BREACHES for drafter in BREACHES[law]]
)
def test_a_breach_is_accused_by_the_contract_it_breaks(law: str, drafter: Drafting) -> None:
    with pytest.raises(LawViolated) as accused:
        contracts.check_contracts(decoder(drafter), laws=(law,))
    counterexample = accused.value.counterexample
    assert counterexample.law == law
    assert counterexample.got != counterexample.case["declared"]


def test_tokens_that_block_verification_looked_at_are_not_to_be_proposed_again() -> None:
    with pytest.raises(LawViolated) as accused:
        contracts.check_contracts(decoder(Again, block), laws=(EXAMINED,))
    assert accused.value.counterexample.law == EXAMINED


HONEST = [
    (ModelDrafter, verify_tree), (ModelDrafter, block), (Drafted, verify_tree),
    (lambda model, k, ends: Siblings(model, k, True), verify_tree),
    (lambda model, k, ends: Siblings(model, k, False), verify_tree),
    (Again, verify_tree),  # the walk has not looked after the token that it rejected
    (AgainAsAPoint, block),
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "verifier"), HONEST)
def test_an_honest_drafter_is_not_accused(drafter: Drafting, verifier: Any) -> None:
    for evidence in contracts.check_contracts(decoder(drafter, verifier)):
        assert evidence.cases > 60
        assert evidence.branches >= evidence.cases


@pytest.mark.parametrize("card", tinyspec.techniques(), ids=lambda card: card.name)
def test_every_technique_keeps_its_contracts(card: Any) -> None:
    found = contracts.contracts_of_technique(card)
    assert [evidence.law for evidence in found] == (list(contracts.CONTRACT_LAWS) if found else [])
    assert bool(found) == (card.kind == "decoder" and not card.coupled)
    assert all(evidence.branches >= evidence.cases > 0 for evidence in found)


@pytest.mark.parametrize("sampling", contracts.EXACT_SAMPLINGS + contracts.FLOAT_SAMPLINGS, ids=str)
def test_a_distribution_declared_before_the_warper_is_seen_under_every_warper(
    sampling: SamplingParams,
) -> None:
    """Each warper in the list changes some distribution of the tables, so all of them matter."""
    settings = [ContractSetting(seed, sampling, torch.float64) for seed in range(1, 7)]
    assert any(find_violations(lambda s=s: decoder(Raw)(request(s)))[0] for s in settings)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", contracts.DTYPES, ids=str)
def test_a_distribution_drawn_in_another_dtype_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    setting = ContractSetting(2, SamplingParams(temperature=0.7), dtype)
    found, _ = find_violations(lambda: decoder(Narrow)(request(setting)))
    assert {offence.law for offence in found} == {TRUTHFUL}


def request(setting: ContractSetting) -> Request:
    return Request(setting.model(0).session(), [setting.model(1).session()], setting.sampling)


# ------------------------------------------------------------------ and they change what is emitted


def emitted(
    drafter: Drafting,
    verifier: Any,
    p: Sequence[int],
    q: Sequence[int],
    tokens: int,
    gamma: int = 2,
) -> Any:
    def make_decoder() -> Decoder:
        target, draft = (TableModel(0, 2, rows=lambda context, row=row: row) for row in (p, q))
        return Request(target.session(), [draft.session()]).decoder(
            drafter(draft.session(), gamma, frozenset()), verifier
        )

    return exact_distribution(make_decoder, tokens)


def test_keep_only_token_0_emits_it_with_three_quarters() -> None:
    """p = q = (1/2, 1/2), and the declared distribution is the one that is drawn from: presence
    alone is wrong.
    """
    assert emitted(KeepZero, verify_tree, (1, 1), (1, 1), 1, gamma=1) == {
        (0,): F(3, 4),
        (1,): F(1, 4),
    }
    assert emitted(Drafted, verify_tree, (1, 1), (1, 1), 1, gamma=1) == {
        (0,): F(1, 2),
        (1,): F(1, 2),
    }
    found, _ = find_violations(
        lambda: decoder(KeepZero)(request(ContractSetting(((1, 1), (1, 1)))))
    )
    assert found[0] == (PRESENCE, (0,), (), [F(1, 2), F(1, 2)], [1, 0])


def test_keep_only_token_0_is_exact_when_it_declares_no_distribution() -> None:
    class Points(KeepZero):
        def propose(self, *given: Any) -> TokenTree:
            return TokenTree.chain(super().propose(*given).tokens)

    assert emitted(Points, verify_tree, (1, 1), (1, 1), 1, gamma=1) == {
        (0,): F(1, 2),
        (1,): F(1, 2),
    }


def test_block_verification_and_examined_tokens_29_128_instead_of_3_16() -> None:
    """p = (1/4, 3/4), q = (2/3, 1/3), gamma 2: the text (1, 0)."""
    assert emitted(Again, block, (1, 3), (2, 1), 2)[1, 0] == F(29, 128)
    for drafter, verifier in ((Drafted, block), (AgainAsAPoint, block), (Again, verify_tree)):
        assert emitted(drafter, verifier, (1, 3), (2, 1), 2)[1, 0] == F(3, 16)


def test_block_verification_keeps_the_distribution_of_fresh_drafts() -> None:
    target, draft = TableModel(4), TableModel(5, zeros=False)
    plain = exact_distribution(
        lambda: Request(target.session()).decoder(BaseDrafter(), verify_tree), 3
    )
    fast = exact_distribution(
        lambda: Request(target.session()).decoder(Drafted(draft.session(), 2), block), 3
    )
    assert fast == plain


# -------------------------------------------------------------------- what a verifier has looked at


def test_the_walk_reads_chance_exactly_as_often_as_looked_at_says() -> None:
    """On random trees: the nodes before the last one tested are those that looked_at names."""
    import random

    rng = random.Random(0)
    for _ in range(300):
        n = rng.randint(1, 7)
        parents = [rng.randint(-1, node - 1) for node in range(n)]
        tree = TokenTree([rng.randint(0, 1) for _ in range(n)], parents, (None,) * n, (False,) * n)
        rows = {node: [F(1, 2), F(1, 2)] for node in range(-1, n)}

        def tested(source: Exhaustive, tree: TokenTree = tree, rows: Any = rows) -> Verdict:
            return verify_tree(tree, rows, source)

        for verdict, _ in Exhaustive.walk(tested):
            order = sorted(
                {*verdict.accepted, *verdict.rejected},
                key=lambda node: len(examined_nodes(tree, node)),
            )
            if order:
                assert examined_nodes(tree, order[-1]) == order[:-1]
