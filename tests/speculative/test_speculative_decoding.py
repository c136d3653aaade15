"""Speculative decoding: the output distribution, the acceptance rate, and the analysis.

The analysis is that of Leviathan et al. 2023.
"""

from fractions import Fraction as F
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.small import PROMPT, model
from tests.speculative.printed import compare_on_chains
from tests.table import Table, exact_distribution
from tinyspec import _core
from tinyspec.decoding.decode import BaseDrafter, Decoder, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import check
from tinyspec.lm.scheduler import Scheduler
from tinyspec.speculative.drafting.speculative_decoding import (
    acceptance_rate,
    arithmetic_growth,
    best_gamma,
    expected_tokens,
    lenient_verifier,
    verify_chain,
    walltime_speedup,
)
from tinyspec.technique import Guarantee, Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("speculative_decoding")


def make_decoder(
    p: int, q: int, sampling: SamplingParams | None = None, vocabulary: int = 3, **knobs: object
) -> Decoder:
    sampling = sampling or SamplingParams()
    request = Request(Table(p, vocabulary), [Table(q, vocabulary, zeros=False)], sampling=sampling)
    return CARD.make(request, **knobs)


def plain(p: int, sampling: SamplingParams | None = None, vocabulary: int = 3) -> Decoder:
    return Decoder(
        Table(p, vocabulary), BaseDrafter(), verify_tree, sampling=sampling or SamplingParams()
    )


WARPS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.4),
]


@pytest.mark.parametrize("sampling", WARPS, ids=str)
@pytest.mark.parametrize("gamma", [1, 2])
def test_the_joint_distribution_of_three_tokens_is_the_targets(
    sampling: SamplingParams, gamma: int
) -> None:
    for p, q in ((1, 2), (3, 4)):
        assert exact_distribution(
            lambda p=p, q=q: make_decoder(p, q, sampling, gamma=gamma), 3
        ) == exact_distribution(lambda p=p: plain(p, sampling), 3)  # type: ignore[misc]


@pytest.mark.slow
def test_printed_algorithm_is_proved_exact() -> None:
    assert check(verify_chain, random_cases=5, calls=0)


def test_printed_algorithm_is_what_runs() -> None:
    """`verify_chain` has the outcomes of `verify_tree`, on every case of the exact suite."""
    assert compare_on_chains(verify_chain, verify_tree) > 2000


def test_trap_greedy_draft_with_its_soft_distribution_is_biased() -> None:
    """The field's commonest mistake: propose the argmax, then divide by the probability it would
    have had.
    """

    class Greedy(BaseDrafter):
        def propose(self, context, max_draft_depth, sampling, rng):  # type: ignore[no-untyped-def]
            q = Table(2, zeros=False).row(context)
            return TokenTree.chain([q.index(max(q))], [q])

    toy = exact_distribution(lambda: Decoder(Table(1), Greedy(), verify_tree), 2)
    assert toy != exact_distribution(lambda: plain(1), 2)


def test_the_bonus_token_follows_a_draft_that_passes_whole() -> None:
    request = Request(
        Table(1), [Table(1)], sampling=SamplingParams(temperature=0.0)
    )  # the draft is the target: everything passes
    d = CARD.make(request, gamma=3)
    d.extend((0,))
    assert len(d.step(Seeded(0)).tokens) == 4


def test_one_target_pass_a_round_and_gamma_draft_passes() -> None:
    d = make_decoder(1, 2, gamma=3)
    d.stop = StoppingCriteria(max_new_tokens=30)
    d.extend((0,))
    rounds = 0
    while not d.finished:
        room = d.max_draft_depth
        before = d.drafter.model.calls
        d.step(Seeded(rounds))
        assert d.drafter.model.calls - before == min(3, room)
        rounds += 1
    assert d.target.calls == rounds


def test_drafting_stops_at_the_end_of_text() -> None:
    request = Request(
        Table(1), [Table(2)], stop=StoppingCriteria(eos=frozenset({0, 1, 2}), max_new_tokens=9)
    )
    d = CARD.make(request, gamma=5)
    d.extend((0,))
    assert len(d.step(Seeded(0)).tree.tokens) == 1


