"""Verification on a device: decided as on the host, and the host waits once a round. CPU tensors
stand in for the device.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lm.small import LLAMA, PROMPT, model
from tinyspec import _core
from tinyspec.decoding import decode, device, sampling, verify
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

WARPS = [
    SamplingParams(0.0),
    SamplingParams(0.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(0.8, min_p=0.2),
    SamplingParams(repetition_penalty=1.3),
]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as living on a device."""
    monkeypatch.setattr(sampling, "is_on_device", lambda row: True)


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal.")
        self.count += any(name in str(func) for name in waits)
        return func(*args, **(kwargs or {}))


def made(method: str, sampling: SamplingParams, tokens: int = 24) -> list[int]:
    m = model(LLAMA, dtype=torch.float64)
    request = Request(
        m.session(),
        (),
        sampling,
        StoppingCriteria(max_new_tokens=tokens),
        [[3, 1, 4, 1, 5, 9, 2, 6]],
    )
    decoder = find_technique(method).make(request)
    decoder.extend(PROMPT)
    source = Seeded(3)
    while not decoder.finished:
        decoder.step(source)
    return decoder.new


@pytest.mark.parametrize("sampling", WARPS, ids=str)
@pytest.mark.parametrize("method", ["autoregressive", "llma"])
def test_the_text_is_the_hosts(
    method: str, sampling: SamplingParams, request: pytest.FixtureRequest
) -> None:
    expected = made(method, sampling)
    request.getfixturevalue("away")
    assert made(method, sampling) == expected


@pytest.mark.parametrize("sampling", WARPS, ids=str)
@pytest.mark.usefixtures("away")
def test_the_host_waits_once_a_round(
    sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, plain = [], device.fetch_to_host

    def fetch(*columns: torch.Tensor) -> list[list[float]]:
        fetched.append(len(columns))
        return plain(*columns)

    monkeypatch.setattr(device, "fetch_to_host", fetch)
    logits = torch.randn(6, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = torch.full((13,), 1 / 13, dtype=torch.float64)
    tree = TokenTree((1, 1, 4, 2, 5), (ROOT, ROOT, ROOT, 0, 1), (q, q, None, None, q), (False,) * 5)
    laws = decode.TargetProbs(
        decode.Scores(logits, torch.empty(0), [1] * 6), sampling, [1, 2], tree
    )
    with Waits() as waits:
        verdict = verify.verify_tree(tree, laws, Seeded(1))
        rows = [laws[node] for node in (ROOT, *verdict.accepted)]
    assert (len(fetched), waits.count) == (1, 0)
    assert all(abs(float(row.sum()) - 1) < 1e-12 for row in rows)


def test_equal_siblings_and_their_children_are_walked_as_on_the_host() -> None:
    """Every way through a tree with equal siblings, declared and not, ends as the twin says."""
    rng = np.random.default_rng(0)
    q = rng.dirichlet(np.ones(4))
    tree = TokenTree(
        (2, 2, 1, 2, 3, 0, 3),
        (ROOT, ROOT, ROOT, 0, 1, 1, 0),
        (q, q, None, q, q, None, q),
        (False,) * 7,
    )
    same = [
        min(i for i in range(7) if _spelled(tree, i) == _spelled(tree, node)) for node in range(7)
    ]
    laws = [None if law is None else torch.tensor(law) for law in tree.draft_probs]
    seen = set()
    for _ in range(400):
        rows, uniforms = rng.dirichlet(np.ones(4) / 2, size=8), rng.random(8)
        rows[1:] = rows[1:][same]  # equal paths have equal rows
        expected = _core.verify_tree(*tree, dict(zip(range(-1, 7), rows, strict=True)), uniforms)
        there = torch.tensor(rows)
        got = device.verify_on_device(
            tree.tokens, tree.parents, laws, tree.probe, there, None, uniforms.tolist()
        )
        assert got == tuple(expected)
        seen.add(got[0])
    assert seen >= {(), (2,), (0, 3), (0, 5)}


def _spelled(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tree.tokens_on(tree.path(node))


@pytest.mark.parametrize(
    ("bad", "said"), [(float("nan"), "NaN"), (float("inf"), r"\+inf"), (-float("inf"), "all -inf")]
)
@pytest.mark.usefixtures("away")
def test_a_row_that_is_no_distribution_is_an_error_when_it_is_reached(
    bad: float, said: str
) -> None:
    logits = torch.zeros(2, 3, dtype=torch.float64)
    logits[1] = bad
    tree = TokenTree.chain((1,))
    laws = decode.TargetProbs(
        decode.Scores(logits, torch.empty(0), [1, 1]), SamplingParams(), [0], tree
    )
    reached = 0
    for seed in range(20):
        if Seeded(seed).accept(1 / 3):
            reached += 1
            with pytest.raises(TinyspecError, match=said):
                verify.verify_tree(tree, laws, Seeded(seed))
        else:
            assert verify.verify_tree(tree, laws, Seeded(seed)).accepted == ()
    assert 0 < reached < 20
