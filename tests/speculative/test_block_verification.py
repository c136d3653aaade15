"""Block verification: a place that fails does not end the round, and what that earns."""

from collections import defaultdict
from fractions import Fraction as F
from itertools import pairwise, product
from math import prod

import numpy as np
import pytest

from tests.speculative.printed import compare_on_chains
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import check, verification_laws
from tinyspec.laws.exact.rational import distribution_pairs
from tinyspec.speculative.verification.block_verification import (
    verify_block,
    verify_tree_by_block,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("block_verification")
HALF, THIRD, QUARTER = F(1, 2), F(1, 3), F(1, 4)


def mean_accepted(verifier, p, q, gamma):
    """Return the expected number of accepted tokens of a draft of gamma, with the same
    distributions in every context.
    """

    def play(rng):
        tokens = [rng.draw(q) for _ in range(gamma)]
        return len(verifier(TokenTree.chain(tokens, [q] * gamma), [p] * (gamma + 1), rng).accepted)

    return sum(n * probability for n, probability in Exhaustive.walk(play))


@pytest.mark.slow
def test_printed_algorithm_is_proved_exact() -> None:
    assert check(verify_block, random_cases=5, calls=0)


def test_printed_algorithm_is_what_runs() -> None:
    """`verify_block` has the outcomes of `verify_tree_by_block` on every case of the exact
    suite.
    """
    assert compare_on_chains(verify_block, verify_tree_by_block) > 2000


def test_the_largest_place_that_passes_ends_the_round_and_an_earlier_failure_does_not() -> None:
    """The paper's example: of two draft tokens, 10/9 are accepted token by token, 11/9 as a block;
    no verifier can accept 12/9 = 4/3.
    """
    p, q = [THIRD, 2 * THIRD], [2 * THIRD, THIRD]
    assert mean_accepted(verify_tree, p, q, 2) == F(10, 9)
    assert mean_accepted(verify_tree_by_block, p, q, 2) == F(11, 9)
    assert verification_laws.BlockCase(tuple(p), tuple(q), False, 2).kept() == (
        F(10, 9),
        F(11, 9),
        F(12, 9),
    )
    # the draft 0, 1: w_1 = 1/2 is the risk that is taken at once token by token; as a block the
    # place 2 has w_2 = 1
    verdict = verify_tree_by_block(TokenTree.chain([0, 1], [q, q]), [p, p, p], Replay([0.99, 0.0]))
    assert verdict.accepted == (0, 1)


def test_theorem_exact_and_never_fewer_tokens_than_token_by_token() -> None:
    evidence = verification_laws.block_keeps_its_promise(verify_tree_by_block, largest=4)
    assert evidence.branches > evidence.cases > 400


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_theorem_at_least_i_tokens_are_accepted_with_probability_w_i(gamma: int) -> None:
    for p, q in (
        ((F(1, 6), F(5, 6)), (F(3, 5), F(2, 5))),
        ((HALF, QUARTER, QUARTER), (F(1, 7), F(4, 7), F(2, 7))),
    ):
        case, passed, drawn, weight = (
            verification_laws.BlockCase(p, q, True, gamma),
            defaultdict(F),
            defaultdict(F),
            {(): F(1)},
        )
        for draft in product(range(len(p)), repeat=gamma):
            rows = {node: case.target(draft[: node + 1]) for node in range(ROOT, gamma)}
            tree = TokenTree.chain(draft, [case.draft(draft[:node]) for node in range(gamma)])
            ratios = [rows[i - 1][x] / tree.draft_probs[i][x] for i, x in enumerate(draft)]
            mass = prod(tree.draft_probs[i][x] for i, x in enumerate(draft))
            for i in range(1, gamma + 1):
                drawn[draft[:i]] += mass
                weight[draft[:i]] = min(F(1), weight[draft[: i - 1]] * ratios[i - 1])
            for verdict, probability in Exhaustive.walk(
                lambda rng: verify_tree_by_block(tree, rows, rng)  # noqa: B023
            ):
                for i in range(1, len(verdict.accepted) + 1):
                    passed[draft[:i]] += probability * mass
        assert {text: passed[text] / drawn[text] for text in drawn} == {
            text: weight[text] for text in drawn
        }


def test_theorem_longer_block_accepts_more_and_gamma_1_is_token_verification() -> None:
    for p, q in distribution_pairs(largest=5):
        assert mean_accepted(verify_tree_by_block, p, q, 1) == mean_accepted(verify_tree, p, q, 1)
        lengths = [
            mean_accepted(verify_tree_by_block, p, q, gamma)
            for gamma in range(4 if len(p) == 2 else 3)
        ]
        assert all(shorter <= longer for shorter, longer in pairwise(lengths))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=2),
    ],
    ids=str,
)
def test_the_joint_distribution_over_several_rounds_is_the_targets(
    sampling: SamplingParams,
) -> None:
    for p, q in ((1, 2), (3, 4)):
        made = lambda p=p, q=q: CARD.make(Request(Table(p), [Table(q)], sampling), gamma=2)  # noqa: E731
        plain = lambda p=p: Decoder(Table(p), BaseDrafter(), verify_tree, sampling=sampling)  # noqa: E731
        assert exact_distribution(made, 3) == exact_distribution(plain, 3)


