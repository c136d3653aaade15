"""A view is the same weights under another plan; what two plans share is computed once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.oracle import Oracle, Token
from tests.lm.small import GPT2, LLAMA, model
from tinyspec.errors import TinyspecError
from tinyspec.lm import forward
from tinyspec.lm.forward import ForwardRecord, Plan, VisibleSet
from tinyspec.lm.session import Session
from tinyspec.tree import ROOT, TokenTree

DEEP = replace(LLAMA, n_layers=4)
MODELS = {"llama": model(DEEP), "gpt2": model(replace(GPT2, n_layers=4, n_kv_heads=2))}
M = MODELS["llama"]
L, V = DEEP.n_layers, DEEP.vocab_size
EMPTY = TokenTree()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
N = len(PROMPT)
WINDOW = VisibleSet.for_all_layers((0, 1, 6, 7), N, L, 2)  # two sinks and a window, as StreamingLLM
RAGGED = VisibleSet((None, (frozenset({0}), None), (frozenset({2, 5}), frozenset()), None), N - 2)
PLANS = {
    "exit": Plan(last=2),
    "first layer": Plan(last=1),
    "nothing": Plan(last=0),
    "whole": Plan(),
    "skip attention": Plan(skip=frozenset({4})),
    "skip mlp": Plan(skip=frozenset({3})),
    "skip at both ends": Plan(skip=frozenset({0, 7})),
    "skip layers": Plan(skip=frozenset({2, 3, 4, 5})),
    "skip and exit": Plan(last=3, skip=frozenset({1})),
    "window": Plan(visible=WINDOW),
    "per layer and head": Plan(visible=RAGGED),
    "window, skip and exit": Plan(last=3, skip=frozenset({3}), visible=WINDOW),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def tree(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    return TokenTree(tokens, parents, (None,) * len(tokens), (False,) * len(tokens))


BUSH = tree([1, 1, 2, 3, 0], [ROOT, ROOT, 0, 2, ROOT])


def begun(m=M, forward_log: list[ForwardRecord] | None = None) -> Session:
    session = m.session(forward_log)
    session.extend(PROMPT)
    return session


@cache
def known(m, text: tuple[int, ...]) -> list[Token]:
    return Oracle(m).text(text)


def rows(m, text: Sequence[int], trunk: Sequence[int], t: TokenTree, plan: Plan) -> np.ndarray:
    """Return the logits by the oracle: the past under the whole model, then the rest under the
    plan.
    """
    oracle = Oracle(m)
    past = known(m, tuple(text[:-1]))
    past = oracle.text([text[-1], *trunk], plan, past)
    out, paths = [past[-1].logits], []
    for token, up in zip(t.tokens, t.parents, strict=True):
        paths.append(oracle.text([token], plan, past if up == ROOT else paths[up]))
        out.append(paths[-1][-1].logits)
    return np.array(out)


def close(a: torch.Tensor, b: np.ndarray | torch.Tensor) -> None:
    np.testing.assert_allclose(a.numpy(), np.asarray(b), rtol=0, atol=1e-10)


@plans
@pytest.mark.parametrize("m", MODELS.values(), ids=MODELS.keys())
def test_a_view_says_what_the_plan_says(m, plan: Plan) -> None:
    view = begun(m).view(plan)
    close(view.score(BUSH).logits, rows(m, PROMPT, [], BUSH, plan))
    view.extend([4, 4])
    close(view.score(BUSH).logits, rows(m, PROMPT, [4, 4], BUSH, plan))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("visible", [WINDOW, RAGGED], ids=["window", "per layer and head"])
def test_hidden_keys_and_values_are_not_read(visible: VisibleSet, dtype: torch.dtype) -> None:
    """They may be no numbers: a mask would spread them. float64 runs in torch."""
    view = begun(M.to(dtype=dtype)).view(Plan(visible=visible))
    expected = view.score(BUSH).logits
    view = begun(M.to(dtype=dtype)).view(Plan(visible=visible))
    for layer, heads in enumerate(visible.layers):
        for head, chosen in enumerate(heads or ()):
            hidden = [at for at in range(visible.since) if chosen is not None and at not in chosen]
            view.session.cache.store[layer, :, head, hidden] = torch.nan
    assert torch.equal(view.score(BUSH).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_visible_set_is_sorted_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAGGED has two layers of two heads. Neither rows nor passes sort their positions again."""
    calls = []
    monkeypatch.setattr(
        forward, "sorted", lambda values: calls.append(values) or sorted(values), raising=False
    )
    visible = replace(RAGGED)  # another object, never sorted
    view = begun(M.to(dtype=dtype)).view(Plan(visible=visible))
    for token in (1, 2, 3):
        view.score(TokenTree.chain([token, token]))
    assert len(calls) == 4