ROW = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


def norm(w: list[int]) -> list[F]:
    return [F(x, sum(w)) for x in w]


@given(ROW, ROW)
def test_leviathan_theorem_3_5_acceptance_is_one_minus_total_variation(
    wp: list[int], wq: list[int]
) -> None:
    p, q = norm(wp), norm(wq)

    def accepted(rng: Exhaustive) -> bool:
        token = rng.draw(q)
        return verify_tree(TokenTree.chain([token], [q]), [p, p], rng).accepted == (0,)  # type: ignore[arg-type]

    # p is indexed by node: ROOT (-1) is its last entry, node 0 its first; both are p here
    rate = sum(pr for passed, pr in Exhaustive.walk(accepted) if passed)
    tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert rate == 1 - tv
    assert acceptance_rate([(p, q)]) == pytest.approx(float(rate))


@given(st.integers(0, 4), st.integers(1, 5), st.integers(1, 5))
def test_leviathan_equation_1_expected_tokens(over: int, under: int, gamma: int) -> None:
    alpha = F(min(over, under), under)
    brute = F(0)
    for passes in product((True, False), repeat=gamma):
        pr = F(1)
        for passed in passes:
            pr *= alpha if passed else 1 - alpha
        brute += pr * (passes.index(False) + 1 if False in passes else gamma + 1)
    assert expected_tokens(alpha, gamma) == brute
    if alpha < 1:
        assert expected_tokens(alpha, gamma) == (1 - alpha ** (gamma + 1)) / (1 - alpha)


def test_measured_tokens_per_round_equal_the_prediction_on_a_pair_of_constant_acceptance() -> None:
    """p = (3/4, 1/4) and q = (1/4, 3/4) in every context: alpha = 1/2, and rounds are i.i.d."""

    class Constant(Table):
        def row(self, context: object) -> list[F]:
            return [F(3, 4), F(1, 4)] if self.seed == 1 else [F(1, 4), F(3, 4)]

    def tokens(rng: Exhaustive) -> int:
        d = CARD.make(Request(Constant(1, 2), [Constant(2, 2)]), gamma=3)
        d.extend((0,))
        return len(d.step(rng).tokens)

    mean = sum(n * pr for n, pr in Exhaustive.walk(tokens))
    assert mean == expected_tokens(F(1, 2), 3) == F(15, 8)


@given(st.floats(0.02, 0.98), st.floats(0.01, 0.9))
def test_leviathan_corollary_3_9_some_gamma_gains_where_alpha_exceeds_c(
    alpha: float, c: float
) -> None:
    best = best_gamma(alpha, c)
    assert walltime_speedup(alpha, best, c) == max(walltime_speedup(alpha, g, c) for g in range(65))
    if alpha > c:
        assert walltime_speedup(alpha, best, c) >= (1 + alpha) / (1 + c) - 1e-12
        assert best > 0


def test_arithmetic_grows_by_theorem_3_11() -> None:
    alpha, gamma, c_ops = 0.7, 4, 0.05
    closed = (1 - alpha) * (gamma * c_ops + gamma + 1) / (1 - alpha ** (gamma + 1))
    assert arithmetic_growth(alpha, gamma, c_ops) == pytest.approx(closed)


@pytest.mark.parametrize("lenience", [0.5, 0.25])
def test_leviathan_a5_lenience_caps_every_probability(lenience: float) -> None:
    """No token becomes more than 1 / lenience times as likely. Tested on the exact distribution of
    one token.
    """
    for p, q in ((1, 2), (3, 4), (5, 6)):
        lenient = exact_distribution(
            lambda p=p, q=q: make_decoder(p, q, gamma=1, lenience=lenience), 1
        )  # type: ignore[misc]
        exact = exact_distribution(lambda p=p: plain(p), 1)  # type: ignore[misc]
        assert sum(lenient.values()) == pytest.approx(1)
        for text, probability in lenient.items():
            assert float(probability) <= float(exact.get(text, 0)) / lenience + 1e-12


def test_lenience_accepts_more_and_promises_less() -> None:
    assert CARD.promise(lenience=1.0) is Guarantee.EXACT
    assert CARD.promise(lenience=0.5) is Guarantee.LOSSY


