"""Steps of fixed shape compute what the blocks compute.

Padding, masks and reused stores change nothing.
"""

import gc
from dataclasses import replace

import pytest
import torch

from tests.lm.small import GPT2, LLAMA, PROMPT, QWEN3, close, model
from tests.lm.test_transformer import DEVICES, TREE, every
from tinyspec.laws import session_laws
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.lm.model import Model
from tinyspec.lm.static import FREE_STORES, SIZES, CudaGraphRunner
from tinyspec.technique import find_technique
from tinyspec.tree import ROOT, TokenTree

L = LLAMA.n_layers


def steady(m: Model) -> Model:
    """The same model taking steps of fixed shape wherever it can; on a CPU nothing is captured."""
    still = m.to(device=m.device)
    still._static = CudaGraphRunner(still._path)  # type: ignore[arg-type]
    return still


@every
@pytest.mark.parametrize("device", DEVICES)
def test_every_configuration_computes_what_the_blocks_compute(config: Config, device: str) -> None:
    m = model(config).to(device=device)
    plain, fixed = model(config).session(), steady(m).session()
    for session in (plain, fixed):
        session.extend(PROMPT)
    for _ in range(3):
        a, b = (
            plain.score(TREE, hidden_layers=(0, 1, L)),
            fixed.score(TREE, hidden_layers=(0, 1, L)),
        )
        close(a.logits, b.logits.cpu())
        close(a.hidden, b.hidden.cpu())
        for session in (plain, fixed):
            session.commit((2, 3), 5)
    assert fixed.cache_exact


@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN3], ids=["llama", "gpt2", "qwen3"])
def test_node_logits_are_path_logits_and_the_cache_is_a_fresh_forwards(config: Config) -> None:
    m = steady(model(config))
    assert session_laws.node_logits(m.session, cases=6, rounds=2, nodes=5).cases
    assert session_laws.cache_after_every_round(
        find_technique("llma").make, m.session, texts=2, tokens=8
    ).cases


def test_trees_of_every_size_fit_the_next_larger_step() -> None:
    m = model(replace(LLAMA, max_positions=128))
    still = steady(m)
    for n in (1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 63, 64):
        plain, fixed = m.session(), still.session()
        tokens, parents = (
            [i % 13 for i in range(n - 1)],
            [i - 3 if i > 2 else ROOT for i in range(n - 1)],
        )
        tree = TokenTree(tokens, parents, [None] * (n - 1), [False] * (n - 1))
        for session in (plain, fixed):
            session.extend(PROMPT)
        close(plain.score(tree).logits, fixed.score(tree).logits)
    assert {size for _, size in still._static._passes} == set(SIZES)  # type: ignore[union-attr]


def test_what_does_not_fit_goes_the_way_it_always_went() -> None:
    m = model()
    still, plain = steady(m).session(), m.session()
    for session in (still, plain):
        session.extend(PROMPT)
        session.run_to_layer(TREE, 1)
    close(still.score(TREE).logits, plain.score(TREE).logits)
    for plan in (Plan(skip=frozenset({2})), Plan(last=2)):
        close(still.view(plan).score(TREE).logits, plain.view(plan).score(TREE).logits)


def test_logits_that_were_handed_out_stay_as_they_were() -> None:
    session = steady(model()).session()
    session.extend(PROMPT)
    first = session.score(TREE).logits
    kept = first.clone()
    session.commit((0,), 2)
    session.score(TREE)
    assert torch.equal(first, kept)


@pytest.mark.slow
def test_a_finished_session_leaves_its_store_and_its_steps_to_the_next() -> None:
    still = steady(model())
    static = still._static
    assert static is not None
    for seed in range(4):
        session = still.session()
        session.extend([seed, *PROMPT])
        close(session.score(TokenTree()).logits, model().logits([seed, *PROMPT])[-1:])
        del session
        gc.collect()
    assert len(static._free_stores) == 1
    assert len(static._free_stores[256]) == 1
    assert len(static._passes) == 2  # the prompt's, and the last token's


def test_of_each_size_a_few_free_stores_are_kept_and_others_go_with_their_passes() -> None:
    still = steady(model())
    static = still._static
    assert static is not None
    sessions = [still.session() for _ in range(FREE_STORES + 2)]
    for session in sessions:
        session.extend(PROMPT)
        session.score(TokenTree())
    assert len(static._in_use) == FREE_STORES + 2
    del session
    sessions.clear()
    gc.collect()
    assert not static._in_use
    assert len(static._free_stores[256]) == FREE_STORES
    kept = {store.data_ptr() for store in static._free_stores[256]}
    assert {address for address, _ in static._passes} == kept


def test_a_store_that_a_text_outgrew_is_free_at_once() -> None:
    m = model(replace(LLAMA, max_positions=600))
    still = steady(m)
    session = still.session()
    session.extend(PROMPT)
    session.extend([i % 13 for i in range(400)])
    session.score(TokenTree())
    assert still._static is not None
    assert [len(still._static._free_stores[slots]) for slots in (256, 512)] == [1, 0]


def test_a_mask_has_a_multiple_of_16_columns() -> None:
    still = steady(model())
    session = still.session()
    session.extend(PROMPT)
    assert still._static is not None
    assert all(fixed.visible.shape[1] % 16 == 0 for fixed in still._static._passes.values())


def test_a_text_that_outgrows_its_store_moves_with_all_it_has() -> None:
    m = model(replace(LLAMA, max_positions=600))
    session = steady(m).session()
    ids = [i * 7 % 13 for i in range(300)]
    session.extend(ids[:200])
    for token in ids[200:]:
        session.score(TokenTree())
        session.commit((), token)
    close(session.score(TokenTree()).logits, m.logits(ids)[-1:])


def test_a_step_is_entered_in_the_ledger_as_any_pass() -> None:
    forward_logs: list[list[ForwardRecord]] = [[], []]
    for m, forward_log in zip((model(), steady(model())), forward_logs, strict=True):
        session = m.session(forward_log)
        session.extend(PROMPT)
        session.score(TREE)
    assert forward_logs[0] == forward_logs[1]