@plans
@pytest.mark.parametrize("m", MODELS.values(), ids=MODELS.keys())
def test_the_whole_model_is_not_disturbed_by_a_view(m, plan: Plan) -> None:
    session = begun(m)
    view = session.view(plan)
    for t in (EMPTY, BUSH):
        view.score(t)
        close(session.score(BUSH).logits, rows(m, PROMPT, [], BUSH, Plan()))
    view.score(BUSH)
    session.score(BUSH)
    view.score(BUSH)  # the newest token stands under the plan now
    session.commit([0, 2], 7)
    text = [*PROMPT, 1, 2, 7]
    close(session.score(BUSH).logits, rows(m, text, [], BUSH, Plan()))
    fresh = m.session()
    fresh.extend(text)
    close(
        session.cache.store[:, :, :, : len(text) - 1], fresh.cache.store[:, :, :, : len(text) - 1]
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(list(PLANS.values())), min_size=2, max_size=6))
def test_plans_may_take_turns_on_the_same_nodes(turns: list[Plan]) -> None:
    """Each leaves states that the next may only use where the two agree."""
    session = begun()
    for plan in turns:
        close(session.view(plan).score(BUSH).logits, rows(M, PROMPT, [], BUSH, plan))


def cost(first: Plan, then: Plan) -> float:
    """Return how many layers a position runs under `then` after it was run under `first`."""
    forward_log: list[ForwardRecord] = []
    session = begun(forward_log=forward_log)
    session.view(first).score(TokenTree.chain([1, 2]))
    before = len(forward_log)
    if then == Plan():
        session.score(TokenTree.chain([1, 2]))
    else:
        session.view(then).score(TokenTree.chain([1, 2]))
    assert [call.rows for call in forward_log[before:]] == [3]
    return forward_log[-1].row_layers / 3


@pytest.mark.parametrize(
    ("draft", "verify"),
    [
        (Plan(last=1), 3),  # LayerSkip: the layers above the exit
        (Plan(last=3), 1),
        (
            Plan(skip=frozenset({4, 5})),
            2,
        ),  # Draft & Verify: from the first sublayer that was skipped
        (Plan(skip=frozenset({5})), 1.5),
        (Plan(skip=frozenset({0})), 4),
        (Plan(visible=WINDOW), 4),  # nothing above the first layer that sees less
        (Plan(visible=RAGGED), 3),
        (Plan(last=3, skip=frozenset({3})), 2.5),
    ],
)
def test_verification_continues_where_the_plans_part(draft: Plan, verify: float) -> None:
    assert cost(draft, Plan()) == verify


def test_skipped_sublayers_are_not_paid() -> None:
    assert cost(Plan(last=0), Plan(skip=frozenset({1, 4, 6}))) == 2.5


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(list(PLANS.values())), st.data())
def test_a_loop_on_a_view_drafts_while_the_session_verifies(
    plan: Plan, data: st.DataObject
) -> None:
    """Both are plain targets to their loops: score, commit, rewind, extend."""
    session = begun()
    view = session.view(plan)
    text = list(PROMPT)
    pick = st.integers(0, 3)
    for _ in range(3):
        for _ in range(data.draw(st.integers(1, 3))):
            trunk = view.text[len(text) :]
            t = data.draw(st.sampled_from([EMPTY, BUSH, TokenTree.chain([2])]))
            close(view.score(t).logits, rows(M, text, trunk, t, plan))
            path = t.path(data.draw(st.integers(ROOT, len(t.tokens) - 1)))
            view.commit(path, data.draw(pick))
        if data.draw(st.booleans()):
            view.rewind(len(view) - 1)
            view.extend([data.draw(pick)])
        trunk = view.text[len(text) :]
        scores = session.score(TokenTree.chain(trunk))
        close(scores.logits, rows(M, text, [], TokenTree.chain(trunk), Plan()))
        accepted = data.draw(st.integers(0, len(trunk)))
        session.commit(range(accepted), data.draw(pick))
        text = session.text
        agrees = accepted < len(trunk) and trunk[accepted] == text[-1]
        assert view.text == text + (trunk[accepted + 1 :] if agrees else [])
        view.rewind(len(text))


