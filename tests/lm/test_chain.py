"""The short way through a session leaves what the long one would leave, to the bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.small import GPT2, LLAMA, PROMPT, QWEN3, begun, close, forced, model, tree
from tests.lm.test_session import trees
from tinyspec import _core
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.lm.scheduler import Scheduler
from tinyspec.lm.session import Session
from tinyspec.tree import ROOT, TokenTree

M, G = model(LLAMA), model(GPT2)
V = LLAMA.vocab_size
EMPTY = TokenTree()
SPOKEN = replace(LLAMA, head_ids=(0, 1, 2, 5, 7, 9), tied=False)
PACKED = [
    model(config, dtype=dtype)
    for config in (LLAMA, GPT2, QWEN3)
    for dtype in (torch.float32, torch.bfloat16)
]
quick = settings(max_examples=40, deadline=None, derandomize=True)
compiled = pytest.mark.skipif(_core.compute is None, reason="nothing was compiled")


def test_plain_steps_chains_and_their_verification_take_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = begun(M)
    with monkeypatch.context() as patch:
        patch.delattr(Session, "score_tree")
        session.score(EMPTY)
        session.commit((), 2)
        for n in range(1, 5):  # a draft model's chain, a token at a time
            grown = session.score(TokenTree.chain([1, 2, 3, 4][:n]))
        session.append([1, 2, 0])  # of which two were accepted
        session.score(TokenTree.chain([5, 6, 7]))  # a chain that another model drew, in one pass
        session.commit((0, 1, 2), 8)
        session.append([9])
        last = session.score(EMPTY)
    close(grown.logits[-1], forced(M, [*PROMPT, 2, 1, 2, 3, 4]))
    close(last.logits[0], forced(M, [*PROMPT, 2, 1, 2, 0, 5, 6, 7, 8, 9]))


@quick
@given(st.data(), st.sampled_from([M, G]))
def test_the_short_way_leaves_what_the_long_one_leaves(data: st.DataObject, m) -> None:
    forward_logs: tuple[list[ForwardRecord], list[ForwardRecord]] = ([], [])
    short, long = (begun(m, forward_log) for forward_log in forward_logs)
    for _ in range(data.draw(st.integers(1, 6))):
        names = data.draw(st.lists(st.integers(0, 2), max_size=4))
        t = data.draw(trees(4)) if data.draw(st.integers(0, 3)) == 0 else TokenTree.chain(names)
        a, (b, long.scored) = short.score(t), long.score_tree(t, (), long.plan)
        assert torch.equal(a.logits, b.logits)
        assert (a.layers, a.hidden.shape) == (b.layers, b.hidden.shape)
        kept = t.path(data.draw(st.integers(ROOT, len(t.tokens) - 1)))
        move = data.draw(st.sampled_from(["commit", "append", "rewind", "stay"]))
        for session in (short, long):
            if move == "commit":
                session.commit(kept, 1)
            elif move == "append":
                session.append([*t.tokens_on(kept), 2, 0])
            elif move == "rewind":
                session.rewind(max(len(session) - 2, 1))
    assert forward_logs[0] == forward_logs[1]
    for one, other in zip(short.committed, long.committed, strict=True):
        for x, y in zip((one, *one.descendants()), (other, *other.descendants()), strict=True):
            assert (x.token, x.slot, x.sublayers_done, x.exact, x.logits_at) == (
                y.token,
                y.slot,
                y.sublayers_done,
                y.exact,
                y.logits_at,
            )
            assert x.states.keys() == y.states.keys()
            assert (x.logits is None) == (y.logits is None)
    held = max(node.slot for node in (short.committed[-1], *short.committed[-1].descendants())) + 1
    assert (short.cache.present[:held] == long.cache.present[:held]).all()
    assert torch.equal(short.cache.store[:, :, :, :held], long.cache.store[:, :, :, :held])


def test_what_is_special_goes_the_long_way() -> None:
    session = begun(M)
    for odd in (tree([1, 2], [ROOT, ROOT]), tree([1], [ROOT], [True])):
        assert session._match_chain(odd) is None
    session.score(tree([1, 2], [ROOT, ROOT]))
    assert session._match_chain(TokenTree.chain([3])) is None, (
        "after a sibling no slot is its position"
    )
    assert session._match_chain(TokenTree.chain([1, 3])) is None, (
        "nor is it where a sibling hangs higher up"
    )
    session.score(TokenTree.chain([1, 3]))
    close(session.score(tree([2, 5], [ROOT, 0])).logits[-1], forced(M, [*PROMPT, 2, 5]))
    session = begun(M)
    session.run_to_layer(TokenTree.chain([1]), 1)
    assert session._match_chain(TokenTree.chain([1])) is None, (
        "what was begun goes on from where it is"
    )
    assert begun(M)._match_chain(TokenTree.chain([V])) is None
    assert begun(M)._match_chain(TokenTree.chain([1] * 64)) is None
    with pytest.raises(TinyspecError, match="no text yet"):
        M.session().score(EMPTY)


# -------------------------------------------------------------- draft tokens that choose each other


def best(rows: list[Any], most: int) -> Callable[[Any], int | None]:
    """Choose the likeliest token at each position, `most` times."""

    def choose(row: Any) -> int | None:
        rows.append(np.array(row))
        return int(row.argmax()) if len(rows) < most else None

    return choose


def scored(session: Session, most: int) -> list[Any]:
    """The same, by trees."""
    rows, t = list[Any](), EMPTY
    for _ in range(most):
        rows.append(session.score(t).logits[-1].float().numpy())
        t = TokenTree.chain((*t.tokens, int(rows[-1].argmax())))
    return rows


@compiled
@quick
@given(
    st.sampled_from(PACKED),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_draft_tokens_that_choose_each_other_are_those_of_trees(
    m, rounds: list[tuple[int, int]]
) -> None:
    forward_logs: tuple[list[ForwardRecord], list[ForwardRecord]] = ([], [])
    one, other = (begun(m, forward_log) for forward_log in forward_logs)
    for most, kept in rounds:
        rows = list[Any]()
        if not one.draft_chain(most, best(rows, most)):
            assert one.committed[-1].children, (
                "what came instead is what was drafted, and draft tokens hang from it"
            )
            rows = scored(one, most)
        expected = scored(other, most)
        assert all((a == b).all() for a, b in zip(rows, expected, strict=True))
        chain = [int(row.argmax()) for row in rows][:kept]
        for session in (one, other):
            session.append([*chain, 3])  # the accepted ones, and the token that replaced the next
        for x, y in zip(one.committed, other.committed, strict=True):
            assert (x.token, x.slot, x.sublayers_done, x.exact, x.logits_at, x.logits is None) == (
                y.token, y.slot, y.sublayers_done, y.exact, y.logits_at, y.logits is None,
            )  # fmt: skip
            assert x.states.keys() == y.states.keys()
        n = len(one)
        assert (one.cache.present[:n] == other.cache.present[:n]).all()
    assert forward_logs[0] == forward_logs[1]
    close(one.score(EMPTY).logits.double(), other.score(EMPTY).logits.double())


@compiled
def test_a_drafted_chain_can_be_scored_committed_and_continued() -> None:
    m = PACKED[0]
    forward_log: list[ForwardRecord] = []
    session, rows = begun(m, forward_log), list[Any]()
    assert session.draft_chain(3, best(rows, 3))
    chain = [int(row.argmax()) for row in rows]
    before = len(forward_log)
    again = session.score(TokenTree.chain(chain[:2]), hidden_layers=(LLAMA.n_layers,))
    assert (again.logits.numpy() == np.array(rows)).all()
    assert [call.row_layers for call in forward_log[before:]] == [0.0], (
        "what was run is continued from its last state"
    )
    session.commit((0,), chain[1])
    assert [node.token for node in session.committed[-2:]] == chain[:2]


@compiled
def test_a_draft_with_its_own_words_says_them_and_no_others() -> None:
    m = model(SPOKEN, dtype=torch.float32)
    session, rows = begun(m), list[Any]()
    assert session.draft_chain(2, best(rows, 2))
    assert all(set(np.flatnonzero(np.isfinite(row))) == set(SPOKEN.head_ids) for row in rows)


@compiled
def test_none_is_chosen_where_something_is_special() -> None:
    def never(row: Any) -> int | None:
        raise AssertionError("asked")

    m = PACKED[0]
    hanging, begun_at = begun(m), begun(m)
    hanging.score(TokenTree.chain([1]))
    begun_at.run_to_layer(EMPTY, 1)
    shut = m.session(scheduler=Scheduler(1))
    shut.extend(PROMPT)
    part = begun(m)
    part.set_plan(Plan(last=1))
    for session, most in (
        (hanging, 2),
        (begun_at, 2),
        (shut, 2),
        (part, 2),
        (begun(m), 99),
    ):
        assert not session.draft_chain(most, never)


@pytest.mark.parametrize("m", [M, G], ids=["llama", "gpt2"])
def test_without_the_compiled_engine_a_chain_runs_one_position_a_pass(m: Any) -> None:
    forward_log: list[ForwardRecord] = []
    session, rows = begun(m, forward_log), list[Any]()
    before = len(forward_log)
    assert session.draft_chain(4, best(rows, 4))
    text = list(PROMPT)
    for row in rows:
        close(torch.as_tensor(row), forced(m, text))
        text.append(int(row.argmax()))
    assert [call.rows for call in forward_log[before:]] == [1] * 4
    session.append(text[len(PROMPT) :])
    close(session.score(EMPTY).logits[0], forced(m, text))


@compiled
def test_a_choice_that_fails_leaves_the_session_as_it_was() -> None:
    session = begun(PACKED[0])
    rows = list[Any]()

    def fails(row: Any) -> int | None:
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt
        return 1

    with pytest.raises(KeyboardInterrupt):
        session.draft_chain(3, fails)
    assert not session.committed[-1].children
    close(
        session.score(TokenTree.chain([2])).logits[-1].double(),
        begun(PACKED[0]).score(TokenTree.chain([2])).logits[-1].double(),
    )
