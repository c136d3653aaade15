"""The verifiers that subtract whole distributions decide alike over all number types.

These are floats, Fractions and tensors.
"""

from collections.abc import Callable
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch

from tinyspec.decoding import sampling
from tinyspec.decoding.rng import Replay
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.gumbel_coupling import match_probability
from tinyspec.speculative.verification.spectr import (
    k_seq_acceptance,
    optimal_acceptance,
    verify_tree_k_seq,
)
from tinyspec.speculative.verification.vectors import (
    as_probs,
    as_vectors,
    is_rational,
    is_same_distribution,
)
from tinyspec.tree import ROOT, TokenTree

HALF = F(1, 2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], torch.Tensor]:
    """Tensors that are taken for a device's: the way they go is the same."""
    monkeypatch.setattr(sampling, "is_on_device", lambda row: True)
    return lambda row: torch.tensor(np.asarray(row, float))


@pytest.mark.parametrize("verifier", [verify_tree_by_block, verify_tree_k_seq])
@pytest.mark.parametrize("shape", ["chain", "points", "two texts"])
def test_distributions_on_a_device_are_judged_as_those_on_the_host(
    device: Any, verifier: Any, shape: str
) -> None:
    rng = np.random.default_rng(0)
    if shape == "two texts" and verifier is verify_tree_by_block:
        return
    for seed in range(60):
        p, q = rng.dirichlet(np.full(7, 0.5), 5), rng.dirichlet(np.full(7, 0.5), 4)
        tokens, parents = [int(rng.choice(7, p=row)) for row in q], range(-1, 3)
        draft_probs: list[Any] = list(q)
        if shape == "points":
            draft_probs = [None] * 4
        elif shape == "two texts":
            draft_probs, parents = [q[0], q[0], q[2], q[2]], [ROOT, ROOT, 0, 1]  # type: ignore[assignment]
            tokens = [int(rng.choice(7, p=row)) for row in draft_probs]
        uniforms = rng.random(12)
        verdicts = []
        for put in (np.asarray, device):
            declared = [probs if probs is None else put(probs) for probs in draft_probs]
            given = {node: put(row) for node, row in enumerate(p, start=ROOT)}
            verdicts.append(
                verifier(
                    TokenTree(tokens, tuple(parents), declared, (False,) * 4),
                    given,
                    Replay(uniforms),
                )
            )
        assert verdicts[0] == verdicts[1], seed


def test_the_analyses_read_distributions_of_any_kind(device: Any) -> None:
    p, q = [F(1, 6), F(1, 3), HALF], [HALF, HALF, F(0)]
    for figure in (
        lambda a, b: k_seq_acceptance(a, b, 1),
        lambda a, b: optimal_acceptance(a, b, 3),
        match_probability,
    ):
        exactly = figure(p, q)
        assert isinstance(exactly, F)
        for put in (lambda row: np.array(row, float), device):
            assert float(figure(put(p), put(q))) == pytest.approx(float(exactly))


def test_a_vector_comes_back_as_the_distribution_it_was() -> None:
    for row in ([HALF, HALF], np.array([0.5, 0.5])):
        vector, point = as_vectors(row, None, 1)
        assert type(as_probs(vector)) is type(row)
        assert is_rational(vector) == isinstance(row, list)
        assert list(point) == [0, 1]
    narrow = torch.tensor(
        [0.5, 0.25, 0.25], dtype=torch.bfloat16
    )  # a draft's distribution in its own dtype
    assert [x.dtype for x in as_vectors(np.array([0.2, 0.3, 0.5]), narrow, 0)] == [
        np.float64,
        np.float64,
    ]


def test_distributions_are_equal_by_numbers_within_one_kind() -> None:
    row = np.array([0.5, 0.5])
    assert (
        is_same_distribution(row, row.copy())
        and is_same_distribution([HALF, HALF], (HALF, HALF))
        and is_same_distribution(torch.tensor(row), torch.tensor(row))
    )
    assert (
        not is_same_distribution(row, row / 2)
        and not is_same_distribution(row, torch.tensor(row))
        and not is_same_distribution(row, None)
    )
    assert not is_same_distribution([HALF, HALF], [HALF, F(1, 4), F(1, 4)])