def test_a_view_may_look_between_score_and_commit() -> None:
    session = begun()
    view = session.view(Plan(last=1))
    session.score(TokenTree.chain([5, 6]))
    view.score(TokenTree.chain([8]))
    session.commit([0, 1], 7)
    assert session.text == [*PROMPT, 5, 6, 7]


def test_a_view_is_read_from_the_text_it_was_rewound_into() -> None:
    session = begun()
    view = session.view(Plan(last=2))
    view.extend([1, 2])
    view.rewind(3)
    assert (view.text, len(view)) == (PROMPT[:3], 3)
    with pytest.raises(ValueError, match="committed text"):
        view.extend([0])
    with pytest.raises(ValueError, match="inside"):
        view.score(EMPTY)
    view.extend([*PROMPT[3:], 8])
    close(view.score(EMPTY).logits, rows(M, PROMPT, [8], EMPTY, Plan(last=2)))
    view.rewind(4)
    session.rewind(4)
    assert view.text == PROMPT[:4]
    view.extend([1])
    assert view.text == [*PROMPT[:4], 1]
    view.end()
    assert view.text == session.text


def test_a_trunk_whose_beginning_was_committed_and_taken_back_is_gone() -> None:
    session = begun()
    view = session.view(Plan(last=1))
    view.extend([1, 2])
    session.extend([1])
    session.rewind(N)  # nobody looked at the view in between
    assert view.text == PROMPT
    close(view.score(EMPTY).logits, rows(M, PROMPT, [], EMPTY, Plan(last=1)))


def test_a_view_rejects_what_a_session_rejects() -> None:
    session = M.session()
    view = session.view(Plan(last=1))
    for call in (lambda: view.score(EMPTY), lambda: view.extend([1])):
        with pytest.raises(TinyspecError, match="no text yet"):
            call()
    session.extend(PROMPT)
    with pytest.raises(TinyspecError, match="vocabulary"):
        view.extend([V])
    with pytest.raises(ValueError, match="cannot rewind"):
        view.rewind(N + 1)
    with pytest.raises(ValueError, match="hidden layer"):
        view.score(EMPTY, hidden_layers=(2,))
    view.score(tree([1, 2], [ROOT, ROOT]))
    with pytest.raises(ValueError, match="not a path"):
        view.commit([0, 1], None)
    view.extend([1] * (DEEP.max_positions - N))
    with pytest.raises(TinyspecError, match="context"):
        view.extend([1])


def test_appended_tokens_are_run_by_the_whole_model_before_a_view_looks() -> None:
    session = begun()
    session.append([8, 8])
    for plan in PLANS.values():
        view = session.fork().view(plan)
        close(view.score(BUSH).logits, rows(M, [*PROMPT, 8, 8], [], BUSH, plan))


@plans
def test_what_a_view_computed_does_not_outlive_a_commit_of_what_it_looked_at(plan: Plan) -> None:
    """Its past is then that of the whole model, and a position has the same logits whether it was
    drafted before or not.
    """
    session = begun()
    view = session.view(plan)
    view.score(BUSH)
    session.extend([1, 2])
    close(
        view.score(TokenTree.chain([3])).logits,
        rows(M, [*PROMPT, 1, 2], [], TokenTree.chain([3]), plan),
    )


def test_a_rewound_text_may_be_shorter_than_what_the_visible_set_was_chosen_for() -> None:
    """A token always sees itself, also where the set names none of its positions."""
    session = begun()
    session.rewind(4)
    plan = Plan(visible=RAGGED)
    close(session.view(plan).score(BUSH).logits, rows(M, PROMPT[:4], [], BUSH, plan))


def test_states_are_shown_under_the_plan() -> None:
    view = begun().view(Plan(skip=frozenset({2})))
    oracle = Oracle(M)
    past = oracle.text(PROMPT[:-1])
    done = oracle.text([PROMPT[-1], 1], Plan(skip=frozenset({2})), past)[-2:]
    shown = view.score(TokenTree.chain([1]), hidden_layers=(1, 2, L)).hidden
    close(
        shown,
        np.array([[d.states[1] for d in done], [d.states[2] for d in done], [d.top for d in done]]),
    )