def test_lenient_greedy_decoding_passes_what_is_nearly_the_best() -> None:
    sampling = SamplingParams(temperature=0.0)
    strict = make_decoder(1, 2, sampling, gamma=3)
    easy = make_decoder(1, 2, sampling, gamma=3, lenience=0.01)
    for d in (strict, easy):
        d.stop = StoppingCriteria(max_new_tokens=30)
        d.extend((0,))
        while not d.finished:
            d.step(Seeded(d.rounds))
    assert easy.rounds <= strict.rounds


@pytest.mark.parametrize(
    "knobs", [{"gamma": 0}, {"lenience": 0.0}, {"lenience": 1.5}, {"gama": 3}, {"gamma": 2.5}]
)
def test_knobs_out_of_range_raise_a_named_error(knobs: dict[str, float]) -> None:
    with pytest.raises(TinyspecError, match=r"gamma|lenience"):
        CARD.settings(knobs)


def test_draft_distributions_on_real_arrays_give_the_same_tokens_as_plain_greedy() -> None:
    from tests.lm.small import LLAMA, model

    target, draft = model(LLAMA, seed=1), model(LLAMA, seed=2)
    sampling, stop = SamplingParams(temperature=0.0), StoppingCriteria(max_new_tokens=20)
    tokens = []
    for decoder in (
        CARD.make(Request(target.session(), [draft.session()], sampling, stop), gamma=4),
        Decoder(target.session(), BaseDrafter(), verify_tree, sampling=sampling, stop=stop),
    ):
        decoder.extend([1, 2, 3])
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        tokens.append(decoder.new)
    assert tokens[0] == tokens[1]
    assert np.all(np.array(tokens[0]) < 13)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_draft_is_point_masses_and_a_sampled_one_declares_distributions(
    penalty: float,
) -> None:
    """The tokens are those that drawing from distributions of zeros and a one would give, and
    lenience needs no distribution either.
    """
    from tests.lm.small import LLAMA, model

    for temperature in (0.0, 1.0):
        sampling, session = (
            SamplingParams(temperature=temperature, repetition_penalty=penalty),
            model(LLAMA, seed=2).session(),
        )
        drafter, context = ModelDrafter(session, 4), [1, 2, 3]
        scores = session.extend(context)
        session.rewind(0)
        drafter.extend(context, scores)
        tree = drafter.propose(context, 9, sampling, Seeded(7))
        assert len(tree.tokens) == 4
        assert all((probs is None) == (temperature == 0) for probs in tree.draft_probs)
        target_probs = TargetProbs(session.score(tree), sampling, context, tree)
        rng = Seeded(7)
        assert list(tree.tokens) == [rng.draw(target_probs[tip]) for tip in range(-1, 3)]
        if temperature == 0:
            verdict = lenient_verifier(0.5)(tree, target_probs, Seeded(1))
            assert verdict.accepted == (
                0,
                1,
                2,
                3,
            )  # judged by itself it is never less than the best


@pytest.mark.skipif(_core.compute is None, reason="nothing was compiled")
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(0.0, repetition_penalty=1.3),
        SamplingParams(0.8, repetition_penalty=1.3),
        SamplingParams(0.7),
    ],
)
def test_draft_chain_equals_scoring_a_growing_tree(
    sampling: SamplingParams,
) -> None:
    """Under a penalty a distribution depends on every draft token before it."""
    small = model(dtype=torch.float32)
    trees, context = [], list(PROMPT)
    for scheduler in (
        None,
        Scheduler(1),
    ):  # with a scheduler distributions are asked for one tree at a time
        session = small.session(scheduler=scheduler)
        session.extend(context)
        trees.append(ModelDrafter(session, 4).propose(context, 9, sampling, Seeded(3)))
    one, other = trees
    assert len(one.tokens) == 4 and one.tokens == other.tokens and one.parents == other.parents
    for mine, theirs in zip(one.draft_probs, other.draft_probs, strict=True):
        assert (mine is None) == (theirs is None) == (sampling.temperature == 0)
        assert mine is None or (mine == theirs).all()