def test_examined_draft_token_may_not_be_proposed_again_with_its_distribution() -> None:
    """Token verification leaves the tail of a draft untouched, and it may be proposed again; block
    verification does not.
    """

    class Constant(Table):
        def row(self, context):
            return [1, 3]

    class Leftover(BaseDrafter):
        def __init__(self, declared):
            self.declared, self.tail = declared, []

        def propose(self, context, max_draft_depth, sampling, rng):
            q = [2 * THIRD, THIRD]
            tokens = [rng.draw(q) for _ in range(2)] if not self.tail else self.tail
            return TokenTree.chain(
                tokens, [q if not self.tail or self.declared else None] * len(tokens)
            )

        def observe(self, round):
            rejected = round.verdict.rejected
            self.tail = list(round.tree.tokens[rejected[0] + 1 :]) if rejected else []

    def probability_of_1_0(verifier, declared):
        return exact_distribution(lambda: Decoder(Constant(0, 2), Leftover(declared), verifier), 2)[
            1, 0
        ]

    assert (
        probability_of_1_0(verify_tree, declared=True)
        == probability_of_1_0(verify_tree_by_block, declared=False)
        == F(3, 16)
    )
    assert probability_of_1_0(verify_tree_by_block, declared=True) == F(29, 128)


# ------------------------------------------------------------------ edges


def test_floats_decide_as_fractions_do() -> None:
    grid = [F(2 * i + 1, 14) for i in range(7)]
    case = verification_laws.BlockCase((F(1, 8), F(3, 8), HALF), (HALF, QUARTER, QUARTER), True, 2)
    for draft, uniforms in product(product(range(3), repeat=2), product(grid, repeat=3)):
        rows = {node: case.target(draft[: node + 1]) for node in range(ROOT, 2)}
        draft_probs = [case.draft(draft[:node]) for node in range(2)]
        floats = {node: np.array(row, float) for node, row in rows.items()}
        exact = verify_tree_by_block(TokenTree.chain(draft, draft_probs), rows, Replay(uniforms))
        tree = TokenTree.chain(
            draft, [np.array(q, np.float32) for q in draft_probs]
        )  # exact in any dtype
        assert verify_tree_by_block(tree, floats, Replay(uniforms)) == exact


def test_none_is_a_point_mass() -> None:
    for tokens in ((0, 1), (1, 1), (2, 0)):
        p = (HALF, F(1, 3), F(1, 6))
        masses = [tuple(F(int(x == token)) for x in range(3)) for token in tokens]
        declared, points = (
            Exhaustive.distribution(
                lambda rng, draft_probs=draft_probs: verify_tree_by_block(
                    TokenTree.chain(tokens, draft_probs),  # noqa: B023
                    [p] * 3,  # noqa: B023
                    rng,
                )
            )
            for draft_probs in (masses, [None, None])
        )
        assert declared == points


def test_impossible_token_is_rejected_and_nothing_after_it_is_read() -> None:
    p = {ROOT: [F(1), F(0)]}
    verdict = verify_tree_by_block(
        TokenTree.chain([1, 1, 0], [[HALF, HALF]] * 3), p, Replay([0.0, 0.0])
    )
    assert (verdict.accepted, verdict.next, verdict.rejected) == ((), 0, (0, 1, 2))


def test_equal_draft_and_target_accept_everything() -> None:
    row = np.random.default_rng(0).dirichlet(np.ones(50))
    tokens = [3, 14, 15, 9]
    nearly = row * (1 + 1e-16)
    for p in (row, nearly):
        verdict = verify_tree_by_block(
            TokenTree.chain(tokens, [row] * 4), [p] * 5, Replay([1 - 2**-53] * 9)
        )
        assert len(verdict.accepted) == 4


def test_no_draft_is_plain_decoding_and_takes_one_uniform() -> None:
    rng = Replay([0.6])
    assert verify_tree_by_block(TokenTree(), {ROOT: [HALF, HALF]}, rng) == ((), 1, ())
    assert rng.left == 0


def test_probes_are_skipped_and_a_tree_raises_a_named_error() -> None:
    q = [HALF, HALF]
    probed = TokenTree([0, 9, 1], [ROOT, ROOT, 0], [q, None, q], [False, True, False])
    assert verify_tree_by_block(
        probed, dict.fromkeys(range(-1, 3), q), Replay([0.5] * 9)
    ).accepted == (
        0,
        2,
    )
    with pytest.raises(TinyspecError, match="branches: draft a chain, or judge it with spectr"):
        verify_tree_by_block(
            TokenTree([0, 1], [ROOT, ROOT], [q, q], [False] * 2), {ROOT: q}, Seeded(0)
        )


@pytest.mark.parametrize(
    ("token", "q", "word"),
    [(1, [F(1), F(0)], "declare None"), (5, [HALF, HALF], "outside"), (0, [F(1)], "pad it")],
)
def test_a_broken_draft_raises_a_named_error(token, q, word) -> None:
    with pytest.raises(TinyspecError, match=word):
        verify_tree_by_block(TokenTree.chain([token], [q]), {ROOT: [HALF, HALF]}, Seeded(0))


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_as_many_tokens_as_wanted(wanted: int) -> None:
    decoder = CARD.make(
        Request(Table(1), [Table(2)], stop=StoppingCriteria(max_new_tokens=wanted)), gamma=4
    )
    decoder.extend((0,))
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert len(decoder.new) == wanted


def test_gamma_must_be_positive() -> None:
    with pytest.raises(TinyspecError, match="gamma"):
        CARD.settings({"gamma": 0})
