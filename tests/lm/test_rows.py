"""A text has the logits of one-token steps, bit for bit, whatever led to it.

On a CPU, in float32 and bfloat16. So what is lossless in exact arithmetic is lossless in these, and
a text in a batch is the text alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.small import GPT2, LLAMA, QWEN3, model, tree
from tinyspec import _core
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardBatch, Plan, VisibleSet
from tinyspec.lm.model import Model
from tinyspec.lm.session import Session
from tinyspec.tree import ROOT, TokenTree

pytestmark = pytest.mark.skipif(
    _core.compute is None, reason="NO COMPILED TRANSFORMER: rows have no fixed bits"
)
CONFIGS = [
    LLAMA,
    GPT2,
    QWEN3,
    replace(LLAMA, n_kv_heads=1, head_dim=6),
    replace(GPT2, n_kv_heads=2, d_ff=50),
]
MODELS = [
    model(config, dtype=dtype) for config in CONFIGS for dtype in (torch.float32, torch.bfloat16)
]
L, V = LLAMA.n_layers, LLAMA.vocab_size
EMPTY = TokenTree()
tokens = st.integers(0, 3)
texts = st.lists(tokens, min_size=1, max_size=6)


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> TokenTree:
    n = draw(st.integers(0, most))
    return tree(
        [draw(tokens) for _ in range(n)], [draw(st.integers(ROOT, i - 1)) for i in range(n)]
    )


def plans(config: Config) -> list[Plan]:
    kv = config.n_kv_heads
    by_head = tuple(frozenset({i % 2}) for i in range(kv))
    return [
        Plan(last=1),
        Plan(skip=frozenset({1, 4})),
        Plan(visible=VisibleSet.for_all_layers((0, 2), 4, L, kv)),
        Plan(visible=VisibleSet((None, by_head, (frozenset(),) * kv), 3)),
    ]


def stepped(m: Model, text: list[int]) -> Session:
    """Return a session that has read a text one token at a time, as a decoder would: score,
    commit.
    """
    session = m.session()
    session.extend(text[:1])
    for token in text[1:]:
        session.score(EMPTY)
        session.commit((), token)
    session.score(EMPTY)
    return session


def row(m: Model, text: list[int]) -> torch.Tensor:
    return stepped(m, text).score(EMPTY).logits[0]


def lawful(session: Session, t: TokenTree) -> None:
    """Return the logits of a tree and of the text committed by then, as one-token steps leave
    them.
    """
    m, text = session.model, session.text
    logits = session.score(t).logits
    for node in range(ROOT, len(t.tokens)):
        torch.testing.assert_close(
            logits[node + 1], row(m, [*text, *t.tokens_on(t.path(node))]), rtol=0, atol=0
        )
    n, fresh = len(text), stepped(m, text)
    torch.testing.assert_close(
        session.cache.store[:, :, :, :n], fresh.cache.store[:, :, :, :n], rtol=0, atol=0
    )


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(MODELS), st.data())
@pytest.mark.slow
def test_every_way_to_a_text_gives_the_logits_of_one_token_steps(
    m: Model, data: st.DataObject
) -> None:
    """Texts in any pieces, trees kept and dropped, layers run later, views between, texts taken
    back, forks.
    """
    session = m.session()
    session.extend(data.draw(texts))
    for way in data.draw(
        st.lists(st.sampled_from(["extend", "tree", "half", "view", "rewind", "fork"]), max_size=5)
    ):
        t = data.draw(trees())
        if way == "extend":
            session.extend(data.draw(texts))
        elif way == "tree":
            session.score(t)
            path = t.path(data.draw(st.integers(ROOT, len(t.tokens) - 1)))
            session.commit(path, data.draw(tokens))
        elif way == "half":
            session.run_to_layer(t, data.draw(st.integers(1, L)))
            session.commit((), data.draw(tokens))
        elif way == "view":
            session.view(data.draw(st.sampled_from(plans(m.config)))).score(t)
        elif way == "rewind":
            session.rewind(data.draw(st.integers(1, len(session))))
        else:
            session = session.fork()
    lawful(session, data.draw(trees()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), texts, trees(), st.integers(0, 3))
def test_logits_under_a_plan_are_those_of_their_paths(
    m: Model, text: list[int], t: TokenTree, which: int
) -> None:
    plan = plans(m.config)[which]

    def read() -> Session:
        session = m.session()
        session.extend(text)
        return session

    together = read().view(plan).score(t).logits
    for node in range(ROOT, len(t.tokens)):
        path = t.tokens_on(t.path(node))
        alone = read().view(plan)
        for at in range(len(path) + 1):
            last = alone.score(TokenTree.chain(path[:at])).logits[-1]
        torch.testing.assert_close(together[node + 1], last, rtol=0, atol=0)


@pytest.mark.parametrize("m", MODELS[:4], ids=["llama", "llama bfloat16", "gpt2", "gpt2 bfloat16"])
def test_copied_rows_beside_others_leave_what_they_leave_alone(m: Model) -> None:
    """CALM's fill, of one token after the other and of all at once, on one thread and on three."""

    def filled(groups: list[list[int]], threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        session = m.session()
        session.extend([3, 1, 2])
        for token in (0, 1, 2):
            session.run_to_layer(EMPTY, 1, head=True)
            session.commit((), token)
        for group in groups:
            session.fill_cache("copy", group)
        torch.set_num_threads(before)
        return session.cache.store[:, :, :, :5]

    one = filled([[2], [3], [4]], 1)
    assert one[-1].abs().min() > 0
    for groups in ([[2, 3, 4]], [[4], [2, 3]]):
        assert torch.equal(one, filled(groups, 1))
        assert torch.equal(one, filled(groups, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.lists(st.tuples(texts, trees(), st.integers(0, 4)), min_size=2, max_size=4),
)
def test_a_feed_is_the_same_in_a_batch(
    m: Model, requests: list[tuple[list[int], TokenTree, int]]
) -> None:
    """Other lengths, trees, plans and hidden layers beside a batch change no bit of it."""
    held: list[ForwardBatch] = []

    def hold(feeds):  # type: ignore[no-untyped-def]
        held.extend(feeds)
        raise StopIteration

    def feed(text: list[int], t: TokenTree, which: int) -> ForwardBatch:
        session = m.session()
        session.extend(text)
        session.forward = hold
        with pytest.raises(StopIteration):
            (session.view(plans(m.config)[which]) if which < 4 else session).score(
                t, hidden_layers=(0, 1)
            )
        return held.pop()

    together = m.forward([feed(*request) for request in requests])
    for request, beside in zip(requests, together, strict=True):
        alone = m.forward([feed(*request)])[0]
        torch.testing.assert_close(alone.logits, beside.logits, rtol=0, atol=0)
        torch.testing.assert_close(alone.hidden, beside.hidden, rtol=0, atol=0)


@contextmanager
def patched(target: object, name: str, new: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, new)
        yield


def test_wrong_paths_fall() -> None:
    """With keys in the order of the slots, or with a sibling's slot among them, a tree's logits are
    no longer those of its paths.
    """
    right = ForwardBatch.visible_slots

    def by_slot(feed, layer, rows):  # type: ignore[no-untyped-def]
        heads, seen = right(feed, layer, rows)
        return heads, [(prefix, tuple(sorted(extra, reverse=True))) for prefix, extra in seen]

    def crowded(feed, layer, rows):  # type: ignore[no-untyped-def]
        heads, seen = right(feed, layer, rows)
        return heads, [(prefix, (extra[0], *extra) if extra else extra) for prefix, extra in seen]

    def shorter(feed, layer, rows):  # type: ignore[no-untyped-def]
        heads, seen = right(feed, layer, rows)
        return heads, [(prefix, extra[:1] if len(extra) > 2 else extra) for prefix, extra in seen]

    t = tree([1, 2, 3, 0, 1, 2, 3], [ROOT, ROOT, 0, 2, 3, 4, 1])
    for m in MODELS[:4]:
        assert _core.compute is not None
        rounds = (
            m.dtype == torch.bfloat16 and _core.compute.kernel() == "avx512bf16"
        )  # swallows another order of sums
        for wrong in (crowded, shorter) if rounds else (by_slot, crowded, shorter):
            session = m.session()
            session.extend([1, 2])
            with patched(ForwardBatch, "visible_slots", wrong):
                logits = session.score(t).logits
            assert not all(
                torch.equal(logits[node + 1], row(m, [1, 2, *t.tokens_on(t.path(node))]))
                for node in range(ROOT, 7)
            ), wrong.__name__
