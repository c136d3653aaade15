"""Verification keeps the target's distribution, proved by enumeration, and known mistakes fail."""

from fractions import Fraction as F

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec.decoding.device import verify_on_device
from tinyspec.decoding.rng import Exhaustive, Replay, Seeded
from tinyspec.decoding.sampling import DEVICE, EXACT, HOST, SamplingParams
from tinyspec.decoding.verify import Verdict, exclude_token, residual, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.tree import ROOT, TokenTree

WEIGHTS = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)


def exact(weights):
    return [F(x, sum(weights)) for x in weights]


class Table:
    """Return a distribution for every context, from a list of distributions."""

    def __init__(self, distributions):
        self.distributions = distributions

    def __call__(self, context):
        return self.distributions[(sum(context) * 2 + len(context)) % len(self.distributions)]

    def joint(self, n, context=(), mass=F(1)):
        if len(context) == n:
            return {context: mass}
        masses = {}
        for token, x in enumerate(self(context)):
            if x > 0:
                masses |= self.joint(n, (*context, token), mass * x)
        return masses


def rounds(propose, p, n):
    """Tokens of as many rounds as n tokens take, as a function of chance."""

    def play(source):
        text, round = (), 0
        while len(text) < n:
            tree = propose(text, source.split("draft", round))
            rows = {
                node: p(text + tree.tokens_on(tree.path(node)))
                for node in range(-1, len(tree.tokens))
            }
            verdict = verify_tree(tree, rows, source.split("verify", round))
            text, round = (*text, *tree.tokens_on(verdict.accepted), verdict.next), round + 1
        return text[:n]

    return play


@given(st.lists(WEIGHTS, min_size=3, max_size=3), st.lists(WEIGHTS, min_size=2, max_size=2))
@settings(max_examples=12)
def test_a_chain_with_its_distribution_declared_keeps_the_joint_distribution(ps, qs):
    p, q = Table([exact(x) for x in ps]), Table([exact(x) for x in qs])

    def propose(text, source):
        tokens, draft_probs = (), []
        for _ in range(2):
            draft_probs.append(q(text + tokens))
            tokens += (source.draw(draft_probs[-1]),)
        return TokenTree.chain(tokens, draft_probs)

    assert Exhaustive.distribution(rounds(propose, p, 3)) == p.joint(3)


@given(st.lists(WEIGHTS, min_size=3, max_size=3), WEIGHTS, st.booleans())
@settings(max_examples=30)
def test_several_drafts_with_and_without_replacement_keep_the_distribution(ps, weights, replace):
    p, q = Table([exact(x) for x in ps]), exact(weights)

    def propose(text, source):
        tokens, draft_probs = (), ()
        row = q
        for _ in range(2):
            tokens, draft_probs = (*tokens, source.draw(row)), (*draft_probs, row)
            row = q if replace else exclude_token(row, tokens[-1])
            if not replace and row == draft_probs[-1]:
                break
        child = source.draw(q)
        n = len(tokens)
        return TokenTree((*tokens, child), (*(-1,) * n, 0), (*draft_probs, q), (False,) * (n + 1))

    assert Exhaustive.distribution(rounds(propose, p, 2)) == p.joint(2)


@given(
    st.lists(WEIGHTS, min_size=3, max_size=3), st.lists(st.integers(0, 2), min_size=4, max_size=4)
)
@settings(max_examples=50)
def test_a_tree_without_distributions_keeps_the_targets_whatever_it_holds(ps, tokens):
    p = Table([exact(x) for x in ps])
    tree = TokenTree(tokens, (-1, -1, 0, 1), (None,) * 4, (False,) * 4)
    assert Exhaustive.distribution(rounds(lambda text, source: tree, p, 3)) == p.joint(3)


@given(
    st.lists(WEIGHTS, min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 2), st.booleans()), max_size=6),
)
@settings(max_examples=50)
def test_matching_decides_as_the_walk_over_point_masses(ps, nodes):
    """Accepted path, next token and rejected nodes have the same joint distribution."""
    n, p = len(nodes), Table([exact(w) for w in ps])
    parents = [min(parent, node - 1) for node, (parent, _, _) in enumerate(nodes)]
    probe = [is_probe for _, _, is_probe in nodes]
    tree = TokenTree([token for _, token, _ in nodes], parents, (None,) * n, probe)
    rows = {node: p(tree.tokens_on(tree.path(node))) for node in range(-1, n)}
    matched = Exhaustive.distribution(lambda rng: verify_tree(tree, rows, rng))
    walked = Exhaustive.distribution(lambda rng: Verdict(*EXACT.verify_tree(tree, rows, rng)))
    assert matched == walked


def test_residual_is_the_positive_part_normalised():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    np.testing.assert_allclose(residual(p, q), [0.75, 0.25, 0.0], atol=1e-15)
    assert residual([F(1, 2), F(1, 2)], [F(1), F(0)]) == [0, 1]


def test_a_residual_with_nothing_left_is_the_target_distribution():
    p = np.array([0.5, 0.5])
    assert residual(p, p).tolist() == p.tolist()
    assert exclude_token(np.array([0.0, 1.0]), 1).tolist() == [0.0, 1.0]
    nudged = np.nextafter(p, 1)
    assert np.isfinite(residual(p, nudged)).all()


def test_an_impossible_token_is_an_error_even_at_u_zero():
    row = np.array([0.0, 1.0])
    tree = TokenTree.chain([0], [np.array([0.5, 0.5])])
    assert verify_tree(tree, {ROOT: row, 0: row}, Replay([0.0, 0.0])) == Verdict((), 1, (0,))


