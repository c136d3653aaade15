"""Verification on a device decides as on the host, and the host waits once a round.

CPU tensors stand in for the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lm.small import LLAMA, PROMPT, model
from tests.lm.test_static import steady
from tinyspec import _core
from tinyspec.decoding import decode, device, sampling, verify
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.specinfer import verify_tree_multi_step
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


def generate_tokens(method: str, sampling: SamplingParams, tokens: int = 24) -> list[int]:
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
    expected = generate_tokens(method, sampling)
    request.getfixturevalue("away")
    assert generate_tokens(method, sampling) == expected


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("sampling", WARPS, ids=str)
@pytest.mark.usefixtures("away")
@pytest.mark.slow
def test_the_host_waits_once_a_round(
    sampling: SamplingParams, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, plain = [], device.fetch_to_host

    def fetch(*columns: torch.Tensor) -> list[list[float]]:
        fetched.append(len(columns))
        return plain(*columns)

    monkeypatch.setattr(device, "fetch_to_host", fetch)
    logits = torch.randn(6, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = torch.full((13,), 1 / 13, dtype=torch.float64)
    draft_probs = (q, q, None, None, q) if declared else (None,) * 5
    tree = TokenTree((1, 1, 4, 2, 5), (ROOT, ROOT, ROOT, 0, 1), draft_probs, (False,) * 5)
    target_probs = decode.TargetProbs(
        decode.Scores(logits, torch.empty(0), [1] * 6), sampling, [1, 2], tree
    )
    with Waits() as waits:
        verdict = verify.verify_tree(tree, target_probs, Seeded(1))
        rows = [target_probs[node] for node in (ROOT, *verdict.accepted)]
    assert (len(fetched), waits.count) == (1, 0)
    assert all(abs(float(row.sum()) - 1) < 1e-12 for row in rows)


ROUNDS = {
    # (technique, temperature): (nodes of the draft, waits of the host, operations out of graphs)
    ("autoregressive", 0.0): (0, 1, 22),
    ("autoregressive", 0.8): (0, 1, 46),
    ("llma", 0.0): (0, 1, 22),
    ("speculative_decoding", 0.0): (4, 5, 115),  # one for each draft token, and one to verify
    ("speculative_decoding", 0.8): (4, 5, 288),
    ("specinfer", 0.0): (6, 8, 171),
    ("specinfer", 0.8): (6, 13, 338),  # its verifier tests one node after the other
}


class Counted(TorchDispatchMode):
    """Counts operations on tensors, but for those of a pass that a CUDA graph replays at once."""

    launches, paused = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += not self.paused
        return func(*args, **(kwargs or {}))

    def replay(self, run: Callable[[], None]) -> None:
        """Run a pass, counted as one launch."""
        self.launches, self.paused = self.launches + 1, True
        run()
        self.paused = False


SMALL = {"speculative_decoding": {"gamma": 4}, "specinfer": {"expansion": "2x1x1"}}


@pytest.mark.parametrize(("method", "temperature"), ROUNDS)
@pytest.mark.usefixtures("away")
def test_waits_and_launches_of_a_round(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0

    def count(plain: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            nonlocal waits
            waits += 1
            return plain(*args, **kwargs)

        return wait

    target, draft = steady(model()), steady(model(seed=1))
    card = find_technique(method)
    request = Request(
        target.session(),
        [draft.session()] if card.drafts else [],
        SamplingParams(temperature),
        StoppingCriteria(max_new_tokens=40),
    )
    decoder = card.make(request, **SMALL.get(method, {}))
    decoder.extend(PROMPT)
    rng, counted = Seeded(0), Counted()
    for _ in range(2):
        decoder.step(rng)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, count(getattr(torch.Tensor, name)))
    for fixed in (*target._static._passes.values(), *draft._static._passes.values()):
        fixed.run = partial(counted.replay, fixed.run)
    with counted:
        round = decoder.step(rng)
    nodes, expected, most = ROUNDS[method, temperature]
    assert (len(round.tree.tokens), waits) == (nodes, expected)
    assert counted.launches <= most


@pytest.mark.usefixtures("away")
def test_a_draft_on_the_cpu_declares_to_a_target_on_a_device() -> None:
    random = np.random.default_rng(0)
    for seed in range(20):
        logits, q = random.normal(size=(3, 5)), random.dirichlet(np.ones(5))
        tree = TokenTree.chain([int(random.integers(5)) for _ in range(2)], [q, q])
        scores = decode.Scores(torch.tensor(logits), torch.empty(0), [1] * 3)
        there = decode.TargetProbs(scores, SamplingParams(), [0], tree)
        rows = {node: SamplingParams().probs(logits[node + 1]) for node in (ROOT, 0, 1)}
        for verifier in (verify.verify_tree, verify_tree_by_block, verify_tree_multi_step):
            assert verifier(tree, there, Seeded(seed)) == verifier(tree, rows, Seeded(seed))


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
    draft_probs = [None if probs is None else torch.tensor(probs) for probs in tree.draft_probs]
    seen = set()
    for _ in range(400):
        rows, uniforms = rng.dirichlet(np.ones(4) / 2, size=8), rng.random(8)
        rows[1:] = rows[1:][same]  # equal paths have equal rows
        expected = _core.verify_tree(*tree, dict(zip(range(-1, 7), rows, strict=True)), uniforms)
        there = torch.tensor(rows)
        got = device.verify_on_device(
            tree.tokens, tree.parents, draft_probs, tree.probe, there, None, uniforms.tolist()
        )
        assert got == tuple(expected)
        seen.add(got[0])
    assert seen >= {(), (2,), (0, 3), (0, 5)}


def _spelled(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tree.tokens_on(tree.path(node))


@pytest.mark.parametrize(
    ("bad", "message"),
    [(float("nan"), "NaN"), (float("inf"), r"\+inf"), (-float("inf"), "all -inf")],
)
@pytest.mark.usefixtures("away")
def test_what_is_no_distribution_is_an_error_when_it_is_reached(bad: float, message: str) -> None:
    logits = torch.zeros(2, 3, dtype=torch.float64)
    logits[1] = bad
    tree = TokenTree.chain((1,))
    target_probs = decode.TargetProbs(
        decode.Scores(logits, torch.empty(0), [1, 1]), SamplingParams(), [0], tree
    )
    reached = 0
    for seed in range(20):
        if Seeded(seed).draw_at(np.full(3, 1 / 3), 1) == 1:  # the draft token
            reached += 1
            with pytest.raises(TinyspecError, match=message):
                verify.verify_tree(tree, target_probs, Seeded(seed))
        else:
            assert verify.verify_tree(tree, target_probs, Seeded(seed)).accepted == ()
    assert 0 < reached < 20
