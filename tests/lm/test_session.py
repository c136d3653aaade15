"""A session gives what a plain forward pass gives.

This holds whatever was drafted, committed or taken back before.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.oracle import Oracle
from tests.lm.small import GPT2, LLAMA, PROMPT, begun, close, model, same_cache, tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.tree import ROOT, TokenTree

M = model(LLAMA)
G = model(GPT2)
L, V, D = LLAMA.n_layers, LLAMA.vocab_size, LLAMA.d_model
EMPTY = TokenTree()
quick = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def trees(draw: st.DrawFn, most: int = 8) -> TokenTree:
    n = draw(st.integers(1, most))
    return tree(
        [draw(st.integers(0, 3)) for _ in range(n)],
        [draw(st.integers(ROOT, i - 1)) for i in range(n)],
    )


class TestTrees:
    @quick
    @given(trees(), st.sampled_from([M, G]))
    def test_a_node_says_what_its_path_says(self, t: TokenTree, m) -> None:
        """Positions are depths and the mask is the ancestors; neither index nor siblings matter."""
        scores = begun(m).score(t, hidden_layers=(0, 1, L))
        for node in range(-1, len(t.tokens)):
            text = [*PROMPT, *t.tokens_on(t.path(node))]
            close(scores.logits[node + 1], m.logits(text)[-1])
            last = Oracle(m).text(text)[-1]
            for shown, row in zip(
                scores.hidden[:, node + 1].numpy(), [*last.states[:2], last.top], strict=True
            ):
                np.testing.assert_allclose(shown, row, atol=1e-10)

    @quick
    @given(trees())
    def test_equal_paths_are_computed_once(self, t: TokenTree) -> None:
        forward_log: list[ForwardRecord] = []
        begun(M, forward_log).score(t)
        paths = {t.tokens_on(t.path(node)) for node in range(len(t.tokens))}
        assert forward_log[1:] == [
            ForwardRecord(M.name, len(paths) + 1, (len(paths) + 1) * L, len(paths) + 1)
        ]

    @quick
    @given(trees(), st.randoms(use_true_random=False))
    def test_the_order_of_siblings_changes_no_logits(self, t: TokenTree, random) -> None:
        n = len(t.tokens)
        key = [random.random() for _ in range(n)]
        order = sorted(range(n), key=lambda i: (t.depths()[i], key[i]))
        place = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
        mixed = tree([t.tokens[i] for i in order], [place[t.parents[i]] for i in order])
        rows, mixed_rows = begun(M).score(t).logits, begun(M).score(mixed).logits
        close(rows, mixed_rows[[0, *(place[i] + 1 for i in range(n))]])

    @quick
    @given(trees())
    def test_a_tree_grown_depth_by_depth_runs_each_node_once(self, t: TokenTree) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        for depth in range(max(t.depths()) + 1):
            kept = [i for i, at in enumerate(t.depths()) if at <= depth]
            place = {old: new for new, old in enumerate(kept)} | {ROOT: ROOT}
            grown = session.score(
                tree([t.tokens[i] for i in kept], [place[t.parents[i]] for i in kept])
            )
        whole = begun(M).score(t).logits
        close(grown.logits, whole[[0, *(i + 1 for i in kept)]])
        assert (
            sum(call.rows for call in forward_log[1:])
            == len({t.tokens_on(t.path(i)) for i in range(len(t.tokens))}) + 1
        )

    @quick
    @given(trees(), st.data())
    def test_a_commit_keeps_what_hangs_below_and_drops_the_rest(
        self, t: TokenTree, data: st.DataObject
    ) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        session.score(t)
        path = t.path(data.draw(st.integers(ROOT, len(t.tokens) - 1)))
        session.commit(path, data.draw(st.none() | st.integers(0, 3)))
        same_cache(session)
        known = session.committed[-1].descendants()
        below = {tuple(session.text[len(PROMPT) :])}
        expected = {
            t.tokens_on(t.path(i))
            for i in range(len(t.tokens))
            if any(t.tokens_on(t.path(i))[: len(b)] == b and len(t.path(i)) > len(b) for b in below)
        }
        assert len(known) == len(expected)
        again = [list(p)[len(session) - len(PROMPT) :] for p in expected]
        before = len(forward_log)
        for rest in again:
            scores = session.score(TokenTree.chain(rest))
            close(scores.logits[-1], M.logits([*session.text, *rest])[-1])
        assert (
            sum(call.rows for call in forward_log[before:]) <= 1
        )  # the newest token, if it was new

    def test_a_path_that_is_none_is_an_error(self) -> None:
        session = begun(M)
        session.score(tree([1, 2, 3], [ROOT, ROOT, 1]))
        with pytest.raises(ValueError, match="not a path"):
            session.commit([0, 2], None)
        session.commit([1, 2], 5)
        assert session.text == [*PROMPT, 2, 3, 5]

    def test_a_round_without_next_stops_on_a_node_whose_logits_are_known(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        row = session.score(TokenTree.chain([7, 8])).logits[2]
        session.commit([0, 1], None)
        calls = len(forward_log)
        close(session.score(EMPTY).logits[0], row)
        assert len(forward_log) == calls


class TestText:
    @quick
    @given(
        st.lists(st.lists(st.integers(0, V - 1), max_size=5), min_size=1, max_size=5),
        st.sampled_from([M, G]),
    )
    def test_any_split_of_a_text_is_the_same_session(self, parts: list[list[int]], m) -> None:
        text = [2, *(t for part in parts for t in part)]
        session = m.session()
        session.append([2])
        states = [session.extend(part, hidden_layers=(0, 2, L)).hidden for part in parts]
        whole = m.session().extend(text, hidden_layers=(0, 2, L))
        close(torch.cat(states, dim=1), whole.hidden)
        close(session.score(EMPTY).logits[0], m.logits(text)[-1])
        same_cache(session)

    @quick
    @given(st.lists(st.integers(0, V - 1), min_size=1, max_size=9))
    def test_extend_shows_the_states_of_a_plain_forward(self, text: list[int]) -> None:
        hidden = M.session().extend(text, hidden_layers=range(L + 1)).hidden
        assert hidden.shape == (L + 1, len(text) - 1, D)
        for i, token in enumerate(Oracle(M).text(text)[:-1]):
            np.testing.assert_allclose(
                hidden[:, i].numpy(), [*token.states[:L], token.top], atol=1e-10
            )

    def test_extend_shows_states_also_of_accepted_draft_tokens(self) -> None:
        session = begun(M)
        session.score(TokenTree.chain([5, 6, 7]))
        shown = session.extend([5, 6, 2], hidden_layers=(1, L)).hidden
        whole = M.session().extend([*PROMPT, 5, 6, 2], hidden_layers=(1, L)).hidden
        close(shown, whole[:, len(PROMPT) - 1 :])

    def test_appended_tokens_that_were_drafted_are_not_run_again(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        session.score(TokenTree.chain([5, 6]))
        session.append([5, 6, 7])
        assert [call.rows for call in forward_log] == [5, 3]
        session.score(EMPTY)
        assert [call.rows for call in forward_log] == [5, 3, 1]

    @pytest.mark.parametrize("m", [M, G], ids=["llama", "gpt2"])
    def test_rewind_to_anywhere_and_go_on(self, m) -> None:
        """B17, B18: nothing stale, nothing lost, twice is once; rewound tokens leave no trace."""
        for n in range(len(PROMPT) + 4):
            session = begun(m)
            session.score(tree([1, 1, 2, 3], [ROOT, 0, ROOT, 2]))
            session.commit([2, 3], 8)
            session.rewind(n)
            session.rewind(n)
            assert session.text == [*PROMPT, 2, 3, 8][:n]
            session.extend([6, 0, 6])
            close(session.score(TokenTree.chain([1])).logits, m.logits([*session.text, 1])[-2:])
            same_cache(session)
        with pytest.raises(ValueError, match="cannot rewind"):
            session.rewind(len(session) + 1)
        with pytest.raises(ValueError, match="cannot rewind"):
            session.rewind(-1)

    def test_a_long_text_outgrows_the_first_cache_and_the_slab(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tinyspec.lm.session.PREFILL_CHUNK", 7)
        text = [i * i % V for i in range(60)]
        session = M.session()
        assert session.extend(text[:50], hidden_layers=(1,)).hidden.shape == (1, 49, D)
        session.append(text[50:])
        close(session.score(EMPTY).logits[0], M.logits(text)[-1])
        session.append([1, 2])
        session.score(TokenTree.chain([3, 4]))
        session.commit([0, 1], None)
        same_cache(session)

    def test_a_fork_is_independent_both_ways(self) -> None:
        session = begun(M)
        session.score(TokenTree.chain([1, 2]))
        twin = session.fork()
        session.commit([0, 1], 3)
        twin.extend([7, 7])
        session.rewind(8)
        close(session.score(EMPTY).logits[0], M.logits([*PROMPT, 1, 2])[-1])
        close(twin.score(TokenTree.chain([5])).logits[1], M.logits([*PROMPT, 7, 7, 5])[-1])
        same_cache(session)
        same_cache(twin)

    def test_a_fork_keeps_the_logits_of_the_newest_token(self) -> None:
        forward_log: list[ForwardRecord] = []
        session = begun(M, forward_log)
        row = session.score(EMPTY).logits
        calls = len(forward_log)
        close(session.fork().score(EMPTY).logits, row)
        assert len(forward_log) == calls

    def test_bad_input_is_an_error_that_names_it(self) -> None:
        session = M.session()
        for call in (lambda: session.score(EMPTY), lambda: session.commit((), 1)):
            with pytest.raises(TinyspecError, match="no text yet"):
                call()
        session.extend([1])
        for call in (
            lambda: session.extend([V]),
            lambda: session.append([-1]),
            lambda: session.commit((), V),
            lambda: session.score(TokenTree.chain([V])),
        ):
            with pytest.raises(TinyspecError, match="vocabulary"):
                call()
        with pytest.raises(TinyspecError, match="out of range"):
            session.run_to_layer(EMPTY, L + 1)
        with pytest.raises(ValueError, match="hidden layer"):
            session.run_to_layer(EMPTY, 1, hidden_layers=(2,))
        assert session.text == [1]

    def test_the_context_ends_where_it_says(self) -> None:
        limit = LLAMA.max_positions
        session = M.session()
        with pytest.raises(TinyspecError, match="do not fit into the context"):
            session.extend([1] * (limit + 1))
        session.extend([1] * (limit - 1))
        session.score(TokenTree.chain([2]))
        with pytest.raises(TinyspecError, match="beyond the context"):
            session.score(TokenTree.chain([2, 2]))
        session.score(TokenTree.chain([2]))
        with pytest.raises(TinyspecError, match="do not fit"):
            session.commit([0], 1)
        session.commit([0], None)
        close(session.score(EMPTY).logits[0], M.logits([1] * (limit - 1) + [2])[-1])

    def test_an_ended_session_begins_anew(self) -> None:
        session = begun(M)
        session.score(TokenTree.chain([1]))
        session.end()
        assert len(session) == 0
        session.extend([4, 2])
        close(session.score(EMPTY).logits[0], M.logits([4, 2])[-1])