def test_greedy_accepts_the_lowest_of_equal_tokens_alone():
    row = SamplingParams(temperature=0.0).probs(np.array([1.0, 3.0, 3.0]))
    tree = TokenTree((2, 1), (-1, -1), (None, None), (False, False))
    assert verify_tree(tree, {ROOT: row, 1: row}, Seeded(0)) == Verdict((1,), 1, (0,))


def test_all_nodes_that_spell_the_path_are_alive_and_probes_are_not():
    one = [F(0), F(1), F(0)]
    two = [F(0), F(0), F(1)]
    tree = TokenTree(
        (1, 1, 0, 1, 2), (-1, -1, 0, 0, 1), (None,) * 5, (False, False, False, True, False)
    )
    verdict = verify_tree(tree, {ROOT: one, 0: two, 4: one}, Replay([0.5] * 9))
    assert verdict == Verdict((0, 4), 1, (2,))


WITH_PROBES = (1, 2, 2), (-1, -1, 0), (False, True, True)  # V = 2: the id 2 is a probe's


@pytest.mark.parametrize("q", [None, np.array([0.5, 0.5])])
def test_the_id_of_a_probe_may_be_beyond_the_vocabulary(q):
    tokens, parents, probe = WITH_PROBES
    rows = dict.fromkeys(range(-1, 3), np.array([0.5, 0.5]))
    tree = TokenTree(tokens, parents, (q, None, None), probe)
    assert verify_tree(tree, rows, Replay([0.9, 0.9])).accepted == (0,)


def test_the_id_of_a_probe_may_be_beyond_the_vocabulary_on_a_device():
    tokens, parents, probe = WITH_PROBES
    rows = torch.full((4, 2), 0.5, dtype=torch.float64)
    draft_probs, uniforms = (rows[0], None, None), [0.9, 0.9, 0.9, 0.9]
    assert verify_on_device(tokens, parents, draft_probs, probe, rows, None, uniforms)[0] == (0,)


def test_only_the_distributions_after_accepted_nodes_are_read():
    class Rows(dict):
        read = ()

        def __getitem__(self, node):
            self.read += (node,)
            return super().__getitem__(node)

    row = np.array([0.5, 0.5])
    rows = Rows(dict.fromkeys(range(-1, 3), row))
    verify_tree(TokenTree.chain([0, 1, 0]), rows, Replay([0.1, 0.4]))
    assert set(rows.read) == {-1, 0}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_token_that_its_distribution_cannot_produce_breaks_the_contract(kind):
    row = np.array([0.5, 0.5])
    tree = TokenTree.chain([0], [kind([0.0, 1.0])])
    with pytest.raises(TinyspecError, match="declare None"):
        verify_tree(tree, {ROOT: row, 0: row}, Replay([0.5] * 3))


def test_the_walk_leaves_the_stream_where_the_twin_leaves_it():
    rng = np.random.default_rng(0)
    rows = {node: rng.dirichlet(np.ones(5)) for node in range(-1, 6)}
    q = rng.dirichlet(np.ones(5))
    for seed in range(200):
        tokens = rng.choice(5, 6, p=q).tolist()
        tree = TokenTree(tokens, (-1, -1, 0, 0, 1, 2), (q, q, None, q, q, q), (False,) * 6)
        kernel, twin = Seeded(seed), Seeded(seed)
        twin.uniforms = lambda n: None
        assert verify_tree(tree, rows, kernel) == verify_tree(tree, rows, twin)
        assert kernel._next() == twin._next()


@given(WEIGHTS, WEIGHTS)
def test_the_device_moves_equal_the_kernels(p, q):
    p, q = np.array(exact(p), np.float64), np.array(exact(q), np.float64)
    np.testing.assert_allclose(
        DEVICE.residual(torch.tensor(p), torch.tensor(q)).numpy(), residual(p, q), atol=1e-15
    )
    np.testing.assert_allclose(
        DEVICE.exclude_token(torch.tensor(p), 1).numpy(), exclude_token(p, 1), atol=1e-15
    )


# ------------------------------------------------------------------ temperature 0


class Greedy:
    """Rows of logits, as a decoder shows them to a verifier."""

    kernels = HOST

    def __init__(self, logits, sampling=SamplingParams(temperature=0.0)):  # noqa: B008
        self.logits, self.sampling, self.read = logits, sampling, []

    def greedy_token(self, node):
        return self.sampling.greedy_token(self.logits[node + 1])

    def __getitem__(self, node):
        self.read.append(node)
        return self.sampling.probs(self.logits[node + 1])


def draw_tree(data, most=8):
    n = data.draw(st.integers(0, most))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = [data.draw(st.integers(0, 2)) for _ in range(n)]
    probe = [data.draw(st.booleans()) and data.draw(st.booleans()) for _ in range(n)]
    logits = np.array(
        [[data.draw(st.integers(0, 2)) for _ in range(3)] for _ in range(n + 1)], np.float32
    )
    return TokenTree(tokens, parents, (None,) * n, probe), logits


@given(st.data())
def test_a_greedy_walk_computes_no_distribution_and_gives_the_same_verdict(data):
    tree, logits = draw_tree(data)
    p = Greedy(logits)
    verdict = verify_tree(tree, p, Seeded(0))
    assert p.read == []
    rows = {node: p[node] for node in range(-1, len(tree.tokens))}
    assert (
        verdict
        == verify_tree(tree, rows, Seeded(0))
        == verify_tree(tree, Greedy(logits), Seeded(1))
    )


def test_a_declared_distribution_or_a_temperature_needs_the_distributions():
    for declared, sampling in (
        (np.array([0.5, 0.5]), SamplingParams(temperature=0.0)),
        (None, SamplingParams()),
    ):
        p = Greedy(np.zeros((2, 2), np.float32), sampling)
        verify_tree(TokenTree([0], [ROOT], [declared], [False]), p, Seeded(0))
        assert ROOT in p.read
