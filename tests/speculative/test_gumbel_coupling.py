"""Gumbel coupling: one seed, one text, whoever drafts; and how often two races agree."""

from collections.abc import Sequence
from fractions import Fraction as F
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.table import Table
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws import verification_laws
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass
from tinyspec.laws.loop_laws import ConstantDrafter
from tinyspec.speculative.drafting.speculative_decoding import acceptance_rate
from tinyspec.speculative.integrated.llma import LlmaDrafter
from tinyspec.speculative.verification.gumbel_coupling import (
    couple_round,
    match_probability,
    verify_tree_by_race,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("gumbel_coupling")
WARPS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=2),
]


def text(decoder: Decoder, seed: int) -> list[int]:
    decoder.extend((0, 1))
    source = Seeded(seed)
    while not decoder.finished:
        decoder.step(source)
    return decoder.new


class Bush(BaseDrafter):
    """A tree with equal siblings and a probe. Its declared distributions have no meaning."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, source: Any
    ) -> TokenTree:
        if max_draft_depth < 2:
            return TokenTree()
        return TokenTree(
            (2, 1, 1, 0, 0, 2), (-1, -1, -1, 1, 2, 2), (None,) * 6, (True, *[False] * 5)
        )


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_printed_algorithm_is_what_runs(gamma: int) -> None:
    """The same uniforms give `couple_round` and a round of the decoder the same tokens."""
    lengths = set()
    for seed in range(200):
        uniforms = np.random.default_rng(seed).random((gamma + 1, 3))
        noise = {1 + i: -np.log1p(-u) for i, u in enumerate(uniforms)}  # position 0: the prompt
        p, q = Table(seed), Table(seed // 2)
        decoder = CARD.make(Request(p, [q]), gamma=gamma)
        decoder.extend((0,))
        tokens = decoder.step(Replay(uniforms.ravel().tolist())).tokens
        rows = [lambda text, table=table: normalized(table.row(text)) for table in (p, q)]
        assert list(tokens) == couple_round(*rows, [0], gamma, noise)
        lengths.add(len(tokens))
    assert lengths == set(range(1, gamma + 2))


def normalized(weights: Sequence[Any]) -> list[Any]:
    return [F(x, sum(weights)) for x in weights]


@pytest.mark.parametrize("sampling", WARPS, ids=str)
@pytest.mark.slow
def test_one_seed_one_text_whoever_drafts_also_nobody(sampling: SamplingParams) -> None:
    stop = StoppingCriteria(max_new_tokens=20)
    for seed in range(5):
        request = lambda *drafts: Request(Table(1), list(drafts), sampling, stop)  # noqa: E731
        texts = [
            text(CARD.make(request(Table(q)), gamma=gamma), seed)
            for q, gamma in ((1, 3), (2, 1), (5, 4))
        ]
        texts.append(text(CARD.make(request()), seed))
        for drafter in (
            ConstantDrafter((0, 1, 2)),
            ConstantDrafter((0, 1), side_by_side=True),
            Bush(),
            LlmaDrafter([], 1, 3, 4, "last", True),
        ):
            texts.append(text(request().decoder(drafter, verify_tree_by_race), seed))
        assert all(other == texts[0] for other in texts)
        assert len(texts[0]) == 20


def test_theorem_it_is_the_text_of_racing_alone() -> None:
    assert verification_laws.same_text_whoever_drafts(CARD.make).cases == 96


def test_draft_token_is_accepted_if_the_races_agree() -> None:
    assert verification_laws.draft_kept_where_winners_agree(CARD.make).cases == 432


def test_theorem_the_probability_of_agreement_its_bounds_and_its_integral() -> None:
    assert verification_laws.agreement_formula(match_probability).cases > 200


def test_theorem_it_keeps_between_what_needs_no_knowledge_of_q_and_what_the_ratio_test_keeps() -> (
    None
):
    strict = 0
    for p, q in distribution_pairs((2, 3, 4), 5):
        same = overlap_mass(p, q)
        got = match_probability(list(p), list(q))
        assert isinstance(got, (int, F)) and same / (2 - same) <= got <= same
        strict += same / (2 - same) < got < same
    assert strict > 50


def test_for_large_vocabularies_the_sum_by_sorting_is_the_double_sum() -> None:
    rng = np.random.default_rng(0)
    for zeros in (False, True):
        p, q = rng.dirichlet(np.full(300, 0.3), 2)
        if zeros:
            p[::3], q[::5] = 0, 0
            p, q = p / p.sum(), q / q.sum()
        both = [i for i in range(300) if p[i] > 0 and q[i] > 0]
        double = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both)
        assert match_probability(p, q) == pytest.approx(double, rel=1e-9)
        assert match_probability(p, q) < acceptance_rate([(p, q)])
    assert match_probability(p, p) == pytest.approx(1)


def test_the_tokens_of_a_round_are_as_many_as_agreement_says() -> None:
    """Constant distributions over two tokens, where P(same) = 1 - TV: the share of a grid of
    uniforms on which a draft token is accepted."""
    p, q, n = [1, 1], [1, 3], 24

    class Constant(Table):
        def row(self, context: Any) -> Any:
            return p if self.seed == 0 else q

    kept = 0
    for i, j in product(range(n), repeat=2):
        uniforms = [(i + 0.5) / n, (j + 0.25) / n]
        decoder = CARD.make(Request(Constant(0, 2), [Constant(1, 2)]), gamma=1)
        decoder.extend((0,))
        kept += len(decoder.step(Replay([*uniforms, *[0.5] * 9])).verdict.accepted)
    assert kept / n**2 == pytest.approx(
        float(match_probability([F(1, 2)] * 2, [F(1, 4), F(3, 4)])), abs=0.03
    )


# ------------------------------------------------------------------ edges


def test_text_that_was_taken_back_comes_again() -> None:
    """Noise is named by the position, not by the round: after a rewind the same seed goes the same
    way.
    """
    decoder, source = CARD.make(Request(Table(1), [Table(2)])), Seeded(3)
    decoder.extend((0,))
    while len(decoder.new) < 12:
        decoder.step(source)
    before = decoder.new[:12]
    decoder.rewind(4)
    while len(decoder.context) < 13:
        decoder.step(source)
    assert decoder.context[1:13] == before


def test_impossible_token_never_wins_and_a_rejection_is_followed_by_the_winner() -> None:
    decoder = CARD.make(Request(Table(1), [Table(2)], stop=StoppingCriteria(max_new_tokens=30)))
    decoder.extend((0,))
    source, rejections = Seeded(0), 0
    while not decoder.finished:
        round = decoder.step(source)
        rejections += len(round.verdict.rejected)
        assert all(
            probs[token] > 0 for token, probs in zip(round.tokens, round.output_probs, strict=True)
        )
        assert len(round.verdict.accepted) + len(round.verdict.rejected) <= len(round.tree.tokens)
    assert rejections > 0


def test_a_round_ends_with_the_end_of_text() -> None:
    stop = StoppingCriteria(eos=frozenset({2}), max_new_tokens=30)
    for seed in range(6):
        with_draft = text(CARD.make(Request(Table(1), [Table(1)], stop=stop), gamma=5), seed)
        assert with_draft == text(CARD.make(Request(Table(1), stop=stop)), seed)
        assert 2 not in with_draft[:-1]


@pytest.mark.parametrize("wanted", [0, 1])
def test_as_many_tokens_as_wanted(wanted: int) -> None:
    assert (
        len(
            text(
                CARD.make(
                    Request(Table(1), [Table(2)], stop=StoppingCriteria(max_new_tokens=wanted))
                ),
                0,
            )
        )
        == wanted
    )


def test_gamma_must_be_positive_and_no_distribution_is_declared() -> None:
    with pytest.raises(TinyspecError, match="gamma"):
        CARD.settings({"gamma": 0})
    decoder = CARD.make(Request(Table(1), [Table(2)]))
    decoder.extend((0,))
    assert set(decoder.step(Seeded(0)).tree.draft_probs) == {None}
    assert decoder.drafter.propose([0], 0, SamplingParams(), Seeded(1)) == TokenTree()
