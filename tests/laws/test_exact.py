"""The exact distribution is exact, and it shows what a test of single tokens cannot show."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction as F
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyspec.decoding.decode import BaseDrafter, Decoder, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict, sample_inverse_cdf, verify_tree
from tinyspec.laws.evidence import LawViolated
from tinyspec.laws.exact.joint import (
    JOINT,
    QUIET,
    REPEATS,
    Reference,
    apply_warpers,
    compare_distributions,
    exact_distribution,
)
from tinyspec.laws.exact.tables import TableModel, TableSession
from tinyspec.lm.forward import Plan
from tinyspec.tree import ROOT, TokenTree

P, Q = TableModel(4), TableModel(3)
WARPS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1 / 3),
    SamplingParams(top_k=2),
    SamplingParams(0.5, top_p=0.7),
    SamplingParams(min_p=0.4),
]


def plain(model: TableModel = P, **options: Any) -> Decoder:
    return Decoder(model.session(), BaseDrafter(), verify_tree, **options)


def drafted(
    p: TableModel = P,
    q: TableModel = Q,
    gamma: int = 2,
    verifier: Any = verify_tree,
    target: Any = None,
    **options: Any,
) -> Decoder:
    return Decoder(target or p.session(), ModelDrafter(q.session(), gamma), verifier, **options)


def same(
    factory: Callable[[], Decoder], model: TableModel = P, tokens: int = 3, **options: Any
) -> None:
    sampling = options.pop("sampling", SamplingParams())
    compare_distributions(
        Reference(model.row, sampling).distribution(tokens),
        exact_distribution(factory, tokens, **options),
    )


# ---------------------------------------------------------------------- exactness


def test_the_reference_is_the_product_of_conditionals() -> None:
    joint = Reference(P.row).distribution(3, prompt=(1,))
    assert sum(joint.values()) == 1
    for text in product(range(3), repeat=3):
        by_hand = (
            P.row((1,))[text[0]] * P.row((1, text[0]))[text[1]] * P.row((1, *text[:2]))[text[2]]
        )
        assert joint.get(text, 0) == by_hand


def test_the_reference_stops_where_a_text_ends() -> None:
    stop = StoppingCriteria(eos=frozenset({2}), sequences=((0, 1),), max_new_tokens=3)
    joint = Reference(P.row, stop=stop).distribution(9)
    assert sum(joint.values()) == 1
    assert all(2 not in text[:-1] and (0, 1) not in pairwise(text[:-1]) for text in joint)
    assert {len(text) for text in joint} == {1, 2, 3}
    assert {len(text) for text in Reference(P.row, limit=3).distribution(9)} == {2}


@pytest.mark.parametrize("sampling", WARPS, ids=str)
def test_plain_decoding_and_a_drafted_chain_have_the_reference_distribution(
    sampling: SamplingParams,
) -> None:
    same(lambda: plain(sampling=sampling), sampling=sampling)
    same(lambda: drafted(sampling=sampling), sampling=sampling)


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any),
       st.sampled_from([0, 1, 0.5, 1 / 3]),
       st.none() | st.integers(1, 4), st.none() | st.sampled_from([0.1, 0.5, 0.7, 0.9, 1.0]),
       st.none() | st.sampled_from([0.0, 0.3, 0.5, 1.0]))  # fmt: skip
def test_the_judges_warpers_are_those_of_the_house(
    weights: list[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    sampling = SamplingParams(temperature, top_k, top_p, min_p)
    exact = apply_warpers([F(x) for x in weights], (), sampling)
    assert exact == sampling.probs([F(x) for x in weights])
    logits = np.log(np.maximum(weights, 1e-300))
    np.testing.assert_allclose(
        apply_warpers(logits, (), sampling), sampling.probs(logits), atol=1e-12
    )
    penalty = SamplingParams(0.7, repetition_penalty=1.3)
    np.testing.assert_allclose(
        apply_warpers(logits, (1, 1, 2), penalty), penalty.probs(logits, (1, 1, 2)), atol=1e-12
    )


def test_merging_changes_nothing_but_the_work() -> None:
    merged, whole = exact_distribution(drafted, 3), exact_distribution(drafted, 3, merge=False)
    assert merged == whole
    assert merged.branches < whole.branches / 2
    assert merged.states < whole.states


def test_a_distribution_is_exact_after_a_prompt_of_any_length_and_after_a_stop() -> None:
    stop = StoppingCriteria(eos=frozenset({1}), max_new_tokens=3)
    compare_distributions(
        Reference(P.row, stop=stop).distribution(3, (2, 0, 1)),
        exact_distribution(lambda: drafted(stop=stop), 3, (2, 0, 1)),
    )
    assert exact_distribution(lambda: plain(stop=StoppingCriteria(max_new_tokens=0)), 3) == {(): 1}


def test_one_round_alone() -> None:
    joint = exact_distribution(drafted, 9, rounds=1)
    assert sum(joint.values()) == 1
    assert {len(text) for text in joint} == {1, 2, 3}


def test_distributions_in_floats_agree_to_twelve_digits() -> None:
    p, q = TableModel(4, floats=True), TableModel(3, floats=True)
    for sampling in (
        SamplingParams(0.7),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(0.7, top_p=0.8, repetition_penalty=0.8),
    ):
        got = exact_distribution(lambda sampling=sampling: drafted(p, q, sampling=sampling), 3)  # type: ignore[misc]
        compare_distributions(Reference(p.row, sampling).distribution(3), got, within=1e-12)
        assert got.branches > len(got)


# ---------------------------------------------------------------------- what it must see


def accused(
    factory: Callable[[], Decoder], tokens: int = 3, name: str = JOINT, **options: Any
) -> None:
    with pytest.raises(LawViolated) as caught:
        same(factory, tokens=tokens, **options)
    assert caught.value.counterexample.law == name


def test_it_sees_a_biased_verifier() -> None:
    def eager(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        """Accepts with one part in a hundred more than it may."""
        path: tuple[int, ...] = ()
        for node, (token, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
            row = p[path[-1] if path else ROOT]
            assert q is not None
            if not rng.accept(row[token] / q[token] * F(101, 100)):
                left = [max(a - b, 0) for a, b in zip(row, q, strict=True)]
                return Verdict(path, rng.draw(left if any(left) else row), (node,))
            path = (*path, node)
        return Verdict(path, rng.draw(p[path[-1] if path else ROOT]))

    accused(lambda: drafted(verifier=eager), tokens=1)


class Reuses(BaseDrafter):
    """Noise is drawn in the first round and used in every round after it: sound for one token, and
    only for one.
    """

    def __init__(self, where: Any):
        self.where = where

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if not self.where:
            self.where.append(F(rng.draw([F(1, 8)] * 8), 8))
        q = [F(1, 2), F(1, 4), F(1, 4)]
        return TokenTree.chain([sample_inverse_cdf(q, self.where[0])], [q])


def test_it_sees_noise_that_is_used_again_in_the_next_round_as_one_token_cannot() -> None:
    def toy() -> Decoder:
        return Decoder(P.session(), Reuses([]), verify_tree)

    same(toy, tokens=1)
    accused(toy, tokens=2)
    accused(toy, tokens=3, merge=False)


class Enclosed(BaseDrafter):
    """The same, with the noise in a closure."""

    def __init__(self) -> None:
        noise: list[F] = []

        def propose(
            context: Sequence[int],
            max_draft_depth: int,
            sampling: SamplingParams,
            rng: RandomSource,
        ) -> TokenTree:
            return Reuses(noise).propose(context, max_draft_depth, sampling, rng)

        self.propose = propose  # type: ignore[method-assign]


class InTheClass(Reuses):
    """The same, with the noise in the class: it even outlives the request."""

    where: list[F] = []  # noqa: RUF012

    def __init__(self) -> None:
        return None


def test_noise_hidden_in_a_closure_is_not_merged_away_and_noise_in_a_class_is_not_repeated() -> (
    None
):
    accused(lambda: Decoder(P.session(), Enclosed(), verify_tree), tokens=2)
    accused(lambda: Decoder(P.session(), InTheClass(), verify_tree), tokens=2, name=REPEATS)


class Lies(BaseDrafter):
    """A coin tossed in the first round, and shown nowhere, decides whether the later rounds declare
    a false distribution.
    """

    lying: bool | None = None

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.lying is None:
            self.lying = not rng.accept(F(1, 2))
            return TokenTree()
        return TokenTree.chain([1], [[F(1, 3)] * 3 if self.lying else [F(0), F(1), F(0)]])


def test_a_state_that_differs_in_one_coin_is_not_merged_with_the_state_that_behaves() -> None:
    accused(lambda: Decoder(P.session(), Lies(), verify_tree), tokens=2)


class Ages(BaseDrafter):
    """Proposes something else the more texts it has seen, in all of its instances: it cannot be
    repeated.
    """

    age: list[int] = []  # noqa: RUF012

    def extend(self, tokens: Sequence[int], scores: Any) -> None:
        self.age.append(1)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return TokenTree.chain([0 if len(self.age) < 2 else 1])


def test_a_decoder_that_changes_from_text_to_text_is_not_one_that_repeats_itself() -> None:
    rows = TableModel(rows=lambda context: [1, 1, 1])
    accused(
        lambda: Decoder(rows.session(), Ages(), verify_tree), tokens=1, name=REPEATS, model=rows
    )


class Counts(BaseDrafter):
    """Copies the last token in every other round, by a counter that nothing else shows."""

    def __init__(self) -> None:
        self.told = 0

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.told += rng.accept(F(1, 2))
        return TokenTree.chain([context[-1]] if self.told % 2 else [])


def test_a_counter_blocks_merging_and_its_distribution_is_right() -> None:
    def counts() -> Decoder:
        return Decoder(P.session(), Counts(), verify_tree)

    same(counts)
    assert exact_distribution(counts, 3).states > exact_distribution(plain, 3).states


def test_it_sees_global_noise() -> None:
    class Global(BaseDrafter):
        def propose(
            self,
            context: Sequence[int],
            max_draft_depth: int,
            sampling: SamplingParams,
            rng: RandomSource,
        ) -> TokenTree:
            random.random()
            return TokenTree()

    accused(lambda: Decoder(P.session(), Global(), verify_tree), name=QUIET)


class Stale(TableSession):
    """Rolling back forgets the tokens and keeps their keys and values: what comes to stand there
    inherits them.
    """

    def rewind(self, length: int) -> None:
        self.left = self.committed[length:]
        super().rewind(length)

    def _commit_nodes(self, nodes: Any) -> None:
        first = len(self)
        super()._commit_nodes(nodes)
        for node, old in zip(self.committed[first:], getattr(self, "left", []), strict=False):
            if old.states and not node.states:
                node.states, node.keys, node.plan = list(old.states), dict(old.keys), old.plan
        self.left = []


class DraftsIntoItsTarget(BaseDrafter):
    """Tries a draft token in the text itself and takes it back: what makes rolling back visible."""

    def __init__(self, target: TableSession):
        self.target = target

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if len(context) == 1:
            self.target.append((2, 1, 0))
            self.target.score(TokenTree())
            self.target.rewind(1)
        return TokenTree.chain([1])


def test_it_sees_stale_keys_and_values() -> None:
    def draft_in_place(session: TableSession) -> Decoder:
        return Decoder(session, DraftsIntoItsTarget(session), verify_tree)

    same(lambda: draft_in_place(P.session()))
    accused(lambda: draft_in_place(Stale(P)), tokens=3)


def test_it_sees_a_wrong_exit_layer_and_a_wrong_skip() -> None:
    def exits(plan: Plan) -> Callable[[], Decoder]:
        def make() -> Decoder:
            session = P.session()
            return Decoder(session, ModelDrafter(session.view(plan), 2), verify_tree)  # type: ignore[arg-type]

        return make

    for plan in (Plan(last=1), Plan(last=2), Plan(skip=frozenset({2, 3})), Plan()):
        same(exits(plan))
        target = TableSession(P, plan=plan)
        right = Reference(lambda context, plan=plan: P.row(context, plan)).distribution(2)  # type: ignore[misc]
        compare_distributions(
            right,
            exact_distribution(
                lambda plan=plan: Decoder(TableSession(P, plan=plan), BaseDrafter(), verify_tree), 2
            ),
        )  # type: ignore[misc]
        if plan != Plan():
            accused(
                lambda plan=plan: Decoder(TableSession(P, plan=plan), BaseDrafter(), verify_tree), 2
            )  # type: ignore[misc]
            assert target.plan == plan


def test_the_smallest_text_that_differs_is_reported() -> None:
    with pytest.raises(LawViolated) as caught:
        compare_distributions(
            {(0,): F(1, 2), (1,): F(1, 2)}, {(0,): F(1, 3), (1,): F(2, 3)}, p=[F(1, 2), F(1, 2)]
        )
    counterexample = caught.value.counterexample
    assert (counterexample.law, counterexample.expected, counterexample.got) == (
        JOINT,
        {(0,): F(1, 2)},
        {(0,): F(1, 3)},
    )
    assert "p = [1/2, 1/2]" in str(counterexample)
