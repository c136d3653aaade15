"""Tokens that leave early, what fills their place, and probes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.lm.oracle import Oracle
from tests.lm.small import GPT2, LLAMA, PROMPT, begun, close, model, same_cache, tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.lm.session import Session
from tinyspec.tree import ROOT, TokenTree

M = model(LLAMA)
G = model(GPT2)
L, V, D = LLAMA.n_layers, LLAMA.vocab_size, LLAMA.d_model
EMPTY = TokenTree()


class TestEarlyExit:
    @pytest.mark.parametrize("m", [M, G], ids=["llama", "gpt2"])
    @pytest.mark.parametrize("layer", range(L + 1))
    def test_an_exit_is_the_model_cut_off_there(self, m, layer: int) -> None:
        """B40; at the last layer it is the whole model."""
        t = tree([1, 2, 2], [ROOT, 0, 1])
        logits = begun(m).run_to_layer(t, layer, head=True).logits
        past = Oracle(m).text(PROMPT[:-1])
        for node in range(-1, 3):
            done = Oracle(m).text([PROMPT[-1], *t.tokens_on(t.path(node))], Plan(last=layer), past)
            np.testing.assert_allclose(logits[node + 1].numpy(), done[-1].logits, atol=1e-10)
        if layer == L:
            close(logits, begun(m).score(t).logits)

    def test_layers_run_once_when_a_half_run_tree_goes_on(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        t = tree([1, 2, 2], [ROOT, 0, ROOT])
        session.run_to_layer(t, 1)
        session.run_to_layer(t, 2, head=True)
        close(session.score(t, hidden_layers=()).logits, begun(M).score(t).logits)
        assert [(c.rows, c.row_layers, c.head_rows) for c in forward_log[1:]] == [
            (4, 4, 0),
            (4, 4, 4),
            (4, 4, 4),
        ]

    def test_what_was_shown_on_the_way_is_shown_at_the_end(self) -> None:
        session = begun(M)
        t = tree([1, 2], [ROOT, 0])
        session.run_to_layer(t, 2, hidden_layers=(0, 1))
        close(
            session.score(t, hidden_layers=(0, 1)).hidden,
            begun(M).score(t, hidden_layers=(0, 1)).hidden,
        )
        close(
            session.score(t, hidden_layers=(2, L)).hidden,
            begun(M).score(t, hidden_layers=(2, L)).hidden,
        )

    def test_what_the_head_reads_is_that_of_the_exit_asked_for(self) -> None:
        session = begun(M)
        session.run_to_layer(EMPTY, 1, hidden_layers=(L,))
        session.score(EMPTY)
        close(
            session.score(EMPTY, hidden_layers=(L,)).hidden,
            begun(M).score(EMPTY, hidden_layers=(L,)).hidden,
        )

    def test_going_back_to_a_lower_exit_loses_nothing(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        low = session.run_to_layer(EMPTY, 1, head=True).logits
        session.score(EMPTY)
        close(session.run_to_layer(EMPTY, 1, head=True).logits, low)
        ran = sum(call.row_layers for call in forward_log[1:])
        session.score(EMPTY)
        assert ran == sum(call.row_layers for call in forward_log[1:]) == L

    def exits(self, session: Session, at: Sequence[int]) -> None:
        for token, layer in zip([7, 8, 9], at, strict=False):
            session.run_to_layer(EMPTY, layer, head=True)
            session.commit((), token)

    def test_copied_states_make_the_missing_keys(self) -> None:
        """CALM: the state at the exit stands for those of the layers above."""
        session, oracle = begun(M), Oracle(M)
        done = oracle.text(PROMPT[:-1])
        for token, layer, new in ((PROMPT[-1], 1, 7), (7, 2, 8), (8, 1, 9)):
            session.run_to_layer(EMPTY, layer, head=True)
            session.commit((), new)
            session.fill_cache("copy")
            done.append(oracle.run(token, done, copy_from=layer))
        np.testing.assert_allclose(
            session.score(EMPTY).logits[0].numpy(), oracle.run(9, done).logits, atol=1e-10
        )
        for at in range(len(done)):
            for layer in range(L):
                np.testing.assert_allclose(
                    session.cache.values[layer][:, at].numpy(), done[at].values[layer], atol=1e-10
                )
        assert not session.cache_exact

    def test_fills_are_counted(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        self.exits(session, [1])
        session.fill_cache("copy")
        assert forward_log[-1] == ForwardRecord(M.name, 1, 0.0, 0, fills=2)

    def test_recomputed_layers_are_those_of_a_fresh_forward(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        self.exits(session, [1, 2, 1])
        before = sum(call.row_layers for call in forward_log)
        session.fill_cache("recompute")
        ran = sum(call.row_layers for call in forward_log) - before
        assert ran == 3 * L - 2 - 2 - 1  # the first was taken along to layer 2 by the second
        same_cache(session)
        assert session.cache_exact

    def test_postponed_layers_are_run_along_with_the_next_deep_token(self) -> None:
        """FREE: one forward completes them all."""
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        self.exits(session, [1, 1, 1])
        assert [call.row_layers for call in forward_log[1:]] == [1, 1, 1]
        close(session.score(EMPTY).logits[0], M.logits([*PROMPT, 7, 8, 9])[-1])
        assert [(call.rows, call.row_layers) for call in forward_log[4:]] == [(4, 3 * (L - 1) + L)]
        same_cache(session)

    def test_a_copied_token_that_is_recomputed_is_exact_again(self) -> None:
        session = begun(M)
        self.exits(session, [1])
        session.fill_cache("copy")
        assert not session.cache_exact
        session.fill_cache("recompute")
        assert session.cache_exact
        same_cache(session)

    def test_what_looked_at_a_copied_token_is_not_exact(self) -> None:
        session = begun(M)
        self.exits(session, [1])
        session.fill_cache("copy")
        session.score(EMPTY)
        session.commit((), 3)
        session.fill_cache("recompute")
        assert not session.cache_exact

    def test_a_missing_key_is_an_error_and_never_silence(self) -> None:
        session = begun(M)
        session.cache.present[2, 1] = False
        with pytest.raises(RuntimeError, match="slot 2 has no keys in layer 1"):
            session.score(EMPTY)


class TestProbes:
    ROWS = torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    PREFIX = tuple(
        torch.randn(2, L, 2, 2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    )
    TREE = tree([4, V, V + 2, 5, 1], [ROOT, 0, 1, 0, ROOT], [False, True, True, False, True])

    @pytest.mark.parametrize("prefix", [None, PREFIX], ids=["plain", "prefix"])
    @pytest.mark.parametrize("m", [M, model(replace(GPT2, n_kv_heads=2))], ids=["llama", "gpt2"])
    def test_probes_are_embeddings_that_nobody_else_sees(self, m, prefix) -> None:
        session = begun(m)
        session.set_probe_embeddings(self.ROWS, prefix)
        scores = session.score(self.TREE)
        drafted = tree([4, 5], [ROOT, 0])
        close(scores.logits[[0, 1, 4]], begun(m).score(drafted).logits)
        oracle = Oracle(m)
        shown = None if prefix is None else (prefix[0].numpy(), prefix[1].numpy())
        base = oracle.text([*PROMPT, 4])
        first = oracle.run(self.ROWS[0].numpy(), base, prefix=shown)
        second = oracle.run(self.ROWS[2].numpy(), [*base, first], prefix=shown)
        other = oracle.run(1, base[:-1], prefix=shown)
        expected = np.array([first.logits, second.logits, other.logits])
        np.testing.assert_allclose(scores.logits[[2, 3, 5]].numpy(), expected, atol=1e-10)

    def test_probes_go_after_their_round(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        session.set_probe_embeddings(self.ROWS)
        session.score(self.TREE)
        session.commit([0, 3], 2)
        same_cache(session)
        session.score(self.TREE)
        assert forward_log[-1].rows == 6
        session.score(self.TREE)
        assert forward_log[-1].rows == 3  # draft tokens are known, probes are made anew
        close(session.score(TokenTree.chain([4, 5])).logits[2], M.logits([*session.text, 4, 5])[-1])

    def test_a_probe_is_never_committed_nor_built_upon(self) -> None:
        session = begun(M)
        session.set_probe_embeddings(self.ROWS)
        session.score(self.TREE)
        with pytest.raises(ValueError, match="cannot be committed"):
            session.commit([0, 1], None)
        with pytest.raises(ValueError, match="parent of a draft token"):
            session.score(tree([V, 1], [ROOT, 0], [True, False]))
        with pytest.raises(TinyspecError, match="vocabulary"):
            session.score(tree([V + 3], [ROOT], [True]))
        with pytest.raises(TinyspecError, match="vocabulary"):
            session.score(tree([V], [ROOT]))

    def test_what_is_adopted_must_fit(self) -> None:
        session = begun(M)
        with pytest.raises(ValueError, match="probe embeddings"):
            session.set_probe_embeddings(torch.zeros(2, D + 1))
        with pytest.raises(ValueError, match="probe prefix"):
            session.set_probe_embeddings(
                self.ROWS, (torch.zeros(L, 2, 3, 4), torch.zeros(L, 1, 3, 4))
            )


class TestPlansAndPrompts:
    def test_a_new_plan_does_not_run_the_newest_token_again(self) -> None:
        """The log of a schedule of 3, 2, 2 and 2 layers, each token once."""
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        for layers in (3, 2, 2, 2):
            session.set_plan(Plan(skip=frozenset(range(2, 2 + 2 * (L - layers)))))
            session.score(EMPTY)
            session.commit((), 7)
        assert [(call.rows, call.row_layers) for call in forward_log[1:]] == [
            (1, 3.0),
            (1, 2.0),
            (1, 2.0),
            (1, 2.0),
        ]

    def test_a_plan_that_grows_again_is_an_error(self) -> None:
        session = begun(M)
        for skip in (frozenset({2, 3}), frozenset[int]()):
            session.set_plan(Plan(skip=skip))
            if not skip:
                with pytest.raises(RuntimeError, match="has no keys in layer 1"):
                    session.score(EMPTY)
                return
            session.score(EMPTY)
            session.commit((), 7)

    def test_a_prompt_run_in_steps_and_named_in_any_order_is_the_prompt(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tinyspec.lm.session.PREFILL_CHUNK", 2)
        forward_log: list[ForwardRecord] = []
        session = M.session(forward_log)
        session.append(PROMPT)
        for layer in (1, 2, 2, L):
            session.run_committed(reversed(range(len(PROMPT) - 1)), layer)
        session.score(EMPTY)
        same_cache(session)
        assert sum(call.row_layers for call in forward_log) == L * len(PROMPT)
        passes = 3 * math.ceil((len(PROMPT) - 1) / 2)
        assert [call.prefill for call in forward_log] == [True] * passes + [False]

    def test_a_token_that_starts_again_runs_from_the_first_layer(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        session.score(EMPTY)
        session.commit((), 7)
        session.restart([1, len(PROMPT) - 1])
        assert not session.cache.present[1].any()  # a pass that left it out would be an error
        session.score(EMPTY)
        assert (forward_log[-1].rows, forward_log[-1].row_layers) == (3, 3.0 * L)
        same_cache(session)
        assert session.cache_exact
